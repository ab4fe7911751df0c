# SPDX-License-Identifier: Apache-2.0
"""Trials of the autoscaler: reaction times, cycles to zero and back, scale-in under load, faults under load."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import shutil
import signal
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import yaml

from bench.cluster.scaling.testbed import PATIENCE_S, LoadClient, ScaledModel, now_s, until
from bench.stack.processes import StartFailed
from controller.kube.controller import wall_s
from controller.kube.gateway_reports import messages
from extproc.api.status_pages import ServerDemand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from bench.cluster.scaling.testbed import Replicas, Testbed

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
# Requests that are more than the little load has, and decisions that a trial can see.
_MANY: Final = 8
_DECISIONS: Final = 50
_RECORDED_S: Final = 0.5
_RECORDED_TRIES: Final = 10
_TURNS: Final = 6
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


class Reaction(msgspec.Struct, frozen=True):
    """Seconds from the first request. ``write_s``: to the event of the written replicas. ``replicas``: written.
    ``told_s``: until the gateway reported many more requests; ``decided_s``: until the start of the decision with more
    replicas.
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
    testbed: Testbed, trials: int, *, has_queue: bool = True, tell: Callable[[str], None] = lambda _: None
) -> list[Reaction]:
    """Little load, then a burst that is minutes of work for an engine; its clients leave once replicas are written;
    then one replica again. Several models take turns, so that each has time to return to one replica. ``has_queue``:
    whether extproc queues requests beyond the engines' capacity. Raises TimeoutError.
    """
    server: Mapping[str, Any] = {"flowControl": {}} if has_queue else {}
    name = "overload" if has_queue else "overload-plain"
    models = [
        ScaledModel(
            name=f"{name}-{number}", most=2, engine=_ENGINE, policy=_POLICY, server=server, target={"minReplicas": 1}
        )
        for number in range(min(_TURNS, trials))
    ]
    rng, found = random.Random(1), list[Reaction]()
    async with contextlib.AsyncExitStack() as stack:
        followed = await asyncio.gather(*(_serve_lightly(testbed, one, stack) for one in models))
        for number, (model, replicas) in zip(range(trials), itertools.cycle(zip(models, followed, strict=True))):
            # at any moment of the manager's period, and nothing is written of its own accord meanwhile
            while True:
                await _calmed(testbed, model, replicas)
                await asyncio.sleep(rng.uniform(0, 5))
                if replicas.now == 1:
                    break
            found.append(await _burst(testbed, model, replicas))
            await testbed.set_replicas(model, 1)
            tell(f"{name} {number}: {found[-1].write_s:.2f} s to {found[-1].replicas} replicas; {found[-1].split}")
    return found


async def _serve_lightly(testbed: Testbed, model: ScaledModel, stack: contextlib.AsyncExitStack) -> Replicas:
    """A model with a little load."""
    replicas = await stack.enter_async_context(testbed.serving(model))
    calm = await stack.enter_async_context(LoadClient(testbed.gateways[0].url, model.name))
    steady = asyncio.create_task(calm.steadily(_CALM_PER_S, tokens=8, words=300))
    stack.callback(steady.cancel)
    return replicas


async def _burst(testbed: Testbed, model: ScaledModel, replicas: Replicas) -> Reaction:
    async with LoadClient(testbed.gateways[0].url, model.name) as asking, _reported_jumps(testbed, model) as told:
        began_s, began_at_s = now_s(), wall_s()
        for _ in range(_BURST):
            _ = asking.ask(tokens=8, words=_WORDS)
        try:
            change = await replicas.until(lambda one: one > 1, timeout_s=_LATEST_S)
        except TimeoutError:
            raise TimeoutError(f"nothing is written: {await testbed.decision(model.name)}") from None
        decided_s = await _decided_s(testbed, model, began_at_s)
        told_s = min((at_s - began_s for at_s in told if at_s > began_s), default=math.nan)
        return Reaction(change.at_s - began_s, change.replicas, told_s, decided_s)


async def _decided_s(testbed: Testbed, model: ScaledModel, began_at_s: float) -> float:
    """After how long the first decision for more replicas began. Its record is there some time after the write."""
    for _ in range(_RECORDED_TRIES):
        await asyncio.sleep(_RECORDED_S)
        asked = [
            one["at_s"] - began_at_s
            for one in await testbed.decisions(model.name, _DECISIONS)
            if one["at_s"] > began_at_s and any((each["desired"] or 0) > 1 for each in one["targets"])
        ]
        if asked:
            return float(min(asked))
    return math.nan


