# SPDX-License-Identifier: Apache-2.0
"""Scaling as the manager runs it: with the real decision, and the demand that gateways tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.decide import decide
from controller.autoscaler.decision.memory import decoded, encoded
from controller.autoscaler.decision.resting import still
from controller.autoscaler.reconciler.deciding import Deciding
from controller.autoscaler.reconciler.gateway_demand import GatewayDemand
from controller.autoscaler.reconciler.running import Scaling, ScalingSettings, wall_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.autoscaler.reconciler.metrics import ScalingMetrics
    from controller.autoscaler.reconciler.records import Records
    from controller.kube.client import Client

DECIDING: Final = Deciding(decide, encoded, decoded, still)


def scaling_of(
    settings: ScalingSettings, metrics: ScalingMetrics, records: Records
) -> Callable[[Client], Awaitable[None]]:
    """Runs the scaling of one term of leadership."""

    async def run(client: Client) -> None:
        demand = GatewayDemand(client, settings.gateway_namespaces, settings.informers, wall_s)
        await Scaling(client, settings, metrics, deciding=DECIDING, demand=demand, records=records).run()

    return run
