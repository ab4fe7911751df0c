# SPDX-License-Identifier: Apache-2.0
"""What plugins of EndpointPickerConfigs mean for a request, from its arrival on."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld, RequestRefused
from extproc.core.request_record import RequestHead
from extproc.llmd.picker_builder import PickerFactory
from extproc.refusals import Shed

if TYPE_CHECKING:
    from extproc.core.effects import Effect
    from extproc.endpoints.table import EndpointTable

SERVER = "default/llama"
DIRECTORY = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  pickerConfig: epp.yaml
  endpoints: [{address: '10.0.0.1:8000'}, {address: '10.0.0.2:8000'}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {modelName: m, rules: [{targetModels: [{modelServerName: llama}]}]}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -1}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: chat}
spec: {priority: 10}
"""
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [%s]
plugins:
  - type: random-picker
%s
"""


def core_of(plugins: str, gates: str = "", flow_control: str = "") -> Core:
    files = {"a.yaml": DIRECTORY.encode(), "epp.yaml": (PICKER % (gates, plugins) + flow_control).encode()}
    return Core(load_snapshot(files), rng=random.Random(1), ticket_prefix="t", make_picker=PickerFactory())


def table_of(core: Core) -> EndpointTable:
    table = core.pools[SERVER].table
    table.reported_at_s[:2] = 0.0
    return table


def asked(core: Core, now: float = 0.0, **headers: str) -> Effect:
    """``headers``: with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    head = RequestHead("POST", "/v1/chat/completions", named, has_body=True, is_trusted=True)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}).encode()
    own, _ = core.arrive(core.builder.build_by_model(head, body), now)
    return own


@pytest.mark.parametrize("gates", ["", "flowControl"])
def test_busy_engines_refuse_what_may_be_shed(gates: str) -> None:
    core = core_of("  - type: probabilistic-admitter", gates)
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), Decision)
    # one engine has room, but their mean saturation is 0.5: everything of negative priority is refused
    table_of(core).kv_usage[:2] = 0.8, 0.0
    own = asked(core, x_llm_d_inference_objective="batch")
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, Shed)
    assert own.refusal.retry_after_s == 1
    assert isinstance(asked(core, x_llm_d_inference_objective="chat"), Decision)
    assert isinstance(asked(core), Decision)


def test_hopeless_objectives_are_refused_if_they_may_be_shed() -> None:
    core = core_of("  - type: latency-slo-admitter")
    table = table_of(core)
    table.running[:2], table.in_flight[:2], table.kv_usage[:2], table.rate_samples[:2] = 1.0, 1.0, 0.5, 9
    table.backlog_tokens[:2] = 50_000.0
    own = asked(core, x_llm_d_inference_objective="batch", x_llm_d_slo_ttft_ms="1000")
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, Shed)
    assert isinstance(asked(core, x_llm_d_inference_objective="batch", x_llm_d_slo_ttft_ms="9000"), Decision)
    assert isinstance(asked(core, x_llm_d_inference_objective="chat", x_llm_d_slo_ttft_ms="1000"), Decision)
    assert not isinstance(asked(core, x_llm_d_slo_ttft_ms="1000"), RequestHeld)


AGENTS = "  - {type: agent-identity, parameters: {additionalSessionHeaders: [x-my-agent]}}"
ONE_AT_A_TIME = """  - {type: concurrency-detector, parameters: {maxConcurrency: 1}}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
"""


def test_sessions_of_agents_are_flows_of_their_tenant() -> None:
    core = core_of(AGENTS, "flowControl")

    def part(**headers: str) -> str:
        own = asked(core, **headers)
        assert isinstance(own, Decision)
        assert own.history.queued is not None
        return own.history.queued.flow.part

    first = part(x_claude_code_session_id="a")
    assert part(x_claude_code_session_id="b") != first
    assert part(x_claude_code_session_id="a", session_id="b") == first
    assert part(x_my_agent="a", x_claude_code_session_id="b") == first, "an added header goes first"
    assert part() == ""
    assert part(x_claude_code_session_id="a", x_llm_d_inference_fairness_id="team") == "", "said by the gateway"


def test_lower_priorities_are_held_back_before_higher_ones() -> None:
    plugins = "  - {type: priority-holdback-policy, name: mine, parameters: {minCeiling: 0.2, maxCeiling: 0.9}}\n"
    core = core_of(plugins + ONE_AT_A_TIME, "flowControl", "  usageLimitPolicyPluginRef: mine\n")
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), Decision)
    # one of two engines is full: the ceilings of 10, 0 and -1 are 0.9, 0.55 and 0.2
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), RequestHeld)
    assert isinstance(asked(core_of(plugins + ONE_AT_A_TIME, "flowControl")), Decision)


def test_a_lower_band_waits_for_its_next_look_and_is_woken() -> None:
    core = core_of(
        ONE_AT_A_TIME.replace("maxConcurrency: 1", "maxConcurrency: 4"),
        "flowControl",
        "  usageLimitPolicyPluginRef: soft-reflective-ceiling-policy\n",
    )
    for _ in range(6):
        assert isinstance(asked(core, x_llm_d_inference_objective="chat"), Decision)
    # 6 of 8 places are taken: one request of the lower band every 3 ms
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), Decision)
    core_gate = core.admission.gates[SERVER]
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), RequestHeld)
    woken_at_s = core_gate.wake_at_s(0.0)
    assert woken_at_s is not None
    assert 0 < woken_at_s <= 0.01
    released = [one for one in core.tick(woken_at_s) if isinstance(one, Decision)]
    assert len(released) == 1
