# SPDX-License-Identifier: Apache-2.0
"""The GatewayConfig of the directory: the object in effect, with the listeners of Gateways and what Secrets hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.credentials import SecretContent, resolve, secrets_of
from controller.gateway.compile.policies import failure_mode
from controller.gateway.compile.secrets import Pointed, Pointer
from controller.gateway.compile.sources import Source, to_bytes
from extproc.api.decode import decode
from extproc.api.documents import Document
from extproc.api.gateway_config import GatewayConfig
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.api.authentication import Authentication

_DEFAULT: Final = {"apiVersion": API_VERSION, "kind": "GatewayConfig", "metadata": {"name": "default"}}


class GatewayDocument(msgspec.Struct, frozen=True, kw_only=True):
    """``missing``: keys and key sets of Secrets that cannot be had. ``note``: what is served otherwise than asked for.
    ``refused``: why it must not be served; empty if it may be.
    """

    content: bytes
    missing: tuple[str, ...] = ()
    note: str = ""
    refused: str = ""
    pointers: frozenset[Pointer] = frozenset()


class GatewayDocuments:
    """Makes the document anew only when something of it has changed. ``pointed``: what a pointer points to, if
    known.
    """

    def __init__(self, pointed: Callable[[Pointer], Pointed | None]) -> None:
        self._pointed = pointed
        self._last: tuple[object, GatewayDocument] | None = None

    def make(
        self, source: Source | None, listeners: Sequence[Mapping[str, Any]] | None, *, has_policies: bool
    ) -> GatewayDocument:
        """``source``: None for the defaults. ``listeners``: None if there is no Gateway, and it has its own."""
        authentication = _authentication(source)
        namespace = "" if source is None else source.namespace
        pointers = frozenset(Pointer("Secret", key) for key in secrets_of(authentication, namespace))
        secrets = {one.key: found for one in pointers if (found := self._pointed(one)) is not None}
        given = source, listeners, has_policies, secrets
        if self._last is None or self._last[0] != given:
            made = _make(source, listeners, secrets, has_policies=has_policies)
            self._last = given, msgspec.structs.replace(made, pointers=pointers)
        return self._last[1]


def _make(
    source: Source | None,
    listeners: Sequence[Mapping[str, Any]] | None,
    secrets: Mapping[str, Pointed],
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
        found = resolve(spec["authentication"], authentication, source.namespace, contents)
        spec["authentication"], missing = found.authentication, found.problems
    content = _document(source, spec)
    decoded, mistakes = decode(Document("", content.decode(), is_json=True))
    if not isinstance(decoded, GatewayConfig) or mistakes:
        said = "; ".join(f"{one.path}: {one.message}" for one in mistakes)
        return GatewayDocument(content=content, missing=missing, refused=said)
    mode, note = failure_mode(spec, decoded.spec, has_policies=has_policies)
    if note:
        content = _document(source, {**spec, "failureMode": mode})
    return GatewayDocument(content=content, missing=missing, note=note)


def _authentication(source: Source | None) -> Authentication | None:
    if source is None or source.mistakes or not isinstance(source.decoded, GatewayConfig):
        return None
    return source.decoded.spec.authentication


def _document(source: Source | None, spec: Mapping[str, Any]) -> bytes:
    return to_bytes({**_DEFAULT, "spec": spec}) if source is None else source.document(spec)
