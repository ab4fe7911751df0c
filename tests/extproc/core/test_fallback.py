# SPDX-License-Identifier: Apache-2.0
"""Fallbacks in the life of requests, in virtual time: planned, taken at once, bounded, settled for who has served."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.api.dns_resolver import with_resolved_addresses
from extproc.core.core import Core
from extproc.core.dispatch import prompt_of
from extproc.core.effects import Broadcast, Decision, OutcomeJoined, RequestHeld, RequestRefused
from extproc.core.explanation import to_text
from extproc.core.fallback_budget import WANTED_S
from extproc.core.peer_events import EngineReported, EventBatch, decode_events, encode_events
from extproc.core.request_record import GatewayProperties, Outcome
from extproc.core.request_states import RequestState
from extproc.engines.engine_responses import parse_model_list
from extproc.engines.metrics import EngineReport, LoraState
from extproc.refusals import UnknownPath
from tests.extproc.breakers import trip
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, endpoints, ends, request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect

A1, A2, B1, B2, C1 = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.1.1:8000", "10.0.1.2:8000", "10.0.2.1:8000"
QUIET = "scrapeInterval: 0s\n"
SERVERS = {
    "a": endpoints(A1, A2) + QUIET + "pricing: [{perMillion: {input: 1, output: 1}}]\n",
    "b": endpoints(B1, B2) + QUIET + "model: smaller\npricing: [{perMillion: {input: 5, output: 5}}]\n",
    "c": endpoints(C1) + QUIET,
}
FALLBACK = [{"modelServerName": "b", "degraded": True}, {"modelServerName": "c"}]
OK = Outcome("", 200, "", 0.2, 0.1, 600, 10, 0)


def core_with(
    *,
    fallback: object = FALLBACK,
    servers: dict[str, str] | None = None,
    others: str = "",
    route: str = "",
    worker: str = "",
    **rule: object,
) -> Core:
    """``worker``: its name among the workers of one machine."""
    rules = json.dumps([{"targetModels": [{"modelServerName": "a"}], "fallback": fallback, **rule}])
    snapshot = configuration(
        servers={**SERVERS, **(servers or {})}, routes={"chat": f"rules: {rules}\n{route}"}, others=others
    )
    machine = "here" if worker else None
    return Core(snapshot, rng=random.Random(0), ticket_prefix=worker or "t", machine=machine)


def ask(
    core: Core, now: float = 0.0, *, attachment: GatewayProperties | None = None, **fields: object
) -> Decision | RequestHeld:
    own, _ = core.arrive(
        request(core, "hi " * 100, **fields), now, attachment or GatewayProperties(), wants_reasons=True
    )
    assert isinstance(own, Decision | RequestHeld)
    return own


def sent(core: Core, now: float = 0.0, **fields: object) -> Decision:
    own = ask(core, now, **fields)
    assert isinstance(own, Decision)
    return own


def fail(core: Core, server: str, now: float = 0.0) -> None:
    """All of its endpoints are avoided."""
    table = core.pools[f"default/{server}"].table
    for row in table.active_rows:
        trip(table, row, now)


def end(core: Core, decision: Decision, now: float, **outcome: object) -> OutcomeJoined:
    core.on_stream_closed(decision.ticket, now)
    found = core.on_outcome(msgspec.structs.replace(OK, ticket=decision.ticket, **outcome), now)
    return next(one for one in found if isinstance(one, OutcomeJoined))


def failures(core: Core) -> dict[str, int]:
    tables = [pool.table for pool in core.pools.values()]
    return {table.addresses[row]: int(table.trips[row]) for table in tables for row in table.active_rows}


def in_flight(core: Core) -> float:
    return sum(float(pool.table.in_flight.sum()) for pool in core.pools.values())


def test_its_attempts_are_at_its_own_engines_first() -> None:
    attempts = sent(core_with()).attempts
    assert attempts is not None
    assert attempts.servers == ("default/a", "default/a", "default/b", "default/b", "default/c")
    assert set(attempts.addresses[:2]) == {A1, A2}
    assert set(attempts.addresses[2:4]) == {B1, B2}
    assert attempts.degraded == ("default/b",)


def test_the_place_of_the_models_name_is_that_in_the_body_that_is_sent() -> None:
    for fields in ({}, {"stream": True}, {"priority": 3}, {"seed": 7, "stream": True}):
        core = core_with()
        arrival = request(core, "hi", **fields)
        own, _ = core.arrive(arrival, 0.0)
        assert isinstance(own, Decision)
        assert own.attempts is not None
        first, length = map(int, own.attempts.splice.split(","))
        body = arrival.body if own.body is None else own.body
        assert body[first : first + length] == b'"m"'


def test_without_another_name_nothing_is_replaced() -> None:
    attempts = sent(core_with(servers={"b": endpoints(B1)})).attempts
    assert attempts is not None
    assert attempts.splice == ""


PROVIDER = "provider: {host: a.example}\napis: [ChatCompletions]\n"
SALTED = """apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec: {cacheIsolation: Tenant}
"""


@pytest.mark.parametrize("own", ["a", "b"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"seed": 7}])
def test_a_provider_gets_the_body_without_the_salt(own: str, fields: dict[str, object]) -> None:
    to = "b" if own == "a" else "a"
    core = core_with(
        servers={"b": PROVIDER},
        fallback=[{"modelServerName": to}],
        targetModels=[{"modelServerName": own}],
        others=SALTED,
    )
    arrival = request(core, "hi", **fields)
    decision, _ = core.arrive(arrival, 0.0)
    assert isinstance(decision, Decision)
    assert decision.attempts is not None
    assert {*decision.attempts.servers} == {"default/a", "default/b"}
    body = decision.body
    assert body is not None
    first, length = map(int, decision.attempts.salt.split(","))
    cut = json.loads(body[:first] + body[first + length :])
    assert cut == {name: value for name, value in json.loads(body).items() if name != "cache_salt"}
    assert "cache_salt" in json.loads(body)


def test_a_provider_alone_gets_no_salt_and_other_apis_never_reach_it() -> None:
    core = core_with(servers={"a": PROVIDER}, fallback=[], others=SALTED)
    decision = sent(core)
    assert decision.attempts is None
    assert decision.body is None or "cache_salt" not in json.loads(decision.body)
    with pytest.raises(UnknownPath, match="write to /v1/chat/completions"):
        request(core, "hi", path="/v1/completions", prompt="hi")


def test_a_provider_is_skipped_for_other_apis() -> None:
    core = core_with(servers={"b": PROVIDER})
    decision, _ = core.arrive(request(core, "hi", path="/v1/completions", prompt="hi"), 0.0)
    assert isinstance(decision, Decision)
    assert decision.attempts is not None
    assert {*decision.attempts.servers} == {"default/a", "default/c"}


def test_by_weight_a_provider_gets_its_own_apis_alone() -> None:
    targets = [{"modelServerName": "a", "weight": 1}, {"modelServerName": "b", "weight": 1_000_000}]
    core = core_with(servers={"b": PROVIDER}, fallback=[], targetModels=targets)
    found = {request(core, "hi", path="/v1/completions", prompt="hi").destination.server for _ in range(50)}
    assert found == {"default/a"}
    assert request(core, "hi").destination.server == "default/b"


def paused(*, after_fallback: bool) -> Core:
    """A provider with two addresses, one of which has asked at 1 s for 30 s."""
    core = core_with(servers={"a": PROVIDER}, fallback=[{"modelServerName": "c"}])
    snapshot = with_resolved_addresses(core.snapshot, {"a.example": ("192.0.2.1", "192.0.2.2")})
    core.apply(snapshot, 0.0)
    first = sent(core)
    assert first.server == "default/a"
    own = first.assignment.addresses[0]
    if after_fallback:
        passed = len(first.assignment.addresses)
        end(core, first, 1.0, served=C1, served_by="default/c", attempts=1 + passed, pauses={"default/a": 30.0})
    else:
        end(core, first, 1.0, status=429, served=own, served_by="default/a", attempts=1, retry_after_s=30.0)
    return core


@pytest.mark.parametrize("after_fallback", [True, False])
def test_the_pause_of_a_provider_is_no_failure_and_holds_at_all_its_addresses(after_fallback: bool) -> None:
    core = paused(after_fallback=after_fallback)
    assert {failures(core)[f"192.0.2.{one}:443"] for one in (1, 2)} == {0}
    assert sent(core, 30.9).server == "default/c"
    assert sent(core, 31.0).server == "default/a"


def test_no_more_of_its_own_engines_than_its_policy_says() -> None:
    core = core_with(servers={"a": SERVERS["a"] + "trafficPolicy: {retry: {attempts: 0}}"})
    attempts = sent(core).attempts
    assert attempts is not None
    assert attempts.servers[:2] == ("default/a", "default/b")


@pytest.mark.parametrize(
    ("servers", "fields", "why"),
    [
        ({"b": endpoints(B1) + "cacheIsolation: Tenant\n"}, {}, "its body would have another cache_salt there"),
        ({"b": endpoints(B1) + "streamUsage: AsRequested\n"}, {"stream": True}, "another stream_options there"),
        ({"b": "endpoints: []\n"}, {}, "it has no usable endpoint"),
    ],
)
def test_a_fallback_that_is_not_possible_is_skipped_and_named(
    servers: dict[str, str], fields: dict[str, object], why: str
) -> None:
    core = core_with(servers={"c": SERVERS["c"], **servers})
    decision = sent(core, headers={"x-attache-tenant": "acme"}, **fields)
    assert decision.attempts is not None
    assert "default/b" not in decision.attempts.servers
    assert "default/c" in decision.attempts.servers
    assert decision.history.explanation is not None
    assert why in to_text(decision.history.explanation)


def test_a_request_for_an_adapter_goes_to_no_fallback() -> None:
    decision = sent(core_with(route="loraAdapters: [sql]"), model="sql")
    assert decision.attempts is not None
    assert set(decision.attempts.servers) == {"default/a"}
    assert decision.history.explanation is not None
    assert "the request is for an adapter" in to_text(decision.history.explanation)


def test_it_goes_to_none_at_once_either() -> None:
    core = core_with(route="loraAdapters: [sql]")
    fail(core, "a")
    assert sent(core, 0.5).server == "default/b"
    assert sent(core, 0.5, model="sql").server == "default/a"
    queue = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 30s}}\n"
    core = core_with(
        fallback=[{"modelServerName": "b", "afterQueue": "1s"}],
        route="loraAdapters: [sql]",
        servers={"a": endpoints(A1) + QUIET + queue},
    )
    sent(core)
    assert isinstance(ask(core, 0.1, model="sql"), RequestHeld)
    assert ends(core.tick(2.0)) == []


def test_other_gateways_know_nothing_of_fallbacks() -> None:
    assert sent(core_with(), attachment=GatewayProperties(is_bundle=False)).attempts is None


def test_a_request_whose_server_has_no_usable_endpoint_goes_to_the_first_fallback_that_has_one() -> None:
    core = core_with()
    fail(core, "a")
    decision = sent(core)
    assert (decision.server, decision.history.fell_back_for) == ("default/b", "no_endpoint")
    assert decision.body is not None
    assert json.loads(decision.body)["model"] == "smaller"
    assert decision.attempts is not None
    # those behind it, and none before it
    assert decision.attempts.servers == ("default/b", "default/b", "default/c")
    assert decision.attempts.degraded == ("default/b",)
    assert decision.history.explanation is not None
    assert "the fallback default/b at 10.0.1." in to_text(decision.history.explanation)
    fail(core, "b")
    assert sent(core).server == "default/c"
    fail(core, "c")
    # nobody is left: its own engines try it
    assert sent(core).server == "default/a"
    # after their pause, one tries its own again
    assert sent(core, 1.5).server == "default/a"


def test_a_server_whose_breaker_is_open_is_left_to_its_probes() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 100})
    pool = core.pools["default/a"]
    pool.breaker = pool.breaker.after_opening(pool.name, 0.0, needed=1)
    decision = sent(core)
    assert (decision.server, decision.history.fell_back_for) == ("default/b", "no_endpoint")
    assert core.explain(request(core), 0.0).server == "default/b"
    for outcome, is_closed in (({"served_by": "default/b", "attempts": 3, "served": B1}, False), ({}, True)):
        now = pool.breaker.reopen_at_s
        pool.breaker = msgspec.structs.replace(pool.breaker, needed=1)
        probe = sent(core, now)
        assert {sent(core, now).server for _ in range(5)} == {"default/b"}
        assert probe.server == "default/a"
        end(core, probe, now + 0.1, **{"served": probe.assignment.addresses[0], "served_by": "default/a", **outcome})
        assert bool(pool.breaker.trips) is not is_closed, "an answer of the fallback is a failure of the probe"
    assert sent(core, now + 60).server == "default/a"


def test_a_server_whose_breaker_is_open_is_no_fallback() -> None:
    core = core_with()
    fail(core, "a")
    pool = core.pools["default/b"]
    pool.breaker = pool.breaker.after_opening(pool.name, 0.0, needed=1)
    assert sent(core).server == "default/c"
    fail(core, "c")
    decision = sent(core)
    assert decision.attempts is not None
    assert decision.attempts.servers == ("default/a", "default/a")


def test_errors_of_a_fallback_open_its_breaker() -> None:
    core = core_with()
    for number in range(20):
        attempts = {"served": B1, "served_by": "default/b", "attempts": 3, "status": 500}
        end(core, sent(core, 60.0 * number), 60.0 * number + 1, **attempts)
    assert core.pools["default/b"].breaker.trips
    assert not core.pools["default/a"].breaker.trips, "it may have been busy"


def test_a_request_that_waits_while_the_breaker_opens_goes_to_a_fallback() -> None:
    queue = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 30s}}\n"
    servers = {"a": endpoints(A1) + QUIET + queue, "b": endpoints(B1) + QUIET + queue}
    core = core_with(servers=servers, fallback=FALLBACK[:1])
    first, held = sent(core), [ask(core, 0.1), ask(core, 0.2)]
    pool = core.pools["default/a"]
    pool.breaker = pool.breaker.after_opening(pool.name, 0.3, needed=1)
    core.on_stream_closed(first.ticket, 0.4)
    found = ends(core.tick(0.4))
    # the fallback has room for one, and nothing is left for the other
    assert [(one.ticket, type(one).__name__) for one in found] == [
        (held[0].ticket, "Decision"),
        (held[1].ticket, "RequestRefused"),
    ]
    moved, refused = found
    assert isinstance(moved, Decision)
    assert (moved.server, moved.history.fell_back_for) == ("default/b", "no_endpoint")
    assert isinstance(refused, RequestRefused)
    assert refused.refusal.code == "server_failing"
    core.on_stream_closed(moved.ticket, 1.0)
    assert in_flight(core) == 0


def test_explain_changes_nothing_and_says_the_same() -> None:
    core = core_with()
    before = core.explain(request(core), 0.0)
    assert [(one.server, one.why) for one in before.fallbacks] == [
        ("default/b", "is tried next"),
        ("default/c", "is tried next"),
    ]
    fail(core, "a")
    after = core.explain(request(core), 0.0)
    assert after.server == "default/b"
    assert after.fallbacks[0].why.startswith("is taken: the ModelServer before it has no usable endpoint")
    assert in_flight(core) == 0


def test_a_request_that_waits_long_enough_goes_to_a_fallback_with_room() -> None:
    queue = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 30s}}\n"
    servers = {"a": endpoints(A1) + QUIET + queue, "b": endpoints(B1) + QUIET + queue}
    core = core_with(servers=servers, fallback=[{"modelServerName": "b", "afterQueue": "500ms"}])
    first, held = sent(core), [ask(core, 0.1), ask(core, 0.2)]
    assert all(isinstance(one, RequestHeld) for one in held)
    assert not ends(core.tick(0.5))
    (moved,) = ends(core.tick(0.61))
    assert isinstance(moved, Decision)
    assert (moved.ticket, moved.server, moved.history.fell_back_for) == (held[0].ticket, "default/b", "queue")
    assert moved.history.waits[RequestState.QUEUED] == pytest.approx(0.51)
    # the fallback has no room: the next one keeps its place, and gets the first that is free
    assert not ends(core.tick(1.0))
    core.on_stream_closed(first.ticket, 1.1)
    (second,) = ends(core.tick(1.1))
    assert isinstance(second, Decision)
    assert (second.ticket, second.server) == (held[1].ticket, "default/a")
    for one in (moved, second):
        core.on_stream_closed(one.ticket, 2.0)
    assert in_flight(core) == 0


def test_a_request_that_waits_for_an_engine_goes_to_a_fallback() -> None:
    servers = {"a": "endpoints: []\nactivation: {}\n"}
    core = core_with(servers=servers, fallback=[{"modelServerName": "b", "afterQueue": "2s"}])
    held = ask(core)
    assert isinstance(held, RequestHeld)
    assert not ends(core.tick(1.9))
    (moved,) = ends(core.tick(2.1))
    assert isinstance(moved, Decision)
    assert moved.server == "default/b"
    assert core.count_requests(RequestState.AWAITING_ENGINE) == 0


def test_the_budget_bounds_what_is_sent_there() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 4, "budgetPercent": 50})
    fail(core, "a", 1.0)
    decisions = [sent(core, 1.1) for _ in range(20)]
    assert sum(one.server == "default/b" for one in decisions) == 4
    # they keep the refusal of their own, and are not listed there either
    others = [one for one in decisions if one.server == "default/a"]
    assert all(one.attempts is not None and "default/b" not in one.attempts.servers for one in others)
    for one in decisions:
        if one.server == "default/b":
            end(core, one, 1.2, served=one.assignment.addresses[0], served_by=one.server, attempts=1)
    assert sent(core, 1.3).server == "default/b"


class Workers:
    """Two processes of one machine, each of which is told what the other does."""

    def __init__(self, **limits: int) -> None:
        names = ("w1", "w2")
        self.cores = {name: core_with(fallback=FALLBACK[:1], retry=limits, worker=name) for name in names}

    def fail(self, now: float) -> None:
        for name, core in self.cores.items():
            fail(core, "a", now)
            self.tell(name, core.heartbeat(now), now)

    def ask(self, name: str, tenant: str, now: float) -> Decision:
        core = self.cores[name]
        own, effects = core.arrive(request(core, "hi " * 100, headers={"x-attache-tenant": tenant}), now)
        assert isinstance(own, Decision)
        self.tell(name, effects, now)
        return own

    def tell(self, name: str, effects: Iterable[Effect], now: float) -> None:
        events = [one.event for one in effects if isinstance(one, Broadcast)]
        batch = decode_events(encode_events(EventBatch(name, events)))
        for other, core in self.cores.items():
            if other != name:
                core.apply_peer_batch(batch, now)


def test_two_workers_have_one_budget() -> None:
    workers = Workers(minConcurrency=6, budgetPercent=0)
    workers.fail(1.0)
    decisions = [(name, workers.ask(name, "one", 1.0)) for _ in range(20) for name in ("w1", "w2")]
    taken = [(name, one) for name, one in decisions if one.server == "default/b"]
    assert Counter(name for name, _ in taken) == {"w1": 3, "w2": 3}
    # what one of them gets back, the other may use
    workers.tell("w1", workers.cores["w1"].on_stream_closed(taken[0][1].ticket, 1.0), 1.0)
    assert taken[0][0] == "w1"
    assert sent(workers.cores["w2"], 1.0).server == "default/b"


def test_a_tenant_has_one_part_over_all_workers() -> None:
    workers = Workers(minConcurrency=9, budgetPercent=0)
    quiet = workers.ask("w1", "two", 0.5)
    assert quiet.server == "default/a", "its request is there, and would be tried at the fallback next"
    workers.fail(1.0)
    taken = [workers.ask(name, "one", 1.0).server for _ in range(20) for name in ("w2", "w1")]
    assert taken.count("default/b") == 6
    assert workers.ask("w2", "two", 1.0).server == "default/b"


def test_requests_that_a_failed_engine_has_got_count_in_the_budget() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 4, "budgetPercent": 0})
    before = [sent(core, 1.0) for _ in range(3)]
    assert all(one.server == "default/a" for one in before)
    fail(core, "a", 1.1)
    assert [sent(core, 1.2).server for _ in range(3)] == ["default/b", "default/a", "default/a"]
    # an engine that answered after they came has them still
    for health in core.pools["default/a"].table.healths:
        health.served_at_s = 1.05
    assert sent(core, 1.2).server == "default/b"


def test_what_happened_is_settled_for_the_engines_that_made_it() -> None:
    core = core_with()
    decision = sent(core)
    assert decision.attempts is not None
    served = decision.attempts.addresses[3]
    found = end(core, decision, 1.0, served=served, served_by="default/b", attempts=4)
    assert (found.server, found.fell_back_from, found.model) == ("default/b", "default/a", "smaller")
    # by the price of the one that has served
    assert found.used.cost_micros == 5 * 610
    b = core.pools["default/b"].table
    assert failures(core) == {A1: 1, A2: 1, decision.attempts.addresses[2]: 1, served: 0, C1: 0}
    row = b.row_of(served)
    assert row is not None
    assert b.healths[row].answers == 1
    assert b.prompt_tokens[row] == 600
    # its prefix is there now
    prompt = request(core, "hi " * 100)
    assert prompt.destination.fallbacks is not None
    there = core.builder.move_to_fallback(prompt, prompt.destination.fallbacks.chain[0])
    expected = there.pool.estimate_prompt(prompt_of(there, None), 1.0)
    assert expected.demand.cached_tokens[row] > 0
    assert in_flight(core) == 0


def test_an_outcome_of_a_client_that_left_says_nothing_of_the_fallback() -> None:
    core = core_with()
    decision = sent(core)
    end(core, decision, 1.0, status=0, served=B1, served_by="default/b", attempts=3, has_left=True, prompt_tokens=None)
    assert failures(core) == {A1: 1, A2: 1, B1: 0, B2: 0, C1: 0}


def test_a_time_limit_in_the_middle_of_its_answer_is_neither_a_failure_of_a_fallback_nor_a_good_answer() -> None:
    core = core_with()
    decision, cut = sent(core, now=1.0), {"has_timed_out": True, "answer_bytes": 90_000, "ttfb_s": 0.1}
    end(core, decision, 61.0, served=B1, served_by="default/b", attempts=3, duration_s=60.0, **cut)
    table = core.pools["default/b"].table
    row = table.row_of(B1)
    assert row is not None
    assert (table.healths[row].answers, failures(core)[B1]) == (0, 0)


def of_tenant(core: Core, tenant: str, now: float) -> Decision:
    own, _ = core.arrive(request(core, "hi " * 100, headers={"x-attache-tenant": tenant}), now)
    assert isinstance(own, Decision)
    return own


def test_one_tenants_failures_leave_a_part_of_the_budget_to_others() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 9, "budgetPercent": 0})
    fail(core, "a", 1.0)
    alone = [of_tenant(core, "one", 1.0) for _ in range(20)]
    assert sum(one.server == "default/b" for one in alone) == 9, "nobody else wants it"
    assert of_tenant(core, "two", 1.1).server == "default/a"
    # as its requests end, the first one gets no more until the second has what is its part
    had = [one for one in alone if one.server == "default/b"]
    got = Counter[str]()
    for number, one in enumerate(had):
        now = 2.0 + number / 10
        core.on_stream_closed(one.ticket, now)
        for tenant in ("one", "one", "one", "two"):
            got[tenant] += of_tenant(core, tenant, now).server == "default/b"
    assert got == {"one": 4, "two": 3}
    # a third one comes
    assert of_tenant(core, "three", 3.0).server == "default/b"


def test_a_tenant_that_was_refused_is_remembered_for_a_while() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 3, "budgetPercent": 0})
    fail(core, "a", 1.0)
    running = [of_tenant(core, "one", 1.0) for _ in range(3)]
    refused = of_tenant(core, "two", 1.1)
    core.on_disconnect(refused.ticket, 1.1)
    core.on_stream_closed(running.pop().ticket, 1.2)
    assert of_tenant(core, "one", 1.3).server == "default/a"
    fail(core, "a", 1.1 + WANTED_S)
    assert of_tenant(core, "one", 1.1 + WANTED_S).server == "default/b"


def served_at(core: Core, address: str, tenant: str, now: float) -> None:
    one = of_tenant(core, tenant, now)
    end(core, one, now, served=address, served_by="default/a", attempts=1 + one.assignment.addresses.index(address))


@pytest.mark.parametrize("engine_s", [None, 0.2])
def test_what_fails_at_its_engines_counts_where_it_is_tried_next(engine_s: float | None) -> None:
    """No breaker opens for one tenant alone, and Envoy alone knows what it has tried next."""
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 9, "budgetPercent": 0})
    quiet = of_tenant(core, "two", 1.0)
    assert "default/b" in quiet.attempts.servers
    for number in range(20):
        one = of_tenant(core, "one", 1.0)
        passed = {"served": B1, "served_by": "default/b", "attempts": 3, "errors": {A1, A2}, "engine_s": engine_s}
        end(core, one, 1.0 + number / 100, **passed, duration_s=1.0, ttfb_s=0.2)
        served_at(core, A1, "two", 1.0 + number / 100)
    running = [of_tenant(core, "one", 2.0) for _ in range(20)]
    listed = sum("default/b" in one.attempts.servers for one in running)
    assert 5 <= listed <= 7, "two thirds, as each is expected to be there nearly all of its time"
    assert "default/b" in of_tenant(core, "two", 2.0).attempts.servers
    core.on_stream_closed(quiet.ticket, 2.0)


def test_what_waits_long_before_it_fails_counts_little() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 9, "budgetPercent": 0})
    of_tenant(core, "two", 1.0)
    for number in range(20):
        one = of_tenant(core, "one", 1.0)
        passed = {"served": B1, "served_by": "default/b", "attempts": 3, "errors": {A1, A2}, "engine_s": 0.1}
        end(core, one, 1.0 + number / 100, **passed, duration_s=10.0, ttfb_s=9.1)
        served_at(core, A1, "two", 1.0 + number / 100)
    running = [of_tenant(core, "one", 2.0) for _ in range(50)]
    assert sum("default/b" in one.attempts.servers for one in running) >= 40


def test_a_request_over_which_its_engines_fail_sends_no_other_one_to_the_fallback() -> None:
    core = core_with(fallback=FALLBACK[:1])
    now, others = 0.0, Counter[str]()
    for _ in range(100):
        # the engines answer 500 to one tenant, as its prompt is one that they cannot render
        ill = of_tenant(core, "one", now)
        if ill.server == "default/a":
            end(core, ill, now + 0.1, served=B1, served_by="default/b", attempts=3, errors={A1, A2})
        other = of_tenant(core, "two", now + 0.2)
        end(core, other, now + 0.3, served=other.assignment.addresses[0], served_by=other.server, attempts=1)
        others[other.server] += 1
        now += 0.5
    assert others == {"default/a": 100}


def test_nor_does_one_over_which_they_are_silent() -> None:
    core = core_with(fallback=FALLBACK[:1])
    ill = of_tenant(core, "one", 1.0)
    for _ in range(4):
        other = of_tenant(core, "two", 1.1)
        end(core, other, 1.5, served=other.assignment.addresses[0], served_by=other.server, attempts=1)
    # they have served others meanwhile
    served = core.pools["default/a"].table.healths
    served[0].served_at_s = served[1].served_at_s = 1.5
    end(core, ill, 3.0, served=B1, served_by="default/b", attempts=3)
    assert failures(core) == dict.fromkeys((A1, A2, B1, B2, C1), 0)


def test_nor_does_a_client_that_leaves_while_the_second_engine_is_asked() -> None:
    core = core_with()
    for number in range(20):
        # the first has answered 500, and the second would
        ill = of_tenant(core, "one", float(number))
        first, second = ill.assignment.addresses
        left = {"status": 0, "served": second, "served_by": "default/a", "attempts": 2, "has_left": True}
        end(core, ill, number + 0.1, **left, prompt_tokens=None, ttfb_s=None)
        other = of_tenant(core, "two", number + 0.2)
        assert other.server == "default/a"
        end(core, other, number + 0.3, served=other.assignment.addresses[0], served_by=other.server, attempts=1)
    assert failures(core)[first] == failures(core)[second] == 0


def test_if_engines_answer_500_to_everybody_the_breaker_of_their_server_opens() -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 5, "budgetPercent": 0})
    running = [of_tenant(core, f"tenant {number}", 1.0) for number in range(20)]
    for number, one in enumerate(running[:12]):
        end(core, one, 2.0 + number / 10, served=B1, served_by="default/b", attempts=3, errors={A1, A2})
    assert core.pools["default/a"].breaker.trips
    own, _ = core.arrive(request(core), 3.0)
    assert isinstance(own, RequestRefused), "those that are on their way have used the budget up"
    for one in running[12:]:
        end(core, one, 3.1, served=B1, served_by="default/b", attempts=3, errors={A1, A2})
    assert sent(core, 3.2).server == "default/b"


ON = ["connect", "timeout", "overloaded", "server-error"]
TAKING = [{"modelServerName": "b", "on": ON}, {"modelServerName": "c", "on": [*ON, "context-window"]}]


def test_only_fallbacks_of_the_class_take_what_was_refused() -> None:
    attempts = sent(core_with(fallback=TAKING)).attempts
    assert attempts is not None
    assert attempts.refusals == (("context-window", ("default/c",)),)
    attempts = sent(core_with()).attempts
    assert attempts is not None
    assert attempts.refusals == ()
    # one that is skipped takes nothing
    attempts = sent(core_with(fallback=TAKING, servers={"c": "endpoints: []\n"})).attempts
    assert attempts is not None
    assert attempts.refusals == ()


def test_an_engine_that_has_refused_a_prompt_has_not_failed() -> None:
    core = core_with(fallback=TAKING)
    for number in range(30):
        # envoy leaves the second engine out, and goes on to the last fallback
        now = float(number)
        decision = sent(core, now)
        assert decision.attempts is not None
        first = decision.attempts.addresses[0]
        attempts = {"served": C1, "served_by": "default/c", "attempts": 2, "refused": {first: "context-window"}}
        found = end(core, decision, now + 0.5, **attempts)
        assert (found.server, found.fell_back_from) == ("default/c", "default/a")
    assert failures(core) == dict.fromkeys((A1, A2, B1, B2, C1), 0)
    assert not any(breaker.trips for pool in core.pools.values() for breaker in pool.table.breakers)
    assert not any(pool.breaker.trips for pool in core.pools.values())


@pytest.mark.parametrize(
    ("made", "refused", "failed"),
    [
        # its own engines fail, a fallback refuses it, and the last one takes it
        ((0, 1, 2, 4), {2: "context-window"}, {0, 1}),
        # the fallback that takes it fails, and its own engines come last
        ((0, 4, 1), {0: "context-window", 1: "context-window"}, {4}),
    ],
)
def test_the_order_of_attempts_is_known_after_a_refusal(
    made: tuple[int, ...], refused: dict[int, str], failed: set[int]
) -> None:
    core = core_with(fallback=TAKING)
    decision = sent(core)
    assert decision.attempts is not None
    addresses, servers = decision.attempts.addresses, decision.attempts.servers
    outcome = {"served": addresses[made[-1]], "served_by": servers[made[-1]], "attempts": len(made)}
    end(core, decision, 1.0, **outcome, refused={addresses[one]: kind for one, kind in refused.items()})
    assert {address for address, count in failures(core).items() if count} == {addresses[one] for one in failed}


def test_a_probe_that_is_refused_lets_the_next_one_go() -> None:
    core = core_with(fallback=TAKING)
    fail(core, "a")
    now = 40.0
    probe = sent(core, now)
    assert probe.server == "default/a"
    first = probe.assignment.addresses[0]
    assert {sent(core, now).server for _ in range(3)} - {"default/a"}
    end(core, probe, now + 0.1, served=C1, served_by="default/c", attempts=2, refused={first: "context-window"})
    row = core.pools["default/a"].table.row_of(first)
    assert row is not None
    breaker = core.pools["default/a"].table.breakers[row]
    assert breaker.trips == 1
    assert not breaker.probes


def test_a_refusal_of_all_is_no_failure_either() -> None:
    core = core_with(fallback=TAKING)
    for number in range(30):
        decision = sent(core, float(number))
        assert decision.attempts is not None
        first = decision.attempts.addresses[0]
        refused = {first: "context-window", C1: "context-window"}
        attempts = {"served": C1, "served_by": "default/c", "attempts": 2, "status": 400, "prompt_tokens": None}
        end(core, decision, number + 0.5, **attempts, refused=refused)
    for number in range(30):
        decision = sent(core, 100.0 + number)
        assert decision.attempts is not None
        refused = dict.fromkeys(decision.attempts.addresses[:2], "context-window")
        second = decision.attempts.addresses[1]
        attempts = {"served": second, "served_by": "default/a", "attempts": 2, "status": 400, "prompt_tokens": None}
        end(core, decision, number + 100.5, **attempts, refused=refused)
    assert failures(core) == dict.fromkeys((A1, A2, B1, B2, C1), 0)


def lists(core: Core, server: str, **tokens: int) -> None:
    """The engines of ``server`` list their models, with the most tokens of a prompt."""
    pool = core.pools[f"default/{server}"]
    for address in pool.table.active_addresses:
        body = json.dumps({"data": [{"id": "m", "object": "model", **tokens}]}).encode()
        listed = parse_model_list(body)
        event = EngineReported(pool.name, address, EngineReport(), None, False, listed.names, listed.base)
        core.apply_peer_batch(
            EventBatch("p", [msgspec.structs.replace(event, context_tokens=listed.context_tokens)]), 0.0
        )


def asked(core: Core, prompt: object, **fields: object) -> Decision:
    """A request for completions with that prompt: some bytes of text, or some tokens."""
    own, _ = core.arrive(
        request(core, path="/v1/completions", prompt=prompt, **fields), 0.0, GatewayProperties(), wants_reasons=True
    )
    assert isinstance(own, Decision)
    return own


def test_a_prompt_that_cannot_fit_goes_to_a_fallback_without_an_attempt() -> None:
    core = core_with(fallback=TAKING)
    lists(core, "a", max_model_len=1000)
    lists(core, "c", max_model_len=3000)
    decision = asked(core, [7] * 1001)
    # the fallback before it has not the class
    assert (decision.server, decision.history.fell_back_for) == ("default/c", "context_window")
    assert decision.history.explanation is not None
    text = to_text(decision.history.explanation)
    assert "default/c" in text
    assert "is taken: the prompt is longer than the ModelServer before it takes" in text
    assert core.explain(request(core, path="/v1/completions", prompt=[7] * 1001), 0.0).server == "default/c"
    assert asked(core, [7] * 1000).server == "default/a"
    # it fits nowhere: its own engines say so
    decision = asked(core, [7] * 3001)
    assert (decision.server, decision.history.fell_back_for) == ("default/a", "")
    assert decision.history.explanation is not None
    assert "the fallback default/c: the prompt is longer than it takes" in to_text(decision.history.explanation)


def test_an_estimate_must_be_far_beyond_what_fits() -> None:
    core = core_with(fallback=TAKING)
    lists(core, "a", max_model_len=1000)
    bytes_per_token = core.pools["default/a"].caches.bytes_per_token
    most = int(2 * 1000 * bytes_per_token)
    assert asked(core, "x" * (most - 100)).server == "default/a"
    assert asked(core, "x" * (most + 100)).server == "default/c"
    # engines shorten it, or it is several prompts
    assert asked(core, "x" * (most + 100), truncate_prompt_tokens=100).server == "default/a"
    assert asked(core, ["x" * most] * 2).server == "default/a"


@pytest.mark.parametrize("length", [None, 0, -5, "many", True, 1e9, {}])
def test_where_a_length_is_not_known_the_engine_decides(length: object) -> None:
    core = core_with(fallback=TAKING)
    lists(core, "a", max_model_len=length)  # type: ignore[arg-type]
    assert asked(core, [7] * 100_000).server == "default/a"
    lists(core, "a", max_model_len=1000)
    assert asked(core, [7] * 100_000).server == "default/c"
    # one engine that is not known may take it
    table = core.pools["default/a"].table
    table.set_loras(table.active_rows[0], LoraState())
    assert asked(core, [7] * 100_000).server == "default/a"


def test_a_report_of_metrics_leaves_the_length_known() -> None:
    core = core_with(fallback=TAKING)
    lists(core, "a", max_model_len=1000)
    for address in (A1, A2):
        event = EngineReported("default/a", address, EngineReport(loras=LoraState(max_active=3)))
        core.apply_peer_batch(EventBatch("p", [event]), 0.0)
    assert asked(core, [7] * 1001).server == "default/c"


def test_without_the_class_a_long_prompt_stays() -> None:
    core = core_with()
    lists(core, "a", max_model_len=1000)
    lists(core, "b", max_model_len=1000)
    decision = asked(core, [7] * 1001)
    assert decision.server == "default/a"
    assert decision.attempts is not None
    # nor is it tried where it cannot fit
    assert set(decision.attempts.servers) == {"default/a", "default/c"}


SHORT = [{"modelServerName": "b", "degrade": {"maxOutputTokens": 100}}, {"modelServerName": "c"}]


def edited(body: bytes, edits: str) -> dict[str, object]:
    """What Envoy's filter makes of the body."""
    found = [one.split(",", 2) for one in edits.split(";") if one]
    for at, length, text in sorted(found, key=lambda one: -int(one[0])):
        body = body[: int(at)] + text.encode() + body[int(at) + int(length) :]
    return json.loads(body)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("path", "fields", "shorter"),
    [
        ("/v1/chat/completions", {}, {"max_completion_tokens": 100}),
        ("/v1/chat/completions", {"max_tokens": 101}, {"max_tokens": 100}),
        ("/v1/chat/completions", {"max_tokens": None}, {"max_completion_tokens": 100}),
        ("/v1/chat/completions", {"max_completion_tokens": None, "seed": 7}, {"max_completion_tokens": 100}),
        (
            "/v1/chat/completions",
            {"max_tokens": 900, "max_completion_tokens": 8000, "stream": True},
            {"max_tokens": 100, "max_completion_tokens": 100},
        ),
        ("/v1/messages", {"max_tokens": 4096}, {"max_tokens": 100}),
        ("/v1/responses", {"input": "hi"}, {"max_output_tokens": 100}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4096}, {"max_tokens": 100}),
        # it asks for no more
        ("/v1/chat/completions", {"max_tokens": 100}, None),
        ("/v1/completions", {"prompt": "hi"}, None),
        ("/v1/embeddings", {"input": "hi"}, None),
    ],
)
def test_answers_of_a_fallback_may_be_shorter(
    path: str, fields: dict[str, object], shorter: dict[str, int] | None
) -> None:
    core = core_with(fallback=SHORT)
    arrival = request(core, path=path, **fields)
    own, _ = core.arrive(arrival, 0.0, GatewayProperties(), wants_reasons=True)
    assert isinstance(own, Decision)
    assert own.attempts is not None
    body = arrival.body if own.body is None else own.body
    sent_body = json.loads(body)
    edits = dict(own.attempts.edits)
    assert edits.keys() == {*own.attempts.shorter} == (set() if shorter is None else {"default/b"})
    assert edited(body, edits.get("default/b", "")) == {**sent_body, **(shorter or {})}
    # its own engines are asked for what the client wants
    assert {name: sent_body.get(name) for name in fields} == {**fields}
    assert own.history.explanation is not None
    assert ("answers of at most 100 tokens" in to_text(own.history.explanation)) is (shorter is not None)
    # sent there at once, its body has the limits, and those behind it get no more
    fail(core, "a")
    arrival = request(core, path=path, **fields)
    own, _ = core.arrive(arrival, 0.0)
    assert isinstance(own, Decision)
    assert own.server == "default/b"
    assert own.body is not None
    there = json.loads(own.body)
    assert {name: there.get(name) for name in shorter or {}} == (shorter or {})
    assert own.attempts is not None
    assert own.attempts.shorter == (() if shorter is None else ("default/b", "default/c"))
    assert not own.attempts.edits


