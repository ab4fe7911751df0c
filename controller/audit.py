# SPDX-License-Identifier: Apache-2.0
"""An append-only record, JSON lines, of what controllers change in the cluster and in directories, and why.

The client of the API server records each of its writes, and writers of directories each file: nothing else writes. Why
is known where it is decided: there ``caused_by`` says it for the writes inside.
"""

from __future__ import annotations

import hashlib
import socket
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import msgspec

from extproc.line_writer import LineWriter

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

# Written all the time, and changing nothing (reviews), or a record themselves (Events).
_LEFT_OUT: Final = ("leases", "events", "reviews")
_MOST_CHANGE_BYTES: Final = 16_384
_MOST_MESSAGE: Final = 2_048
_HIDDEN: Final = "***"
VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Cause(msgspec.Struct, frozen=True, omit_defaults=True):
    """``of``: the object whose reconciliation writes, kind and key. ``old`` and ``new``: of a decision, such as
    replicas.
    """

    of: str = ""
    reason: str = ""
    message: str = ""
    old: Any = None
    new: Any = None


_UNKNOWN: Final = Cause()
_CAUSE: ContextVar[Cause] = ContextVar("cause", default=_UNKNOWN)


@contextmanager
def caused_by(**fields: Any) -> Iterator[None]:  # noqa: ANN401 - those of Cause
    """The cause of all writes inside, beside what is known of it already."""
    token = _CAUSE.set(msgspec.structs.replace(_CAUSE.get(), **fields))
    try:
        yield
    finally:
        _CAUSE.reset(token)


class AuditedObject(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Which object, by the names of Kubernetes' own audit log."""

    api_version: str
    resource: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    uid: str = ""
    resource_version: str = ""


class AuditEntry(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A line. ``change``: what was sent. ``outcome``: ok, or the error. ``file``: that was written or removed, with
    the SHA-256 of its content.
    """

    time: str
    host: str
    actor: str
    verb: str
    outcome: str
    object_ref: AuditedObject | None = None
    file: str = ""
    sha256: str = ""
    cause: Cause = Cause()
    change: Any = None


def object_place_from_path(path: str) -> AuditedObject:
    """The object that a path on the API server names."""
    words = [unquote(word) for word in path.strip("/").split("/")]
    version, rest = ("/".join(words[1:3]), words[3:]) if words[0] == "apis" else (words[1], words[2:])
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = (*rest, "", "")[:3]
    return AuditedObject(version, plural, namespace, name, subresource)


class AuditLog:
    """Adds lines to ``lines``. ``counted``: called if an entry cannot be made."""

    def __init__(self, lines: LineWriter, counted: Callable[[str, int], None]) -> None:
        self._lines = lines
        self._counted = counted
        self._host = socket.gethostname()

    def record_write(
        self,
        actor: str,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None,
        answer: Mapping[str, Any] | None,
        outcome: str = "ok",
    ) -> None:
        """A write to the API server that was answered, or whose outcome is unknown."""
        with self._counting():
            place = object_place_from_path(path)
            if place.resource.endswith(_LEFT_OUT):
                return
            metadata = (answer or {}).get("metadata") or (body or {}).get("metadata") or {}
            place = msgspec.structs.replace(
                place,
                name=place.name or str(metadata.get("name", "")),
                uid=str(metadata.get("uid", "")),
                resource_version=str(metadata.get("resourceVersion", "")),
            )
            sent = None if body is None or method == "DELETE" else body
            self._add(
                actor, VERBS.get(method, method), outcome, object_ref=place, change=_bounded(sent, place.resource)
            )

    def record_file(self, actor: str, file: Path, content: bytes | None) -> None:
        """A file that was replaced, or removed (None)."""
        digest = "" if content is None else hashlib.sha256(content).hexdigest()
        with self._counting():
            self._add(actor, "delete" if content is None else "write", "ok", file=str(file), sha256=digest)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """An entry that cannot be made must not end what it is about."""
        try:
            yield
        except (LookupError, RecursionError, TypeError, ValueError):
            self._counted("failed", 1)

    def _add(self, actor: str, verb: str, outcome: str, **fields: Any) -> None:  # noqa: ANN401 - those of Entry
        cause = _CAUSE.get()
        if len(cause.message) > _MOST_MESSAGE:
            cause = msgspec.structs.replace(cause, message=cause.message[:_MOST_MESSAGE])
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        entry = AuditEntry(now, self._host, actor, verb, outcome[:_MOST_MESSAGE], cause=cause, **fields)
        self._lines.enqueue(msgspec.json.encode(entry) + b"\n")


def _bounded(sent: Mapping[str, Any] | None, resource: str) -> object:
    """What was sent without its secrets, or the digest of it if it is long."""
    if sent is None:
        return None
    shown = _without_secrets(sent)
    if resource == "secrets" and isinstance(shown, dict):
        shown = {**shown, **{name: _HIDDEN for name in ("data", "stringData") if name in shown}}
    text = msgspec.json.encode(shown)
    if len(text) <= _MOST_CHANGE_BYTES:
        return shown
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def _without_secrets(value: object) -> object:
    """A copy without values of environment variables."""
    if isinstance(value, dict):
        return {name: _hidden(one) if name == "env" else _without_secrets(one) for name, one in value.items()}
    return [_without_secrets(one) for one in value] if isinstance(value, list) else value


def _hidden(variables: object) -> object:
    if not isinstance(variables, list):
        return _without_secrets(variables)
    return [{**one, "value": _HIDDEN} if isinstance(one, dict) and "value" in one else one for one in variables]


def add_audit_option(made: argparse.ArgumentParser) -> None:
    """``--audit-log``."""
    made.add_argument(
        "--audit-log",
        metavar="FILE",
        help="append what is changed, and why, as JSON lines to this file, or to standard output (-)",
    )


@contextmanager
def open_audit(file: str | None, registry: CollectorRegistry) -> Iterator[AuditLog | None]:
    """The audit of ``--audit-log``; None without one. What waits is written at the end."""
    if file is None:
        yield None
        return
    from prometheus_client import Counter  # noqa: PLC0415 - not for --help

    entries = Counter(
        "attache_audit_entries_total",
        "Entries of the audit log: written, dropped (the queue was full), failed (the file cannot be written)",
        ("result",),
        registry=registry,
    )

    def counted(result: str, number: int) -> None:
        entries.labels(result).inc(number)

    for result in ("written", "dropped", "failed"):
        counted(result, 0)
    with LineWriter(None if file == "-" else Path(file), counted) as lines:
        yield AuditLog(lines, counted)


def file_recorder(audit: AuditLog | None, actor: str) -> Callable[[Path, bytes | None], None]:
    """What writers of files call with each, and its content, None if it was removed."""
    return partial(audit.record_file, actor) if audit is not None else lambda _file, _content: None
