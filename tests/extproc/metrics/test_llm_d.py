# SPDX-License-Identifier: Apache-2.0
"""What llm-d's KEDA guides and dashboards query has the same value under llm-d's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.metrics.registry import Metrics
from tests.extproc.core.test_queue import outcome, scene_of

if TYPE_CHECKING:
    from tests.extproc.scenes import Scene

QUEUE = {"inference_pool": "llama", "priority": "0", "fairness_id": "", "model_name": "m", "target_model_name": "m"}
REQUEST = {"model_name": "m", "target_model_name": "m", "fairness_id": "", "priority": "0"}


class Page:
    """The metrics of a scene, by llm-d's names."""

    def __init__(self, scene: Scene) -> None:
        core = scene.core
        self.now_s = 0.0
        self.metrics = Metrics(
            lambda: list(core.pools.values()),
            lambda: 0.0,
            lambda: self.now_s,
            gates=lambda: core.admission.gates,
            has_llm_d_names=True,
        )

    def value(self, series: str, /, **labels: str) -> float | None:
        found: float | None = self.metrics.registry.get_sample_value(series, labels)
        return found


def test_queue_saturation_and_running_requests_are_those_of_now() -> None:
    scene = scene_of()
    page = Page(scene)
    assert page.value("llm_d_epp_flow_control_pool_saturation", inference_pool="llama", stage="effective") == 0
    first, _ = scene.sent(), scene.held()
    for prefix in ("llm_d_epp", "inference_extension"):
        assert page.value(f"{prefix}_flow_control_queue_size", **QUEUE) == 1
        saturation = page.value(f"{prefix}_flow_control_pool_saturation", inference_pool="llama", stage="effective")
        assert saturation is not None
        assert saturation >= 1
    assert page.value("llm_d_epp_request_running", **REQUEST) == 1
    scene.core.on_stream_closed(first.ticket, 1.0)
    (second,) = scene.release(1.0)
    scene.core.on_stream_closed(second.ticket, 2.0)
    # nothing came since, and an autoscaler must see that
    page.now_s = 3.0
    assert page.value("llm_d_epp_flow_control_pool_saturation", inference_pool="llama", stage="effective") == 0
    assert page.value("attache_saturation", server="default/llama") == 0
    assert page.value("llm_d_epp_flow_control_queue_size", **QUEUE) == 0
    assert page.value("llm_d_epp_request_running", **REQUEST) == 0


def test_requests_are_counted_and_measured() -> None:
    scene = scene_of()
    page = Page(scene)
    sent = scene.sent()
    page.metrics.count_effect(sent)
    scene.core.on_stream_closed(sent.ticket, 1.0)
    for effect in scene.core.on_outcome(outcome(sent.ticket), 1.0):
        page.metrics.count_effect(effect)
    for prefix in ("llm_d_epp", "inference_objective"):
        assert page.value(f"{prefix}_request_total", **REQUEST) == 1
        assert page.value(f"{prefix}_request_duration_seconds_sum", **REQUEST) == 1.0
        assert page.value(f"{prefix}_request_ttft_seconds_sum", **REQUEST) == 0.5
        assert page.value(f"{prefix}_request_input_tokens_sum", **REQUEST) == 150
        assert page.value(f"{prefix}_request_output_tokens_sum", **REQUEST) == 7


def test_the_pool_has_its_averages() -> None:
    scene = scene_of()
    page = Page(scene)
    assert page.value("llm_d_epp_ready_endpoints", name="llama") == 1
    assert page.value("inference_pool_average_queue_size", name="llama") == 0
    labels = {"name": "llama", "model_server_endpoint": "10.0.0.1:8000"}
    assert page.value("inference_pool_per_endpoint_queue_size", **labels) == 0


def test_without_the_option_there_is_no_such_name() -> None:
    registry = Metrics(list, lambda: 0.0, lambda: 0.0).registry
    assert not [piece for piece in registry.pieces() if "llm_d_" in piece or "inference_" in piece]
