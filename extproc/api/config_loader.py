# SPDX-License-Identifier: Apache-2.0
"""A configuration directory to one Snapshot, or to every mistake; only what has changed is read and decoded again."""

from __future__ import annotations

import logging
import os
import stat
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import xxhash

from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.config_snapshot import Snapshot
from extproc.api.document_decoder import Object, decode
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.gateway_config import GatewayConfig, GatewayConfigSpec
from extproc.api.key_store import KeyStore, with_virtual_keys
from extproc.api.picker_config import PickerFile, accept_any_plugins
from extproc.api.reference_checks import check_unique_names
from extproc.api.status_page_contents import content_digest
from extproc.api.yaml_documents import DirectoryObjects, Document, UnreadDocuments, split_documents

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from extproc.api.document_kinds import DocumentKind
    from extproc.api.picker_config import PickerConfigChecker

log = logging.getLogger(__name__)
SUFFIXES: Final = (".yaml", ".yml", ".json")
_TRIES: Final = 10
# A file of 4 MiB of YAML has 50,000 endpoints and takes seconds to read; JSON takes a hundredth of that.
MAX_YAML_BYTES: Final = 4 * 1024 * 1024
MAX_JSON_BYTES: Final = 16 * 1024 * 1024
MAX_DIRECTORY_BYTES: Final = 64 * 1024 * 1024
# Inode, times of the last change of content and of inode, and size of a file.
_Identity = tuple[int, int, int, int]


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


class SnapshotLoader:
    """Files to snapshots. A document whose text has not changed since the last call gives the same object again.

    It may move within its file, or to another: the text alone counts.
    """

    def __init__(self, check_picker: PickerConfigChecker = accept_any_plugins) -> None:
        """``check_picker``: its mistakes are reported with all others."""
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
            return [_Reading(Document(name, ""), None, [unexpected_error_mistake(name, error)])]

    def _read(self, document: Document) -> _Reading:
        known = self._objects.get((document.text, document.is_json))
        if isinstance(known, PickerFile) and known.document != document:
            known = msgspec.structs.replace(known, document=document)
        return _Reading(document, *decode(document)) if known is None else _Reading(document, known, [])


def unexpected_error_mistake(name: str, error: Exception) -> Mistake:
    """The mistake for an unexpected exception; logs its traceback.

    The exception's text is left out of both: it may repeat a secret of the file.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("reading %s failed with %s:\n%s", ascii(name), type(error).__name__, where)
    return Mistake(name, 0, "", f"makes the reader fail with {type(error).__name__}; please report it with the log")


def load_snapshot(files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot of ``files``, read once; raises ConfigInvalid with all mistakes."""
    return SnapshotLoader().load(files)


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
    return split_documents(name, text)


def _version(digests: Mapping[str, str]) -> str:
    """A digest of all files."""
    version = xxhash.xxh3_64()
    for name, digest in sorted(digests.items()):
        version.update(f"{len(name)} {name} {digest} ".encode(errors="surrogateescape"))
    return version.hexdigest()


def _assemble(readings: Sequence[_Reading], digests: Mapping[str, str], check_picker: PickerConfigChecker) -> Snapshot:
    """Raises ConfigInvalid."""
    objects: dict[type, list[tuple[Document, Any]]] = {kind.document: [] for kind in DOCUMENT_KINDS}
    pickers: dict[str, PickerFile] = {}
    mistakes = [mistake for reading in readings for mistake in reading.mistakes]
    for one in readings:
        if isinstance(one.object, PickerFile):
            if one.document.file in pickers:
                second = "a second EndpointPickerConfig in this file; give each its own"
                mistakes.extend(one.document.locate_mistakes([((), second)]))
            pickers[one.document.file] = one.object
            mistakes.extend(_of_picker(one.object, check_picker))
        elif one.object is not None:
            objects[type(one.object)].append((one.document, one.object))
    for pairs in objects.values():
        pairs.sort(key=lambda pair: pair[1].metadata.key)
    gateway = next((one.spec for _, one in objects[GatewayConfig]), GatewayConfigSpec())
    found = DirectoryObjects(
        objects=objects,
        keys={kind.name: {one.metadata.key for _, one in objects[kind.document]} for kind in DOCUMENT_KINDS},
        listeners=[one.name for one in gateway.listeners],
        pickers=pickers,
        unread=UnreadDocuments.of(one.document for one in readings if one.object is None and one.mistakes),
    )
    for kind in DOCUMENT_KINDS:
        mistakes.extend(_check_together(kind, found))
    mistakes.extend(mistake for kind in DOCUMENT_KINDS for check in kind.together for mistake in check(found))
    if mistakes:
        raise ConfigInvalid(mistakes)
    fields: dict[str, Any] = {
        kind.field: tuple(one for _, one in objects[kind.document]) for kind in DOCUMENT_KINDS if kind.field
    }
    fields["picker_files"] = pickers
    return Snapshot(
        version=_version(digests),
        digests=digests,
        gateway=with_virtual_keys(gateway, next((one.spec for _, one in found.of_type(KeyStore)), None)),
        **fields,
    )


def _check_together(kind: DocumentKind, found: DirectoryObjects) -> Iterator[Mistake]:
    """The objects of one kind have names of their own, and what they refer to exists."""
    pairs = found.objects[kind.document]
    for document, one in pairs:
        for check in kind.references:
            yield from document.locate_mistakes(check(one, found))
    if not kind.second:
        yield from check_unique_names(pairs, kind.name)
    for document, _ in pairs[1:] if kind.second else ():
        yield from document.locate_mistakes([(("kind",), kind.second)])


def _of_picker(file: PickerFile, check_picker: PickerConfigChecker) -> Sequence[Mistake]:
    try:
        check_picker(file)
    except ConfigInvalid as error:
        return error.mistakes
    return ()


