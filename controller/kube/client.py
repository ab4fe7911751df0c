# SPDX-License-Identifier: Apache-2.0
"""Calls to the Kubernetes API with plain dicts: read, list, watch, create, replace, patch, apply, delete.

The client retries nothing: a decision made from an old state must be made again. Errors carry the delay
(``ApiError.retry_after_s``) and whether the call may have had an effect (``Unreachable``).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import aiohttp
import msgspec

from controller.audit import VERBS, object_place_from_path
from controller.kube.api_resources import PODS, ApiResource, Object, split_key
from controller.kube.errors import (
    ClusterError,
    NotFound,
    ResourceVersionExpired,
    Unreachable,
    error_for,
    error_in_watch,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from controller.audit import AuditLog
    from controller.kube.cluster_access import ClusterAccess

    Observed = Callable[["ApiCall", float], None]

ADDED: Final = "ADDED"
MODIFIED: Final = "MODIFIED"
DELETED: Final = "DELETED"
BOOKMARK: Final = "BOOKMARK"
_PAGE: Final = 500
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
_JSON: Final = "application/json"
_MAX_ERROR_BYTES: Final = 100_000


class ApiCall(NamedTuple):
    """``verb``: as in Kubernetes' roles. ``resource``: such as ``pods`` or ``pods/log``, empty of other paths.
    ``code_class``: of the status, such as ``4xx``; ``none`` without an answer.
    """

    verb: str
    resource: str
    code_class: str


class WatchEvent(msgspec.Struct, frozen=True):
    """A change. A bookmark's object has nothing but the version up to which all changes have been sent."""

    type: str
    object: dict[str, Any]

    @property
    def resource_version(self) -> str:
        """The version that this change made."""
        return str(self.object["metadata"]["resourceVersion"])


async def decode_watch_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[WatchEvent]:
    """One event a line, lines of any length; raises the ApiError of an ERROR event.

    An unfinished last line, which a broken connection leaves, is dropped: the next watch gets that event again.
    """
    decoder = msgspec.json.Decoder(WatchEvent)
    rest: list[bytes] = []
    async for chunk in chunks:
        *lines, last = chunk.split(b"\n")
        for line in lines:
            whole = b"".join([*rest, line])
            rest.clear()
            if whole.strip():
                yield _checked(decoder.decode(whole))
        if last:
            rest.append(last)


def _checked(event: WatchEvent) -> WatchEvent:
    if event.type == "ERROR":
        raise error_in_watch(event.object)
    return event


class ObjectList(msgspec.Struct, frozen=True):
    """All objects of a kind at one version of the server's data."""

    items: list[Object]
    resource_version: str


