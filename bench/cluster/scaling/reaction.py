# SPDX-License-Identifier: Apache-2.0
"""How fast replicas are written: after overload, and after a request for a model without engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.cluster.scaling.asking import Asking
from bench.cluster.scaling.objects import Model
from bench.cluster.scaling.site import PATIENCE_S, until
from bench.cluster.scaling.watching import now_s
from controller.autoscaler.reconciler.scaling import wall_s
from controller.kube.gateway_reports import messages
from extproc.api.status_pages import ServerDemand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from bench.cluster.scaling.site import Site
    from bench.cluster.scaling.watching import Replicas

# An engine that computes some 2,000 tokens of prompts a second; a burst is minutes of work for it.
_ENGINE: Final = ("--speed", "0.05")
_BURST: Final = 150
_WORDS: Final = 2000
_CALM_PER_S: Final = 0.5
_OBJECTIVE: Final = {"ttft": "4s", "tpot": "500ms"}
_LATEST_S: Final = 40.0
# Replicas that somebody else has set are honoured for so long, and the load forgotten.
_POLICY: Final = {
    "manualHold": "1s",
    "drain": "0s",
    "objective": _OBJECTIVE,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}},
}
_ALIKE: Final = 1
# Requests that are more than the little load has, and decisions that a trial can see.
_MANY: Final = 8
_DECISIONS: Final = 50
_RECORDED_S: Final = 0.5
_RECORDED_TRIES: Final = 10
_TURNS: Final = 6


class Reaction(msgspec.Struct, frozen=True):
    """Seconds from the first request. ``write_s``: to the event of the written replicas. ``replicas``: written.
    ``told_s``: until the gateway told of many more requests; ``decided_s``: until the decision that asked for more
    replicas began.
    """

    write_s: float
    replicas: int
    told_s: float = math.nan
    decided_s: float = math.nan

    @property
    def split(self) -> str:
        """Where the time went."""
        return f"told after {self.told_s:.2f} s, decided after {self.decided_s:.2f} s"


async def overloads(
    site: Site, trials: int, *, has_queue: bool = True, tell: Callable[[str], None] = lambda _: None
) -> list[Reaction]:
    """Calm, then a burst that is minutes of work for an engine, which leaves once replicas are written; then one
    replica again. Several models take turns, so that each has time to calm down. ``has_queue``: whether extproc holds
    what engines have no room for. Raises TimeoutError.
    """
    server: Mapping[str, Any] = {"flowControl": {}} if has_queue else {}
    name = "overload" if has_queue else "overload-plain"
    models = [
        Model(name=f"{name}-{number}", most=2, engine=_ENGINE, policy=_POLICY, server=server, target={"minReplicas": 1})
        for number in range(min(_TURNS, trials))
    ]
    rng, found = random.Random(1), list[Reaction]()
    async with contextlib.AsyncExitStack() as stack:
        followed = await asyncio.gather(*(_calm(site, one, stack) for one in models))
        for number, (model, replicas) in zip(range(trials), itertools.cycle(zip(models, followed, strict=True))):
            # at any moment of the manager's period, and nothing is written of its own accord meanwhile
            while True:
                await _calmed(site, model, replicas)
                await asyncio.sleep(rng.uniform(0, 5))
                if replicas.now == 1:
                    break
            found.append(await _burst(site, model, replicas))
            await site.set_replicas(model, 1)
            tell(f"{name} {number}: {found[-1].write_s:.2f} s to {found[-1].replicas} replicas; {found[-1].split}")
    return found


async def _calm(site: Site, model: Model, stack: contextlib.AsyncExitStack) -> Replicas:
    """A model with a little load."""
    replicas = await stack.enter_async_context(site.serving(model))
    calm = await stack.enter_async_context(Asking(site.gateways[0].url, model.name))
    steady = asyncio.create_task(calm.steadily(_CALM_PER_S, tokens=8, words=300))
    stack.callback(steady.cancel)
    return replicas


async def _burst(site: Site, model: Model, replicas: Replicas) -> Reaction:
    async with Asking(site.gateways[0].url, model.name) as asking, _told(site, model) as told:
        began_s, began_at_s = now_s(), wall_s()
        for _ in range(_BURST):
            _ = asking.ask(tokens=8, words=_WORDS)
        try:
            change = await replicas.until(lambda one: one > 1, timeout_s=_LATEST_S)
        except TimeoutError:
            raise TimeoutError(f"nothing is written: {await site.decision(model.name)}") from None
        decided_s = await _decided_s(site, model, began_at_s)
        told_s = min((at_s - began_s for at_s in told if at_s > began_s), default=math.nan)
        return Reaction(change.at_s - began_s, change.replicas, told_s, decided_s)


async def _decided_s(site: Site, model: Model, began_at_s: float) -> float:
    """After how long the first decision for more replicas began. Its record is there some time after the write."""
    for _ in range(_RECORDED_TRIES):
        await asyncio.sleep(_RECORDED_S)
        asked = [
            one["at_s"] - began_at_s
            for one in await site.decisions(model.name, _DECISIONS)
            if one["at_s"] > began_at_s and any((each["desired"] or 0) > 1 for each in one["targets"])
        ]
        if asked:
            return float(min(asked))
    return math.nan


@contextlib.asynccontextmanager
async def _told(site: Site, model: Model) -> AsyncIterator[Sequence[float]]:
    """When the gateway's lines told of many more requests than the first line did."""
    instants: list[float] = []
    server = f"{site.namespace}/{model.name}"
    is_heard = asyncio.Event()

    async def follow() -> None:
        fewest: int | None = None
        async with (
            aiohttp.ClientSession() as http,
            contextlib.aclosing(messages(http, site.gateways[0].pages)) as lines,
        ):
            async for message in lines:
                one = message.servers.get(server, ServerDemand())
                unfinished = one.queued + sum(each.in_flight for each in one.engines.values())
                fewest = unfinished if fewest is None else min(fewest, unfinished)
                if unfinished >= fewest + _MANY:
                    instants.append(now_s())
                is_heard.set()

    task = asyncio.create_task(follow())
    try:
        await is_heard.wait()
        yield instants
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _calmed(site: Site, model: Model, replicas: Replicas) -> None:
    """Until one replica is asked for, is there, and is what decisions say several times."""
    if replicas.now > 1:
        await site.set_replicas(model, 1)
        await replicas.until(lambda one: one == 1, timeout_s=PATIENCE_S)
    alike, last = 0, 0.0
    began_s = now_s()

    async def is_calm() -> bool:
        nonlocal alike, last
        if replicas.now > 1:
            alike = 0
            await site.set_replicas(model, 1)
        decision = await site.decision(model.name)
        if decision and decision["at_s"] != last:
            last = decision["at_s"]
            alike = alike + 1 if all(one["desired"] == 1 for one in decision["targets"]) else 0
        return alike >= _ALIKE

    await until(is_calm, f"{model.name} does not calm down since {began_s:.0f}")
    await site.until_ready(model, 1)