def test_the_usage_log_knows_whose_answers_are_shorter() -> None:
    gateway = json.dumps(
        {
            "apiVersion": "attache.dev/v1alpha1",
            "kind": "GatewayConfig",
            "metadata": {"name": "gateway"},
            "spec": {"usageLog": {"path": "/var/log/attache/usage.log"}},
        }
    )
    core = core_with(others=gateway, fallback=SHORT)
    usage = sent(core).usage
    assert usage is not None
    assert [usage.as_served_by(f"default/{name}").degraded for name in "abc"] == [False, True, False]
    fail(core, "a")
    usage = sent(core).usage
    assert usage is not None
    assert (usage.server, usage.degraded, usage.as_served_by("default/c").degraded) == ("default/b", True, True)


def test_the_usage_log_knows_all_that_may_serve_it() -> None:
    gateway = json.dumps(
        {
            "apiVersion": "attache.dev/v1alpha1",
            "kind": "GatewayConfig",
            "metadata": {"name": "gateway"},
            "spec": {"usageLog": {"path": "/var/log/attache/usage.log"}},
        }
    )
    usage = sent(core_with(others=gateway)).usage
    assert usage is not None
    there = usage.as_served_by("default/b")
    assert (usage.server, usage.served_model, usage.degraded) == ("default/a", "m", False)
    assert (there.server, there.served_model, there.degraded) == ("default/b", "smaller", True)
    assert there.price is not None
    assert there.price.rates.input == 5_000_000
    assert usage.as_served_by("default/other") is usage


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "end", "fail", "leave"]), st.integers(0, 7), st.integers(1, 5)), max_size=60
    ),
    st.integers(0, 2**16),
)
def test_whatever_happens_the_budget_holds_and_nothing_is_left(steps: list[tuple[str, int, int]], seed: int) -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 3, "budgetPercent": 0})
    rng, now = random.Random(seed), 0.0
    open_: list[Decision] = []
    effects: list[Effect] = []
    for what, which, attempts in steps:
        now += rng.random()
        if what == "ask":
            own = core.arrive(request(core, "hi " * 100), now)[0]
            # refused: the breakers of all are open
            open_ += [own] if isinstance(own, Decision) else []
        elif what == "fail":
            fail(core, "ab"[which % 2], now)
        elif open_:
            one = open_.pop(which % len(open_))
            if what == "leave":
                effects += core.on_disconnect(one.ticket, now)
                continue
            assert one.attempts is not None
            number = min(attempts, len(one.attempts.servers))
            served = {"served": one.attempts.addresses[number - 1], "served_by": one.attempts.servers[number - 1]}
            end(core, one, now, attempts=number, status=rng.choice([200, 503, 400]), **served)
        at_fallback = sum(one.server == "default/b" for one in open_)
        assert at_fallback <= 3
    for one in open_:
        core.on_stream_closed(one.ticket, now)
    assert in_flight(core) == 0
    assert not core.records() or all(one.state is RequestState.ENDED for one in core.records())
    assert not any(one.has_requests for one in core._running._budgets._servers.values())


