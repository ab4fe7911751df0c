# SPDX-License-Identifier: Apache-2.0
"""A binding whose decision stands is not written about, yet whatever anybody changes is seen at the next look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from bench.cluster.assets import ROOT
from controller.autoscaler.decision.signals import Calm
from controller.kube.resources import AUTOSCALING_POLICY_BINDINGS, DEPLOYMENTS
from tests.waiting import eventually
from tests.with_kube.managing import define_kinds
from tests.with_kube.scaling import (
    Demand,
    Scales,
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
    from collections.abc import AsyncIterator, Mapping, Sequence

    from controller.api.autoscaling import AutoscalingPolicySpec
    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.situation import Situation
    from controller.autoscaler.reconciler.deciding import Deciding
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

SOON_S = 30.0


class Steady(Wanted):
    """Returns the last decision again where the next one would say the same."""

    last: Decision | None = None

    def decide(
        self,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        situations: Sequence[Situation],
        memory: int | None,
        now_s: float,
        *,
        free: Mapping[str, int] | None = None,
    ) -> tuple[Decision, int]:
        found, memory = super().decide(policy, binding, situations, memory, now_s, free=free)
        if self.last is None or said(self.last) != said(found):
            self.last = found
        return self.last, memory


class Still(Steady):
    """A decision of which it is known, too, that it stands where nothing but time has changed."""

    @property
    def deciding(self) -> Deciding:
        return super().deciding._replace(
            still=lambda memory, *_: None if self.last is None else (self.last, memory),
        )


class Quiet(Demand):
    """Nothing goes on. ``version``: of that; None: it is not known."""

    version: int | None = 1

    def calm(self, servers: Sequence[str], now_s: float) -> Calm | None:
        assert servers
        return None if self.version is None else Calm((self.version,), now_s)


def said(decision: Decision) -> list[tuple[int | None, int | None]]:
    """What a decision says of each target."""
    return [(one.current, one.desired) for one in decision.targets]


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, namespace: str) -> AsyncIterator[None]:
    """Our kinds are served."""
    await define_kinds(client, ROOT / "manifests" / "crds")
    yield
    await delete_workloads(client, namespace)


async def until_it_rests(running: Scales, times: int = 3) -> None:
    """For so many more looks."""
    until = running.metric("attache_scaling_looks_total", outcome="unchanged") + times
    await eventually(
        lambda: running.metric("attache_scaling_looks_total", outcome="unchanged") >= until, timeout_s=SOON_S
    )


async def test_what_anybody_changes_ends_the_rest(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Steady(main=2)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_it_rests(running)
        writes = running.writes()
        await until_it_rests(running, 5)
        assert running.writes() == writes

        # a status that somebody else has written is written anew
        lost: dict[str, object] = {"status": {"conditions": []}}
        await client.merge_patch(AUTOSCALING_POLICY_BINDINGS, "one", namespace, lost, subresource="status")

        async def is_said() -> bool:
            return await says(client, namespace, "TargetsResolved") == ("True", "Resolved")

        await eventually(is_said, timeout_s=SOON_S)
        await until_it_rests(running)

        # another decision is carried out
        wanted.replicas["main"] = 4

        async def are_there() -> bool:
            return await replicas_of(client, namespace, "llama") == 4

        await eventually(are_there, timeout_s=SOON_S)
        await until_it_rests(running)

        # replicas that somebody sets are honoured
        await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"spec": {"replicas": 3}})

        async def is_held() -> bool:
            return await says(client, namespace, "ScalingActive") == ("False", "ManualHold")

        await eventually(is_held, timeout_s=SOON_S)
        rested = running.metric("attache_scaling_looks_total", outcome="unchanged")
        decisions = wanted.decisions
        await eventually(lambda: wanted.decisions >= decisions + 3, timeout_s=SOON_S)
        assert running.metric("attache_scaling_looks_total", outcome="unchanged") == rested


async def test_where_nothing_goes_on_it_is_not_decided_again_until_something_changes(
    client: Client, kube: Kube, namespace: str
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted, demand = Still(main=2), Quiet()
    async with scaling(kube.admin, namespace, wanted, demand) as running:

        async def are_without_decision() -> bool:
            """Five looks in a row."""
            before = wanted.decisions
            await until_it_rests(running, 5)
            return wanted.decisions == before

        async def is_quiet() -> None:
            # lists come again, and what was learned is written
            await eventually(are_without_decision, timeout_s=SOON_S)

        async def is_decided() -> None:
            """At a later look."""
            before = wanted.decisions
            await eventually(lambda: wanted.decisions > before, timeout_s=SOON_S)

        await is_quiet()
        demand.version = 2
        await is_decided()
        await is_quiet()

        # as long as it is not known that nothing goes on
        demand.version = None
        await is_decided()
        await is_decided()
        demand.version = 3
        await is_decided()
        await is_quiet()

        # a status that somebody else has written is written anew
        before = wanted.decisions
        lost: dict[str, object] = {"status": {"conditions": []}}
        await client.merge_patch(AUTOSCALING_POLICY_BINDINGS, "one", namespace, lost, subresource="status")

        async def is_said() -> bool:
            return await says(client, namespace, "TargetsResolved") == ("True", "Resolved")

        await eventually(is_said, timeout_s=SOON_S)
        assert wanted.decisions > before
        await is_quiet()

        # replicas that somebody sets are honoured
        await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"spec": {"replicas": 3}})

        async def is_held() -> bool:
            return await says(client, namespace, "ScalingActive") == ("False", "ManualHold")

        await eventually(is_held, timeout_s=SOON_S)
        await is_decided()
        await is_decided()
