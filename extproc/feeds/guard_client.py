# SPDX-License-Identifier: Apache-2.0
"""Asks guards about requests: POSTs of CloudEvents, bounded in number, time and size.

Redirects are not followed, answers are never decompressed, and a client that leaves ends the call.
"""

from __future__ import annotations

import asyncio
import io
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import aiohttp

from extproc.core.guard_decisions import GuardCircuitBreaker, GuardFailed, GuardReply, guard_call_owner, guard_event
from extproc.feeds.payload_exporter import encode_header_value, event_headers
from extproc.http_body import read_at_most
from extproc.task_supervisor import FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.api.guard_services import GuardService
    from extproc.core.effects import AskGuard, GuardAnswered
    from extproc.core.payload_log import CloudEvent
    from extproc.feeds.engine_http import ConnectionSettings, EngineCredentials

log = logging.getLogger(__name__)
# Of one guard. A request that waits for a place does so within the guard's time.
_MOST_CALLS: Final = 128
_MOST_WAITING: Final = 1024
# One caller has a quarter of both at most.
_CALLERS: Final = 4
# Of guards that have left the configuration, some are kept.
_MOST_GUARDS: Final = 64
# With longer ones, the HTTP client writes a body in pieces.
_PIECE_BYTES: Final = 1 << 16
# The connections that are kept may just be closed by the other side.
_TRIES: Final = 2


class _TooLong(Exception):
    """More came than an answer may have."""


class _Places:
    """For calls at the same time."""

    def __init__(self, callers: int) -> None:
        self.running = asyncio.Semaphore(_MOST_CALLS // callers)
        self.most = (_MOST_CALLS + _MOST_WAITING) // callers
        self.open = 0


class _Line:
    """To one guard."""

    def __init__(self) -> None:
        self.places = _Places(1)
        self.circuit = GuardCircuitBreaker()
        # while a call uses them
        self._of_callers = WeakValueDictionary[str, _Places]()

    def places_of(self, caller: str) -> _Places:
        """The caller's own."""
        return self._of_callers.setdefault(caller, _Places(_CALLERS))


class GuardClient:
    """All guards of the configuration. Made inside the event loop; the HTTP client comes with the first request."""

    def __init__(self, access: EngineCredentials, *, clock: Callable[[], float], source: str) -> None:
        """``access``: reads keys and TLS files. ``source``: this gateway, for events."""
        self._access = access
        self._clock = clock
        self._source = source
        self._lines: dict[str, _Line] = {}
        self._http: aiohttp.ClientSession | None = None
        self._failing: set[str] = set()
        self._failures = FailureLog(log)

    async def ask_guard(self, ask: AskGuard) -> GuardReply | GuardFailed:
        """What the guard says of the request, or why it says nothing. Cancelled if the client disconnects."""
        try:
            return await self._answer_to(ask)
        except Exception as error:  # noqa: BLE001 - without an answer, the failure mode decides
            self._failures.record(f"the guard {ask.guard.name} could not be asked", error)
            return GuardFailed.of_internal_error(error)

    async def _answer_to(self, ask: AskGuard) -> GuardReply | GuardFailed:
        service, began_s = ask.guard.service, self._clock()
        if service is None:
            return GuardFailed("unknown", "it is not configured")
        line = self._line(service.name)
        caller = guard_call_owner(ask.arrival)
        if not line.circuit.may_call(caller, began_s):
            return GuardFailed("paused", "it has not answered some calls in a row")
        places = line.places_of(caller), line.places
        busy = next((one.open for one in places if one.open >= one.most), None)
        if busy is not None:
            return GuardFailed("busy", f"{busy} requests wait for it")
        own, shared = places
        own.open, shared.open = own.open + 1, shared.open + 1
        try:
            async with asyncio.timeout(service.timeout), own.running, shared.running:
                status, body = await self._post(service, ask)
        except TimeoutError:
            failed = GuardFailed("timeout", f"no answer within {service.timeout:g} s", self._clock() - began_s)
        except _TooLong as error:
            # it lives
            line.circuit.record_answer(self._clock())
            return GuardFailed("invalid", str(error), self._clock() - began_s)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            failed = GuardFailed("unreachable", str(error) or type(error).__name__, self._clock() - began_s)
        else:
            line.circuit.record_answer(self._clock())
            return GuardReply(status, body, self._clock() - began_s)
        finally:
            own.open, shared.open = own.open - 1, shared.open - 1
        line.circuit.record_failure(caller, self._clock(), began_s=began_s, is_timeout=failed.why == "timeout")
        return failed

    def log_result(self, asked: GuardAnswered) -> None:
        """Log the first failure of a guard, and its first answer afterwards."""
        if asked.has_verdict:
            if asked.name in self._failing:
                self._failing.discard(asked.name)
                log.info("the guard %s answers again", asked.name)
            if asked.result == "refused":
                log.debug("the guard %s refused request %s: %s", asked.name, asked.ticket, asked.detail or "no reason")
            return
        if asked.name not in self._failing and len(self._failing) < _MOST_GUARDS:
            self._failing.add(asked.name)
            then = "go on without it" if asked.goes_on else "are refused"
            log.warning(
                "the guard %s does not answer (%s): %s; requests %s. See that it runs",
                asked.name,
                asked.result,
                asked.detail,
                then,
            )

    async def close(self) -> None:
        """Close all connections."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    def _line(self, name: str) -> _Line:
        found = self._lines.get(name)
        if found is None:
            if len(self._lines) >= _MOST_GUARDS:
                del self._lines[next(iter(self._lines))]
            found = self._lines[name] = _Line()
        return found

    async def _post(self, service: GuardService, ask: AskGuard) -> tuple[int, bytes]:
        access = await self._access.settings_for_service(service.connection)
        event = guard_event(ask.arrival, ask.ticket, self._source)
        headers = _headers(service, ask, event, access)
        most = ask.guard.max_answer_bytes(len(ask.arrival.body))
        for number in range(1, _TRIES + 1):
            try:
                return await self._try(service.url, headers, event.data or b"", access, most)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if number == _TRIES:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _try(
        self, url: str, headers: dict[str, str], body: bytes, access: ConnectionSettings, most: int
    ) -> tuple[int, bytes]:
        if self._http is None:
            # bounded by the places of each guard
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
        data = io.BytesIO(body) if len(body) > _PIECE_BYTES else body
        async with self._http.post(
            url, data=data, headers=headers, ssl=access.tls or True, allow_redirects=False
        ) as answer:
            if answer.status != HTTPStatus.OK:
                return answer.status, b""
            read = await read_at_most(answer.content, most)
            if read is None:
                raise _TooLong(f"it answers more than {most} bytes")
            return answer.status, read


def _headers(service: GuardService, ask: AskGuard, event: CloudEvent, access: ConnectionSettings) -> dict[str, str]:
    """Of the client's, those alone that the configuration names."""
    given = ask.arrival.head.headers
    named = {name: _as_it_is(given[name.lower()]) for name in service.headers if name.lower() in given}
    own = {**event_headers(event.attributes), "accept-encoding": "identity"}
    if access.authorization:
        own["authorization"] = access.authorization
    return {**named, **own}


def _as_it_is(value: str) -> str:
    return value if value.isascii() and value.isprintable() else encode_header_value(value)
