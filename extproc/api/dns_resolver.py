# SPDX-License-Identifier: Apache-2.0
"""Host names of engines and Backends, resolved: a name is as many endpoints as it has addresses.

Name servers may answer with a few of many addresses at a time, and extproc and Envoy's bundle are resolved by two
processes. So an address stays for some seconds after it was answered last, and extproc uses a new one only after the
bundle's writer must have resolved it: what extproc chooses is in Envoy's clusters. ``DnsCache`` decides this without
a network or a clock; ``ResolvedDirectory`` calls the resolver in threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import (
    NETWORKS,
    OF_CLUSTER,
    is_in,
    is_local_or_metadata_host,
    join_host_port,
    parse_endpoint,
    parse_networks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from extproc.api.config_loader import ConfigDirectory
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.http_route import Backend
    from extproc.api.model_server import ModelServer, ModelServerSpec, StaticEndpoint

log = logging.getLogger(__name__)

Addresses = Mapping[str, tuple[str, ...]]
# The object is kept with its names, so that its identity is nobody else's.
_NamesOf = Mapping[int, "tuple[ModelServer | Backend, frozenset[str]]"]
# Between two lookups of a name.
_INTERVAL_S: Final = 2.0
# New names are waited for so long; those that take longer follow when they come.
_FIRST_S: Final = 5.0
_TICK_S: Final = 0.1
# A name server that does not answer holds up one of these.
_THREADS: Final = 8


class AddressHoldTimes(msgspec.Struct, frozen=True):
    """``keep_s``: how long an address stays after it was answered last. ``settle_s``: how long a new one must have been
    known before it is used, while the name still has another.
    """

    keep_s: float
    settle_s: float


class _Answers(msgspec.Struct):
    """Of one name: by address, when it was first and last answered; and when there was an answer at all."""

    seen: dict[str, tuple[float, float]]
    answered_at_s: float


class DnsCache:
    """The addresses to which names were resolved so far. A name that no longer resolves keeps its last addresses."""

    def __init__(self, patience: AddressHoldTimes) -> None:
        self._patience = patience
        self._answers: dict[str, _Answers] = {}

    def add_resolution(self, name: str, addresses: Sequence[str], now: float) -> None:
        """``name`` was resolved to ``addresses``, which are not empty."""
        known = self._answers.get(name)
        before = {} if known is None else known.seen
        kept = {ip: at for ip, at in before.items() if now - at[1] <= self._patience.keep_s}
        kept.update({ip: (kept[ip][0] if ip in kept else now, now) for ip in addresses})
        self._answers[name] = _Answers(kept, now)

    def forget_all_but(self, names: Iterable[str]) -> None:
        """Remove the names that are not in ``names``."""
        wanted = set(names)
        self._answers = {name: one for name, one in self._answers.items() if name in wanted}

    def usable_addresses(self, now: float) -> Addresses:
        """By name, the addresses to use at ``now``, sorted."""
        return {name: self._usable(one, now) for name, one in self._answers.items()}

    def _usable(self, one: _Answers, now: float) -> tuple[str, ...]:
        settled = {ip for ip, (first, _) in one.seen.items() if now - first >= self._patience.settle_s}
        latest = {ip for ip, (_, last) in one.seen.items() if last == one.answered_at_s}
        # if no settled address is in the last answer, waiting for new ones would only lose requests
        return tuple(sorted(settled if settled & latest else settled | latest))


def host_names_in(snapshot: Snapshot, known: _NamesOf | None = None) -> _NamesOf:
    """The host names of each ModelServer, with those of its KV events, and of each Backend, by the object's identity.

    ``known``: the result for the snapshot before. Only what has changed since is read: of 20,000 endpoints a few.
    """
    before = known or {}
    objects: tuple[ModelServer | Backend, ...] = (*snapshot.servers, *snapshot.backends)
    return {id(one): before.get(id(one)) or (one, _names(one)) for one in objects}


def _names(one: ModelServer | Backend) -> frozenset[str]:
    texts = (text for each in one.spec.endpoints for text in ([each] if isinstance(each, str) else _places(each)))
    return frozenset(where.host for where in map(parse_endpoint, texts) if not where.is_ip)


def with_resolved_addresses(snapshot: Snapshot, addresses: Addresses) -> Snapshot:
    """``snapshot`` with addresses in place of names; a name without any is no endpoint. Its version tells them
    apart.
    """
    servers = tuple(_resolved(server, addresses) for server in snapshot.servers)
    backends = tuple(_resolved_backend(backend, addresses) for backend in snapshot.backends)
    shown = ";".join(f"{name}={','.join(ips)}" for name, ips in sorted(addresses.items()))
    version = f"{snapshot.version} {shown}"
    return msgspec.structs.replace(snapshot, servers=servers, backends=backends, version=version)


def _places(endpoint: StaticEndpoint) -> Iterator[str]:
    """The address of an engine."""
    yield endpoint.address
    yield from (one for one in (endpoint.kv_events, endpoint.kv_replay) if one is not None)


def _resolved_backend(backend: Backend, addresses: Addresses) -> Backend:
    if all(parse_endpoint(one).is_ip for one in backend.spec.endpoints):
        return backend
    found = dict.fromkeys(ip for one in backend.spec.endpoints for ip in _resolved_text(one, addresses))
    return msgspec.structs.replace(backend, spec=msgspec.structs.replace(backend.spec, endpoints=tuple(found)))


def _resolved_text(text: str, addresses: Addresses) -> list[str]:
    where = parse_endpoint(text)
    return [text] if where.is_ip else [join_host_port(ip, where.port) for ip in addresses.get(where.host, ())]


def _resolved(server: ModelServer, addresses: Addresses) -> ModelServer:
    spec = server.spec
    if all(parse_endpoint(text).is_ip for one in spec.endpoints for text in _places(one)):
        return server
    found: dict[str, StaticEndpoint] = {}
    if OF_CLUSTER in server.metadata.annotations:
        # its author may own the name, and the gateway's machine and networks are none of theirs
        networks = server.metadata.annotations.get(NETWORKS)
        known = None if networks is None else parse_networks(networks)
        addresses = {
            name: tuple(ip for ip in ips if not is_local_or_metadata_host(ip) and (known is None or is_in(ip, known)))
            for name, ips in addresses.items()
        }
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
    needs_name = spec.uses_tls and (tls is None or tls.server_name is None) and one.server_name is None
    name = where.host if needs_name else one.server_name
    return [
        msgspec.structs.replace(
            _with_publishers(one, ip, addresses), address=join_host_port(ip, where.port), server_name=name
        )
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


class ResolvedDirectory:
    """``directory``, read as if it had addresses in place of names. A change of a name's addresses counts as a change
    of the directory.

    ``lookup``: the addresses of a name; may raise OSError and take long. Threads start with the first name, and look
    names up from then on; reading waits only for names that are new.
    """

    def __init__(
        self,
        directory: ConfigDirectory,
        patience: AddressHoldTimes,
        *,
        clock: Callable[[], float],
        lookup: Callable[[str], Sequence[str]],
    ) -> None:
        self._directory = directory
        self._lookup = lookup
        self._clock = clock
        self._known = DnsCache(patience)
        self._used: Addresses = {}
        self._names: _NamesOf = {}
        self._condition = threading.Condition()
        # by name, when it is to be looked up next; those that are being looked up are not in it
        self._due_at_s: dict[str, float] = {}
        self._wanted: frozenset[str] = frozenset()
        self._pending: set[str] = set()
        self._said: dict[str, str] = {}
        self._threads = 0

    @property
    def path(self) -> Path:
        """That of the directory with the names."""
        return self._directory.path

    def has_changed(self) -> bool:
        """Whether files or addresses have changed since ``read``."""
        return self._directory.has_changed() or (bool(self._wanted) and self._usable() != self._used)

    def read(self) -> Snapshot:
        """The snapshot of what is there now; raises ConfigInvalid. May wait for name servers: not in an event loop."""
        # what cannot be read is not read again because of a name
        self._used = self._usable()
        snapshot = self._directory.read()
        self._names = host_names_in(snapshot, self._names)
        names = frozenset[str]().union(*(found for _, found in self._names.values()))
        self._follow(names)
        if not names:
            return snapshot
        self._used = self._usable()
        return with_resolved_addresses(snapshot, self._used)

    def _usable(self) -> Addresses:
        with self._condition:
            return self._known.usable_addresses(self._clock())

    def _follow(self, names: frozenset[str]) -> None:
        with self._condition:
            new = names - self._wanted
            self._wanted = names
            self._known.forget_all_but(names)
            self._due_at_s = {name: at for name, at in self._due_at_s.items() if name in names}
            self._due_at_s.update(dict.fromkeys(new, self._clock()))
            self._pending = (self._pending & names) | new
            missing = min(_THREADS, len(names)) - self._threads
            self._threads += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._resolve_loop, name="host names", daemon=True).start()
        with self._condition:
            self._condition.wait_for(lambda: not self._pending, timeout=_FIRST_S)

    def _resolve_loop(self) -> None:
        while True:
            name = self._take()
            if name is not None:
                self._resolve(name)
                continue
            with self._condition:
                self._condition.wait(_TICK_S)

    def _take(self) -> str | None:
        now = self._clock()
        with self._condition:
            due = next((name for name, at in self._due_at_s.items() if at <= now), None)
            if due is not None:
                del self._due_at_s[due]
            return due

    def _resolve(self, name: str) -> None:
        try:
            found, problem = self._lookup(name), "it has no address"
        except (OSError, UnicodeError) as error:
            found, problem = (), str(error)
        now = self._clock()
        with self._condition:
            if name in self._wanted:
                self._log_change(name, found, problem)
                if found:
                    self._known.add_resolution(name, found, now)
                self._due_at_s[name] = now + _INTERVAL_S
            self._pending.discard(name)
            self._condition.notify_all()

    def _log_change(self, name: str, found: Sequence[str], problem: str) -> None:
        """Once for each change."""
        message = f"is {', '.join(found)}" if found else problem
        if self._said.get(name) == message:
            return
        self._said[name] = message
        if found:
            log.info("the host name %s %s", name, message)
        else:
            kept = ", ".join(self._known.usable_addresses(self._clock()).get(name, ())) or "none"
            log.warning("cannot resolve the host name %s: %s; its last addresses stay: %s", name, problem, kept)
