# SPDX-License-Identifier: Apache-2.0
"""GatewayConfig: Envoy's listeners, their TLS and authentication, and its connection to extproc."""

from __future__ import annotations

import ipaddress
import posixpath
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.addresses import (
    check_address,
    check_endpoint,
    is_hostname,
    parse_address,
    parse_envoy_upstream,
    worker_addresses,
)
from extproc.api.admission import CallerNames
from extproc.api.authentication import Authentication, Tenant, check_authentication, check_tenants
from extproc.api.budgets import Budgets, check_budgets
from extproc.api.engine_connection import CertificateFiles
from extproc.api.guard_services import GuardService, check_guards
from extproc.api.http_route import Cors, check_cors
from extproc.api.match_patterns import check_response_header
from extproc.api.model_server import CacheIsolation
from extproc.api.payload_log import PayloadSink, check_payload_sink
from extproc.api.quantities import LONGEST_MESSAGE_S, ByteSize, Duration, check_duration
from extproc.api.spec import CelRule, DirectoryObject, NonEmpty, Spec, list_map_keys
from extproc.api.tracing import Tracing, check_tracing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path

_LARGEST_BODY: Final = 2**32 - 1
# The address of a socket file has 108 bytes, and the numbers of workers need some.
_LONGEST_SOCKET: Final = 100
_NO_FILES: Final = ("/dev/", "/proc/", "/sys/")
_ASKS_FOR_NONE: Final = "asks for no client certificate, by which callers are identified; write tls.clientCertificates"


class ClientCertificates(Spec, frozen=True):
    """Requirements on clients' certificates. ``ca_file``: the authorities that sign them, in PEM. ``crl_file``: their
    revocation lists, one of each authority, in PEM. ``mode``: ``Require`` refuses a connection without a certificate;
    ``Optional`` checks one that is presented. The bundle's writer reloads the files.
    """

    ca_file: NonEmpty
    crl_file: NonEmpty | None = None
    mode: Literal["Require", "Optional"] = "Require"


class ListenerTls(Spec, frozen=True):
    """TLS of a listener. ``certificates``: Envoy presents the one that matches the requested name.
    ``client_certificates``: requirements on clients' certificates. ``min_version``: older versions of TLS are refused.
    """

    certificates: Annotated[tuple[CertificateFiles, ...], msgspec.Meta(min_length=1, max_length=64)]
    client_certificates: ClientCertificates | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"


class Listener(Spec, frozen=True):
    """One listener. Several may share an address if their ``hostname`` differ.

    ``name``: routes attach to it by this name (``sectionName``); in a cluster ``namespace/gateway/listener``.
    ``address``: ``ip:port``. ``hostname``: only requests to this host, which may begin with ``*.``. ``tls``: without
    it, plain HTTP.
    ``public_port``: where clients connect if it is not the port of ``address``; redirects that name no port use it.
    """

    CEL: ClassVar[tuple[CelRule, ...]] = ()

    name: Annotated[str, msgspec.Meta(pattern=patterns.LISTENER, max_length=200)]
    address: NonEmpty
    hostname: NonEmpty | None = None
    tls: ListenerTls | None = None
    public_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None

    @property
    def referenced_files(self) -> tuple[str, ...]:
        """All files that it names."""
        if self.tls is None:
            return ()
        client = self.tls.client_certificates
        checked = () if client is None else (client.ca_file, client.crl_file)
        pairs = (file for one in self.tls.certificates for file in (one.cert_file, one.key_file))
        return tuple(one for one in (*pairs, *checked) if one is not None)


class UsageLog(Spec, frozen=True):
    """The usage log. ``path``: the file to which Envoy writes a line of JSON at the end of each request. Its directory
    must exist, and Envoy must be able to write there. ``api``: where ``attache usage serve`` listens, ``ip:port`` or
    ``name:port``: Envoy takes requests for reports there, such as ``GET /v1/usage``. ``cost_header``: plain answers
    have what they cost in ``x-attache-cost-micros``; Envoy then sends them when they are whole.
    """

    path: NonEmpty
    api: NonEmpty | None = None
    cost_header: bool = False


