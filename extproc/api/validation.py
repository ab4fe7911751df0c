# SPDX-License-Identifier: Apache-2.0
"""Checks of a document beyond its shape: addresses, expressions, related fields."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from extproc.api.admission_validation import check_authentication, check_flow_control, check_limits, check_tenants
from extproc.api.advice import no_address
from extproc.api.header_validation import check_answer_header, check_header_name, check_matches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.activation import Activation
    from extproc.api.adapter_loading import AdapterLoading
    from extproc.api.backend import BackendSpec
    from extproc.api.errors import Finding, Path
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.model_route import ModelRouteSpec
    from extproc.api.model_server import ModelServerSpec, TrafficPolicy
    from extproc.api.quantities import Duration

# Protocol buffers hold no duration of more than 10,000 years, and Envoy multiplies some; nobody waits for a year.
_LONGEST_S: Final = 366 * 86400.0
# Envoy counts milliseconds.
_SHORTEST_S: Final = 0.001
# What Envoy takes as the time for one message to extproc.
LONGEST_MESSAGE_S: Final = 3600.0
_LARGEST_BODY: Final = 2**32 - 1
# The address of a socket file has 108 bytes, and the numbers of workers need some.
_LONGEST_SOCKET: Final = 100
_LABEL: Final = r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_HOSTNAME: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_HOSTNAME: Final = 253


def check_server(spec: ModelServerSpec) -> Iterator[Finding]:
    """Endpoint addresses are ``ip:port`` or ``name:port`` and differ; no field is without effect."""
    if (spec.listed is None) == (spec.workload_selector is None):
        yield ("spec",), "write endpoints or, in a cluster, workloadSelector, one of the two"
    if (spec.workload_selector is None) != (spec.workload_port is None):
        yield ("spec",), "workloadSelector and workloadPort go together; write both or neither"
    seen: set[str] = set()
    for index, endpoint in enumerate(spec.endpoints):
        path: Path = ("spec", "endpoints", index, "address")
        yield from _check_endpoint(endpoint.address, path)
        if endpoint.address in seen:
            yield path, f"'{endpoint.address}' is listed twice; write each engine once"
        seen.add(endpoint.address)
        for name, address in (("kvEvents", endpoint.kv_events), ("kvReplay", endpoint.kv_replay)):
            if address is not None:
                yield from _check_endpoint(address, ("spec", "endpoints", index, name))
    if spec.picker_config is not None and spec.pd_group is not None:
        yield ("spec", "pdGroup"), "has no effect beside pickerConfig; set groupKey of its disagg-profile-handler"
    if spec.cache_scope_header is not None:
        yield from check_header_name(spec.cache_scope_header, ("spec", "cacheScopeHeader"))
    yield from _check_adapters(spec, spec.adapter_loading)
    yield from _check_activation(spec.activation)
    if spec.flow_control is not None:
        yield from check_header_name(spec.flow_control.session_header, ("spec", "flowControl", "sessionHeader"))
        yield from check_flow_control(spec.flow_control)
    yield from _check_traffic(spec.traffic_policy, ("spec", "trafficPolicy"))


def _check_adapters(spec: ModelServerSpec, loading: AdapterLoading | None) -> Iterator[Finding]:
    """Who loads can be asked, each adapter has one source, and none has the base model's name."""
    if loading is None:
        return
    path: Path = ("spec", "adapterLoading")
    if spec.pd_group is not None:
        yield path, "has no effect beside pdGroup: adapters are loaded where one engine does both prefill and decode"
    if loading.port is None and spec.engine != "vLLM":
        yield path, f"{spec.engine} is asked to load nothing; write port, of the runtime agents beside the engines"
    yield from _check_duration(loading.timeout, (*path, "timeout"), longest_s=LONGEST_MESSAGE_S)
    seen: set[str] = set()
    for index, adapter in enumerate(loading.adapters):
        place = (*path, "adapters", index, "name")
        if adapter.name in seen:
            yield place, f"'{adapter.name}' is listed twice; write each adapter once"
        if adapter.name == spec.model:
            yield place, f"'{adapter.name}' is the base model; give the adapter another name"
        seen.add(adapter.name)


def _check_activation(activation: Activation | None) -> Iterator[Finding]:
    """Envoy can wait as long."""
    if activation is not None:
        path: Path = ("spec", "activation")
        yield from _check_duration(activation.hold_timeout, (*path, "holdTimeout"), longest_s=LONGEST_MESSAGE_S)
        yield from _check_duration(activation.start_time, (*path, "startTime"))


def check_route(spec: ModelRouteSpec) -> Iterator[Finding]:
    """A client can ask for it, every rule can be reached and has a target, and its expressions compile."""
    if spec.model_name is None and not spec.lora_adapters:
        yield ("spec",), "no client can ask for this route; write modelName, loraAdapters or both"
    yield from check_limits(spec.rate_limits)
    for index, limit in enumerate(spec.rate_limits):
        if limit.header is not None:
            yield from check_header_name(limit.header, ("spec", "rateLimits", index, "header"))
    for number, rule in enumerate(spec.rules):
        path: Path = ("spec", "rules", number)
        if not any(target.weight for target in rule.target_models):
            yield (*path, "targetModels"), "all weights are 0, so nothing could be chosen; give one a positive weight"
        if rule.model_match is not None:
            yield from check_matches(rule.model_match, (*path, "modelMatch"))
        elif number < len(spec.rules) - 1:
            yield path, "has no modelMatch, so the rules after it are never reached; write it last"


