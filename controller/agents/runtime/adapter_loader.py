# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads adapters as callers and the file request, one change of the engine at a time.

``AdapterUsage`` keeps when each was last in use, and which files it has, where the engine does not report that. It
determines which adapter is evicted when the engine is full.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.agents.runtime.adapter_files import DownloadFailed
from controller.agents.runtime.declared_adapters import AdapterNameInvalid, AdapterNotDeclared, DeclaredAdapter
from controller.agents.runtime.engine_client import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from controller.agents.runtime.adapter_files import AdapterFiles
    from controller.agents.runtime.declared_adapters import DeclaredAdaptersFile
    from controller.agents.runtime.engine_client import EngineClient
    from controller.agents.runtime.metrics import AgentCounters, EngineMetricsPage
    from controller.agents.runtime.settings import AdapterSettings
    from extproc.engines.dialects import Dialect

log = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 2.0
_LONGEST_RETRY_S: Final = 120.0
_FINISHED = "finished_requests_total"
_WAITING = "waiting_requests"
# Adapters that are loaded at the same time, downloads included.
_MOST_COMING: Final = 32
# Most failures kept: names come from callers.
_MOST_FAILURES: Final = 256
# Evictions and the load itself; of models with memory, one may need the room of many.
_MOST_STEPS: Final = 64
_LIST_TIMEOUT_S: Final = 10.0
# How long an unused model is not listed before it is unloaded: gateways, which read the list once a second, send it
# nothing any more; and how long at most while the engine has requests, which may be for it.
_LEAVE_S: Final = 3.0
_LONGEST_LEAVE_S: Final = 60.0


class LoadedAdapter(msgspec.Struct, frozen=True):
    """A loaded adapter. ``path``: from the engine, empty if it lists none. ``used_at_s``: last in use, or loaded."""

    name: str
    path: str = ""
    used_at_s: float = 0.0
    is_in_use: bool = False


class EngineAdapterState(msgspec.Struct, frozen=True):
    """The engine's adapters. ``limit``: most adapters, 0 if unknown. ``pinned``: never evicted.

    ``tells_use``: False while it is unknown which adapters are in use, although the engine reports it. ``memory``:
    bytes that all of them may take together, 0 if any; ``sizes``: of each. ``reloads``: the engine takes other files
    for what it has, without a gap. ``is_idle``: it has no requests, as far as it reports.
    """

    loaded: Mapping[str, LoadedAdapter]
    pinned: frozenset[str] = frozenset()
    limit: int = 0
    tells_use: bool = True
    memory: int = 0
    sizes: Mapping[str, int] = {}
    reloads: bool = False
    is_idle: bool = False

    def has_space(self, name: str) -> bool:
        """Whether ``name`` can be loaded before another is evicted."""
        return (not self.limit or len(self.loaded) < self.limit) and self.fits_memory(name)

    def fits_memory(self, name: str, without: frozenset[str] = frozenset()) -> bool:
        """Whether ``name`` fits into the memory when those of ``without`` are gone."""
        held = self.loaded.keys() - without
        return not self.memory or sum(self.sizes.get(one, 0) for one in {*held, name}) <= self.memory


class AdapterAction(msgspec.Struct, frozen=True):
    """What to do next to have an adapter: nothing, load it, or unload another (or an older version of it) first."""

    kind: Literal["loaded", "load", "unload", "busy"]
    name: str = ""
    why: str = ""


