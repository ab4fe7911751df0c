# SPDX-License-Identifier: Apache-2.0
"""oci://: artefacts and images of a container registry, fetched without a container runtime."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.downloader.core.errors import ChecksumMismatch, ContentRefused, NotThere, Unavailable
from controller.agents.downloader.core.listing import Checksum, Listing, RemoteFile
from controller.agents.downloader.sources.registry_access import RegistryAccess

if TYPE_CHECKING:
    from controller.agents.downloader.core.listing import Archive
    from controller.agents.downloader.core.uri import OciPlace
    from controller.agents.downloader.credentials import Environment
    from controller.agents.downloader.transfer import Document, Request, Transfer

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

    Layers with a title are files, or archives if their type says so; those of an image are unpacked one over the other,
    and what is below ``/models`` is kept.
    """

    def __init__(self, place: OciPlace, transfer: Transfer, environment: Environment, machine: str) -> None:
        self._place = place
        self._access = RegistryAccess(place, transfer, environment)
        self._architecture = _ARCHITECTURES.get(machine, machine)

    async def resolve(self, revision: str) -> Listing:
        """The digest that ``revision``, a tag or digest, stands for now."""
        digest, manifest = await self._manifest(revision or self._place.reference)
        if manifest.manifests is not None:
            digest, manifest = await self._manifest(self._own(manifest.manifests).digest)
        layers = manifest.layers or []
        is_image = manifest.config is not None and manifest.config.media_type in _IMAGE
        return Listing(digest, tuple(_file(one, index, is_image=is_image) for index, one in enumerate(layers)))

    async def request(self, file: RemoteFile, start: int, end: int | None) -> Request:
        """The blob; registries mostly redirect to where they keep them."""
        return await self._access.request(f"blobs/{file.locator}")

    async def _manifest(self, reference: str) -> tuple[str, _Manifest]:
        answer = await self._access.document(f"manifests/{reference}", accept=", ".join(_MANIFEST + _INDEX))
        digest = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        asked = reference if reference.startswith("sha256:") else answer.headers.get("docker-content-digest", digest)
        if asked != digest:
            raise ChecksumMismatch(f"{self._place.canonical()} gives a manifest of {digest} for {asked}")
        return digest, _decoded(answer, self._place.canonical())

    def _own(self, choices: list[_Descriptor]) -> _Descriptor:
        """The manifest for this machine; the only one, or the first, if none says which machine it is for."""
        for one in choices:
            if one.platform is not None and (one.platform.os, one.platform.architecture) == (
                "linux",
                self._architecture,
            ):
                return one
        if not choices or (choices[0].platform is not None and len(choices) > 1):
            raise NotThere(f"{self._place.canonical()} has no image for linux/{self._architecture}")
        return choices[0]


def _decoded(answer: Document, where: str) -> _Manifest:
    try:
        return msgspec.json.decode(answer.body, type=_Manifest)
    except msgspec.DecodeError as error:
        raise Unavailable(f"{where} answers with no manifest", is_temporary=False) from error


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
