# SPDX-License-Identifier: Apache-2.0
"""Keys from files and the environment, followed; expired ones left out; API keys as digests."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import stat
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.authentication import has_usable_key
from extproc.api.errors import ConfigInvalid, Mistake

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from extproc.api.authentication import ApiKey, Authentication, JwtIssuer
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.snapshot import Snapshot

log = logging.getLogger(__name__)

_MAX_BYTES: Final = 1_000_000


class KeyFiles:
    """Reads what a configuration names. A file that turns bad later stays as it was last good.

    API keys become digests here: from here on nothing holds them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._last: dict[str, str] = {}
        # what was said of files and keys, so that it is said once
        self._said: dict[str, str] = {}
        # the last configuration, as it was given and filled
        self._filled: tuple[GatewayConfigSpec, GatewayConfigSpec] | None = None

    def fill(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """``snapshot`` with its API keys as digests and the content of its key sets, without keys that have expired.

        Raises ConfigInvalid for a key that cannot be had and never could.
        """
        filled, mistakes = self.fill_available(snapshot, now)
        if mistakes:
            raise ConfigInvalid(mistakes)
        return filled

    def fill_available(self, snapshot: Snapshot, now: datetime) -> tuple[Snapshot, list[Mistake]]:
        """The same with what can be had of it, and what is wrong with the rest.

        A key that cannot be had is left out, and an issuer without its keys gets one that signs nothing. Whoever uses
        them is refused, as is everybody if there are no others.
        """
        given = snapshot.gateway.authentication
        if given is None:
            return snapshot, []
        mistakes: list[Mistake] = []
        filled = self._fill(given, now, mistakes)
        # the same object while nothing has changed: what is made from it is kept
        if self._filled is None or self._filled[0] is not snapshot.gateway or self._filled[1].authentication != filled:
            self._filled = snapshot.gateway, msgspec.structs.replace(snapshot.gateway, authentication=filled)
        return msgspec.structs.replace(snapshot, gateway=self._filled[1]), mistakes

    def _fill(self, given: Authentication, now: datetime, mistakes: list[Mistake]) -> Authentication:
        valid = [one for one in given.api_keys if one.expires_at is None or now < one.expires_at]
        keys: dict[str, ApiKey] = {}
        for one in valid:
            try:
                digest = one.digest or self._read_digest(one)
            except ConfigInvalid as error:
                mistakes.extend(error.mistakes)
                continue
            first = keys.setdefault(digest, one)
            if first is not one:
                self._say(one.name, f"has the key of {first.name}, and is not used; keys tell callers apart")
        digests = tuple(
            msgspec.structs.replace(one, key=None, key_file=None, key_env=None, key_sha256=digest)
            for digest, one in keys.items()
        )
        issuers = []
        for issuer in given.jwt:
            try:
                issuers.append(self._with_key_set(issuer))
            except ConfigInvalid as error:
                mistakes.extend(error.mistakes)
                # left out, it would change the listener, and open connections would keep the issuer of before
                issuers.append(msgspec.structs.replace(issuer, jwks=SIGNS_NOTHING, jwks_file=None))
        return msgspec.structs.replace(given, api_keys=digests, jwt=tuple(issuers))

    def _read_digest(self, one: ApiKey) -> str:
        if one.key_file is not None:
            return self._read(one.key_file, _digest_in)
        try:
            return _digest_in(self._environment[one.key_env or ""].encode(errors="surrogateescape"))
        except KeyError:
            why = "is not set"
        except ValueError:
            why = "is not what it must be"
        message = f"{why}; set it to one key of 8 to 512 characters where the bundle's writer runs"
        raise ConfigInvalid([Mistake(f"the environment variable {one.key_env}", 0, "", message)])

    def _with_key_set(self, one: JwtIssuer) -> JwtIssuer:
        if one.jwks_file is None:
            return one
        return msgspec.structs.replace(one, jwks=self._read(one.jwks_file, _key_set_in), jwks_file=None)

    def _read(self, file: str, parse: Callable[[bytes], str]) -> str:
        try:
            # a pipe would be waited for until somebody writes into it
            with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise OSError(errno.EINVAL, "is not a regular file")
                if parse is _digest_in and mode & stat.S_IROTH:
                    # not refused: secrets that Kubernetes mounts are so by default
                    self._say(f"{file}'s mode", "everybody on this machine can read the key in it; chmod 600")
                self._last[file] = parse(opened.read(_MAX_BYTES))
        except (OSError, ValueError) as error:
            # the text of other errors may repeat the file's content
            why = str(error.strerror) if isinstance(error, OSError) else "is not what it must be"
            if file not in self._last:
                raise ConfigInvalid([Mistake(file, 0, "", f"{why}; {_ADVICE[parse]}")]) from None
            self._say(file, f"{why}; its last keys stay")
        else:
            self._said.pop(file, None)
        return self._last[file]

    def _say(self, what: str, message: str) -> None:
        if self._said.get(what) != message:
            log.error("%s: %s", what, message)
        self._said[what] = message


def _digest_in(content: bytes) -> str:
    """The SHA-256 of the key in ``content``."""
    key = content.decode().strip()
    if not 8 <= len(key) <= 512 or not key.isprintable():
        raise ValueError
    return sha256(key.encode()).hexdigest()


def _key_set_in(content: bytes) -> str:
    if not has_usable_key(content):
        raise ValueError
    return content.decode()


def _key_that_signs_nothing() -> str:
    """A key set whose private key nobody knows: a point of the curve P-256 whose x coordinate is a digest of a text.

    Source of the curve: NIST SP 800-186, 3.2.1.3.
    """
    prime = 2**256 - 2**224 + 2**192 + 2**96 - 1
    b = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
    x = int.from_bytes(sha256(b"attache: this key signs nothing").digest()) % prime
    while pow(x**3 - 3 * x + b, (prime - 1) // 2, prime) != 1:
        x += 1
    y = pow(x**3 - 3 * x + b, (prime + 1) // 4, prime)
    key = {"kty": "EC", "crv": "P-256", "x": _base64url(x), "y": _base64url(y), "kid": "signs-nothing"}
    return json.dumps({"keys": [key]})


def _base64url(number: int) -> str:
    return base64.urlsafe_b64encode(number.to_bytes(32)).decode().rstrip("=")


SIGNS_NOTHING: Final = _key_that_signs_nothing()

_ADVICE: Final[Mapping[Callable[[bytes], str], str]] = {
    _digest_in: "name a file that holds one key of 8 to 512 characters",
    _key_set_in: "name a file that holds a JSON Web Key Set with an RSA, EC, OKP or oct key",
}
