# SPDX-License-Identifier: Apache-2.0
"""Faults under a steady load that needs all replicas: none may go because of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.cluster.scaling.asking import Asking
from bench.cluster.scaling.objects import Model
from bench.cluster.scaling.watching import now_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.cluster.scaling.site import Site

_REPLICAS: Final = 3
# Of each gateway. An engine is to have 1.2 requests in flight; the load of both gateways needs more than two of them.
_STREAMS: Final = 3
_TOKENS: Final = 28
_SPEED: Final = 0.1
_FOREVER: Final = 1_000_000
_LAWS: Final = (
    {"name": "Concurrency", "concurrency": {"target": 2, "stableWindow": "6s"}},
    {"name": "Work"},
)
_MODEL: Final = Model(
    name="faults",
    replicas=_REPLICAS,
    most=_REPLICAS + 1,
    engine=("--speed", f"{_SPEED:g}"),
    policy={
        # nobody is obeyed until there is load
        "mode": "Recommend",
        "period": "1s",
        "drain": "0s",
        "staleness": {"soft": "4s", "hard": "20s"},
        "strategies": _LAWS,
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 8}},
    },
    target={"minReplicas": 1},
)


class Survived(msgspec.Struct, frozen=True, kw_only=True):
    """``fault``: which. ``replicas``: asked for while it lasted, one after the other. ``falls``: how often there were
    fewer than before. ``decision``: the last one, in words.
    """

    fault: str
    replicas: tuple[int, ...]
    falls: int
    decision: str


async def survived(site: Site, *, for_s: float = 30.0, tell: Callable[[str], None] = lambda _: None) -> list[Survived]:
    """Each fault lasts ``for_s``. When all are over and the load ends, replicas do go: the policy is one that scales in.
    Raises TimeoutError if they do not.
    """
    faults: dict[str, Callable[[Site], contextlib.AbstractAsyncContextManager[None]]] = {
        "half of the gateways silent": _silent_gateway,
        "the manager killed": _killed_manager,
        "engines' pages garbage": _pages("garbage"),
        "engines' pages hang": _pages("silence"),
        "engines' pages empty": _pages("empty"),
    }
    found = list[Survived]()
    async with contextlib.AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(site.serving(_MODEL))
        clients = [await stack.enter_async_context(Asking(one.url, _MODEL.name)) for one in site.gateways]
        tasks = [asyncio.create_task(_again_and_again(one)) for one in clients for _ in range(_STREAMS)]
        await asyncio.sleep(15)
        await site.obey(_MODEL)
        for name, fault in faults.items():
            began_s = now_s()
            async with fault(site):
                await asyncio.sleep(for_s)
                reasons = [one["reason"] for one in (await site.decision(_MODEL.name)).get("targets", ())]
            # what was learned during the fault must not be acted upon afterwards either
            await asyncio.sleep(for_s / 3)
            done = Survived(
                fault=name,
                replicas=tuple(replicas.since(began_s)),
                falls=replicas.falls(began_s),
                decision="; ".join(reasons),
            )
            found.append(done)
            tell(f"{name}: replicas {done.replicas}, {done.decision}")
        for task in tasks:
            task.cancel()
        for one in clients:
            await one.hang_up()
        await replicas.until(lambda one: one == 1, timeout_s=120.0)
    return found


async def _again_and_again(asking: Asking) -> None:
    while True:
        await asking.ask(tokens=_TOKENS, words=200)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _silent_gateway(site: Site) -> AsyncIterator[None]:
    name = site.gateways[-1].extproc
    site.freeze(name)
    try:
        yield
    finally:
        site.thaw(name)


@contextlib.asynccontextmanager
async def _killed_manager(site: Site) -> AsyncIterator[None]:
    await site.kill_manager()
    yield


def _pages(kind: str) -> Callable[[Site], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def broken(site: Site) -> AsyncIterator[None]:
        await _set(site, kind, _FOREVER)
        try:
            yield
        finally:
            await _set(site, kind, 0)

    return broken


async def _set(site: Site, kind: str, times: int) -> None:
    fault = {"fault": "ill-page", "kind": kind, "times": times}
    async with aiohttp.ClientSession() as http:
        pods = [one for one in await site.pods(_MODEL) if "deletionTimestamp" not in one["metadata"]]
        await asyncio.gather(*(_post(http, f"http://{one['status']['podIP']}:8000/faults", fault) for one in pods))


def _post(http: aiohttp.ClientSession, url: str, fault: dict[str, object]) -> Awaitable[None]:
    async def post() -> None:
        async with http.post(url, json=fault) as answer:
            answer.raise_for_status()

    return post()