class GatewayConfigSpec(Spec, frozen=True):
    """Envoy's listeners and its connection to extproc. At most one such document in a directory. ``listen``: the
    address to which clients connect. ``admin``: the address of Envoy's admin interface, for this machine only.
    ``extproc``: the address on which extproc listens, ``ip:port``, ``name:port`` or ``unix:/path``. ``max_body_size``:
    the largest request. ``access_log_flush``: the longest that Envoy buffers the outcomes of requests.
    """

    listen: str = "127.0.0.1:8080"
    # Several listeners, with host names and TLS; ``listen`` then has no effect.
    listeners: Annotated[
        tuple[Listener, ...], msgspec.Meta(max_length=256, extra_json_schema=list_map_keys("name"))
    ] = ()
    # Where transformers and explainers call predictors, ``ip:port``; without it, nowhere. Who reaches it needs no
    # credentials and has no limits, and reaches the ModelRoutes of these callers alone. See "Protocols".
    steps: NonEmpty | None = None
    admin: str = "127.0.0.1:9901"
    extproc: str = "127.0.0.1:9002"
    # As many processes as `extproc --workers` starts, on consecutive ports (or unix:PATH.0, unix:PATH.1, ...).
    extproc_workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Open: without extproc, Envoy balances over the engines. Close: it answers 503. If left out: Close where there are
    # rateLimits, rules by tenant or that set parameters, caches that tenants do not share, models of tenants or keys,
    # or virtualKeys, which Open would undo; else Open.
    failure_mode: Literal["Open", "Close"] | None = None
    # The longest that Envoy waits for extproc's answer to one message; the longest hold is added for requests that are
    # held.
    message_timeout: Duration = Duration("5s")
    max_body_size: ByteSize = ByteSize("16Mi")
    # Envoy's memory: near this, it resets the streams that hold most of it, then refuses requests, then connections.
    max_heap: ByteSize = ByteSize("2Gi")
    # The most that clients may have open at a time; more are closed at once.
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 20_000
    # How long a client may take to send a whole request; the longest hold is added.
    request_timeout: Duration = Duration("2m")
    access_log_flush: Duration = Duration("200ms")
    # Trusted: only gateways of our own can connect, which write tenants, users and objectives into headers and remove
    # their clients'. Untrusted: such headers are removed here.
    clients: Literal["Untrusted", "Trusted"] = "Untrusted"
    # Where Envoy answers 200 to anybody, for load balancers in front. It answers 503 while it drains, and while extproc
    # is away where failureMode is Close. An HTTPRoute that takes the path comes first. "": nowhere.
    health_path: Annotated[str, msgspec.Meta(pattern=patterns.OWN_PATH, max_length=256)] = "/healthz"
    # How Envoy identifies callers; without it everybody is the tenant "anonymous".
    authentication: Authentication | None = None
    # The origins from which scripts may use the gateway; Envoy answers their preflight requests.
    cors: Cors | None = None
    # Tenants that may not use every model.
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=10_000)] = ()
    # Hidden: no answer reports how many tokens were found in caches, which would reveal the prompts of others.
    cached_tokens: Literal["Shown", "Hidden"] = "Shown"
    # Tenants that learn from GET /v1/models/NAME how full its engines are: gateways of other regions, to which this one
    # is a provider with reportsLoad. Without it, nobody does.
    load_shown_to: CallerNames = ()
    # A header of answers that names the engine's address, for debugging; without it, clients do not learn it.
    served_header: Annotated[str, msgspec.Meta(pattern=patterns.HEADER, max_length=64)] | None = None
    # Spans of a share of all requests, for an OpenTelemetry collector; without it, none.
    tracing: Tracing | None = None
    # Which prompts share a prefix cache: those of one Tenant, of one User, with one value of a request header that
    # clients cannot choose (Header:NAME), or all (Shared). Tenant is the default where callers are authenticated, else
    # Shared.
    cache_isolation: CacheIsolation | None = None
    # The key of cache salts, for all replicas of extproc. Without it, a tenant's API keys are its key.
    cache_secret: Annotated[str, msgspec.Meta(min_length=16, max_length=512)] | None = None
    # Where Envoy writes what each request used; without it, nowhere. See "Usage".
    usage_log: UsageLog | None = None
    # Where requests and answers go that ModelRoutes log; without it, none is kept. See "The payload log".
    payload_log: PayloadSink | None = None
    # Services that ModelRoutes name (guard): each of their requests must pass. See "Guards".
    guards: Annotated[
        tuple[GuardService, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))
    ] = ()
    # Of all routes together, in calendar windows; each request must have room in all of them.
    budgets: Budgets = ()


