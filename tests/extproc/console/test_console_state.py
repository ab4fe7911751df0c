# SPDX-License-Identifier: Apache-2.0
"""What the console says of a process equals what its core has, bounded and filtered."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

from extproc.console.console_state import ConsoleInputs, ConsoleQuery, ProcessView, console_state
from extproc.core.core import Core
from extproc.core.effects import CacheLookupResult
from extproc.core.request_states import RequestState
from tests.extproc.scenes import configuration
from tools.console_pictures import Gateway, demo_gateway, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from extproc.console.console_state import ConsoleState

Result = TypeVar("Result")
PROCESS = ProcessView("demo", "1", 0, 1, 0.0, 0.0, is_ready=True, has_explain=False, has_usage=False)


def at_once(steps: Generator[None, None, Result]) -> Result:
    """The result of what is made in steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Result = end.value
            return found


def state_of(gateway: Gateway, **query: object) -> ConsoleState:
    metrics = gateway.metrics
    facts = ConsoleInputs(PROCESS, gateway.report, metrics.outcomes(), metrics.admission.tenant_counts())
    return at_once(console_state(gateway.core, facts, ConsoleQuery(**query), gateway.now))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    return demo_gateway()


def test_sums_are_those_of_the_engines(gateway: Gateway) -> None:
    state = state_of(gateway)
    assert [one.name for one in state.servers] == ["default/llama", "default/qwen"]
    for server in state.servers:
        engines = [one for one in state.engines if one.server == server.name]
        table = gateway.core.pools[server.name].table
        assert len(engines) == server.engines == len(table)
        assert server.in_flight == sum(one.in_flight for one in engines) == table.in_flight[table.active_rows].sum()
        assert server.waiting == sum(one.waiting or 0 for one in engines)
        assert server.serving == sum(one.status == "serving" for one in engines)
    assert state.total.engines == 12
    assert state.total.in_flight == gateway.core.count_requests(RequestState.RUNNING, RequestState.SETTLED)
    assert state.total.held == gateway.core.count_requests(RequestState.QUEUED) > 0


def test_engines_with_problems_come_first_with_the_reason(gateway: Gateway) -> None:
    silent, avoided, *others = state_of(gateway).engines
    assert (silent.address, silent.status, silent.report_age_s) == ("10.0.2.4:8000", "silent", None)
    assert (avoided.address, avoided.status) == ("10.0.1.3:8000", "avoided")
    assert "it answers with errors (408 or 5xx); " in avoided.why
    assert avoided.since_s is not None
    assert avoided.since_s > 14
    assert {one.status for one in others} == {"serving"}


def test_tenants_and_bands_count_who_waits(gateway: Gateway) -> None:
    state = state_of(gateway)
    assert {one.name for one in state.tenants} == {"search", "support", "research"}
    assert sum(one.waiting for one in state.tenants) == sum(one.waiting for one in state.bands) == state.total.held
    assert sum(one.in_flight for one in state.tenants) == state.total.in_flight
    assert sum(one.sent for one in state.tenants) == state.outcomes["picked"]
    assert sum(one.share for one in state.bands) == pytest.approx(1)
    band = next(one for one in state.bands if one.waiting)
    assert band.oldest_s == state.servers[0].oldest_s == state.total.oldest_s
    assert all(one.output_tokens > 0 for one in state.tenants)


def test_routes_say_what_clients_may_ask_for(gateway: Gateway) -> None:
    chat, large = state_of(gateway).routes
    assert chat.models == ("chat", "sql", "legal")
    assert chat.rules[0].match == "x-plan is 'free'"
    assert [(one.server, one.share) for one in chat.rules[1].targets] == [("default/llama", 0.9), ("default/qwen", 0.1)]
    assert (large.model_count, large.limits, chat.limits) == (1, 0, 1)