class ConfigSource(Protocol):
    """Where a configuration is read."""

    @property
    def path(self) -> Path:
        """The folder; files that documents name are relative to it."""
        ...

    def has_changed(self) -> bool:
        """Whether ``read`` may return another snapshot than before."""
        ...

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid."""
        ...


class ConfigDirectory:
    """The YAML and JSON files of a directory, without hidden files and folders (Kubernetes has its own there)."""

    def __init__(self, path: Path, check_picker: PickerConfigChecker = accept_any_plugins) -> None:
        self.path = path
        self._loader = SnapshotLoader(check_picker)
        # what was there when it was last read; None: no directory
        self._seen: Mapping[str, _Identity] | None = None
        self._is_stale = True
        self._contents: dict[str, tuple[_Identity, bytes]] = {}
        # read within the last moment: what is written in the same tick of the file system's clock looks the same
        self._young: set[str] = set()

    def has_changed(self) -> bool:
        """Whether any file has come, gone, or been written or replaced since ``read``, even with equal content.

        Costs a stat for each file, and reads once more what was new at the last ``read``.
        """
        if self._is_stale or self._scan() != self._seen:
            return True
        young, self._young = self._young, set()
        for name in young:
            if self._content_of(name) != self._contents[name][1]:
                self._is_stale = True
                del self._contents[name]
                return True
        return False

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid with all mistakes, and nothing else.

        What changed while it was read is read again: a directory that is just being replaced can look empty.
        """
        found = self._try()
        for _ in range(_TRIES):
            if self._scan() == self._seen:
                break
            found = self._try()
        if isinstance(found, Exception):
            raise found
        return found

    def _why_unseen(self) -> str:
        if not self.path.exists():
            return "does not exist"
        return "is not a directory that can be read" if self.path.is_dir() else "is a file"

    def _try(self) -> Snapshot | ConfigInvalid:
        self._seen, self._is_stale = self._scan(), False
        if self._seen is None:
            self._young = set()
            return self._refusal(f"{self._why_unseen()}; name a directory that holds YAML or JSON files")
        try:
            _check_sizes(self.path, self._seen)
            snapshot = self._loader.load(self._read_files(self._seen))
        except ConfigInvalid as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever files do to their reader, they must not end the process
            return ConfigInvalid([unexpected_error_mistake(str(self.path), error)])
        if self._loader.is_empty:
            advice = "holds no ModelServer and no ModelRoute, nor another document of ours"
            return self._refusal(f"{advice}; write some in files that end in {', '.join(SUFFIXES)}")
        return snapshot

    def _refusal(self, message: str) -> ConfigInvalid:
        return ConfigInvalid([Mistake(str(self.path), 0, "", message)])

    def _read_files(self, seen: Mapping[str, _Identity]) -> dict[str, bytes]:
        """Raises ConfigInvalid."""
        contents: dict[str, tuple[_Identity, bytes]] = {}
        mistakes = []
        for name, identity in seen.items():
            known = self._contents.get(name)
            if known is not None and known[0] == identity:
                contents[name] = known
                continue
            try:
                contents[name] = identity, self._read_file(name)
            except OSError as error:
                mistakes.append(Mistake(name, 0, "", f"cannot be read: {error.strerror}; mend that or remove the file"))
        fresh = {name for name in contents if contents[name] is not self._contents.get(name)}
        self._young = fresh | (self._young & contents.keys())
        self._contents = contents
        if mistakes:
            raise ConfigInvalid(mistakes)
        return {name: content for name, (_, content) in contents.items()}

    def _read_file(self, name: str) -> bytes:
        """Raises OSError. A file that grows while it is read is cut off here, and read again as changed."""
        with (self.path / name).open("rb") as file:
            return file.read(max_file_bytes(name))

    def _content_of(self, name: str) -> bytes | None:
        try:
            return self._read_file(name)
        except OSError:
            return None

    def _scan(self) -> Mapping[str, _Identity] | None:
        try:
            with os.scandir(self.path) as entries:
                found = [(entry.name, _identity(entry)) for entry in entries if _is_ours(entry.name)]
        except OSError:
            return None
        return {name: identity for name, identity in sorted(found) if identity is not None}


def load_directory(path: Path, check_picker: PickerConfigChecker = accept_any_plugins) -> Snapshot:
    """The snapshot of a directory that is read once; raises ConfigInvalid with all mistakes."""
    return ConfigDirectory(path, check_picker).read()


def _is_ours(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(".")


def _identity(entry: os.DirEntry[str]) -> _Identity | None:
    try:
        found = entry.stat()
    except OSError:  # replaced between listing and stat, or a link to nothing
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def _check_sizes(directory: Path, seen: Mapping[str, _Identity]) -> None:
    """Before anything is read. Raises ConfigInvalid."""
    sizes = {name: identity[-1] for name, identity in seen.items()}
    mistakes = [
        Mistake(
            name, 0, "", f"has {size} bytes, and {max_file_bytes(name)} are read; split it, or write large ones as JSON"
        )
        for name, size in sizes.items()
        if size > max_file_bytes(name)
    ]
    total = sum(sizes.values())
    if not mistakes and total > MAX_DIRECTORY_BYTES:
        advice = f"its files have {total} bytes, and {MAX_DIRECTORY_BYTES} are read; remove what is not used"
        mistakes = [Mistake(str(directory), 0, "", advice)]
    if mistakes:
        raise ConfigInvalid(mistakes)


def max_file_bytes(name: str) -> int:
    """The largest file of this name that is read."""
    return MAX_JSON_BYTES if name.endswith(".json") else MAX_YAML_BYTES
