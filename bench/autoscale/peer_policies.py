# SPDX-License-Identifier: Apache-2.0
"""Peers as policies of the lab: each with one knob, and the grid of it that is tuned on.

The grids span what a fleet of the lab's engines can need: a replica that keeps its TPOT runs some 20 requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.autoscale.peers.aibrix import AibrixApa
from bench.autoscale.peers.dynamo import DynamoPlanner
from bench.autoscale.peers.knative import kpa
from bench.autoscale.peers.kthena import Kthena
from bench.autoscale.peers.kubernetes import hpa
from bench.autoscale.peers.llm_d import KedaQueue, KedaSlo
from bench.autoscale.peers.wva_v1 import WvaV1
from bench.autoscale.peers.wva_v2 import WvaV2
from bench.autoscale.scaler import Policy, Setup, told_objective
from controller.autoscaler.decision.strategies.spare_capacity import SpareCapacityParameters
from controller.autoscaler.decision.strategies.tokens import TokensParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.autoscale.peers.peer import Peer
    from bench.autoscale.scaler import Scaler
    from controller.autoscaler.decision.situation import Situation

_IN_FLIGHT: Final = (6.0, 8.0, 12.0, 16.0, 22.0)


# What a replica of the lab's second kind carries, about, in replicas of the first: only a grid is spread by it.
_SECOND_CARRIES: Final = 2.7


class OfPeer:
    """A peer in its loop. ``ask``: what it wants of each target, and what it is to be given the next time."""

    def __init__(self, ask: Callable[[Situation, Any], tuple[Mapping[str, int], Any]]) -> None:
        self._ask = ask
        self._memory: Any = None

    def decide(self, situation: Situation) -> Mapping[str, int]:
        """What the peer wants."""
        desired, self._memory = self._ask(situation, self._memory)
        return desired


def _of_first(peer: Peer[Any]) -> OfPeer:
    """It knows one kind of engine, and scales the first target."""

    def ask(situation: Situation, memory: object) -> tuple[Mapping[str, int], object]:
        desired, memory = peer.desired(situation, memory)
        return {situation.targets[0].name: desired}, memory

    return OfPeer(ask)


def _peer(make: Callable[[Setup], Peer[Any]]) -> Callable[[Setup], Scaler]:
    return lambda setup: _of_first(make(setup))


def _kinds_peer(make: Callable[[Setup], WvaV1 | WvaV2 | Kthena]) -> Callable[[Setup], Scaler]:
    """With one kind of engine: its simpler form."""

    def made(setup: Setup) -> Scaler:
        peer = make(setup)
        return _of_first(peer) if len(setup.load.variants) == 1 else OfPeer(peer.desired_kinds)

    return made


def _wva_v1(setup: Setup) -> WvaV1:
    return WvaV1(SpareCapacityParameters(kv_spare_trigger=setup.knob), period_s=setup.period_s)


def _wva_v2(setup: Setup) -> WvaV2:
    """The two utilizations stay as far apart as in the original."""
    up, down = setup.knob, setup.knob * 0.70 / 0.85
    return WvaV2(TokensParameters(scale_up_utilization=up, scale_down_utilization=down), period_s=setup.period_s)


def _slo(setup: Setup) -> Peer[Any]:
    """The two thresholds stay in the original's proportion."""
    up, down = setup.knob, setup.knob * 0.40 / 0.55
    return KedaSlo(told_objective(setup), up, down, period_s=setup.period_s)


PEER_POLICIES: Final = (
    Policy(
        "hpa-running-waiting",
        _peer(lambda setup: hpa(running=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy(
        "kpa",
        _peer(lambda setup: kpa(target=setup.knob, period_s=setup.period_s)),
        "target concurrency",
        (6.0, 10.0, 16.0, 22.0, 30.0),
        2.0,
    ),
    Policy("wva-v1", _kinds_peer(_wva_v1), "spare share of KV caches", (0.25, 0.4, 0.55, 0.65, 0.75), 30.0),
    Policy("wva-v2", _kinds_peer(_wva_v2), "scale-up utilization", (0.12, 0.25, 0.4, 0.55, 0.7), 30.0),
    Policy(
        "llmd-keda",
        _peer(lambda setup: KedaQueue(running=setup.knob, period_s=setup.period_s)),
        "running requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy("llmd-slo", _peer(_slo), "share of the objective", (0.4, 0.55, 0.7, 0.85, 1.0), 15.0),
    Policy(
        "kthena",
        _kinds_peer(lambda setup: Kthena(target=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        15.0,
    ),
    Policy(
        "aibrix-apa",
        _peer(lambda setup: AibrixApa(target=setup.knob, period_s=setup.period_s)),
        "requests of a replica",
        _IN_FLIGHT,
        10.0,
    ),
    Policy(
        "dynamo",
        _peer(lambda setup: DynamoPlanner(told_objective(setup, setup.knob), period_s=setup.period_s)),
        "share of the objective",
        (0.6, 0.75, 0.9, 1.0, 1.15),
        5.0,
    ),
)


def _second(policy: Policy) -> Policy:
    """The same peer on a fleet of the second kind."""
    carries = _SECOND_CARRIES if policy.grid[-1] > 2 else 1.0
    return msgspec.structs.replace(
        policy, name=f"{policy.name}-second", grid=tuple(carries * one for one in policy.grid), kind=1
    )


# Peers that know one kind of engine get, on loads with several, a fleet of the second kind as well.
_ONE_KIND: Final = frozenset({"hpa-running-waiting", "kpa", "llmd-keda", "llmd-slo", "aibrix-apa", "dynamo"})
SECOND_POLICIES: Final = tuple(_second(one) for one in PEER_POLICIES if one.name in _ONE_KIND)
