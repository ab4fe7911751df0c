# SPDX-License-Identifier: Apache-2.0
"""Faults on request: ``POST /faults`` with one of these objects."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec
from aiohttp import web

_GARBAGE = b"<html>It works!</html>"
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


async def serve_bad_answer(http: web.Request, kind: str) -> web.StreamResponse:
    """``kind``: of the fault ``ill``. An answer without an end lasts until the client leaves."""
    await http.read()
    if kind == "garbage":
        return web.Response(body=_GARBAGE, content_type="text/html")
    if kind == "silence":
        await asyncio.Event().wait()
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(http)
    while True:
        await response.write(b":")
        await asyncio.sleep(1)


class Refuse(msgspec.Struct, frozen=True, tag_field="fault", tag="refuse"):
    """Stop listening for ``for_s`` seconds: new connections are refused, open ones stay."""

    for_s: Seconds


class Stall(msgspec.Struct, frozen=True, tag_field="fault", tag="stall"):
    """Compute nothing for ``for_s`` seconds."""

    for_s: Seconds


class CutStreams(msgspec.Struct, frozen=True, tag_field="fault", tag="cut"):
    """Cut the connections of the next ``times`` answers after ``after_tokens`` tokens."""

    after_tokens: Count
    times: Count = 1


class Unavailable(msgspec.Struct, frozen=True, tag_field="fault", tag="unavailable"):
    """Answer the next ``times`` requests with ``status``; of ``every`` requests one, the others are served."""

    times: Count
    every: Annotated[int, msgspec.Meta(ge=1)] = 1
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503


class BadAnswers(msgspec.Struct, frozen=True, tag_field="fault", tag="ill"):
    """Answer the next ``times`` requests wrongly, without computing anything.

    ``garbage``: status 200, and at once a body that is no answer. ``silence``: no byte, for ever. ``drip``: status 200
    and a byte a second, for ever.
    """

    kind: Literal["garbage", "silence", "drip"]
    times: Count


class BadMetricsPage(msgspec.Struct, frozen=True, tag_field="fault", tag="ill-page"):
    """Answer the next ``times`` requests for metrics wrongly: in the ways of ``BadAnswers``, or with an empty page
    (``empty``).
    """

    kind: Literal["garbage", "silence", "drip", "empty"]
    times: Count


class DropEvents(msgspec.Struct, frozen=True, tag_field="fault", tag="drop-events"):
    """Do not send the next ``times`` messages with KV events, although they are numbered and kept for replay."""

    times: Count


class FailLoads(msgspec.Struct, frozen=True, tag_field="fault", tag="fail-loads"):
    """Answer the next ``times`` loads of adapters with ``status``, 0 to load them, after ``after_s`` seconds."""

    times: Count
    status: Annotated[int, msgspec.Meta(ge=0, le=599)] = 500
    after_s: Seconds = 0.0


Fault = Refuse | Stall | CutStreams | Unavailable | BadAnswers | BadMetricsPage | DropEvents | FailLoads


class FaultPlan:
    """The faults that still await requests."""

    def __init__(self) -> None:
        self._cut = CutStreams(0, 0)
        self._unavailable = Unavailable(0)
        self._asked = 0
        self._ill = BadAnswers("garbage", 0)
        self._page = BadMetricsPage("garbage", 0)
        self._loads = FailLoads(0)

    def set(self, fault: CutStreams | Unavailable | BadAnswers | BadMetricsPage | FailLoads) -> None:
        """Plan a fault; it replaces an earlier one of its kind."""
        match fault:
            case CutStreams():
                self._cut = fault
            case Unavailable():
                self._unavailable = fault
            case BadAnswers():
                self._ill = fault
            case BadMetricsPage():
                self._page = fault
            case FailLoads():
                self._loads = fault

    def next_load_fault(self) -> FailLoads | None:
        """How to fail or delay this load of an adapter; None: load it."""
        fault = self._loads
        if not fault.times:
            return None
        self._loads = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault

    def next_error_status(self) -> int | None:
        """The HTTP status to answer this request with; None: serve it."""
        fault = self._unavailable
        self._asked += 1
        if not fault.times or self._asked % fault.every:
            return None
        self._unavailable = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.status

    def next_cut(self) -> int | None:
        """The tokens after which to cut this answer; None: answer whole."""

        fault = self._cut
        if not fault.times:
            return None
        self._cut = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.after_tokens

    def next_bad_answer(self) -> str | None:
        """How to answer this request wrongly; None: serve it."""
        fault = self._ill
        if not fault.times:
            return None
        self._ill = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.kind

    def next_metrics_fault(self) -> str | None:
        """How to answer this request for metrics wrongly; None: serve it."""
        fault = self._page
        if not fault.times:
            return None
        self._page = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.kind