def check_backend(spec: BackendSpec) -> Iterator[Finding]:
    """Addresses are ``ip:port`` or ``name:port`` and differ."""
    seen: set[str] = set()
    for index, endpoint in enumerate(spec.endpoints):
        path: Path = ("spec", "endpoints", index)
        yield from _check_endpoint(endpoint, path)
        if endpoint in seen:
            yield path, f"'{endpoint}' is listed twice; write each server once"
        seen.add(endpoint)


def check_gateway(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Addresses parse, and authentication is well formed."""
    yield from _check_address(spec.listen, ("spec", "listen"))
    yield from _check_address(spec.admin, ("spec", "admin"))
    yield from _check_extproc_address(spec.extproc, ("spec", "extproc"))
    yield from _check_duration(spec.message_timeout, ("spec", "messageTimeout"), longest_s=LONGEST_MESSAGE_S)
    yield from _check_duration(spec.access_log_flush, ("spec", "accessLogFlush"))
    yield from _check_duration(spec.request_timeout, ("spec", "requestTimeout"), shortest_s=0.0)
    if not 0 < spec.max_body_size <= _LARGEST_BODY:
        yield ("spec", "maxBodySize"), f"Envoy takes no body of {spec.max_body_size}; write a size from 1 to 4095Mi"
    if spec.max_heap == 0:
        yield ("spec", "maxHeap"), "leaves Envoy no memory; write a size such as 2Gi"
    if spec.served_header is not None:
        yield from check_answer_header(spec.served_header, ("spec", "servedHeader"))
    if spec.authentication is not None:
        yield from check_authentication(spec.authentication)
    yield from check_tenants(spec.tenants)


def parse_address(text: str) -> tuple[str, int]:
    """IP address and port of ``127.0.0.1:8000``, ``[::1]:8000`` or ``localhost:8000``; raises ValueError.

    For where a process listens, which a host name does not say. ``localhost`` is 127.0.0.1.
    """
    host, separator, port = text.rpartition(":")
    host = "127.0.0.1" if host.lower() == "localhost" else host
    advice = no_address(text, takes_names=False)
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


class HostPort(NamedTuple):
    """Where a server is. ``host``: an IP address if ``is_ip``, else a host name in lower case."""

    host: str
    port: int
    is_ip: bool


def parse_endpoint(text: str) -> HostPort:
    """``10.0.0.1:8000``, ``[::1]:8000`` or ``engine-0.example.com:8000``; raises ValueError."""
    host, _, port = text.rpartition(":")
    if is_hostname(host) and not host.rpartition(".")[2].isdigit():
        try:
            return HostPort(host.lower(), parse_address(f"127.0.0.1:{port}")[1], is_ip=False)
        except ValueError:
            pass
    try:
        return HostPort(*parse_address(text), is_ip=True)
    except ValueError:
        raise ValueError(no_address(text, takes_names=True)) from None


def parse_target(text: str) -> HostPort:
    """The same for a server that Envoy connects to by itself, for which ``localhost`` is 127.0.0.1."""
    found = parse_endpoint(text)
    return found._replace(host="127.0.0.1", is_ip=True) if found.host == "localhost" else found


def is_hostname(text: str) -> bool:
    """Whether ``text`` can be a host name, of labels that dots separate."""
    return len(text) <= _LONGEST_HOSTNAME and _HOSTNAME.fullmatch(text) is not None


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


def _check_endpoint(text: str, path: Path) -> Iterator[Finding]:
    try:
        parse_endpoint(text)
    except ValueError as error:
        yield path, str(error)


def _check_extproc_address(text: str, path: Path) -> Iterator[Finding]:
    if not text.startswith("unix:"):
        yield from _check_endpoint(text, path)
        return
    file = text.removeprefix("unix:")
    if not file or "\0" in file:
        yield path, f"{text!a} names no file; write unix:/run/attache/extproc.sock"
    elif len(file.encode()) > _LONGEST_SOCKET:
        yield path, f"the name of a socket file has at most {_LONGEST_SOCKET} bytes; write a shorter one"


def _check_traffic(policy: TrafficPolicy, path: Path) -> Iterator[Finding]:
    yield from _check_duration(policy.timeout, (*path, "timeout"), shortest_s=0.0)
    yield from _check_duration(policy.connect_timeout, (*path, "connectTimeout"))
    ejection_time = policy.outlier_detection.ejection_time
    yield from _check_duration(ejection_time, (*path, "outlierDetection", "ejectionTime"))


def _check_duration(
    duration: Duration, path: Path, *, shortest_s: float = _SHORTEST_S, longest_s: float = _LONGEST_S
) -> Iterator[Finding]:
    if not shortest_s <= duration <= longest_s:
        yield path, f"Envoy takes no {duration} here; write a time from {shortest_s:g}s to {longest_s:g}s"
