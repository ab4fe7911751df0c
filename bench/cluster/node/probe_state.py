# SPDX-License-Identifier: Apache-2.0
"""When a probe runs next and what its results mean. No network, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.cluster.node.pod_spec import ProbeSpec


class ProbeState:
    """One probe of a container that runs since ``began_at_s``. ``passed``: None until a threshold has been reached."""

    def __init__(self, spec: ProbeSpec, began_at_s: float) -> None:
        self.spec = spec
        self.passed: bool | None = None
        self.message = ""
        self._due_at_s = began_at_s + spec.delay_s
        self._is_running = False
        self._row = 0
        self._last: bool | None = None

    def due(self, now_s: float) -> bool:
        """Whether to run it now; it counts as running from then on."""
        if self._is_running or now_s < self._due_at_s:
            return False
        self._is_running = True
        self._due_at_s = now_s + self.spec.period_s
        return True

    @property
    def wake_at_s(self) -> float | None:
        """When it is due; None while it runs."""
        return None if self._is_running else self._due_at_s

    def result(self, *, ok: bool, message: str) -> None:
        """Count a result: enough of one kind in a row change ``passed``."""
        self._is_running = False
        self._row = self._row + 1 if ok == self._last else 1
        self._last = ok
        self.message = message
        if self._row >= (self.spec.successes if ok else self.spec.failures):
            self.passed = ok
