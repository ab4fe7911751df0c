# SPDX-License-Identifier: Apache-2.0
"""Host names of engines and Backends: which addresses stand for them, decided without a network or a clock.

A name is as many endpoints as it has addresses. Name servers may answer with a few of many addresses at a time, and
extproc and Envoy's bundle are resolved by two processes. So an address stays for some seconds after it was answered
last, and extproc uses a new one only after the bundle's writer must have met it: what extproc chooses, Envoy knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from extproc.api.own_addresses import OF_CLUSTER, is_own
from extproc.api.validation import parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.backend import Backend
    from extproc.api.model_server import ModelServer, ModelServerSpec, StaticEndpoint
    from extproc.api.snapshot import Snapshot

Addresses = Mapping[str, tuple[str, ...]]


class Patience(msgspec.Struct, frozen=True):
    """``keep_s``: how long an address stays after it was answered last. ``settle_s``: how long a new one must have been
    known before it is used, while the name still has another.
    """

    keep_s: float
    settle_s: float


class _Answers(msgspec.Struct):
    """Of one name: by address, when it was first and last answered; and when there was an answer at all."""

    seen: dict[str, tuple[float, float]]
    answered_at_s: float


class KnownNames:
    """What names were resolved to so far. A name that no longer resolves keeps its last addresses."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._answers: dict[str, _Answers] = {}

    def heard(self, name: str, addresses: Sequence[str], now: float) -> None:
        """``name`` was resolved to ``addresses``, which are not empty."""
        known = self._answers.get(name)
        before = {} if known is None else known.seen
        kept = {ip: at for ip, at in before.items() if now - at[1] <= self._patience.keep_s}
        kept.update({ip: (kept[ip][0] if ip in kept else now, now) for ip in addresses})
        self._answers[name] = _Answers(kept, now)

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Names that nobody asks for any more."""
        wanted = set(names)
        self._answers = {name: one for name, one in self._answers.items() if name in wanted}

    def usable(self, now: float) -> Addresses:
        """By name, the addresses to use at ``now``, sorted."""
        return {name: self._usable(one, now) for name, one in self._answers.items()}

    def _usable(self, one: _Answers, now: float) -> tuple[str, ...]:
        settled = {ip for ip, (first, _) in one.seen.items() if now - first >= self._patience.settle_s}
        latest = {ip for ip, (_, last) in one.seen.items() if last == one.answered_at_s}
        # where all that is settled has gone from the answers, waiting would only lose requests
        return tuple(sorted(settled if settled & latest else settled | latest))


def names_in(snapshot: Snapshot) -> frozenset[str]:
    """The host names of all engines, of their KV events, and of Backends."""
    engines = (text for server in snapshot.servers for one in server.spec.endpoints for text in _places(one))
    backends = (text for backend in snapshot.backends for text in backend.spec.endpoints)
    return frozenset(one.host for one in map(parse_endpoint, (*engines, *backends)) if not one.is_ip)


def with_addresses(snapshot: Snapshot, addresses: Addresses) -> Snapshot:
    """``snapshot`` with addresses in place of names; a name without any is no endpoint. Its version tells them
    apart.
    """
    servers = tuple(_resolved(server, addresses) for server in snapshot.servers)
    backends = tuple(_resolved_backend(backend, addresses) for backend in snapshot.backends)
    shown = ";".join(f"{name}={','.join(ips)}" for name, ips in sorted(addresses.items()))
    version = f"{snapshot.version} {shown}"
    return msgspec.structs.replace(snapshot, servers=servers, backends=backends, version=version)


def _places(endpoint: StaticEndpoint) -> Iterator[str]:
    """Where an engine is called."""
    yield endpoint.address
    yield from (one for one in (endpoint.kv_events, endpoint.kv_replay) if one is not None)


def _resolved_backend(backend: Backend, addresses: Addresses) -> Backend:
    if all(parse_endpoint(one).is_ip for one in backend.spec.endpoints):
        return backend
    found = dict.fromkeys(ip for one in backend.spec.endpoints for ip in _resolved_text(one, addresses))
    return msgspec.structs.replace(backend, spec=msgspec.structs.replace(backend.spec, endpoints=tuple(found)))


def _resolved_text(text: str, addresses: Addresses) -> list[str]:
    where = parse_endpoint(text)
    return [text] if where.is_ip else [_joined(ip, where.port) for ip in addresses.get(where.host, ())]


def _resolved(server: ModelServer, addresses: Addresses) -> ModelServer:
    spec = server.spec
    if all(parse_endpoint(text).is_ip for one in spec.endpoints for text in _places(one)):
        return server
    found: dict[str, StaticEndpoint] = {}
    if OF_CLUSTER in server.metadata.annotations:
        # its author may own the name, and the gateway's machine is none of theirs
        addresses = {name: tuple(ip for ip in ips if not is_own(ip)) for name, ips in addresses.items()}
    for one in spec.endpoints:
        for endpoint in _endpoints(one, spec, addresses):
            # two names may stand for one engine
            found.setdefault(endpoint.address, endpoint)
    return msgspec.structs.replace(server, spec=msgspec.structs.replace(spec, listed=tuple(found.values())))


def _endpoints(one: StaticEndpoint, spec: ModelServerSpec, addresses: Addresses) -> list[StaticEndpoint]:
    where = parse_endpoint(one.address)
    if where.is_ip:
        return [_with_publishers(one, where.host, addresses)]
    tls = spec.connection.tls
    needs_name = tls is not None and tls.server_name is None and one.server_name is None
    name = where.host if needs_name else one.server_name
    return [
        msgspec.structs.replace(_with_publishers(one, ip, addresses), address=_joined(ip, where.port), server_name=name)
        for ip in addresses.get(where.host, ())
    ]


def _with_publishers(one: StaticEndpoint, ip: str, addresses: Addresses) -> StaticEndpoint:
    events, replay = (_publisher(text, ip, addresses) for text in (one.kv_events, one.kv_replay))
    return msgspec.structs.replace(one, kv_events=events, kv_replay=replay)


def _publisher(text: str | None, ip: str, addresses: Addresses) -> str | None:
    """Where the engine at ``ip`` publishes. Of several addresses its own, if it is among them. A name without any stays
    a name: the engine is used without its events.
    """
    found = [] if text is None else _resolved_text(text, addresses)
    own = [one for one in found if parse_endpoint(one).host == ip]
    return next(iter(own or found), text)


def _joined(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
