# SPDX-License-Identifier: Apache-2.0
"""Replicas of our own that no watch has shown yet: decisions know them, and tell them from those of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.autoscaler.reconciler.scalables import SCALED_BY, SCALED_TO
from controller.kube.api_resources import AUTOSCALING_POLICY_BINDINGS, DEPLOYMENTS
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds
from tests.with_kube.scaling import (
    Wanted,
    bind,
    delete_workloads,
    deployment,
    make_policy,
    make_server,
    replicas_of,
    says,
    scaling,
    target,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from tests.fake_api.server import ApiCall, FakeServer
    from tests.with_kube.kubes import Kube


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, namespace: str) -> AsyncIterator[None]:
    """Our kinds are served. Deployments go at the end: the cluster's controllers would keep making their pods."""
    await define_kinds(client)
    yield
    await delete_workloads(client, namespace)


async def make(client: Client, namespace: str) -> Object:
    """A binding of a Deployment of two replicas, which is returned."""
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    return await bind(client, namespace, target())


async def until_current(client: Client, namespace: str, number: int) -> None:
    """Until the status has so many replicas, and the Deployment, too."""

    async def is_told() -> bool:
        found: dict[str, Any] = (await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace)).get("status") or {}
        return [one.get("current") for one in found.get("targets") or ()] == [number]

    await eventually(is_told)
    assert await replicas_of(client, namespace) == number


@FAKE
async def test_decisions_know_what_was_written_while_watches_show_nothing(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await make(client, namespace)
    wanted = Wanted(main=2)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_current(client, namespace, 2)
        fake.faults.freeze()
        for number in (4, 6, 5):
            wanted.replicas["main"] = number
            await until_current(client, namespace, number)
            at = wanted.decisions
            # the decisions after it begin with these replicas, and nothing is written again
            await eventually(lambda at=at: wanted.decisions > at + 2)  # type: ignore[misc]
            assert wanted.situations[0].targets[0].current == number
        writes = running.writes()
        fake.faults.heal()
        at = wanted.decisions
        await eventually(lambda: wanted.decisions > at + 5)
        assert running.writes() == writes
        assert await says(client, namespace, "ScalingActive") == ("True", "Scaling")
        assert running.metric("attache_scaling_reconciles_total", outcome="again") == 0


@FAKE
async def test_what_somebody_else_wrote_in_between_is_not_written_over_and_holds_once_it_is_seen(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await make(client, namespace)
    wanted = Wanted(main=2)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_current(client, namespace, 2)
        fake.faults.freeze()
        wanted.replicas["main"] = 4
        await until_current(client, namespace, 4)
        await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"spec": {"replicas": 9}}, subresource="scale")
        wanted.replicas["main"] = 5
        await eventually(lambda: running.metric("attache_scaling_reconciles_total", outcome="again") > 0)
        assert await replicas_of(client, namespace) == 9
        fake.faults.heal()
        await until_current(client, namespace, 9)
        assert await says(client, namespace, "ScalingActive") == ("False", "ManualHold")


@FAKE
async def test_what_the_server_refused_is_tried_again_from_what_is_there(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await make(client, namespace)
    wanted = Wanted(main=2)

    def is_scale(call: ApiCall) -> bool:
        return call.verb == "patch" and call.target.subresource == "scale"

    async with scaling(kube.admin, namespace, wanted) as running:
        await until_current(client, namespace, 2)
        fake.faults.refuse(3, 500, of=is_scale)
        # our intention is written, and the replicas are not
        wanted.replicas["main"] = 4
        await eventually(lambda: running.metric("attache_scaling_reconciles_total", outcome="error") > 0)
        assert wanted.situations[0].targets[0].current == 2
        await until_current(client, namespace, 4)
        assert await says(client, namespace, "ScalingActive") == ("True", "Scaling")


async def test_a_leader_knows_replicas_whose_writer_ended_before_it_could_say_so(
    client: Client, kube: Kube, namespace: str
) -> None:
    made = (await make(client, namespace))["metadata"]
    # the intention, then the replicas; the number alone did not come any more
    left = {SCALED_BY: f"{namespace}/{made['name']}/{made['uid']}", SCALED_TO: "5 from 2"}
    await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"metadata": {"annotations": left}})
    await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"spec": {"replicas": 5}}, subresource="scale")
    wanted = Wanted(main=5)
    async with scaling(kube.admin, namespace, wanted):
        await until_current(client, namespace, 5)
        assert await says(client, namespace, "ScalingActive") == ("True", "Scaling")
        wanted.replicas["main"] = 3
        await until_current(client, namespace, 3)