def next_adapter_action(
    shelf: EngineAdapterState, name: str, path: str, *, keep_s: float, now_s: float
) -> AdapterAction:
    """How to have ``name`` with the files at ``path``. ``keep_s``: see ``victim``."""
    held = shelf.loaded.get(name)
    if held is not None and (not path or not held.path or held.path == path):
        return AdapterAction("loaded", name)
    if held is not None and not shelf.reloads:
        if _may_go(held, shelf, keep_s, now_s, ignores_pin=True):
            return AdapterAction("unload", name, "replaced")
        return AdapterAction("busy", name, f"{name} is in use with other files")
    if held is not None or shelf.has_space(name):
        return AdapterAction("load", name)
    may_go = frozenset(one.name for one in shelf.loaded.values() if _may_go(one, shelf, keep_s, now_s))
    chosen = adapter_to_evict(shelf, keep_s=keep_s, now_s=now_s)
    if chosen and shelf.fits_memory(name, without=may_go):
        return AdapterAction("unload", chosen, "evicted")
    return AdapterAction(
        "busy", name, f"the engine holds {len(shelf.loaded)} adapters, and all of them are pinned or in use"
    )


def adapter_to_evict(shelf: EngineAdapterState, *, keep_s: float, now_s: float) -> str:
    """The least recently used adapter that may go; empty if none may.

    One that was in use, or loaded, less than ``keep_s`` ago stays: requests for it may be on their way to the engine.
    """
    candidates = [one for one in shelf.loaded.values() if _may_go(one, shelf, keep_s, now_s)]
    return min(candidates, key=lambda one: (one.used_at_s, one.name)).name if candidates else ""


def _may_go(
    one: LoadedAdapter, shelf: EngineAdapterState, keep_s: float, now_s: float, *, ignores_pin: bool = False
) -> bool:
    if one.is_in_use or not shelf.tells_use or now_s - one.used_at_s < keep_s:
        return False
    return ignores_pin or one.name not in shelf.pinned


def idle_declared_adapters(
    shelf: EngineAdapterState, declared: Iterable[str], idle_s: float, now_s: float
) -> list[str]:
    """The adapters of the file that were not used for ``idle_s``, without pinned ones."""
    held = [shelf.loaded[name] for name in declared if name in shelf.loaded]
    return [one.name for one in held if _may_go(one, shelf, idle_s, now_s)]


class LoadFailures(msgspec.Struct, frozen=True):
    """Loads of an adapter that failed in a row. ``is_busy``: the engine had no room, or did not answer."""

    times: int
    at_s: float
    message: str
    is_busy: bool = False


def retry_at_s(failure: LoadFailures) -> float:
    """When a declared adapter is tried again."""
    return failure.at_s + min(_FIRST_RETRY_S * 2.0 ** min(failure.times - 1, 10), _LONGEST_RETRY_S)


