# SPDX-License-Identifier: Apache-2.0
"""The fake API server's HTTP: discovery, reads, writes, watches and injected faults."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml
from aiohttp import web

from controller.kube.cluster_access import ClusterAccess
from tests.fake_api.answers import ApiError, Matches, bad_request, conflict, selector, version_expired
from tests.fake_api.kinds import Kinds, scale_of, scaling
from tests.fake_api.objects import Objects, ResourcePath, WriteOptions, target_of
from tests.fake_api.storage import ObjectChange, Storage, place_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_MAX_PAGES: Final = 100
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_PAGES: Final[Mapping[str, dict[str, Any]]] = {
    "/readyz": {"ok": True},
    "/healthz": {"ok": True},
    "/livez": {"ok": True},
    "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0-fake"},
}
_ADMIN: Final = "fake-admin"
_NOBODY: Final = "fake-nobody"


class ApiCall(msgspec.Struct, frozen=True):
    """A client's request. ``verb``: as RBAC names it (get, list, watch, create, update, patch, delete)."""

    verb: str
    target: ResourcePath


Chosen = Callable[[ApiCall], bool]


class Faults:
    """What goes wrong with the next calls. Watches that are open are ended or frozen by the server's own methods."""

    def __init__(self) -> None:
        self._refusals: list[_Refusal] = []
        self._slow: list[tuple[Chosen, float]] = []
        self._frozen = asyncio.Event()
        self._frozen.set()

    def refuse(
        self, count: int, code: int, *, reason: str = "", retry_after_s: int | None = None, of: Chosen | None = None
    ) -> None:
        """Answer the next ``count`` of the chosen calls (all without ``of``) with an error and ``Retry-After``."""
        self._refusals.append(_Refusal(count, code, reason, retry_after_s, of or _any))

    def conflicts(self, count: int, of: Chosen | None = None) -> None:
        """Refuse the next ``count`` updates, as if another client had written first."""
        chosen = of or _any
        self.refuse(count, 409, reason="Conflict", of=lambda call: call.verb in ("update", "patch") and chosen(call))

    def slow(self, for_s: float, of: Chosen | None = None) -> None:
        """Answer the chosen calls so much later, until ``heal``."""
        self._slow.append((of or _any, for_s))

    def freeze(self) -> None:
        """Send nothing on watches, bookmarks neither, and keep them open, until ``heal``."""
        self._frozen.clear()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._refusals.clear()
        self._slow.clear()
        self._frozen.set()

    async def apply(self, call: ApiCall) -> None:
        """Wait, or raise what this call meets."""
        for chosen, for_s in self._slow:
            if chosen(call):
                await asyncio.sleep(for_s)
        for refusal in self._refusals:
            if refusal.left > 0 and refusal.of(call):
                refusal.left -= 1
                raise refusal.error(call)

    async def wait_until_thawed(self) -> None:
        """Wait while watches are frozen."""
        await self._frozen.wait()


class _Refusal:
    def __init__(self, left: int, code: int, reason: str, retry_after_s: int | None, of: Chosen) -> None:
        self.left = left
        self.of = of
        self._code = code
        self._reason = reason
        self._retry_after_s = retry_after_s

    def error(self, call: ApiCall) -> ApiError:
        if self._code == 409:
            return conflict(call.target.kind.resource.plural, call.target.name)
        details = {} if self._retry_after_s is None else {"retryAfterSeconds": self._retry_after_s}
        return ApiError(self._code, self._reason, "a fault that was asked for", details)


def _any(_: ApiCall) -> bool:
    return True


