# SPDX-License-Identifier: Apache-2.0
"""The life of a request whose prompt another engine computes, at the request of extproc."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from prometheus_client import generate_latest

from controller.usage.rows import parse_usage_line
from extproc.admission.budgets import BudgetKey
from extproc.api.config_loader import load_snapshot
from extproc.core import dispatch, prefill_completion
from extproc.core import remote_prefill as prefill
from extproc.core.core import Core
from extproc.core.effects import (
    Broadcast,
    CancelPrefill,
    Decision,
    Effect,
    Fault,
    HealthChanged,
    LogUsage,
    OutcomeJoined,
    Prefill,
    PrefillEnded,
    RequestHeld,
    RequestRefused,
)
from extproc.core.peer_events import EventBatch, decode_events, encode_events
from extproc.core.remote_prefill import attempt_timeout_s
from extproc.core.request_record import Outcome, PrefillResult, RequestHead
from extproc.core.request_states import RequestState
from extproc.endpoints.in_flight import begin_request
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import InternalError, PrefillFailed, PrefillRefused, Refusal
from extproc.streams.messages import ProcessingResponse
from extproc.streams.processing_responses import decision_answer, duplex_decision_answer
from tests.extproc.breakers import trip
from tests.extproc.scenes import ends

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.core.peer_events import PeerEvent
    from extproc.core.request_record import Arrival
    from extproc.request.prefill_protocols import BodyChanges

P, D, E, Q = (f"10.0.0.{number}:8000" for number in range(1, 5))
SERVER: Final = "default/llama"
HEADERS: Final = {"x-request-id": "r-1", "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-00"}
USAGE_LOG: Final = b"""
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec: {usageLog: {path: /var/lib/attache/usage.log}}
"""
PARAMETERS: Final = b'{"do_remote_prefill": true, "remote_block_ids": [[11, 12]], "remote_host": "10.0.0.1"}'


def config(
    group: str = "",
    *,
    connector: str = "NixlConnector",
    engines: Iterable[str] = (D,),
    prefill: Iterable[str] = (P,),
    others: str = "",
    route: str = "",
) -> bytes:
    listed = [{"address": one, "labels": {"role": "prefill"}} for one in prefill]
    listed += [{"address": one, "labels": {"role": "decode"}} for one in engines]
    return f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: llama
  scrapeInterval: 0s
  {others}
  pdGroup: {{prefillLabels: {{role: prefill}}, decodeLabels: {{role: decode}}, decideBy: UncachedTokens,
             minUncachedTokens: 100, leg: Gateway, connector: {connector}, {group}}}
  endpoints: {json.dumps(listed)}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: chat}}
spec:
  modelName: chat
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
  {route}
""".encode()


class Scene:
    """A core with a prefill engine and some decode engines."""

    def __init__(self, configuration: bytes, *, name: str = "t", machine: str | None = None) -> None:
        snapshot = load_snapshot({"a.yaml": configuration})
        self.core = Core(snapshot, rng=random.Random(0), ticket_prefix=name, machine=machine)
        self.table = self.core.pools[SERVER].table
        self.arrivals = 0

    def arrive(
        self, now: float = 0.0, words: int = 400, *, headers: Mapping[str, str] = HEADERS, **fields: object
    ) -> tuple[RequestHeld, Prefill, list[Effect]]:
        own, effects = self.enter(now, words, headers=headers, **fields)
        assert isinstance(own, RequestHeld)
        assert own.state is RequestState.PREFILLING
        (asked,) = [one for one in effects if isinstance(one, Prefill)]
        return own, asked, effects

    def enter(
        self, now: float = 0.0, words: int = 400, *, headers: Mapping[str, str] = HEADERS, **fields: object
    ) -> tuple[Any, list[Effect]]:
        # no prompt is cached
        self.arrivals += 1
        content = f"{self.arrivals} is the number of this. " + "word " * words
        body = {"model": "chat", "messages": [{"role": "user", "content": content}], **fields}
        head = RequestHead("POST", "/v1/chat/completions", headers, has_body=True)
        return self.core.arrive(
            self.core.builder.build_by_model(head, json.dumps(body).encode()), now, wants_reasons=True
        )

    def answer(self, ticket: str, now: float, parameters: bytes = PARAMETERS, **fields: object) -> list[Effect]:
        usage = b'{"prompt_tokens": 410, "prompt_tokens_details": {"cached_tokens": 10}}'
        body = b'{"choices": [], "kv_transfer_params": %b, "usage": %b}' % (parameters, usage)
        result = PrefillResult(ticket, status=200, body=body, answered_at_s=now)
        return self.core.on_work_result(msgspec.structs.replace(result, **fields), now)

    def spent(self) -> dict[str, float]:
        """Of the budget of all callers, by resource."""
        levels = {BudgetKey.parse(one.key): one for one in self.core.admission.limits.budget_levels()}
        return {key.resource: one.limit.capacity - one.level for key, one in levels.items() if key is not None}

    def load(self, address: str) -> tuple[int, float]:
        """Requests in flight, and prefill work that waits."""
        row = self.table.row_of(address)
        assert row is not None
        return int(self.table.in_flight[row]), float(self.table.prefill_queues[row].work)

    def holders(self, chain: list[int]) -> set[str]:
        """The engines with the whole prompt, by the prefix index."""
        index = self.core.pools[SERVER].caches.index
        found = [one.holders for one in index.match(chain) if one.blocks == len(chain)]
        return {self.table.addresses[row] for row in self.table.active_rows if any(one >> row & 1 for one in found)}

    @property
    def is_free(self) -> bool:
        """Whether no engine counts anything."""
        rows = self.table.active_rows
        assert self.core._dispatcher.legs.keys() == {
            one.ticket for one in self.core.records() if one.state is RequestState.PREFILLING
        }
        assert not any(one.running for one in self.core.meter._servers.values())
        return not self.table.in_flight[rows].any() and not self.table.in_flight_tokens[rows].any()


