# SPDX-License-Identifier: Apache-2.0
"""Which adapters are loaded and unloaded, and which one is unloaded when the engine is full.

``AdapterUses`` keeps when each was last in use, and which files it has, where the engine does not report it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.agents.runtime.adapter_names import Declared

if TYPE_CHECKING:
    from controller.agents.runtime.metrics import EnginePage
    from extproc.engines.dialects import Dialect

_FIRST_RETRY_S: Final = 2.0
_LONGEST_RETRY_S: Final = 120.0


class Adapter(msgspec.Struct, frozen=True):
    """A loaded adapter. ``path``: as the engine tells it, empty if it does not. ``used_at_s``: last in use, or
    loaded.
    """

    name: str
    path: str = ""
    used_at_s: float = 0.0
    is_in_use: bool = False


class Shelf(msgspec.Struct, frozen=True):
    """What the engine holds. ``limit``: how many it may hold, 0 if not known. ``pinned``: never evicted.

    ``tells_use``: False while it is not known which adapters are in use, although the engine could tell.
    """

    loaded: Mapping[str, Adapter]
    pinned: frozenset[str] = frozenset()
    limit: int = 0
    tells_use: bool = True

    @property
    def is_full(self) -> bool:
        """Whether one has to go before another can come."""
        return bool(self.limit) and len(self.loaded) >= self.limit


class Step(msgspec.Struct, frozen=True):
    """What to do next to have an adapter: nothing, load it, or unload another (or an older version of it) first."""

    kind: Literal["loaded", "load", "unload", "busy"]
    name: str = ""
    why: str = ""


def next_step(shelf: Shelf, name: str, path: str, *, keep_s: float, now_s: float) -> Step:
    """How to have ``name`` with the files at ``path``. ``keep_s``: see ``victim``."""
    held = shelf.loaded.get(name)
    if held is not None and (not path or not held.path or held.path == path):
        return Step("loaded", name)
    if held is not None:
        if _may_go(held, shelf, keep_s, now_s, ignores_pin=True):
            return Step("unload", name, "replaced")
        return Step("busy", name, f"{name} is in use with other files")
    if not shelf.is_full:
        return Step("load", name)
    chosen = victim(shelf, keep_s=keep_s, now_s=now_s)
    if chosen:
        return Step("unload", chosen, "evicted")
    return Step("busy", name, f"the engine holds {len(shelf.loaded)} adapters, and all of them are pinned or in use")


def victim(shelf: Shelf, *, keep_s: float, now_s: float) -> str:
    """The least recently used adapter that may go; empty if none may.

    One that was in use, or loaded, less than ``keep_s`` ago stays: requests for it may be on their way to the engine.
    """
    candidates = [one for one in shelf.loaded.values() if _may_go(one, shelf, keep_s, now_s)]
    return min(candidates, key=lambda one: (one.used_at_s, one.name)).name if candidates else ""


def _may_go(one: Adapter, shelf: Shelf, keep_s: float, now_s: float, *, ignores_pin: bool = False) -> bool:
    if one.is_in_use or not shelf.tells_use or now_s - one.used_at_s < keep_s:
        return False
    return ignores_pin or one.name not in shelf.pinned


class Failure(msgspec.Struct, frozen=True):
    """Loads of an adapter that failed in a row."""

    times: int
    at_s: float
    message: str


def retry_at_s(failure: Failure) -> float:
    """When a declared adapter is tried again."""
    return failure.at_s + min(_FIRST_RETRY_S * 2.0 ** min(failure.times - 1, 10), _LONGEST_RETRY_S)


class Changes(msgspec.Struct, frozen=True):
    """What the file of declared adapters asks for."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()


class Wishes(msgspec.Struct, frozen=True):
    """``declared``: by the file. ``paths``: where the files of each belong. ``removed``: from the file lately.

    ``unwanted``: declared, but unloaded by a call. ``coming``: being loaded.
    """

    declared: Mapping[str, Declared]
    paths: Mapping[str, str]
    removed: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()
    coming: frozenset[str] = frozenset()
    failures: Mapping[str, Failure] = {}


