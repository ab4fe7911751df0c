# SPDX-License-Identifier: Apache-2.0
"""Writes what ModelRoutes log of requests to the gateway's sink: a file, or an HTTP service that takes CloudEvents.

No request waits for it: what does not fit is dropped and counted, and a sink that is down is tried again after pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from extproc.core.payload_log import ByteCapacity, PayloadCapture, capture_events, is_sampled, start_capture
from extproc.line_writer import LineWriter, make_threadsafe_callback
from extproc.metrics.exposition import CounterFamily
from extproc.task_supervisor import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import aiohttp
    from prometheus_client import CollectorRegistry

    from extproc.api.payload_log import PayloadLog, PayloadSink
    from extproc.core.payload_log import CloudEvent
    from extproc.core.request_record import Arrival
    from extproc.line_writer import LineResult

log = logging.getLogger(__name__)
MOST_WAITING: Final = 1024
_BATCH: Final = 8
_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_CLOSE_S: Final = 1.0
# Attributes in headers, by CloudEvents' binding to HTTP: what is not printable ASCII is percent-encoded.
_SAFE: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class PayloadExporter:
    """``sink``: the one in use, None: nothing is logged. ``logs``: the payload log of each ModelRoute by its key.
    ``source``: this gateway.
    """

    def __init__(
        self,
        sink: Callable[[], PayloadSink | None],
        logs: Callable[[], Mapping[str, PayloadLog]],
        registry: CollectorRegistry,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        source: str,
    ) -> None:
        self._sink = sink
        self._logs = logs
        self._counts = CounterFamily(
            "attache_payload_events", "Events of the payload log: sent, failed, dropped.", ["result"], registry
        )
        self._clock = clock
        self._wall_clock = wall_clock
        self._source = source
        self._capacity = ByteCapacity()
        self._queue: deque[PayloadCapture] = deque()
        self._is_due = asyncio.Event()
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._http: aiohttp.ClientSession | None = None
        self._file: tuple[str, LineWriter] | None = None

    def start_capture(self, arrival: Arrival, ticket: str) -> PayloadCapture | None:
        """The capture of a request, if its route logs it and it is one of the sample."""
        spec = self._logs().get(arrival.destination.route)
        if spec is None or self._sink() is None or not is_sampled(ticket, spec.sample):
            return None
        return start_capture(spec, arrival, ticket, self._capacity, self._clock())

    def add(self, capture: PayloadCapture) -> None:
        """Its request has ended."""
        if len(self._queue) >= MOST_WAITING:
            capture.discard()
            self._count("dropped", 1)
            return
        self._queue.append(capture)
        self._is_due.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._is_due.wait()
            await self._write_batch()
            if not self._queue:
                self._is_due.clear()
            if self._backoff.pause_s:
                await asyncio.sleep(self._backoff.pause_s)

    async def close(self) -> None:
        """Write what is there, if the sink takes it at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                while self._queue and not self._backoff.pause_s:
                    await self._write_batch()
        if self._queue:
            self._count("dropped", len(self._queue))
        await self._close_sink()

    async def _write_batch(self) -> None:
        sink = self._sink()
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        try:
            if sink is None:
                self._count("dropped", len(batch))
                await self._close_sink()
                return
            # JSON of a megabyte takes a while: not on the event loop
            events = await asyncio.to_thread(self._encode, batch)
            if sink.path is not None:
                await self._append(sink.path, events)
            elif sink.url is not None:
                await self._post(sink.url, events)
        except asyncio.CancelledError:
            # at the end, or the sink is too slow for it
            self._count("dropped", len(batch))
            raise
        finally:
            for capture in batch:
                capture.discard()

    def _encode(self, batch: list[PayloadCapture]) -> list[CloudEvent]:
        offset_s = self._wall_clock() - self._clock()
        return [
            event
            for one in batch
            for event in capture_events(
                one, self._source, _rfc3339(one.began_s + offset_s), _rfc3339(one.answered_s + offset_s)
            )
        ]

    async def _append(self, path: str, events: list[CloudEvent]) -> None:
        if self._file is None or self._file[0] != path:
            await self._close_sink()
            self._file = (
                path,
                LineWriter(Path(path), make_threadsafe_callback(asyncio.get_running_loop(), self._count_lines)),
            )
        for event in events:
            data = b"" if event.data is None else b',"data":' + event.data
            self._file[1].enqueue(msgspec.json.encode(event.attributes)[:-1] + data + b"}\n")

    def _count(self, result: str, number: int) -> None:
        self._counts.add_amount(number, result)

    def _count_lines(self, result: LineResult, number: int) -> None:
        self._count("sent" if result == "written" else result, number)

    async def _post(self, url: str, events: list[CloudEvent]) -> None:
        reasons = await asyncio.gather(*(self._post_one(url, event) for event in events))
        failures = [one for one in reasons if one]
        self._count("failed", len(failures))
        self._count("sent", len(reasons) - len(failures))
        if failures:
            self._failed(url, failures[0])
        elif self._backoff.pause_s:
            log.info("%s takes payloads again", url)
            self._backoff.reset()

    async def _post_one(self, url: str, event: CloudEvent) -> str:
        """Why the service did not take it; empty if it did. A text, because an exception would keep all that its call
        had in cycles, which are collected after hours.
        """
        import aiohttp  # noqa: PLC0415 - only where it is asked for

        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S), cookie_jar=aiohttp.DummyCookieJar()
            )
        headers = event_headers(event.attributes)
        try:
            async with self._http.post(url, data=event.data or b"", headers=headers, allow_redirects=False) as answer:
                return "" if answer.status < 300 else f"status {answer.status}"
        except TimeoutError:
            return f"no answer within {_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return str(error) or type(error).__name__

    def _failed(self, url: str, why: str) -> None:
        if not self._backoff.pause_s:
            log.warning("%s does not take payloads: %s; they are dropped until it does. See that it runs", url, why)
        self._backoff.record_failure()

    async def _close_sink(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await asyncio.to_thread(file[1].close)
        http, self._http = self._http, None
        if http is not None:
            await http.close()


def event_headers(attributes: Mapping[str, str | int]) -> dict[str, str]:
    """The attributes of an event in CloudEvents' binary form."""
    return {
        "content-type" if name == "datacontenttype" else f"ce-{name}": encode_header_value(str(value))
        for name, value in attributes.items()
    }


def encode_header_value(text: str) -> str:
    """As the value of a header, whatever it was."""
    return quote(text, safe=_SAFE, errors="replace")


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