def decision(effects: Iterable[Effect]) -> Decision:
    (found,) = ends(effects)
    assert isinstance(found, Decision)
    return found


def refusal(effects: Iterable[Effect]) -> Refusal:
    (found,) = ends(effects)
    assert isinstance(found, RequestRefused)
    return found.refusal


def leg(effects: Iterable[Effect]) -> PrefillEnded:
    (found,) = [one for one in effects if isinstance(one, PrefillEnded)]
    return found


def fault(effects: Iterable[Effect]) -> Fault:
    (found,) = [one for one in effects if isinstance(one, Fault)]
    return found


def told(effects: Iterable[Effect]) -> list[PeerEvent]:
    return [one.event for one in effects if isinstance(one, Broadcast)]


def fields(body: bytes | None) -> Mapping[str, Any]:
    assert body is not None
    return json.loads(body)


def test_the_prefill_engine_computes_and_the_decode_engine_gets_the_parameters_unread() -> None:
    scene = Scene(config())
    held, asked, _ = scene.arrive(stream=True, max_completion_tokens=70, temperature=0.25)
    assert (asked.address, asked.path, asked.timeout_s) == (P, "/v1/chat/completions", 60.0)
    assert held.longest_s == 60.0
    assert asked.headers == HEADERS
    sent = fields(asked.body)
    assert (sent["stream"], sent["max_completion_tokens"], sent["temperature"]) == (False, 1, 0.25)
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in sent
    assert scene.load(P)[0] == scene.load(D)[0] == 1
    assert scene.load(P)[1] > scene.load(D)[1] == 0

    found = decision(scene.answer(asked.ticket, 0.5))
    assert found.history.was_held
    assert found.history.waits == {RequestState.PREFILLING: 0.5}
    assert found.assignment.addresses == (D,)
    assert found.assignment.prefill is None
    assert found.prefill_address == P
    assert found.history.leg is not None
    assert (found.history.leg.outcome, found.history.leg.took_s) == ("prefilled", 0.5)
    assert found.body is not None
    assert PARAMETERS in found.body
    assert fields(found.body)["stream_options"] == {"include_usage": True}
    assert fields(found.body)["max_completion_tokens"] == 70
    assert fields(found.body)["model"] == "llama"
    assert scene.load(P) == (0, 0.0)
    assert scene.load(D) == (1, 0.0)
    scene.core.on_stream_closed(found.ticket, 2.0)
    assert scene.is_free


def test_what_is_learned_of_each_engine_is_its_own_time() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive(stream=True)
    rates = scene.table.prefill_rate.copy()
    decision(scene.answer(asked.ticket, 0.5))
    prefill, decode = scene.table.row_of(P), scene.table.row_of(D)
    assert scene.table.prefill_rate[prefill] != rates[prefill]
    assert scene.table.ttft_s[prefill] == 0.5
    assert (scene.table.prompt_tokens[prefill], scene.table.cached_tokens[prefill]) == (410, 10)
    transfers = scene.core.pools[SERVER].transfers
    assert transfers is not None
    assert not transfers.has_factors
    rates = scene.table.prefill_rate.copy()
    effects = scene.core.on_outcome(Outcome(asked.ticket, 200, D, 2.0, 0.75, 410, 6, 400), 2.0)
    (settled,) = [one for one in effects if isinstance(one, OutcomeJoined)]
    assert settled.waited_s == 0.5
    # of the time since the pick, the leg is not the decode engine's
    assert scene.table.ttft_s[decode] == 0.25
    assert scene.table.tpot_s[decode] == pytest.approx(0.25)
    assert scene.table.prefill_rate[decode] == rates[decode]
    assert transfers.factor(P, D) != 1.0


def test_a_body_for_a_decode_engine_that_prefills_is_made_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, changed, made = Scene(config()), dispatch.changed_body, list[bytes | None]()

    def noted(arrival: Arrival, changes: BodyChanges) -> bytes | None:
        made.append(changed(arrival, changes))
        return made[-1]

    for module in (dispatch, prefill_completion):
        monkeypatch.setattr(module, "changed_body", noted)
    _, first, _ = scene.arrive()
    decision(scene.answer(first.ticket, 0.5))
    _, second, _ = scene.arrive()
    assert not made
    assert decision(scene.answer(second.ticket, 0.5, failure="not_asked")).body == made[0]


FAILURES: Final = {
    "error": {"status": 500, "body": b'{"error": {"message": "CUDA error"}}'},
    "overloaded": {"status": 429, "body": b"later"},
    "unreachable": {"failure": "unreachable", "detail": "refused"},
    "timeout": {"failure": "timeout"},
    "unreadable": {"body": b"<html>"},
    "no_parameters": {"body": b'{"choices": []}'},
    "null": {"body": b'{"kv_transfer_params": null}'},
    "expired": {"answered_at_s": -20.0},
    "not_asked": {"failure": "not_asked"},
}
OUTCOMES: Final = {"overloaded": "error", "null": "no_parameters"}


@pytest.mark.parametrize("name", FAILURES)
def test_after_a_failure_the_decode_engine_computes_the_prompt(name: str) -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive(max_tokens=20)
    effects = scene.answer(asked.ticket, 0.5, **FAILURES[name])
    found = decision(effects)
    assert leg(effects).leg.outcome == OUTCOMES.get(name, name)
    assert leg(effects).goes_on
    assert found.prefill_address == ""
    assert "kv_transfer_params" not in fields(found.body)
    assert fields(found.body)["max_tokens"] == 20
    assert scene.load(P) == (0, 0.0)
    assert scene.load(D)[0] == 1
    assert scene.load(D)[1] > 0
    scene.core.on_outcome(Outcome(asked.ticket, 200, D, 2.0, 1.0, 410, 6, 0), 2.0)
    assert scene.load(D) == (1, 0.0)
    scene.core.on_stream_closed(asked.ticket, 2.0)
    assert scene.is_free
    assert not scene.core.records()


