# SPDX-License-Identifier: Apache-2.0
"""Breakers of endpoints and ModelServers in the life of requests, in one process and in several."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.core.core import Core
from extproc.core.effects import BreakerChanged, Broadcast, Decision, RequestRefused
from extproc.core.peer_events import AskLimitLevels, EventBatch, ProcessAlive, decode_events, encode_events
from extproc.core.request_record import Outcome
from extproc.endpoints.breaker import BreakerState
from extproc.refusals import ServerFailing
from tests.examples import slow
from tests.extproc.scenes import configuration, endpoints, request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect
    from extproc.scheduling.pool import Pool

ENGINES = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000")
SERVER = "default/llama"
NO_USAGE: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "cached_tokens": None}
DOWN: dict[str, Any] = {"status": 503, **NO_USAGE}
ERROR: dict[str, Any] = {"status": 500, **NO_USAGE}
LATENCY_S = 0.01


def site(engines: int, *, other: bool = False) -> Snapshot:
    spec = endpoints(*ENGINES[:engines]) + "scrapeInterval: 0s\n"
    servers = {"llama": spec}
    targets = "{modelServerName: llama, weight: 99}"
    if other:
        servers["spare"] = endpoints("10.0.9.1:8000") + "scrapeInterval: 0s\n"
        targets += ", {modelServerName: spare, weight: 1}"
    return configuration(servers=servers, routes={"chat": f"rules: [{{targetModels: [{targets}]}}]"})


class Site:
    """Requests at a rate, to processes in turn. Each answer is known ``log_s`` after its end, to another process."""

    def __init__(
        self,
        engines: int,
        answers: Callable[[str, float], dict[str, Any]],
        *,
        processes: int = 1,
        rate: float = 30.0,
        took_s: float = 0.2,
        other: bool = False,
    ) -> None:
        """``answers``: by address and instant, what the outcome has; empty: served."""
        self.answers = answers
        self.rate, self.took_s = rate, took_s
        self.now = 0.0
        self.cores = [
            Core(
                site(engines, other=other),
                rng=random.Random(number),
                ticket_prefix=f"w{number}",
                machine=None if processes == 1 else "here",
            )
            for number in range(processes)
        ]
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.turn = itertools.cycle(range(processes))
        self.met: Counter[str] = Counter()
        self.served = self.failed = self.refused = 0
        self.changes: list[tuple[str, float, BreakerChanged]] = []
        # by address, requests in flight that are its probes, over all processes
        self.probes: Counter[str] = Counter()
        self.most_probes = 0
        self.is_lossy = False
        # what happens while a probe is on its way from a process
        self.meanwhile: Callable[[Core], None] = lambda _: None
        for core in self.cores:
            self.perform(core, core.heartbeat(0.0))
        self.at(1.0, self.beat)

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at_s, next(self.order), act))

    def run(self, seconds: float) -> None:
        until_s = self.now + seconds
        count = round(seconds * self.rate)
        for number in range(count):
            self.at(self.now + number / self.rate, self.ask)
        while self.events and self.events[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self.events)
            act()
        self.now = until_s

    def beat(self) -> None:
        for core in self.cores:
            self.perform(core, core.heartbeat(self.now))
        self.at(self.now + 1.0, self.beat)

    def ask(self) -> None:
        core = self.cores[next(self.turn)]
        own, effects = core.arrive(request(core, f"{next(self.order)} is a question"), self.now)
        self.perform(core, effects)
        if isinstance(own, RequestRefused):
            assert isinstance(own.refusal, ServerFailing), own.refusal
            self.refused += 1
            return
        assert isinstance(own, Decision)
        assignment = own.assignment
        address = assignment.endpoint.address
        self.met[address] += 1
        leases = [ticket for ticket, at in ((assignment.endpoint.passed.ticket, address),) if ticket]
        for _ in leases:
            self.probes[address] += 1
            self.most_probes = max(self.most_probes, self.probes[address])
        changes = self.answers(address, self.now)
        took_s = changes.get("duration_s", self.took_s)
        outcome = Outcome(own.ticket, 200, address, took_s, 0.1, 600, 10, 0)
        outcome = msgspec.structs.replace(outcome, **changes)
        if outcome.status < 400:
            self.served += 1
        else:
            self.failed += 1

        if leases:
            self.at(self.now + took_s / 2, lambda: self.meanwhile(core))

        def end() -> None:
            if leases:
                self.probes[address] -= 1
            if core not in self.cores:
                return
            self.perform(core, core.on_stream_closed(own.ticket, self.now))

        number = next(self.order) % len(self.cores)

        def read() -> None:
            reader = self.cores[number]
            self.perform(reader, reader.on_outcome(outcome, self.now))

        self.at(self.now + took_s, end)
        self.at(self.now + took_s + 0.05, read)

    def kill(self, core: Core) -> None:
        """Another process takes its place, which knows nothing yet."""
        number, engines = self.cores.index(core), len(self.pool().table.active_addresses)
        name, rng = f"x{next(self.order)}", random.Random(number)
        self.cores[number] = Core(site(engines), rng=rng, ticket_prefix=name, machine=core._machine)
        self.perform(self.cores[number], self.cores[number].heartbeat(self.now))

    def configure(self, snapshot: Snapshot) -> None:
        """A new configuration, for all processes at once."""
        for core in self.cores:
            self.perform(core, core.apply(snapshot, self.now))

    def perform(self, core: Core, effects: Iterable[Effect]) -> None:
        events = []
        for one in effects:
            if isinstance(one, Broadcast):
                events.append(one.event)
            elif isinstance(one, BreakerChanged):
                self.changes.append((core.process_name, self.now, one))
        if events and not self.is_lossy:
            payload = encode_events(EventBatch(core.process_name, events))
            for other in self.cores:
                if other is not core:
                    self.at(self.now + LATENCY_S, lambda other=other: self.take(other, payload))  # type: ignore[misc]

    def take(self, core: Core, payload: bytes) -> None:
        self.perform(core, core.apply_peer_batch(decode_events(payload), self.now))

    def pool(self, process: int = 0) -> Pool:
        return self.cores[process].pools[SERVER]

    def state(self, address: str, process: int = 0) -> BreakerState:
        table = self.pool(process).table
        row = table.row_of(address)
        assert row is not None
        return table.breakers[row].state(self.now)


def ill(address: str, *, until_s: float = 1e9, **changes: Any) -> Callable[[str, float], dict[str, Any]]:  # noqa: ANN401
    return lambda met, now: changes if met == address and now < until_s else {}


@pytest.mark.parametrize("processes", [slow(1), 3])
@pytest.mark.parametrize("failure", [DOWN, ERROR], ids=["down", "errors"])
def test_an_endpoint_that_fails_is_tried_by_one_request_at_a_time_over_all_processes(
    processes: int, failure: dict[str, Any]
) -> None:
    scene = Site(3, ill(ENGINES[0], **failure), processes=processes, rate=12.0)
    scene.run(8.0)
    before = scene.met[ENGINES[0]]
    scene.run(25.0)
    assert 1 <= scene.met[ENGINES[0]] - before <= 6, "of 300 requests"
    assert scene.most_probes == 1
    assert {scene.state(ENGINES[0], number) for number in range(processes)} <= {
        BreakerState.OPEN,
        BreakerState.HALF_OPEN,
    }


@pytest.mark.parametrize("processes", [1, slow(3)])
def test_an_endpoint_that_is_well_again_gets_its_part_by_and_by(processes: int) -> None:
    scene = Site(3, ill(ENGINES[0], until_s=5.0, **DOWN), processes=processes, rate=30.0)
    scene.run(5.0)
    while any(scene.state(ENGINES[0], number) is not BreakerState.CLOSED for number in range(processes)):
        scene.run(0.1)
        assert scene.now < 40
    parts = []
    for _ in range(3):
        before = scene.met[ENGINES[0]]
        scene.run(5.0)
        parts.append((scene.met[ENGINES[0]] - before) / 150)
    assert parts[0] < parts[1] < 0.3
    assert parts[2] == pytest.approx(1 / 3, abs=0.08)


def test_an_answer_to_a_request_from_before_does_not_close_a_breaker() -> None:
    """A long answer of an engine that has failed since."""
    scene = Site(3, lambda _met, now: {"duration_s": 6.0} if now < 1 else DOWN if now < 1.2 else {}, rate=20.0)
    scene.run(2.0)
    opened = [one for _, _, one in scene.changes]
    assert opened
    closed_at_s = [at_s for _, at_s, one in scene.changes if not one.after.trips]
    scene.rate = 0.0
    scene.run(5.0)
    assert [at_s for _, at_s, one in scene.changes if not one.after.trips] == closed_at_s


def test_a_probe_whose_client_leaves_makes_way_for_the_next_one() -> None:
    left: dict[str, Any] = {"status": 0, "duration_s": 0.1, "has_left": True, "ttfb_s": None, **NO_USAGE}

    def answers(met: str, now: float) -> dict[str, Any]:
        if met != ENGINES[0]:
            return {}
        return DOWN if now < 3 else left if now < 30 else {}

    scene = Site(3, answers, rate=10.0)
    scene.run(29.0)
    assert scene.state(ENGINES[0]) is not BreakerState.CLOSED, "nothing was shown"
    met = scene.met[ENGINES[0]]
    assert met > 5
    scene.run(10.0)
    assert scene.state(ENGINES[0]) is BreakerState.CLOSED


@pytest.mark.parametrize("took_s", [0.2, 2.0])
@pytest.mark.parametrize("what", ["killed", "configured", "removed", "renamed"])
def test_a_probe_outlives_its_process_and_its_configuration(what: str, took_s: float) -> None:
    """No probe is lost for ever, and none has company, whatever happens while it is on its way."""
    scene = Site(3, ill(ENGINES[0], until_s=30.0, **DOWN), processes=3, rate=12.0, took_s=took_s)
    happened = Counter[str]()

    def meanwhile(core: Core) -> None:
        happened[what] += 1
        if what == "killed" and core in scene.cores:
            scene.kill(core)
        elif what == "configured":
            # the same engines in another object
            scene.configure(site(3, other=bool(happened[what] % 2)))
        elif what == "removed":
            without = endpoints(*ENGINES[1:3]) + "scrapeInterval: 0s\n"
            route = {"chat": "rules: [{targetModels: [{modelServerName: llama}]}]"}
            scene.configure(configuration(servers={"llama": without}, routes=route))
            scene.configure(site(3))
        elif what == "renamed":
            other = endpoints(*ENGINES[:3]) + "scrapeInterval: 0s\n"
            route = {"chat": "rules: [{targetModels: [{modelServerName: other}]}]"}
            scene.configure(configuration(servers={"other": other}, routes=route))
            scene.configure(site(3))

    scene.meanwhile = meanwhile
    scene.run(30.0)
    assert happened[what]
    assert scene.most_probes <= 1
    scene.meanwhile = lambda _: None
    scene.run(45.0)
    states = [scene.state(ENGINES[0], number) for number in range(3)]
    assert states == [BreakerState.CLOSED] * 3
    before = scene.met[ENGINES[0]]
    scene.run(5.0)
    assert scene.met[ENGINES[0]] > before


def test_below_half_all_endpoints_get_requests_each_its_turn() -> None:
    dead = set(ENGINES[:3])
    scene = Site(4, lambda met, _: DOWN if met in dead else {}, rate=30.0)
    # clients of one in four may see errors here, where nothing tries the next endpoint
    scene.run(5.0)
    before = dict(scene.met)
    scene.run(20.0)
    for address in dead:
        share = (scene.met[address] - before[address]) / 600
        assert 0.02 < share < 0.26, "no more than an endpoint's part, although it has no load"
    assert scene.met[ENGINES[3]] - before[ENGINES[3]] > 200


def test_the_only_endpoint_is_never_shut_out() -> None:
    """One request in five fails, for whatever reason: four in five are served."""
    for failure in (DOWN, ERROR):
        number = itertools.count()
        scene = Site(1, lambda *_, failure=failure, number=number: {} if next(number) % 5 else failure, rate=10.0)  # type: ignore[misc]
        scene.run(60.0)
        assert scene.refused == 0
        assert scene.served == pytest.approx(0.8 * 600, rel=0.01)


def test_an_engine_that_asks_for_no_pause_with_each_429_gets_few_requests() -> None:
    scene = Site(2, ill(ENGINES[0], status=429, retry_after_s=0.0, duration_s=0.001, **NO_USAGE))
    scene.run(60.0)
    assert scene.met[ENGINES[0]] <= 3 * 60, "as many as come at once, once a second"
    assert scene.served >= 0.9 * 1800


def test_one_endpoint_of_several_that_fails_one_in_five_costs_little() -> None:
    number = itertools.count()
    scene = Site(3, lambda met, _: ERROR if met == ENGINES[0] and not next(number) % 5 else {}, rate=15.0)
    scene.run(60.0)
    assert scene.refused == 0
    assert scene.served > 0.95 * 900


def test_a_model_server_that_fails_is_let_alone_but_for_probes_and_one_in_a_hundred() -> None:
    scene = Site(2, lambda _met, now: ERROR if 5 < now < 45 else {}, rate=20.0)
    scene.run(11.0)
    assert scene.pool().breaker.trips
    failed = scene.failed
    assert failed < 100, "more than half of the last 50, and those on their way"
    scene.run(34.0)
    assert scene.failed - failed < 20, "of 680"
    assert scene.refused > 550
    scene.run(40.0)
    assert not scene.pool().breaker.trips
    assert scene.pool().health.answers
    refused = scene.refused
    scene.run(5.0)
    assert scene.refused == refused


def test_a_refusal_says_when_to_come_back_and_costs_nothing() -> None:
    scene = Site(1, lambda *_: ERROR, rate=10.0)
    scene.run(5.0)
    core = scene.cores[0]
    # the first may be the probe
    own = [core.arrive(request(core, "hello"), scene.now)[0] for _ in range(2)][-1]
    assert isinstance(own, RequestRefused)
    assert (own.refusal.status, own.refusal.code) == (503, "server_failing")
    assert 1 <= (own.refusal.retry_after_s or 0) <= 36
    assert core.state_of(own.ticket).name == "ABSENT"


def test_requests_go_to_another_model_server_of_the_rule_meanwhile() -> None:
    scene = Site(2, lambda met, now: ERROR if met in ENGINES and now < 30 else {}, rate=20.0, other=True)
    scene.run(30.0)
    assert scene.refused == 0
    assert scene.met["10.0.9.1:8000"] > 540
    scene.run(50.0)
    before = scene.met["10.0.9.1:8000"]
    scene.run(10.0)
    assert scene.met["10.0.9.1:8000"] - before < 10, "its weight of one in a hundred"


def test_one_tenant_with_bad_luck_does_not_shut_a_model_server_for_the_others() -> None:
    core = Core(site(2), rng=random.Random(0), ticket_prefix="t")
    for number in range(200):
        tenant = "evil" if number % 3 else "good"
        now = number / 30
        own, _ = core.arrive(request(core, f"{number}", headers={"x-attache-tenant": tenant}), now)
        assert isinstance(own, Decision), own
        outcome = Outcome(own.ticket, 200, own.assignment.addresses[0], 0.1, 0.1, 600, 10, 0)
        if tenant == "evil":
            outcome = msgspec.structs.replace(outcome, **ERROR)
        core.on_outcome(outcome, now + 0.01)
        core.on_stream_closed(own.ticket, now + 0.01)
    assert core.pools[SERVER].breaker.generation == 0


def test_our_own_refusals_and_bad_requests_are_no_failures() -> None:
    for status in (400, 401, 404, 413, 422, 429):
        scene = Site(2, lambda *_, status=status: {"status": status, **NO_USAGE}, rate=10.0)  # type: ignore[misc]
        scene.run(4.0)
        assert scene.refused == 0
        assert not [one for one in scene.changes if not one[2].address], status


def test_processes_agree_although_messages_are_lost() -> None:
    scene = Site(3, ill(ENGINES[0], **DOWN), processes=3, rate=12.0)
    scene.run(5.0)
    scene.is_lossy = True
    scene.run(2.0)
    scene.is_lossy = False
    scene.run(3.0)
    tables = [core.pools[SERVER].table for core in scene.cores]
    found = {table.breakers[table.row_of(ENGINES[0]) or 0].generation for table in tables}
    assert len(found) == 1


def test_a_process_that_starts_learns_of_open_breakers_before_it_serves() -> None:
    scene = Site(3, ill(ENGINES[0], **DOWN), processes=2, rate=10.0)
    scene.run(8.0)
    (told,) = [
        one.event
        for one in scene.cores[0].apply_peer_batch(EventBatch("new", [AskLimitLevels("here")]), scene.now)
        if isinstance(one, Broadcast) and isinstance(one.event, ProcessAlive)
    ]
    new = Core(site(3), rng=random.Random(9), ticket_prefix="new", machine="here")
    # another clock, as on another machine
    new.apply_peer_batch(decode_events(encode_events(EventBatch("w0", [told]))), 1e6)
    table, old = new.pools[SERVER].table, scene.pool().table
    row, there = table.row_of(ENGINES[0]), old.row_of(ENGINES[0])
    assert row is not None
    assert there is not None
    assert table.breakers[row].generation == old.breakers[there].generation > 0
    assert table.breakers[row].reopen_at_s - 1e6 == pytest.approx(old.breakers[there].reopen_at_s - scene.now)


def test_a_reset_closes_breakers_in_all_processes() -> None:
    scene = Site(2, lambda *_: ERROR, processes=2, rate=10.0)
    scene.run(10.0)
    assert scene.pool(0).breaker.trips
    scene.answers = lambda *_: {}
    scene.perform(scene.cores[0], scene.cores[0].reset_breakers(SERVER, "", scene.now))
    refused = scene.refused
    scene.run(1.0)
    assert scene.refused <= refused + 1
    for number in range(2):
        assert not scene.pool(number).breaker.trips
        assert scene.state(ENGINES[0], number) is BreakerState.CLOSED
    assert scene.cores[0].reset_breakers("default/unknown", "", scene.now) == []
    assert scene.cores[0].reset_breakers(SERVER, "10.9.9.9:1", scene.now) == []


def test_messages_of_versions_that_know_no_breakers_are_read() -> None:
    """And theirs can read ours: what is new comes last."""
    scene = Site(3, lambda *_: {}, processes=2)
    core = scene.cores[0]
    _, effects = core.arrive(request(core, "hello"), 0.0)
    batch = EventBatch("w0", [one.event for one in effects if isinstance(one, Broadcast)])
    raw = msgspec.msgpack.decode(encode_events(batch))
    ((tag, _ticket, _server, assignment, *_rest),) = raw[1]
    assert tag == "s"
    # of the endpoint its pass, and of the assignment that of its ModelServer
    assert assignment.pop() == [0, ""]
    assert assignment[0].pop() == [0, ""]
    raw[1].insert(0, ["a", []])
    old = decode_events(msgspec.msgpack.encode(raw))
    scene.cores[1].apply_peer_batch(old, 0.0)
    assert scene.cores[1].pools[SERVER].table.in_flight.sum() == 1
    ticket = old.events[1].ticket  # type: ignore[union-attr]
    assert scene.cores[1].on_outcome(Outcome(ticket, 503, ENGINES[0], 0.1, None, None, None, None), 1.0)
    table = scene.cores[1].pools[SERVER].table
    assert table.has_failures, "the result of a request that another version has sent counts"
