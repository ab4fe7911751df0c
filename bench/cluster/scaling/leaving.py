# SPDX-License-Identifier: Apache-2.0
"""Replicas go while streams are under way: none is cut."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

import msgspec

from bench.cluster.scaling.asking import Asking
from bench.cluster.scaling.objects import Model
from bench.cluster.scaling.site import PATIENCE_S
from bench.cluster.scaling.watching import now_s

if TYPE_CHECKING:
    from bench.cluster.scaling.site import Site

# 14 tokens a second, so that streams are long and cost this machine little.
_SPEED: Final = 0.1
_TOKENS_PER_S: Final = 14
_REPLICAS: Final = 3


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas``: asked for, one after the other. ``whole``: streams; ``cut``: what became of the others. ``open``:
    streams that were under way when each change was written. ``took_s``: from the first stream until one replica is
    left.
    """

    replicas: tuple[int, ...]
    whole: int
    cut: tuple[str, ...]
    open: tuple[int, ...]
    took_s: float


async def scaled_in(site: Site, kind: str, *, streams: int = 18) -> Left:
    """Three replicas with streams of 10 to 30 s, and then only a little load until one replica is left."""
    name = f"leaves-{kind.lower()}"
    policy = {
        # nobody is obeyed until all streams have begun
        "mode": "Recommend",
        "period": "1s",
        "drain": "90s",
        "strategies": [{"name": "Concurrency", "concurrency": {"target": 8, "stableWindow": "6s"}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    }
    model = Model(
        name=name,
        kind=kind,
        replicas=_REPLICAS,
        most=_REPLICAS,
        engine=("--speed", f"{_SPEED:g}"),
        drain_s=90,
        policy=policy,
        target={"minReplicas": 1},
    )
    rng, under_way = random.Random(4), list[int]()
    async with site.serving(model) as replicas, Asking(site.gateways[0].url, name) as asking:
        began_s = now_s()
        for _ in range(streams):
            _ = asking.ask(tokens=round(rng.uniform(10, 30) * _TOKENS_PER_S))
            await asyncio.sleep(0.05)
        await site.obey(model)
        little = asyncio.create_task(asking.steadily(1.0, tokens=_TOKENS_PER_S))
        last = replicas.now
        async with asyncio.timeout(PATIENCE_S):
            while replicas.now > 1:
                await replicas.until(last.__ne__, timeout_s=PATIENCE_S)
                under_way.append(asking.open)
                last = replicas.now
        took_s = now_s() - began_s
        little.cancel()
        await asking.all_ended()
        await site.until_ready(model, 1)
        return Left(
            replicas=tuple(replicas.since(began_s)),
            whole=len(asking.asked) - len(asking.failures),
            cut=tuple(asking.failures),
            open=tuple(under_way),
            took_s=took_s,
        )
