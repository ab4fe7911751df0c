# SPDX-License-Identifier: Apache-2.0
"""Tiers in the life of requests, in virtual time: taken, waited for, spilled; explained; and hostile surroundings."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.core import cost_tier_selector as tiers
from extproc.core.core import Core
from extproc.core.effects import Decision, Fault, RequestHeld
from extproc.core.explanation import to_text
from extproc.core.request_states import RequestState
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, endpoints, ends, request

if TYPE_CHECKING:
    from extproc.routing.cost_tiers import TierChoice

PROMPTS = random.Random(1)
QUEUE = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 30s}}\n"
CHEAP = endpoints("10.0.0.1:8000") + "scrapeInterval: 0s\npricing: [{perMillion: {input: 1, output: 2}}]\n"
DEAR = endpoints("10.0.1.1:8000") + "scrapeInterval: 0s\npricing: [{perMillion: {input: 4, output: 8}}]\n"


def rules(tiers: str, *, names: tuple[str, ...] = ("dear", "cheap")) -> str:
    targets = json.dumps([{"modelServerName": name} for name in names])
    return f"rules: [{{targetModels: {targets}, tiers: {{{tiers}}}}}]"


def core_with(tiers: str, *, cheap: str = CHEAP, dear: str = DEAR, others: str = "") -> Core:
    """Whose engines have shown that they prefill 10,000 tokens a second."""
    snapshot = configuration(servers={"cheap": cheap, "dear": dear}, routes={"chat": rules(tiers)}, others=others)
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    for pool in core.pools.values():
        pool.table.rate_samples[:] = 100
    return core


def ask(core: Core, now: float, *, tokens: int = 1000, **fields: object) -> Decision | RequestHeld:
    """Of a prompt without anything in common with others."""
    content = PROMPTS.randbytes(2 * tokens).hex()
    own, _ = core.arrive(request(core, content, **fields), now)
    assert isinstance(own, Decision | RequestHeld)
    return own


def test_the_cheapest_is_taken_until_it_would_miss_the_objective() -> None:
    core = core_with("ttft: 1s")
    # each prompt of 1,000 tokens takes 0.1 s and more
    servers = [own.server for _ in range(20) if isinstance(own := ask(core, 0.0), Decision)]
    spilled = servers.index("default/dear")
    assert 5 <= spilled <= 10
    assert set(servers[:spilled]) == {"default/cheap"}
    # both miss now, and the home is as bad
    assert set(servers[spilled : 2 * spilled]) == {"default/dear"}
    # the work is done: the cheapest again
    own = ask(core, 60.0)
    assert isinstance(own, Decision)
    assert (own.server, own.history.tier) == ("default/cheap", "holds")


def test_weights_do_not_count_and_costs_follow_the_prompt() -> None:
    # cheap for prompts, dear for answers
    prompts = endpoints("10.0.0.1:8000") + "pricing: [{perMillion: {input: 1, output: 100}}]"
    answers = endpoints("10.0.1.1:8000") + "pricing: [{perMillion: {input: 10, output: 1}}]"
    core = core_with("tpot: 1s", cheap=prompts, dear=answers)
    long, short = ask(core, 0.0, tokens=20_000, max_tokens=10), ask(core, 0.0, tokens=10, max_tokens=200)
    assert isinstance(long, Decision)
    assert isinstance(short, Decision)
    assert (long.server, short.server) == ("default/cheap", "default/dear")


def test_classes_have_objectives_of_their_own() -> None:
    classes = "classes: [{tenants: [acme], ttft: 150ms}, {minPriority: 5, spill: Never, ttft: 150ms}]"
    core = core_with(f"ttft: 60s, {classes}")
    first = ask(core, 0.0, headers={"x-attache-tenant": "other"})
    others = ask(core, 0.0, headers={"x-attache-tenant": "other"})
    acme = ask(core, 0.0, headers={"x-attache-tenant": "acme"})
    assert [one.server for one in (first, others, acme) if isinstance(one, Decision)] == [
        "default/cheap",
        "default/cheap",
        "default/dear",
    ]


def test_a_request_waits_in_the_queue_of_its_home_and_then_spills() -> None:
    core = core_with("ttft: 60s, wait: 2s", cheap=CHEAP + QUEUE, dear=DEAR)
    first = ask(core, 0.0)
    assert isinstance(first, Decision)
    # the home's queue is expected to take longer than the objective
    core.admission.gates["default/cheap"]._rate = 0.01
    core.admission.gates["default/cheap"]._rate_at_s = 0.0
    held = ask(core, 0.1)
    assert isinstance(held, RequestHeld)
    assert core.state_of(held.ticket) is RequestState.QUEUED
    assert not ends(core.tick(1.0))
    (spilled,) = ends(core.tick(2.11))
    assert isinstance(spilled, Decision)
    assert (spilled.server, spilled.history.tier, spilled.history.was_held) == ("default/dear", "up", True)
    assert spilled.history.waits[RequestState.QUEUED] == pytest.approx(2.01)
    # nothing of it is left at its home
    assert not len(core.admission.gates["default/cheap"].queue)
    assert core.pools["default/cheap"].table.in_flight.sum() == 1


def test_a_request_whose_home_gets_room_meanwhile_stays_there() -> None:
    core = core_with("ttft: 60s, wait: 5s", cheap=CHEAP + QUEUE)
    first = ask(core, 0.0)
    gate = core.admission.gates["default/cheap"]
    gate._rate, gate._rate_at_s = 0.01, 0.0
    held = ask(core, 0.1)
    assert isinstance(held, RequestHeld)
    core.on_stream_closed(first.ticket, 1.0)
    (own,) = ends(core.tick(1.0))
    assert isinstance(own, Decision)
    assert (own.server, own.history.tier) == ("default/cheap", "waits")
    # its time comes, and it is gone
    assert not ends(core.tick(9.0))


def test_a_client_that_leaves_while_it_waits_leaves_nothing() -> None:
    core = core_with("ttft: 60s, wait: 2s", cheap=CHEAP + QUEUE)
    ask(core, 0.0)
    gate = core.admission.gates["default/cheap"]
    gate._rate, gate._rate_at_s = 0.01, 0.0
    held = ask(core, 0.1)
    core.on_disconnect(held.ticket, 0.2)
    assert not ends(core.tick(3.0))
    assert core.count_requests(RequestState.QUEUED) == 0


def test_with_both_tiers_full_a_request_waits_on_at_its_home() -> None:
    core = core_with("ttft: 60s, wait: 1s", cheap=CHEAP + QUEUE, dear=DEAR + QUEUE)
    ask(core, 0.0)
    gate = core.admission.gates["default/cheap"]
    gate._rate, gate._rate_at_s = 0.01, 0.0
    taken = ask(core, 0.0)
    (spilled,) = ends(core.tick(1.01)) if isinstance(taken, RequestHeld) else (taken,)
    assert isinstance(spilled, Decision)
    held = ask(core, 1.1)
    assert not [end for at in range(2, 20) for end in ends(core.tick(float(at)))]
    core.on_stream_closed(spilled.ticket, 20.0)
    (own,) = [end for at in (20.0, 21.0, 22.0) for end in ends(core.tick(at))]
    assert isinstance(own, Decision)
    assert (own.ticket, own.server) == (held.ticket, "default/dear")


def test_many_that_wait_are_asked_about_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with("ttft: 60s, wait: 1s", cheap=CHEAP + QUEUE, dear=DEAR + QUEUE)
    ask(core, 0.0)
    gate = core.admission.gates["default/cheap"]
    gate._rate, gate._rate_at_s = 0.01, 0.0
    for _ in range(400):
        ask(core, 0.0, tokens=10)
    asked = 0
    original = tiers.choose_tier

    def counted(*words: object) -> TierChoice:
        nonlocal asked
        asked += 1
        return original(*words)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(tiers, "choose_tier", counted)
    for tenth in range(10, 210):
        core.tick(tenth / 10)
    # all of them once, and then some 64 a second
    assert 400 <= asked <= 400 + 20 * 80


def test_a_tier_that_was_slow_is_tried_again() -> None:
    core = core_with("ttft: 150ms")
    cheap = core.pools["default/cheap"].table
    assert ask(core, 0.0).ticket
    # it has learned 100 tokens a second, in a bad hour
    cheap.prefill_rate[:] = 100.0
    core.on_stream_closed("t-1", 1.0)
    assert [one.server for at in (30.0, 100.0) if isinstance(one := ask(core, at), Decision)] == ["default/dear"] * 2
    later = ask(core, 400.0)
    assert isinstance(later, Decision)
    assert later.server == "default/cheap"


def test_explain_shows_every_tier_and_changes_nothing() -> None:
    core = core_with("ttft: 1s, tpot: 50ms")
    table = core.pools["default/cheap"].table
    table.in_flight[0], table.tpot_s[0] = 3, 0.08
    arrival = request(core, "a" * 4000, max_tokens=100)
    for _ in range(2):
        found = core.explain(arrival, 1.0)
        assert found.server == "default/dear"
        cheap, dear = found.tiers
        assert (cheap.server, cheap.holds, cheap.tpot_ms) == ("default/cheap", False, 80.0)
        assert cheap.cost == "0.001202 USD"
        assert cheap.why == "cheaper, and would miss the objective"
        assert dear.why == "taken: dearer, as its home would miss the objective"
    assert core._pipeline._tiers._taken_at_s == {}
    assert "tier default/cheap: 0.001202 USD, TTFT " in to_text(found)


def test_a_decision_has_its_reasons_for_the_log() -> None:
    core = core_with("ttft: 1s")
    own, _ = core.arrive(request(core, "a" * 4000), 0.0, wants_reasons=True)
    assert isinstance(own, Decision)
    assert own.history.explanation is not None
    assert [one.server for one in own.history.explanation.tiers] == ["default/cheap", "default/dear"]


def test_servers_without_engines_and_those_that_the_caller_may_not_use_are_no_tiers() -> None:
    core = core_with("ttft: 1s", cheap=CHEAP.replace('"10.0.0.1:8000"', '"10.0.0.1:8000", "draining": true'))
    own = ask(core, 0.0)
    assert isinstance(own, Decision)
    assert (own.server, own.history.tier) == ("default/dear", "holds")
    policy = """
