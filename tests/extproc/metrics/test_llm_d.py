# SPDX-License-Identifier: Apache-2.0
"""What llm-d's KEDA guides and dashboards query has the same value under llm-d's names."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.core.effects import Effect, RequestRefused
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import (
    BadRequest,
    EngineStarting,
    NoEndpoint,
    QueueFull,
    QueueTimeout,
    Refusal,
    Shed,
)
from tests.extproc.core.test_flow_control import FLOW_CONTROL, ONE, one_engine, outcome, scene_of
from tests.extproc.scenes import ONE_AT_A_TIME, configuration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.extproc.scenes import Scene

DOCS = Path(__file__).parents[3] / "docs" / "migrating.md"
# Recorded from the source of llm-d's picker, which has the repository and the commit. ``newer``: the name of a family
# of today, of one that llm-d writes for older dashboards.
RECORDED = json.loads(Path(__file__).with_name("llm_d_metrics.json").read_bytes())["families"]
MODELS = {"model_name": "m", "target_model_name": "m"}
QUEUE = {"inference_pool": "llama", "priority": "0", "fairness_id": "", **MODELS}
REQUEST = {**MODELS, "fairness_id": "", "priority": "0"}
BAND = {"inference_pool": "llama", "priority": "0"}


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

    def count(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self.metrics.count_effect(effect)

    def value(self, series: str, /, **labels: str) -> float | None:
        found: float | None = self.metrics.registry.get_sample_value(series, labels)
        return found

    def labels(self, series: str) -> list[str]:
        """Of each of its samples, in order."""
        lines = "".join(self.metrics.registry.exposition_chunks()).splitlines()
        return [
            line.rpartition(" ")[0].removeprefix(series)
            for line in lines
            if line.startswith((f"{series}{{", f"{series} "))
        ]

    def families(self) -> dict[str, dict[str, object]]:
        """Those under llm-d's names, as in the record: kind, labels, and bounds of buckets."""
        found: dict[str, dict[str, object]] = {}
        for family in text_string_to_metric_families("".join(self.metrics.registry.exposition_chunks())):
            if not family.name.startswith(("llm_d_", "inference_")):
                continue
            samples = [one for one in family.samples if not one.name.endswith("_created")]
            assert samples, f"{family.name} has no series in this test"
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = {"kind": family.type, "labels": sorted(set(samples[0].labels) - {"le"})}
            bounds = {float(one.labels["le"]) for one in samples if "le" in one.labels} - {float("inf")}
            if bounds:
                found[name]["bounds"] = sorted(bounds)
        return found


def without_series() -> set[str]:
    """The metrics of llm-d that the page about moving lists with what is used instead."""
    table = DOCS.read_text().partition("These metrics of llm-d have no series here")[2].partition("\n\nIn a cluster")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    assert all(instead.strip() for _, instead in rows)
    names = [name for listed, _ in rows for name in re.findall("`([a-z0-9_]+)`", listed)]
    assert len(names) == len(set(names))
    return {one if one.startswith("inference_objective_") else f"llm_d_epp_{one}" for one in names}


def answered(scene: Scene, page: Page) -> None:
    """One request from its decision to its outcome."""
    sent = scene.sent()
    page.count([sent])
    scene.core.on_stream_closed(sent.ticket, 1.0)
    page.count(scene.core.on_outcome(msgspec.structs.replace(outcome(sent.ticket), answer_bytes=300), 1.0))


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
    assert page.value("inference_objective_running_requests", model_name="m") == 1
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
    answered(scene, page)
    assert page.value("llm_d_epp_request_total", **REQUEST) == 1
    assert page.value("inference_objective_request_total", **MODELS, priority="0") == 1
    for name, older, value in (
        ("request_duration_seconds", "request_duration_seconds", 1.0),
        ("request_input_tokens", "input_tokens", 150),
        ("request_output_tokens", "output_tokens", 7),
        ("request_ntpot_seconds", "normalized_time_per_output_token_seconds", 1 / 7),
        ("response_size_bytes", "response_sizes", 300),
    ):
        assert page.value(f"llm_d_epp_{name}_sum", **REQUEST) == value
        assert page.value(f"inference_objective_{older}_sum", **MODELS) == value


def test_the_sizes_of_requests_are_those_of_their_bodies() -> None:
    scene = scene_of()
    page = Page(scene)
    sent = scene.sent()
    assert sent.history.size_bytes > 100
    page.count([sent])
    assert page.value("llm_d_epp_request_size_bytes_sum", **REQUEST) == sent.history.size_bytes
    assert page.value("inference_objective_request_sizes_sum", **MODELS) == sent.history.size_bytes


