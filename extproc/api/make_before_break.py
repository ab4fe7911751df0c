# SPDX-License-Identifier: Apache-2.0
"""Engines and ModelServers that come and go: extproc and Envoy apply a configuration each at its own pace.

New engines warm up until Envoy has them, and ModelServers that were removed drain. Instants are seconds of any one
clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_address
from extproc.api.references import backend_key, backend_refs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from extproc.api.model_server import ModelServer
    from extproc.api.picker_config import PickerFile
    from extproc.api.snapshot import Snapshot

# An Envoy that has refused its configuration says for ever that it does not know an engine.
_LONGEST_S: Final = 60.0


class Settling:
    """Another process tells Envoy of them, each at its own pace: new engines stand for some seconds before they are
    used, and for longer while Envoy says that it does not know them yet.

    Where a server has engines, Envoy passes over one that it does not know yet; where it has none, the request would
    fail. Each engine waits by itself, so that changes of other servers are not delayed. Instants are seconds of any one
    clock.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        # by server and address
        self._since_s: dict[tuple[str, str], float] = {}
        self._known: set[tuple[str, str]] = set()

    def asks(self, now: float) -> frozenset[str]:
        """Servers with an engine that has stood long enough: call ``hear`` with what Envoy knows of them."""
        return frozenset(
            one[0] for one, at_s in self._since_s.items() if at_s + self._settle_s <= now and one not in self._known
        )

    def hear(self, known: Mapping[str, Collection[tuple[str, int]]], now: float) -> bool:
        """``known``: IP addresses and ports that Envoy knows, by server; without servers of which it cannot be asked.
        Returns whether an engine that was kept back may be used from now on.
        """
        news = {
            (server, address)
            for (server, address), at_s in self._since_s.items()
            if at_s + self._settle_s <= now
            and (server not in known or parse_address(address) in known[server] or at_s + _LONGEST_S <= now)
        } - self._known
        self._known |= news
        return bool(news)

    def settled(self, snapshot: Snapshot, has_engines: Callable[[str], bool], now: float) -> Snapshot:
        """``snapshot`` without engines that are too new. ``has_engines``: whether a server has some already."""
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


class Lingering:
    """Servers that have left the configuration, and to which requests may still be sent.

    extproc and Envoy follow the configuration each at its own pace, so each keeps for some seconds what the other may
    still name. Instants are seconds of any one clock.
    """

    def __init__(self, linger_s: float) -> None:
        self._linger_s = linger_s
        self._left_at_s: dict[str, float] = {}
        self._servers: dict[str, ModelServer] = {}

    def follow(self, before: Snapshot, after: Snapshot, now: float) -> None:
        """The configuration has changed."""
        names = {server.metadata.key for server in after.servers}
        for server in before.servers:
            if server.metadata.key not in names:
                self._keep(server, before, now)
        for name in names & set(self._servers):
            self._forget(name)

    def added_to(self, snapshot: Snapshot, now: float) -> Snapshot:
        """``snapshot`` with those that linger at ``now``."""
        for name, left_at_s in list(self._left_at_s.items()):
            if now - left_at_s >= self._linger_s:
                self._forget(name)
        return with_servers(snapshot, self._servers.values())

    def _keep(self, server: ModelServer, _before: Snapshot, now: float) -> None:
        self._servers[server.metadata.key] = server
        self._left_at_s[server.metadata.key] = now

    def _forget(self, name: str) -> None:
        del self._servers[name], self._left_at_s[name]


class LingeringChosen(Lingering):
    """Of those that have left, the servers that an HTTPRoute named a short while ago.

    Envoy chooses them, and goes on for as long as it has its former routes. Requests by model alone are routed by the
    configuration in use and need no server of an earlier one.
    """

    def __init__(self, linger_s: float) -> None:
        super().__init__(linger_s)
        self._named_at_s: dict[str, float] = {}
        self._picker_files: dict[str, PickerFile] = {}

    def follow(self, before: Snapshot, after: Snapshot, now: float) -> None:
        """The configuration has changed."""
        self._named_at_s = {key: at_s for key, at_s in self._named_at_s.items() if now - at_s < self._linger_s}
        self._named_at_s.update(dict.fromkeys(_chosen(before), now))
        super().follow(before, after, now)

    @property
    def is_empty(self) -> bool:
        """Whether nobody lingers."""
        return not self._servers

    def added_to(self, snapshot: Snapshot, now: float) -> Snapshot:
        """``snapshot`` with those that linger at ``now``; no file of theirs is asked for that is not there any more."""
        for name, server in self._servers.items():
            file = server.spec.picker_config
            if file is not None and snapshot.picker_files.get(file) != self._picker_files.get(name):
                # the default picker chooses for these last requests
                self._servers[name] = msgspec.structs.replace(
                    server, spec=msgspec.structs.replace(server.spec, picker_config=None)
                )
        return super().added_to(snapshot, now)

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
    """The ModelServers that HTTPRoutes name."""
    for route in snapshot.http_routes:
        for ref, _ in backend_refs(route):
            if ref.kind == "ModelServer":
                yield backend_key(route, ref)


def with_servers(snapshot: Snapshot, more: Iterable[ModelServer]) -> Snapshot:
    """``snapshot`` plus those of ``more`` that it lacks; no rule sends new requests to them."""
    own = {server.metadata.key for server in snapshot.servers}
    added = tuple(one for one in more if one.metadata.key not in own)
    return msgspec.structs.replace(snapshot, servers=(*snapshot.servers, *added)) if added else snapshot
