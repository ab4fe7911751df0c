# SPDX-License-Identifier: Apache-2.0
"""The GatewayConfig of the directory: the object in effect, with listeners of Gateways, and digests out of Secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.access_policies import failure_mode
from controller.gateway.compile.referenced_secrets import ReferencedObject, ReferencedObjectKey
from controller.gateway.compile.source_objects import SourceObject, to_canonical_json
from extproc.api import spec as patterns
from extproc.api.addresses import parse_address
from extproc.api.authentication import jwks_has_usable_key
from extproc.api.config_errors import ConfigInvalid
from extproc.api.document_decoder import decode, read_key_store
from extproc.api.gateway_config import GatewayConfig
from extproc.api.key_store import KEYS_FILE, KeyStoreSpec, to_json_fields
from extproc.api.spec import API_VERSION, object_key
from extproc.api.yaml_documents import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from extproc.api.authentication import ApiKeySecret, Authentication, JwtIssuer, VirtualKeys

TENANT: Final = "attache.dev/tenant"
USER: Final = "attache.dev/user"
_NAME: Final = re.compile(patterns.NAME)
_KEY: Final = re.compile(patterns.KEY)
_TEXT: Final = re.compile(patterns.NO_CONTROL)
_SHORTEST_KEY: Final = 8
_LONGEST_KEY: Final = 512
# A digest without a known preimage, used where no key can be read: a gateway with all Secrets missing still requires
# keys.
_NO_KEY: Final = {"name": "none", "tenant": "none", "keySHA256": "0" * 64}
_RESOLVED: Final = frozenset({"apiKeys", "apiKeySecrets", "virtualKeys", "jwt"})
_DEFAULT: Final = {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "default"}}


class GatewayConfigs:
    """``sources``: every GatewayConfig by key; it may change."""

    def __init__(self, sources: Mapping[str, SourceObject]) -> None:
        self._sources = sources

    def problem(self, key: str) -> str:
        """Why a GatewayConfig cannot be used; empty if it can."""
        config = self._sources.get(key)
        if config is None:
            return "there is no such GatewayConfig"
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return config.mistakes_text()
        return ""

    def needs_client_certificates(self, key: str | None) -> bool:
        """Whether callers are identified by client certificates."""
        config = self._sources.get(key or "")
        if config is None or not isinstance(config.decoded, GatewayConfig):
            return False
        authentication = config.decoded.spec.authentication
        return authentication is not None and bool(authentication.client_certificates)

    def transformer_listener_port(self, key: str | None) -> int | None:
        """Where Envoy listens for transformers and explainers; None: nowhere."""
        config = self._sources.get(key or "")
        if config is None or config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return None
        address = config.decoded.spec.steps
        return None if address is None else parse_address(address)[1]


class SecretContent(msgspec.Struct, frozen=True):
    """What counts of a Secret. ``data``: decoded."""

    data: Mapping[str, bytes]
    annotations: Mapping[str, str] = {}


class CompiledAuthentication(msgspec.Struct, frozen=True):
    """``authentication``: for the directory, as plain data. ``problems``: what could not be had, for the condition.
    ``cache_secret``: of the store of virtual keys.
    """

    authentication: Mapping[str, Any]
    problems: tuple[str, ...]
    cache_secret: str | None = None


def referenced_secrets(authentication: Authentication | None, namespace: str) -> frozenset[str]:
    """The Secrets that it points to, as ``namespace/name``."""
    if authentication is None:
        return frozenset()
    names = [one.name for one in authentication.api_key_secrets]
    if authentication.virtual_keys is not None and authentication.virtual_keys.secret is not None:
        names.append(authentication.virtual_keys.secret)
    names += [one.jwks_secret.name for one in authentication.jwt if one.jwks_secret is not None]
    return frozenset(object_key(namespace, name) for name in names)


def resolve_gateway_config(
    given: Mapping[str, Any], decoded: Authentication, namespace: str, secrets: Mapping[str, SecretContent]
) -> CompiledAuthentication:
    """``given``: the object's own, ``decoded``: the same as a struct. ``secrets``: those that are there, by key."""
    problems: list[str] = []
    found = {name: value for name, value in given.items() if name not in _RESOLVED}
    if decoded.api_keys or decoded.api_key_secrets or decoded.virtual_keys is not None:
        keys = [_own_key(one) for one in given.get("apiKeys", ())]
        taken = {one["name"] for one in keys}
        digests = {one["keySHA256"].lower() for one in keys if "keySHA256" in one}
        for ref in decoded.api_key_secrets:
            for key in _keys(ref, secrets.get(object_key(namespace, ref.name)), problems):
                # names and keys identify callers: of two equal ones, the first counts
                if key["name"] in taken or key["keySHA256"] in digests:
                    problems.append(f"Secret {ref.name}: another client has the name or the key of '{key['name']}'")
                    continue
                taken.add(key["name"])
                digests.add(key["keySHA256"])
                keys.append(key)
        store = _key_store(decoded.virtual_keys, namespace, secrets, problems)
        for one in store.keys:
            made = [to_json_fields(key) for key in one.api_keys]
            if one.name in taken or not digests.isdisjoint(key["keySHA256"] for key in made):
                problems.append(f"virtual key '{one.name}': another client has its name or its key")
                continue
            keys += made
        virtual: dict[str, Any] = {} if decoded.virtual_keys is None else {"virtualKeys": {}}
        return CompiledAuthentication(
            {**found, **virtual, "apiKeys": keys or [_NO_KEY]}, tuple(problems), store.cache_secret
        )
    issuers = [
        issuer
        for plain, one in zip(given.get("jwt", ()), decoded.jwt, strict=True)
        if (issuer := _issuer(plain, one, namespace, secrets, problems)) is not None
    ]
    if decoded.jwt and not issuers:
        return CompiledAuthentication({**found, "apiKeys": [_NO_KEY]}, tuple(problems))
    return CompiledAuthentication({**found, "jwt": issuers} if issuers else found, tuple(problems))


