# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys that a configuration names, read from files and the environment again and again.

The last good content stays. API keys become digests, expired ones are left out. Listeners and servers whose secrets
were never good are left out of the bundle, which is then degraded.
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import stat
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.certificates import Unusable, check_authorities, check_pair
from controller.bundle.envoy.secrets import (
    Authorities,
    Certificate,
    EngineKey,
    engine_secrets,
    listener_secrets,
    secret_file,
)
from extproc.api.authentication import has_usable_key
from extproc.api.connection import EngineConnection
from extproc.api.errors import ConfigInvalid, Mistake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.bundle.envoy.secrets import SecretSource
    from extproc.api.authentication import ApiKey, Authentication, JwtIssuer
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_server import ModelServer
    from extproc.api.snapshot import Snapshot

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

    Content that cannot be used, such as a certificate whose private key has not been replaced yet, is logged once, and
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
        # the content that was refused last, so that it is checked and logged once
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
        self._refused = {source: refused for source, refused in self._refused.items() if source in found}
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
        return _read_file(os.fspath(self._folder / name), _MAX_BYTES)[0]

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


def _read_file(name: str, most_bytes: int) -> tuple[bytes, int]:
    """Content and mode. Raises OSError. A pipe is not waited for."""
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        mode = os.fstat(opened.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is not a regular file", name)
        return opened.read(most_bytes), mode


_MOST_KEY_BYTES: Final = 1_000_000


class KeyFiles:
    """Reads what a configuration names. A file that turns bad later stays as it was last good.

    API keys become digests here: from here on nothing holds them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._last: dict[str, str] = {}
        # the last message on each file and key, so that it is logged once
        self._logged: dict[str, str] = {}
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
                self._log_once(one.name, f"has the key of {first.name}, and is not used; keys tell callers apart")
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
            content, mode = _read_file(file, _MOST_KEY_BYTES)
            if parse is _digest_in and mode & stat.S_IROTH:
                # not refused: secrets that Kubernetes mounts are so by default
                self._log_once(f"{file}'s mode", "everybody on this machine can read the key in it; chmod 600")
            self._last[file] = parse(content)
        except (OSError, ValueError) as error:
            # the text of other errors may repeat the file's content
            why = str(error.strerror) if isinstance(error, OSError) else "is not what it must be"
            if file not in self._last:
                raise ConfigInvalid([Mistake(file, 0, "", f"{why}; {_ADVICE[parse]}")]) from None
            self._log_once(file, f"{why}; its last keys stay")
        else:
            self._logged.pop(file, None)
        return self._last[file]

    def _log_once(self, what: str, message: str) -> None:
        if self._logged.get(what) != message:
            log.error("%s: %s", what, message)
        self._logged[what] = message


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

_NO_CONNECTION: Final = EngineConnection()


def without_unusable(snapshot: Snapshot, unusable: Mapping[SecretSource, Mistake]) -> Snapshot:
    """``snapshot`` without the listeners that lack one of the secrets ``unusable``, and without the endpoints of
    servers that do: requests to those are answered 503, as nothing may be sent to their engines in another way.

    Raises ConfigInvalid if no listener is left: without any, Envoy would have the plain one of ``listen``.
    """
    if not unusable:
        return snapshot
    named = snapshot.gateway.listeners
    listeners = tuple(one for one in named if unusable.keys().isdisjoint(listener_secrets(one)))
    if named and not listeners:
        raise ConfigInvalid(list(unusable.values()))
    servers = tuple(
        one if unusable.keys().isdisjoint(engine_secrets(one.spec.connection)) else _unconnected(one)
        for one in snapshot.servers
    )
    gateway = snapshot.gateway
    if listeners != named:
        gateway = msgspec.structs.replace(gateway, listeners=listeners)
    return msgspec.structs.replace(snapshot, gateway=gateway, servers=servers)


def _unconnected(server: ModelServer) -> ModelServer:
    spec = msgspec.structs.replace(server.spec, listed=(), connection=_NO_CONNECTION)
    return msgspec.structs.replace(server, spec=spec)
