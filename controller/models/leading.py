# SPDX-License-Identifier: Apache-2.0
"""One term of leadership: informers and kopf fill a queue, workers look at one object each and do what is planned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiohttp
import msgspec

from controller.kube.executor import Executor, Expectations, Refused
from controller.kube.following import Following
from controller.kube.informer import InformerTiming, slim, slim_pod
from controller.kube.plan import Happened
from controller.kube.queue import QueueTiming, WorkQueue
from controller.kube.recorder import Recorder, with_trouble, write_status
from controller.kube.resources import PODS, Object, split_key
from controller.models.keeper import Keeper, WorkKey
from controller.models.loads import Asked, GatewayLoads, Loads
from controller.models.model.observed import Settings as ModelSettings
from controller.models.model_infers import ModelInferKeeper
from controller.models.models import ModelKeeper, Shared
from extproc.api.status_pages import LOADS_LABEL

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.metrics import ManagerMetrics
    from controller.kube.plan import Plan
    from controller.kube.resources import Resource
    from controller.models.model_infers import Decide
    from controller.models.models import DecideModel

# Of a message: an error may repeat what somebody wrote.
_LONGEST: Final = 1000

Bell = Callable[[Callable[[str, str], None]], Awaitable[None]]
"""Calls its argument with the kind and key of objects that have changed, until cancelled."""


class Decisions(NamedTuple):
    """The pure functions of the kinds."""

    model_infer: Decide
    model: DecideModel


class WorkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace``: whose objects are looked after; None: all. ``workers``: objects looked at side by side.
    ``most_actions``: of one look; what is left comes after all others had their turn. ``together_s``: changes of what
    an object owns that come within this time cause one look. ``patience_s``: how long the informers may take to tell of
    our own writes before a list is asked for. ``shared_namespace``: whose ModelTemplates all Models may name.
    ``gateway_namespaces``: whose gateways speak for engines of all namespaces. ``models``: what holds for all Models.
    """

    namespace: str | None = None
    workers: int = 8
    most_actions: int = 200
    together_s: float = 0.05
    patience_s: float = 5.0
    informers: InformerTiming = InformerTiming()
    queue: QueueTiming = QueueTiming()
    shared_namespace: str = ""
    gateway_namespaces: tuple[str, ...] = ()
    models: ModelSettings = ModelSettings()


def wall_s() -> float:
    """Seconds since the epoch, as the times in objects."""
    return time.time_ns() / 1e9


