# SPDX-License-Identifier: Apache-2.0
"""Engines that come to a ModelServer without any, and that Envoy must know before requests are sent there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from extproc.config.model_server import ModelServer
    from extproc.config.snapshot import Snapshot


class Settling:
    """Another process tells Envoy of them, each at its own pace: new engines stand for some seconds before they are used.

    Where a server has engines, Envoy passes over one that it does not know yet; where it has none, the request would fail.
    Each engine waits by itself, so that changes of other servers are not delayed. Instants are seconds of any one clock.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        # by server and address
        self._since_s: dict[tuple[str, str], float] = {}
        self._due_at_s: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether an engine that was kept back may be used now."""
        return self._due_at_s is not None and self._due_at_s <= now

    def settled(self, snapshot: Snapshot, has_engines: Callable[[str], bool], now: float) -> Snapshot:
        """``snapshot`` without engines that are too new. ``has_engines``: whether a server has some already."""
        new = dict(_first_engines(snapshot, has_engines))
        addresses = {(server, address) for server, found in new.items() for address in found}
        self._since_s = {one: self._since_s.get(one, now) for one in addresses}
        due = [at_s + self._settle_s for at_s in self._since_s.values() if at_s + self._settle_s > now]
        self._due_at_s = min(due, default=None)
        if self._due_at_s is None:
            return snapshot
        return msgspec.structs.replace(
            snapshot,
            servers=tuple(self._without_new(one, now) if one.metadata.key in new else one for one in snapshot.servers),
        )

    def _without_new(self, server: ModelServer, now: float) -> ModelServer:
        key = server.metadata.key
        stay = tuple(
            one
            for one in server.spec.endpoints
            if one.draining or self._since_s[key, one.address] + self._settle_s <= now
        )
        return msgspec.structs.replace(server, spec=msgspec.structs.replace(server.spec, listed=stay))


def _first_engines(snapshot: Snapshot, has_engines: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    """The engines that take new requests, by server, of servers that have none so far."""
    for server in snapshot.servers:
        staying = [one.address for one in server.spec.endpoints if not one.draining]
        if staying and not has_engines(server.metadata.key):
            yield server.metadata.key, staying