@pytest.mark.parametrize(("is_streamed", "ttft_s"), [(True, 0.5), (False, 1.0)])
def test_the_first_token_of_a_whole_answer_comes_with_its_last(is_streamed: bool, ttft_s: float) -> None:
    scene = scene_of(stream=is_streamed)
    page = Page(scene)
    answered(scene, page)
    labels = {**REQUEST, "streaming": "true" if is_streamed else "false"}
    assert page.value("llm_d_epp_request_ttft_seconds_sum", **labels) == ttft_s


def test_the_time_between_tokens_is_measured_on_streams_alone() -> None:
    for is_streamed, tpot_s in ((True, pytest.approx(0.5 / 6)), (False, None)):
        scene = scene_of(stream=is_streamed)
        page = Page(scene)
        answered(scene, page)
        assert page.value("llm_d_epp_request_streaming_tpot_seconds_sum", **REQUEST) == tpot_s


def every_family() -> dict[str, dict[str, object]]:
    """Of a page on which each has a series."""
    scene = scene_of(one_engine(flow_control=f"{FLOW_CONTROL}  maxRequests: 10\n  maxBytes: 1Mi\n"), stream=True)
    page = Page(scene)
    answered(scene, page)
    sent = scene.sent()
    page.count([sent])
    scene.core.on_stream_closed(sent.ticket, 1.0)
    page.count(scene.core.on_outcome(msgspec.structs.replace(outcome(sent.ticket), status=500, cached_tokens=3), 1.0))
    page.metrics.observe_pick_seconds(0.25)
    return page.families()


def test_every_series_is_one_of_llm_ds_with_its_kind_labels_and_buckets() -> None:
    served = every_family()
    recorded = {
        name: {**{key: one[key] for key in ("kind", "bounds") if key in one}, "labels": sorted(one["labels"])}
        for name, one in RECORDED.items()
    }
    assert {name: recorded.get(name) for name in served} == served


def test_whatever_of_llm_d_has_no_series_is_listed_with_what_is_instead() -> None:
    # one that is only written under an older name is listed under its name of today
    served = every_family()
    missing = {name: one for name, one in RECORDED.items() if name not in served}
    assert without_series() == {name for name, one in missing.items() if one.get("newer") not in missing}


def test_every_request_of_flow_control_is_counted_by_its_end() -> None:
    scene = scene_of()
    page = Page(scene)
    first, left = scene.sent(), scene.held()
    page.count([first])
    page.now_s = 0.5
    page.count(scene.core.on_disconnect(left, 0.5))
    held = scene.held(now=0.5)
    page.now_s = 40.0
    (late,) = scene.release(40.0)
    assert late.ticket == held
    page.count([late])
    for end, waited_s in (("Dispatched", 0), ("EvictedContextCancelled", 0.5), ("EvictedTTL", 39.5)):
        assert page.value("llm_d_epp_flow_control_requests_total", **BAND, outcome=end) == 1
        for prefix in ("llm_d_epp", "inference_extension"):
            series = f"{prefix}_flow_control_request_queue_duration_seconds_sum"
            assert page.value(series, **QUEUE, outcome=end) == waited_s
    # the one that waited, and the one that went at once, which the stream measures
    page.metrics.observe_pick_seconds(0.25)
    assert page.value("llm_d_epp_request_processing_duration_seconds_sum") == 0.25


@pytest.mark.parametrize(
    ("refusal", "was_held", "end"),
    [
        (QueueFull("full"), False, "RejectedCapacity"),
        (QueueFull("evicted"), True, "EvictedOther"),
        (QueueTimeout("late"), True, "EvictedTTL"),
        (NoEndpoint("none"), False, "RejectedNoEndpoints"),
        (NoEndpoint("none"), True, "EvictedNoEndpoints"),
        (EngineStarting("soon"), True, "EvictedNoEndpoints"),
        (Shed("shed"), False, "RejectedOther"),
        (BadRequest("bad"), True, "EvictedOther"),
    ],
)
def test_refusals_have_llm_ds_words(refusal: Refusal, was_held: bool, end: str) -> None:
    scene = scene_of()
    page = Page(scene)
    scene.sent()
    scene.held()
    (late,) = scene.release(40.0)
    assert isinstance(late, RequestRefused)
    page.count([msgspec.structs.replace(late, refusal=refusal, was_held=was_held)])
    assert page.labels("llm_d_epp_flow_control_requests_total") == [
        f'{{inference_pool="llama",outcome="{end}",priority="0"}}'
    ]


def test_a_request_that_waited_counts_with_its_wait() -> None:
    scene = scene_of()
    page = Page(scene)
    first, _ = scene.sent(), scene.held()
    scene.core.on_stream_closed(first.ticket, 1.5)
    page.count(scene.release(1.5))
    assert page.value("llm_d_epp_request_processing_duration_seconds_sum") == 1.5
    assert page.value("llm_d_epp_flow_control_request_queue_duration_seconds_sum", **QUEUE, outcome="Dispatched") == 1.5


