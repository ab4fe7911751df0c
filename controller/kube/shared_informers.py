# SPDX-License-Identifier: Apache-2.0
"""The informers of one process, or of one term of leadership, and the sets of them that its controllers read.

A term begins without informers: nothing seen while another led counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from controller.kube.errors import ClusterError, Forbidden, NotFound
from controller.kube.informer import Informer, InformerTiming, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.kube.api_resources import ApiResource, Object
    from controller.kube.client import Client
    from controller.kube.informer import Transform

log = logging.getLogger(__name__)

_PROBE_S: Final = 30.0
_Wanted = tuple["ApiResource", Selection, "Transform | None", bool]


class SharedInformers:
    """Informers of one kind, selection and transform are one, whoever takes them. ``run`` runs all of them; they may be
    taken before and while it runs, and released. ``probe_s``: seconds between two requests for an optional kind that
    the server lacks.
    """

    def __init__(
        self,
        client: Client,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        probe_s: float = _PROBE_S,
    ) -> None:
        self._client = client
        self._timing = timing
        self._probe_s = probe_s
        self._taken: dict[_Wanted, Informer] = {}
        self._users: Counter[Informer] = Counter()
        self._optional: set[Informer] = set()
        self._listeners: list[Callable[[], None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[Informer, asyncio.Task[None]] = {}

    def acquire(
        self,
        resource: ApiResource,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        transform: Transform | None = None,
        *,
        optional: bool = False,
    ) -> Informer:
        """The informer of these objects, which a ``release`` gives back. ``optional``: the cluster may lack the
        kind.
        """
        wanted = resource, selection, transform, optional
        informer = self._taken.get(wanted)
        if informer is None:
            informer = Informer(self._client, resource, selection, timing=self._timing, transform=transform)
            self._taken[wanted] = informer
            if optional:
                self._optional.add(informer)
            if self._group is not None:
                self._start(informer, self._group)
        self._users[informer] += 1
        self._notify()
        return informer

    def release(self, informer: Informer) -> None:
        """End an informer that nobody has taken besides."""
        self._users[informer] -= 1
        self._notify()
        if self._users[informer]:
            return
        del self._users[informer]
        self._taken = {wanted: one for wanted, one in self._taken.items() if one is not informer}
        self._optional.discard(informer)
        task = self._tasks.pop(informer, None)
        if task is not None:
            task.cancel()

    def apply_write_answer(self, resource: ApiResource, thing: Object) -> None:
        """The server has answered ``thing`` to a write of ours: informers that have the object have it so now."""
        for informer in list(self._users):
            if informer.resource == resource:
                informer.apply_write_answer(thing)

    def count_users(self, resource: ApiResource, selection: Selection, transform: Transform) -> int:
        """How many have taken the informer of these objects and not given it back."""
        informer = self._taken.get((resource, selection, transform, False))
        return 0 if informer is None else self._users[informer]

    def add_usage_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when an informer is taken or given back."""
        self._listeners.append(listener)

    def is_optional(self, informer: Informer) -> bool:
        """Whether the cluster may lack its kind."""
        return informer in self._optional

    async def run(self) -> None:
        """Run all informers until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for informer in self._users:
                    self._start(informer, group)
                await asyncio.Event().wait()
            finally:
                self._group = None

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _start(self, informer: Informer, group: asyncio.TaskGroup) -> None:
        name = f"informer of {informer.resource.plural}"
        self._tasks[informer] = group.create_task(self._run_one(informer), name=name)

    async def _run_one(self, informer: Informer) -> None:
        while self.is_optional(informer):
            try:
                if await self._client.serves(informer.resource):
                    break
                informer.answered.set()
            except ClusterError as error:
                log.info("%s cannot be looked for: %s", informer.resource.kind, error)
            await asyncio.sleep(self._probe_s)
        await informer.run()


class InformerSet:
    """The informers of one controller, of those that ``shared`` has. ``namespace``: the one whose objects are read;
    None: all.
    """

    def __init__(self, shared: SharedInformers, namespace: str | None = None) -> None:
        self.shared = shared
        self._namespace = namespace
        self._informers: list[Informer] = []
        self._by_kind: dict[ApiResource, list[Informer]] = {}
        self._listeners: list[Callable[[ApiResource, str], None]] = []

    def add(
        self,
        resource: ApiResource,
        *,
        labels: str = "",
        fields: str = "",
        namespace: str | None = None,
        all_namespaces: bool = False,
        transform: Transform | None = None,
        optional: bool = False,
        private: bool = False,
    ) -> Informer:
        """An informer of a kind, in ``namespace``, in all of them, or by default in that of the set.

        ``labels`` and ``fields``: selectors. ``optional``: the cluster may lack the kind. ``private``: ``get`` and the
        listeners of the set do not see its objects.
        """
        chosen = None if all_namespaces or not resource.namespaced else namespace or self._namespace
        informer = self.shared.acquire(resource, Selection(chosen, labels, fields), transform, optional=optional)
        self._informers.append(informer)
        if not private:
            self._by_kind.setdefault(resource, []).append(informer)
            informer.subscribe(lambda key: self._notify(resource, key))
        return informer

    def remove(self, informer: Informer) -> None:
        """Give a private informer back."""
        self._informers.remove(informer)
        self.shared.release(informer)

    def subscribe(self, listener: Callable[[ApiResource, str], None]) -> None:
        """Call ``listener`` with the kind and key of each object that changes."""
        self._listeners.append(listener)

    def get(self, resource: ApiResource, key: str) -> Object | None:
        """An object as any informer of its kind has it; None if none does."""
        return next((one for each in self._by_kind.get(resource, ()) if (one := each.get(key)) is not None), None)

    def apply_write_answer(self, resource: ApiResource, thing: Object) -> None:
        """See ``SharedInformers``."""
        self.shared.apply_write_answer(resource, thing)

    def is_synced(self, informer: Informer) -> bool:
        """Whether the cluster serves an optional kind, by the last probe."""
        return informer.synced.is_set()

    async def list_once(self) -> None:
        """List each kind, and watch none. Optional kinds that the cluster lacks or refuses have no objects; raises
        ClusterError for others.
        """
        for informer in self._informers:
            try:
                await informer.list_once()
            except (Forbidden, NotFound):
                if not self.shared.is_optional(informer):
                    raise

    async def wait_until_synced(self) -> None:
        """Returns once all informers have listed their kind, but for optional kinds that the cluster lacks."""
        for informer in list(self._informers):
            await (informer.answered if self.shared.is_optional(informer) else informer.synced).wait()

    def _notify(self, resource: ApiResource, key: str) -> None:
        for listener in self._listeners:
            listener(resource, key)