@pytest.mark.parametrize("name", FAILURES)
def test_or_the_request_is_refused_if_its_server_wants_that(name: str) -> None:
    scene = Scene(config("onPrefillFailure: Fail"))
    _, asked, _ = scene.arrive()
    effects = scene.answer(asked.ticket, 0.5, **FAILURES[name])
    found = refusal(effects)
    assert isinstance(found, PrefillFailed)
    assert (found.status, found.code) == (503, "prefill_failed")
    assert not leg(effects).goes_on
    assert scene.is_free
    assert not scene.core.records()


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_what_the_prefill_engine_refuses_is_refused_in_its_words(status: int) -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    body = b'{"error": {"message": "The prompt is too long.", "type": "BadRequestError"}}'
    found = refusal(scene.answer(asked.ticket, 0.5, status=status, body=body))
    assert isinstance(found, PrefillRefused)
    assert (found.status, found.message) == (status, "The prompt is too long.")
    assert scene.is_free
    assert not scene.core.records()


def test_a_prefill_engine_that_fails_is_avoided() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.1, failure="unreachable")
    row = scene.table.row_of(P)
    assert scene.table.retry_at_s[row] > 0.1
    own, _ = scene.enter(0.2)
    assert isinstance(own, Decision)
    # and is tried again after a while
    _, asked, _ = scene.arrive(5.0)
    scene.answer(asked.ticket, 5.1)
    assert scene.table.trips[row] == 0


def test_after_a_failure_another_engine_prefills_within_the_same_time() -> None:
    scene = Scene(config("onPrefillFailure: Fail", prefill=(P, Q)))
    _, first, _ = scene.arrive()
    effects = scene.answer(first.ticket, 20.0, status=503)
    assert not ends(effects)
    (second,) = [one for one in effects if isinstance(one, Prefill)]
    assert {first.address, second.address} == {P, Q}
    assert (second.ticket, second.body, second.headers, second.timeout_s) == (first.ticket, first.body, HEADERS, 40.0)
    assert (leg(effects).leg.outcome, leg(effects).goes_on) == ("error", True)
    assert scene.load(first.address) == (0, 0.0)
    assert scene.load(second.address)[0] == scene.load(D)[0] == 1
    assert scene.load(second.address)[1] > 0
    found = decision(scene.answer(second.ticket, 25.0))
    assert found.history.leg is not None
    assert (
        found.history.leg.address,
        found.history.leg.outcome,
        found.history.leg.took_s,
        found.history.leg.tries,
    ) == (
        second.address,
        "prefilled",
        5.0,
        2,
    )
    assert found.history.waits == {RequestState.PREFILLING: 25.0}
    scene.core.on_stream_closed(found.ticket, 30.0)
    assert scene.is_free


@pytest.mark.parametrize(
    ("left_s", "expected_s", "seconds"),
    [
        (60.0, None, 30.0),
        (60.0, 0.5, 4.0),
        # 62 s of patience are too many: another engine needs 15 s
        (60.0, 15.0, 45.0),
        # there is not enough time for two
        (60.0, 31.0, 60.0),
        (0.0, 1.0, 0.0),
    ],
)
def test_an_engine_has_a_multiple_of_what_is_expected_before_another_is_asked(
    left_s: float, expected_s: float | None, seconds: float
) -> None:
    assert attempt_timeout_s(left_s, expected_s) == seconds


def test_an_engine_that_hangs_leaves_time_for_another_and_is_avoided() -> None:
    scene = Scene(config(prefill=(P, Q)))
    scene.table.rate_samples[:] = 1
    held, first, _ = scene.arrive()
    row = scene.table.row_of(first.address)
    assert row is not None
    expected_s = scene.load(first.address)[1] / scene.table.prefill_rate[row]
    assert held.longest_s == 60.0
    assert first.timeout_s == pytest.approx(2 + 4 * expected_s)
    effects = scene.answer(first.ticket, first.timeout_s, failure="timeout")
    (second,) = [one for one in effects if isinstance(one, Prefill)]
    assert {first.address, second.address} == {P, Q}
    # the last one has all that is left
    assert second.timeout_s == pytest.approx(60 - first.timeout_s)
    assert scene.table.retry_at_s[row] > first.timeout_s
    _, third, _ = scene.arrive(first.timeout_s)
    assert third.address == second.address


def test_a_request_meets_three_prefill_engines_at_most() -> None:
    scene = Scene(config(prefill=(P, Q, "10.0.0.5:8000", "10.0.0.6:8000")))
    _, asked, _ = scene.arrive()
    addresses = [asked.address]
    for number in (1, 2):
        effects = scene.answer(asked.ticket, number * 0.1, failure="unreachable")
        addresses += [one.address for one in effects if isinstance(one, Prefill)]
    found = decision(scene.answer(asked.ticket, 0.3, failure="unreachable"))
    assert len(set(addresses)) == len(addresses) == 3
    assert found.history.leg is not None
    assert (found.history.leg.outcome, found.history.leg.tries) == ("unreachable", 3)
    assert scene.load(D)[1] > 0
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


@pytest.mark.parametrize(
    ("prefill", "now", "answer"),
    [
        ((P, Q), 60.0, {"failure": "timeout"}),  # no time is left
        ((P, Q), 0.5, {"status": 400, "body": b"no"}),
        ((P,), 0.5, {"status": 500}),
    ],
)
def test_there_is_no_second_try(prefill: tuple[str, ...], now: float, answer: dict[str, object]) -> None:
    scene = Scene(config(prefill=prefill))
    _, asked, _ = scene.arrive()
    effects = scene.answer(asked.ticket, now, **answer)
    assert not [one for one in effects if isinstance(one, Prefill)]
    assert len(ends(effects)) == 1


