# SPDX-License-Identifier: Apache-2.0
"""What one tenant's prompts cost changes nothing of what another's reserve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.effects import Decision, RequestRefused
from extproc.core.request_record import Outcome
from tests.extproc.scenes import core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.core import Core

LIMITED = "modelName: chat\nrateLimits: [{per: Tenant, inputTokens: 20000, unit: minute}]"


def ask(core: Core, tenant: str, size: int, now: float) -> Decision | RequestRefused:
    arrival = request(core, "x" * size, model="chat", headers={"x-attache-tenant": tenant}, max_tokens=5)
    own, _ = core.arrive(arrival, now)
    assert isinstance(own, Decision | RequestRefused)
    return own


def test_a_tenant_with_dense_prompts_makes_nobody_elses_too_long() -> None:
    core = core_of(servers={"llama": "scrapeInterval: 0s\n" + endpoints("10.0.0.1:8000")}, routes={"chat": LIMITED})
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
        core.on_stream_closed(sent.ticket, 100.0 * number + 1)
        core.on_outcome(outcome, 100.0 * number + 2)
    assert isinstance(ask(core, "dense", 40_000, 1000.0), RequestRefused)
    assert isinstance(ask(core, "other", 40_000, 1000.0), Decision)
