# SPDX-License-Identifier: Apache-2.0
"""Declared adapters: which names and sources are accepted, and the file that lists them."""

from __future__ import annotations

import logging
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

_LONGEST: Final = 256
_LONGEST_URI: Final = 2048
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:@+-]*")
_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s]+")
_DIGEST: Final = 12
_MOST_BYTES: Final = 1024 * 1024


class DeclaredAdapter(msgspec.Struct, frozen=True):
    """An adapter of the file, or a model of a repository. ``uri``: may be empty for a model whose files are in the
    repository already. ``memory``: bytes that a model takes. ``format``: of its weights.
    """

    uri: str = ""
    pinned: bool = False
    memory: Annotated[int, msgspec.Meta(ge=0)] = 0
    format: str = ""


class AdapterNameInvalid(ValueError):
    """The message has the correction for the caller."""


class AdapterNotDeclared(ValueError):
    """Not allowed now. The adapters' file may follow: a ConfigMap reaches pods later than it reaches other readers."""


class SourcePolicy(msgspec.Struct, frozen=True):
    """``directories``: below which local paths may be. ``prefixes``: with which URIs must begin; none: any.
    ``declared_only``: calls may load only adapters of the file, from their declared sources.
    """

    directories: tuple[Path, ...] = ()
    prefixes: tuple[str, ...] = ()
    declared_only: bool = False


def check_name(name: str, *, is_directory: bool = False) -> None:
    """Raises AdapterNameInvalid. ``is_directory``: the name is that of a directory in a model repository."""
    segments = name.split("/")
    accepted = (
        len(name) <= _LONGEST and all(map(_SEGMENT.fullmatch, segments)) and (len(segments) == 1 or not is_directory)
    )
    if not accepted:
        where = "" if is_directory else "; segments may be separated by '/'"
        raise AdapterNameInvalid(f"{name[:80]!r} is no name of an adapter: letters, digits and ._:@+- only{where}")


def is_uri(source: str) -> bool:
    """Whether it has to be downloaded; else it is a path."""
    return "://" in source and not source.startswith("file://")


def check_uri(uri: str, policy: SourcePolicy) -> None:
    """Raises AdapterNameInvalid for a URI that the downloader must not be given."""
    if len(uri) > _LONGEST_URI or not _URI.fullmatch(uri) or "/.." in uri:
        raise AdapterNameInvalid(f"{uri[:80]!r} is no URI of an adapter")
    if policy.prefixes and not any(uri.startswith(prefix) for prefix in policy.prefixes):
        raise AdapterNameInvalid(f"{uri[:80]!r} does not begin with one of {', '.join(policy.prefixes)}")


def allowed_local_path(source: str, policy: SourcePolicy) -> str:
    """The path of a local source, symbolic links resolved; raises AdapterNameInvalid unless it lies below an allowed
    directory.

    The engine is given the resolved path, so that a link cannot be changed between the check and the loading.
    """
    path = Path(source.removeprefix("file://"))
    if not path.is_absolute() or "\0" in source:
        raise AdapterNameInvalid(f"{source[:80]!r}: write an absolute path or a URI")
    resolved = path.resolve()
    for directory in policy.directories:
        if resolved.is_relative_to(directory.resolve()) and resolved != directory.resolve():
            return str(resolved)
    allowed = ", ".join(map(str, policy.directories)) or "none is allowed"
    raise AdapterNameInvalid(f"{source[:80]!r} is not below an allowed directory ({allowed})")


def adapter_link_name(name: str, uri: str) -> str:
    """Of the link to an adapter's files; another URI has another link, so the files of a loaded one never change."""
    digest = sha256(f"{name}\n{uri}".encode()).hexdigest()[:_DIGEST]
    return f"{name.replace('/', '-')[:80]}-{digest}"


def parse_declared_adapters(
    content: bytes, policy: SourcePolicy, *, is_directory: bool = False
) -> tuple[dict[str, DeclaredAdapter], dict[str, str]]:
    """The adapters of the file, and the mistakes of those that cannot be used; raises ValueError for a broken file."""
    try:
        written = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ValueError(f"no JSON object of adapters: {error}") from error
    found: dict[str, DeclaredAdapter] = {}
    mistakes: dict[str, str] = {}
    for name, raw in written.items():
        try:
            found[name] = _declared(name, raw, policy, is_directory=is_directory)
        except (msgspec.DecodeError, ValueError) as error:
            mistakes[name] = str(error)
    return found, mistakes


def _declared(name: str, raw: msgspec.Raw, policy: SourcePolicy, *, is_directory: bool) -> DeclaredAdapter:
    """Raises ValueError or DecodeError."""
    one = msgspec.json.decode(raw, type=DeclaredAdapter)
    check_name(name, is_directory=is_directory)
    if is_uri(one.uri):
        # --allow-uri does not apply to adapters of the file
        check_uri(one.uri, SourcePolicy())
    elif one.uri:
        allowed_local_path(one.uri, policy)
    elif not is_directory:
        raise AdapterNameInvalid("uri is missing")
    return one


class DeclaredAdaptersFile:
    """``declared``: of the last good file. ``problem``: of the present one, empty if it is good.

    ``removed``: names of an earlier file that the present one lacks, until they are dropped.
    """

    def __init__(self, path: Path | None, policy: SourcePolicy, *, is_directory: bool) -> None:
        self.declared: Mapping[str, DeclaredAdapter] = {}
        self.removed: set[str] = set()
        self.problem = ""
        self._path = path
        self._policy = policy
        self._is_directory = is_directory
        self._version: tuple[int, int, int] | None = None

    def poll(self) -> bool:
        """Read the file if it changed; whether there are other adapters now.

        A ConfigMap's file is a link through a link that is replaced: the inode of its target changes.
        """
        if self._path is None:
            return False
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if version == self._version:
                return False
            if stat.st_size > _MOST_BYTES:
                raise ValueError(f"the file has more than {_MOST_BYTES} bytes")
            content = self._path.read_bytes()
            found, mistakes = parse_declared_adapters(content, self._policy, is_directory=self._is_directory)
        except (OSError, ValueError) as error:
            self._complain(f"{self._path}: {error}")
            return False
        self._version = version
        # an adapter with a mistake stays as it was declared before, if it was
        found |= {name: self.declared[name] for name in mistakes if name in self.declared}
        if mistakes:
            self._complain(f"{self._path}: {'; '.join(f'{name}: {mistake}' for name, mistake in mistakes.items())}")
        elif self.problem:
            log.info("%s can be read again", self._path)
            self.problem = ""
        if found == self.declared:
            return False
        self.removed = (self.removed | set(self.declared)) - set(found)
        self.declared = found
        log.info("%d adapters are declared", len(found))
        return True

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s; what was declared before stays", problem)
        self.problem = problem