def _key_store(
    virtual: VirtualKeys | None, namespace: str, secrets: Mapping[str, SecretContent], problems: list[str]
) -> KeyStoreSpec:
    """Of the Secret; without keys if it cannot be had."""
    if virtual is None:
        return KeyStoreSpec()
    if virtual.secret is None:
        problems.append("virtualKeys names no Secret; write secret, the name of one")
        return KeyStoreSpec()
    secret = secrets.get(object_key(namespace, virtual.secret))
    content = None if secret is None else secret.data.get(KEYS_FILE)
    if content is None:
        # before the first key is made there is none
        return KeyStoreSpec()
    try:
        return read_key_store(content)
    except ConfigInvalid:
        problems.append(f"Secret {virtual.secret}: '{KEYS_FILE}' is no KeyStore; all virtual keys are refused")
        return KeyStoreSpec()


def _own_key(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A key in the object itself is replaced by its digest."""
    rest = {name: value for name, value in plain.items() if name != "key"}
    return {**rest, "keySHA256": _digest(plain["key"].encode())} if "key" in plain else rest


def _keys(ref: ApiKeySecret, secret: SecretContent | None, problems: list[str]) -> Iterator[dict[str, Any]]:
    if secret is None:
        problems.append(f"there is no Secret {ref.name}; its keys are refused")
        return
    tenant, user = ref.tenant or secret.annotations.get(TENANT), ref.user or secret.annotations.get(USER)
    if not all(_is_text(one) for one in (tenant, user) if one is not None):
        problems.append(
            f"Secret {ref.name}: its annotations {TENANT} and {USER} must be text of at most 512 characters"
        )
        return
    for name, value in sorted(secret.data.items()):
        key = _key_in(value)
        if not _NAME.match(name) or key is None:
            # the value is never repeated
            problems.append(
                f"Secret {ref.name}: '{name}' is not used; clients' names are lower-case letters, digits, '-' and '.', "
                f"and keys have {_SHORTEST_KEY} to {_LONGEST_KEY} ASCII characters without spaces"
            )
            continue
        made: dict[str, Any] = {"name": name, "tenant": tenant or name, "keySHA256": _digest(key)}
        if user:
            made["user"] = user
        if ref.models is not None:
            made["models"] = list(ref.models)
        if ref.reports is not None:
            made["reports"] = ref.reports
        yield made


def _issuer(
    plain: Mapping[str, Any],
    one: JwtIssuer,
    namespace: str,
    secrets: Mapping[str, SecretContent],
    problems: list[str],
) -> Mapping[str, Any] | None:
    """None: its key set cannot be had, so none of its tokens is good."""
    ref = one.jwks_secret
    if ref is None:
        return plain
    secret = secrets.get(object_key(namespace, ref.name))
    content = None if secret is None else secret.data.get(ref.key)
    if content is None or not jwks_has_usable_key(content):
        what = "there is no" if secret is None else f"'{ref.key}' is no key set in"
        problems.append(f"{what} Secret {ref.name}; tokens of the issuer '{one.name}' are refused")
        return None
    rest = {name: value for name, value in plain.items() if name != "jwksSecret"}
    return {**rest, "jwks": content.decode()}


def _key_in(value: bytes) -> bytes | None:
    """An API key, without the line break at the end of the file that it came from."""
    try:
        text = value.decode().strip()
    except UnicodeDecodeError:
        return None
    if not _SHORTEST_KEY <= len(text) <= _LONGEST_KEY or not _KEY.match(text):
        return None
    return text.encode()


def _is_text(value: str) -> bool:
    return 0 < len(value) <= _LONGEST_KEY and _TEXT.match(value) is not None


def _digest(key: bytes) -> str:
    return sha256(key).hexdigest()


class GatewayDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``missing``: keys and key sets of Secrets that cannot be read. ``note``: how the served configuration differs
    from the spec. ``refused``: why it must not be served; empty if it may be.
    """

    content: bytes
    missing: tuple[str, ...] = ()
    note: str = ""
    refused: str = ""
    pointers: frozenset[ReferencedObjectKey] = frozenset()


class GatewayDocumentBuilder:
    """Rebuilds the document only when an input has changed. ``pointed``: the target of a pointer, if it is read."""

    def __init__(self, pointed: Callable[[ReferencedObjectKey], ReferencedObject | None]) -> None:
        self._pointed = pointed
        self._last: tuple[object, GatewayDocument] | None = None

    def build_document(
        self, source: SourceObject | None, listeners: Sequence[Mapping[str, Any]] | None, *, has_policies: bool
    ) -> GatewayDocument:
        """``source``: None for the defaults. ``listeners``: None if there is no Gateway, and it has its own."""
        authentication = _authentication(source)
        namespace = "" if source is None else source.namespace
        pointers = frozenset(
            ReferencedObjectKey("Secret", key) for key in referenced_secrets(authentication, namespace)
        )
        secrets = {one.key: found for one in pointers if (found := self._pointed(one)) is not None}
        given = source, listeners, has_policies, secrets
        if self._last is None or self._last[0] != given:
            made = _make(source, listeners, secrets, has_policies=has_policies)
            self._last = given, msgspec.structs.replace(made, pointers=pointers)
        return self._last[1]


def _make(
    source: SourceObject | None,
    listeners: Sequence[Mapping[str, Any]] | None,
    secrets: Mapping[str, ReferencedObject],
    *,
    has_policies: bool,
) -> GatewayDocument:
    spec: dict[str, Any] = {} if source is None else dict(source.spec)
    if listeners is not None:
        spec["listeners"] = listeners
    missing: tuple[str, ...] = ()
    authentication = _authentication(source)
    if source is not None and authentication is not None:
        contents = {key: SecretContent(one.data, one.annotations) for key, one in secrets.items()}
        found = resolve_gateway_config(spec["authentication"], authentication, source.namespace, contents)
        spec["authentication"], missing = found.authentication, found.problems
        if found.cache_secret is not None:
            spec.setdefault("cacheSecret", found.cache_secret)
    content = _document(source, spec)
    decoded, mistakes = decode(Document("", content.decode(), is_json=True))
    if not isinstance(decoded, GatewayConfig) or mistakes:
        message = "; ".join(f"{one.path}: {one.message}" for one in mistakes)
        return GatewayDocument(content=content, missing=missing, refused=message)
    mode, note = failure_mode(spec, decoded.spec, has_policies=has_policies)
    if note:
        content = _document(source, {**spec, "failureMode": mode})
    return GatewayDocument(content=content, missing=missing, note=note)


def _authentication(source: SourceObject | None) -> Authentication | None:
    if source is None or source.mistakes or not isinstance(source.decoded, GatewayConfig):
        return None
    return source.decoded.spec.authentication


def _document(source: SourceObject | None, spec: Mapping[str, Any]) -> bytes:
    return to_canonical_json({**_DEFAULT, "spec": spec}) if source is None else source.document(spec)
