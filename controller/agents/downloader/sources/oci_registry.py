# SPDX-License-Identifier: Apache-2.0
"""oci://: artefacts and images of a container registry, fetched without a container runtime.

The registry requires tokens, which it issues for the credentials of a Docker configuration.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from controller.agents.downloader.core.errors import (
    AccessRefused,
    ChecksumMismatch,
    ContentRefused,
    SourceNotFound,
    SourceUnavailable,
    UriInvalid,
)
from controller.agents.downloader.core.fetch_plan import Checksum, FileListing, RemoteFile
from controller.agents.downloader.transfer import HttpRequest

if TYPE_CHECKING:
    from controller.agents.downloader.core.fetch_plan import Archive
    from controller.agents.downloader.core.uri import OciLocation
    from controller.agents.downloader.environment import EnvironmentReader
    from controller.agents.downloader.transfer import SmallResponse, TransferClient

_INDEX: Final = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFEST: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
# Configurations of images that containers run from; those of artefacts have other types.
_IMAGE: Final = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
# Where an image of a model ("modelcar") has it.
_FOLDER: Final = "models"
# A file's path in its layer's annotations: ORAS, and the CNCF's ModelPack.
_TITLES: Final = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_TARS: Final[tuple[tuple[str, Archive], ...]] = (
    ("tar+gzip", "tar.gz"),
    ("tar.gzip", "tar.gz"),
    ("tar+zstd", "tar.zst"),
    ("tar", "tar"),
)
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_PARAMETER: Final = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_LEAST_TOKEN_S: Final = 60.0
_DOCKER_HUB: Final = ("docker.io", "index.docker.io")
_LOCAL: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: _Platform | None = None


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None
    manifests: list[_Descriptor] | None = None


class RegistrySource:
    """Everything is named by its SHA-256: the manifest is compared with its digest, layers with theirs.

    Layers with a title are files, or archives, by their media type; those of an image are unpacked one over the other,
    and what is below ``/models`` is kept.
    """

    def __init__(
        self, place: OciLocation, transfer: TransferClient, environment: EnvironmentReader, machine: str
    ) -> None:
        self._place = place
        self._access = RegistryClient(place, transfer, environment)
        self._architecture = _ARCHITECTURES.get(machine, machine)

    async def list_files(self, revision: str) -> FileListing:
        """The digest that ``revision``, a tag or digest, stands for now."""
        digest, manifest = await self._manifest(revision or self._place.reference)
        if manifest.manifests is not None:
            digest, manifest = await self._manifest(self._own(manifest.manifests).digest)
        layers = manifest.layers or []
        is_image = manifest.config is not None and manifest.config.media_type in _IMAGE
        return FileListing(digest, tuple(_file(one, index, is_image=is_image) for index, one in enumerate(layers)))

    async def build_request(self, file: RemoteFile, start: int, end: int | None) -> HttpRequest:
        """The blob; registries mostly redirect to where they keep them."""
        return await self._access.authorized_request(f"blobs/{file.locator}")

    async def _manifest(self, reference: str) -> tuple[str, _Manifest]:
        answer = await self._access.fetch_document(f"manifests/{reference}", accept=", ".join(_MANIFEST + _INDEX))
        digest = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        asked = reference if reference.startswith("sha256:") else answer.headers.get("docker-content-digest", digest)
        if asked != digest:
            raise ChecksumMismatch(f"{self._place.canonical()} gives a manifest of {digest} for {asked}")
        return digest, _decoded(answer, self._place.canonical())

    def _own(self, choices: list[_Descriptor]) -> _Descriptor:
        """The manifest for this machine; the only one, or the first, if none names a machine."""
        for one in choices:
            if one.platform is not None and (one.platform.os, one.platform.architecture) == (
                "linux",
                self._architecture,
            ):
                return one
        if not choices or (choices[0].platform is not None and len(choices) > 1):
            raise SourceNotFound(f"{self._place.canonical()} has no image for linux/{self._architecture}")
        return choices[0]


def _decoded(answer: SmallResponse, where: str) -> _Manifest:
    try:
        return msgspec.json.decode(answer.body, type=_Manifest)
    except msgspec.DecodeError as error:
        raise SourceUnavailable(f"{where} answers with no manifest", is_temporary=False) from error


def _file(layer: _Descriptor, index: int, *, is_image: bool) -> RemoteFile:
    algorithm, _, digest = layer.digest.partition(":")
    if algorithm != "sha256" or len(digest) != 64 or not all(one in "0123456789abcdef" for one in digest):
        raise ContentRefused(f"the digest {layer.digest[:80]!r} of a layer is no SHA-256")
    archive: Archive = next((kind for ending, kind in _TARS if layer.media_type.endswith(ending)), "")
    annotations = layer.annotations or {}
    title = next((annotations[name] for name in _TITLES if annotations.get(name)), "")
    if is_image:
        archive = archive or "tar.gz"
    # in the order of layers, whatever their names: archives are unpacked one over the other
    path = f"layer-{index:05}" if archive else title or digest
    only = _FOLDER if is_image else ""
    return RemoteFile(path, layer.size, layer.digest, Checksum("sha256", digest), archive=archive, only=only)


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float = 60.0


class RegistryClient:
    """Calls to one repository. ``ATTACHE_PLAIN_REGISTRIES`` lists registries without TLS; loopback ones are."""

    def __init__(self, place: OciLocation, transfer: TransferClient, environment: EnvironmentReader) -> None:
        self._place = place
        self._transfer = transfer
        plain = environment.get("ATTACHE_PLAIN_REGISTRIES").split(",")
        scheme = "http" if place.registry in plain or _LOCAL.fullmatch(place.registry) else "https"
        host = "registry-1.docker.io" if place.registry in _DOCKER_HUB else place.registry
        self._base = f"{scheme}://{host}/v2/{place.repository}/"
        self._basic = _credentials(place.registry, environment)
        self._authorization = ""
        self._expires_at_s = 0.0

    async def authorized_request(self, path: str, accept: str = "") -> HttpRequest:
        """A request with a token that still holds."""
        if self._authorization and _now_s() >= self._expires_at_s:
            await self._authorize(HttpRequest(self._base + path))
        headers = {"Authorization": self._authorization} if self._authorization else {}
        return HttpRequest(self._base + path, headers | ({"Accept": accept} if accept else {}))

    async def fetch_document(self, path: str, accept: str) -> SmallResponse:
        """A small answer; requests a token if the registry requires one."""
        answer = await self._transfer.fetch_small(await self.authorized_request(path, accept), allow=(401,))
        if answer.status != 401:
            return answer
        await self._authorize(HttpRequest(self._base + path), answer.headers.get("www-authenticate", ""))
        return await self._transfer.fetch_small(await self.authorized_request(path, accept))

    async def _authorize(self, asked: HttpRequest, challenge: str = "") -> None:
        if not challenge:
            answer = await self._transfer.fetch_small(asked, allow=(401, 404), method="HEAD")
            challenge = answer.headers.get("www-authenticate", "")
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic" and self._basic:
            self._authorization, self._expires_at_s = f"Basic {self._basic}", float("inf")
            return
        bearer = dict(_PARAMETER.findall(rest))
        if kind.lower() != "bearer" or not bearer.get("realm", "").startswith(("http://", "https://")):
            raise AccessRefused(
                f"{self._place.registry} wants credentials; mount a Docker configuration (DOCKER_CONFIG)"
            )
        await self._fetch_token(bearer)

    async def _fetch_token(self, bearer: dict[str, str]) -> None:
        realm = bearer["realm"]
        if self._base.startswith("https:") and urlsplit(realm).scheme != "https":
            raise AccessRefused(f"{self._place.registry} sends credentials to {realm} without TLS")
        scope = bearer.get("scope") or f"repository:{self._place.repository}:pull"
        query = urlencode({"scope": scope} | ({"service": bearer["service"]} if bearer.get("service") else {}))
        headers = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
        answer = await self._transfer.fetch_small(HttpRequest(f"{realm}{'&' if '?' in realm else '?'}{query}", headers))
        try:
            given = msgspec.json.decode(answer.body, type=_Token)
        except msgspec.DecodeError as error:
            raise SourceUnavailable(f"{urlsplit(realm).netloc} answers with no token", is_temporary=False) from error
        token = given.token or given.access_token
        if not token:
            raise AccessRefused(f"{urlsplit(realm).netloc} gives no token for {self._place.repository}")
        self._authorization = f"Bearer {token}"
        # renewed when half of its time is over
        self._expires_at_s = _now_s() + max(given.expires_in, _LEAST_TOKEN_S) / 2


def _credentials(registry: str, environment: EnvironmentReader) -> str:
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
