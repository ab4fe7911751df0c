# SPDX-License-Identifier: Apache-2.0
"""Files to one Snapshot, or to every mistake; only what changed is decoded again."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from extproc.api.access_policy import ModelAccessPolicy
from extproc.api.admission import InferenceObjective
from extproc.api.backend import Backend
from extproc.api.decode import Object, decode
from extproc.api.documents import Document, split
from extproc.api.errors import ConfigInvalid, Mistake
from extproc.api.gateway_config import GatewayConfig, GatewayConfigSpec
from extproc.api.http_route import HTTPRoute
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer
from extproc.api.picker_config import PickerFile, check_shape_alone
from extproc.api.references import Found, check_model_names, check_names, check_policies, check_references
from extproc.api.report import content_digest
from extproc.api.snapshot import Snapshot
from extproc.api.unread import Unread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.picker_config import PickerCheck

log = logging.getLogger(__name__)

T = TypeVar("T", ModelRoute, ModelServer, GatewayConfig, HTTPRoute, Backend, ModelAccessPolicy, InferenceObjective)


class _Reading(msgspec.Struct, frozen=True):
    """A document with what it decoded to."""

    document: Document
    object: Object | None
    mistakes: list[Mistake]


class _File(msgspec.Struct, frozen=True):
    """A file with what it was read as."""

    content: bytes
    digest: str
    readings: Sequence[_Reading]


class Loader:
    """Files to snapshots. A document whose text has not changed since the last call gives the same object again.

    It may move within its file, or to another: the text alone counts.
    """

    def __init__(self, check_picker: PickerCheck = check_shape_alone) -> None:
        """``check_picker``: its mistakes are told beside all others."""
        self._check_picker = check_picker
        self._files: dict[str, _File] = {}
        # good documents of the last call
        self._objects: dict[tuple[str, bool], Object] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the files of the last call hold none of our documents."""
        return not any(one.object is not None for file in self._files.values() for one in file.readings)

    def load(self, files: Mapping[str, bytes]) -> Snapshot:
        """The snapshot of ``files`` (name to content); raises ConfigInvalid with all mistakes."""
        self._files = {name: self._read_file(name, content) for name, content in files.items()}
        readings = [reading for file in self._files.values() for reading in file.readings]
        self._objects = {
            (one.document.text, one.document.is_json): one.object
            for one in readings
            if one.object is not None and not one.mistakes
        }
        return _assemble(readings, {name: file.digest for name, file in self._files.items()}, self._check_picker)

    def _read_file(self, name: str, content: bytes) -> _File:
        known = self._files.get(name)
        if known is not None and known.content == content:
            return known
        return _File(content, content_digest(content), self._readings(name, content))

    def _readings(self, name: str, content: bytes) -> Sequence[_Reading]:
        try:
            return [self._read(document) for document in _documents(name, content)]
        except ConfigInvalid as error:
            return [_Reading(Document(name, ""), None, error.mistakes)]
        except Exception as error:  # noqa: BLE001 - whatever a file does to its reader, it must not end the process
            return [_Reading(Document(name, ""), None, [unforeseen(name, error)])]

    def _read(self, document: Document) -> _Reading:
        known = self._objects.get((document.text, document.is_json))
        if isinstance(known, PickerFile) and known.document != document:
            known = msgspec.structs.replace(known, document=document)
        return _Reading(document, *decode(document)) if known is None else _Reading(document, known, [])


def unforeseen(name: str, error: Exception) -> Mistake:
    """The mistake for an exception that nobody expected, whose traceback is logged.

    The exception's text is left out of both: it may repeat a secret of the file.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("reading %s failed with %s:\n%s", ascii(name), type(error).__name__, where)
    return Mistake(name, 0, "", f"makes the reader fail with {type(error).__name__}; please report it with the log")


def load(files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot of ``files``, read once; raises ConfigInvalid with all mistakes."""
    return Loader().load(files)


def _documents(name: str, content: bytes) -> list[Document]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigInvalid(
            [Mistake(name, 0, "", f"not UTF-8 at byte {error.start}; save the file as UTF-8")]
        ) from None
    if not text.strip():
        # what another program's open-and-write looks like from here, in the middle of it
        raise ConfigInvalid([Mistake(name, 0, "", "is empty; write a document, or remove the file")])
    return split(name, text)


def _version(digests: Mapping[str, str]) -> str:
    """A digest of all files."""
    version = xxhash.xxh3_64()
    for name, digest in sorted(digests.items()):
        version.update(f"{len(name)} {name} {digest} ".encode(errors="surrogateescape"))
    return version.hexdigest()


def _assemble(readings: Sequence[_Reading], digests: Mapping[str, str], check_picker: PickerCheck) -> Snapshot:
    """Raises ConfigInvalid."""
    routes, servers = _of(readings, ModelRoute), _of(readings, ModelServer)
    gateways, objectives = _of(readings, GatewayConfig), _of(readings, InferenceObjective)
    http_routes, backends = _of(readings, HTTPRoute), _of(readings, Backend)
    policies = _of(readings, ModelAccessPolicy)
    pickers: dict[str, PickerFile] = {}
    mistakes = [mistake for reading in readings for mistake in reading.mistakes]
    for one in readings:
        if isinstance(one.object, PickerFile):
            if one.document.file in pickers:
                second = "a second EndpointPickerConfig in this file; give each its own"
                mistakes.extend(one.document.mistakes([((), second)]))
            pickers[one.document.file] = one.object
            mistakes.extend(_of_picker(one.object, check_picker))
    for document, _ in gateways[1:]:
        second = "a second GatewayConfig; a directory takes one, merge the two"
        mistakes.extend(document.mistakes([(("kind",), second)]))
    unread = Unread.of(one.document for one in readings if one.object is None and one.mistakes)
    found = Found(routes, servers, gateways, http_routes, backends, policies, pickers, unread)
    mistakes.extend(check_references(found))
    mistakes.extend(check_policies(found))
    mistakes.extend(check_names(routes, "ModelRoute"))
    mistakes.extend(check_names(servers, "ModelServer"))
    mistakes.extend(check_names(http_routes, "HTTPRoute"))
    mistakes.extend(check_names(backends, "Backend"))
    mistakes.extend(check_names(policies, "ModelAccessPolicy"))
    mistakes.extend(check_names(objectives, "InferenceObjective"))
    mistakes.extend(check_model_names(found))
    if mistakes:
        raise ConfigInvalid(mistakes)
    return Snapshot(
        version=_version(digests),
        digests=digests,
        routes=tuple(route for _, route in routes),
        servers=tuple(server for _, server in servers),
        gateway=gateways[0][1].spec if gateways else GatewayConfigSpec(),
        objectives=tuple(objective for _, objective in objectives),
        http_routes=tuple(route for _, route in http_routes),
        backends=tuple(backend for _, backend in backends),
        access_policies=tuple(policy for _, policy in policies),
        picker_files=pickers,
    )


def _of_picker(file: PickerFile, check_picker: PickerCheck) -> Sequence[Mistake]:
    try:
        check_picker(file)
    except ConfigInvalid as error:
        return error.mistakes
    return ()


def _of(readings: Sequence[_Reading], cls: type[T]) -> list[tuple[Document, T]]:
    found = [(one.document, one.object) for one in readings if isinstance(one.object, cls)]
    return sorted(found, key=lambda pair: pair[1].metadata.key)
