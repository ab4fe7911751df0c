# SPDX-License-Identifier: Apache-2.0
"""Loads and unloads adapters, one change of the engine at a time, as callers and the file ask."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.runtime.adapter_choice import AdapterUses, Failure, Shelf, Wishes, changes, next_step
from controller.agents.runtime.adapter_files import DownloadFailed
from controller.agents.runtime.adapter_names import NotDeclared
from controller.agents.runtime.engine_client import EngineFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.agents.runtime.adapter_files import AdapterFiles
    from controller.agents.runtime.adapter_names import Declared, DeclaredFile
    from controller.agents.runtime.engine_client import EngineClient
    from controller.agents.runtime.metrics import Counters, EnginePage
    from controller.agents.runtime.settings import AdapterSettings
    from extproc.engines.dialects import Dialect

# Adapters that are loaded at the same time, downloads included.
_MOST_COMING: Final = 32
# Failures remembered: names come from callers.
_MOST_FAILURES: Final = 256
# Evictions and the load itself.
_MOST_STEPS: Final = 8
_LIST_TIMEOUT_S: Final = 10.0

log = logging.getLogger(__name__)


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
        file: DeclaredFile,
        counters: Counters,
        page: Callable[[], Awaitable[EnginePage | None]],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._files = files
        self.file = file
        self._counters = counters
        self._page = page
        self._clock = clock
        self._uses = AdapterUses(dialect)
        self.limit = settings.limit
        self._coming: dict[str, _Coming] = {}
        self.failures: dict[str, Failure] = {}
        self._unwanted: set[str] = set()
        # what is loaded may change only under this lock
        self._changing = asyncio.Lock()

    @property
    def coming(self) -> frozenset[str]:
        """Adapters that are being downloaded or loaded."""
        return frozenset(self._coming)

    async def load(self, name: str, source: str) -> tuple[str, ...]:
        """Returns when the engine holds it: the adapters that went for it. ``source``: empty for that of the file.

        Callers that ask for the same one meanwhile wait with the first; one that leaves does not end the load. Raises
        LoadRefused.
        """
        task = self._start(name, source)
        self._unwanted.discard(name)
        self.file.removed.discard(name)
        return await asyncio.shield(task)

    async def unload(self, name: str) -> None:
        """By a caller's wish; raises LoadRefused for a pinned one."""
        declared = self.file.declared.get(name)
        if declared is not None and declared.pinned:
            raise LoadRefused(409, f"{name} is pinned: remove it from the file of adapters first")
        async with self._changing:
            shelf = await self.shelf()
            if name not in shelf.loaded:
                raise LoadRefused(404, f"{name} is not loaded")
            if declared is not None:
                self._unwanted.add(name)
            await self._unload(name, shelf, "asked")

    def _place(self, name: str, source: str) -> tuple[str, str]:
        """The source, and the path that the engine is given; raises LoadRefused for what is not allowed."""
        try:
            return self._files.place(name, source, self.file.declared.get(name))
        except NotDeclared as error:
            raise LoadRefused(503, str(error), 1) from error
        except ValueError as error:
            raise LoadRefused(400, str(error)) from error

    async def shelf(self, *, with_use: bool = True) -> Shelf:
        """What the engine holds now; raises LoadRefused if it does not tell. ``with_use``: and which is in use."""
        try:
            listed = await self._engine.loaded(timeout_s=_LIST_TIMEOUT_S)
        except EngineFailed as error:
            raise LoadRefused(503, f"the engine does not tell what it holds: {error}", 5) from error
        page = await self._page() if with_use else None
        pinned = frozenset(name for name, one in self.file.declared.items() if one.pinned)
        adapters = self._uses.adapters(listed, page, self._clock())
        slots = page.adapters.slots if page is not None and page.adapters is not None else 0
        self._counters.adapters = len(adapters)
        return Shelf(adapters, pinned, self.limit or slots, self._uses.are_known(page))

    async def follow_file(self) -> bool:
        """Do what the file of adapters asks for, as far as the engine lets us now. To be called again and again.

        Returns whether all pinned adapters are there, or failed at least once.
        """
        self.file.poll()
        self._unwanted &= set(self.file.declared)
        if not self.file.declared and not self.file.removed:
            return True
        shelf = await self.shelf()
        paths = {name: self._declared_path(name, one) for name, one in self.file.declared.items()}
        wishes = Wishes(
            declared=self.file.declared,
            paths=paths,
            removed=frozenset(self.file.removed),
            unwanted=frozenset(self._unwanted),
            coming=self.coming,
            failures=self.failures,
        )
        wanted = changes(shelf, wishes, keep_s=self._settings.keep_s, now_s=self._clock())
        self.file.removed &= set(shelf.loaded) | self.coming
        for name in wanted.unload:
            async with self._changing:
                await self._unload(name, shelf, "removed")
        for name in wanted.load:
            if len(self._coming) < _MOST_COMING:
                _ = self._start(name, "")
        return shelf.pinned <= {*shelf.loaded, *self.failures}

    def engine_started_again(self) -> None:
        """Forget what the former engine said of its limits."""
        self.limit = self._settings.limit

    async def aclose(self) -> None:
        """Ends what is being loaded."""
        tasks = [one.task for one in self._coming.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, name: str, source: str) -> asyncio.Task[tuple[str, ...]]:
        source, path = self._place(name, source)
        coming = self._coming.get(name)
        if coming is not None:
            if coming.path != path:
                raise LoadRefused(503, f"{name} is being loaded from another source", 1)
            return coming.task
        if len(self._coming) >= _MOST_COMING:
            raise LoadRefused(503, f"{_MOST_COMING} adapters are being loaded", 1)
        task = asyncio.create_task(self._bring(name, source, path))
        task.add_done_callback(lambda done: self._has_come(name, done))
        self._coming[name] = _Coming(path, task)
        return task

    def _declared_path(self, name: str, one: Declared) -> str:
        try:
            return self._place(name, one.uri)[1]
        except LoadRefused:
            return ""

    async def _bring(self, name: str, source: str, path: str) -> tuple[str, ...]:
        began_s = self._clock()
        try:
            if await self._is_held(name, path):
                return ()
            await self._files.bring(name, source, path)
            async with self._changing:
                gone = await self._put(name, path)
        except DownloadFailed as error:
            raise LoadRefused(502, f"{name} could not be downloaded: {error}", 10) from error
        except EngineFailed as error:
            raise LoadRefused(503, f"the engine does not answer: {error}", 5) from error
        except OSError as error:
            raise LoadRefused(502, f"{name} could not be loaded: {error}", 5) from error
        self._counters.loads["loaded"] += 1
        self._counters.load_s += self._clock() - began_s
        log.info("loaded %s in %.1f s", name, self._clock() - began_s)
        return gone

    async def _is_held(self, name: str, path: str) -> bool:
        shelf = await self.shelf(with_use=False)
        step = next_step(shelf, name, path, keep_s=self._settings.keep_s, now_s=self._clock())
        if step.kind == "loaded":
            self._uses.touch(name, self._clock())
        return step.kind == "loaded"

    async def _put(self, name: str, path: str) -> tuple[str, ...]:
        """Unload what has to go, and load it; under the lock. Raises LoadRefused or EngineFailed."""
        gone: list[str] = []
        for _ in range(_MOST_STEPS):
            shelf = await self.shelf()
            step = next_step(shelf, name, path, keep_s=self._settings.keep_s, now_s=self._clock())
            if step.kind == "loaded":
                self._uses.touch(name, self._clock())
                return tuple(gone)
            if step.kind == "busy":
                raise LoadRefused(503, step.why, 1)
            if step.kind == "unload":
                await self._unload(step.name, shelf, step.why)
                gone.append(step.name)
                continue
            answer = await self._engine.load(name, path, timeout_s=self._settings.load_timeout_s)
            if answer.problem is None:
                self._uses.loaded(name, path, self._clock())
                self._counters.adapters = len(shelf.loaded) + 1
                return tuple(gone)
            if not answer.is_full or not shelf.loaded:
                raise LoadRefused(502, f"the engine does not load {name}: {answer.message}")
            # the engine holds fewer than was assumed
            self.limit = len(shelf.loaded)
            log.info("the engine holds no more than %d adapters: %s", self.limit, answer.message)
        raise LoadRefused(503, f"no room was made for {name}", 1)

    async def _unload(self, name: str, shelf: Shelf, why: str) -> None:
        try:
            await self._engine.unload(name, timeout_s=self._settings.load_timeout_s)
        except EngineFailed as error:
            raise LoadRefused(503, f"{name} could not be unloaded: {error}", 1) from error
        self._uses.forget(name)
        self._counters.unloads[why] += 1
        self._counters.adapters = max(len(shelf.loaded) - 1, 0)
        self._files.remove(name)
        log.info("unloaded %s (%s)", name, why)

    def _has_come(self, name: str, task: asyncio.Task[tuple[str, ...]]) -> None:
        self._coming.pop(name, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.failures.pop(name, None)
            return
        is_busy = isinstance(error, LoadRefused) and error.status == 503
        self._counters.loads["refused" if is_busy else "failed"] += 1
        before = self.failures.pop(name, None)
        times = 1 if before is None or is_busy else before.times + 1
        self.failures[name] = Failure(times, self._clock(), str(error))
        while len(self.failures) > _MOST_FAILURES:
            del self.failures[next(iter(self.failures))]
        if before is None or before.message != str(error):
            log.warning("%s", error)
