# SPDX-License-Identifier: Apache-2.0
"""All Gateways of a role: their addresses and listeners, and what each says of itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.addresses import Assigned, assign
from controller.gateway.compile.gateway_api.features import FEATURES
from controller.gateway.compile.gateway_api.listeners import Claims, ListenerResult, compile_listeners
from controller.gateway.compile.gateway_api.objects import Gateway
from controller.kube.conditions import Wanted, WantedList, WantedStatus, fails, holds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.gateway.compile.gateway_api.objects import GatewayClass
    from controller.gateway.compile.gateway_api.settings import GatewayApiSettings
    from controller.gateway.compile.gateway_api.tls import TlsCompiler

# As many as a GatewayConfig may have.
MOST_LISTENERS: Final = 256
_TOO_MANY: Final = (
    f"older Gateways have all {MOST_LISTENERS} listeners that one Envoy gets; run another role with --gateway"
)


class GatewayResult(msgspec.Struct, frozen=True, kw_only=True):
    """``refused``: why the Gateway is not Accepted, or not Programmed, beyond its listeners."""

    gateway: Gateway
    assigned: Assigned
    listeners: tuple[ListenerResult, ...]
    refused: Wanted | None = None

    def status(self, attached: Mapping[str, int]) -> WantedStatus:
        """``attached``: how many routes are attached, by the names of listeners."""
        entries = tuple(one.entry(attached.get(one.name, 0), self._why_not(one)) for one in self.listeners)
        published = [{"type": type_, "value": value} for type_, value in self.assigned.published]
        identity = self.gateway.identity
        return WantedStatus(
            kind="Gateway",
            key=identity.key,
            generation=identity.generation,
            conditions=(self._accepted(), self._programmed(), self._resolved()),
            fields={"addresses": published},
            lists=(WantedList(name="listeners", entries=entries),),
            is_plain=True,
        )

    def _accepted(self) -> Wanted:
        if self.refused is not None and self.refused.type == "Accepted":
            return self.refused
        bad = [one for one in self.listeners if not one.is_open]
        if not bad:
            return holds("Accepted")
        said = "; ".join(f"listener {one.spec.name} is not accepted: {one.accepted.message}" for one in bad)
        if len(bad) == len(self.listeners):
            return fails("Accepted", "ListenersNotValid", said)
        return Wanted("Accepted", "True", "ListenersNotValid", said)

    def _programmed(self) -> Wanted:
        if self.refused is not None:
            return self.refused if self.refused.type == "Programmed" else fails("Programmed", "Invalid", _NOT_ACCEPTED)
        if any(one.document for one in self.listeners):
            return holds("Programmed")
        return fails("Programmed", "Invalid", "none of its listeners can be served")

    def _resolved(self) -> Wanted:
        bad = [one for one in self.listeners if one.resolved.status != "True"]
        if not bad:
            return holds("ResolvedRefs")
        said = "; ".join(f"listener {one.spec.name}: {one.resolved.message}" for one in bad)
        return fails("ResolvedRefs", "ListenersNotResolved", said)

    def _why_not(self, listener: ListenerResult) -> str:
        if not listener.is_open:
            return listener.accepted.message
        if listener.resolved.status != "True":
            return listener.resolved.message
        if listener.refused:
            return listener.refused
        return _NOT_ACCEPTED if self.refused is None else self.refused.message


_RELEASE: Final = re.compile(r"v(\d+)\.(\d+)\.")
_OLDEST_MINOR: Final = 1
_NEWEST_MINOR: Final = 6
_NOT_ACCEPTED: Final = "the Gateway is not served"


def compile_gateways(
    gateways: Sequence[Gateway],
    settings: GatewayApiSettings,
    published: tuple[tuple[str, str], ...],
    problems: Mapping[str, str],
    tls: TlsCompiler,
    *,
    needs_certificates: bool,
) -> dict[str, GatewayResult]:
    """By key. ``gateways``: the oldest first. ``published``: addresses for statuses, if they are not the bound ones.
    ``problems``: with what Gateways refer to as parameters. ``needs_certificates``: callers are identified by client
    certificates, so that only listeners that ask for them are served.
    """
    usable = [one for one in gateways if one.identity.key not in problems]
    assigned = assign(usable, settings, published)
    claims = Claims()
    results = {}
    count = 0
    for gateway in gateways:
        key = gateway.identity.key
        found = assigned.get(key, Assigned())
        refused = found.refused
        if key in problems:
            refused = fails("Accepted", "InvalidParameters", problems[key])
        if count + len(gateway.spec.listeners) > MOST_LISTENERS:
            refused = refused or fails("Programmed", "NoResources", _TOO_MANY)
        address = "" if refused is not None else found.bind
        listeners = compile_listeners(gateway, address, settings.port_offset, tls, claims)
        if needs_certificates:
            listeners = tuple(one.asking_for_certificates() for one in listeners)
        count += sum(one.document is not None for one in listeners)
        results[key] = GatewayResult(gateway=gateway, assigned=found, listeners=listeners, refused=refused)
    return results


def listener_documents(results: Mapping[str, GatewayResult]) -> list[Mapping[str, Any]]:
    """The ``listeners`` of the GatewayConfig."""
    return [one.document for result in results.values() for one in result.listeners if one.document is not None]


def class_status(one: GatewayClass, problem: str, release: str | None) -> WantedStatus:
    """Of a GatewayClass of ours. ``problem``: with its parametersRef. ``release``: of the Gateway API whose definitions
    are installed; None: it is not known.
    """
    conditions = [fails("Accepted", "InvalidParameters", problem) if problem else holds("Accepted")]
    if release is not None:
        conditions.append(_supported(release))
    return WantedStatus(
        kind="GatewayClass",
        key=one.identity.key,
        generation=one.identity.generation,
        conditions=tuple(conditions),
        fields={"supportedFeatures": [{"name": name} for name in FEATURES]},
        is_plain=True,
    )


def _supported(release: str) -> Wanted:
    found = _RELEASE.match(release)
    if found and found[1] == "1" and _OLDEST_MINOR <= int(found[2]) <= _NEWEST_MINOR:
        return holds("SupportedVersion")
    known = f"releases 1.{_OLDEST_MINOR} to 1.{_NEWEST_MINOR} are known"
    said = f"the definitions are of release {release or 'unknown'}, {known}; Gateways are served as far as they go"
    return fails("SupportedVersion", "UnsupportedVersion", said)
