# SPDX-License-Identifier: Apache-2.0
"""What plugins of EndpointPickerConfigs mean for a request, from its arrival on."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.config.load import load
from extproc.core.core import Core
from extproc.core.effects import Decision, Hold, Refused
from extproc.core.types import Head
from extproc.errors import Shed
from extproc.request.model import Api

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
    return Core(load(files), rng=random.Random(1), ticket_prefix="t")


def table_of(core: Core) -> EndpointTable:
    table = core.pools[SERVER].table
    table.reported_at_s[:2] = 0.0
    return table


def asked(core: Core, now: float = 0.0, **headers: str) -> Effect:
    """``headers``: with underscores for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    head = Head("POST", "/v1/chat/completions", named, has_body=True, is_trusted=True)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}).encode()
    own, _ = core.arrive(core.intake.receive(Api.CHAT, head, body), now)
    return own


@pytest.mark.parametrize("gates", ["", "flowControl"])
def test_busy_engines_refuse_what_may_be_shed(gates: str) -> None:
    core = core_of("  - type: probabilistic-admitter", gates)
    assert isinstance(asked(core, x_llm_d_inference_objective="batch"), Decision)
    # one engine has room, but their mean saturation is 0.5: everything of negative priority is refused
    table_of(core).kv_usage[:2] = 0.8, 0.0
    own = asked(core, x_llm_d_inference_objective="batch")
    assert isinstance(own, Refused)
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
    assert isinstance(own, Refused)
    assert isinstance(own.refusal, Shed)
    assert isinstance(asked(core, x_llm_d_inference_objective="batch", x_llm_d_slo_ttft_ms="9000"), Decision)
    assert isinstance(asked(core, x_llm_d_inference_objective="chat", x_llm_d_slo_ttft_ms="1000"), Decision)
    assert not isinstance(asked(core, x_llm_d_slo_ttft_ms="1000"), Hold)
