# SPDX-License-Identifier: Apache-2.0
"""The autoscaler with gateways, the manager and engines as processes around a real control plane."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.programs import program
from tests.with_kube.scaling_testbed import PATIENCE_S, LoadClient, ScaledModel, running_testbed, until
from tests.with_kube.scaling_trials import replicas_at_overload, run_cycles, run_faults, scaled_in, wakings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.local_control_plane import ControlPlane
    from tests.with_kube.scaling_testbed import Testbed

CYCLES = 3


@pytest.fixture(scope="session")
def prometheus() -> str:
    """Its path; it is looked for before a control plane is started."""
    return program("prometheus")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Testbed]:
    """Two gateways; shared by all tests here, each of which has models of its own."""
    folder = tmp_path_factory.mktemp("site")
    async with running_testbed(plane, folder, namespace=f"test-{uuid.uuid4().hex[:8]}", gateways=2) as running:
        yield running


@pytest.mark.parametrize("has_queue", [True, False])
async def test_overload_is_answered_by_more_replicas(site: Testbed, has_queue: bool) -> None:
    assert await replicas_at_overload(site, has_queue=has_queue) == 2


async def test_a_request_at_zero_is_answered_by_a_replica(site: Testbed) -> None:
    assert await wakings(site, 2) == [1, 1]


@pytest.mark.parametrize("kind", ["Deployment", "ModelInfer"])
async def test_from_zero_to_one_and_back_nobody_is_lost(site: Testbed, kind: str) -> None:
    found = await run_cycles(site, kind, CYCLES)
    assert found.lost == ()
    assert found.cycles >= CYCLES
    assert found.asked >= CYCLES


@pytest.mark.parametrize("kind", ["Deployment", "ModelInfer"])
async def test_scaling_in_under_load_cuts_no_stream(site: Testbed, kind: str) -> None:
    found = await scaled_in(site, kind, streams=9)
    assert found.cut == ()
    assert found.whole >= 9
    assert (found.replicas[0], found.replicas[-1]) == (3, 1)


@pytest.mark.usefixtures("prometheus")
async def test_nothing_is_scaled_in_because_of_faults(site: Testbed) -> None:
    falls = await run_faults(site, for_s=12.0)
    assert falls == dict.fromkeys(falls, 0)
    assert falls


async def test_the_strategy_target_keeps_metrics_of_the_gateways_at_their_targets(site: Testbed) -> None:
    """Three streams at each of two gateways, and two to a replica, are three replicas; the other metrics are known,
    too.
    """
    others = ("requests_queued", "requests_running", "requests_per_second", "tokens_in_flight", "kv_usage")
    metrics = [{"name": "requests_in_flight", "value": 2}, *({"name": name, "value": 1e5} for name in others)]
    policy = {
        "period": "1s",
        "drain": "0s",
        "strategies": [{"name": "Target"}],
        "metrics": metrics,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}},
    }
    model = ScaledModel(name="by-metrics", most=5, engine=("--speed", "0.1"), policy=policy, target={"minReplicas": 1})
    async with contextlib.AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(site.serving(model))
        clients = [await stack.enter_async_context(LoadClient(one.url, model.name)) for one in site.gateways]
        for one in clients:
            for _ in range(3):
                _ = one.ask(tokens=100_000, words=200)
        await replicas.until(lambda one: one == 3, timeout_s=PATIENCE_S)
        await site.until_ready(model, 3)

        async def ratios() -> dict[str, float]:
            decision = await site.decision(model.name)
            (recommendation,) = decision["stages"][0]["recommendations"]
            return {name.removesuffix("_ratio"): value for name, value in recommendation["inputs"].items()}

        async def are_known() -> bool:
            found = await ratios()
            is_settled = found.get("requests_in_flight") == 1.0 and not found.get("requests_queued")
            return {"requests_in_flight", *others} <= found.keys() and is_settled

        await until(are_known, "a metric of the gateways is not known, or requests still wait")
        found = await ratios()
        # arrivals of the last minute: by now there may be none
        assert min(found["requests_running"], found["tokens_in_flight"]) > 0
        assert replicas.now == 3
        for one in clients:
            await one.hang_up()
        await replicas.until(lambda one: one == 1, timeout_s=PATIENCE_S)
