# SPDX-License-Identifier: Apache-2.0
"""Remembers when each adapter was last in use, and which files it has, where the engine does not tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.agents.runtime.adapter_choice import Adapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.agents.runtime.dialects import Dialect
    from controller.agents.runtime.engine_page import EnginePage

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