class Client:
    """One API server. Calls may run side by side; the session is the owner's to close (see ``connect``)."""

    def __init__(
        self,
        access: ClusterAccess,
        http: aiohttp.ClientSession,
        *,
        manager: str,
        timeout_s: float = 30.0,
        audit: AuditLog | None = None,
        observed: Observed | None = None,
    ) -> None:
        self.access = access
        self.manager = manager
        self.audit = audit
        self._observed = observed
        self._http = http
        self._tls = access.tls()
        self._timeout_s = timeout_s

    def as_manager(self, manager: str) -> Client:
        """The same server and session under another field manager's name."""
        return Client(
            self.access,
            self._http,
            manager=manager,
            timeout_s=self._timeout_s,
            audit=self.audit,
            observed=self._observed,
        )

    async def get(
        self, resource: ApiResource, name: str, namespace: str | None = None, *, subresource: str | None = None
    ) -> Object:
        """One object, or a part of it such as its scale; raises NotFound."""
        return await self._json("GET", resource.path(namespace, name, subresource))

    async def get_or_none(self, resource: ApiResource, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None if there is none."""
        try:
            return await self.get(resource, name, namespace)
        except NotFound:
            return None

    async def list(
        self,
        resource: ApiResource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int = _PAGE,
    ) -> ObjectList:
        """All objects, of all namespaces without one, read page by page at one version of the data."""
        try:
            return await self._list(resource.path(namespace), _selecting(labels, fields), page)
        except ResourceVersionExpired:  # the first page's version expired before the last page was read
            return await self._list(resource.path(namespace), _selecting(labels, fields), 0)

    async def watch(
        self,
        resource: ApiResource,
        namespace: str | None = None,
        *,
        since: str,
        labels: str = "",
        fields: str = "",
        timeout_s: int = 290,
        silence_s: float = 90.0,
    ) -> AsyncGenerator[WatchEvent]:
        """Changes after version ``since``, until the server ends the watch after ``timeout_s``.

        Raises Expired if ``since`` is too old, and Unreachable if not even a bookmark, which servers send about every
        minute, comes for ``silence_s``: such a connection is most likely dead.
        """
        query = _selecting(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(timeout_s),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=silence_s)
        async with self._answer("GET", resource.path(namespace), query=query, timeout=timeout) as answer:
            async for event in decode_watch_events(answer.content.iter_any()):
                yield event

    async def create(self, resource: ApiResource, thing: Object, *, dry_run: bool = False) -> Object:
        """A new object; raises AlreadyExists. ``generateName`` works."""
        path = resource.path(thing["metadata"].get("namespace"))
        return await self._json("POST", path, body=thing, query=self._writing(dry_run=dry_run))

    async def post(
        self, resource: ApiResource, name: str, namespace: str | None, subresource: str, thing: Object
    ) -> Object:
        """POST to a subresource: ``pods/binding``, ``pods/eviction``, ``serviceaccounts/token``."""
        return await self._json("POST", resource.path(namespace, name, subresource), body=thing, query=self._writing())

    async def replace(self, resource: ApiResource, thing: Object, *, subresource: str | None = None) -> Object:
        """Write the whole object. With ``metadata.resourceVersion``: only if it is unchanged since, else Conflict."""
        return await self._json("PUT", _path(resource, thing, subresource), body=thing, query=self._writing())

    async def merge_patch(
        self,
        resource: ApiResource,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any],
        *,
        subresource: str | None = None,
    ) -> Object:
        """Change the fields in ``patch`` (RFC 7396: None removes a field, lists are replaced whole)."""
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, body=patch, content_type=_MERGE, query=self._writing())

    async def apply(
        self,
        resource: ApiResource,
        thing: Object,
        *,
        subresource: str | None = None,
        manager: str | None = None,
        force: bool = False,
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply: own the fields of ``thing``, create the object if there is none, leave others' fields.

        Fields that this manager applied before and that ``thing`` lacks are removed. Raises Conflict if another manager
        owns a field with another value, unless ``force``.
        """
        query = self._writing(dry_run=dry_run) | {"force": "true" if force else "false"}
        query["fieldManager"] = manager or self.manager
        path = _path(resource, thing, subresource)
        return await self._json("PATCH", path, body=thing, content_type=_APPLY, query=query)

    async def delete(
        self,
        resource: ApiResource,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
        propagation: str | None = None,
    ) -> bool:
        """Request the deletion; False if there is no such object.

        ``uid``: only if the object still is this one, else Conflict. ``grace_s=0`` removes a pod at once.
        ``propagation``: Background, Foreground or Orphan, of what the object owns.
        """
        options: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if propagation is not None:
            options["propagationPolicy"] = propagation
        try:
            await self._json("DELETE", resource.path(namespace, name), body=options)
        except NotFound:
            return False
        return True

    async def log_tail(self, pod: str, container: str, *, previous: bool, lines: int, most_bytes: int) -> str:
        """The last lines of a container's log, of its last run or of the one before. ``pod``: ``namespace/name``."""
        namespace, name = split_key(pod)
        query = {"container": container, "tailLines": str(lines), "limitBytes": str(most_bytes)}
        query |= {"previous": "true"} if previous else {}
        async with self._answer("GET", PODS.path(namespace, name, "log"), query=query) as answer:
            return (await answer.content.read(most_bytes)).decode(errors="replace")

    async def serves(self, resource: ApiResource) -> bool:
        """Whether the server serves the kind, such as that of a CRD which may not be installed."""
        try:
            served = await self.served_resources(resource.api_version)
        except NotFound:
            return False
        return any(one.get("name") == resource.plural for one in served)

    async def served_resources(self, api_version: str) -> tuple[Object, ...]:
        """The kinds and subresources of a version of a group, as discovery lists them; raises NotFound."""
        group, _, version = api_version.rpartition("/")
        found = await self._json("GET", ApiResource(group, version, "", "").group_path)
        return tuple(found.get("resources") or ())

    async def is_ready(self, path: str = "/readyz") -> bool:
        """Whether the server's own health check is content."""
        try:
            async with self._answer("GET", path):
                return True
        except ClusterError:
            return False

    async def _list(self, path: str, query: Mapping[str, str], page: int) -> ObjectList:
        items: list[Object] = []
        token = ""
        while True:
            paged = {**query, **({"limit": str(page)} if page else {}), **({"continue": token} if token else {})}
            answer = await self._json("GET", path, query=paged)
            kind = str(answer.get("kind", "")).removesuffix("List")
            for item in answer.get("items") or ():
                # the items of a list lack what all of them have in common
                item.setdefault("apiVersion", answer.get("apiVersion"))
                item.setdefault("kind", kind)
                items.append(item)
            metadata = answer.get("metadata") or {}
            token = metadata.get("continue", "")
            if not token:
                return ObjectList(items, metadata.get("resourceVersion", ""))

    def _writing(self, *, dry_run: bool = False) -> dict[str, str]:
        """Unknown fields are a mistake of ours, never dropped in silence."""
        query = {"fieldManager": self.manager, "fieldValidation": "Strict"}
        return query | {"dryRun": "All"} if dry_run else query

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
    ) -> Object:
        found: Object | None = None
        outcome = "unknown"
        try:
            async with self._answer(method, path, query=query, body=body, content_type=content_type) as answer:
                found, outcome = cast("Object", msgspec.json.decode(await answer.read())), "ok"
            return found
        except ClusterError as error:
            outcome = str(error)
            raise
        finally:
            # also of a call that was cancelled: it may have had an effect
            if self.audit is not None and method != "GET" and "dryRun" not in (query or ()):
                actor = (query or {}).get("fieldManager", self.manager)
                self.audit.record_write(actor, method, path, body=body, answer=found, outcome=outcome)

    @contextlib.asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        timeout: aiohttp.ClientTimeout | None = None,  # noqa: ASYNC109 - aiohttp's own
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = self.access.headers() | {"accept": _JSON, "content-type": content_type}
        url = self.access.server + path
        began_s, status, is_watch = asyncio.get_running_loop().time(), 0, "watch" in (query or ())
        try:
            async with self._http.request(
                method,
                url,
                params=query,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                ssl=self._tls or True,
                server_hostname=self.access.tls_server_name or None,
                timeout=timeout or aiohttp.ClientTimeout(total=self._timeout_s),
                allow_redirects=False,
            ) as answer:
                status = answer.status
                if is_watch:
                    # it goes on for minutes
                    self._observe(method, path, query, status, asyncio.get_running_loop().time() - began_s)
                if answer.status >= 300:
                    said = await answer.content.read(_MAX_ERROR_BYTES)
                    raise error_for(answer.status, said, answer.headers.get("retry-after"))
                yield answer
        except (TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
            raise Unreachable(f"{method} {url}: {error!r}") from error
        finally:
            if not (is_watch and status):
                self._observe(method, path, query, status, asyncio.get_running_loop().time() - began_s)

    def _observe(self, method: str, path: str, query: Mapping[str, str] | None, status: int, seconds: float) -> None:
        if self._observed is not None:
            self._observed(classify_api_call(method, path, query, status), seconds)


def classify_api_call(method: str, path: str, query: Mapping[str, str] | None, status: int) -> ApiCall:
    """Names of a call. Paths that name no objects, such as those of discovery and health, have no resource."""
    try:
        place = object_place_from_path(path)
        resource, name = f"{place.resource}/{place.subresource}".rstrip("/"), place.name
    except LookupError:
        resource, name = "", path
    reads = "watch" if "watch" in (query or ()) else "get" if name else "list"
    return ApiCall(VERBS.get(method, reads), resource, f"{status // 100}xx" if status else "none")


@contextlib.asynccontextmanager
async def connect(
    access: ClusterAccess,
    *,
    manager: str,
    timeout_s: float = 30.0,
    audit: AuditLog | None = None,
    observed: Observed | None = None,
) -> AsyncIterator[Client]:
    """A client with a session of its own. ``manager``: the name under which fields are owned. ``audit``: records what
    is written. ``observed``: called with each call that has ended, and the seconds that it took; a watch has when it
    has begun.
    """
    # watches hold a connection each: no limit; no cookies, no proxies of the environment
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as http:
        yield Client(access, http, manager=manager, timeout_s=timeout_s, audit=audit, observed=observed)


def _path(resource: ApiResource, thing: Object, subresource: str | None) -> str:
    metadata = thing["metadata"]
    return resource.path(metadata.get("namespace"), metadata["name"], subresource)


def _selecting(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}
