# SPDX-License-Identifier: Apache-2.0
"""Scalers by name, each with its knob and the values of it to try."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from bench.autoscale.live import by_headroom, by_utilization
from bench.autoscale.mixes import mixes_of
from bench.autoscale.oracle import Oracle
from bench.autoscale.peer_policies import PEER_POLICIES, SECOND_POLICIES
from bench.autoscale.scaler import Policy, Setup

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.autoscaler.decision.situation import Situation


OURS: Final = "attache"
# Ours with another strategy is no peer.
OWN: Final = frozenset({OURS, "attache-utilization"})
# They know what nobody can.
BOUNDS: Final = frozenset({"oracle"})


class PolicyUnknown(ValueError):
    """There is no such policy; the message says which there are."""


class Fixed:
    """Always the same number; of several kinds of engine the cheapest mix that carries as much."""

    def __init__(self, setup: Setup) -> None:
        first, *others = setup.load.variants
        self._desired = {first.name: math.ceil(setup.knob)}
        if others:
            self._desired = mixes_of(setup.load, setup.min_replicas).cheapest(setup.knob)

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """The knob."""
        del situation
        return self._desired


_POLICIES: Final = (
    Policy(OURS, by_headroom, "headroom", (1.0, 1.25, 1.5, 2.0, 3.0), 5.0, has_zero=True),
    Policy("attache-utilization", by_utilization, "utilization", (0.5, 0.6, 0.7, 0.8, 0.9), 5.0, has_zero=True),
    *PEER_POLICIES,
    Policy("fixed", Fixed, "replicas", (4, 6, 8, 10, 12), 5.0),
    Policy("oracle", Oracle, "share of engines' time", (0.8, 0.95, 1.1, 1.25, 1.4), 5.0, has_zero=True),
)
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({one.name: one for one in _POLICIES})
# The same peers on a fleet of the second kind of engine, for loads that have one.
SECONDS: Final[Mapping[str, Policy]] = MappingProxyType({one.name: one for one in SECOND_POLICIES})


def policy_named(name: str) -> Policy:
    """Raises PolicyUnknown."""
    found = POLICIES.get(name) or SECONDS.get(name)
    if found is None:
        msg = f"there is no policy {name}; there are {', '.join(POLICIES)}"
        raise PolicyUnknown(msg)
    return found


def policies_for(names: Iterable[str], variants: int) -> list[str]:
    """``names``, and on a load with several kinds of engine also the forms of them that begin with the second."""
    asked = list(dict.fromkeys(names))
    more = [f"{one}-second" for one in asked if variants > 1 and f"{one}-second" in SECONDS]
    return [*asked, *(one for one in more if one not in asked)]
