# SPDX-License-Identifier: Apache-2.0
"""Prefill legs: POSTs of prompts to prefill engines, bounded in number, bytes and time.

Beyond these bounds a prefill is not asked for, and the request goes on as after one that failed. A client that leaves
ends the call, and the engine sees that: it computes the prompt no further.

Mooncake's engines choose an id when they start, and their bootstrap servers answer it (``GET /query``). It is asked for
before a prefill, once for all that wait for it, and known for some seconds: no engine restarts in so little time. After
a prefill that finds no engine it is asked for again.

What cannot be sent is no fault of the engine: its prefill counts as not asked for.

Where the decode engine has the request at the same time, the prefill's answer is only its status. If it fails, the
decode engine is told to end the request. That call may overtake the request on its way by Envoy, so it is repeated
until the request is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal
from zlib import crc32

import aiohttp
import msgspec

from extproc.core.request_record import PrefillResult
from extproc.engines.engine_responses import BootstrapEngineId, UnreadableResponse, parse_bootstrap_engines
from extproc.feeds.engine_http import EngineHttp
from extproc.task_supervisor import FailureLog
from extproc.wire_names import DATA_PARALLEL_RANK

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.api.model_server import ModelServerSpec
    from extproc.core.core import Core
    from extproc.core.effects import AbortDecode, Prefill
    from extproc.feeds.engine_http import EngineCredentials, EngineResponse

log = logging.getLogger(__name__)
_MOST_OF_ENGINE: Final = 256
_MOST: Final = 2048
# Of all bodies that are being sent or waited for.
_MOST_HELD_BYTES: Final = 512 * 1024 * 1024
# NIXL's parameters take 9 bytes for a block of 16 tokens, and a completion may echo its prompt.
MOST_ANSWER_BYTES: Final = 4 * 1024 * 1024
_MOST_QUERY_BYTES: Final = 1024 * 1024
_QUERY_TIMEOUT_S: Final = 2.0
_KNOWN_S: Final = 5.0
# As long as an endpoint is avoided after its first failure.
_FAILED_S: Final = 1.0
# By which what stands before an engine says that there is none.
_NO_ENGINE: Final = frozenset({502, 503, 504})
_ABORT_PATH: Final = "/abort_request"
_ABORT_TIMEOUT_S: Final = 2.0
_MOST_ABORT_BYTES: Final = 64 * 1024
# Between two calls: at first, and at most. After so many the engine has ended the request by itself.
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 5.0
_MOST_ABORTS: Final = 64
# A connection that is kept may just be closed by the engine.
_TRIES: Final = 2


class _Query(msgspec.Struct, frozen=True):
    """What a bootstrap server has answered, or the failure, until ``until_s``."""

    until_s: float
    ranks: Sequence[BootstrapEngineId] = ()
    failure: Literal["", "unreachable", "unreadable"] = ""
    detail: str = ""


class _EngineIds:
    """What engines are called by others. A bootstrap server is asked by one request at a time."""

    def __init__(self, http: EngineHttp, clock: Callable[[], float]) -> None:
        self._http = http
        self._clock = clock
        # by address and port
        self._known: dict[tuple[str, int], _Query] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[_Query]] = {}

    async def of(self, spec: ModelServerSpec, address: str, port: int) -> _Query:
        """The ranks of the engine at ``address``. A client that leaves ends no other client's query."""
        place = address, port
        known = self._known.get(place)
        if known is not None and self._clock() < known.until_s:
            return known
        asking = self._asking.get(place)
        if asking is None:
            asking = self._asking[place] = asyncio.get_running_loop().create_task(self._ask(spec, address, port))
        return await asyncio.shield(asking)

    def forget(self, query: _Query) -> None:
        """The engine may have restarted since it answered this."""
        self._known = {place: one for place, one in self._known.items() if one is not query}

    async def close(self) -> None:
        """End all queries."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, spec: ModelServerSpec, address: str, port: int) -> _Query:
        try:
            found = await self._query(spec, address, port)
        finally:
            del self._asking[address, port]
        now = self._clock()
        self._known = {place: one for place, one in self._known.items() if now < one.until_s}
        self._known[address, port] = found
        return found

    async def _query(self, spec: ModelServerSpec, address: str, port: int) -> _Query:
        place = f"port {port} of {address}"
        try:
            answer = await self._http.get(
                spec, address, port, "/query", timeout_s=_QUERY_TIMEOUT_S, most_bytes=_MOST_QUERY_BYTES
            )
            if answer.status != HTTPStatus.OK:
                raise UnreadableResponse(
                    f"{place} answers {answer.status} to /query; see whether transferPort is right"
                )
            return _Query(self._clock() + _KNOWN_S, parse_bootstrap_engines(answer.body))
        except TimeoutError:
            detail = f"{place}: no answer to /query within {_QUERY_TIMEOUT_S:g} s"
            return _Query(self._clock() + _FAILED_S, failure="unreachable", detail=detail)
        except OSError as error:
            return _Query(self._clock() + _FAILED_S, failure="unreachable", detail=str(error) or type(error).__name__)
        except UnreadableResponse as error:
            return _Query(self._clock() + _FAILED_S, failure="unreadable", detail=str(error))


class PrefillClient:
    """Performs Prefill effects. Made inside the event loop."""

    def __init__(
        self,
        core: Core,
        access: EngineCredentials,
        *,
        clock: Callable[[], float],
        deliver: Callable[[PrefillResult], object],
    ) -> None:
        """``access``: keys and TLS of engines. ``deliver``: gets every result, but of cancelled prefills only those
        beside their requests.
        """
        self._core = core
        # bounded by what is asked at the same time
        self._http = EngineHttp(access, most_connections=0)
        self._clock = clock
        self._deliver = deliver
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._of_engines: Counter[str] = Counter()
        self._held_bytes = 0
        self._ids = _EngineIds(self._http, clock)
        self._is_closed = False
        self._failures = FailureLog(log)

    def start_prefill(self, ask: Prefill) -> None:
        """Begin a prefill; its result is delivered later."""
        full = self._full(ask)
        self._of_engines[ask.address] += 1
        self._held_bytes += len(ask.body)
        task = self._tasks[ask.ticket] = asyncio.get_running_loop().create_task(self._run(ask, full))
        task.add_done_callback(partial(self._ended, ask))

    def cancel_prefill(self, ticket: str, *, after_s: float = 0.0) -> None:
        """The client of the request went away, or the request is over."""
        task = self._tasks.get(ticket)
        if task is not None and after_s:
            asyncio.get_running_loop().call_later(after_s, task.cancel)
        elif task is not None:
            task.cancel()

    def abort_decode(self, ask: AbortDecode) -> None:
        """Have a decode engine end the request, until it is cancelled."""
        task = self._tasks[ask.ticket] = asyncio.get_running_loop().create_task(self._abort(ask))
        task.add_done_callback(partial(self._forget, ask.ticket))

    async def close(self) -> None:
        """End what is being prefilled, and close all connections."""
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ids.close()
        await self._http.close()

    def _full(self, ask: Prefill) -> str:
        """Which bound would be passed; empty: none."""
        if self._of_engines[ask.address] >= _MOST_OF_ENGINE:
            return f"{_MOST_OF_ENGINE} prefills run at this engine"
        if len(self._tasks) >= _MOST:
            return f"{_MOST} prefills run"
        if self._held_bytes + len(ask.body) > _MOST_HELD_BYTES:
            return f"prefills hold {self._held_bytes} bytes"
        return ""

    def _ended(self, ask: Prefill, task: asyncio.Task[None]) -> None:
        self._forget(ask.ticket, task)
        self._held_bytes -= len(ask.body)
        self._of_engines[ask.address] -= 1
        if not self._of_engines[ask.address]:
            del self._of_engines[ask.address]
        if task.cancelled() and ask.is_beside and not self._is_closed:
            self._deliver(PrefillResult(ask.ticket, "left"))

    def _forget(self, ticket: str, task: asyncio.Task[None]) -> None:
        # its result may have begun the next try
        if self._tasks.get(ticket) is task:
            del self._tasks[ticket]

    async def _run(self, ask: Prefill, full: str) -> None:
        result = PrefillResult(ask.ticket, "not_asked", detail=full)
        if not full:
            try:
                result = await self._result_of(ask)
            except Exception as error:  # noqa: BLE001 - whatever it is, a request waits for the result
                self._failures.record("a prefill could not be requested", error)
                result = PrefillResult(ask.ticket, "not_asked", detail=f"our own code fails: {error!r}")
        self._deliver(result)

    async def _result_of(self, ask: Prefill) -> PrefillResult:
        try:
            async with asyncio.timeout(ask.timeout_s):
                return await self._prefill(ask)
        except TimeoutError:
            return PrefillResult(ask.ticket, "timeout", detail=f"no answer within {ask.timeout_s:g} s")
        except UnreadableResponse as error:
            return PrefillResult(ask.ticket, "unreadable", detail=str(error))
        except OSError as error:
            return PrefillResult(ask.ticket, "unreachable", detail=str(error) or type(error).__name__)
        except ValueError as error:
            self._failures.record("a prefill cannot be requested", error, is_ours=False)
            return PrefillResult(ask.ticket, "not_asked", detail=str(error))

    async def _prefill(self, ask: Prefill) -> PrefillResult:
        """Raises OSError, Unreadable, and ValueError for what cannot be sent."""
        pool = self._core.pools.get(ask.server)
        if not ask.query_port or pool is None:
            return await self._answer(ask, None)
        query = await self._ids.of(pool.spec, ask.address, ask.query_port)
        if query.failure:
            return PrefillResult(ask.ticket, query.failure, detail=query.detail)
        try:
            result = await self._answer(ask, query.ranks[crc32(ask.ticket.encode()) % len(query.ranks)])
        except ConnectionError:
            self._ids.forget(query)
            raise
        if result.status in _NO_ENGINE:
            self._ids.forget(query)
        return result

    async def _answer(self, ask: Prefill, engine: BootstrapEngineId | None) -> PrefillResult:
        """``engine``: what it is called by others, and which of its ranks is to prefill; None: this need not be
        known.
        """
        answer = await self._post(ask, engine)
        if answer is None:
            return PrefillResult(ask.ticket, "not_asked", detail="its ModelServer has left the configuration")
        return PrefillResult(
            ask.ticket,
            status=answer.status,
            body=answer.body,
            answered_at_s=self._clock() - answer.read_s,
            engine_id="" if engine is None else engine.id,
        )

    async def _abort(self, ask: AbortDecode) -> None:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_MOST_ABORTS):
            pool = self._core.pools.get(ask.server)
            if pool is None:
                return
            for body in ask.bodies:
                try:
                    await self._http.post(
                        pool.spec,
                        ask.address,
                        _ABORT_PATH,
                        body,
                        timeout_s=_ABORT_TIMEOUT_S,
                        most_bytes=_MOST_ABORT_BYTES,
                    )
                except (OSError, ValueError) as error:
                    self._failures.record("a decode engine could not be asked to end a request", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _post(self, ask: Prefill, engine: BootstrapEngineId | None) -> EngineResponse | None:
        """None: the engine's ModelServer is not configured any more."""
        rank = {} if engine is None or engine.rank is None else {DATA_PARALLEL_RANK: str(engine.rank)}
        for number in range(1, _TRIES + 1):
            pool = self._core.pools.get(ask.server)
            if pool is None:
                return None
            try:
                return await self._http.post(
                    pool.spec,
                    ask.address,
                    ask.path,
                    ask.body,
                    timeout_s=ask.timeout_s,
                    most_bytes=MOST_ANSWER_BYTES,
                    headers={**ask.headers, **rank},
                )
            except ConnectionError as error:
                if number == _TRIES or isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    raise
        raise AssertionError("the last try returns or raises")
