# SPDX-License-Identifier: Apache-2.0
"""Engines that come to a ModelServer without any, and that Envoy must know before requests are sent there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.validation import parse_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from extproc.api.model_server import ModelServer
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
