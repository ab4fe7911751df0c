# SPDX-License-Identifier: Apache-2.0
"""What scaling wants to know of clients' demand, whoever gathers it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from controller.autoscaler.decision.situation import EngineReport, Freshness, Waiting
from controller.autoscaler.decision.traffic import Traffic
from extproc.api.status_pages import EngineDemand

if TYPE_CHECKING:
    from controller.autoscaler.decision.signals import Calm

Urgent = Callable[[str], None]
"""Gets the key of a ModelServer about which something should be decided at once."""


class DemandView(msgspec.Struct, frozen=True):
    """Of some ModelServers together. ``reports``: of engines, by the IP address of their pod; those of several ports of
    it as one. ``learned``: the speeds of these engines.
    """

    traffic: Traffic = Traffic()
    waiting: Waiting = Waiting()
    freshness: Freshness = Freshness(age_s=float("inf"), gateways=0, since_s=0.0)
    reports: Mapping[str, EngineReport] = {}
    learned: Mapping[str, EngineDemand] = {}

    def cut_off(self, for_s: float | None) -> DemandView:
        """The same, where the API server has not told us anything for so long; None: it has."""
        if for_s is None:
            return self
        return msgspec.structs.replace(self, freshness=msgspec.structs.replace(self.freshness, cut_off_s=for_s))


class DemandSource(Protocol):
    """Gathers demand. One object lives for one term of leadership."""

    async def run(self, urgent: Urgent) -> None:
        """Until cancelled."""
        ...

    def follow(self, servers: Collection[str]) -> None:
        """From now on these ModelServers, by key, are asked about."""
        ...

    def calm(self, servers: Sequence[str], now_s: float) -> Calm | None:
        """By what it is known, without a view, that nothing goes on at these ModelServers; None if it is not."""
        ...

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        """What is known of these ModelServers. ``now_s``: since the epoch, as all times of the answer."""
        ...
