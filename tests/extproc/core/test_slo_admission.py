# SPDX-License-Identifier: Apache-2.0
"""Requests that are predicted to miss what their class is promised, in virtual time: refused, moved, or served."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld, RequestRefused, RequestSloJudged, SloMissPredicted
from extproc.core.explanation import to_text
from extproc.refusals import ObjectiveUnmeetable, QueueTimeout, RateLimited
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, endpoints, ends, request

if TYPE_CHECKING:
    from extproc.core.effects import Effect, RequestEffect

PROMPTS = random.Random(1)
FIRST = endpoints("10.0.0.1:8000") + "scrapeInterval: 0s\n"
OTHER = endpoints("10.0.1.1:8000") + "scrapeInterval: 0s\n"
QUEUE = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 60s}}\n"


def core_with(
    slo: str = "{name: chat, ttft: 1s, e2e: 60s, unmeetable: Refuse}",
    *,
    first: str = FIRST,
    other: str = "",
    weights: tuple[int, int] = (1, 1),
    rule: str = "",
    route: str = "",
) -> Core:
    """Whose engines have shown that they prefill 10,000 tokens a second. ``other``: a second target of its rule."""
    servers = {"first": first, **({"other": other} if other else {})}
    targets = json.dumps([{"modelServerName": name, "weight": weights[at]} for at, name in enumerate(servers)])
    spec = f"rules: [{{targetModels: {targets}{rule}}}]\nslo: [{slo}]\n{route}"
    core = Core(configuration(servers=servers, routes={"chat": spec}), rng=random.Random(0), ticket_prefix="t")
    for pool in core.pools.values():
        pool.table.rate_samples[:] = 100
        pool.table.prefill_rate[:] = 10_000.0
    return core


def ask(
    core: Core, now: float = 0.0, *, tokens: int = 1000, stream: bool = True, **fields: object
) -> tuple[RequestEffect, list[Effect]]:
    """Of a prompt without anything in common with others."""
    return core.arrive(request(core, PROMPTS.randbytes(2 * tokens).hex(), stream=stream, **fields), now)


def refused(own: RequestEffect) -> ObjectiveUnmeetable:
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, ObjectiveUnmeetable)
    return own.refusal


def results(effects: list[Effect]) -> list[str]:
    return [one.forecast.result for one in effects if isinstance(one, SloMissPredicted)]


def verdicts(effects: list[Effect]) -> dict[str, bool | None]:
    found = [one for one in effects if isinstance(one, RequestSloJudged)]
    return {verdict.objective: verdict.is_met for one in found for verdict in one.verdicts}


def fill(core: Core) -> RequestRefused:
    """Requests until the first that is refused."""
    for _ in range(30):
        own, _ = ask(core)
        if isinstance(own, RequestRefused):
            return own
    raise AssertionError("all were served")


def test_a_request_that_would_be_late_is_refused_at_once_and_counts_as_missed() -> None:
    core = core_with()
    # each prompt of 1,000 tokens takes 0.1 s and more
    servers = 0
    while isinstance((found := ask(core))[0], Decision):
        servers += 1
    assert 5 <= servers <= 10
    own, effects = found
    refusal = refused(own)
    assert refusal.retry_after_s == 1
    assert "is due after 1 s; try again later" in refusal.message
    assert results(effects) == ["refused"]
    assert verdicts(effects) == {"ttft": False, "e2e": False}
    # nothing of it is left, and the next one is served once the work is done
    assert core.pools["default/first"].table.in_flight.sum() == servers
    assert isinstance(ask(core, 2.0)[0], Decision)


def test_by_default_it_is_served() -> None:
    core = core_with("{name: chat, ttft: 1s}")
    assert all(isinstance(ask(core)[0], Decision) for _ in range(30))


def test_retry_after_is_when_the_work_ahead_is_done() -> None:
    core = core_with()
    pool = core.pools["default/first"]
    ask(core)
    pool.table.prefill_rate[:] = 100.0
    # 10 s and more of work are ahead, which another request does not see when the engine is idle
    refusal = refused(ask(core, tokens=10)[0])
    assert refusal.retry_after_s is not None
    assert 7 <= refusal.retry_after_s <= 12


def test_a_prompt_that_is_too_long_for_idle_engines_is_not_to_be_tried_again() -> None:
    refusal = refused(ask(core_with(), tokens=20_000)[0])
    assert refusal.retry_after_s is None
    assert refusal.headers == {"x-should-retry": "false"}
    assert "shorten the prompt" in refusal.message


def test_of_a_plain_answer_only_the_end_is_due() -> None:
    core = core_with("{name: chat, ttft: 1ms, e2e: 1s, unmeetable: Refuse}")
    own, _ = ask(core, stream=False)
    assert isinstance(own, Decision)
    assert "after 0.001 s" in refused(ask(core)[0]).message
    assert "after 1 s" in refused(ask(core, tokens=20_000, stream=False)[0]).message


def test_what_is_not_known_yet_is_served() -> None:
    core = core_with()
    core.pools["default/first"].table.rate_samples[:] = 0
    assert isinstance(ask(core, tokens=100_000)[0], Decision)


def test_engines_that_were_slow_are_tried_again() -> None:
    core = core_with()
    core.pools["default/first"].table.prefill_rate[:] = 1.0
    refused(ask(core, 0.0)[0])
    refused(ask(core, 299.0)[0])
    assert isinstance(ask(core, 301.0)[0], Decision)
    # one is enough to know
    refused(ask(core, 302.0)[0])


def test_answers_in_the_background_and_counts_of_tokens_are_due_at_no_time() -> None:
    core = core_with("{name: chat, e2e: 1ms, unmeetable: Refuse}")
    words = {"path": "/v1/responses"}
    body = {"input": "hello " * 100, "background": True}
    assert isinstance(core.arrive(request(core, **words, **body), 0.0)[0], Decision)  # type: ignore[arg-type]
    refused(core.arrive(request(core, **words, input="hello " * 100), 0.0)[0])  # type: ignore[arg-type]


def test_another_modelserver_of_the_rule_that_holds_it_is_the_fallback() -> None:
    core = core_with(other=OTHER, weights=(10**6, 1))
    moved: list[str] = []
    served: list[str] = []
    for _ in range(30):
        own, effects = ask(core)
        moved += results(effects)
        if isinstance(own, RequestRefused):
            break
        assert isinstance(own, Decision)
        served.append(own.server)
    first = served.index("default/other")
    assert set(served[:first]) == {"default/first"}
    assert set(served[first:]) == {"default/other"}
    # both are as busy, so none is left
    assert abs(len(served) - 2 * first) <= 1
    assert moved == ["moved"] * (len(served) - first) + ["refused"]
    # each request counts where it went, and nowhere else
    in_flight = [int(core.pools[f"default/{name}"].table.in_flight.sum()) for name in ("first", "other")]
    assert in_flight == [first, len(served) - first]


def test_what_would_be_late_at_all_targets_goes_to_a_fallback_that_is_in_time() -> None:
    core = core_with(other=OTHER, weights=(1, 0), rule=", fallback: [{modelServerName: other}]")
    decisions, found = list[Decision](), list[str]()
    for _ in range(30):
        own, effects = ask(core)
        found += results(effects)
        if isinstance(own, RequestRefused):
            break
        assert isinstance(own, Decision)
        decisions.append(own)
    servers = [one.server for one in decisions]
    first = servers.index("default/other")
    assert {*servers[:first]} == {"default/first"}
    assert {*servers[first:]} == {"default/other"}
    # both are as busy, so none is left
    assert abs(len(servers) - 2 * first) <= 1
    assert found == ["fallback"] * (len(servers) - first) + ["refused"]
    assert {one.history.fell_back_for for one in decisions[first:]} == {"late"}
    in_flight = [int(core.pools[f"default/{name}"].table.in_flight.sum()) for name in ("first", "other")]
    assert in_flight == [first, len(servers) - first]
    core.on_stream_closed(decisions[-1].ticket, 0.0)
    tried = core.explain(request(core, PROMPTS.randbytes(2000).hex(), stream=True), 0.0)
    assert tried.server == "default/other"
    assert "ttft allows 1000 ms; it goes to a fallback" in to_text(tried)
    assert "is taken: the ModelServer before it is predicted to be late" in to_text(tried)


def test_what_would_be_late_at_the_fallback_too_is_refused() -> None:
    core = core_with(other=OTHER, weights=(1, 0), rule=", fallback: [{modelServerName: other}]")
    own, effects = ask(core, tokens=30_000)
    assert "shorten the prompt" in refused(own).message
    assert results(effects) == ["refused"]


def test_a_target_of_weight_0_gets_nothing() -> None:
    core = core_with(other=OTHER, weights=(1, 0))
    fill(core)
    assert core.pools["default/other"].table.in_flight.sum() == 0


@pytest.mark.parametrize(("spill", "count"), [("Never", 1), ("Up", 2)])
def test_tiers_say_where_it_may_spill(spill: str, count: int) -> None:
    price = "pricing: [{{perMillion: {{input: {0}, output: {0}}}}}]\n"
    tiers = f", tiers: {{ttft: 60s, spill: {spill}}}"
    core = core_with(first=FIRST + price.format(1), other=OTHER + price.format(5), rule=tiers)
    found: set[str] = set()
    while isinstance((own := ask(core)[0]), Decision):
        found.add(own.server)
    assert len(found) == count
    refused(own)


def test_a_request_is_refused_in_the_queue_when_its_first_token_is_late() -> None:
    core = core_with(first=FIRST + QUEUE)
    running, _ = ask(core)
    assert isinstance(running, Decision)
    # the queue is expected to be fast
    gate = core.admission.gates["default/first"]
    gate._rate, gate._rate_at_s = 100.0, 0.0
    held, _ = ask(core, 0.1)
    assert isinstance(held, RequestHeld)
    assert not ends(core.tick(1.0))
    effects = core.tick(1.1)
    (own,) = ends(effects)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, QueueTimeout)
    assert verdicts(effects) == {"ttft": False, "e2e": False}


def test_what_waits_in_the_queue_is_part_of_the_prediction() -> None:
    core = core_with(first=FIRST + QUEUE)
    ask(core)
    gate = core.admission.gates["default/first"]
    gate._rate, gate._rate_at_s = 0.1, 0.0
    refusal = refused(ask(core, 0.1)[0])
    assert refusal.retry_after_s is not None
    assert 8 <= refusal.retry_after_s <= 12
    assert not len(gate.queue)


def test_a_deadline_of_the_request_itself_is_its_own_fault() -> None:
    core = core_with()
    own, effects = ask(core, headers={"x-attache-deadline-ms": "20"})
    assert refused(own).is_of_caller
    assert verdicts(effects) == {"ttft": None, "e2e": None}
    assert isinstance(ask(core, headers={"x-attache-deadline-ms": "500"})[0], Decision)


def test_a_rate_limit_comes_first_and_a_refused_request_uses_none_of_it() -> None:
    core = core_with(route="rateLimits: [{tenants: [acme], unit: hour, requests: 1}]")
    acme = {"x-attache-tenant": "acme"}
    refused(ask(core, tokens=20_000, headers=acme)[0])
    assert isinstance(ask(core, headers=acme)[0], Decision)
    own, effects = ask(core, tokens=20_000, headers=acme)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, RateLimited)
    assert verdicts(effects) == {"ttft": None, "e2e": None}


def test_explain_shows_the_prediction_and_changes_nothing() -> None:
    core = core_with(other=OTHER, weights=(10**6, 1))
    arrival = request(core, PROMPTS.randbytes(2000).hex(), stream=True)
    held = core.explain(arrival, 0.0)
    assert held.forecast is not None
    assert (held.forecast.name, held.forecast.objective, held.forecast.due_ms) == ("chat", "ttft", 1000.0)
    assert (held.forecast.result, held.server) == ("held", "default/first")
    while (served := ask(core)[0]) and isinstance(served, Decision) and served.server == "default/first":
        pass
    moved = core.explain(arrival, 0.0)
    assert moved.forecast is not None
    assert (moved.forecast.result, moved.server) == ("moved", "default/other")
    fill(core)
    taken = dict(core._pipeline._tiers._taken_at_s)
    gone = core.explain(arrival, 0.0)
    assert gone.forecast is not None
    assert gone.forecast.result == "refused"
    assert gone.forecast.ttft_ms is not None
    text = f"the class chat of default/chat: TTFT {gone.forecast.ttft_ms:g} ms is predicted, ttft allows 1000 ms"
    assert f"  {text}; it is refused" in to_text(gone)
    assert core._pipeline._tiers._taken_at_s == taken


def test_the_row_and_the_decision_have_the_reason() -> None:
    core = Core(
        configuration(
            servers={"first": FIRST},
            routes={"chat": "slo: [{name: chat, ttft: 1ms, unmeetable: Refuse}]"},
            others=json.dumps(
                {
                    "apiVersion": "attache.dev/v1alpha1",
                    "kind": "GatewayConfig",
                    "metadata": {"name": "gateway"},
                    "spec": {"usageLog": {"path": "/var/lib/attache/usage.log"}},
                }
            ),
        ),
        rng=random.Random(0),
        ticket_prefix="t",
    )
    own, _ = core.arrive(request(core, stream=True), 0.0, wants_reasons=True)
    # nothing is known yet
    assert isinstance(own, Decision)
    assert own.history.explanation is not None
    assert own.history.explanation.forecast is not None
    assert own.history.explanation.forecast.ttft_ms is None
    core.pools["default/first"].table.rate_samples[:] = 100
    own, _ = ask(core)
    assert isinstance(own, RequestRefused)
    assert own.usage is not None
    assert (own.usage.refused, own.refusal.status) == ("objective_unmeetable", 503)