class AdapterChanges(msgspec.Struct, frozen=True):
    """The changes that the file of declared adapters requires."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


class WantedAdapters(msgspec.Struct, frozen=True):
    """``declared``: by the file. ``paths``: where the files of each belong. ``removed``: from the file lately.

    ``unwanted``: declared, but unloaded by a call. ``coming``: being loaded.
    """

    declared: Mapping[str, DeclaredAdapter]
    paths: Mapping[str, str]
    removed: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()
    coming: frozenset[str] = frozenset()
    failures: Mapping[str, LoadFailures] = {}


def adapter_changes(
    shelf: EngineAdapterState, wishes: WantedAdapters, *, keep_s: float, now_s: float
) -> AdapterChanges:
    """Pinned adapters are loaded whatever has to go for them, others of the file while there is room. Where memory is
    counted, others are loaded only if all of the file fit: otherwise every server would hold the same ones, and those
    that requests need would find no room.

    Level-triggered: an engine that has started again holds none of them, so all are loaded again.
    """
    wanted = [name for name in wishes.declared if _is_due(name, shelf, wishes, now_s)]
    pinned = [name for name in wanted if wishes.declared[name].pinned]
    room = shelf.limit - len(shelf.loaded) - len(wishes.coming) - len(pinned) if shelf.limit else len(wanted)
    others = [name for name in wanted if not wishes.declared[name].pinned]
    # one with other files than declared takes its own place
    replaced = [name for name in others if name in shelf.loaded]
    fresh = [name for name in others if name not in shelf.loaded]
    if shelf.memory and sum(shelf.sizes.values()) > shelf.memory:
        fresh = []
    unload = (
        name
        for name in sorted(wishes.removed)
        if name not in wishes.declared and name in shelf.loaded and _may_go(shelf.loaded[name], shelf, keep_s, now_s)
    )
    return AdapterChanges((*pinned, *replaced, *fresh[: max(room, 0)]), tuple(unload))


def _is_due(name: str, shelf: EngineAdapterState, wishes: WantedAdapters, now_s: float) -> bool:
    if name in wishes.unwanted or name in wishes.coming:
        return False
    failure = wishes.failures.get(name)
    if failure is not None and now_s < retry_at_s(failure):
        return False
    held, path = shelf.loaded.get(name), wishes.paths.get(name, "")
    return held is None or bool(path and held.path and held.path != path)


class AdapterUsage:
    """Only of adapters that are loaded, so it does not grow."""

    def __init__(self, dialect: Dialect) -> None:
        self._tells_loras = bool(dialect.lora_info)
        self._tells_models = dialect.adapters == "repository"
        self._used_at_s: dict[str, float] = {}
        self._finished: dict[str, float] = {}
        self._paths: dict[str, str] = {}

    def used_at_s(self, name: str) -> float | None:
        """When it was last in use, as far as that is known."""
        return self._used_at_s.get(name)

    def record_use(self, name: str, now_s: float) -> None:
        """A load was requested: requests for the adapter are about to arrive."""
        self._used_at_s[name] = now_s

    def on_loaded(self, name: str, path: str, now_s: float) -> None:
        """The engine has loaded it from ``path``."""
        self._paths[name] = path
        self.record_use(name, now_s)

    def forget(self, name: str) -> None:
        """It was unloaded."""
        self._used_at_s.pop(name, None)
        self._finished.pop(name, None)
        self._paths.pop(name, None)

    def is_usage_known(self, page: EngineMetricsPage | None) -> bool:
        """False if the engine reports which adapters are in use, but its page could not be read."""
        return page is not None or not self._tells_loras

    def loaded_adapters(
        self, listed: Mapping[str, str], page: EngineMetricsPage | None, now_s: float
    ) -> dict[str, LoadedAdapter]:
        """The loaded adapters with their last use. ``listed``: paths by name, empty where the engine lists none.

        One that is seen for the first time counts as used now: the agent may have started after it was loaded.
        """
        for name in [name for name in self._used_at_s if name not in listed]:
            self.forget(name)
        for name in listed:
            self._used_at_s.setdefault(name, now_s)
        in_use: frozenset[str] = frozenset()
        if page is not None:
            in_use = self._models(page, now_s) if self._tells_models else self._loras(page, now_s)
        return {
            name: LoadedAdapter(name, path or self._paths.get(name, ""), self._used_at_s[name], name in in_use)
            for name, path in listed.items()
        }

    def _loras(self, page: EngineMetricsPage, now_s: float) -> frozenset[str]:
        use = page.adapters
        if use is None:
            return frozenset()
        is_idle = page.total("running_requests") == 0 and page.total(_WAITING) == 0
        for name, idle_s in use.idle_s.items():
            if name in self._used_at_s:
                self._used_at_s[name] = max(self._used_at_s[name], now_s - idle_s)
        # an idle engine may leave its last series as it was
        return frozenset() if is_idle else use.in_use

    def _models(self, page: EngineMetricsPage, now_s: float) -> frozenset[str]:
        """A V2 server counts, by model, finished and waiting requests."""
        for name, finished in page.values.get(_FINISHED, {}).items():
            if name in self._used_at_s and finished > self._finished.get(name, 0.0):
                if name in self._finished:
                    self._used_at_s[name] = now_s
                self._finished[name] = finished
        return frozenset(name for name, waiting in page.values.get(_WAITING, {}).items() if waiting)


class LoadRefused(Exception):
    """``status``: of the HTTP answer. ``retry_after_s``: 0 if trying again does not help."""

    def __init__(self, status: int, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class _Coming(msgspec.Struct, frozen=True):
    path: str
    task: asyncio.Task[tuple[str, ...]]


class AdapterLoader:
    """``page``: the engine's metrics, not older than it takes to read them; None if they are not to be had."""

    def __init__(
        self,
        settings: AdapterSettings,
        dialect: Dialect,
        *,
        engine: EngineClient,
        files: AdapterFiles,
        file: DeclaredAdaptersFile,
        counters: AgentCounters,
        page: Callable[[], Awaitable[EngineMetricsPage | None]],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._reloads = dialect.adapters == "repository"
        self._engine = engine
        self._files = files
        self.file = file
        self._counters = counters
        self._page = page
        self._clock = clock
        self._uses = AdapterUsage(dialect)
        self.limit = settings.limit
        self._coming: dict[str, _Coming] = {}
        self.failures: dict[str, LoadFailures] = {}
        self._unwanted: set[str] = set()
        # unused ones that gateways are not shown any more, with the time since which
        self._leaving: dict[str, float] = {}
        # what is loaded may change only under this lock
        self._changing = asyncio.Lock()

    @property
    def idle_to_unload(self) -> frozenset[str]:
        """Loaded ones that will be unloaded, as they were not used for long. A load keeps them."""
        return frozenset(self._leaving)

    @property
    def adapters_being_loaded(self) -> frozenset[str]:
        """Adapters that are being downloaded or loaded."""
        return frozenset(self._coming)

    async def load(self, name: str, source: str) -> tuple[str, ...]:
        """Load an adapter; returns the adapters evicted for it once the engine holds it. ``source``: empty for that of
        the file.

        Concurrent callers for the same adapter wait for one load; a caller that disconnects does not end it. Raises
        LoadRefused.
        """
        is_leaving = self._leaving.pop(name, None) is not None
        task = self._start(name, source, is_leaving=is_leaving)
        self._unwanted.discard(name)
        self.file.removed.discard(name)
        return await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """By a caller's wish; raises LoadRefused for a pinned one."""
        declared = self.file.declared.get(name)
        if declared is not None and declared.pinned:
            raise LoadRefused(409, f"{name} is pinned: remove it from the file of adapters first")
        async with self._changing:
            shelf = await self.engine_adapters()
            if name not in shelf.loaded:
                raise LoadRefused(404, f"{name} is not loaded")
            if declared is not None:
                self._unwanted.add(name)
            await self._unload(name, shelf, "asked")

    def _place(self, name: str, source: str) -> tuple[str, str]:
        """The source, and the path that the engine is given; raises LoadRefused for what is not allowed."""
        declared, memory = self.file.declared.get(name), self._settings.memory
        if declared is not None and memory and declared.memory > memory:
            raise LoadRefused(
                400, f"{name} needs {declared.memory} bytes, more than the {memory} that all models may take here"
            )
        try:
            return self._files.resolve_path(name, source, declared)
        except AdapterNotDeclared as error:
            raise LoadRefused(503, str(error), 1) from error
        except ValueError as error:
            raise LoadRefused(400, str(error)) from error

    async def engine_adapters(self, *, with_use: bool = True) -> EngineAdapterState:
        """The engine's adapters now; raises LoadRefused if it does not list them. ``with_use``: also which are in
        use.
        """
        try:
            listed = await self._engine.list_adapters(timeout_s=_LIST_TIMEOUT_S)
        except EngineFailed as error:
            raise LoadRefused(503, f"the engine does not tell what it holds: {error}", 5) from error
        page = await self._page() if with_use else None
        pinned = frozenset(name for name, one in self.file.declared.items() if one.pinned)
        sizes = {name: one.memory for name, one in self.file.declared.items()}
        adapters = self._uses.loaded_adapters(listed, page, self._clock())
        slots = page.adapters.slots if page is not None and page.adapters is not None else 0
        self._counters.adapters = len(adapters)
        return EngineAdapterState(
            adapters,
            pinned,
            self.limit or slots,
            self._uses.is_usage_known(page),
            self._settings.memory,
            sizes,
            self._reloads,
            is_idle=page is not None and page.total("running_requests") == 0 and not page.total(_WAITING),
        )

    async def apply_declared_file(self) -> bool:
        """Apply the file of adapters, as far as the engine allows now. Called periodically.

        Returns whether all pinned adapters are there, or failed at least once.
        """
        before = self.file.declared
        if self.file.poll():
            for name in [one for one in self.failures if before.get(one) != self.file.declared.get(one)]:
                del self.failures[name]
        self._unwanted &= set(self.file.declared)
        if not self.file.declared and not self.file.removed:
            return True
        shelf = await self.engine_adapters()
        paths = {name: self._declared_path(name, one) for name, one in self.file.declared.items()}
        wishes = WantedAdapters(
            declared=self.file.declared,
            paths=paths,
            removed=frozenset(self.file.removed),
            unwanted=frozenset(self._unwanted),
            coming=self.adapters_being_loaded,
            failures=self.failures,
        )
        wanted = adapter_changes(shelf, wishes, keep_s=self._settings.keep_s, now_s=self._clock())
        self.file.removed &= set(shelf.loaded) | self.adapters_being_loaded
        for name in wanted.unload:
            async with self._changing:
                await self._unload(name, shelf, "removed")
        await self._unload_unused(shelf)
        for name in wanted.load:
            if len(self._coming) < _MOST_COMING:
                try:
                    _ = self._start(name, "")
                except LoadRefused as refused:
                    self._note_failure(name, refused)
        return shelf.pinned <= {*shelf.loaded, *self.failures}

    async def _unload_unused(self, shelf: EngineAdapterState) -> None:
        idle_s = self._settings.idle_unload_s
        unused = idle_declared_adapters(shelf, self.file.declared, idle_s, self._clock()) if idle_s else []
        self._leaving = {name: self._leaving.get(name, self._clock()) for name in unused}
        for name in unused:
            async with self._changing:
                # a caller may have asked for it meanwhile
                since_s = self._leaving.get(name, self._clock())
                if self._clock() - since_s >= (_LEAVE_S if shelf.is_idle else _LONGEST_LEAVE_S):
                    self._unwanted.add(name)
                    await self._unload(name, shelf, "idle")
                    self._leaving.pop(name, None)

    def on_engine_restart(self) -> None:
        """Drop the limits of the former engine."""
        self.limit = self._settings.limit

    async def aclose(self) -> None:
        """Ends what is being loaded."""
        tasks = [one.task for one in self._coming.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, source: str, *, is_leaving: bool = False) -> asyncio.Task[tuple[str, ...]]:
        source, path = self._place(name, source)
        coming = self._coming.get(name)
        if coming is not None:
            if coming.path != path:
                raise LoadRefused(503, f"{name} is being loaded from another source", 1)
            return coming.task
        if len(self._coming) >= _MOST_COMING:
            raise LoadRefused(503, f"{_MOST_COMING} adapters are being loaded", 1)
        task = asyncio.create_task(self._bring(name, source, path, is_leaving=is_leaving))
        task.add_done_callback(lambda done: self._has_come(name, done))
        self._coming[name] = _Coming(path, task)
        return task

    def _declared_path(self, name: str, one: DeclaredAdapter) -> str:
        try:
            return self._place(name, one.uri)[1]
        except LoadRefused:
            return ""

    async def _bring(self, name: str, source: str, path: str, *, is_leaving: bool) -> tuple[str, ...]:
        began_s = self._clock()
        try:
            if is_leaving:
                # it may be unloaded right now
                async with self._changing:
                    is_held = await self._is_held(name, path)
            else:
                is_held = await self._is_held(name, path)
            if is_held:
                return ()
            await self._files.download(source, path)
            async with self._changing:
                gone = await self._put(name, path)
        except DownloadFailed as error:
            raise LoadRefused(502, f"{name} could not be downloaded: {error}", 10) from error
        except EngineFailed as error:
            raise LoadRefused(503, f"the engine does not answer: {error}", 5) from error
        except AdapterNameInvalid as error:
            raise LoadRefused(400, str(error)) from error
        except OSError as error:
            raise LoadRefused(502, f"{name} could not be loaded: {error}", 5) from error
        self._counters.loads["loaded"] += 1
        self._counters.load_s += self._clock() - began_s
        log.info("loaded %s in %.1f s", name, self._clock() - began_s)
        return gone

    async def _is_held(self, name: str, path: str) -> bool:
        shelf = await self.engine_adapters(with_use=False)
        step = next_adapter_action(shelf, name, path, keep_s=self._settings.keep_s, now_s=self._clock())
        if step.kind == "loaded":
            self._uses.record_use(name, self._clock())
        return step.kind == "loaded"

    async def _put(self, name: str, path: str) -> tuple[str, ...]:
        """Unload what has to go, and load it; under the lock. Raises LoadRefused or EngineFailed."""
        gone: list[str] = []
        for _ in range(_MOST_STEPS):
            shelf = await self.engine_adapters()
            step = next_adapter_action(shelf, name, path, keep_s=self._settings.keep_s, now_s=self._clock())
            if step.kind == "loaded":
                self._uses.record_use(name, self._clock())
                return tuple(gone)
            if step.kind == "busy":
                raise LoadRefused(503, step.why, 1)
            if step.kind == "unload":
                await self._unload(step.name, shelf, step.why)
                gone.append(step.name)
                continue
            self._files.add_to_repository(name, path, self.file.declared.get(name))
            answer = await self._engine.load_adapter(name, path, timeout_s=self._settings.load_timeout_s)
            if answer.problem is None:
                self._uses.on_loaded(name, path, self._clock())
                self._counters.adapters = len(shelf.loaded) + 1
                return tuple(gone)
            if not answer.is_full or not shelf.loaded:
                raise LoadRefused(502, f"the engine does not load {name}: {answer.message}")
            # the engine holds fewer than was assumed
            self.limit = len(shelf.loaded)
            log.info("the engine holds no more than %d adapters: %s", self.limit, answer.message)
        raise LoadRefused(503, f"no room was made for {name}", 1)

    async def _unload(self, name: str, shelf: EngineAdapterState, why: str) -> None:
        try:
            await self._engine.unload_adapter(name, timeout_s=self._settings.load_timeout_s)
        except EngineFailed as error:
            raise LoadRefused(503, f"{name} could not be unloaded: {error}", 1) from error
        self._uses.forget(name)
        self._counters.unloads[why] += 1
        self._counters.adapters = max(len(shelf.loaded) - 1, 0)
        self._files.remove_from_repository(name)
        log.info("unloaded %s (%s)", name, why)

    def _has_come(self, name: str, task: asyncio.Task[tuple[str, ...]]) -> None:
        self._coming.pop(name, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.failures.pop(name, None)
        else:
            self._note_failure(name, error)

    def _note_failure(self, name: str, error: BaseException) -> None:
        is_busy = isinstance(error, LoadRefused) and error.status == 503
        self._counters.loads["refused" if is_busy else "failed"] += 1
        before = self.failures.pop(name, None)
        times = 1 if before is None or is_busy else before.times + 1
        self.failures[name] = LoadFailures(times, self._clock(), str(error), is_busy)
        while len(self.failures) > _MOST_FAILURES:
            del self.failures[next(iter(self.failures))]
        if before is None or before.message != str(error):
            log.warning("%s", error)
