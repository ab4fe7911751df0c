# SPDX-License-Identifier: Apache-2.0
"""Where an engine finds its weights: downloaded into a cache, or mounted where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.model import ModelFormat
from controller.models.runtimes.settings import MODEL_PATH

if TYPE_CHECKING:
    from controller.api.model import WeightsCache

CACHE_PATH: Final = "/var/cache/attache"
WEIGHTS: Final = "weights"
MODELS: Final = "models"
_DEFAULT_FORMAT: Final = "huggingface"
# By the suffix of a single file.
_FORMATS: Final = {".gguf": "gguf", ".onnx": "onnx"}
_MOUNTED: Final = ("pvc", "file")


class Weights(msgspec.Struct, frozen=True):
    """``path``: of the weights, for the engine. ``volumes``: of the pod. ``mounts``: of the engine. ``is_downloaded``:
    an init container has to fetch them.
    """

    path: str
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    is_downloaded: bool


def format_of(uri: str, written: ModelFormat | None) -> ModelFormat:
    """What is written, or else what the suffix tells."""
    return written or ModelFormat(name=_FORMATS.get(_name(uri).suffix, _DEFAULT_FORMAT))


def weights_of(uri: str, cache: WeightsCache) -> Weights:
    """``pvc://CLAIM/PATH`` and ``file:///PATH`` are mounted where they are, all else is downloaded."""
    scheme, _, place = uri.partition("://")
    if scheme not in _MOUNTED:
        # the link into the cache is the pod's own, the cache may be shared
        volumes = ({"name": MODELS, "emptyDir": {}}, cache_volume(cache))
        mounts = (
            {"name": MODELS, "mountPath": str(PurePosixPath(MODEL_PATH).parent), "readOnly": True},
            {"name": WEIGHTS, "mountPath": CACHE_PATH, "readOnly": True},
        )
        return Weights(_file_in(MODEL_PATH, uri), volumes, mounts, is_downloaded=True)
    mount: dict[str, Any] = {"name": MODELS, "mountPath": MODEL_PATH, "readOnly": True}
    if scheme == "file":
        volume: dict[str, Any] = {"name": MODELS, "hostPath": {"path": _directory(place)}}
    else:
        claim, _, path = place.partition("/")
        volume = {"name": MODELS, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        if inner := _directory(path.strip("/")):
            mount["subPath"] = inner
    return Weights(_file_in(MODEL_PATH, uri), (volume,), (mount,), is_downloaded=False)


def cache_volume(cache: WeightsCache) -> Mapping[str, Any]:
    """The volume that downloads go to."""
    if cache.claim:
        return {"name": WEIGHTS, "persistentVolumeClaim": {"claimName": cache.claim}}
    if cache.host_path:
        return {"name": WEIGHTS, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"name": WEIGHTS, "emptyDir": {}}


def _name(uri: str) -> PurePosixPath:
    """Without the query, which may hold a signature."""
    return PurePosixPath(uri.partition("?")[0])


def _is_file(uri: str) -> bool:
    return _name(uri).suffix in _FORMATS


def _directory(path: str) -> str:
    """A single file is mounted with its directory."""
    parent = str(PurePosixPath(path).parent) if _is_file(path) else path
    return "" if parent == "." else parent


def _file_in(directory: str, uri: str) -> str:
    return f"{directory}/{_name(uri).name}" if _is_file(uri) else directory