def test_bands_show_how_full_they_are_and_all_of_them_if_they_have_a_limit() -> None:
    bands = "bands: [{name: only, priority: 0, share: 1, maxRequests: 4, maxBytes: 4Ki}]"
    scene = scene_of(one_engine(flow_control=f"{FLOW_CONTROL}  maxRequests: 10\n  {bands}\n"))
    page = Page(scene)
    scene.sent()
    scene.held()
    assert page.value("llm_d_epp_flow_control_capacity_utilization_requests", **BAND) == 0.25
    share = page.value("llm_d_epp_flow_control_capacity_utilization_bytes", **BAND)
    assert share == page.value("llm_d_epp_flow_control_queue_bytes", **QUEUE) / 4096  # type: ignore[operator]
    everything = {"inference_pool": "llama"}
    assert page.value("llm_d_epp_flow_control_global_capacity_utilization_requests", **everything) == 0.1
    unlimited = scene_of(one_engine(flow_control=f"{FLOW_CONTROL}  maxRequests: 1000000\n  maxBytes: 64Gi\n"))
    assert not Page(unlimited).labels("llm_d_epp_flow_control_global_capacity_utilization_requests")
    assert not Page(unlimited).labels("llm_d_epp_flow_control_global_capacity_utilization_bytes")


def test_without_flow_control_nothing_of_it_has_a_series() -> None:
    scene = scene_of(one_engine(flow_control=""))
    page = Page(scene)
    answered(scene, page)
    lines = "".join(page.metrics.registry.exposition_chunks()).splitlines()
    assert not [line for line in lines if "flow_control" in line and not line.startswith("#")]


def test_the_pool_has_its_averages() -> None:
    engines = ", ".join(f'{{address: "10.0.0.{number}:8000"}}' for number in (1, 2))
    scene = scene_of(one_engine(engines=engines))
    page = Page(scene)
    assert page.value("llm_d_epp_ready_endpoints", name="llama") == 2
    assert page.value("inference_pool_ready_pods", name="llama") == 2
    assert page.value("inference_pool_average_queue_size", name="llama") == 0
    (pool,) = scene.core.pools.values()
    pool.table.reported_at_s[:] = 0.0
    pool.table.waiting[pool.table.active_rows] = [1, 4]
    for name in ("llm_d_epp", "inference_pool"):
        assert page.value(f"{name}_average_queue_size", name="llama") == 2.5
    # of a sample: the root of (1.5² + 1.5²) / 1
    assert page.value("llm_d_epp_std_dev_queue_size", name="llama") == pytest.approx(4.5**0.5)
    labels = {"name": "llama", "model_server_endpoint": "10.0.0.2:8000"}
    assert page.value("llm_d_epp_per_endpoint_queue_size", **labels) == 4
    labels = {"name": "llama", "model_server_pod": "10.0.0.2:8000"}
    assert page.value("inference_pool_per_pod_queue_size", **labels) == 4


def two_namesakes() -> Scene:
    """Two pools of one name in two namespaces, and a third one."""
    spec = f"{{model: m, endpoints: [{{address: '10.0.0.1:8000'}}], flowControl: {{{ONE_AT_A_TIME}}}}}"
    head = "apiVersion: attache.dev/v1alpha1\nkind: ModelServer"
    others = "\n---\n".join(
        f"{head}\nmetadata: {{name: {name}, namespace: team}}\nspec: {spec}" for name in ("llama", "qwen")
    )
    return scene_of(configuration(servers={"llama": f"endpoints: [{ONE}]\n{FLOW_CONTROL}"}, others=others))


def test_pools_of_one_name_have_series_of_their_own() -> None:
    scene = two_namesakes()
    page = Page(scene)
    first, left = scene.sent(), scene.held()
    page.count([first, *scene.core.on_disconnect(left, 0.5)])
    families = text_string_to_metric_families("".join(page.metrics.registry.exposition_chunks()))
    series = Counter((one.name, *sorted(one.labels.items())) for family in families for one in family.samples)
    assert [one for one, times in series.items() if times > 1] == []
    # with its namespace where it has to be, and else as llm-d writes it, whose picker serves one pool
    names = ("default/llama", "team/llama", "qwen")
    for name in names:
        assert page.value("llm_d_epp_ready_endpoints", name=name) == 1
        assert page.value("inference_pool_ready_pods", name=name) == 1
        assert page.value("llm_d_epp_flow_control_pool_saturation", inference_pool=name, stage="effective") is not None
    ended = {"inference_pool": "default/llama", "priority": "0", "outcome": "EvictedContextCancelled"}
    assert page.value("llm_d_epp_flow_control_requests_total", **ended) == 1


def test_without_the_option_there_is_no_such_name() -> None:
    registry = Metrics(list, lambda: 0.0, lambda: 0.0).registry
    assert not [piece for piece in registry.exposition_chunks() if "llm_d_" in piece or "inference_" in piece]
