# SPDX-License-Identifier: Apache-2.0
"""How late the picker learns what happens in the engines."""

from __future__ import annotations

import msgspec


class Delays(msgspec.Struct, frozen=True):
    """``scrape_s``: between two readings of an engine's metrics. ``log_s``: from the end of a request to its access
    log entry.

    ``events_s``: from a change in an engine's cache to the KV event. ``load_s``: what an engine takes to load an
    adapter.
    """

    scrape_s: float = 0.2
    log_s: float = 0.2
    events_s: float = 0.05
    load_s: float = 0.5