def test_routes_with_a_response_cache_show_its_hits() -> None:
    server = {"model": "m", "endpoints": [{"address": "10.0.0.1:1"}]}
    rules = {"rules": [{"targetModels": [{"modelServerName": "s"}]}]}
    gateway = Gateway(
        snapshot_of(
            {"s": server},
            {
                "asked": {"modelName": "a", "cache": {}, **rules},
                "new": {"modelName": "b", "cache": {}, **rules},
                "plain": {"modelName": "c", **rules},
            },
        )
    )
    for result, why in (("hit", ""), ("miss", ""), ("miss", ""), ("bypass", "tools"), ("bypass", "size")):
        gateway.metrics.caches.count(CacheLookupResult("default/asked", result, why))  # type: ignore[arg-type]
    facts = ConsoleInputs(PROCESS, gateway.report, {}, (), gateway.metrics.caches.lookups())
    state = at_once(console_state(gateway.core, facts, ConsoleQuery(), gateway.now))
    found = {one.name: (one.cache_lookups, one.cache_hits) for one in state.routes}
    assert found == {"default/asked": (3, 1), "default/new": (0, 0), "default/plain": (None, None)}


def test_a_route_with_much_in_it_is_shown_in_part() -> None:
    target = {"targetModels": [{"modelServerName": "s", "weight": weight} for weight in range(1, 17)]}
    rules = [{**target, "modelMatch": {"headers": {"x": {"exact": "v" * 5_000}}}} for _ in range(15)]
    adapters = [f"{number}-{'a' * 500}" for number in range(1_000)]
    server = {"model": "m", "endpoints": [{"address": "10.0.0.1:1"}]}
    routes = {
        f"r{number}": {"loraAdapters": [f"{number}-{one}" for one in adapters], "rules": rules} for number in (1, 2)
    }
    route, _ = state_of(Gateway(snapshot_of({"s": server}, routes))).routes
    assert (len(route.rules), route.rule_count, len(route.models), route.model_count) == (4, 15, 8, 1_000)
    assert (len(route.rules[0].targets), route.rules[0].target_count) == (4, 16)
    assert len(msgspec.json.encode(route)) < 5_000


def test_limits_show_the_fullest_buckets(gateway: Gateway) -> None:
    state = state_of(gateway)
    assert [one.used_share for one in state.buckets] == sorted((one.used_share for one in state.buckets), reverse=True)
    levels = {one.key: one.level for one in gateway.core.admission.limits.recent_levels(gateway.now, 100)}
    for one in state.buckets:
        assert one.left == levels[f"{one.route}/{one.limit}/{one.resource}/{one.subject}"]
    assert len(state.buckets) == len(levels) == 6
    # reading changed nothing, and agrees with the buckets' own inflow
    exact = {one.key: one.level for one in gateway.core.admission.limits.levels(gateway.now)}
    assert {key: level for key, level in levels.items() if key in exact} == pytest.approx(exact)


@pytest.mark.parametrize(
    ("query", "addresses"),
    [
        ({"server": "default/qwen", "sort": "address", "limit": 2}, ["10.0.2.1:8000", "10.0.2.2:8000"]),
        ({"find": "0.1.7", "sort": "address"}, ["10.0.1.7:8000"]),
        ({"find": "QWEN", "sort": "address", "descending": True, "limit": 1}, ["10.0.2.4:8000"]),
        ({"server": "default/none"}, []),
    ],
)
def test_engines_are_filtered_and_sorted(gateway: Gateway, query: dict[str, object], addresses: list[str]) -> None:
    assert [one.address for one in state_of(gateway, **query).engines] == addresses


@pytest.mark.parametrize("descending", [False, True])
def test_unknown_values_are_last_in_either_order(gateway: Gateway, *, descending: bool) -> None:
    values = [one.kv_usage for one in state_of(gateway, sort="kvUsage", descending=descending).engines]
    assert values[-1] is None
    known = [one for one in values if one is not None]
    assert len(known) == 11
    assert known == sorted(known, reverse=descending)


def test_a_process_without_anything_has_a_state() -> None:
    core = Core(configuration(servers={"one": "endpoints: []"}), rng=random.Random(0), ticket_prefix="t")
    gateway = demo_gateway()
    facts = ConsoleInputs(PROCESS, gateway.report, {}, ())
    state = at_once(console_state(core, facts, ConsoleQuery(), 0.0))
    assert state.total.engines == 0
    assert state.servers[0].kv_usage is None
    assert state.engines == ()
