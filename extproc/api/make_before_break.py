# SPDX-License-Identifier: Apache-2.0
"""Engines and ModelServers that come and go: extproc and Envoy apply a configuration each at its own pace.

New engines warm up until Envoy has them, and ModelServers that were removed drain. Instants are seconds of any one
clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_address
from extproc.api.reference_checks import backend_key, backend_refs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_server import ModelServer
    from extproc.api.picker_config import PickerFile

# An Envoy that has refused its configuration never has the engine.
_LONGEST_S: Final = 60.0


class WarmingEngines:
    """New engines of ModelServers that have none: unused for ``settle_s``, and for longer while Envoy lacks them.

    Envoy skips an address that is not in its cluster. Where the server has other engines, one of them serves; where it
    has none, the request would fail. Each engine warms up by itself, so that changes of other servers are not delayed.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        # by server and address
        self._since_s: dict[tuple[str, str], float] = {}
        self._known: set[tuple[str, str]] = set()

    @property
    def servers(self) -> frozenset[str]:
        """Servers none of whose engines is used yet."""
        return frozenset(server for server, _ in self._since_s) - {server for server, _ in self._known}

    def servers_to_confirm(self, now: float) -> frozenset[str]:
        """Servers with an engine that has warmed for ``settle_s``: pass Envoy's endpoints of them to
        ``on_envoy_endpoints``.
        """
        return frozenset(
            one[0] for one, at_s in self._since_s.items() if at_s + self._settle_s <= now and one not in self._known
        )

    def on_envoy_endpoints(self, known: Mapping[str, Collection[tuple[str, int]]], now: float) -> bool:
        """Returns whether a warming engine may be used from now on.

        ``known``: IP addresses and ports in Envoy's clusters, by server; without servers for which Envoy does not
        report them.
        """
        news = {
            (server, address)
            for (server, address), at_s in self._since_s.items()
            if at_s + self._settle_s <= now
            and (server not in known or parse_address(address) in known[server] or at_s + _LONGEST_S <= now)
        } - self._known
        self._known |= news
        return bool(news)

    def without_warming(self, snapshot: Snapshot, has_engines: Callable[[str], bool], now: float) -> Snapshot:
        """``snapshot`` without warming engines. ``has_engines``: whether a server has some already."""
        if self._settle_s <= 0:
            return snapshot
        new = dict(_first_engines(snapshot, has_engines))
        addresses = {(server, address) for server, found in new.items() for address in found}
        self._since_s = {one: self._since_s.get(one, now) for one in addresses}
        self._known &= addresses
        if self._known == addresses:
            return snapshot
        return msgspec.structs.replace(
            snapshot,
            servers=tuple(self._without_new(one) if one.metadata.key in new else one for one in snapshot.servers),
        )

    def _without_new(self, server: ModelServer) -> ModelServer:
        key = server.metadata.key
        stay = tuple(one for one in server.spec.endpoints if one.draining or (key, one.address) in self._known)
        return msgspec.structs.replace(server, spec=msgspec.structs.replace(server.spec, listed=stay))


def _first_engines(snapshot: Snapshot, has_engines: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """The engines that take new requests, by server, of servers that have none so far."""
    for server in snapshot.servers:
        staying = [one.address for one in server.spec.endpoints if not one.draining]
        if staying and not has_engines(server.metadata.key):
            yield server.metadata.key, staying


class DrainingServers:
    """ModelServers that were removed from the configuration, and to which requests may still be sent.

    extproc and Envoy keep them for some seconds, because the other may still refer to them.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._left_at_s: dict[str, float] = {}
        self._servers: dict[str, ModelServer] = {}

    def on_change(self, before: Snapshot, after: Snapshot, now: float) -> None:
        """The configuration has changed."""
        names = {server.metadata.key for server in after.servers}
        for server in before.servers:
            if server.metadata.key not in names:
                self._keep(server, before, now)
        for name in names & set(self._servers):
            self._forget(name)

    def restart_drain(self, now: float) -> None:
        """All drain from ``now`` on."""
        self._left_at_s = dict.fromkeys(self._left_at_s, now)

    def with_draining(self, snapshot: Snapshot, now: float) -> Snapshot:
        """``snapshot`` with the servers that drain at ``now``."""
        for name, left_at_s in list(self._left_at_s.items()):
            if now - left_at_s >= self._linger_s:
                self._forget(name)
        return with_servers(snapshot, self._servers.values())

    def _keep(self, server: ModelServer, _before: Snapshot, now: float) -> None:
        self._servers[server.metadata.key] = server
        self._left_at_s[server.metadata.key] = now

    def _forget(self, name: str) -> None:
        del self._servers[name], self._left_at_s[name]


class DrainingRoutedServers(DrainingServers):
    """Of those, the servers that an HTTPRoute named a short while ago.

    Envoy chooses them for as long as it has its former routes. Requests by model alone are routed by the configuration
    in use and need no server of an earlier one.
    """

    def __init__(self, linger_s: float) -> None:
        super().__init__(linger_s)
        self._named_at_s: dict[str, float] = {}
        self._picker_files: dict[str, PickerFile] = {}

    def on_change(self, before: Snapshot, after: Snapshot, now: float) -> None:
        """The configuration has changed."""
        self._named_at_s = {key: at_s for key, at_s in self._named_at_s.items() if now - at_s < self._linger_s}
        self._named_at_s.update(dict.fromkeys(_chosen(before), now))
        super().on_change(before, after, now)

    @property
    def is_empty(self) -> bool:
        """Whether no server drains."""
        return not self._servers

    def with_draining(self, snapshot: Snapshot, now: float) -> Snapshot:
        """``snapshot`` with the servers that drain at ``now``, without picker files that are not there any more."""
        for name, server in self._servers.items():
            file = server.spec.picker_config
            if file is not None and snapshot.picker_files.get(file) != self._picker_files.get(name):
                # the default picker chooses for these last requests
                self._servers[name] = msgspec.structs.replace(
                    server, spec=msgspec.structs.replace(server.spec, picker_config=None)
                )
        return super().with_draining(snapshot, now)

    def _keep(self, server: ModelServer, before: Snapshot, now: float) -> None:
        name, file = server.metadata.key, server.spec.picker_config
        if name not in self._named_at_s:
            return
        super()._keep(server, before, now)
        if file is not None:
            self._picker_files[name] = before.picker_files[file]

    def _forget(self, name: str) -> None:
        super()._forget(name)
        self._picker_files.pop(name, None)


def _chosen(snapshot: Snapshot) -> Iterable[str]:
    """The ModelServers that HTTPRoutes and GRPCRoutes name."""
    for route in snapshot.gateway_api_routes:
        for ref, _ in backend_refs(route):
            if ref.kind == "ModelServer":
                yield backend_key(route, ref)


def with_servers(snapshot: Snapshot, more: Iterable[ModelServer]) -> Snapshot:
    """``snapshot`` plus those of ``more`` that it lacks; no rule sends new requests to them."""
    own = {server.metadata.key for server in snapshot.servers}
    added = tuple(one for one in more if one.metadata.key not in own)
    return msgspec.structs.replace(snapshot, servers=(*snapshot.servers, *added)) if added else snapshot