def test_engines_of_other_groups_are_never_asked() -> None:
    labels = json.dumps({"role": "prefill", "group": "b"})
    other = f'{{"address": "{Q}", "labels": {labels}}}, '
    scene = Scene(config("groupKey: group").replace(b"endpoints: [", f"endpoints: [{other}".encode()))
    _, asked, _ = scene.arrive()
    assert asked.address == P
    decision(scene.answer(asked.ticket, 0.5, status=500))


def test_a_client_that_leaves_during_the_second_try_ends_it() -> None:
    scene = Scene(config(prefill=(P, Q)))
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.1, status=500)
    assert CancelPrefill(asked.ticket) in scene.core.on_disconnect(asked.ticket, 0.2)
    assert scene.is_free
    assert not scene.core.records()


def test_our_own_bounds_are_no_fault_of_the_engine() -> None:
    scene = Scene(config())
    for number in range(20):
        _, asked, _ = scene.arrive(float(number))
        effects = scene.answer(asked.ticket, number + 0.1, failure="not_asked")
        assert not [one for one in effects if isinstance(one, HealthChanged)]
    assert not scene.table.trips.any()


@pytest.mark.parametrize("on_failure", ["Local", "Fail"])
def test_without_a_choice_of_another_engine_the_configuration_decides(
    on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(config(f"onPrefillFailure: {on_failure}", prefill=(P, Q)))
    _, asked, _ = scene.arrive()
    monkeypatch.setattr(scene.core.pools[SERVER], "next_prefill_address", None)
    effects = scene.answer(asked.ticket, 0.5, status=500)
    assert "could not be chosen" in fault(effects).what
    if on_failure == "Fail":
        assert isinstance(refusal(effects), PrefillFailed)
    else:
        decision(effects)
        scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


def test_a_prefill_that_cannot_be_learned_from_counts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    monkeypatch.setattr(prefill, "update_estimates", None)
    effects = scene.answer(asked.ticket, 0.5)
    assert decision(effects).prefill_address == P
    assert "learned" in fault(effects).what
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


@pytest.mark.parametrize("name", ["end_remote_prefill", "expected_tokens_of_dispatched"])
def test_our_own_fault_after_a_prefill_leaves_nothing_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    monkeypatch.setattr(prefill_completion if name == "end_remote_prefill" else dispatch, name, None)
    effects = scene.answer(asked.ticket, 0.5)
    found = refusal(effects)
    assert isinstance(found, InternalError)
    assert isinstance(found.__cause__, TypeError)
    assert scene.is_free
    assert not scene.core.records()


def test_even_if_its_engines_cannot_be_freed_its_client_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(config("onPrefillFailure: Fail"))
    _, asked, _ = scene.arrive()
    monkeypatch.setattr(type(scene.core._running), "_free", None)
    effects = scene.answer(asked.ticket, 0.5, status=500)
    assert isinstance(refusal(effects), PrefillFailed)
    assert "freed" in fault(effects).what
    assert not scene.core.records()


def in_flight(scene: Scene) -> dict[str, int]:
    """As autoscalers read it."""
    page = scene.core.meter.process_demand(scene.core.pools, 0.0)
    return {address: one.in_flight for address, one in page.servers[SERVER].engines.items() if one.in_flight}


def test_autoscalers_see_a_request_at_its_prefill_engine_first_and_then_at_its_decode_engine() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive(max_tokens=1000)
    assert in_flight(scene) == {P: 1}
    engines = scene.core.meter.process_demand(scene.core.pools, 0.0).servers[SERVER].engines
    # of its answer the prefill engine computes nothing
    assert 100 < engines[P].in_flight_tokens < 1000
    scene.answer(asked.ticket, 0.5)
    assert in_flight(scene) == {D: 1}
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert in_flight(scene) == {}


def test_autoscalers_see_a_request_at_the_prefill_engine_that_is_asked_next() -> None:
    scene = Scene(config(prefill=(P, Q)))
    _, asked, _ = scene.arrive()
    effects = scene.answer(asked.ticket, 0.1, status=500)
    (second,) = [one for one in effects if isinstance(one, Prefill)]
    assert in_flight(scene) == {({P, Q} - {asked.address}).pop(): 1}
    scene.answer(second.ticket, 0.5)
    assert in_flight(scene) == {D: 1}


def test_a_client_that_leaves_during_the_prefill_leaves_no_load() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.core.on_stream_closed(asked.ticket, 0.2)
    assert in_flight(scene) == {}
    assert scene.is_free


def test_an_engine_that_a_sidecar_has_asked_counts_beside_its_decode_engine() -> None:
    scene = Scene(config().replace(b"leg: Gateway, connector: NixlConnector", b"leg: Sidecar"))
    own, _ = scene.enter()
    assert isinstance(own, Decision)
    assert in_flight(scene) == {P: 1, D: 1}
    scene.core.on_stream_closed(own.ticket, 1.0)
    assert in_flight(scene) == {}


def test_a_client_that_leaves_ends_the_prefill() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    effects = scene.core.on_disconnect(asked.ticket, 0.2)
    assert CancelPrefill(asked.ticket) in effects
    assert leg(effects).leg.outcome == "left"
    assert scene.is_free
    # a result that was on its way
    assert not scene.answer(asked.ticket, 0.3)
    assert not scene.core.records()


BUDGET: Final = "budgets: [{name: b, window: Month, max: {inputTokens: 10000, outputTokens: 10000, requests: 10}}]"
PRICED: Final = "pricing: [{perMillion: {input: 1, output: 10}}]"


@pytest.mark.parametrize("end", ["disconnect", "closed"])
def test_a_client_that_leaves_pays_for_its_prompt_once(end: str) -> None:
    scene = Scene(config(others=PRICED, route=BUDGET))
    scene.core.align_with_wall_clock(1_000_000.0, 0.0)
    _, asked, _ = scene.arrive(1.0, max_tokens=500)
    assert scene.spent()["output_tokens"] == 500
    verb = scene.core.on_disconnect if end == "disconnect" else scene.core.on_stream_closed
    effects = verb(asked.ticket, 3.0)
    (settled,) = [one for one in effects if isinstance(one, OutcomeJoined)]
    prompt = settled.used.input_tokens
    assert prompt > 400
    assert (settled.used.output_tokens, settled.used.cost_micros, settled.currency) == (0.0, prompt, "USD")
    assert (settled.outcome.served, settled.outcome.status, settled.outcome.has_left) == (P, 0, True)
    # all of what was reserved for the answer is given back
    assert scene.spent() == {"input_tokens": prompt, "requests": 1}
    assert not [one for one in verb(asked.ticket, 3.1) if isinstance(one, OutcomeJoined)]


def test_a_client_that_leaves_has_a_row_as_others_that_leave() -> None:
    scene = Scene(config(others=PRICED) + USAGE_LOG)
    scene.core.align_with_wall_clock(1_000_000.0, 0.0)
    _, asked, _ = scene.arrive(1.0, max_tokens=500, stream=False)
    (logged,) = [one for one in scene.core.on_disconnect(asked.ticket, 3.5) if isinstance(one, LogUsage)]
    row = parse_usage_line(msgspec.json.encode(logged.line), 1_000_010.0)
    assert (row.id, row.ticket, row.request_id) == (asked.ticket, asked.ticket, "r-1")
    assert (row.at_us, row.duration_us, row.ttft_us) == (1_000_001_000_000, 2_500_000, None)
    assert (row.status, row.ended, row.finish, row.is_failed, row.is_degraded) == (0, "client", "", False, False)
    assert (row.endpoint, row.server, row.model, row.api) == (P, SERVER, "chat", "CHAT")
    assert row.input > 400
    assert (row.output, row.cached, row.is_estimated, row.cost_micros) == (0, 0, True, row.input)


def test_what_a_client_sends_makes_no_line_long() -> None:
    scene = Scene(config() + USAGE_LOG)
    _, asked, _ = scene.arrive(headers={"x-request-id": "r" * 60_000})
    (logged,) = [one for one in scene.core.on_disconnect(asked.ticket, 0.2) if isinstance(one, LogUsage)]
    assert len(msgspec.json.encode(logged.line)) < 2_000


def test_without_a_usage_log_there_is_no_row() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    assert not [one for one in scene.core.on_disconnect(asked.ticket, 0.2) if isinstance(one, LogUsage)]


def test_a_stream_that_closes_does_the_same() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    assert CancelPrefill(asked.ticket) in scene.core.on_stream_closed(asked.ticket, 0.2)
    assert scene.is_free
    assert not scene.core.records()


def test_a_decision_that_reaches_nobody_costs_nothing() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5)
    scene.core.on_disconnect(asked.ticket, 0.5)
    assert scene.is_free
    assert not scene.core.records()


