# SPDX-License-Identifier: Apache-2.0
"""Watches of the fake server: the changes after a version, as they come, and bookmarks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from bench.cluster.fake.answers import Refused, expired
from bench.cluster.fake.selectors import Matches, selector
from bench.cluster.fake.storage import Change, Storage, place_of

if TYPE_CHECKING:
    from bench.cluster.fake.faults import Faults
    from bench.cluster.fake.targets import Target


class Watches:
    """All open watches."""

    def __init__(self, storage: Storage, faults: Faults, bookmark_s: float) -> None:
        self._storage = storage
        self._faults = faults
        self._bookmark_s = bookmark_s
        self.open: set[asyncio.Queue[Change | Refused | None]] = set()

    def __len__(self) -> int:
        return len(self.open)

    def drop(self) -> None:
        """End all, as a server does that stops: nothing says that more would have come."""
        for queue in self.open:
            queue.put_nowait(None)

    def expire(self) -> None:
        """Tell all, by an event, that they fell too far behind."""
        for queue in self.open:
            queue.put_nowait(expired(0, self._storage.floor))

    async def serve(self, request: web.Request, target: Target) -> web.StreamResponse:
        """Stream the changes until the watch's time is over, or it is dropped, or the client goes."""
        query = request.query
        chosen = _Chosen(target, selector(query.get("labelSelector", ""), query.get("fieldSelector", "")))
        queue: asyncio.Queue[Change | Refused | None] = asyncio.Queue()
        since, begins = query.get("resourceVersion", ""), query.get("sendInitialEvents") == "true"
        # nothing is awaited between looking back and listening: no change is lost or seen twice
        before, refused = self._before(target, since, begins=begins)
        stop = self._storage.subscribe(queue.put_nowait)
        self.open.add(queue)
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        try:
            await answer.prepare(request)
            if refused is not None:
                # in the stream: a real server's answer has begun by then
                await self._send(answer, {"type": "ERROR", "object": refused.status()})
                return answer
            for change in before:
                await self._send(answer, chosen.event(change))
            if begins:
                await self._send(answer, chosen.bookmark(self._storage.version, ends_beginning=True))
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(float(query.get("timeoutSeconds", "1800"))):
                    await self._follow(answer, queue, chosen, bookmarks=query.get("allowWatchBookmarks") == "true")
        finally:
            self.open.discard(queue)
            stop()
        return answer

    async def _follow(
        self,
        answer: web.StreamResponse,
        queue: asyncio.Queue[Change | Refused | None],
        chosen: _Chosen,
        *,
        bookmarks: bool,
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(self._bookmark_s):
                    change = await queue.get()
            except TimeoutError:
                if bookmarks:
                    await self._send(answer, chosen.bookmark(self._storage.version))
                continue
            if change is None:
                return
            if isinstance(change, Refused):
                await self._send(answer, {"type": "ERROR", "object": change.status()})
                return
            await self._send(answer, chosen.event(change))

    async def _send(self, answer: web.StreamResponse, event: dict[str, Any] | None) -> None:
        if event is not None:
            await self._faults.thawed()
            await answer.write(msgspec.json.encode(event) + b"\n")

    def _before(self, target: Target, since: str, *, begins: bool) -> tuple[list[Change], Refused | None]:
        """What a watch from ``since`` begins with, or why it cannot."""
        if begins or since in ("", "0"):
            return self._current(target), None
        try:
            return self._storage.since(int(since)), None
        except Refused as refused:
            return [], refused

    def _current(self, target: Target) -> list[Change]:
        """What is there now, as additions."""
        place = place_of(target.kind)
        found = self._storage.all(target.kind, target.namespace)
        return [Change(int(one["metadata"]["resourceVersion"]), place, None, one) for one in found]


class _Chosen:
    """Which changes a watch sends. An object that stops matching is deleted, for this watch; one that begins to,
    added.
    """

    def __init__(self, target: Target, matches: Matches) -> None:
        self._target = target
        self._place = place_of(target.kind)
        self._matches = matches

    def event(self, change: Change) -> dict[str, Any] | None:
        if change.place != self._place:
            return None
        before, after = self._mine(change.before), self._mine(change.after)
        if after:
            return {"type": "MODIFIED" if before else "ADDED", "object": change.after}
        if before:
            last = change.after or change.before or {}
            return {"type": "DELETED", "object": last}
        return None

    def bookmark(self, version: int, *, ends_beginning: bool = False) -> dict[str, Any]:
        resource = self._target.kind.resource
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        if ends_beginning:
            metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
        thing = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
        return {"type": "BOOKMARK", "object": thing}

    def _mine(self, thing: dict[str, Any] | None) -> bool:
        if thing is None:
            return False
        metadata, target = thing["metadata"], self._target
        here = target.namespace is None or metadata.get("namespace") == target.namespace
        return here and (not target.name or metadata["name"] == target.name) and self._matches(thing)