class Watches:
    """All open watches."""

    def __init__(self, storage: Storage, faults: Faults, bookmark_s: float) -> None:
        self._storage = storage
        self._faults = faults
        self._bookmark_s = bookmark_s
        self.open: set[asyncio.Queue[ObjectChange | ApiError | None]] = set()

    def __len__(self) -> int:
        return len(self.open)

    def drop(self) -> None:
        """Close all, as a server does that stops: the streams end without an error."""
        for queue in self.open:
            queue.put_nowait(None)

    def expire(self) -> None:
        """Send all an error event: their version has expired."""
        for queue in self.open:
            queue.put_nowait(version_expired(0, self._storage.floor))

    async def serve(self, request: web.Request, target: ResourcePath) -> web.StreamResponse:
        """Stream the changes until the watch's time is over, or it is dropped, or the client goes."""
        query = request.query
        chosen = _Chosen(target, selector(query.get("labelSelector", ""), query.get("fieldSelector", "")))
        queue: asyncio.Queue[ObjectChange | ApiError | None] = asyncio.Queue()
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
        queue: asyncio.Queue[ObjectChange | ApiError | None],
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
            if isinstance(change, ApiError):
                await self._send(answer, {"type": "ERROR", "object": change.status()})
                return
            await self._send(answer, chosen.event(change))

    async def _send(self, answer: web.StreamResponse, event: dict[str, Any] | None) -> None:
        if event is not None:
            await self._faults.wait_until_thawed()
            await answer.write(msgspec.json.encode(event) + b"\n")

    def _before(self, target: ResourcePath, since: str, *, begins: bool) -> tuple[list[ObjectChange], ApiError | None]:
        """What a watch from ``since`` begins with, or why it cannot."""
        if begins or since in ("", "0"):
            return self._current(target), None
        try:
            return self._storage.since(int(since)), None
        except ApiError as refused:
            return [], refused

    def _current(self, target: ResourcePath) -> list[ObjectChange]:
        """What is there now, as additions."""
        place = place_of(target.kind)
        found = self._storage.all(target.kind, target.namespace)
        return [ObjectChange(int(one["metadata"]["resourceVersion"]), place, None, one) for one in found]


class _Chosen:
    """Which changes a watch sends. An object that stops matching is deleted, for this watch; one that begins to,
    added.
    """

    def __init__(self, target: ResourcePath, matches: Matches) -> None:
        self._target = target
        self._place = place_of(target.kind)
        self._matches = matches

    def event(self, change: ObjectChange) -> dict[str, Any] | None:
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