@pytest.mark.parametrize(("failure", "addresses"), [("", 1), ("timeout", 2)])
def test_parameters_are_for_one_decode_engine(failure: str, addresses: int) -> None:
    scene = Scene(config(engines=(D, E)))
    _, asked, _ = scene.arrive()
    found = decision(scene.answer(asked.ticket, 0.5, failure=failure))
    assert len(found.assignment.addresses) == addresses
    answer = ProcessingResponse.FromString(decision_answer(found))
    headers = {one.header.key: one.header.raw_value for one in answer.request_body.response.header_mutation.set_headers}
    assert headers.get("x-envoy-max-retries") == (None if failure else b"0")
    assert "x-prefiller-host-port" not in headers


def test_what_a_store_holds_is_for_every_decode_engine_and_needs_no_parameters() -> None:
    scene = Scene(config(connector="ExampleConnector", engines=(D, E)))
    _, asked, _ = scene.arrive(max_tokens=20)
    assert "kv_transfer_params" not in fields(asked.body)
    found = decision(scene.answer(asked.ticket, 30.0, answered_at_s=0.5))
    assert set(found.assignment.addresses) == {D, E}
    assert fields(found.body)["max_tokens"] == 20
    assert found.prefill_address == P


def test_each_try_has_an_id_of_its_own_and_the_decode_engine_gets_that_of_the_last() -> None:
    scene = Scene(config("transferPort: 7777", connector="OffloadingConnector", prefill=(P, Q), engines=(D, E)))
    _, first, _ = scene.arrive()
    _, other, _ = scene.arrive()
    (second,) = [one for one in scene.answer(first.ticket, 0.1, status=503) if isinstance(one, Prefill)]
    ids = [fields(one.body)["kv_transfer_params"]["remote_decoder"]["kv_request_id"] for one in (first, other, second)]
    assert len(set(ids)) == 3
    found = decision(scene.answer(first.ticket, 0.2, b"null"))
    assert fields(found.body)["kv_transfer_params"]["remote_prefiller"] == {
        "kv_request_id": ids[2],
        "remote_host": second.address.partition(":")[0],
        "remote_port": 7777,
    }
    assert len(found.assignment.addresses) == 1


def test_a_prefill_engine_is_named_to_the_decode_engine_by_the_id_that_it_answers() -> None:
    scene = Scene(config(connector="MooncakeConnector"))
    _, asked, _ = scene.arrive(stop=["x"])
    assert (asked.query_port, fields(asked.body)["ignore_eos"]) == (8998, True)
    body = b'{"choices": [{"finish_reason": "length"}]}'
    found = decision(scene.answer(asked.ticket, 0.5, body=body, engine_id="7c0d"))
    assert fields(found.body)["stop"] == ["x"]
    told = fields(found.body)["kv_transfer_params"]
    assert (told["remote_engine_id"], told["remote_bootstrap_addr"]) == ("7c0d", "http://10.0.0.1:8998")
    assert told["transfer_id"] == fields(asked.body)["kv_transfer_params"]["transfer_id"]
    assert len(found.assignment.addresses) == 1


