# SPDX-License-Identifier: Apache-2.0
"""What scaling wants to know of clients' demand, whoever gathers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from controller.autoscale.situation import EngineReport, Freshness, Speed, Waiting
from controller.autoscale.traffic import Traffic

Urgent = Callable[[str], None]
"""Gets the key of a ModelServer about which something should be decided at once."""


class DemandView(msgspec.Struct, frozen=True):
    """Of some ModelServers together. ``reports`` and ``speeds``: of engines, by the IP address of their pod."""

    traffic: Traffic = Traffic()
    waiting: Waiting = Waiting()
    freshness: Freshness = Freshness(age_s=float("inf"), gateways=0, since_s=0.0)
    reports: Mapping[str, EngineReport] = {}
    speeds: Mapping[str, Speed] = {}


class DemandSource(Protocol):
    """Gathers demand. One object lives for one term of leadership."""

    async def run(self, urgent: Urgent) -> None:
        """Until cancelled."""
        ...

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:
        """What is known of these ModelServers. ``now_s``: since the epoch, as all times of the answer."""
        ...


class NoDemand:
    """Knows nothing: where nobody gathers demand, laws that need it say so, and nothing is scaled in."""

    async def run(self, urgent: Urgent) -> None:
        """See ``DemandSource``."""

    def view(self, servers: Sequence[str], now_s: float) -> DemandView:  # noqa: ARG002 - of the protocol
        """See ``DemandSource``."""
        return DemandView()
