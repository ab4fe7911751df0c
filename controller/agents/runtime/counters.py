# SPDX-License-Identifier: Apache-2.0
"""What the agent counts of its own work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """``loads``: by result. ``unloads``: by reason. Times are sums in seconds."""

    loads: dict[str, int] = field(default_factory=lambda: {"loaded": 0, "failed": 0, "refused": 0})
    unloads: dict[str, int] = field(default_factory=lambda: {"evicted": 0, "asked": 0, "removed": 0, "replaced": 0})
    load_s: float = 0.0
    adapters: int = 0
    probes: dict[str, int] = field(default_factory=lambda: {"good": 0, "bad": 0})
    warm_up_s: float = 0.0
    warm_up_failures: int = 0
    starts: int = 0
