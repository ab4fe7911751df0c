# SPDX-License-Identifier: Apache-2.0
"""When a gateway's message calls for a decision at once, and what is known of a pod with several engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from controller.autoscaler.decision.gateway_reports import EngineSignal
from controller.autoscaler.decision.situation import EngineReport
from controller.autoscaler.reconciler.demand import GatewayDemandSource, group_by_pod
from controller.kube.api_resources import PODS
from controller.kube.informer import Informer
from extproc.api.status_page_contents import EngineDemand, ProcessDemand, ServerDemand

if TYPE_CHECKING:
    from controller.kube.client import Client

NO_GATEWAYS = Informer(cast("Client", None), PODS)


def in_flight(*numbers: int) -> ServerDemand:
    """A server whose engines have so many requests each."""
    engines = {f"10.0.0.{one}:8000": EngineDemand(in_flight=number) for one, number in enumerate(numbers)}
    return ServerDemand(engines=engines)


@pytest.mark.parametrize(
    ("said", "rings"),
    [
        ([ServerDemand(queued=1, at_zero=1)], [True]),
        ([ServerDemand(queued=1, at_zero=1), ServerDemand(queued=1, at_zero=1)], [True, False]),
        ([ServerDemand(queued=1, at_zero=1), ServerDemand(queued=2, at_zero=2)], [True, True]),
        ([ServerDemand(queued=1, at_zero=1), ServerDemand(), ServerDemand(queued=1, at_zero=1)], [True, False, True]),
        ([ServerDemand(queued=3), ServerDemand(queued=7), ServerDemand(queued=20)], [False, False, True]),
        ([ServerDemand(queued=100), ServerDemand(queued=120)], [True, False]),
        # without flow control all are at engines
        ([in_flight(2, 3), in_flight(3, 3), in_flight(20, 20), in_flight(25, 25)], [False, False, True, False]),
        # a burst that takes several messages to come, and one after a calm
        (
            [in_flight(20), in_flight(35), in_flight(45), in_flight(2), in_flight(9), in_flight(11)],
            [True, False, True, False, False, True],
        ),
        ([in_flight(2, 3), in_flight(0, 0), in_flight(2, 3)], [False, False, False]),
        ([ServerDemand(queued=4), msgspec.structs.replace(in_flight(4, 4), queued=4)], [False, True]),
    ],
)
async def test_only_what_is_new_rings(said: list[ServerDemand], rings: list[bool]) -> None:
    rung: list[str] = []
    demand = GatewayDemandSource(NO_GATEWAYS, (), lambda: 0.0)
    demand._urgent = rung.append
    found = []
    for number, one in enumerate(said):
        rung.clear()
        demand._on_demand("a/gateway", ProcessDemand("x", number, 0.0, {"a/llama": one}), float(number))
        found.append(rung == ["a/llama"])
    assert found == rings


async def test_a_gateway_of_a_namespace_hastens_no_decision_of_another() -> None:
    rung: list[str] = []
    demand = GatewayDemandSource(NO_GATEWAYS, ("gateways",), lambda: 0.0)
    demand._urgent = rung.append
    said = ProcessDemand("x", 1, 0.0, {"a/llama": ServerDemand(at_zero=1), "b/llama": ServerDemand(at_zero=1)})
    demand._on_demand("b/gateway", said, 0.0)
    assert rung == ["b/llama"]
    demand._on_demand("gateways/one", said, 0.0)
    assert rung == ["b/llama", "a/llama", "b/llama"]


async def test_what_is_remembered_of_a_gateway_does_not_grow_with_its_lies() -> None:
    demand = GatewayDemandSource(NO_GATEWAYS, (), lambda: 0.0)
    server = ServerDemand(queued=9, at_zero=1)
    for number in range(1, 2000):
        # processes that do not answer, one that begins anew each time, and ever more slots
        demand._on_demand("a/gateway", ProcessDemand("", 0, 0.0, {f"a/m{number}": server}, slot=f"silent{number}"), 0.0)
        demand._on_demand("a/gateway", ProcessDemand(f"x{number}", 1, 0.0, {f"a/m{number}": server}, slot="same"), 0.0)
        demand._on_demand(
            "a/gateway", ProcessDemand("y", number, 0.0, {f"a/m{number}": server}, slot=f"s{number}"), 0.0
        )
    assert len(demand._last_reports) <= 64
    assert sum(len(one.unfinished) for one in demand._last_reports.values()) <= 64


def test_ranks_of_a_pod_are_one_engine_of_their_speed_together() -> None:
    def signal(in_flight: int) -> EngineSignal:
        report = EngineReport(at_s=1.0, in_flight=in_flight, kv_capacity_tokens=1000.0)
        return EngineSignal(report, prefill_tokens_per_s=100.0, step_s=0.01, step_s_per_token=0.002)

    reports, learned = group_by_pod(
        {"10.0.0.1:8000": signal(1), "10.0.0.1:8001": signal(2), "[fd00::1]:8000": signal(5)}
    )
    assert {ip: one.in_flight for ip, one in reports.items()} == {"10.0.0.1": 3, "fd00::1": 5}
    one = learned["10.0.0.1"]
    assert (one.prefill_tokens_per_s, one.step_s, one.step_s_per_token) == (200.0, 0.01, 0.001)
    assert one.kv_capacity_tokens == 2000.0
