# SPDX-License-Identifier: Apache-2.0
"""Keys that lie in files of their own, put into the configuration and followed; keys that have expired, left out."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.config.errors import ConfigInvalid, Mistake
from extproc.config.key_sets import has_usable_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from extproc.config.authentication import ApiKey, Authentication, JwtIssuer
    from extproc.config.types import Snapshot

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 1_000_000


class KeyFiles:
    """Reads the files that a configuration names. One that turns bad later stays as it was last good."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        # files with what is wrong with them, so that it is said once
        self._said: dict[str, str] = {}
        # Envoy wants at least one key; this one nobody knows
        self._unknown = secrets.token_urlsafe(32)

    def fill(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """``snapshot`` with the content of its key files, without keys that have expired at ``now``.

        Raises ConfigInvalid for a file that cannot be used and never could.
        """
        given = snapshot.gateway.authentication
        if given is None:
            return snapshot
        filled = self._fill(given, now)
        if filled == given:
            return snapshot
        gateway = msgspec.structs.replace(snapshot.gateway, authentication=filled)
        return msgspec.structs.replace(snapshot, gateway=gateway)

    def _fill(self, given: Authentication, now: datetime) -> Authentication:
        valid = [one for one in given.api_keys if one.expires_at is None or now < one.expires_at]
        keys = [self._with_key(one) for one in valid]
        if given.api_keys and not keys:
            keys = [msgspec.structs.replace(given.api_keys[0], key=self._unknown, key_file=None)]
        issuers = tuple(self._with_key_set(one) for one in given.jwt)
        return msgspec.structs.replace(given, api_keys=tuple(keys), jwt=issuers)

    def _with_key(self, one: ApiKey) -> ApiKey:
        if one.key_file is None:
            return one
        return msgspec.structs.replace(one, key=self._read(one.key_file, _key_in), key_file=None)

    def _with_key_set(self, one: JwtIssuer) -> JwtIssuer:
        if one.jwks_file is None:
            return one
        return msgspec.structs.replace(one, jwks=self._read(one.jwks_file, _key_set_in), jwks_file=None)

    def _read(self, file: str, parse: Callable[[bytes], str]) -> str:
        try:
            with Path(file).open("rb") as opened:
                self._last[file] = parse(opened.read(_MAX_BYTES))
        except (OSError, ValueError) as error:
            # the text of other errors may repeat the file's content
            why = str(error.strerror) if isinstance(error, OSError) else "is not what it must be"
            if file not in self._last:
                raise ConfigInvalid([Mistake(file, 0, "", f"{why}; {_ADVICE[parse]}")]) from None
            if self._said.get(file) != why:
                log.error("%s: %s; its last keys stay", file, why)
            self._said[file] = why
        else:
            self._said.pop(file, None)
        return self._last[file]


def _key_in(content: bytes) -> str:
    key = content.decode().strip()
    if not 8 <= len(key) <= 512 or not key.isprintable():
        raise ValueError
    return key


def _key_set_in(content: bytes) -> str:
    if not has_usable_key(content):
        raise ValueError
    return content.decode()


_ADVICE: Final[Mapping[Callable[[bytes], str], str]] = {
    _key_in: "name a file that holds one key of 8 to 512 characters",
    _key_set_in: "name a file that holds a JSON Web Key Set with an RSA, EC, OKP or oct key",
}
