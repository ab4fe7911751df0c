# SPDX-License-Identifier: Apache-2.0
"""The controller of Models and ModelInfers, for one term of leadership: plans are decided, carried out and reported."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiohttp

from controller.audit import caused_by
from controller.kube.api_resources import MODEL_INFERS, MODELS, PODS, Object, split_key
from controller.kube.controller import Controller, ControllerSettings, ReconcileResult, loop_clock_s, wall_clock_s
from controller.kube.informer import without_managed_fields
from controller.kube.plan_executor import ObjectRefused
from controller.kube.pod_views import trimmed_pod
from controller.kube.reconcile_plan import KubeEvent
from controller.models.agent_model_lists import AgentModelLists
from controller.models.kind_reconciler import GatewayLoadSource, KindReconciler, LoadSource, PodLoads, WorkKey
from controller.models.model.model_state import ModelSettings
from controller.models.model_infer_reconciler import ModelInferReconciler
from controller.models.model_reconciler import ModelReconciler, SharedNamespaces
from extproc.api.status_page_contents import LOADS_LABEL

if TYPE_CHECKING:
    from collections.abc import Collection

    from controller.kube.client import Client
    from controller.kube.manager_metrics import ManagerMetrics
    from controller.kube.reconcile_plan import Plan
    from controller.kube.shared_informers import SharedInformers
    from controller.models.kind_reconciler import Owned
    from controller.models.model_infer_reconciler import Decide
    from controller.models.model_reconciler import DecideModel

# Of a message: an error may repeat a user's text.
_LONGEST: Final = 1000

Source = Callable[[Callable[[str, str], None]], Coroutine[Any, Any, None]]
"""Calls its argument with the kind and key of objects that have changed, until cancelled."""


class DecisionFunctions(NamedTuple):
    """The pure functions of the kinds."""

    model_infer: Decide
    model: DecideModel


class ModelControllerSettings(ControllerSettings, frozen=True, kw_only=True):
    """``most_actions``: of one reconcile; the rest follows after the other keys' turns. ``shared_namespace``: the one
    whose ModelTemplates all Models may name. ``gateway_namespaces``: those whose gateways may report loads of all
    namespaces. ``models``: settings of all Models.
    """

    most_actions: int = 200
    shared_namespace: str = ""
    gateway_namespaces: tuple[str, ...] = ()
    models: ModelSettings = ModelSettings()


class ModelController:
    """``run`` runs it. ``source``: enqueues keys in addition to the informers; ``loads``: None reads the gateways'
    pods.
    """

    def __init__(
        self,
        client: Client,
        settings: ModelControllerSettings,
        metrics: ManagerMetrics,
        *,
        decisions: DecisionFunctions,
        source: Source | None = None,
        loads: LoadSource | None = None,
        clock: Callable[[], float] = wall_clock_s,
        shared: SharedInformers | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._loads = loads
        self._lists: AgentModelLists | None = None
        self._controller = Controller[WorkKey](
            client,
            self._reconcile,
            settings=settings,
            measured=lambda key, result, seconds: metrics.observe_reconcile(key.kind, result, seconds),
            wrote=metrics.count_write,
            shared=shared,
        )
        cache, enqueue = self._controller.cache, self._controller.enqueue_soon
        infers = ModelInferReconciler(
            client, cache, enqueue, decisions.model_infer, hasten=self._controller.enqueue_without_backoff
        )
        models = ModelReconciler(
            client,
            cache,
            enqueue,
            decisions.model,
            infers=infers.informer,
            infer_pods=infers.pod_informer,
            shared=SharedNamespaces(settings.shared_namespace, settings.gateway_namespaces),
            settings=settings.models,
        )
        self._gateways = cache.add(PODS, labels=LOADS_LABEL, transform=trimmed_pod, all_namespaces=True)
        self._infer_pods = infers.pod_informer
        self._reconcilers: Mapping[str, KindReconciler] = {one.resource.kind: one for one in (infers, models)}
        self._states: dict[WorkKey, _State] = {}
        for reconciler in self._reconcilers.values():
            reconciler.informer.subscribe(self._on_change(reconciler))
        self._controller.add_source("logs of crashed containers", infers.log_tails.run)
        if source is not None:
            self._controller.add_source("kopf", lambda: source(self.enqueue))

    async def run(self) -> None:
        """Run informers, sources and workers until cancelled. Raises what the source raises."""
        queue = self._controller.queue
        self._metrics.set_queue(lambda: queue.depth, lambda: queue.failing)
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
            if self._loads is None:
                trusted = self._settings.gateway_namespaces
                self._loads = GatewayLoadSource(http, self._gateways, self._infer_pods.get, trusted)
            self._lists = AgentModelLists(http, self._infer_pods.get)
            await self._controller.run()

    def objects(self) -> tuple[Collection[Object], Collection[Object]]:
        """All Models and ModelInfers, as the informers have them now."""
        models, infers = (self._reconcilers[one.kind].informer.objects.values() for one in (MODELS, MODEL_INFERS))
        return models, infers

    def enqueue(self, kind: str, key: str) -> None:
        """An object of a kind may have changed."""
        for reconciler in self._reconcilers.values():
            for work in reconciler.keys_to_reconcile(kind, key):
                self._controller.enqueue(work)

    async def _reconcile(self, work: WorkKey) -> ReconcileResult:
        reconciler, expectations = self._reconcilers[work.kind], self._controller.expectations
        left_s = expectations.remaining_wait_s(work, loop_clock_s())
        if left_s:
            return ReconcileResult("early", left_s)
        # an event was lost, or our copies are old: list the children again
        is_late = left_s is not None
        thing = await self._fetch(reconciler, work.key) if is_late else reconciler.informer.get(work.key)
        if thing is None or "deletionTimestamp" in thing["metadata"]:
            # what it owns is collected by Kubernetes
            expectations.forget(work)
            self._states.pop(work, None)
            return ReconcileResult("gone")
        owned = await reconciler.list_children(thing) if is_late else reconciler.cached_children(thing)
        if is_late:
            expectations.forget(work)
            self._metrics.count_relist(work.kind)
        state = self._states.setdefault(work, _State())
        pod_loads = await self._ask(work.kind, state.asks)
        plan = await self._plan(work, thing, owned, pod_loads)
        await self._carry_out(work, reconciler, thing, plan)
        is_new = bool(plan.asks_loads_of - state.asks)
        state.asks = plan.asks_loads_of
        if is_new or len(plan.actions) > self._settings.most_actions:
            return ReconcileResult("planned", 0.0)
        again_s = None if plan.requeue_at_s is None else plan.requeue_at_s - self._clock()
        return ReconcileResult("planned" if plan.actions else "settled", again_s)

    async def _plan(self, work: WorkKey, thing: Object, owned: Owned, pod_loads: PodLoads) -> Plan:
        """The plan. A defect of ours about one object is reported in its status, where its owner sees it."""
        reconciler = self._reconcilers[work.kind]
        try:
            return reconciler.plan(thing, owned, pod_loads, self._clock())
        except Exception as error:
            message = (
                f"the manager cannot decide about this object, and its log says where: {type(error).__name__}: {error}"
            )
            event = KubeEvent("Warning", "InternalError", message[:_LONGEST])
            await self._report_failure(work, reconciler, thing, None, event)
            raise

    async def _carry_out(self, work: WorkKey, reconciler: KindReconciler, thing: Object, plan: Plan) -> None:
        """After any of the actions, the next reconcile can continue from the state reached, as after a failure."""
        try:
            reasons = " ".join(one.reason for one in plan.events)
            with caused_by(reason=reasons, message="; ".join(one.message for one in plan.events)):
                await self._controller.execute(work, plan.actions[: self._settings.most_actions])
        except ObjectRefused as refused:
            event = KubeEvent("Warning", refused.reason, refused.message)
            await self._report_failure(work, reconciler, thing, plan.status, event)
            raise
        if plan.status is not None:
            await self._controller.write_status(work, reconciler.resource, thing, plan.status)
        await self._controller.record_events(thing, plan.events)

    async def _report_failure(
        self,
        work: WorkKey,
        reconciler: KindReconciler,
        thing: Object,
        status: Mapping[str, Any] | None,
        event: KubeEvent,
    ) -> None:
        before = thing.get("status") or {}
        failed = reconciler.status_of_failure(status, before, reason=event.reason, message=event.message)
        await self._controller.write_status(work, reconciler.resource, thing, failed)
        await self._controller.record_events(thing, [event])

    async def _fetch(self, reconciler: KindReconciler, key: str) -> Object | None:
        namespace, name = split_key(key)
        found = await self._client.get_or_none(reconciler.resource, name, namespace)
        return None if found is None else without_managed_fields(found)

    async def _ask(self, kind: str, pods: frozenset[str]) -> PodLoads:
        """Loads of a ModelInfer's pods, or what the agents of a Model's pods list."""
        if not pods or self._loads is None or self._lists is None:
            return PodLoads(pods)
        if kind == MODELS.kind:
            return PodLoads(pods, models=await self._lists.fetch(pods))
        return PodLoads(pods, await self._loads.fetch(pods))

    def _on_change(self, reconciler: KindReconciler) -> Callable[[str], None]:
        def changed(key: str) -> None:
            work, thing = WorkKey(reconciler.resource.kind, key), reconciler.informer.get(key)
            generation = None if thing is None else (thing["metadata"]["uid"], thing["metadata"].get("generation"))
            state = self._states.setdefault(work, _State())
            if state.generation == generation:
                # our own status, most likely
                self._controller.enqueue_soon(work)
                return
            state.generation = generation
            self._controller.enqueue_without_backoff(work)

        return changed


class _State:
    """State of an object between reconciles. ``asks``: pods whose loads the next one needs. ``generation``: uid and
    generation as last seen.
    """

    def __init__(self) -> None:
        self.asks: frozenset[str] = frozenset()
        self.generation: object = None
