# SPDX-License-Identifier: Apache-2.0
"""All Gateways of a role: the settings of the role, addresses, the GatewayConfig in effect, and their statuses."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from controller.gateway.compile.gateway_api.listeners import ListenerClaims, ListenerResult, compile_listeners
from controller.gateway.compile.gateway_api.resource_types import Gateway
from controller.kube.conditions import WantedCondition, WantedStatus, WantedStatusList, condition_false, condition_true
from extproc.api.spec import API_VERSION, object_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from controller.gateway.compile.gateway_api.listeners import TlsCompiler
    from controller.gateway.compile.gateway_api.resource_types import GatewayClass, Reference

ANY: Final = "0.0.0.0"  # noqa: S104 - a gateway is there to be reached
# More addresses than a machine has; a range that is larger was a mistake.
_MOST_ADDRESSES: Final = 1024
# Sorted, as the Gateway API requires.
FEATURES: Final = (
    "GRPCRoute",
    "GRPCRouteNamedRouteRule",
    "Gateway",
    "GatewayAddressEmpty",
    "GatewayFrontendClientCertificateValidation",
    "GatewayHTTPListenerIsolation",
    "GatewayHTTPSListenerDetectMisdirectedRequests",
    "GatewayPort8080",
    "GatewayStaticAddresses",
    "HTTPRoute",
    "HTTPRoute303RedirectStatusCode",
    "HTTPRoute307RedirectStatusCode",
    "HTTPRoute308RedirectStatusCode",
    "HTTPRouteBackendProtocolH2C",
    "HTTPRouteBackendProtocolWebSocket",
    "HTTPRouteBackendRequestHeaderModification",
    "HTTPRouteBackendTimeout",
    "HTTPRouteCORS",
    "HTTPRouteDestinationPortMatching",
    "HTTPRouteHostRewrite",
    "HTTPRouteMethodMatching",
    "HTTPRouteNamedRouteRule",
    "HTTPRouteParentRefPort",
    "HTTPRoutePathRedirect",
    "HTTPRoutePathRewrite",
    "HTTPRoutePortRedirect",
    "HTTPRouteQueryParamMatching",
    "HTTPRouteRequestMirror",
    "HTTPRouteRequestMultipleMirrors",
    "HTTPRouteRequestPercentageMirror",
    "HTTPRouteRequestTimeout",
    "HTTPRouteResponseHeaderModification",
    "HTTPRouteSchemeRedirect",
    "ReferenceGrant",
)
_GROUP = API_VERSION.partition("/")[0]
_IP: Final = "IPAddress"
_HOSTNAME: Final = "Hostname"
# As many as a GatewayConfig may have.
MOST_LISTENERS: Final = 256
_TOO_MANY: Final = (
    f"older Gateways have all {MOST_LISTENERS} listeners that one Envoy gets; run another role with --gateway"
)
_RELEASE: Final = re.compile(r"v(\d+)\.(\d+)\.")
_OLDEST_MINOR: Final = 1
_NEWEST_MINOR: Final = 6
_NOT_ACCEPTED: Final = "the Gateway is not served"


class GatewayApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``gateway``: the one Gateway to serve, as ``namespace/name``; None: all of our classes. ``bind``: addresses that
    Envoy binds; with several, each Gateway gets one of its own while there are enough. ``advertise``: the address in
    statuses instead: an IP address, a host name, or ``service/NAMESPACE/NAME``; empty: the bound addresses.
    ``port_offset`` is added to the ports of listeners, so that Envoy need not bind ports below 1024.
    """

    gateway: str | None = None
    bind: tuple[str, ...] = (ANY,)
    advertise: str = ""
    port_offset: int = 0

    @property
    def advertised_service(self) -> str:
        """The Service whose addresses are advertised, as ``namespace/name``; empty if there is none."""
        return self.advertise.removeprefix("service/") if self.advertise.startswith("service/") else ""