def changes(shelf: Shelf, wishes: Wishes, *, keep_s: float, now_s: float) -> Changes:
    """Pinned adapters are loaded whatever has to go for them, others of the file while there is room.

    Level-triggered: an engine that has started again holds none of them, so all are loaded again.
    """
    wanted = [name for name in wishes.declared if _is_due(name, shelf, wishes, now_s)]
    pinned = [name for name in wanted if wishes.declared[name].pinned]
    room = shelf.limit - len(shelf.loaded) - len(wishes.coming) - len(pinned) if shelf.limit else len(wanted)
    others = [name for name in wanted if not wishes.declared[name].pinned]
    # one with other files than declared takes its own place
    replaced = [name for name in others if name in shelf.loaded]
    fresh = [name for name in others if name not in shelf.loaded]
    unload = (
        name
        for name in sorted(wishes.removed)
        if name not in wishes.declared and name in shelf.loaded and _may_go(shelf.loaded[name], shelf, keep_s, now_s)
    )
    return Changes((*pinned, *replaced, *fresh[: max(room, 0)]), tuple(unload))


def _is_due(name: str, shelf: Shelf, wishes: Wishes, now_s: float) -> bool:
    if name in wishes.unwanted or name in wishes.coming:
        return False
    failure = wishes.failures.get(name)
    if failure is not None and now_s < retry_at_s(failure):
        return False
    held, path = shelf.loaded.get(name), wishes.paths.get(name, "")
    return held is None or bool(path and held.path and held.path != path)


_FINISHED = "finished_requests_total"
_WAITING = "waiting_requests"


class AdapterUses:
    """Only of adapters that are loaded, so it does not grow."""

    def __init__(self, dialect: Dialect) -> None:
        self._tells_loras = bool(dialect.lora_info)
        self._tells_models = dialect.adapters == "repository"
        self._used_at_s: dict[str, float] = {}
        self._finished: dict[str, float] = {}
        self._paths: dict[str, str] = {}

    def touch(self, name: str, now_s: float) -> None:
        """It was asked for: requests for it are about to come."""
        self._used_at_s[name] = now_s

    def loaded(self, name: str, path: str, now_s: float) -> None:
        """The engine has loaded it from ``path``."""
        self._paths[name] = path
        self.touch(name, now_s)

    def forget(self, name: str) -> None:
        """It was unloaded."""
        self._used_at_s.pop(name, None)
        self._finished.pop(name, None)
        self._paths.pop(name, None)

    def are_known(self, page: EnginePage | None) -> bool:
        """False if the engine tells which adapters are in use, and cannot be asked now."""
        return page is not None or not self._tells_loras

    def adapters(self, listed: Mapping[str, str], page: EnginePage | None, now_s: float) -> dict[str, Adapter]:
        """The loaded adapters with their last use. ``listed``: paths by name, empty where the engine does not tell.

        One that is seen for the first time counts as used now: we may have been started after it was loaded.
        """
        for name in [name for name in self._used_at_s if name not in listed]:
            self.forget(name)
        for name in listed:
            self._used_at_s.setdefault(name, now_s)
        in_use: frozenset[str] = frozenset()
        if page is not None:
            in_use = self._models(page, now_s) if self._tells_models else self._loras(page, now_s)
        return {
            name: Adapter(name, path or self._paths.get(name, ""), self._used_at_s[name], name in in_use)
            for name, path in listed.items()
        }

    def _loras(self, page: EnginePage, now_s: float) -> frozenset[str]:
        use = page.adapters
        if use is None:
            return frozenset()
        is_idle = page.total("running_requests") == 0 and page.total(_WAITING) == 0
        for name, idle_s in use.idle_s.items():
            if name in self._used_at_s:
                self._used_at_s[name] = max(self._used_at_s[name], now_s - idle_s)
        # an idle engine may leave its last series as it was
        return frozenset() if is_idle else use.in_use

    def _models(self, page: EnginePage, now_s: float) -> frozenset[str]:
        """A V2 server tells how many requests each model has finished, and how many wait for it."""
        for name, finished in page.values.get(_FINISHED, {}).items():
            if name in self._used_at_s and finished > self._finished.get(name, 0.0):
                if name in self._finished:
                    self._used_at_s[name] = now_s
                self._finished[name] = finished
        return frozenset(name for name, waiting in page.values.get(_WAITING, {}).items() if waiting)