def test_a_prefill_that_ends_early_is_of_no_use_to_mooncake() -> None:
    scene = Scene(config(connector="MooncakeConnector"))
    _, asked, _ = scene.arrive()
    body = b'{"choices": [{"finish_reason": "stop"}]}'
    effects = scene.answer(asked.ticket, 0.5, body=body, engine_id="7c0d")
    assert (leg(effects).leg.outcome, decision(effects).prefill_address) == ("no_parameters", "")
    assert "ended early" in leg(effects).leg.detail


def test_where_requests_join_by_their_ids_both_legs_have_one_that_no_client_can_repeat() -> None:
    scene = Scene(config(connector="NixlPushConnector"))
    asked = [scene.arrive()[1] for _ in range(2)]
    ids = [one.headers["x-request-id"] for one in asked]
    assert len(set(ids)) == 2
    for one, name in zip(asked, ids, strict=True):
        assert name.startswith("r-1-")
        found = decision(scene.answer(one.ticket, 0.5))
        whole = ProcessingResponse.FromString(decision_answer(found)).request_body
        pieces = ProcessingResponse.FromString(duplex_decision_answer(found)).request_headers
        for answer in (whole, pieces):
            sent = {one.header.key: one.header.raw_value for one in answer.response.header_mutation.set_headers}
            assert (sent["x-request-id"], sent["x-envoy-max-retries"]) == (name.encode(), b"0")


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
@pytest.mark.parametrize("value", ["a\x01b", "a\tb", "\xff", "a\r\nb: c"])
def test_of_a_clients_headers_the_prefill_engine_gets_what_can_be_sent(value: str, connector: str) -> None:
    scene = Scene(config(connector=connector))
    _, asked, _ = scene.arrive(headers=dict.fromkeys(("authorization", "tracestate", "x-request-id"), value))
    ticket = asked.ticket
    assert asked.headers == {"x-request-id": ticket if connector == "NixlConnector" else f"{ticket}-{ticket}"}
    assert decision(scene.answer(ticket, 0.5)).prefill_address == P


def test_a_request_whose_prefill_has_failed_keeps_its_id() -> None:
    scene = Scene(config(connector="NixlPushConnector"))
    _, asked, _ = scene.arrive()
    assert not decision(scene.answer(asked.ticket, 0.5, failure="timeout")).request_id


def test_a_decode_engine_that_goes_meanwhile_is_replaced() -> None:
    scene = Scene(config(engines=(D, E)))
    _, asked, _ = scene.arrive()
    first = next(one.run.assignment.endpoint.address for one in scene.core.records() if one.run)
    other = E if first == D else D
    scene.core.apply(load_snapshot({"a.yaml": config(engines=(other,))}), 0.1)
    found = decision(scene.answer(asked.ticket, 0.5))
    assert found.assignment.addresses == (other,)
    assert scene.load(other) == (1, 0.0)
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


@pytest.mark.parametrize("failure", ["", "not_asked"])
def test_a_decode_engine_that_is_avoided_meanwhile_is_replaced(failure: str) -> None:
    scene, other = (Scene(config(engines=(D, E)), name=name, machine="m") for name in "ab")
    _, asked, effects = scene.arrive()
    (first,) = [one.run.assignment.endpoint.address for one in scene.core.records() if one.run]
    row, second = scene.table.row_of(first), E if first == D else D
    assert row is not None
    trip(scene.table, row, 0.4)
    # the other process has not seen it fail, and follows all the same
    for now in (0.0, 0.5):
        effects = scene.answer(asked.ticket, 0.5, failure=failure) if now else effects
        other.core.apply_peer_batch(decode_events(encode_events(EventBatch("a", told(effects)))), now)
    assert decision(effects).assignment.addresses[0] == second
    assert scene.load(first) == (0, 0.0)
    assert scene.load(second)[0] == 1
    for address in (P, D, E):
        assert scene.load(address) == other.load(address)
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


class Crowd:
    """A request prefills; meanwhile other requests come to the decode engine that was picked, and to the other one."""

    def __init__(self, there: int, elsewhere: int = 0) -> None:
        configuration = config(engines=(D, E))
        self.one, self.other = (Scene(configuration, name=name, machine="m") for name in "ab")
        self.asked = self._arrive()
        (self.picked,) = [one.run.assignment.endpoint.address for one in self.one.core.records() if one.run]
        self.second = E if self.picked == D else D
        for scene in (self.one, self.other):
            for address, count in ((self.picked, there), (self.second, elsewhere)):
                row = scene.table.row_of(address)
                assert row is not None
                for _ in range(count):
                    begin_request(scene.table, row, work=0.0, now=0.1, tokens=500.0)

    def _arrive(self) -> Prefill:
        _, asked, effects = self.one.arrive(stream=True)
        self.tell(effects, 0.0)
        return asked

    def tell(self, effects: list[Effect], now: float) -> None:
        self.other.core.apply_peer_batch(decode_events(encode_events(EventBatch("a", told(effects)))), now)

    def decode(self, **result: object) -> str:
        """The engine that gets the request when the prefill ends; the other process counts it there, too."""
        effects = self.one.answer(self.asked.ticket, 0.5, **result)
        self.tell(effects, 0.5)
        for address in (P, D, E):
            assert self.one.load(address) == self.other.load(address)
        (record,) = self.one.core.records()
        assert record.run is not None
        assert record.run.pins.keys() == {self.one.table.row_of(record.run.assignment.endpoint.address)}
        return decision(effects).assignment.endpoint.address