class GatewayConfig(DirectoryObject, frozen=True, kw_only=True):
    """A GatewayConfig document."""

    spec: GatewayConfigSpec


def check_gateway(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Addresses parse, and authentication is well formed."""
    yield from _check_addresses(spec)
    yield from _check_extproc_address(spec.extproc, ("spec", "extproc"))
    yield from check_duration(spec.message_timeout, ("spec", "messageTimeout"), longest_s=LONGEST_MESSAGE_S)
    yield from check_duration(spec.access_log_flush, ("spec", "accessLogFlush"))
    yield from check_duration(spec.request_timeout, ("spec", "requestTimeout"), shortest_s=0.0)
    if not 0 < spec.max_body_size <= _LARGEST_BODY:
        yield ("spec", "maxBodySize"), f"Envoy takes no body of {spec.max_body_size}; write a size from 1 to 4095Mi"
    if spec.max_heap == 0:
        yield ("spec", "maxHeap"), "leaves Envoy no memory; write a size such as 2Gi"
    if spec.served_header is not None:
        yield from check_response_header(spec.served_header, ("spec", "servedHeader"))
    if spec.authentication is not None:
        yield from check_authentication(spec.authentication)
    yield from check_tenants(spec.tenants)
    if spec.tracing is not None:
        yield from check_tracing(spec.tracing)
    yield from check_budgets(spec.budgets)
    if spec.payload_log is not None:
        yield from check_payload_sink(spec.payload_log, ("spec", "payloadLog"))
    yield from check_guards(spec.guards, spec.message_timeout)
    if spec.usage_log is not None:
        yield from _check_log_file(spec.usage_log.path, ("spec", "usageLog", "path"))
        if spec.usage_log.cost_header and spec.cached_tokens == "Hidden":
            yield ("spec", "usageLog", "costHeader"), "tells how much was cached, which cachedTokens: Hidden hides"
        if spec.usage_log.api is not None:
            yield from check_endpoint(spec.usage_log.api, ("spec", "usageLog", "api"))


def _check_addresses(spec: GatewayConfigSpec) -> Iterator[Finding]:
    addresses = {"listen": spec.listen, "admin": spec.admin, **({} if spec.steps is None else {"steps": spec.steps})}
    for name, one in addresses.items():
        yield from check_address(one, ("spec", name))
    if spec.steps is not None and spec.steps in {spec.admin, *(() if spec.listeners else (spec.listen,))}:
        yield ("spec", "steps"), "is the address of another listener; write another port"


def _check_log_file(file: str, path: Path) -> Iterator[Finding]:
    """Envoy refuses a listener whose log it cannot open, and whoever reads the log renames it."""
    example = "write an absolute one, such as /var/lib/attache/usage.log"
    if not file.startswith("/"):
        yield path, f"'{file}' depends on where Envoy was started; {example}"
    elif file.endswith(("/", "/.", "/..")):
        yield path, f"'{file}' is a directory; write a file in it, such as {file.rstrip('/.')}/usage.log"
    elif posixpath.normpath(file).startswith(_NO_FILES):
        yield path, f"'{file}' is no file that can be read again and rotated; {example}"


def _check_extproc_address(text: str, path: Path) -> Iterator[Finding]:
    if not text.startswith("unix:"):
        yield from check_endpoint(text, path)
        return
    file = text.removeprefix("unix:")
    if not file or "\0" in file:
        yield path, f"{text!a} names no file; write unix:/run/attache/extproc.sock"
    elif len(file.encode()) > _LONGEST_SOCKET:
        yield path, f"the name of a socket file has at most {_LONGEST_SOCKET} bytes; write a shorter one"


def check_listeners(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Listeners can be distinguished, and have what authentication needs."""
    names: set[str] = set()
    hosts: dict[tuple[tuple[str, int], str], str] = {}
    plain: dict[tuple[str, int], Listener] = {}
    for index, one in enumerate(spec.listeners):
        path: Path = ("spec", "listeners", index)
        if one.name in names:
            yield (*path, "name"), f"'{one.name}' is there already; give each listener a name of its own"
        names.add(one.name)
        if one.address == spec.steps:
            yield (*path, "address"), "is that of steps; write another port in one of them"
        if one.hostname is not None and not is_hostname(one.hostname.removeprefix("*.")):
            advice = "write a name such as api.example.com, which may begin with '*.'"
            yield (*path, "hostname"), f"'{one.hostname}' is no host name; {advice}"
        try:
            address = parse_address(one.address)
        except ValueError as error:
            yield (*path, "address"), str(error)
            continue
        first = plain.setdefault(address, one)
        if (first.tls is None) != (one.tls is None):
            advice = "an address has either; write another port"
            yield (*path, "address"), f"is that of '{first.name}', and only one of them has tls; {advice}"
        other = hosts.setdefault((address, (one.hostname or "").lower()), one.name)
        if other != one.name:
            yield path, f"has the address and the host name of '{other}'; change one of them"
    for index, one in enumerate(spec.listeners if _needs_certificates(spec) else ()):
        if one.tls is None or one.tls.client_certificates is None:
            yield ("spec", "listeners", index), _ASKS_FOR_NONE


def check_has_listeners(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """With authentication by certificates, there are listeners, which request them."""
    if not spec.listeners and _needs_certificates(spec):
        yield ("spec", "listen"), f"{_ASKS_FOR_NONE} of listeners"


def check_origins(spec: GatewayConfigSpec) -> Iterator[Finding]:
    """Those of ``cors``."""
    if spec.cors is not None:
        yield from check_cors(spec.cors, ("spec", "cors"))


def _needs_certificates(spec: GatewayConfigSpec) -> bool:
    return spec.authentication is not None and bool(spec.authentication.client_certificates)


def why_extproc_unreachable(gateway: GatewayConfigSpec, listens: Sequence[str]) -> str:
    """Why Envoy and extproc do not reach each other: Envoy calls an address without a listener, or never calls one that
    has a listener; empty if they do.

    ``listens``: an address for each process of extproc.
    """
    called = worker_addresses(gateway.extproc, gateway.extproc_workers)
    unanswered = [one for one in called if not any(_reaches(one, listener) for listener in listens)]
    uncalled = [one for one in listens if not any(_reaches(call, one) for call in called)]
    if not unanswered and not uncalled:
        return ""
    advice = (
        "make the GatewayConfig's 'extproc' and 'extprocWorkers' and extproc's --listen and --workers agree; attache"
        " serve makes them agree when it starts"
    )
    return f"Envoy is configured to call {_shown(called)}, and extproc listens on {_shown(listens)}; {advice}"


def _shown(addresses: Sequence[str]) -> str:
    return addresses[0] if len(addresses) == 1 else f"{addresses[0]} to {addresses[-1]}"


def _reaches(called: str, listener: str) -> bool:
    """Whether a call to one address arrives at the other, on this machine or through the address of another."""
    if called.startswith("unix:") or listener.startswith("unix:"):
        return _path(called) == _path(listener)
    to, (own, own_port) = parse_envoy_upstream(called), parse_address(listener)
    if to.port != own_port:
        return False
    if not to.is_ip:
        # only Envoy's resolver can resolve the name
        return True
    target, bound = ipaddress.ip_address(to.host), ipaddress.ip_address(own)
    if bound.is_unspecified:
        # :: takes IPv4 too
        return bound.version == 6 or target.version == 4
    # a connection to 0.0.0.0 reaches 127.0.0.1
    return target == bound or (target.is_unspecified and bound.is_loopback and target.version == bound.version)


def _path(address: str) -> str:
    scheme, _, path = address.partition(":")
    return posixpath.normpath(path) if scheme == "unix" else ""
