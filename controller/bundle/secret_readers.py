# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys that a configuration names, polled from files and the environment.

The last good content stays. API keys become digests, expired ones are left out. Listeners and servers whose secrets
were never good are left out of the bundle, which is then degraded.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from controller.api.certificate_checks import (
    CertificateUnusable,
    check_authorities,
    check_key_pair,
    default_aws_profile,
)
from controller.bundle.envoy.authentication import SIGNS_NOTHING
from controller.bundle.envoy.secrets import (
    Authorities,
    AwsCredentials,
    Certificate,
    EngineKey,
    SystemAuthorities,
    listener_secrets,
    secret_file,
    server_secrets,
)
from extproc.api.authentication import jwks_has_usable_key
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.engine_connection import EngineConnection
from extproc.api.untrusted_files import open_regular_file
from extproc.file_reloading import Reloadable, error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from controller.bundle.envoy.secrets import SecretSource
    from extproc.api.authentication import ApiKey, Authentication, JwtIssuer
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_server import ModelServer

log = logging.getLogger(__name__)
_MAX_BYTES: Final = 4 * 1024 * 1024
# Warning time before certificates expire: enough to repair their renewal.
_WARN_BEFORE_S: Final = 7 * 86400
_Content = tuple[bytes | None, ...]
_SYSTEM_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_MOST_KEY_BYTES: Final = 1_000_000
_NO_CONNECTION: Final = EngineConnection()


class _Secret(msgspec.Struct, frozen=True):
    """The file for Envoy. ``ends_at``: None, if never."""

    file: str
    ends_at: datetime | None


