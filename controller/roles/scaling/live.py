# SPDX-License-Identifier: Apache-2.0
"""Scaling as the manager runs it: with the real decision, and the demand that gateways tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.autoscale.decide import decide
from controller.autoscale.memory import decoded, encoded
from controller.autoscale.resting import still
from controller.roles.scaling.deciding import Deciding
from controller.roles.scaling.gateway_demand import GatewayDemand
from controller.roles.scaling.running import Scaling, ScalingSettings, wall_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.cluster.client import Client
    from controller.roles.scaling.metrics import ScalingMetrics
    from controller.roles.scaling.records import Records

DECIDING: Final = Deciding(decide, encoded, decoded, still)


def scaling_of(
    settings: ScalingSettings, metrics: ScalingMetrics, records: Records
) -> Callable[[Client], Awaitable[None]]:
    """Runs the scaling of one term of leadership."""

    async def run(client: Client) -> None:
        demand = GatewayDemand(client, settings.gateway_namespaces, settings.informers, wall_s)
        await Scaling(client, settings, metrics, deciding=DECIDING, demand=demand, records=records).run()

    return run
