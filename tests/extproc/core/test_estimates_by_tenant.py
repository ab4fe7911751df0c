# SPDX-License-Identifier: Apache-2.0
"""What one tenant's prompts cost changes nothing of what another's reserve."""

from __future__ import annotations

import json
import random

from extproc.api.load import load
from extproc.core.core import Core
from extproc.core.effects import Decision, Refused
from extproc.core.record import Head, Outcome
from extproc.protocol import Api

CONFIG = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, scrapeInterval: 0s, endpoints: [{address: '10.0.0.1:8000'}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  rules: [{targetModels: [{modelServerName: llama}]}]
  rateLimits: [{per: Tenant, inputTokens: 20000, unit: minute}]
"""


def ask(core: Core, tenant: str, size: int, now: float) -> Decision | Refused:
    head = Head("POST", "/v1/chat/completions", {"x-attache-tenant": tenant}, has_body=True, is_trusted=True)
    body = json.dumps({"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * size}]})
    own, _ = core.arrive(core.intake.receive(Api.CHAT, head, body.encode()), now)
    assert isinstance(own, Decision | Refused)
    return own


def test_a_tenant_with_dense_prompts_makes_nobody_elses_too_long() -> None:
    core = Core(load({"a.yaml": CONFIG}), rng=random.Random(0), ticket_prefix="t")
    for number in range(5):
        sent = ask(core, "dense", 1000, 100.0 * number)
        assert isinstance(sent, Decision)
        outcome = Outcome(
            ticket=sent.ticket,
            status=200,
            served="10.0.0.1:8000",
            duration_s=1.0,
            ttfb_s=0.5,
            prompt_tokens=1000,
            completion_tokens=5,
            cached_tokens=None,
        )
        core.finish(sent.ticket, 100.0 * number + 1)
        core.settle(outcome, 100.0 * number + 2)
    assert isinstance(ask(core, "dense", 40_000, 1000.0), Refused)
    assert isinstance(ask(core, "other", 40_000, 1000.0), Decision)