apiVersion: attache.dev/v1alpha1
kind: ModelAccessPolicy
metadata: {name: only-dear}
spec:
  targetRefs: [{kind: ModelServer, name: cheap}]
  rules: [{from: [{tenants: [vip]}]}]
"""
    core = core_with("ttft: 1s", others=policy)
    for tenant, server in (("vip", "default/cheap"), ("acme", "default/dear")):
        own = ask(core, 0.0, headers={"x-attache-tenant": tenant})
        assert isinstance(own, Decision)
        assert own.server == server


def test_mistakes_of_ours_leave_the_request_to_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_with("ttft: 1s")

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("extproc.core.cost_tier_selector.choose_tier", fails)
    own, effects = core.arrive(request(core, "hi"), 0.0)
    assert isinstance(own, Decision)
    assert own.history.tier == ""
    assert [one for one in effects if isinstance(one, Fault)]


def test_a_configuration_without_the_rule_holds_those_that_wait() -> None:
    core = core_with("ttft: 60s, wait: 2s", cheap=CHEAP + QUEUE)
    ask(core, 0.0)
    gate = core.admission.gates["default/cheap"]
    gate._rate, gate._rate_at_s = 0.01, 0.0
    held = ask(core, 0.1)
    alone = configuration(servers={"cheap": CHEAP + QUEUE})
    assert not ends(core.apply(alone, 0.2))
    assert not ends(core.tick(3.0))
    assert core.state_of(held.ticket) is RequestState.QUEUED
    core.on_stream_closed("t-1", 4.0)
    (own,) = ends(core.tick(4.0))
    assert isinstance(own, Decision)
    assert own.server == "default/cheap"


def test_demand_and_prices_are_those_of_the_tier_that_serves() -> None:
    core = core_with("ttft: 1s")
    own = ask(core, 0.0, max_tokens=10)
    assert isinstance(own, Decision)
    run = core._records[own.ticket].run
    assert run is not None
    assert run.price == core.pools["default/cheap"].price_at(0.0)
    assert own.usage is None
    assert [core.meter.unfinished_requests(name) for name in ("default/cheap", "default/dear")] == [1, 0]