def snapshot_with(*names: str, servers: dict[str, str] | None = None) -> Snapshot:
    rule: dict[str, object] = {"targetModels": [{"modelServerName": "a"}]}
    if "b" in names:
        rule |= {"fallback": FALLBACK[:1], "retry": {"minConcurrency": 4, "budgetPercent": 0}}
    known = {**SERVERS, **(servers or {})}
    return configuration(
        servers={name: known[name] for name in names}, routes={"chat": f"rules: {json.dumps([rule])}\n"}
    )


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("comes_back", ["never", "as it was", "with other engines", "as another protocol"])
def test_a_fallback_that_is_deleted_or_changed_while_it_has_a_request(*, is_at_once: bool, comes_back: str) -> None:
    core = core_with(fallback=FALLBACK[:1], retry={"minConcurrency": 4, "budgetPercent": 0})
    if is_at_once:
        fail(core, "a", 1.0)
    decisions = [sent(core, 1.1) for _ in range(4)]
    assert {one.server for one in decisions} == {"default/b" if is_at_once else "default/a"}
    core.apply(snapshot_with("a"), 1.2)
    others = {
        "as it was": {},
        "with other engines": {"b": endpoints("10.0.7.1:8000") + QUIET + "model: other\n"},
        "as another protocol": {"b": endpoints(B1) + QUIET + "protocol: V2\n"},
    }
    if comes_back != "never":
        core.apply(snapshot_with("a", "b", servers=others[comes_back]), 1.3)
    for number, one in enumerate(decisions):
        served = {"served": B1, "served_by": "default/b", "attempts": 1 if is_at_once else 3}
        found = end(core, one, 2.0 + number / 10, **served)
        # by the price of the one that has served
        assert (found.server, found.used.cost_micros) == ("default/b", 5 * 610)
    assert in_flight(core) == 0
    assert not core.records()
    core.apply(snapshot_with("a"), 2.9)
    assert not core._running._budgets._servers
    # and the next one is served, by what there is now
    core.apply(snapshot_with("a", "b"), 3.0)
    fail(core, "a", 3.0)
    assert [sent(core, 3.1).server for _ in range(5)].count("default/b") == 4