@pytest.mark.parametrize("failure", ["", "not_asked"])
@pytest.mark.parametrize(("there", "elsewhere", "moves"), [(0, 0, False), (1, 0, False), (10, 0, True), (10, 9, False)])
def test_the_decode_engine_is_chosen_again_by_load_if_another_is_clearly_better(
    there: int, elsewhere: int, failure: str, *, moves: bool
) -> None:
    crowd = Crowd(there, elsewhere)
    assert crowd.decode(failure=failure) == (crowd.second if moves else crowd.picked)


@pytest.mark.parametrize("failure", ["", "not_asked"])
@pytest.mark.parametrize("there", [0, 10])
def test_the_prompt_is_found_where_it_went_and_not_where_it_was_to_go(there: int, failure: str) -> None:
    crowd = Crowd(there)
    chosen = crowd.decode(failure=failure)
    for scene in (crowd.one, crowd.other):
        (chain,) = [one.run.sent.chain for one in scene.core.records() if one.run is not None]
        assert scene.holders(chain) == {P, chosen}
    crowd.one.core.on_stream_closed(crowd.asked.ticket, 1.0)
    assert crowd.one.holders(chain) == {P, chosen}


def test_a_decode_engine_that_a_request_does_not_reach_has_not_its_prompt() -> None:
    crowd = Crowd(0)
    (chain,) = [one.run.sent.chain for one in crowd.one.core.records() if one.run is not None]
    assert crowd.one.holders(chain) == crowd.other.holders(chain) == {P, crowd.picked}
    crowd.tell(crowd.one.core.on_disconnect(crowd.asked.ticket, 0.5), 0.5)
    assert crowd.one.is_free
    assert crowd.one.holders(chain) == crowd.other.holders(chain) == {P}


def test_a_sidecars_engines_both_have_its_prompt() -> None:
    scene = Scene(config().replace(b"leg: Gateway, connector: NixlConnector,", b""))
    own, _ = scene.enter()
    (chain,) = [one.run.sent.chain for one in scene.core.records() if one.run is not None]
    scene.core.on_stream_closed(own.ticket, 1.0)
    assert scene.holders(chain) == {P, D}


def test_what_cannot_be_compared_stays_where_it_was_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(10)
    monkeypatch.setattr(crowd.one.core.pools[SERVER].picker, "choose_decode", None)
    effects = crowd.one.answer(crowd.asked.ticket, 0.5)
    assert decision(effects).assignment.addresses == (crowd.picked,)
    assert "chosen again" in fault(effects).what


def test_what_the_new_decode_engine_lacks_is_what_moves() -> None:
    crowd = Crowd(10)
    (record,) = crowd.one.core.records()
    assert record.run is not None
    before = record.run.assignment
    row = crowd.one.table.row_of(crowd.second)
    assert row is not None
    # the prompt has been there before
    crowd.one.core.pools[SERVER].caches.record(row, record.run.sent.chain, 0.0)
    found = decision(crowd.one.answer(crowd.asked.ticket, 0.5)).assignment
    assert found.endpoint.address == crowd.second
    assert found.moved_tokens < 64 < before.moved_tokens
    assert found.cached_tokens == pytest.approx(found.input_tokens - found.moved_tokens)
    assert found.in_flight_tokens == crowd.one.table.in_flight_tokens[row]


def test_without_a_decode_engine_the_request_is_refused() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.core.apply(load_snapshot({"a.yaml": config(engines=())}), 0.1)
    assert refusal(scene.answer(asked.ticket, 0.5)).code == "no_endpoint"
    assert scene.is_free


def test_a_prefill_engine_that_leaves_the_configuration_still_answers() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.core.apply(load_snapshot({"a.yaml": config().replace(P.encode(), b"10.0.0.9:8000")}), 0.1)
    assert decision(scene.answer(asked.ticket, 0.5)).prefill_address == P
    scene.core.on_stream_closed(asked.ticket, 1.0)
    assert scene.is_free


def test_a_server_that_leaves_the_configuration_serves_it_no_more() -> None:
    scene = Scene(config())
    _, asked, _ = scene.arrive()
    scene.core.apply(load_snapshot({"a.yaml": config().replace(b"llama", b"other")}), 0.1)
    assert refusal(scene.answer(asked.ticket, 0.5)).code == "no_endpoint"
    assert not scene.core.records()


def test_a_queue_and_its_account_are_as_if_the_refused_request_had_never_come() -> None:
    control = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}}"
    scene = Scene(config("onPrefillFailure: Fail", others=control))
    _, asked, _ = scene.arrive()
    waiting, _ = scene.enter(0.1)
    assert isinstance(waiting, RequestHeld)
    assert waiting.state is RequestState.QUEUED
    effects = scene.answer(asked.ticket, 0.5, failure="not_asked")
    assert refusal(effects).code == "prefill_failed"
    (second,) = [one for one in scene.core.tick(0.5) if isinstance(one, Prefill)]
    assert second.ticket == waiting.ticket
    found = decision(scene.answer(second.ticket, 1.0))
    assert found.history.waits == {RequestState.QUEUED: pytest.approx(0.4), RequestState.PREFILLING: 0.5}
    assert found.history.waited_s == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n": 2}, "answers"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_what_cannot_be_split_is_served_whole_and_says_why(changes: dict[str, object], reason: str) -> None:
    scene = Scene(config())
    own, _ = scene.enter(**changes)
    assert isinstance(own, Decision)
    assert own.history.whole == reason
    assert own.assignment.prefill is None
    assert own.history.explanation is not None
    assert own.history.explanation.stage.startswith("served whole: ")


def test_a_short_prompt_is_not_counted_as_one_that_cannot_be_split() -> None:
    own, _ = Scene(config()).enter(words=3)
    assert isinstance(own, Decision)
    assert own.history.whole == ""


