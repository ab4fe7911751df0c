# SPDX-License-Identifier: Apache-2.0
"""Trials of the autoscaler: overload, cycles to zero and back, scale-in under load, faults under load."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import yaml

from tests.programs import program
from tests.with_kube.scaling_testbed import PATIENCE_S, LoadClient, ScaledModel, now_s, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from tests.with_kube.scaling_testbed import Replicas, Testbed

# An engine that computes some 2,000 tokens of prompts a second; a burst is minutes of work for it.
_ENGINE: Final = ("--speed", "0.05")
_BURST: Final = 150
_WORDS: Final = 2000
_CALM_PER_S: Final = 0.5
_OBJECTIVE: Final = {"ttft": "4s", "tpot": "500ms"}
_LATEST_S: Final = 40.0
# A short manual hold and a short stabilisation window, so that trials follow each other quickly.
_POLICY: Final = {
    "manualHold": "1s",
    "drain": "0s",
    "objective": _OBJECTIVE,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 3}},
}
_ALIKE: Final = 1
_IDLE_S: Final = 2.0
# 14 tokens a second, so that streams are long and cost this machine little.
_SPEED: Final = 0.1
_TOKENS_PER_S: Final = 14
_REPLICAS: Final = 3
PROMETHEUS: Final = "prometheus"
_MOST: Final = 6
_NAME: Final = "faults"
# Of each gateway. An engine is to have 2.1 requests in flight (70% of 3): both gateways' streams need three engines,
# those of one need two.
_STREAMS: Final = 3
_TOKENS: Final = 28
_FOREVER: Final = 1_000_000
_LAWS: Final = (
    {"name": "Target"},
    {"name": "Concurrency", "concurrency": {"target": 3, "stableWindow": "6s"}},
    {"name": "Work"},
)


async def replicas_at_overload(testbed: Testbed, *, has_queue: bool) -> int:
    """The replicas that are written after little load and then a burst that is minutes of work for an engine.
    ``has_queue``: whether extproc queues requests beyond the engines' capacity. Raises TimeoutError.
    """
    server: Mapping[str, Any] = {"flowControl": {}} if has_queue else {}
    name = "overload" if has_queue else "overload-plain"
    model = ScaledModel(name=name, most=2, engine=_ENGINE, policy=_POLICY, server=server, target={"minReplicas": 1})
    async with contextlib.AsyncExitStack() as stack:
        replicas = await _serve_lightly(testbed, model, stack)
        await _calmed(testbed, model, replicas)
        return await _burst(testbed, model, replicas)


async def _serve_lightly(testbed: Testbed, model: ScaledModel, stack: contextlib.AsyncExitStack) -> Replicas:
    """A model with a little load."""
    replicas = await stack.enter_async_context(testbed.serving(model))
    calm = await stack.enter_async_context(LoadClient(testbed.gateways[0].url, model.name))
    steady = asyncio.create_task(calm.steadily(_CALM_PER_S, tokens=8, words=300))
    stack.callback(steady.cancel)
    return replicas


async def _burst(testbed: Testbed, model: ScaledModel, replicas: Replicas) -> int:
    async with LoadClient(testbed.gateways[0].url, model.name) as asking:
        for _ in range(_BURST):
            _ = asking.ask(tokens=8, words=_WORDS)
        try:
            return (await replicas.until(lambda one: one > 1, timeout_s=_LATEST_S)).replicas
        except TimeoutError:
            raise TimeoutError(f"nothing is written: {await testbed.decision(model.name)}") from None


async def _calmed(testbed: Testbed, model: ScaledModel, replicas: Replicas) -> None:
    """Until one replica is in the spec and ready, and several decisions in a row have desired one."""
    if replicas.now > 1:
        await testbed.set_replicas(model, 1)
        await replicas.until(lambda one: one == 1, timeout_s=PATIENCE_S)
    alike, last = 0, 0.0
    began_s = now_s()

    async def is_steady() -> bool:
        nonlocal alike, last
        if replicas.now > 1:
            alike = 0
            await testbed.set_replicas(model, 1)
        decision = await testbed.decision(model.name)
        if decision and decision["at_s"] != last:
            last = decision["at_s"]
            alike = alike + 1 if all(one["desired"] == 1 for one in decision["targets"]) else 0
        return alike >= _ALIKE

    await until(is_steady, f"{model.name} does not calm down since {began_s:.0f}")
    await testbed.until_ready(model, 1)


async def wakings(testbed: Testbed, trials: int) -> list[int]:
    """The replicas that are written for a request for a model without engines, whose client leaves then; then none
    again. The engine never starts, so trials are short.
    """
    name = "waking"
    policy = {**_POLICY, "scaleToZero": {"idle": "1s"}}
    server: Mapping[str, Any] = {"activation": {}}
    model = ScaledModel(name=name, replicas=0, start_s=3600, policy=policy, server=server)
    found = list[int]()
    async with testbed.serving(model) as replicas:
        for _ in range(trials):
            await _emptied(testbed, model, replicas)
            async with LoadClient(testbed.gateways[0].url, name) as asking:
                _ = asking.ask()
                found.append((await replicas.until(lambda one: one > 0, timeout_s=PATIENCE_S)).replicas)
    return found


async def _emptied(testbed: Testbed, model: ScaledModel, replicas: Replicas) -> None:
    async def is_empty() -> bool:
        if replicas.now:
            await testbed.set_replicas(model, 0)
            await asyncio.sleep(0.5)
            return False
        decision = await testbed.decision(model.name)
        return bool(decision) and all(one["desired"] == 0 for one in decision["targets"])

    await until(is_empty, f"{model.name} has replicas still")
    await testbed.until_ready(model, 0)


class Cycles(msgspec.Struct, frozen=True, kw_only=True):
    """``cycles``: writes of 0. ``asked``: requests. ``lost``: outcomes of those without a whole answer."""

    cycles: int
    asked: int
    lost: tuple[str, ...]


async def run_cycles(testbed: Testbed, kind: str, cycles: int) -> Cycles:
    """Requests come around the moment at which the last replica is taken away: in the seconds before it, at the very
    event, while the engine drains, and when it is gone.
    """
    name = f"cycles-{kind.lower()}"
    policy = {
        "scaleToZero": {"idle": f"{_IDLE_S:g}s"},
        "period": "1s",
        "drain": "20s",
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
    }
    model = ScaledModel(
        name=name, kind=kind, replicas=0, most=1, policy=policy, server={"activation": {"holdTimeout": "4m"}}
    )
    rng = random.Random(name)
    async with testbed.serving(model) as replicas, LoadClient(testbed.gateways[0].url, name) as asking:
        while _zeros(replicas) < cycles:
            before = _zeros(replicas)
            await asking.ask(tokens=rng.choice((1, 20)))
            await _worst_moment(rng, replicas, before)
        await asking.ask()
        return Cycles(cycles=_zeros(replicas), asked=len(asking.asked), lost=tuple(asking.failures))


async def _worst_moment(rng: random.Random, replicas: Replicas, zeros: int) -> None:
    """One that is drawn, counted from the answer or from the write of 0."""
    if rng.random() < 0.25:
        await asyncio.sleep(_IDLE_S + rng.uniform(-0.3, 1.5))
        return
    await replicas.until(lambda one: _zeros(replicas) > zeros or one == 0, timeout_s=PATIENCE_S)
    await asyncio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, 0.3), rng.uniform(0, 4.0))))


def _zeros(replicas: Replicas) -> int:
    return sum(one.replicas == 0 for one in replicas.changes[1:])


class DrainOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas``: in the spec, one after the other. ``whole``: streams; ``cut``: what became of the others."""

    replicas: tuple[int, ...]
    whole: int
    cut: tuple[str, ...]


