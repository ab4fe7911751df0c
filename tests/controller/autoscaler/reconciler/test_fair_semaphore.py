# SPDX-License-Identifier: Apache-2.0
"""Pages of engines are read in turns that namespaces share fairly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from aiohttp import web

from controller.api.autoscaling import MetricTarget
from controller.api.autoscaling_binding import ObjectReference, ScaleTarget
from controller.api.autoscaling_policy import AutoscalingPolicySpec
from controller.autoscaler.reconciler.controller import wall_clock_s
from controller.autoscaler.reconciler.fair_semaphore import FairSemaphore
from controller.autoscaler.reconciler.metric_sources import MetricSources, SourceSettings
from controller.autoscaler.reconciler.scalables import find_scalable_kind
from controller.autoscaler.reconciler.target_resolver import ResolvedTarget
from controller.kube.api_resources import MODEL_INFERS
from controller.kube.pod_views import PodView
from controller.models.model_infer import names
from tests.scaling_scenes import situation
from tests.scaling_scenes import target as engines_at
from tests.waiting import eventually

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import MetricReading
    from controller.kube.client import Client


async def taking(shares: FairSemaphore, namespace: str, gate: asyncio.Event, served: list[str]) -> None:
    async with shares.acquire(namespace):
        served.append(namespace)
        await gate.wait()


async def test_a_namespace_that_wants_all_leaves_room_for_the_next() -> None:
    shares, gate, served = FairSemaphore(12), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(taking(shares, "greedy", gate, served)) for _ in range(100)]
    await asyncio.sleep(0)
    # half: one share is left
    assert served == ["greedy"] * 6
    tasks += [asyncio.create_task(taking(shares, "modest", gate, served)) for _ in range(2)]
    tasks += [asyncio.create_task(taking(shares, "late", gate, served)) for _ in range(9)]
    await asyncio.sleep(0)
    assert served.count("modest") == 2
    assert served.count("late") == 3
    assert len(served) <= 12
    gate.set()
    await asyncio.gather(*tasks)
    assert len(served) == 111


async def test_namespaces_take_turns() -> None:
    """With more namespaces than turns, each gets its next one after the others."""
    shares, gate, served = FairSemaphore(1), asyncio.Event(), list[str]()
    tasks = [asyncio.create_task(taking(shares, name, gate, served)) for name in "xaaabbbccc"]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert served == list("xabcabcabc")


async def test_who_leaves_takes_no_turn_along() -> None:
    shares, gate, served = FairSemaphore(4), asyncio.Event(), list[str]()
    first = [asyncio.create_task(taking(shares, "a", gate, served)) for _ in range(2)]
    await asyncio.sleep(0)
    leaving = [asyncio.create_task(taking(shares, "a", gate, served)) for _ in range(5)]
    await asyncio.sleep(0)
    gate.set()
    # a turn may be granted to one that has just been cancelled
    await asyncio.gather(*first)
    for one in leaving:
        one.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    served.clear()
    async with asyncio.timeout(120):
        await asyncio.gather(*(taking(shares, name, gate, served) for name in "aabb"))
    assert sorted(served) == ["a", "a", "b", "b"]


def engines(namespace: str, number: int, count: int) -> ResolvedTarget:
    """Engines at 127.NUMBER.0.1 and so on."""
    pods = [
        PodView(
            key=f"{namespace}/llama-{index}",
            name=f"llama-{index}",
            uid=f"{index}",
            labels={names.GROUP: f"{index}"},
            ip=f"127.{number}.{index // 250}.{index % 250 + 1}",
            is_ready=True,
            created_at_s=0.0,
        )
        for index in range(count)
    ]
    reference = ObjectReference(api_version=MODEL_INFERS.api_version, kind=MODEL_INFERS.kind, name="llama")
    place = (namespace, MODEL_INFERS.group, MODEL_INFERS.kind, "llama")
    kind = find_scalable_kind(MODEL_INFERS.group, MODEL_INFERS.kind)
    return ResolvedTarget(
        spec=ScaleTarget(name="a", ref=reference, max_replicas=999), place=place, kind=kind, pods=pods
    )


async def test_slow_engines_of_one_namespace_hold_up_no_other() -> None:
    begun, gate = list[str](), asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        if request.host.startswith("127.1."):
            begun.append(request.host)
            await gate.wait()
        return web.Response(text="queue 7\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)  # noqa: S104 - all of this machine's loopback addresses
    await site.start()
    port = runner.addresses[0][1]
    settings = SourceSettings(side_by_side=8, timeout_s=60.0)
    sources = MetricSources(cast("Client", None), settings, wall_clock_s, lambda _: port)
    policy = AutoscalingPolicySpec(period=0.1, metrics=(MetricTarget(name="queue", value=5.0, source="Engine"),))

    async def measured(found: ResolvedTarget) -> MetricReading:
        given = [situation(engines_at())]
        (made,) = await sources.with_metrics(found.place[0], policy, [found], given)
        return made.metrics["queue"]

    slow, quick = engines("slow", 1, 300), engines("quick", 2, 3)
    try:
        assert (await measured(slow)).by_engine is None
        await eventually(lambda: len(begun) >= 4)

        async def is_measured() -> bool:
            return (await measured(quick)).by_engine == {f"llama-{index}": 7.0 for index in range(3)}

        # all slow pages are still under way
        await eventually(is_measured)
        assert len(begun) == 4
    finally:
        gate.set()
        await sources.close()
        await runner.cleanup()
