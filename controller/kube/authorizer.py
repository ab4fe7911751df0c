# SPDX-License-Identifier: Apache-2.0
"""Authentication and authorisation of our callers: TokenReviews and SubjectAccessReviews, cached for seconds."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec
from aiohttp import web

from controller.kube.api_resources import ApiResource
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from aiohttp.typedefs import Handler, Middleware

    from controller.kube.client import Client

log = logging.getLogger(__name__)

TOKEN_REVIEWS: Final = ApiResource("authentication.k8s.io", "v1", "tokenreviews", "TokenReview", namespaced=False)
ACCESS_REVIEWS: Final = ApiResource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False
)
# As long as kube-apiserver's own webhook authorizer keeps a refusal.
_KEPT_S: Final = 10.0
_MOST: Final = 2_000
_LONGEST_TOKEN: Final = 16_384
# May do everything, in every cluster.
_MASTERS: Final = "system:masters"
Found = TypeVar("Found")
# Probes have no token.
_OPEN: Final = ("/healthz", "/readyz")


class User(msgspec.Struct, frozen=True):
    """An authenticated user. ``extra``: further attributes from the authenticator, which authorizers may use."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class NonResourceAccess(msgspec.Struct, frozen=True):
    """A path outside of the API: ``verb`` in small letters."""

    verb: str
    path: str

    def attributes(self) -> dict[str, Any]:
        """Of a SubjectAccessReview."""
        return {"nonResourceAttributes": {"verb": self.verb, "path": self.path}}


class ResourceAccess(msgspec.Struct, frozen=True):
    """Something to do with a resource of a namespace."""

    verb: str
    group: str
    resource: str
    namespace: str

    def attributes(self) -> dict[str, Any]:
        """Of a SubjectAccessReview."""
        return {"resourceAttributes": msgspec.to_builtins(self)}


class RequestAuthorizer:
    """``clock``: in seconds. It raises ClusterError alone, and then no request is admitted."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._users = _AnswerCache[User | None](clock)
        self._allowed = _AnswerCache[bool](clock)

    async def user_of(self, authorization: str) -> User | None:
        """Of the header ``authorization``; None if it has no bearer token that the cluster accepts."""
        kind, _, token = authorization.partition(" ")
        token = token.strip()
        if kind.lower() != "bearer" or not token or len(token) > _LONGEST_TOKEN:
            return None
        key = hashlib.sha256(token.encode(errors="replace")).digest()
        if key not in self._users:
            self._users.put(key, await self._reviewed(token))
        return self._users.get(key)

    async def is_allowed(self, user: User, what: NonResourceAccess | ResourceAccess) -> bool:
        """Whether this is allowed."""
        if _MASTERS in user.groups:
            return True
        key = user, what
        if key not in self._allowed:
            identity = {"user": user.name, "groups": list(user.groups), "uid": user.uid}
            spec = {**identity, "extra": {name: list(values) for name, values in user.extra}, **what.attributes()}
            status = await self._review(ACCESS_REVIEWS, spec)
            self._allowed.put(key, status.get("allowed") is True and status.get("denied") is not True)
        return self._allowed.get(key)

    async def _reviewed(self, token: str) -> User | None:
        status = await self._review(TOKEN_REVIEWS, {"token": token})
        user = status.get("user") or {}
        if status.get("authenticated") is not True or not user.get("username"):
            return None
        extra = tuple((name, tuple(values)) for name, values in sorted((user.get("extra") or {}).items()))
        return User(user["username"], tuple(user.get("groups") or ()), user.get("uid", ""), extra)

    async def _review(self, resource: ApiResource, spec: dict[str, Any]) -> dict[str, Any]:
        review = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {}, "spec": spec}
        status: dict[str, Any] = (await self._client.create(resource, review)).get("status") or {}
        return status


class _AnswerCache(Generic[Found]):
    """The last answers, some thousand of them at most."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: OrderedDict[Hashable, tuple[float, Found]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._found and self._clock() - self._found[key][0] < _KEPT_S

    def get(self, key: Hashable) -> Found:
        return self._found[key][1]

    def put(self, key: Hashable, found: Found) -> None:
        self._found[key] = self._clock(), found
        self._found.move_to_end(key)
        while len(self._found) > _MOST:
            self._found.popitem(last=False)


def authorization_middleware(callers: RequestAuthorizer) -> Middleware:
    """For all paths but those of probes."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        try:
            user = await callers.user_of(request.headers.get("authorization", ""))
            if user is None:
                return web.Response(status=401, text="a token is needed\n", headers={"www-authenticate": "Bearer"})
            if not await callers.is_allowed(user, NonResourceAccess(request.method.lower(), request.path)):
                return web.Response(status=403, text=f"{user.name} may not {request.method} {request.path}\n")
        except ClusterError as error:
            log.warning("nobody can be let in to %s: %s", request.path, error)
            return web.Response(status=503, text="the API server cannot be asked who may see this\n")
        return await handler(request)

    return guard