async def scaled_in(testbed: Testbed, kind: str, *, streams: int) -> DrainOutcome:
    """Three replicas with streams of 10 to 30 s, and then only a little load until one replica is left."""
    name = f"leaves-{kind.lower()}"
    policy = {
        # no decision is applied until all streams have begun
        "mode": "Recommend",
        "period": "1s",
        "drain": "90s",
        "strategies": [{"name": "Concurrency", "concurrency": {"target": 8, "stableWindow": "6s"}}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    }
    model = ScaledModel(
        name=name,
        kind=kind,
        replicas=_REPLICAS,
        most=_REPLICAS,
        engine=("--speed", f"{_SPEED:g}"),
        drain_s=90,
        policy=policy,
        target={"minReplicas": 1},
    )
    rng = random.Random(4)
    async with testbed.serving(model) as replicas, LoadClient(testbed.gateways[0].url, name) as asking:
        began_s = now_s()
        for _ in range(streams):
            _ = asking.ask(tokens=round(rng.uniform(10, 30) * _TOKENS_PER_S))
            await asyncio.sleep(0.05)
        await testbed.obey(model)
        little = asyncio.create_task(asking.steadily(1.0, tokens=_TOKENS_PER_S))
        await replicas.until(lambda one: one == 1, timeout_s=PATIENCE_S)
        little.cancel()
        await asking.all_ended()
        await testbed.until_ready(model, 1)
        return DrainOutcome(
            replicas=tuple(replicas.since(began_s)),
            whole=len(asking.asked) - len(asking.failures),
            cut=tuple(asking.failures),
        )


def in_flight(namespace: str, server: str) -> str:
    """A query: requests of a ModelServer at its engines, of all gateways."""
    return f'sum(attache_in_flight{{server="{namespace}/{server}"}})'


@contextlib.asynccontextmanager
async def running_prometheus(testbed: Testbed) -> AsyncIterator[None]:
    """At ``testbed.prometheus``."""
    targets = [{"targets": [one.pages for one in testbed.gateways]}]
    scraped = {"job_name": "extproc", "static_configs": targets}
    config = testbed.folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scraped]})
    )
    command = [
        program(PROMETHEUS),
        f"--config.file={config}",
        f"--web.listen-address={testbed.prometheus}",
        f"--storage.tsdb.path={testbed.folder / 'prometheus'}",
    ]
    await testbed.processes.start(PROMETHEUS, command)
    try:

        async def answers() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"http://{testbed.prometheus}/-/ready") as answer:
                    return answer.status == 200
            return False

        await testbed.processes.wait_ready(PROMETHEUS, answers)
        yield
    finally:
        if testbed.processes.is_running(PROMETHEUS):
            await testbed.processes.end(PROMETHEUS)