async def wakings(site: Site, trials: int, *, tell: Callable[[str], None] = lambda _: None) -> list[Reaction]:
    """A request for a model without engines, whose client leaves once replicas are written; then none again. The engine
    never starts, so trials are short.
    """
    name = "waking"
    policy = {**_POLICY, "scaleToZero": {"idle": "1s"}}
    server: Mapping[str, Any] = {"activation": {}}
    model = Model(name=name, replicas=0, start_s=3600, policy=policy, server=server)
    rng, found = random.Random(2), list[Reaction]()
    async with site.serving(model) as replicas:
        for number in range(trials):
            await _emptied(site, model, replicas)
            await asyncio.sleep(rng.uniform(0, 6))
            async with Asking(site.gateways[0].url, name) as asking:
                began_s = now_s()
                _ = asking.ask()
                change = await replicas.until(lambda one: one > 0, timeout_s=PATIENCE_S)
            found.append(Reaction(change.at_s - began_s, change.replicas))
            tell(f"{name} {number}: {found[-1].write_s * 1000:.0f} ms")
    return found


async def _emptied(site: Site, model: Model, replicas: Replicas) -> None:
    async def is_empty() -> bool:
        if replicas.now:
            await site.set_replicas(model, 0)
            await asyncio.sleep(0.5)
            return False
        decision = await site.decision(model.name)
        return bool(decision) and all(one["desired"] == 0 for one in decision["targets"])

    await until(is_empty, f"{model.name} has replicas still")
    await site.until_ready(model, 0)
