# SPDX-License-Identifier: Apache-2.0
"""Checks of a document beyond its shape: addresses, expressions, related fields."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from extproc.config.admission_validation import check_authentication, check_flow_control, check_limits, check_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.errors import Finding, Path
    from extproc.config.types import GatewayConfigSpec, ModelMatch, ModelRouteSpec, ModelServerSpec, StringMatch


def check_server(spec: ModelServerSpec) -> Iterator[Finding]:
    """Endpoint addresses are ``ip:port`` and differ; no field is without effect."""
    if (spec.listed is None) == (spec.workload_selector is None):
        yield ("spec",), "write endpoints or, in a cluster, workloadSelector, one of the two"
    if (spec.workload_selector is None) != (spec.workload_port is None):
        yield ("spec",), "workloadSelector and workloadPort go together; write both or neither"
    seen: set[str] = set()
    for index, endpoint in enumerate(spec.endpoints):
        path: Path = ("spec", "endpoints", index, "address")
        yield from _check_address(endpoint.address, path)
        if endpoint.address in seen:
            yield path, f"'{endpoint.address}' is listed twice; write each engine once"
        seen.add(endpoint.address)
        for name, address in (("kvEvents", endpoint.kv_events), ("kvReplay", endpoint.kv_replay)):
            if address is not None:
                yield from _check_address(address, ("spec", "endpoints", index, name))
    if spec.picker_config is not None and spec.pd_group is not None:
        yield ("spec", "pdGroup"), "has no effect beside pickerConfig; set groupKey of its disagg-profile-handler"
    if spec.flow_control is not None:
        yield from check_flow_control(spec.flow_control)


def check_route(spec: ModelRouteSpec) -> Iterator[Finding]:
    """A client can ask for it, every rule can be reached and has a target, and its expressions compile."""
    if spec.model_name is None and not spec.lora_adapters:
        yield ("spec",), "no client can ask for this route; write modelName, loraAdapters or both"
    yield from check_limits(spec.rate_limits)
    for number, rule in enumerate(spec.rules):
        path: Path = ("spec", "rules", number)
        if not any(target.weight for target in rule.target_models):
            yield (*path, "targetModels"), "all weights are 0, so nothing could be chosen; give one a positive weight"
        if rule.model_match is not None:
            yield from _check_matches(rule.model_match, (*path, "modelMatch"))
        elif number < len(spec.rules) - 1:
            yield path, "has no modelMatch, so the rules after it are never reached; write it last"


def check_gateway(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Addresses parse, and authentication is well formed."""
    yield from _check_address(spec.listen, ("spec", "listen"))
    yield from _check_address(spec.admin, ("spec", "admin"))
    if not spec.extproc.startswith("unix:"):
        yield from _check_address(spec.extproc, ("spec", "extproc"))
    if spec.authentication is not None:
        yield from check_authentication(spec.authentication)
    yield from check_tenants(spec.tenants)


def parse_address(text: str) -> tuple[str, int]:
    """IP address and port of ``127.0.0.1:8000`` or ``[::1]:8000``."""
    host, separator, port = text.rpartition(":")
    advice = f"'{text}' is not an address; write an IP address and a port, such as 127.0.0.1:8000 or [::1]:8000"
    if not separator or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(advice)
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        raise ValueError(advice) from None
    if is_bracketed != (ip.version == 6):
        raise ValueError(advice)
    return str(ip), int(port)


def worker_addresses(address: str, workers: int) -> list[str]:
    """Where the workers listen: the next ports, or numbered socket files; a single one as it is."""
    if workers == 1:
        return [address]
    if address.startswith("unix:"):
        return [f"{address}.{number}" for number in range(workers)]
    host, _, port = address.rpartition(":")
    return [f"{host}:{int(port) + number}" for number in range(workers)]


def _check_address(text: str, path: Path) -> Iterator[Finding]:
    try:
        parse_address(text)
    except ValueError as error:
        yield path, str(error)


def _check_matches(given: ModelMatch, path: Path) -> Iterator[Finding]:
    for header, match in given.headers.items():
        yield from _check_match(match, (*path, "headers", header))
    if given.uri is not None:
        yield from _check_match(given.uri, (*path, "uri"))


def _check_match(match: StringMatch, path: Path) -> Iterator[Finding]:
    given = [name for name in ("exact", "prefix", "regex") if getattr(match, name) is not None]
    if len(given) != 1:
        yield path, f"has {' and '.join(given) or 'no condition'}; write exactly one of exact, prefix, regex"
    if match.regex is not None:
        try:
            re.compile(match.regex)
        except (re.error, RecursionError, OverflowError) as error:
            yield (*path, "regex"), f"not a regular expression: {error}; mend it or use exact or prefix"