class FakeServer:
    """A server's state and its answers. ``faults``: what goes wrong; ``watches``: those open now."""

    def __init__(self, *, bookmark_s: float = 30.0) -> None:
        self.kinds = Kinds()
        self.storage = Storage(lambda: datetime.now(UTC))
        self.faults = Faults()
        self.watches = Watches(self.storage, self.faults, bookmark_s)
        self.requests = 0
        self._objects = Objects(self.storage, self.kinds)
        # what is left of lists that are read page by page, by the token of the next page
        self._pages: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        for name in ("default", "kube-system"):
            self.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def create(self, thing: dict[str, Any]) -> dict[str, Any]:
        """Store an object of any known kind, from within the test."""
        group, _, version = thing["apiVersion"].rpartition("/")
        kind = next(
            one
            for one in self.kinds.all()
            if (one.resource.group, one.resource.version, one.resource.kind) == (group, version, thing["kind"])
        )
        return self._objects.create(ResourcePath(kind, thing["metadata"].get("namespace")), thing, WriteOptions())

    def expire(self) -> None:
        """Drop all changes and lists that are being read: earlier versions answer 410."""
        self.storage.compact()
        self._pages.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Any request."""
        self.requests += 1
        try:
            return await self._answer(request)
        except ApiError as refused:
            wait = refused.details.get("retryAfterSeconds")
            headers = {} if wait is None else {"retry-after": str(wait)}
            return _json(refused.status(), refused.code, headers)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        user = _user(request)
        found = _PAGES.get(request.path) or self.kinds.discovery(request.path)
        if found is not None:
            return _json(found)
        target = target_of(request.path, self.kinds)
        if target is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        query = request.query
        watches = query.get("watch") in ("true", "1")
        verb = _VERBS.get(request.method) or ("watch" if watches else "get" if target.name else "list")
        resource = target.kind.resource
        if user != _ADMIN:
            message = (
                f'{resource.plural} is forbidden: User "nobody" cannot {verb} resource "{resource.plural}" in API group'
                f' "{resource.group}"'
            )
            raise ApiError(403, "Forbidden", message, {"kind": resource.plural})
        await self.faults.apply(ApiCall(verb, target))
        if verb == "watch":
            return await self.watches.serve(request, target)
        if verb == "get":
            return _json(_part(target, self.storage.get(target.kind, target.namespace, target.name)))
        if verb == "list":
            return _json(self._list(target, query))
        return await self._write(verb, target, request)

    async def _write(self, verb: str, target: ResourcePath, request: web.Request) -> web.Response:
        body, query = await _body(request), request.query
        how = WriteOptions(
            manager=query.get("fieldManager", "unknown"),
            force=query.get("force") == "true",
            strict=query.get("fieldValidation") == "Strict",
            dry_run=query.get("dryRun") == "All",
        )
        if verb == "create":
            return _json(self._objects.create(target, body, how), 201)
        if verb == "update":
            return _json(self._objects.update(target, body, how))
        if verb == "patch":
            is_new = self.storage.find(target.kind, target.namespace, target.name) is None
            if target.subresource == "scale" and target.kind.scale is not None:
                body = scaling(body, target.kind.scale)
            made = self._objects.patch(target, body, request.content_type, how)
            return _json(_part(target, made), 201 if is_new else 200)
        if target.name:
            return _json(self._objects.delete(target, body or {}))
        chosen = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
        for one in self.storage.all(target.kind, target.namespace):
            if chosen(one):
                metadata = one["metadata"]
                self._objects.delete(ResourcePath(target.kind, metadata.get("namespace"), metadata["name"]), body or {})
        return _json({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 200})

    def _list(self, target: ResourcePath, query: Mapping[str, str]) -> dict[str, Any]:
        token, limit = query.get("continue", ""), int(query.get("limit", "0") or 0)
        if token:
            if token not in self._pages:
                raise version_expired(0, self.storage.floor)
            version, items = self._pages.pop(token)
        else:
            chosen = selector(query.get("labelSelector", ""), query.get("fieldSelector", ""))
            version = self.storage.version
            items = [one for one in self.storage.all(target.kind, target.namespace) if chosen(one)]
        metadata: dict[str, Any] = {"resourceVersion": str(version)}
        if limit and len(items) > limit:
            metadata.update({"continue": uuid.uuid4().hex, "remainingItemCount": len(items) - limit})
            self._pages[metadata["continue"]] = version, items[limit:]
            while len(self._pages) > _MAX_PAGES:
                self._pages.pop(next(iter(self._pages)))
            items = items[:limit]
        resource = target.kind.resource
        bare = [{name: value for name, value in one.items() if name not in ("apiVersion", "kind")} for one in items]
        # custom resources keep their kind in lists, built-in ones do not
        shown = items if target.kind.schema else bare
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": shown,
        }


class FakeApiServer(msgspec.Struct, frozen=True):
    """A running fake server and how to reach it."""

    server: FakeServer
    admin: ClusterAccess
    nobody: ClusterAccess


@contextlib.asynccontextmanager
async def running_fake_api_server(*, bookmark_s: float = 30.0) -> AsyncIterator[FakeApiServer]:
    """A server on a loopback port of its own, in this event loop."""
    server = FakeServer(bookmark_s=bookmark_s)
    app = web.Application(client_max_size=10_000_000)
    app.router.add_route("*", "/{path:.*}", server.handle)
    # a client that goes ends its watch, as with a real server
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    url = f"http://{host}:{port}"
    try:
        yield FakeApiServer(server, ClusterAccess(url, token=_ADMIN), ClusterAccess(url, token=_NOBODY))
    finally:
        server.watches.drop()
        await runner.cleanup()


def _part(target: ResourcePath, thing: dict[str, Any]) -> dict[str, Any]:
    if target.subresource == "scale" and target.kind.scale is not None:
        return scale_of(thing, target.kind.scale)
    return thing


def _user(request: web.Request) -> str:
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token not in (_ADMIN, _NOBODY):
        raise ApiError(401, "Unauthorized", "Unauthorized")
    return token


async def _body(request: web.Request) -> Any:  # noqa: ANN401 - JSON
    data = await request.read()
    if not data:
        return None
    try:
        if "yaml" in request.content_type:
            return await asyncio.to_thread(yaml.safe_load, data) if data[:1] != b"{" else msgspec.json.decode(data)
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise bad_request(f"the body cannot be read: {error}") from error


def _json(content: dict[str, Any], code: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(content), status=code, content_type="application/json", headers=headers
    )