class Work:
    """``run`` does all of it. ``bell``: what rings beside the informers; ``loads``: None asks the gateways' pods."""

    def __init__(
        self,
        client: Client,
        settings: WorkSettings,
        metrics: ManagerMetrics,
        *,
        component: str,
        decisions: Decisions,
        bell: Bell | None = None,
        loads: Loads | None = None,
        clock: Callable[[], float] = wall_s,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._bell = bell
        self._loads = loads
        self._client = client
        self._queue = WorkQueue[WorkKey](Random(), settings.queue)
        self._following = Following(client, settings.namespace, settings.informers)
        self._infers = ModelInferKeeper(client, self._following, self._soon, decisions.model_infer)
        self._models = ModelKeeper(
            client,
            self._following,
            self._soon,
            decisions.model,
            infers=self._infers.infers,
            infer_pods=self._infers.pods,
            shared=Shared(settings.shared_namespace, settings.gateway_namespaces),
            settings=settings.models,
        )
        self._gateways = self._following.add(PODS, labels=LOADS_LABEL, slim=slim_pod, everywhere=True)
        self._keepers: Mapping[str, Keeper] = {one.resource.kind: one for one in (self._infers, self._models)}
        self._expectations = Expectations(self._known, settings.patience_s)
        self._following.subscribe(self._expectations.heard)
        self._executor = Executor(client, self._expectations, self._known, clock=_loop_s, counted=metrics.wrote)
        self._recorder = Recorder(client, component, _loop_s, metrics.wrote)
        self._asks: dict[WorkKey, frozenset[str]] = {}
        self._generations: dict[WorkKey, Any] = {}
        self._infers.subscribe(self._thing_changed(self._infers))
        self._models.subscribe(self._thing_changed(self._models))
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled. Raises what the bell raises."""
        self._metrics.follow_queue(lambda: self._queue.depth, lambda: self._queue.failing)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http, asyncio.TaskGroup() as tasks:
            if self._loads is None:
                self._loads = GatewayLoads(http, self._gateways, self._infers.pod, self._settings.gateway_namespaces)
            tasks.create_task(self._following.run(), name="informers")
            tasks.create_task(self._infers.log_tails.run(), name="logs of crashed containers")
            if self._bell is not None:
                tasks.create_task(_awaited(self._bell(self.ring)), name="kopf")
            await self._following.synced()
            self.synced.set()
            await self._queue.run(self._look, self._settings.workers)

    def ring(self, kind: str, key: str) -> None:
        """An object of a kind may have changed."""
        for keeper in self._keepers.values():
            for work in keeper.concerned(kind, key):
                self._queue.add(work)

    async def _look(self, work: WorkKey) -> float | None:
        began_s = time.perf_counter()
        outcome = "error"
        try:
            outcome, again_s = await self._turn(work)
        except Refused:
            outcome = "refused"
            raise
        finally:
            self._metrics.looked(work.kind, outcome, time.perf_counter() - began_s)
        return again_s

    async def _turn(self, work: WorkKey) -> tuple[str, float | None]:
        """What came of it, and in how many seconds to look again."""
        keeper = self._keepers[work.kind]
        left_s = self._expectations.left_s(work, _loop_s())
        if left_s:
            return "early", left_s
        # an event was lost, or our copies are old: ask
        is_late = left_s is not None
        thing = await self._asked(keeper, work.key) if is_late else keeper.get(work.key)
        if thing is None or "deletionTimestamp" in thing["metadata"]:
            # what it owns is collected by Kubernetes
            self._forget(work)
            return "gone", None
        owned = await keeper.listed(thing) if is_late else keeper.owned(thing)
        if is_late:
            self._expectations.forget(work)
            self._metrics.listed(work.kind)
        wanted = self._asks.get(work, frozenset())
        asked = Asked(wanted, await self._ask(wanted))
        plan = await self._decided(work, keeper, thing, lambda: keeper.decide(thing, owned, asked, self._clock()))
        await self._do(work, keeper, thing, plan)
        self._asks[work] = plan.asks_loads_of
        if plan.asks_loads_of - wanted or len(plan.actions) > self._settings.most_actions:
            return "planned", 0.0
        again_s = None if plan.look_again_at_s is None else plan.look_again_at_s - self._clock()
        return ("planned" if plan.actions else "settled"), again_s

    async def _decided(self, work: WorkKey, keeper: Keeper, thing: Object, decide: Callable[[], Plan]) -> Plan:
        """A mistake of ours about one object is told there: nobody else sees why nothing happens."""
        try:
            return decide()
        except Exception as error:
            said = (
                f"the manager cannot decide about this object, and its log says where: {type(error).__name__}: {error}"
            )
            await self._tell_trouble(work, keeper, thing, None, Happened("Warning", "InternalError", said[:_LONGEST]))
            raise

    async def _do(self, work: WorkKey, keeper: Keeper, thing: Object, plan: Plan) -> None:
        try:
            # in their order up to any of them is a state that the next look goes on from, as after a failure
            await self._executor.execute(work, plan.actions[: self._settings.most_actions])
        except Refused as refused:
            happened = Happened("Warning", refused.reason, refused.message)
            await self._tell_trouble(work, keeper, thing, plan.status, happened)
            raise
        if plan.status is not None:
            await self._say(work, keeper.resource, thing, plan.status)
        await self._recorder.tell(thing, plan.events)

    async def _tell_trouble(
        self, work: WorkKey, keeper: Keeper, thing: Object, status: Mapping[str, Any] | None, what: Happened
    ) -> None:
        before = thing.get("status") or {}
        told = with_trouble(status, before, *keeper.trouble, reason=what.reason, message=what.message)
        await self._say(work, keeper.resource, thing, told)
        await self._recorder.tell(thing, [what])

    async def _say(self, work: WorkKey, resource: Resource, thing: Object, status: Mapping[str, Any]) -> None:
        written = await write_status(self._client, resource, thing, status, self._metrics.wrote)
        if written is not None:
            self._expectations.wrote(work, resource, written, _loop_s())

    async def _asked(self, keeper: Keeper, key: str) -> Object | None:
        namespace, name = split_key(key)
        found = await self._client.find(keeper.resource, name, namespace)
        return None if found is None else slim(found)

    async def _ask(self, pods: frozenset[str]) -> Mapping[str, Any]:
        return await self._loads.ask(pods) if pods and self._loads is not None else {}

    def _forget(self, work: WorkKey) -> None:
        self._expectations.forget(work)
        self._asks.pop(work, None)
        self._generations.pop(work, None)

    def _known(self, resource: Resource, key: str) -> Object | None:
        return self._following.get(resource, key)

    def _soon(self, work: WorkKey) -> None:
        self._queue.add_in(work, self._settings.together_s)

    def _thing_changed(self, keeper: Keeper) -> Callable[[str], None]:
        def changed(key: str) -> None:
            work, thing = WorkKey(keeper.resource.kind, key), keeper.get(key)
            generation = None if thing is None else (thing["metadata"]["uid"], thing["metadata"].get("generation"))
            if self._generations.get(work) == generation:
                # our own status, most likely
                self._soon(work)
                return
            self._generations[work] = generation
            # what was wrong with it may be right now
            self._queue.hasten(work)

        return changed


async def _awaited(bell: Awaitable[None]) -> None:
    await bell


def _loop_s() -> float:
    return asyncio.get_running_loop().time()
