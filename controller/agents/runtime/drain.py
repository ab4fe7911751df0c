# SPDX-License-Identifier: Apache-2.0
"""Decides when a drain is over: nothing runs and nothing waits, or the grace has ended."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec.structs import replace

# Pages in a row that must show nothing: a request between two queues is on none of them.
_IN_A_ROW: Final = 2

Outcome = Literal["", "idle", "gone", "timeout"]


class DrainSettings(msgspec.Struct, frozen=True):
    """``settle_s``: in which gateways notice that this engine takes no more. ``timeout_s``: the grace, from the
    begin.
    """

    settle_s: float = 5.0
    timeout_s: float = 600.0


class Load(msgspec.Struct, frozen=True):
    """What a metrics page says. None: it does not tell. ``is_gone``: nobody listens on the engine's port any more."""

    running: float | None = None
    waiting: float | None = None
    is_gone: bool = False


class Drain(msgspec.Struct, frozen=True):
    """A drain that has begun.

    ``load``: the last that the engine told. ``quiet``: pages in a row that showed nothing. ``outcome``: empty while it
    lasts.
    """

    began_at_s: float
    load: Load = Load()
    quiet: int = 0
    outcome: Outcome = ""
    ended_at_s: float = 0.0


def observed(drain: Drain, load: Load, settings: DrainSettings, *, finishes_requests: bool, now_s: float) -> Drain:
    """The drain after a look at the engine. ``finishes_requests``: see Dialect.

    Metrics that are not to be had say nothing: then the grace decides.
    """
    if drain.outcome:
        return drain
    is_quiet = _is_quiet(load, finishes_requests=finishes_requests)
    told = drain.load if load == Load() else load
    drain = replace(drain, load=told, quiet=drain.quiet + 1 if is_quiet else 0)
    outcome: Outcome = ""
    elapsed_s = now_s - drain.began_at_s
    if drain.quiet >= _IN_A_ROW and load.is_gone:
        outcome = "gone"
    elif drain.quiet >= _IN_A_ROW and elapsed_s >= settings.settle_s:
        outcome = "idle"
    elif elapsed_s >= settings.timeout_s:
        outcome = "timeout"
    return replace(drain, outcome=outcome, ended_at_s=now_s) if outcome else drain


def _is_quiet(load: Load, *, finishes_requests: bool) -> bool:
    if load.is_gone:
        return True
    if load.running is None and not finishes_requests:
        return False
    if load.running is None and load.waiting is None:
        return False
    return not load.running and not load.waiting
