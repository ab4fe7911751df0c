# SPDX-License-Identifier: Apache-2.0
"""Providers that report how full they are: who is told, what is told, and where requests go by it."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Final

import pytest

from extproc.api.dns_resolver import with_resolved_addresses
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld
from extproc.core.peer_events import EngineReported, EventBatch, decode_events, encode_events
from extproc.core.request_record import RequestHead
from extproc.core.spare_capacity import has_capacity, load_fraction
from extproc.engines.metrics import EngineReport
from tests.extproc.breakers import trip
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, endpoints, ends, request

ENGINE, OTHER = "10.0.0.1:8000", "10.0.0.2:8000"
WEST: Final = "192.0.2.1:443"
QUIET: Final = "scrapeInterval: 0s\n"
QUEUE: Final = f"flowControl: {{{ONE_AT_A_TIME}, timeout: 30s}}\n"
PROVIDER: Final = "provider: {host: west.example, reportsLoad: true}\napis: [ChatCompletions]\n"
AFTER: Final = [{"modelServerName": "west", "afterQueue": "500ms"}, {"modelServerName": "spare"}]


def region(*, west: str = PROVIDER, addresses: tuple[str, ...] = ("192.0.2.1",), **rule: object) -> Core:
    """One engine here that takes one request at a time, a provider behind it, and an engine as the last resort."""
    rules = json.dumps([{"targetModels": [{"modelServerName": "own"}], "fallback": AFTER, **rule}])
    servers = {"own": endpoints(ENGINE) + QUIET + QUEUE, "west": west, "spare": endpoints(OTHER) + QUIET}
    snapshot = configuration(servers=servers, routes={"chat": f"rules: {rules}\n"})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    core.apply(with_resolved_addresses(snapshot, {"west.example": addresses}), 0.0)
    return core


def reports(core: Core, load: float, now: float, address: str = WEST) -> None:
    core.on_engine_report(EngineReported("default/west", address, EngineReport(load=load)), now)


def ask(core: Core, now: float) -> Decision | RequestHeld:
    own, _ = core.arrive(request(core), now, wants_reasons=True)
    assert isinstance(own, Decision | RequestHeld)
    return own


def decided(core: Core, now: float) -> Decision:
    own = ask(core, now)
    assert isinstance(own, Decision)
    return own


def moved(core: Core, now: float) -> list[str]:
    return [one.server for one in ends(core.tick(now)) if isinstance(one, Decision)]


def test_a_request_that_waits_goes_to_a_provider_that_has_room_and_to_no_full_one() -> None:
    core = region()
    decided(core, 0.0)
    assert isinstance(ask(core, 0.1), RequestHeld)
    reports(core, 1.0, 0.5)
    assert moved(core, 0.7) == []
    reports(core, 0.99, 1.0)
    assert moved(core, 1.8) == ["default/west"]


def test_a_report_that_is_old_says_nothing_and_the_provider_counts_as_one_that_never_reported() -> None:
    core = region()
    decided(core, 0.0)
    assert isinstance(ask(core, 0.1), RequestHeld)
    reports(core, 1.0, 0.5)
    # it counts for two and a half intervals of a second
    assert moved(core, 2.95) == []
    assert moved(core, 4.0) == ["default/west"]


def test_a_provider_with_several_addresses_is_full_when_all_are() -> None:
    core = region(addresses=("192.0.2.1", "192.0.2.2"))
    pool = core.pools["default/west"]
    reports(core, 1.0, 0.5)
    assert not pool.is_provider_full(0.6)
    reports(core, 1.0, 0.6, "192.0.2.2:443")
    assert pool.is_provider_full(0.7)


def test_after_a_failure_a_full_provider_is_tried_behind_the_other_fallbacks() -> None:
    core = region()
    attempts = decided(core, 0.0).attempts
    assert attempts is not None
    assert attempts.servers == ("default/own", "default/west", "default/spare")
    reports(core, 1.0, 1.0)
    core = region()
    reports(core, 1.0, 1.0)
    attempts = decided(core, 1.1).attempts
    assert attempts is not None
    assert attempts.servers == ("default/own", "default/spare", "default/west")


def test_without_an_engine_a_full_provider_is_taken_only_if_nothing_else_serves() -> None:
    core = region()
    trip(core.pools["default/own"].table, 0, 0.0)
    reports(core, 1.0, 0.0)
    assert decided(core, 0.1).server == "default/spare"
    trip(core.pools["default/spare"].table, 0, 0.0)
    assert decided(core, 0.2).server == "default/west"


def test_without_reports_load_nothing_counts_but_what_is_in_flight() -> None:
    core = region(west=PROVIDER.replace(", reportsLoad: true", ""))
    reports(core, 1.0, 0.5)
    assert not core.pools["default/west"].is_provider_full(0.6)


def test_a_tier_that_reports_that_it_is_full_is_passed_over() -> None:
    priced = "pricing: [{perMillion: {input: 1, output: 1}}]\n"
    rule = {"targetModels": [{"modelServerName": "own"}, {"modelServerName": "west"}], "tiers": {}}
    servers = {"own": endpoints(ENGINE) + QUIET + priced.replace("1", "9"), "west": PROVIDER + priced}
    snapshot = configuration(servers=servers, routes={"chat": f"rules: [{json.dumps(rule)}]\n"})
    core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
    core.apply(with_resolved_addresses(snapshot, {"west.example": ("192.0.2.1",)}), 0.0)
    assert decided(core, 0.0).server == "default/west"
    reports(core, 1.0, 1.0)
    assert decided(core, 1.1).server == "default/own"
    trip(core.pools["default/own"].table, 0, 1.1)
    core.pools["default/own"].breaker = core.pools["default/own"].table.breakers[0]
    assert decided(core, 1.2).server == "default/west"


def test_its_own_queue_holds_back_what_a_full_provider_would() -> None:
    only = {"targetModels": [{"modelServerName": "west"}], "fallback": []}
    core = region(west=PROVIDER + "flowControl: {timeout: 30s}\n", **only)
    reports(core, 1.0, 0.0)
    held = ask(core, 0.1)
    assert isinstance(held, RequestHeld)
    reports(core, 0.5, 1.0)
    assert moved(core, 1.1) == ["default/west"]


def test_no_copies_go_to_a_full_provider() -> None:
    core = region()
    pool = core.pools["default/west"]
    assert has_capacity(pool, 0.0)
    reports(core, 1.0, 0.0)
    assert not has_capacity(pool, 0.1)


def split(**rule: object) -> Core:
    """Two targets of equal weight, of which one is a provider; nothing is behind them."""
    targets = [{"modelServerName": "own", "weight": 1}, {"modelServerName": "west", "weight": 1}]
    return region(targetModels=targets, fallback=[], **rule)


def servers_of(core: Core, now: float, count: int = 20, **headers: str) -> Counter[str]:
    """Where ``count`` requests go, each of which has ended before the next comes."""
    found = Counter[str]()
    for _ in range(count):
        own, _ = core.arrive(request(core, headers=headers), now)
        assert isinstance(own, Decision)
        found[own.server] += 1
        core.on_stream_closed(own.ticket, now)
    return found


def test_a_weighted_target_that_reports_that_it_is_full_gets_nothing_while_another_has_room() -> None:
    core = split()
    assert servers_of(core, 0.1).keys() == {"default/own", "default/west"}
    reports(core, 1.0, 0.5)
    assert servers_of(core, 0.6) == {"default/own": 20}
    reports(core, 0.99, 1.0)
    assert servers_of(core, 1.1).keys() == {"default/own", "default/west"}


def test_if_no_other_target_has_room_the_weights_decide() -> None:
    core = split()
    reports(core, 1.0, 0.5)
    # its one place is taken
    assert decided(core, 0.6).server == "default/own"
    found = Counter(type(ask(core, 0.7)).__name__ for _ in range(20))
    assert found.keys() == {"Decision", "RequestHeld"}


def test_nor_does_one_whose_breaker_is_open() -> None:
    core = split()
    reports(core, 1.0, 0.5)
    pool = core.pools["default/own"]
    pool.breaker = pool.breaker.after_opening(pool.name, 0.5, needed=1)
    assert "default/west" in servers_of(core, 0.6)


def test_a_sticky_split_does_not_follow_the_load() -> None:
    """The session would change its model, and change it back a second later."""
    core = split(sticky="Session")
    sessions = [{"x-session-id": str(number)} for number in range(20)]
    before = [servers_of(core, 0.1, 1, **one) for one in sessions]
    assert sum(before, Counter()).keys() == {"default/own", "default/west"}
    reports(core, 1.0, 0.5)
    assert [servers_of(core, 0.6, 1, **one) for one in sessions] == before


@pytest.mark.parametrize(("sticky", "told"), [("None", 0.0), ("Session", 1.0)])
def test_what_is_told_of_a_split_leaves_out_a_full_target_that_gets_nothing(sticky: str, told: float) -> None:
    core = split(sticky=sticky)
    reports(core, 1.0, 0.5)
    targets = core.builder.unconditional_chat_targets(request(core).head, "m")
    assert targets is not None
    assert load_fraction(targets, core.pools, core.admission.gates, 0.6) == told


def test_explain_says_so_too() -> None:
    core = split()
    reports(core, 1.0, 0.5)
    assert {core.explain(request(core), 0.6).server for _ in range(20)} == {"default/own"}


def test_other_workers_know_it_too() -> None:
    report = EngineReported("default/west", WEST, EngineReport(load=1.0))
    batch = decode_events(encode_events(EventBatch("a", (report,))))
    core = region()
    core.apply_peer_batch(batch, 1.0)
    assert core.pools["default/west"].is_provider_full(1.1)


SHOWN: Final = """apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec: {clients: Trusted, loadShownTo: [east]}
"""


def shown(core: Core, tenant: str = "east", now: float = 0.0, *, is_trusted: bool = True) -> float | None:
    head = RequestHead("GET", "/v1/models/m", {"x-attache-tenant": tenant}, has_body=False, is_trusted=is_trusted)
    return core.load_fraction_for_caller(head, "m", now)


def telling(own: str = QUEUE, others: str = SHOWN, **rule: object) -> Core:
    rules = json.dumps([{"targetModels": [{"modelServerName": "own"}], **rule}])
    servers = {"own": endpoints(ENGINE, OTHER) + QUIET + own, "b": endpoints("10.0.1.1:8000") + QUIET + QUEUE}
    snapshot = configuration(servers=servers, routes={"chat": f"rules: {rules}\n"}, others=others)
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def test_only_the_tenants_that_are_named_are_told() -> None:
    core = telling()
    assert shown(core) == 0
    assert shown(core, "acme") is None
    # a header that a client wrote
    assert shown(core, is_trusted=False) is None
    assert shown(telling(others="")) is None
    nobody = telling(others=SHOWN.replace(", loadShownTo: [east]", ""))
    assert shown(nobody) is None


def test_what_is_told_is_how_full_its_engines_are() -> None:
    core = telling()
    decided(core, 0.0)
    assert shown(core) == 0.5
    decided(core, 0.0)
    assert shown(core) == 1
    # by the usual limits without a queue
    assert shown(telling("")) == 0


def test_it_is_full_while_requests_wait_or_no_engine_is_usable() -> None:
    core = telling()
    first = decided(core, 0.0)
    decided(core, 0.0)
    assert isinstance(ask(core, 0.1), RequestHeld)
    core.pools["default/own"].table.in_flight[first.assignment.endpoint.row] = 0
    assert shown(core, now=0.2) == 1
    core = telling()
    for row in core.pools["default/own"].table.active_rows:
        trip(core.pools["default/own"].table, row, 0.0)
    assert shown(core, now=0.1) == 1


@pytest.mark.parametrize(("more", "load"), [({}, 1.0), ({"tiers": {}}, 0.0)])
def test_of_several_model_servers_it_is_where_a_request_may_go(more: dict[str, object], load: float) -> None:
    core = telling(targetModels=[{"modelServerName": "own"}, {"modelServerName": "b"}], **more)
    core.pools["default/b"].table.in_flight[0] = 1
    assert shown(core) == load


def test_fallbacks_and_rules_that_others_reach_do_not_count() -> None:
    core = telling(fallback=[{"modelServerName": "b"}])
    for _ in range(2):
        decided(core, 0.0)
    assert shown(core) == 1
    rule = {"modelMatch": {"headers": {"x-attache-tenant": {"exact": "acme"}}}}
    assert shown(telling(**rule)) is None