def test_a_request_that_waits_for_a_fallback_that_is_deleted_stays_where_it_is() -> None:
    servers = {"a": "endpoints: []\nactivation: {}\n"}
    core = core_with(servers=servers, fallback=[{"modelServerName": "b", "afterQueue": "2s"}])
    held = ask(core)
    assert isinstance(held, RequestHeld)
    core.apply(snapshot_with("a", servers=servers), 1.0)
    assert not ends(core.tick(2.1))
    assert core.count_requests(RequestState.AWAITING_ENGINE) == 1
    core.apply(snapshot_with("a"), 3.0)
    (moved,) = ends(core.tick(3.1))
    assert isinstance(moved, Decision)
    assert moved.server == "default/a"


def pair(connector: str) -> str:
    """A ModelServer of a prefill engine (A1) and a decode engine (A2)."""
    labelled = [{"address": one, "labels": {"role": role}} for one, role in ((A1, "prefill"), (A2, "decode"))]
    group = (
        "{prefillLabels: {role: prefill}, decodeLabels: {role: decode}, leg: Gateway, minUncachedTokens: 100,"
        f" decideBy: UncachedTokens, connector: {connector}}}"
    )
    engine = "engine: SGLang\n" if connector == "bootstrap_room" else ""
    return f"endpoints: {json.dumps(labelled)}\n{QUIET}{engine}pdGroup: {group}\n"


@pytest.mark.parametrize(
    ("connector", "failed", "server"),
    [
        ("NixlConnector", A2, "default/c"),
        ("bootstrap_room", A2, "default/c"),
        ("bootstrap_room", A1, "default/c"),
        # the decode engine computes the prompt
        ("NixlConnector", A1, "default/a"),
    ],
)
def test_a_stage_without_a_usable_engine_sends_requests_to_a_fallback(connector: str, failed: str, server: str) -> None:
    core = core_with(servers={"a": pair(connector)}, fallback=[{"modelServerName": "c"}])
    table = core.pools["default/a"].table
    row = table.row_of(failed)
    assert row is not None
    trip(table, row, 0.0)
    run = core._records[ask(core, 0.1).ticket].run
    assert run is not None
    assert run.pool.name == server
