# SPDX-License-Identifier: Apache-2.0
"""From none to one engine and back, with requests at the worst moments: all of them must be answered."""

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
    from collections.abc import Callable

    from bench.cluster.scaling.site import Site
    from bench.cluster.scaling.watching import Replicas

_IDLE_S: Final = 2.0


class Cycles(msgspec.Struct, frozen=True, kw_only=True):
    """``cycles``: writes of 0. ``asked``: requests. ``lost``: what became of those without a whole answer."""

    cycles: int
    asked: int
    lost: tuple[str, ...]
    waits_s: tuple[float, ...]


async def cycled(
    site: Site,
    kind: str,
    cycles: int,
    *,
    longest_s: float = 1e9,
    number: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Cycles:
    """Requests come around the moment at which the last replica is taken away: in the seconds before it, at the very
    event, while the engine drains, and when it is gone. ``longest_s``: begin no further cycle after so long.
    ``number``: of the model, where several are cycled side by side.
    """
    name = f"cycles-{kind.lower()}-{number}"
    policy = {
        "scaleToZero": {"idle": f"{_IDLE_S:g}s"},
        "period": "1s",
        "drain": "20s",
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    }
    model = Model(name=name, kind=kind, replicas=0, most=1, policy=policy, server={"activation": {"holdTimeout": "4m"}})
    rng, until_s = random.Random(name), now_s() + longest_s
    async with site.serving(model) as replicas, Asking(site.gateways[0].url, name) as asking:
        while _zeros(replicas) < cycles and now_s() < until_s:
            before = _zeros(replicas)
            await asking.ask(tokens=rng.choice((1, 20)))
            await _worst_moment(rng, replicas, before)
            if _zeros(replicas) > before:
                tell(f"{name} {_zeros(replicas)}: {len(asking.asked)} requests, {len(asking.failures)} lost")
        await asking.ask()
        waits = tuple(one.first_at_s - one.began_at_s for one in asking.asked if not one.error)
        return Cycles(cycles=_zeros(replicas), asked=len(asking.asked), lost=tuple(asking.failures), waits_s=waits)


async def _worst_moment(rng: random.Random, replicas: Replicas, zeros: int) -> None:
    """One that is drawn, counted from the answer or from the write of 0."""
    if rng.random() < 0.25:
        await asyncio.sleep(_IDLE_S + rng.uniform(-0.3, 1.5))
        return
    await replicas.until(lambda one: _zeros(replicas) > zeros or one == 0, timeout_s=PATIENCE_S)
    await asyncio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.3), rng.uniform(0, 4.0))))


def _zeros(replicas: Replicas) -> int:
    return sum(one.replicas == 0 for one in replicas.changes[1:])
