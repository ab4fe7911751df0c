# SPDX-License-Identifier: Apache-2.0
"""Certificates and engines' keys from files and the environment, followed; the last good ones stay."""

from __future__ import annotations

import errno
import logging
import os
import stat
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.certificates import Unusable, check_authorities, check_pair
from controller.bundle.envoy.secrets import Authorities, Certificate, EngineKey, secret_file
from extproc.api.errors import ConfigInvalid, Mistake

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.bundle.envoy.secrets import SecretSource

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 4 * 1024 * 1024
# Before certificates end: soon enough to mend what should have renewed them.
_WARN_BEFORE_S: Final = 7 * 86400


class _Secret(msgspec.Struct, frozen=True):
    """A good reading: the content of the files, in order, and the file for Envoy. ``ends_at``: None, if never."""

    content: tuple[bytes | None, ...]
    file: str
    ends_at: datetime | None


class SecretFiles:
    """Reads what a configuration names, again and again.

    Content that cannot be used, such as a certificate whose private key has not been replaced yet, is said once, and
    what was there before stays. ``folder``: what names of files are relative to. ``bundle``: where an earlier writer
    may have left good ones, for a start in the middle of a change. ``stale``: how many secrets are out of date or
    missing.
    ``ends_at``: by the first file of each secret, when it ends.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path = Path(), bundle: Path | None = None) -> None:
        self.stale = 0
        self.ends_at: Mapping[str, datetime] = {}
        self._environment = environment
        self._folder = folder
        self._bundle = bundle
        self._last: dict[SecretSource, _Secret] = {}
        # the content that was refused last, so that it is checked and said once
        self._refused: dict[SecretSource, tuple[object, str]] = {}
        self._warned: set[tuple[str, datetime]] = set()

    def read(self, sources: Iterable[SecretSource], now: datetime) -> Mapping[str, str]:
        """Files of the bundle to their content. Raises ConfigInvalid for a secret that cannot be used and never
        could.
        """
        files, unusable = self.read_available(sources, now)
        if unusable:
            raise ConfigInvalid(list(unusable.values()))
        return files

    def read_available(
        self, sources: Iterable[SecretSource], now: datetime
    ) -> tuple[Mapping[str, str], Mapping[SecretSource, Mistake]]:
        """The same of those that can be had, and what is wrong with the others."""
        found, unusable = {}, {}
        for source in dict.fromkeys(sources):
            try:
                found[source] = self._read(source)
            except ConfigInvalid as error:
                unusable[source] = error.mistakes[0]
        self._last = found
        self._refused = {source: said for source, said in self._refused.items() if source in found}
        self.stale = len(self._refused) + len(unusable)
        self.ends_at = {_title(source): one.ends_at for source, one in found.items() if one.ends_at is not None}
        self._warn(now)
        return {source.file: one.file for source, one in found.items()}, unusable

    def check(self, sources: Iterable[SecretSource]) -> None:
        """Raises ConfigInvalid as ``read`` would; what is good is remembered."""
        self._last.update({source: self._read(source) for source in sources})

    def _read(self, source: SecretSource) -> _Secret:
        last = self._last.get(source)
        content: object = None
        try:
            content = read = self._content(source)
            if last is not None and last.content == read:
                self._mended(source)
                return last
            if self._refused.get(source, (None, ""))[0] == read and last is not None:
                return last
            good = _checked(source, read)
        except (OSError, Unusable) as error:
            why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            last = last or self._left_behind(source)
            if last is None:
                raise ConfigInvalid([Mistake(_title(source), 0, "", why)]) from None
            if self._refused.get(source) != (content, why):
                log.error("%s: %s; what was there before stays in use", _title(source), why)
            self._refused[source] = content, why
            return last
        if last is not None:
            log.info("%s: new content is in use", _title(source))
        self._refused.pop(source, None)
        return good

    def _left_behind(self, source: SecretSource) -> _Secret | None:
        file = None if self._bundle is None else self._bundle / source.file
        return None if file is None or not file.is_file() else _Secret((), file.read_text(), None)

    def _mended(self, source: SecretSource) -> None:
        if self._refused.pop(source, None) is not None:
            log.info("%s: is again what is in use", _title(source))

    def _content(self, source: SecretSource) -> tuple[bytes | None, ...]:
        match source:
            case Certificate():
                return self._read_file(source.cert_file), self._read_file(source.key_file)
            case Authorities():
                crl_file = source.crl_file
                return self._read_file(source.ca_file), None if crl_file is None else self._read_file(crl_file)
            case EngineKey(variable=None):
                return (self._read_file(source.file_name or ""),)
            case EngineKey(variable=str(name)):
                text = self._environment.get(name)
                if text is None:
                    raise Unusable("is not set; set it where the bundle's writer and extproc run")
                return (text.encode(errors="surrogateescape"),)
        raise TypeError(type(source).__name__)

    def _read_file(self, name: str) -> bytes:
        return _read_file(os.fspath(self._folder / name))

    def _warn(self, now: datetime) -> None:
        for name, ends_at in self.ends_at.items():
            if (ends_at - now).total_seconds() < _WARN_BEFORE_S and (name, ends_at) not in self._warned:
                self._warned.add((name, ends_at))
                log.warning("%s: is good until %s only; renew it", name, ends_at.isoformat())


def _checked(source: SecretSource, content: tuple[bytes | None, ...]) -> _Secret:
    """Raises Unusable."""
    first = content[0] or b""
    ends_at = None
    match source:
        case Certificate():
            key = content[1] or b""
            ends_at = check_pair(first, key)
            fields = {"certificate_chain": first, "private_key": key}
        case Authorities():
            ends_at = check_authorities(first, content[1])
            fields = {"trusted_ca": first, **({} if content[1] is None else {"crl": content[1]})}
        case _:
            fields = {"secret": b"Bearer " + _key_in(first)}
    return _Secret(content, secret_file(source, fields), ends_at)


def _key_in(content: bytes) -> bytes:
    key = content.strip()
    if not 1 <= len(key) <= 4096 or not key.isascii() or not key.decode().isprintable():
        raise Unusable("holds no key; write one of up to 4096 ASCII characters")
    return key


def _title(source: SecretSource) -> str:
    """What people know the secret by."""
    match source:
        case Certificate():
            return source.cert_file
        case Authorities():
            return source.ca_file
        case EngineKey():
            return source.file_name or f"the environment variable {source.variable}"
    raise TypeError(type(source).__name__)


def _read_file(name: str) -> bytes:
    """Raises OSError. A pipe is not waited for."""
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", name)
        return opened.read(_MAX_BYTES)
