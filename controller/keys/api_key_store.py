# SPDX-License-Identifier: Apache-2.0
"""Where virtual keys are kept, and what is done with them: one change at a time, each with a line of an audit.

In a configuration directory they are a file; ``secret.py`` has the Secret of a cluster.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from controller.bundle.atomic_files import replace_file
from controller.keys import api_key_changes
from controller.keys.api_key_changes import KeyIdAndDigest, KeyRefused
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import MAX_JSON_BYTES, ConfigDirectory
from extproc.api.document_decoder import read_key_store
from extproc.api.key_store import KEYS_FILE, KeyStoreSpec, VirtualKey, to_json_fields
from extproc.api.spec import API_VERSION
from extproc.api.untrusted_files import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from controller.keys.api_key_changes import KeyRequest, KeyUpdate

log = logging.getLogger(__name__)
# No suffix that a configuration directory reads.
AUDIT_FILE: Final = "keys.audit.jsonl"
_LOCK_FILE: Final = ".keys.lock"
_LOCK_TRIES: Final = 200
_LOCK_PAUSE_S: Final = 0.05
# The one before it is kept, too.
_MOST_AUDIT_BYTES: Final = 16 * 1024 * 1024
_GATEWAY_WITH_KEYS: Final = (
    f"{{apiVersion: {API_VERSION}, kind: GatewayConfig, metadata: {{name: gateway}},"
    " spec: {authentication: {virtualKeys: {}}}}"
)
_PREFIX: Final = "sk-"
_RANDOM_BYTES: Final = 32
_Change = tuple[KeyStoreSpec, VirtualKey]
KeyChange = Callable[[KeyStoreSpec], _Change]


class GeneratedKey(msgspec.Struct, frozen=True):
    """A new key, which nothing keeps. ``record``: what the store has of it."""

    key: str
    record: VirtualKey


def random_key() -> str:
    """256 random bits. A digest protects only what cannot be guessed."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


class AuditLine(msgspec.Struct, frozen=True):
    """When which change is made, and by whom."""

    at: datetime
    action: str
    actor: str

    def with_key(self, key: VirtualKey) -> dict[str, object]:
        """With the key that it is about."""
        plain: dict[str, object] = msgspec.to_builtins(self)
        return {**plain, "id": key.id, "name": key.name, "tenant": key.tenant}


class KeyStorage(Protocol):
    """Where a KeyStore is. Its methods block, and raise KeyRefused or OSError."""

    def read(self) -> KeyStoreSpec:
        """All keys; none if there is no store yet."""
        ...

    def names_in_use(self) -> Collection[str]:
        """Names that other keys have, as far as is known."""
        ...

    def apply_change(self, change: KeyChange, line: AuditLine) -> VirtualKey:
        """Write the store that ``change`` makes of the one that is there; nobody else writes in between."""
        ...

    def why_unused(self) -> str:
        """Why what is written there is not put into use; empty if it is."""
        ...


class KeyAdmin:
    """What administrators do with keys. All methods block, and raise KeyRefused or OSError."""

    def __init__(self, place: KeyStorage, wall: Callable[[], float]) -> None:
        """``wall``: seconds since 1970."""
        self.place = place
        self._wall = wall

    @property
    def now(self) -> datetime:
        """In whole seconds."""
        return datetime.fromtimestamp(int(self._wall()), UTC)

    def create(self, asked: KeyRequest, actor: str) -> GeneratedKey:
        """A new key, valid as soon as Envoy has it."""
        taken, key = self.place.names_in_use(), random_key()

        def change(store: KeyStoreSpec) -> _Change:
            new = KeyIdAndDigest(secrets.token_hex(6), _digest(key))
            secret = store.cache_secret or secrets.token_hex(16)
            store = msgspec.structs.replace(store, cache_secret=secret)
            return api_key_changes.create(store, asked, new, self.now, taken=taken)

        return GeneratedKey(key, self._change("create", actor, change))

    def rotate(self, which: str, actor: str, *, overlap_s: float) -> GeneratedKey:
        """A new key for the caller of the last one, which is valid for ``overlap_s`` seconds more."""
        key = random_key()

        def change(store: KeyStoreSpec) -> _Change:
            return api_key_changes.rotate(store, which, _digest(key), self.now, overlap_s=overlap_s)

        return GeneratedKey(key, self._change("rotate", actor, change))

    def update(self, which: str, asked: KeyUpdate, actor: str) -> VirtualKey:
        """Its models, limits, budgets, reports or end."""
        return self._change("update", actor, lambda store: api_key_changes.update(store, which, asked, self.now))

    def revoke(self, which: str, actor: str) -> VirtualKey:
        """It is refused from now on."""
        return self._change("revoke", actor, lambda store: api_key_changes.revoke(store, which, self.now))

    def delete(self, which: str, actor: str) -> VirtualKey:
        """It is refused, and forgotten but for its name."""
        return self._change("delete", actor, lambda store: api_key_changes.delete(store, which))

    def _change(self, action: str, actor: str, change: KeyChange) -> VirtualKey:
        return self.place.apply_change(change, AuditLine(self.now, action, actor))


