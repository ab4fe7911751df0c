# SPDX-License-Identifier: Apache-2.0
"""Faults under a steady load that needs all replicas: none may go because of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.cluster.scaling.asking import Asking
from bench.cluster.scaling.objects import Model
from bench.cluster.scaling.prometheus import PROMETHEUS, in_flight, running_prometheus
from bench.cluster.scaling.watching import now_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.cluster.scaling.site import Site

_REPLICAS: Final = 3
_MOST: Final = 6
_NAME: Final = "faults"
# Of each gateway. An engine is to have 2.1 requests in flight (70% of 3): both gateways' streams need three engines,
# those of one need two.
_STREAMS: Final = 3
_TOKENS: Final = 28
_SPEED: Final = 0.1
_FOREVER: Final = 1_000_000
_LAWS: Final = (
    {"name": "Target"},
    {"name": "Concurrency", "concurrency": {"target": 3, "stableWindow": "6s"}},
    {"name": "Work"},
)


def _model(site: Site) -> Model:
    """Below its maximum and above its minimum: replicas could grow and fall."""
    query = in_flight(site.namespace, _NAME)
    source = {"address": f"http://{site.prometheus}", "query": query}
    return Model(
        name=_NAME,
        replicas=_REPLICAS,
        most=_MOST,
        engine=("--speed", f"{_SPEED:g}"),
        policy={
            # nobody is obeyed until there is load
            "mode": "Recommend",
            "period": "1s",
            "drain": "0s",
            "staleness": {"soft": "4s", "hard": "20s"},
            "strategies": _LAWS,
            "metrics": [{"name": "in_flight", "value": 2.2, "source": "Prometheus", "prometheus": source}],
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
    """Each fault lasts ``for_s``. When all are over and the load ends, replicas do go: the policy is one that scales
    in. Raises TimeoutError if they do not.
    """
    faults: dict[str, Callable[[Site], contextlib.AbstractAsyncContextManager[None]]] = {
        "half of the gateways silent": _silent_gateway,
        "Prometheus killed": _killed_prometheus,
        "the manager killed": _killed_manager,
        "engines' pages garbage": _pages("garbage"),
        "engines' pages hang": _pages("silence"),
        "engines' pages empty": _pages("empty"),
    }
    found = list[Survived]()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running_prometheus(site))
        model = _model(site)
        replicas = await stack.enter_async_context(site.serving(model))
        clients = [await stack.enter_async_context(Asking(one.url, _NAME)) for one in site.gateways]
        tasks = [asyncio.create_task(_again_and_again(one)) for one in clients for _ in range(_STREAMS)]
        await asyncio.sleep(15)
        await site.obey(model)
        for name, fault in faults.items():
            began_s = now_s()
            async with fault(site):
                await asyncio.sleep(for_s)
                reasons = [one["reason"] for one in (await site.decision(_NAME)).get("targets", ())]
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
async def _killed_prometheus(site: Site) -> AsyncIterator[None]:
    await site.processes.end(PROMETHEUS, signal.SIGKILL)
    try:
        yield
    finally:
        await site.processes.start_again(PROMETHEUS)


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
        pods = [one for one in await site.pods(_model(site)) if "deletionTimestamp" not in one["metadata"]]
        await asyncio.gather(*(_post(http, f"http://{one['status']['podIP']}:8000/faults", fault) for one in pods))


def _post(http: aiohttp.ClientSession, url: str, fault: dict[str, object]) -> Awaitable[None]:
    async def post() -> None:
        async with http.post(url, json=fault) as answer:
            answer.raise_for_status()

    return post()
