# SPDX-License-Identifier: Apache-2.0
"""The shell around the core: held streams that are cancelled, wake-ups, and failures that are logged."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from extproc.core.effects import Decision, Fault, PrefillEnded, RequestHeld, RequestRefused, WakeAt
from extproc.core.request_record import PrefillLegResult, RequestHead
from extproc.core.request_states import RequestState
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.guard_client import GuardClient
from extproc.feeds.tokenizers import Tokenizers
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import InternalError, QueueTimeout
from extproc.runtime.effect_performer import Performer, PreDecisionServices
from tests.extproc.scenes import ONE_AT_A_TIME, configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from extproc.core.effects import RequestEffect

SPEC = f"""
scrapeInterval: 0s
flowControl: {{{ONE_AT_A_TIME}, timeout: 50ms}}
{endpoints("10.0.0.1:8000")}
"""


class Shell:
    """A performer over one engine that takes one request at a time. Made inside the event loop."""

    def __init__(self, spec: str = SPEC) -> None:
        self.core = core_of(servers={"llama": spec})
        self.clock = asyncio.get_running_loop().time
        metrics = Metrics(lambda: list(self.core.pools.values()), lambda: 0.0, self.clock)
        access = EngineCredentials({}, self.clock)
        self.tokenizers = Tokenizers(metrics, access)
        services = PreDecisionServices(self.tokenizers, GuardClient(access, clock=self.clock, source="urn:x"))
        self.performer = Performer(
            self.core,
            metrics,
            clock=self.clock,
            services=services,
            publish=lambda _: None,
            begin=lambda _: None,
        )

    def arrive(self) -> RequestEffect:
        own, effects = self.core.arrive(request(self.core), self.clock())
        self.performer.perform(effects, own)
        return own

    def held(self) -> tuple[RequestHeld, asyncio.Task[object]]:
        own = self.arrive()
        assert isinstance(own, RequestHeld)
        return own, asyncio.create_task(self.performer.wait_for_answer(own))

    def close(self, ticket: str) -> None:
        self.performer.perform(self.core.on_disconnect(ticket, self.clock()))


async def test_a_stream_cancelled_between_its_decision_and_its_turn_frees_the_engine_for_the_next() -> None:
    shell = Shell()
    first = shell.arrive()
    (held, waiting), (_, next_waiting) = shell.held(), shell.held()
    await asyncio.sleep(0)
    shell.performer.perform(shell.core.on_stream_closed(first.ticket, shell.clock()))
    # the decision is delivered here, and the stream has not run yet
    shell.performer.perform(shell.core.tick(shell.clock()))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    shell.close(held.ticket)

    decision = await next_waiting
    assert isinstance(decision, Decision)
    assert shell.core.count_requests(RequestState.RUNNING) == 1
    assert shell.core.pools["default/llama"].table.in_flight.sum() == 1
    assert shell.performer._waits == {}


async def test_a_gateway_that_has_gone_when_it_is_to_wait_leaves_nothing_behind() -> None:
    shell = Shell()
    shell.arrive()
    held = shell.arrive()
    assert isinstance(held, RequestHeld)

    async def has_gone() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await shell.performer.wait_for_answer(held, has_gone)
    assert shell.performer._waits == {}


async def test_a_request_that_waits_is_woken_at_its_timeout_though_nothing_else_happens() -> None:
    shell = Shell()
    shell.arrive()
    _, waiting = shell.held()
    refused = await asyncio.wait_for(waiting, 120)

    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.refusal, QueueTimeout)


async def test_a_wake_up_now_does_not_lose_the_one_that_was_asked_for_later() -> None:
    shell = Shell()
    shell.arrive()
    _, waiting = shell.held()
    for at_s in (shell.clock() + 3600, 0.0):
        shell.performer.perform([WakeAt(at_s)])

    assert isinstance(await asyncio.wait_for(waiting, 120), RequestRefused)


async def test_a_tokenizer_that_no_model_server_uses_is_dropped(tmp_path: Path) -> None:
    with_files = f"{SPEC}tokenizer: {{path: {tmp_path}}}"
    shell = Shell(with_files)

    async def tokens(token: int) -> Sequence[int] | None:
        words = {"type": "WordLevel", "vocab": {"hi": token}, "unk_token": "hi"}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
        head = RequestHead("POST", "/v1/completions", {}, has_body=True)
        arrival = shell.core.builder.build_by_model(head, json.dumps({"model": "m", "prompt": "hi"}).encode())
        return await shell.tokenizers.tokens_of(arrival)

    assert await tokens(7) == [7]
    shell.performer.apply(configuration(servers={"llama": with_files, "other": SPEC}))
    assert await tokens(8) == [7], "it is kept while a ModelServer uses it"
    shell.performer.apply(configuration(servers={"other": SPEC}))
    shell.performer.apply(configuration(servers={"llama": with_files}))
    assert await tokens(8) == [8]


async def test_the_cause_of_a_failed_decision_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    pool = shell.core.pools["default/llama"]
    pool.picker = None  # type: ignore[assignment]  # the mistake
    own = shell.arrive()

    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, InternalError)
    assert "AttributeError" in caplog.text
    assert isinstance(shell.arrive(), RequestRefused)
    assert caplog.text.count("AttributeError") == 1, "only the first of its kind"


async def test_a_fault_is_logged_once_of_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    shell, faults = Shell(), list[Fault]()
    for _ in range(5):
        try:
            raise KeyError("a policy's mistake")
        except KeyError as error:
            faults.append(Fault("the queue of a server could not be served", error))
    shell.performer.perform([*faults])
    assert caplog.text.count("the queue of a server could not be served") == 1
    assert "a policy's mistake" in caplog.text


async def test_the_first_failure_of_a_prefill_engine_is_logged_and_its_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    shell = Shell()
    for outcome, detail in (("left", ""), ("timeout", "no answer"), ("error", "500"), ("prefilled", ""), ("left", "")):
        leg = PrefillLegResult("10.0.0.1:8000", outcome, 0.5, detail)  # type: ignore[arg-type]
        shell.performer.perform([PrefillEnded("t-1", "llama", leg, goes_on=True)])
    first, last = [one.getMessage() for one in caplog.records]
    assert "prefill engine 10.0.0.1:8000 of llama: timeout after 0.5 s, no answer; decode engines compute" in first
    assert last == "prefill engine 10.0.0.1:8000 of llama answers again"


async def test_plugins_that_fail_at_the_same_place_are_each_logged(caplog: pytest.LogCaptureFixture) -> None:
    shell = Shell()
    for plugin in ("first", "second", "first"):
        shell.performer.perform([Fault(f"the plugin '{plugin}' of s fails", TypeError("wrong"), "s", plugin)])
    assert [caplog.text.count(f"the plugin '{plugin}' of s fails") for plugin in ("first", "second")] == [1, 1]