class KeyStoreFile:
    """The file ``keys.json`` of a configuration directory. A KeyPlace."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / KEYS_FILE
        self._folder = folder
        self._directory = ConfigDirectory(folder)

    def read(self) -> KeyStoreSpec:
        """All keys of the file; none if there is none yet."""
        self._check_folder()
        try:
            with open_regular_file(self.file) as opened:
                content = opened.read(MAX_JSON_BYTES + 1)
        except FileNotFoundError:
            return KeyStoreSpec()
        if len(content) > MAX_JSON_BYTES:
            raise KeyRefused(f"{self.file} has more than {MAX_JSON_BYTES} bytes; put a good copy there", 500)
        return read_store(content, str(self.file))

    def why_unused(self) -> str:
        """The directory's first mistake: while it has one, even a revoked key stays valid."""
        try:
            self._directory.read()
        except ConfigInvalid as error:
            return f"the change is not in use before the directory is valid: {error.mistakes[0]}; run attache check"
        return ""

    def names_in_use(self) -> Collection[str]:
        """Names of the GatewayConfig's own keys; raises KeyRefused if it takes no virtual keys."""
        self._check_folder()
        try:
            given = self._directory.read().gateway.authentication
        except ConfigInvalid as error:
            raise KeyRefused(f"{self._folder} is not in use as it is; run attache check: {error.mistakes[0]}") from None
        if given is None or given.virtual_keys is None:
            raise KeyRefused(
                "the GatewayConfig takes no virtual keys; write authentication: {virtualKeys: {}} into its spec, or, if"
                f" there is no GatewayConfig, a file with {_GATEWAY_WITH_KEYS}"
            )
        return {one.name for one in given.api_keys if one.id is None}

    def apply_change(self, change: KeyChange, line: AuditLine) -> VirtualKey:
        """Write the file; its lock keeps all others from writing in between."""
        with self._lock():
            before = self.read()
            after, key = change(before)
            if after == before:
                return key
            content = to_document(after)
            if len(content) > MAX_JSON_BYTES:
                raise KeyRefused(f"{self.file} would have more than {MAX_JSON_BYTES} bytes; delete keys", 409)
            self._audit(line.with_key(key))
            try:
                replace_file(self.file, content, self._mode())
            except OSError as error:
                self._audit({**line.with_key(key), "failed": str(error.strerror)})
                raise
        return key

    def _mode(self) -> int:
        """As it is: extproc and Envoy's bundle may be written by other users of one group."""
        try:
            return stat.S_IMODE(self.file.stat().st_mode)
        except FileNotFoundError:
            return 0o600

    def _audit(self, line: dict[str, object]) -> None:
        """Before the change: none goes without a line."""
        file = self._folder / AUDIT_FILE
        if file.exists() and file.stat().st_size > _MOST_AUDIT_BYTES:
            file.replace(file.with_name(f"{AUDIT_FILE}.1"))
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "ab") as opened:
            opened.write(msgspec.json.encode(line) + b"\n")
            opened.flush()
            os.fsync(descriptor)

    def _check_folder(self) -> None:
        if not self._folder.is_dir():
            raise KeyRefused(f"{self._folder} is no directory; name the configuration directory", 500)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self._check_folder()
        descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(_LOCK_TRIES):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_PAUSE_S)
            else:
                raise KeyRefused(f"another process holds {self._folder / _LOCK_FILE}; try again", 503)
            yield
        finally:
            os.close(descriptor)


def _digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def read_store(content: bytes, where: str) -> KeyStoreSpec:
    """Raises KeyRefused."""
    try:
        return read_key_store(content)
    except ConfigInvalid as error:
        what = f"{error.mistakes[0].path} {error.mistakes[0].message}".strip()
        raise KeyRefused(f"{where} cannot be used: {what}; put a good copy there", 500) from None


def to_document(store: KeyStoreSpec, indent: int = 1) -> bytes:
    """As a file. ``indent``: negative for the shortest text."""
    plain: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "KeyStore",
        "metadata": {"name": "keys"},
        "spec": to_json_fields(store),
    }
    return msgspec.json.format(msgspec.json.encode(plain), indent=indent) + b"\n"