def parse_addresses(text: str) -> tuple[str, ...]:
    """The addresses of ``IP[,IP...]`` or of a range such as ``127.0.2.0/24``; raises ValueError with what to write."""
    found: list[str] = []
    for part in text.split(","):
        try:
            network = ipaddress.ip_network(part.strip())
        except ValueError:
            advice = "write IP addresses with commas between them, or a range such as 127.0.2.0/24"
            raise ValueError(f"'{part}' is not an address; {advice}") from None
        if network.num_addresses > _MOST_ADDRESSES:
            raise ValueError(f"'{part}' has more than {_MOST_ADDRESSES} addresses; write a smaller range")
        found += [str(one) for one in (network.hosts() if network.num_addresses > 1 else network)]
    return tuple(dict.fromkeys(found))


class GatewayConfigLookup(Protocol):
    """Compiled GatewayConfigs, by key."""

    def problem(self, key: str) -> str:
        """Why it cannot be used; empty if it can."""

    def needs_client_certificates(self, key: str | None) -> bool:
        """Whether callers are identified by client certificates."""

    def transformer_listener_port(self, key: str | None) -> int | None:
        """Where Envoy listens for transformers and explainers; None: nowhere."""


class GatewayConfigChoice(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: of the GatewayConfig in effect, None for the defaults. ``problems``: why Gateways, by key, cannot
    have what they refer to. ``named``: every GatewayConfig that is referred to.
    """

    config: str | None = None
    problems: Mapping[str, str] = {}
    named: frozenset[str] = frozenset()


def choose_parameters(
    gateways: Sequence[Gateway],
    classes: Mapping[str, GatewayClass],
    given: str | None,
    problem_of: Callable[[str], str],
) -> GatewayConfigChoice:
    """``gateways``: the oldest first. ``given``: the GatewayConfig of the role's options. ``problem_of``: why a
    GatewayConfig cannot be used, empty if it can.

    There is one Envoy, and it has one configuration: of Gateways that refer to different ones, the oldest decides.
    """
    config, owner = given, "--gateway-config"
    problems: dict[str, str] = {}
    named: set[str] = set()
    for gateway in gateways:
        reference, namespace = _reference(gateway, classes)
        if reference is None:
            continue
        if (reference.group, reference.kind) != (_GROUP, "GatewayConfig"):
            problems[gateway.identity.key] = (
                f"parametersRef names {reference.group}/{reference.kind}; name a GatewayConfig of {_GROUP}"
            )
            continue
        key = object_key(reference.namespace or namespace, reference.name)
        named.add(key)
        problem = problem_of(key)
        if not problem and config not in (None, key):
            problem = f"one Envoy has one GatewayConfig, and {owner} says {config}; run another role with --gateway"
        if problem:
            problems[gateway.identity.key] = f"GatewayConfig {key}: {problem}"
        elif config is None:
            config, owner = key, f"the older Gateway {gateway.identity.key}"
    return GatewayConfigChoice(config=config, problems=problems, named=frozenset(named))


def class_parameters_problem(one: GatewayClass, problem_of: Callable[[str], str]) -> str:
    """Why the parametersRef of a GatewayClass cannot be used; empty if it can, or there is none."""
    reference = one.spec.parameters_ref
    if reference is None:
        return ""
    if (reference.group, reference.kind) != (_GROUP, "GatewayConfig") or reference.namespace is None:
        return f"parametersRef must name a GatewayConfig of {_GROUP}, with its namespace"
    return problem_of(object_key(reference.namespace, reference.name))


def _reference(gateway: Gateway, classes: Mapping[str, GatewayClass]) -> tuple[Reference | None, str]:
    """The Gateway's own reference takes precedence over its class's; with the default namespace if it has none."""
    own = gateway.spec.infrastructure.parameters_ref
    if own is not None:
        return own, gateway.identity.namespace
    return classes[gateway.spec.gateway_class_name].spec.parameters_ref, ""


class AssignedAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """``bind``: where Envoy listens for the Gateway. ``published``: type and value of the addresses in its status.
    ``refused``: a condition Accepted or Programmed that is False because of addresses; then nothing is bound.
    """

    bind: str = ""
    published: tuple[tuple[str, str], ...] = ()
    refused: WantedCondition | None = None


def advertised_addresses(settings: GatewayApiSettings, service: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Type and value of the addresses that statuses have in place of bound ones. ``service``: addresses of the
    advertised Service.
    """
    if settings.advertised_service:
        return tuple(_typed(one) for one in service)
    return (_typed(settings.advertise),) if settings.advertise else ()


def assign_addresses(
    gateways: Sequence[Gateway], settings: GatewayApiSettings, published: tuple[tuple[str, str], ...]
) -> dict[str, AssignedAddresses]:
    """By the Gateways' keys. ``gateways``: the oldest first. ``published``: what takes the place of bound addresses."""
    found: dict[str, AssignedAddresses] = {}
    rest: list[Gateway] = []
    for gateway in gateways:
        refused = _refusal(gateway, settings, published)
        wanted = _requested(gateway)
        if refused is not None:
            found[gateway.identity.key] = AssignedAddresses(refused=refused)
        elif wanted and _is_set(settings) and wanted[0] in settings.bind:
            found[gateway.identity.key] = _assigned(wanted[0], published)
        else:
            rest.append(gateway)
    used = Counter(one.bind for one in found.values() if one.bind)
    for gateway in rest:
        # the one that it has, before those that have none yet choose
        for address in gateway.assigned:
            if address in settings.bind and not used[address]:
                found[gateway.identity.key] = _assigned(address, published)
                used[address] += 1
                break
    for gateway in rest:
        if gateway.identity.key not in found:
            address = min(settings.bind, key=lambda one: used[one])
            found[gateway.identity.key] = _assigned(address, published)
            used[address] += 1
    return found


def _assigned(address: str, published: tuple[tuple[str, str], ...]) -> AssignedAddresses:
    if published:
        return AssignedAddresses(bind=address, published=published)
    if ipaddress.ip_address(address).is_unspecified:
        message = "there is no address to publish; give the role --advertise or --address, or look at its Service"
        return AssignedAddresses(refused=condition_false("Programmed", "AddressNotAssigned", message))
    return AssignedAddresses(bind=address, published=((_IP, address),))


def _refusal(
    gateway: Gateway, settings: GatewayApiSettings, published: tuple[tuple[str, str], ...]
) -> WantedCondition | None:
    odd = [one.type for one in gateway.spec.addresses if one.type not in (_IP, _HOSTNAME)]
    if odd:
        return condition_false(
            "Accepted", "UnsupportedAddress", f"addresses of type {', '.join(odd)} are not supported"
        )
    usable = set(settings.bind) | {value for _, value in published}
    wanted = _requested(gateway)
    strange = [one for one in wanted if one not in usable]
    if strange:
        known = ", ".join(sorted(usable))
        return condition_false("Programmed", "AddressNotUsable", f"{', '.join(strange)} is not one of {known}")
    if len(wanted) > 1 and _is_set(settings):
        return condition_false("Programmed", "AddressNotUsable", "a Gateway has one address; ask for one of them")
    return None


def _requested(gateway: Gateway) -> list[str]:
    return [one.value for one in gateway.spec.addresses if one.value]


def _is_set(settings: GatewayApiSettings) -> bool:
    """Whether Gateways can have addresses of their own."""
    return not all(ipaddress.ip_address(one).is_unspecified for one in settings.bind)


def _typed(text: str) -> tuple[str, str]:
    try:
        return _IP, str(ipaddress.ip_address(text))
    except ValueError:
        return _HOSTNAME, text


class GatewayResult(msgspec.Struct, frozen=True, kw_only=True):
    """``refused``: why the Gateway is not Accepted, or not Programmed, beyond its listeners."""

    gateway: Gateway
    assigned: AssignedAddresses
    listeners: tuple[ListenerResult, ...]
    refused: WantedCondition | None = None

    def status(self, attached: Mapping[str, int]) -> WantedStatus:
        """``attached``: how many routes are attached, by the names of listeners."""
        entries = tuple(one.status_entry(attached.get(one.name, 0), self._why_not(one)) for one in self.listeners)
        published = [{"type": type_, "value": value} for type_, value in self.assigned.published]
        identity = self.gateway.identity
        return WantedStatus(
            kind="Gateway",
            key=identity.key,
            generation=identity.generation,
            conditions=(self._accepted(), self._programmed(), self._resolved()),
            fields={"addresses": published},
            lists=(WantedStatusList(name="listeners", entries=entries),),
            is_plain=True,
        )

    def _accepted(self) -> WantedCondition:
        if self.refused is not None and self.refused.type == "Accepted":
            return self.refused
        bad = [one for one in self.listeners if not one.is_open]
        if not bad:
            return condition_true("Accepted")
        message = "; ".join(f"listener {one.spec.name} is not accepted: {one.accepted.message}" for one in bad)
        if len(bad) == len(self.listeners):
            return condition_false("Accepted", "ListenersNotValid", message)
        return WantedCondition("Accepted", "True", "ListenersNotValid", message)

    def _programmed(self) -> WantedCondition:
        if self.refused is not None:
            return (
                self.refused
                if self.refused.type == "Programmed"
                else condition_false("Programmed", "Invalid", _NOT_ACCEPTED)
            )
        if any(one.document for one in self.listeners):
            return condition_true("Programmed")
        return condition_false("Programmed", "Invalid", "none of its listeners can be served")

    def _resolved(self) -> WantedCondition:
        bad = [one for one in self.listeners if one.resolved.status != "True"]
        if not bad:
            return condition_true("ResolvedRefs")
        message = "; ".join(f"listener {one.spec.name}: {one.resolved.message}" for one in bad)
        return condition_false("ResolvedRefs", "ListenersNotResolved", message)

    def _why_not(self, listener: ListenerResult) -> str:
        if not listener.is_open:
            return listener.accepted.message
        if listener.resolved.status != "True":
            return listener.resolved.message
        if listener.refused:
            return listener.refused
        return _NOT_ACCEPTED if self.refused is None else self.refused.message


def compile_gateways(
    gateways: Sequence[Gateway],
    settings: GatewayApiSettings,
    published: tuple[tuple[str, str], ...],
    problems: Mapping[str, str],
    tls: TlsCompiler,
    *,
    needs_certificates: bool,
    steps_port: int | None = None,
) -> dict[str, GatewayResult]:
    """By key. ``gateways``: the oldest first. ``published``: addresses for statuses, if they are not the bound ones.
    ``problems``: of the parameters that Gateways refer to. ``needs_certificates``: callers are identified by client
    certificates, so only listeners that require them are served. ``steps_port``: where Envoy listens for transformers
    and explainers.
    """
    usable = [one for one in gateways if one.identity.key not in problems]
    assigned = assign_addresses(usable, settings, published)
    claims = ListenerClaims(None if steps_port is None else steps_port - settings.port_offset)
    results = {}
    count = 0
    for gateway in gateways:
        key = gateway.identity.key
        found = assigned.get(key, AssignedAddresses())
        refused = found.refused
        if key in problems:
            refused = condition_false("Accepted", "InvalidParameters", problems[key])
        if count + len(gateway.spec.listeners) > MOST_LISTENERS:
            refused = refused or condition_false("Programmed", "NoResources", _TOO_MANY)
        address = "" if refused is not None else found.bind
        listeners = compile_listeners(gateway, address, settings.port_offset, tls, claims)
        if needs_certificates:
            listeners = tuple(one.require_client_certificates() for one in listeners)
        count += sum(one.document is not None for one in listeners)
        results[key] = GatewayResult(gateway=gateway, assigned=found, listeners=listeners, refused=refused)
    return results


def listener_documents(results: Mapping[str, GatewayResult]) -> list[Mapping[str, Any]]:
    """The ``listeners`` of the GatewayConfig."""
    return [one.document for result in results.values() for one in result.listeners if one.document is not None]


def class_status(one: GatewayClass, problem: str, release: str | None) -> WantedStatus:
    """Of a GatewayClass of ours. ``problem``: with its parametersRef. ``release``: of the installed Gateway API
    definitions; None: unknown.
    """
    conditions = [condition_false("Accepted", "InvalidParameters", problem) if problem else condition_true("Accepted")]
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


def _supported(release: str) -> WantedCondition:
    found = _RELEASE.match(release)
    if found and found[1] == "1" and _OLDEST_MINOR <= int(found[2]) <= _NEWEST_MINOR:
        return condition_true("SupportedVersion")
    known = f"releases 1.{_OLDEST_MINOR} to 1.{_NEWEST_MINOR} are known"
    message = f"the definitions are of release {release or 'unknown'}, {known}; Gateways are served as far as they go"
    return condition_false("SupportedVersion", "UnsupportedVersion", message)