class SecretFileReader:
    """Polls the secrets that a configuration names.

    Invalid content, such as a certificate that does not match its private key yet, is logged once, and the last good
    content stays. ``folder``: base of relative file names. ``bundle``: directory with the last good content of an
    earlier writer, for a start in the middle of a change. ``stale``: how many secrets are out of date or missing.
    ``ends_at``: by the first file of each secret, when it ends.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path = Path(), bundle: Path | None = None) -> None:
        self.stale = 0
        self.ends_at: Mapping[str, datetime] = {}
        self._environment = environment
        self._folder = folder
        self._bundle = bundle
        self._last: dict[SecretSource, Reloadable[_Content, _Secret]] = {}
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
        self.stale = sum(bool(one.problem) for one in found.values()) + len(unusable)
        self.ends_at = {
            _title(source): one.value.ends_at for source, one in found.items() if one.value.ends_at is not None
        }
        self._warn(now)
        return {source.file: one.value.file for source, one in found.items()}, unusable

    def check(self, sources: Iterable[SecretSource]) -> None:
        """Raises ConfigInvalid as ``read`` would; good content is kept."""
        self._last.update({source: self._read(source) for source in sources})

    def _read(self, source: SecretSource) -> Reloadable[_Content, _Secret]:
        """Raises ConfigInvalid."""
        known = self._last.get(source)
        try:
            one = known or Reloadable(
                lambda: self._content(source), lambda content: _checked(source, content), self._left_behind(source)
            )
        except (OSError, CertificateUnusable) as error:
            raise ConfigInvalid([Mistake(_title(source), 0, "", error_text(error))]) from None
        outcome = "refused" if known is None and one.problem else "unchanged" if known is None else one.poll()
        if outcome == "refused":
            log.error("%s: %s; what was there before stays in use", _title(source), one.problem)
        elif outcome != "unchanged":
            message = "new content is in use" if outcome == "new" else "is again what is in use"
            log.info("%s: %s", _title(source), message)
        return one

    def _left_behind(self, source: SecretSource) -> _Secret | None:
        file = None if self._bundle is None else self._bundle / source.file
        return None if file is None or not file.is_file() else _Secret(file.read_text(), None)

    def _content(self, source: SecretSource) -> _Content:
        match source:
            case Certificate():
                return self._read_file(source.cert_file), self._read_file(source.key_file)
            case Authorities():
                crl_file = source.crl_file
                return self._read_file(source.ca_file), None if crl_file is None else self._read_file(crl_file)
            case SystemAuthorities():
                return (self._read_file(self._system_authorities()),)
            case AwsCredentials():
                return (self._read_file(source.file_name),)
            case EngineKey(variable=None):
                return (self._read_file(source.file_name or ""),)
            case EngineKey(variable=str(name)):
                text = self._environment.get(name)
                if text is None:
                    raise CertificateUnusable("is not set; set it where the bundle's writer and extproc run")
                return (text.encode(errors="surrogateescape"),)
        raise TypeError(type(source).__name__)

    def _system_authorities(self) -> str:
        """As OpenSSL finds them, or where distributions put them."""
        own = self._environment.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
        found = next((one for one in (own, *_SYSTEM_AUTHORITIES) if one and Path(one).is_file()), None)
        if found is None:
            raise CertificateUnusable("are not on this machine; write connection.tls.caFile, or set SSL_CERT_FILE")
        return found

    def _read_file(self, name: str) -> bytes:
        return _read_file(os.fspath(self._folder / name), _MAX_BYTES)[0]

    def _warn(self, now: datetime) -> None:
        for name, ends_at in self.ends_at.items():
            if (ends_at - now).total_seconds() < _WARN_BEFORE_S and (name, ends_at) not in self._warned:
                self._warned.add((name, ends_at))
                log.warning("%s: is good until %s only; renew it", name, ends_at.isoformat())


def _checked(source: SecretSource, content: _Content) -> _Secret:
    """Raises Unusable."""
    first = content[0] or b""
    ends_at = None
    match source:
        case Certificate():
            key = content[1] or b""
            ends_at = check_key_pair(first, key)
            fields = {"certificate_chain": first, "private_key": key}
        case Authorities():
            ends_at = check_authorities(first, content[1])
            fields = {"trusted_ca": first, **({} if content[1] is None else {"crl": content[1]})}
        case SystemAuthorities():
            # of some hundred, one or the other ends soon
            check_authorities(first, None)
            fields = {"trusted_ca": first}
        case AwsCredentials():
            return _Secret(default_aws_profile(first), None)
        case _:
            fields = {"secret": b"Bearer " + _key_in(first)}
    return _Secret(secret_file(source, fields), ends_at)


def _key_in(content: bytes) -> bytes:
    key = content.strip()
    if not 1 <= len(key) <= 4096 or not key.isascii() or not key.decode().isprintable():
        raise CertificateUnusable("holds no key; write one of up to 4096 ASCII characters")
    return key


def _title(source: SecretSource) -> str:
    """Name of the secret in messages."""
    match source:
        case Certificate():
            return source.cert_file
        case Authorities():
            return source.ca_file
        case SystemAuthorities():
            return "the authorities that this machine trusts"
        case AwsCredentials():
            return source.file_name
        case EngineKey():
            return source.file_name or f"the environment variable {source.variable}"
    raise TypeError(type(source).__name__)


def _read_file(name: str, most_bytes: int) -> tuple[bytes, int]:
    """Content and mode. Raises OSError."""
    with open_regular_file(name) as opened:
        return opened.read(most_bytes), os.fstat(opened.fileno()).st_mode


class AuthKeyReader:
    """Reads what a configuration names. A file that turns bad later stays as it was last good.

    API keys become digests here: from here on nothing holds them. ``folder``: what names of files are relative to.
    """

    def __init__(self, environment: Mapping[str, str], folder: Path = Path()) -> None:
        self._environment = environment
        self._folder = folder
        self._last: dict[str, str] = {}
        # the last message on each file and key, so that it is logged once
        self._logged: dict[str, str] = {}
        # files that everybody can read
        self._warned: set[str] = set()
        # the last configuration, as it was given and filled
        self._filled: tuple[GatewayConfigSpec, GatewayConfigSpec] | None = None

    def fill_keys(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """``snapshot`` with its API keys as digests and the content of its key sets, without keys that have expired.

        Raises ConfigInvalid for a key that cannot be had and never could.
        """
        filled, mistakes = self.fill_available_keys(snapshot, now)
        if mistakes:
            raise ConfigInvalid(mistakes)
        return filled

    def fill_available_keys(self, snapshot: Snapshot, now: datetime) -> tuple[Snapshot, list[Mistake]]:
        """The configuration with its usable keys, and what is wrong with the rest.

        A missing key is left out, and an issuer without keys gets one that signs nothing. Their callers are refused, as
        are all callers if there are no others.
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
        # the same objects where nothing is to be read: of thousands, comparing is then quick
        digests = tuple(
            one
            if one.key_sha256 == digest
            else msgspec.structs.replace(one, key=None, key_file=None, key_env=None, key_sha256=digest)
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
        if one.remote_jwks is not None:
            # Envoy reads this one, from a directory of its own
            ca_file = os.fspath((self._folder / one.remote_jwks.ca_file).absolute())
            return msgspec.structs.replace(one, remote_jwks=msgspec.structs.replace(one.remote_jwks, ca_file=ca_file))
        if one.jwks_file is None:
            return one
        return msgspec.structs.replace(one, jwks=self._read(one.jwks_file, _key_set_in), jwks_file=None)

    def _read(self, name: str, parse: Callable[[bytes], str]) -> str:
        file = os.fspath(self._folder / name)
        try:
            content, mode = _read_file(file, _MOST_KEY_BYTES)
            if parse is _digest_in and mode & stat.S_IROTH:
                # not refused: secrets that Kubernetes mounts are so by default
                self._warn_once(file)
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

    def _warn_once(self, file: str) -> None:
        if file not in self._warned:
            log.warning("%s: every user of this machine can read the key in it; run chmod 600 %s", file, file)
        self._warned.add(file)

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
    if not jwks_has_usable_key(content):
        raise ValueError
    return content.decode()


_ADVICE: Final[Mapping[Callable[[bytes], str], str]] = {
    _digest_in: "name a file that holds one key of 8 to 512 characters",
    _key_set_in: "name a file that holds a JSON Web Key Set with an RSA, EC, OKP or oct key",
}


def drop_unusable_secrets(snapshot: Snapshot, unusable: Mapping[SecretSource, Mistake]) -> Snapshot:
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
        one if unusable.keys().isdisjoint(server_secrets(one.spec)) else _unconnected(one) for one in snapshot.servers
    )
    gateway = snapshot.gateway
    if listeners != named:
        gateway = msgspec.structs.replace(gateway, listeners=listeners)
    return msgspec.structs.replace(snapshot, gateway=gateway, servers=servers)


def _unconnected(server: ModelServer) -> ModelServer:
    spec = msgspec.structs.replace(server.spec, listed=(), provider=None, connection=_NO_CONNECTION)
    return msgspec.structs.replace(server, spec=spec)
