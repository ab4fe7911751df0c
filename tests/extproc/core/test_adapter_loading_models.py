# SPDX-License-Identifier: Apache-2.0
"""Models of V2 servers, loaded as adapters are, within the memory of each server."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.core.core import Core
from extproc.core.effects import Decision, LoadAdapter, RequestHeld, RequestRefused
from extproc.core.peer_events import EngineReported
from extproc.core.request_record import AdapterLoadResult, RequestHead
from extproc.engines.engine_responses import AdapterLoadProblem, UnreadableResponse, parse_loaded_models
from extproc.engines.metrics import EngineReport
from extproc.refusals import AdapterBroken
from tests.extproc.scenes import configuration, endpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.core.effects import Effect

SERVER = "default/trees"
A, B = "10.0.0.1:8000", "10.0.0.2:8000"
MEMORY = 10
SIZES = {"a": 4, "b": 3, "c": 3, "d": 6, "e": 10}


class Trees:
    """Two servers, and what extproc asks of their agents."""

    def __init__(self, sizes: Mapping[str, int] = SIZES, *, pinned: Iterable[str] = (), engines: int = 2) -> None:
        self.sizes, self.pinned, self.engines = sizes, set(pinned), engines
        self.core = Core(self.snapshot(), rng=random.Random(0), ticket_prefix="t")
        self.now = 100.0
        self.loads: list[LoadAdapter] = []
        self.ends: dict[str, Decision | RequestRefused] = {}

    def snapshot(self, source: str = "s3://models") -> object:
        listed = ", ".join(
            f"{{name: {name}, source: '{source}/{name}', memory: {size}Gi, pinned: {str(name in self.pinned).lower()}}}"
            for name, size in self.sizes.items()
        )
        server = (
            f"model: trees\nprotocol: V2\nadapterLoading: {{port: 9000, memory: 10Gi, adapters: [{listed}]}}\n"
            f"{endpoints(*(A, B)[: self.engines])}"
        )
        route = f"loraAdapters: [{', '.join(self.sizes)}]\nrules: [{{targetModels: [{{modelServerName: trees}}]}}]"
        return configuration(servers={"trees": server}, routes={"trees": route})

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case LoadAdapter():
                    self.loads.append(effect)
                case Decision() | RequestRefused():
                    self.ends[effect.ticket] = effect

    def lists(self, address: str, *models: str) -> None:
        report = EngineReported(SERVER, address, EngineReport(), models=frozenset(models))
        self.perform(self.core.on_engine_report(report, self.now))
        self.tick()

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.perform(self.core.tick(self.now))

    def ask(self, model: str) -> str:
        path = f"/v2/models/{model}/infer"
        arrival = self.core.builder.build_by_model(RequestHead("POST", path, {":path": path}, has_body=True), b"")
        own, effects = self.core.arrive(arrival, self.now)
        self.perform([*([] if isinstance(own, RequestHeld) else [own]), *effects])
        self.tick()
        return own.ticket

    def ended(self, problem: AdapterLoadProblem | None = None, unloaded: tuple[str, ...] | None = None) -> LoadAdapter:
        """The oldest load. ``unloaded``: None: what was asked for."""
        ask = self.loads.pop(0)
        gone = ask.unload if unloaded is None else unloaded
        result = AdapterLoadResult(ask.server, ask.address, ask.adapter, problem, unloaded=gone)
        self.perform(self.core.on_work_result(result, self.now))
        self.tick()
        return ask

    def serves(self, model: str) -> str:
        """The address that gets a request, after a load if there is one; the request ends at once."""
        ticket = self.ask(model)
        while ticket not in self.ends:
            self.ended()
        end = self.ends[ticket]
        assert isinstance(end, Decision), end
        self.perform(self.core.on_stream_closed(ticket, self.now))
        self.tick(1.0)
        return end.assignment.endpoint.address


def trees(sizes: Mapping[str, int] = SIZES, *, pinned: Iterable[str] = (), engines: int = 2) -> Trees:
    """Whose servers have listed that they have nothing."""
    made = Trees(sizes, pinned=pinned, engines=engines)
    for address in (A, B)[:engines]:
        made.lists(address)
    return made


def test_a_name_in_the_path_is_enough_for_a_load_and_the_path_stays() -> None:
    one = trees()
    ticket = one.ask("a")
    ask = one.ended()
    assert (ask.adapter, ask.source, ask.unload) == ("a", "s3://models/a", ())
    end = one.ends[ticket]
    assert isinstance(end, Decision)
    assert (end.path, end.assignment.endpoint.address) == ("", ask.address)


def test_models_go_where_there_is_room_for_them() -> None:
    one = trees({"a": 6, "b": 6, "c": 4, "d": 4})
    places = {name: one.serves(name) for name in "abcd"}
    assert places["a"] != places["b"]
    assert {places["c"], places["d"]} == {A, B}
    # and nothing was unloaded for them
    assert {name: one.serves(name) for name in "abcd"} == places
    assert not one.loads


def test_as_many_of_the_least_recently_used_go_as_have_to() -> None:
    one = trees(engines=1)
    for name in ("a", "b", "c"):
        one.serves(name)
    one.serves("a")
    ticket = one.ask("d")
    # b and c were used before a, and together have the room
    assert one.ended().unload == ("b", "c")
    one.perform(one.core.on_stream_closed(ticket, one.now))
    one.ask("e")
    assert one.loads[0].unload == ("a", "d")


def test_a_model_with_requests_stays_until_they_have_ended() -> None:
    one = trees(engines=1)
    running = one.ask("d")
    one.ended()
    waiting = one.ask("e")
    one.tick(5.0)
    assert not one.loads
    one.perform(one.core.on_stream_closed(running, one.now))
    one.tick()
    assert one.ended().unload == ("d",)
    assert isinstance(one.ends[waiting], Decision)


def test_several_that_must_make_room_get_no_new_requests_until_it_is_made() -> None:
    one = trees({"a": 5, "b": 5, "c": 10}, engines=1)
    running = []
    for name in ("a", "b"):
        running.append(one.ask(name))
        one.ended()
    one.ask("c")
    one.tick(3.0)
    pool = one.core.pools[SERVER]
    assert pool.slots is not None
    # both get no new requests
    assert not pool.slots.rows_with("a").any()
    assert not pool.slots.rows_with("b").any()
    for ticket in running:
        one.perform(one.core.on_stream_closed(ticket, one.now))
    one.tick()
    assert set(one.loads[0].unload) == {"a", "b"}


def test_a_pinned_model_makes_no_room() -> None:
    one = trees({"a": 4, "b": 6, "c": 6}, pinned=["a"], engines=1)
    one.serves("a")
    one.serves("b")
    one.ask("c")
    # a was used before b
    assert one.loads[0].unload == ("b",)


def test_a_server_that_lists_a_model_no_more_gets_no_request_for_it() -> None:
    one = trees()
    where = one.serves("a")
    one.tick(5.0)
    one.lists(where)
    one.ask("a")
    assert [ask.adapter for ask in one.loads] == ["a"]


def test_broken_weights_are_tried_less_and_less_often_and_at_once_with_another_source() -> None:
    one = trees()

    def tries() -> int:
        """How many loads a request causes, all of which fail."""
        ticket, count = one.ask("a"), 0
        while ticket not in one.ends:
            one.ended(AdapterLoadProblem.BROKEN)
            count += 1
        end = one.ends[ticket]
        assert isinstance(end, RequestRefused)
        assert isinstance(end.refusal, AdapterBroken)
        assert "The model 'a'" in str(end.refusal)
        return count

    assert tries() == 2
    for pause_s in (10.0, 20.0, 40.0, 80.0, 120.0, 120.0):
        one.tick(pause_s - 3.0)
        assert tries() == 0
        one.tick(4.0)
        assert tries() == 2
        # another model is not affected
        one.serves("b")
    one.core.apply(one.snapshot("s3://mended"), one.now)  # type: ignore[arg-type]
    one.ask("a")
    assert one.loads[0].source == "s3://mended/a"


@pytest.mark.parametrize("ready", [True, False])
def test_a_model_is_ready_where_a_server_has_it(*, ready: bool) -> None:
    one = trees()
    if ready:
        one.serves("a")
    head = RequestHead("GET", "/v2/models/a/ready", {":path": "/v2/models/a/ready"}, has_body=False)
    assert one.core.builder.is_ready("a", "V2", head, one.now) is ready
    assert one.core.builder.is_on_demand("a", head)
    assert not one.core.builder.is_ready("b", "V2", head, one.now)


def test_an_agents_list_has_the_models_that_are_loaded() -> None:
    page = (
        b'{"data": [{"id": "a", "state": "loaded"}, {"id": "b", "state": "unloading"}, {"id": "c", "state": "failed"}]}'
    )
    assert parse_loaded_models(page) == {"a"}
    for wrong in (b"[]", b'{"data": [{"id": 1, "state": "loaded"}]}', b'{"data": [' + b"{" * 100_000, b"\xff"):
        with pytest.raises(UnreadableResponse):
            parse_loaded_models(wrong)


class Histories(RuleBasedStateMachine):
    """Requests, loads that end well or not, lists and time, in any order. ``has``: what each server really has."""

    SIZES: ClassVar = {"a": 4, "b": 3, "c": 3, "d": 6, "e": 7}

    def __init__(self) -> None:
        super().__init__()
        self.one = trees(self.SIZES, pinned=["c"])
        self.has: dict[str, set[str]] = {A: set(), B: set()}
        self.running: dict[str, tuple[str, str]] = {}
        # the model of each request that waits
        self.asked: dict[str, str] = {}

    @rule(model=st.sampled_from(sorted(SIZES)))
    def a_request_comes(self, model: str) -> None:
        self.asked[self.one.ask(model)] = model

    @precondition(lambda self: self.one.loads)
    @rule(problem=st.sampled_from([None, None, None, *AdapterLoadProblem]), data=st.data())
    def a_load_ends(self, problem: AdapterLoadProblem | None, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(self.one.loads))
        there = self.has[ask.address]
        # an agent that does not answer has unloaded nothing
        unloaded = () if problem is AdapterLoadProblem.UNREACHABLE else ask.unload
        for gone in unloaded:
            assert (ask.address, gone) not in self.running.values(), "a model with requests was unloaded"
            assert gone not in self.one.pinned
        there -= set(unloaded)
        if problem is None:
            there.add(ask.adapter)
            assert sum(self.SIZES[name] for name in there) <= MEMORY, "more than fits"
        self.one.loads.remove(ask)
        self.one.loads.insert(0, ask)
        self.one.ended(problem, unloaded=unloaded)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.running.pop(ticket)
        self.one.perform(self.one.core.on_stream_closed(ticket, self.one.now))
        self.one.tick()

    @rule(address=st.sampled_from([A, B]))
    def an_agent_lists_its_models(self, address: str) -> None:
        self.one.lists(address, *self.has[address])

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.one.tick(seconds)

    @invariant()
    def requests_go_where_their_model_is(self) -> None:
        for ticket, end in list(self.one.ends.items()):
            if ticket in self.asked:
                model = self.asked.pop(ticket)
                if isinstance(end, Decision):
                    where = end.assignment.endpoint.address
                    assert model in self.has[where], f"{model} is not at {where}"
                    self.running[ticket] = where, model

    def teardown(self) -> None:
        """Nobody waits for ever."""
        for ticket in list(self.running):
            self.one.perform(self.one.core.on_stream_closed(ticket, self.one.now))
        while self.one.loads:
            self.one.ended(AdapterLoadProblem.UNREACHABLE, unloaded=())
        for _ in range(13):
            self.one.tick(5.0)
            while self.one.loads:
                self.one.ended(AdapterLoadProblem.UNREACHABLE, unloaded=())
        assert self.asked.keys() <= self.one.ends.keys()


test_histories = Histories.TestCase
test_histories.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