def _model(testbed: Testbed) -> ScaledModel:
    """Below its maximum and above its minimum: replicas could grow and fall."""
    query = in_flight(testbed.namespace, _NAME)
    source = {"address": f"http://{testbed.prometheus}", "query": query}
    return ScaledModel(
        name=_NAME,
        replicas=_REPLICAS,
        most=_MOST,
        engine=("--speed", f"{_SPEED:g}"),
        policy={
            # no decision is applied until there is load
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


async def run_faults(testbed: Testbed, *, for_s: float) -> dict[str, int]:
    """How often replicas fell, by fault. Each fault lasts ``for_s``. When all are over and the load ends, replicas do
    go: the policy is one that scales in. Raises TimeoutError if they do not.
    """
    faults: dict[str, Callable[[Testbed], contextlib.AbstractAsyncContextManager[None]]] = {
        "half of the gateways silent": _silent_gateway,
        "Prometheus killed": _killed_prometheus,
        "the manager killed": _killed_manager,
        "engines' pages garbage": _pages("garbage"),
        "engines' pages hang": _pages("silence"),
        "engines' pages empty": _pages("empty"),
    }
    falls = dict[str, int]()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(running_prometheus(testbed))
        model = _model(testbed)
        replicas = await stack.enter_async_context(testbed.serving(model))
        clients = [await stack.enter_async_context(LoadClient(one.url, _NAME)) for one in testbed.gateways]
        tasks = [asyncio.create_task(_again_and_again(one)) for one in clients for _ in range(_STREAMS)]
        await asyncio.sleep(15)
        await testbed.obey(model)
        for name, fault in faults.items():
            began_s = now_s()
            async with fault(testbed):
                await asyncio.sleep(for_s)
            # what was learned during the fault must not be acted upon afterwards either
            await asyncio.sleep(for_s / 3)
            falls[name] = replicas.falls(began_s)
        for task in tasks:
            task.cancel()
        for one in clients:
            await one.hang_up()
        await replicas.until(lambda one: one == 1, timeout_s=120.0)
    return falls


async def _again_and_again(asking: LoadClient) -> None:
    while True:
        await asking.ask(tokens=_TOKENS, words=200)
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _silent_gateway(testbed: Testbed) -> AsyncIterator[None]:
    name = testbed.gateways[-1].extproc
    testbed.freeze(name)
    try:
        yield
    finally:
        testbed.thaw(name)


@contextlib.asynccontextmanager
async def _killed_prometheus(testbed: Testbed) -> AsyncIterator[None]:
    await testbed.processes.end(PROMETHEUS, signal.SIGKILL)
    try:
        yield
    finally:
        await testbed.processes.start_again(PROMETHEUS)


@contextlib.asynccontextmanager
async def _killed_manager(testbed: Testbed) -> AsyncIterator[None]:
    await testbed.kill_manager()
    yield


def _pages(kind: str) -> Callable[[Testbed], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def broken(testbed: Testbed) -> AsyncIterator[None]:
        await _set(testbed, kind, _FOREVER)
        try:
            yield
        finally:
            await _set(testbed, kind, 0)

    return broken


async def _set(testbed: Testbed, kind: str, times: int) -> None:
    fault = {"fault": "ill-page", "kind": kind, "times": times}
    async with aiohttp.ClientSession() as http:
        pods = [one for one in await testbed.pods(_model(testbed)) if "deletionTimestamp" not in one["metadata"]]
        await asyncio.gather(*(_post(http, f"http://{one['status']['podIP']}:8000/faults", fault) for one in pods))


def _post(http: aiohttp.ClientSession, url: str, fault: dict[str, object]) -> Awaitable[None]:
    async def post() -> None:
        async with http.post(url, json=fault) as answer:
            answer.raise_for_status()

    return post()