@contextlib.asynccontextmanager
async def _reported_jumps(testbed: Testbed, model: ScaledModel) -> AsyncIterator[Sequence[float]]:
    """The times at which the gateway's lines reported many more requests than the first line."""
    instants: list[float] = []
    server = f"{testbed.namespace}/{model.name}"
    is_heard = asyncio.Event()

    async def follow() -> None:
        fewest: int | None = None
        async with (
            aiohttp.ClientSession() as http,
            contextlib.aclosing(messages(http, testbed.gateways[0].pages)) as lines,
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


async def wakings(testbed: Testbed, trials: int, *, tell: Callable[[str], None] = lambda _: None) -> list[Reaction]:
    """A request for a model without engines, whose client leaves once replicas are written; then none again. The engine
    never starts, so trials are short.
    """
    name = "waking"
    policy = {**_POLICY, "scaleToZero": {"idle": "1s"}}
    server: Mapping[str, Any] = {"activation": {}}
    model = ScaledModel(name=name, replicas=0, start_s=3600, policy=policy, server=server)
    rng, found = random.Random(2), list[Reaction]()
    async with testbed.serving(model) as replicas:
        for number in range(trials):
            await _emptied(testbed, model, replicas)
            await asyncio.sleep(rng.uniform(0, 6))
            async with LoadClient(testbed.gateways[0].url, name) as asking:
                began_s = now_s()
                _ = asking.ask()
                change = await replicas.until(lambda one: one > 0, timeout_s=PATIENCE_S)
            found.append(Reaction(change.at_s - began_s, change.replicas))
            tell(f"{name} {number}: {found[-1].write_s * 1000:.0f} ms")
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
    waits_s: tuple[float, ...]


async def run_cycles(
    testbed: Testbed,
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
    model = ScaledModel(
        name=name, kind=kind, replicas=0, most=1, policy=policy, server={"activation": {"holdTimeout": "4m"}}
    )
    rng, until_s = random.Random(name), now_s() + longest_s
    async with testbed.serving(model) as replicas, LoadClient(testbed.gateways[0].url, name) as asking:
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


class DrainOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas``: in the spec, one after the other. ``whole``: streams; ``cut``: what became of the others. ``open``:
    streams that were under way when each change was written. ``took_s``: from the first stream until one replica is
    left.
    """

    replicas: tuple[int, ...]
    whole: int
    cut: tuple[str, ...]
    open: tuple[int, ...]
    took_s: float


async def scaled_in(testbed: Testbed, kind: str, *, streams: int = 18) -> DrainOutcome:
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
    rng, under_way = random.Random(4), list[int]()
    async with testbed.serving(model) as replicas, LoadClient(testbed.gateways[0].url, name) as asking:
        began_s = now_s()
        for _ in range(streams):
            _ = asking.ask(tokens=round(rng.uniform(10, 30) * _TOKENS_PER_S))
            await asyncio.sleep(0.05)
        await testbed.obey(model)
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
        await testbed.until_ready(model, 1)
        return DrainOutcome(
            replicas=tuple(replicas.since(began_s)),
            whole=len(asking.asked) - len(asking.failures),
            cut=tuple(asking.failures),
            open=tuple(under_way),
            took_s=took_s,
        )


def in_flight(namespace: str, server: str) -> str:
    """A query: requests of a ModelServer at its engines, of all gateways."""
    return f'sum(attache_in_flight{{server="{namespace}/{server}"}})'


@contextlib.asynccontextmanager
async def running_prometheus(testbed: Testbed) -> AsyncIterator[None]:
    """At ``testbed.prometheus``. Raises StartFailed where there is no such program."""
    binary = shutil.which(PROMETHEUS)
    if binary is None:
        raise StartFailed("there is no prometheus; apt-get install --no-install-recommends prometheus")
    targets = [{"targets": [one.pages for one in testbed.gateways]}]
    scraped = {"job_name": "extproc", "static_configs": targets}
    config = testbed.folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scraped]})
    )
    command = [
        binary,
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


class FaultOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """``fault``: its name. ``replicas``: in the spec while it lasted, one after the other. ``falls``: number of
    scale-ins. ``decision``: the last one, in words.
    """

    fault: str
    replicas: tuple[int, ...]
    falls: int
    decision: str


async def run_faults(
    testbed: Testbed, *, for_s: float = 30.0, tell: Callable[[str], None] = lambda _: None
) -> list[FaultOutcome]:
    """Each fault lasts ``for_s``. When all are over and the load ends, replicas do go: the policy is one that scales
    in. Raises TimeoutError if they do not.
    """
    faults: dict[str, Callable[[Testbed], contextlib.AbstractAsyncContextManager[None]]] = {
        "half of the gateways silent": _silent_gateway,
        "Prometheus killed": _killed_prometheus,
        "the manager killed": _killed_manager,
        "engines' pages garbage": _pages("garbage"),
        "engines' pages hang": _pages("silence"),
        "engines' pages empty": _pages("empty"),
    }
    found = list[FaultOutcome]()
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
                reasons = [one["reason"] for one in (await testbed.decision(_NAME)).get("targets", ())]
            # what was learned during the fault must not be acted upon afterwards either
            await asyncio.sleep(for_s / 3)
            done = FaultOutcome(
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
