# SPDX-License-Identifier: Apache-2.0
"""A controller: informers fill a queue of keys, and workers reconcile one key each.

``reconcile`` is given a key, reads what the informers have, decides, acts and writes the status; it returns a
``ReconcileResult`` with the time until the key is reconciled again. Nothing that objects can hold is kept in memory
between two reconciles. A key is reconciled again after a back-off if the reconcile raises.

    controller = Controller(client, reconcile, settings=ControllerSettings())
    pods = controller.cache.add(PODS, labels="app=llama")
    pods.subscribe(controller.enqueue_soon)
    await controller.run()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from random import Random
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from controller.audit import caused_by
from controller.kube.api_resources import timestamp_of
from controller.kube.conditions import status_to_write
from controller.kube.event_recorder import EventRecorder
from controller.kube.informer import InformerTiming
from controller.kube.plan_executor import Executor, Expectations, ObjectRefused
from controller.kube.shared_informers import InformerSet, SharedInformers
from controller.kube.work_queue import QueueTiming, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.kube.api_resources import ApiResource, Object
    from controller.kube.client import Client
    from controller.kube.event_recorder import Counted
    from controller.kube.reconcile_plan import Action, KubeEvent

Key = TypeVar("Key", bound=Hashable)
Source = Callable[[], Coroutine[Any, Any, None]]


class ReconcileResult(NamedTuple):
    """``result``: one word for metrics. ``again_s``: seconds until the key is reconciled again; None: only a change
    makes that necessary.
    """

    result: str
    again_s: float | None = None


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace``: the one whose objects are read; None: all. ``workers``: keys reconciled concurrently.
    ``coalesce_s``: changes within this time lead to one reconcile. ``patience_s``: how long informers may take to show
    our own writes. ``probe_s``: seconds between two requests for optional kinds that the server lacks.
    """

    namespace: str | None = None
    workers: int = 8
    coalesce_s: float = 0.05
    patience_s: float = 5.0
    probe_s: float = 30.0
    informers: InformerTiming = InformerTiming()
    queue: QueueTiming = QueueTiming()


class Controller(Generic[Key]):
    """``run`` runs it. Informers are added to ``cache``, and their listeners call one of the ``enqueue``s.

    ``client``: its manager is the source of Events. ``measured``: called after each reconcile with the key, the result
    (``refused`` and ``error`` if it raised) and its seconds. ``wrote``: called with the kind and verb of each write.
    ``shared``: informers of several controllers, which their owner runs; None: its own.
    """

    def __init__(
        self,
        client: Client,
        reconcile: Callable[[Key], Awaitable[ReconcileResult]],
        *,
        settings: ControllerSettings,
        measured: Callable[[Key, str, float], None] | None = None,
        wrote: Counted | None = None,
        rng: Random | None = None,
        shared: SharedInformers | None = None,
    ) -> None:
        self._is_shared = shared is not None
        shared = shared or SharedInformers(client, settings.informers, settings.probe_s)
        self.cache = InformerSet(shared, settings.namespace)
        self.queue = WorkQueue[Key](rng or Random(), settings.queue)
        self.expectations = Expectations(self.cache, settings.patience_s)
        self.synced = asyncio.Event()
        self._client = client
        self._reconcile = reconcile
        self._settings = settings
        self._measured = measured
        self._wrote: Counted = wrote or _uncounted
        self._executor = Executor(client, self.expectations, self.cache.get, clock=loop_clock_s, counted=self._wrote)
        self._recorder = EventRecorder(client, client.manager, loop_clock_s, self._wrote)
        self._sources: list[tuple[str, Source]] = []
        self._after_sync: list[tuple[str, Source]] = []
        self._on_synced: list[Callable[[], None]] = []
        self.cache.subscribe(self.expectations.on_object_observed)

    def add_source(self, name: str, run: Source, *, after_sync: bool = False) -> None:
        """Run a task beside the workers, such as one that enqueues keys; what it raises ends the controller.
        ``after_sync``: not before all informers have listed.
        """
        (self._after_sync if after_sync else self._sources).append((name, run))

    def on_synced(self, call: Callable[[], None]) -> None:
        """Call this once all informers have listed, before the first reconcile."""
        self._on_synced.append(call)

    def enqueue(self, key: Key) -> None:
        """Reconcile ``key`` as soon as a worker is free; after a failure, when its back-off has ended."""
        self.queue.add(key)

    def enqueue_soon(self, key: Key) -> None:
        """Reconcile ``key`` together with the changes of the next ``coalesce_s``."""
        self.queue.add_in(key, self._settings.coalesce_s)

    def enqueue_without_backoff(self, key: Key) -> None:
        """Reconcile ``key`` without waiting for its back-off: what was wrong with it may be right now."""
        self.queue.skip_backoff(key)

    async def run(self) -> None:
        """Run informers, sources and workers until cancelled. Raises what a source raises."""
        async with asyncio.TaskGroup() as tasks:
            if not self._is_shared:
                tasks.create_task(self.cache.shared.run(), name="informers")
            for name, source in self._sources:
                tasks.create_task(source(), name=name)
            await self.cache.wait_until_synced()
            self.synced.set()
            for call in self._on_synced:
                call()
            for name, source in self._after_sync:
                tasks.create_task(source(), name=name)
            await self.queue.run(self._measure, self._settings.workers)

    async def execute(self, key: Key, actions: Iterable[Action]) -> None:
        """Carry out actions in their order, up to the first that fails; ``expectations`` awaits them for ``key``.

        Raises ClusterError, or Refused.
        """
        await self._executor.execute(key, actions)

    async def write_status(self, key: Key, resource: ApiResource, thing: Object, status: Mapping[str, Any]) -> None:
        """Write what the status of ``thing`` does not have yet; ``expectations`` awaits it for ``key``."""
        new = status_to_write(resource.kind, thing, status, timestamp_of(wall_clock_s()))
        if new is None:
            return
        metadata = {name: thing["metadata"][name] for name in ("name", "namespace") if name in thing["metadata"]}
        applied = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "status": new}
        written = await self._client.apply(resource, applied, subresource="status", force=True)
        self._wrote(resource.kind, "status")
        self.expectations.expect_write(key, resource, written, loop_clock_s())

    async def record_events(self, thing: Object, events: Iterable[KubeEvent]) -> None:
        """Write Events of ``thing``; one that cannot be written is logged."""
        await self._recorder.record_events(thing, events)

    async def _measure(self, key: Key) -> float | None:
        began_s = time.perf_counter()
        result = "error"
        try:
            with caused_by(of=" ".join(map(str, key)) if isinstance(key, tuple) else str(key)):
                result, again_s = await self._reconcile(key)
        except ObjectRefused:
            result = "refused"
            raise
        finally:
            if self._measured is not None:
                self._measured(key, result, time.perf_counter() - began_s)
        return again_s


def wall_clock_s() -> float:
    """Seconds since the epoch, as the times in objects."""
    return time.time_ns() / 1e9


def loop_clock_s() -> float:
    """Seconds of the event loop's clock, which only grows."""
    return asyncio.get_running_loop().time()


def _uncounted(_kind: str, _verb: str) -> None:
    pass
