# SPDX-License-Identifier: Apache-2.0
"""Who we are to a container registry: tokens that it asks for, credentials of a Docker configuration."""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from controller.agents.downloader.core.errors import AccessRefused, Unavailable, UriInvalid
from controller.agents.downloader.transfer import Request

if TYPE_CHECKING:
    from controller.agents.downloader.core.uri import OciPlace
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.transfer import Document, Transfer

_PARAMETER: Final = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_LEAST_TOKEN_S: Final = 60.0
_DOCKER_HUB: Final = ("docker.io", "index.docker.io")
_LOCAL: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float = 60.0


class RegistryAccess:
    """Calls to one repository. ``ATTACHE_PLAIN_REGISTRIES`` lists registries without TLS; loopback ones are."""

    def __init__(self, place: OciPlace, transfer: Transfer, environment: Environment) -> None:
        self._place = place
        self._transfer = transfer
        plain = environment.get("ATTACHE_PLAIN_REGISTRIES").split(",")
        scheme = "http" if place.registry in plain or _LOCAL.fullmatch(place.registry) else "https"
        host = "registry-1.docker.io" if place.registry in _DOCKER_HUB else place.registry
        self._base = f"{scheme}://{host}/v2/{place.repository}/"
        self._basic = _credentials(place.registry, environment)
        self._authorization = ""
        self._expires_at_s = 0.0

    async def request(self, path: str, accept: str = "") -> Request:
        """A request with a token that still holds."""
        if self._authorization and _now_s() >= self._expires_at_s:
            await self._authorize(Request(self._base + path))
        headers = {"Authorization": self._authorization} if self._authorization else {}
        return Request(self._base + path, headers | ({"Accept": accept} if accept else {}))

    async def document(self, path: str, accept: str) -> Document:
        """A small answer; asks for a token if the registry wants one."""
        answer = await self._transfer.document(await self.request(path, accept), allow=(401,))
        if answer.status != 401:
            return answer
        await self._authorize(Request(self._base + path), answer.headers.get("www-authenticate", ""))
        return await self._transfer.document(await self.request(path, accept))

    async def _authorize(self, asked: Request, challenge: str = "") -> None:
        if not challenge:
            answer = await self._transfer.document(asked, allow=(401, 404), method="HEAD")
            challenge = answer.headers.get("www-authenticate", "")
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self._basic:
            self._authorization, self._expires_at_s = f"Basic {self._basic}", float("inf")
            return
        said = dict(_PARAMETER.findall(rest))
        if kind.lower() != "bearer" or not said.get("realm", "").startswith(("http://", "https://")):
            raise AccessRefused(
                f"{self._place.registry} wants credentials; mount a Docker configuration (DOCKER_CONFIG)"
            )
        await self._fetch_token(said)

    async def _fetch_token(self, said: dict[str, str]) -> None:
        realm = said["realm"]
        if self._base.startswith("https:") and urlsplit(realm).scheme != "https":
            raise AccessRefused(f"{self._place.registry} sends credentials to {realm} without TLS")
        scope = said.get("scope") or f"repository:{self._place.repository}:pull"
        query = urlencode({"scope": scope} | ({"service": said["service"]} if said.get("service") else {}))
        headers = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
        answer = await self._transfer.document(Request(f"{realm}{'&' if '?' in realm else '?'}{query}", headers))
        try:
            given = msgspec.json.decode(answer.body, type=_Token)
        except msgspec.DecodeError as error:
            raise Unavailable(f"{urlsplit(realm).netloc} answers with no token", is_temporary=False) from error
        token = given.token or given.access_token
        if not token:
            raise AccessRefused(f"{urlsplit(realm).netloc} gives no token for {self._place.repository}")
        self._authorization = f"Bearer {token}"
        # renewed when half of its time is over
        self._expires_at_s = _now_s() + max(given.expires_in, _LEAST_TOKEN_S) / 2


def _credentials(registry: str, environment: Environment) -> str:
    """``user:password`` in base64 for a registry, from ``REGISTRY_AUTH_FILE`` or ``DOCKER_CONFIG``; empty: none."""
    given = environment.get("REGISTRY_AUTH_FILE")
    folder = environment.get("DOCKER_CONFIG")
    path = Path(given) if given else Path(folder) / "config.json" if folder else None
    if path is not None and not path.exists() and not given:
        path = path.with_name(".dockerconfigjson")  # as a Secret of this type is mounted
    if path is None:
        return ""
    try:
        listed: dict[str, Any] = json.loads(path.read_text()).get("auths") or {}
    except (OSError, ValueError, AttributeError) as error:
        raise UriInvalid(f"{path} is no Docker configuration") from error
    names = [registry, f"https://{registry}", f"https://{registry}/v1/", f"https://{registry}/v2/"]
    if registry in _DOCKER_HUB:
        names += ["https://index.docker.io/v1/", *_DOCKER_HUB]
    entry: dict[str, Any] = next((listed[name] for name in names if isinstance(listed.get(name), dict)), {})
    auth = str(entry.get("auth") or "")
    if not auth and entry.get("username"):
        auth = base64.b64encode(f"{entry['username']}:{entry.get('password', '')}".encode()).decode()
    try:
        base64.b64decode(auth, validate=True)
    except binascii.Error as error:
        raise UriInvalid(f"{path} has no base64 for {registry}") from error
    return auth


def _now_s() -> float:
    return time.monotonic()  # noqa: TID251 - the edge: how long a token holds
