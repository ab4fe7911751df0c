# SPDX-License-Identifier: Apache-2.0
"""Storms at the API server: scaling goes on as far as it can, asks no more than it may, and scales nothing in for
them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest_asyncio

from controller.kube.api_resources import AUTOSCALING_POLICY_BINDINGS, DEPLOYMENTS
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds, reasons
from tests.with_kube.scaling import (
    Demand,
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

    from controller.kube.client import Client
    from tests.fake_api.server import ApiCall, FakeServer
    from tests.with_kube.kubes import Kube

pytestmark = FAKE


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, namespace: str) -> AsyncIterator[None]:
    """Our kinds are served."""
    await define_kinds(client)
    yield
    await delete_workloads(client, namespace)


async def two_targets(client: Client, namespace: str) -> None:
    """A binding of the Deployments ``first`` and ``second``, each with two replicas; its targets have the same
    names.
    """
    await make_policy(client, namespace)
    targets = []
    for name in ("first", "second"):
        await make_server(client, namespace, name, app=name)
        await client.create(DEPLOYMENTS, deployment(namespace, name, replicas=2))
        targets.append({**target(name=name), "name": name})
    await bind(client, namespace, *targets)


async def until_replicas(client: Client, namespace: str, name: str, number: int) -> None:
    async def has() -> bool:
        return await replicas_of(client, namespace, name) == number

    await eventually(has)


async def until_active(client: Client, namespace: str, *said: str) -> None:
    async def has() -> bool:
        return await says(client, namespace, "ScalingActive") == said

    await eventually(has)


def _of(name: str, *verbs: str) -> object:
    def chosen(call: ApiCall) -> bool:
        return call.verb in verbs and call.target.kind.resource == DEPLOYMENTS and call.target.name == name

    return chosen


def _statuses(call: ApiCall) -> bool:
    return call.target.subresource == "status" and call.target.kind.resource == AUTOSCALING_POLICY_BINDINGS


async def test_a_target_that_may_not_be_written_holds_up_no_other_and_the_status_says_so(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await two_targets(client, namespace)
    wanted = Wanted(first=2, second=2)
    async with scaling(kube.admin, namespace, wanted):
        await until_active(client, namespace, "True", "Scaling")
        fake.faults.refuse(1_000_000, 403, reason="Forbidden", of=_of("first", "patch"))
        wanted.replicas.update(first=5, second=5)
        await until_replicas(client, namespace, "second", 5)
        await until_active(client, namespace, "False", "WriteRefused")
        # and what was done to the other one is told once
        await eventually(lambda: _has_told(client, namespace))
        assert await replicas_of(client, namespace, "first") == 2
        fake.faults.heal()
        await until_replicas(client, namespace, "first", 5)
        await until_active(client, namespace, "True", "Scaling")


async def _has_told(client: Client, namespace: str) -> bool:
    told = await reasons(client, namespace)
    return "WriteRefused" in told and told.count("Scaled") == 1


async def test_conflicts_on_each_write_of_a_target_hold_up_no_other_and_are_tried_ever_less_often(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await two_targets(client, namespace)
    wanted = Wanted(first=2, second=2)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_active(client, namespace, "True", "Scaling")
        fake.faults.conflicts(1_000_000, of=_of("first", "patch"))
        wanted.replicas.update(first=5, second=5)
        await until_replicas(client, namespace, "second", 5)
        before, requests = running.metric("attache_scaling_reconciles_total", outcome="again"), fake.requests
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await asyncio.sleep(3.0)
        tries = running.metric("attache_scaling_reconciles_total", outcome="again") - before
        calls, took_s = fake.requests - requests, clock() - began_s
        # 0.1 to 0.2 s, then twice as long after each: without that there would be 15 of them, with six calls each
        assert tries <= 8 + took_s - 3.0
        assert calls <= 50 * took_s
        await eventually(lambda: running.metric("attache_scaling_reconciles_total", outcome="again") > before)
        assert await replicas_of(client, namespace, "first") == 2
        fake.faults.heal()
        await until_replicas(client, namespace, "first", 5)


async def test_a_status_that_cannot_be_written_holds_up_no_decision(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await two_targets(client, namespace)
    wanted, demand = Wanted(first=2, second=2), Demand()
    async with scaling(kube.admin, namespace, wanted, demand) as running:
        await until_active(client, namespace, "True", "Scaling")
        # the server asks for a minute, of the status alone
        fake.faults.refuse(1_000_000, 429, retry_after_s=60, of=_statuses)
        refused = fake.requests
        for number in (5, 1, 7, 3, 8):
            wanted.replicas.update(first=number, second=number)
            await until_replicas(client, namespace, "first", number)
            await until_replicas(client, namespace, "second", number)
        assert running.metric("attache_scaling_reconciles_total", outcome="error") == 0
        assert refused


async def test_watches_that_break_lists_that_expire_and_slow_answers_scale_nothing_in(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await two_targets(client, namespace)
    wanted = Wanted(first=2, second=2)
    lowest = {"first": 2, "second": 2}
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_active(client, namespace, "True", "Scaling")
        loop = asyncio.get_running_loop()
        fake.faults.slow(0.02)
        ends_s, before = loop.time() + 5.0, fake.requests
        number = 2
        while loop.time() < ends_s:
            number = 3 if number == 2 else 2 + number % 7
            wanted.replicas.update(first=number, second=number)
            fake.watches.drop()
            fake.expire()
            fake.watches.expire()
            await asyncio.sleep(0.1)
            for name, least in list(lowest.items()):
                lowest[name] = min(least, await replicas_of(client, namespace, name))
        # some 10 informers, each with two or three calls a second, and two targets that are written all the time
        assert fake.requests - before <= 1500
        fake.faults.heal()
        wanted.replicas.update(first=6, second=6)
        await until_replicas(client, namespace, "first", 6)
        await until_replicas(client, namespace, "second", 6)
        assert lowest == {"first": 2, "second": 2}
        assert not running.task.done()