def test_a_sidecar_makes_its_own_leg() -> None:
    own, _ = Scene(config().replace(b"leg: Gateway", b"leg: Sidecar")).enter()
    assert isinstance(own, Decision)
    assert own.assignment.prefill is not None
    assert own.prefill_address == own.assignment.prefill.address == P
    assert own.history.leg is None


class Pair:
    """Two processes; what one tells comes to the other."""

    def __init__(self, configuration: bytes = config()) -> None:
        self.one = Scene(configuration, name="a", machine="m")
        self.other = Scene(configuration, name="b", machine="m")

    def tell(self, effects: Iterable[Effect], now: float) -> None:
        self.other.core.apply_peer_batch(decode_events(encode_events(EventBatch("a", told(effects)))), now)


@pytest.mark.parametrize("failure", ["", "timeout", "not_asked"])
def test_the_other_processes_count_both_engines_as_this_one_does(failure: str) -> None:
    pair = Pair()
    _, asked, effects = pair.one.arrive(stream=True)
    pair.tell(effects, 0.0)
    for address in (P, D):
        assert pair.one.load(address) == pair.other.load(address)
    # its heartbeat does not end what is being prefilled
    pair.tell(pair.one.core.heartbeat(0.3), 0.3)
    assert pair.other.load(P)[0] == 1
    effects = pair.one.answer(asked.ticket, 0.5, failure=failure)
    pair.tell(effects, 0.5)
    for address in (P, D):
        assert pair.one.load(address) == pair.other.load(address)
    pair.tell(pair.one.core.on_outcome(Outcome(asked.ticket, 200, D, 2.0, 0.75, 410, 6, 400), 2.0), 2.0)
    pair.tell(pair.one.core.on_stream_closed(asked.ticket, 2.0), 2.0)
    for column in ("ttft_s", "tpot_s", "prefill_rate", "trips", "retry_at_s"):
        assert getattr(pair.one.table, column).tolist() == getattr(pair.other.table, column).tolist(), column
    assert pair.one.is_free
    assert pair.other.is_free


def test_the_other_processes_count_a_second_try_at_its_engine() -> None:
    pair = Pair(config(prefill=(P, Q)))
    _, asked, effects = pair.one.arrive(stream=True)
    pair.tell(effects, 0.0)
    effects = pair.one.answer(asked.ticket, 0.5, status=500)
    pair.tell(effects, 0.5)
    for address in (P, Q, D):
        assert pair.one.load(address) == pair.other.load(address)
    pair.tell(pair.one.answer(asked.ticket, 1.0), 1.0)
    pair.tell(pair.one.core.on_stream_closed(asked.ticket, 2.0), 2.0)
    for column in ("ttft_s", "prefill_rate", "trips", "retry_at_s"):
        assert getattr(pair.one.table, column).tolist() == getattr(pair.other.table, column).tolist(), column
    assert pair.one.is_free
    assert pair.other.is_free


def test_a_refused_or_abandoned_prefill_is_over_everywhere() -> None:
    pair = Pair()
    for end in ("refused", "left"):
        _, asked, effects = pair.one.arrive()
        pair.tell(effects, 0.0)
        if end == "left":
            pair.tell(pair.one.core.on_disconnect(asked.ticket, 0.5), 0.5)
        else:
            pair.tell(pair.one.answer(asked.ticket, 0.5, status=400, body=b"no"), 0.5)
        assert pair.other.is_free


def test_legs_that_have_not_ended_are_counted() -> None:
    scene = Scene(config(prefill=(P, Q)))
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0)

    def in_flight(effects: Iterable[Effect]) -> float | None:
        for one in effects:
            metrics.count_effect(one)
        return metrics.registry.get_sample_value("attache_prefill_legs_in_flight", {"server": SERVER})

    assert in_flight([]) is None
    _, first, effects = scene.arrive()
    assert in_flight(effects) == 1
    _, second, effects = scene.arrive()
    assert in_flight(effects) == 2
    # another engine is asked
    assert in_flight(scene.answer(first.ticket, 0.1, status=500)) == 2
    assert in_flight(scene.answer(first.ticket, 0.2)) == 1
    assert in_flight(scene.core.on_disconnect(second.ticket, 0.3)) == 0
    assert in_flight(scene.answer(second.ticket, 0.4)) == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, 399), "decoded"),
        # no block was fetched, but for a prefix that it had before
        ((200, 16), "recomputed"),
        ((200, None), "unknown"),
        ((500, None), "failed"),
        # its client did not wait
        ((0, None), "unknown"),
    ],
)
def test_what_the_decode_engine_makes_of_a_prefill_is_counted(answer: tuple[int, int | None], expected: str) -> None:
    scene = Scene(config())
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0)
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5)
    status, cached = answer
    for one in scene.core.on_outcome(Outcome(asked.ticket, status, D, 1.0, 0.5, 400, 6, cached), 1.0):
        metrics.count_effect(one)
    for name in ("decoded", "recomputed", "unknown", "failed"):
        labels = {"server": SERVER, "outcome": name}
        found = metrics.registry.get_sample_value("attache_prefilled_answers_total", labels)
        assert found == (1 if name == expected else None)


def test_a_prompt_that_its_own_engine_computed_is_not_counted_as_prefilled() -> None:
    scene = Scene(config())
    metrics = Metrics(list, lambda: 0.0, lambda: 0.0)
    _, asked, _ = scene.arrive()
    scene.answer(asked.ticket, 0.5, failure="unreachable")
    for one in scene.core.on_outcome(Outcome(asked.ticket, 200, D, 1.0, 0.5, 400, 6, 399), 1.0):
        metrics.count_effect(one)
    assert b"attache_prefilled_answers_total{" not in generate_latest(metrics.registry)
