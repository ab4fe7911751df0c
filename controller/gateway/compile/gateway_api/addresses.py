# SPDX-License-Identifier: Apache-2.0
"""Which address each Gateway gets: one of its own where there are enough, and the same one as before."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.conditions import Wanted, fails

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.gateway.compile.gateway_api.objects import Gateway
    from controller.gateway.compile.gateway_api.settings import GatewayApiSettings

_IP: Final = "IPAddress"
_HOSTNAME: Final = "Hostname"


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """``bind``: where Envoy listens for the Gateway. ``published``: type and value of what its status says.
    ``refused``: a condition Accepted or Programmed that is False because of addresses; then nothing is bound.
    """

    bind: str = ""
    published: tuple[tuple[str, str], ...] = ()
    refused: Wanted | None = None


def advertised(settings: GatewayApiSettings, service: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Type and value of what statuses say in place of bound addresses. ``service``: addresses of the advertised one."""
    if settings.advertised_service:
        return tuple(_typed(one) for one in service)
    return (_typed(settings.advertise),) if settings.advertise else ()


def assign(
    gateways: Sequence[Gateway], settings: GatewayApiSettings, published: tuple[tuple[str, str], ...]
) -> dict[str, Assigned]:
    """By the Gateways' keys. ``gateways``: the oldest first. ``published``: what takes the place of bound addresses."""
    found: dict[str, Assigned] = {}
    rest: list[Gateway] = []
    for gateway in gateways:
        refused = _refusal(gateway, settings, published)
        wanted = _requested(gateway)
        if refused is not None:
            found[gateway.identity.key] = Assigned(refused=refused)
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


def _assigned(address: str, published: tuple[tuple[str, str], ...]) -> Assigned:
    if published:
        return Assigned(bind=address, published=published)
    if ipaddress.ip_address(address).is_unspecified:
        said = "there is no address to publish; give the role --advertise or --address, or look at its Service"
        return Assigned(refused=fails("Programmed", "AddressNotAssigned", said))
    return Assigned(bind=address, published=((_IP, address),))


def _refusal(gateway: Gateway, settings: GatewayApiSettings, published: tuple[tuple[str, str], ...]) -> Wanted | None:
    odd = [one.type for one in gateway.spec.addresses if one.type not in (_IP, _HOSTNAME)]
    if odd:
        return fails("Accepted", "UnsupportedAddress", f"addresses of type {', '.join(odd)} are not supported")
    usable = set(settings.bind) | {value for _, value in published}
    wanted = _requested(gateway)
    strange = [one for one in wanted if one not in usable]
    if strange:
        known = ", ".join(sorted(usable))
        return fails("Programmed", "AddressNotUsable", f"{', '.join(strange)} is not one of {known}")
    if len(wanted) > 1 and _is_set(settings):
        return fails("Programmed", "AddressNotUsable", "a Gateway has one address; ask for one of them")
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
