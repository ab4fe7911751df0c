"""Scorers of load: how much waits, runs, or has been sent and has not come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from extproc.endpoints.engine_reports import estimated_running, estimated_waiting
from extproc.endpoints.ledger import backlogs

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


def less_is_better(values: Floats, candidates: Bools) -> Floats:
    """``(max - x) / (max - min)`` over the rows of ``candidates``; 1 for all if they are equal."""
    inside = values[candidates]
    least, most = (float(inside.min()), float(inside.max())) if inside.size else (0.0, 0.0)
    if most <= least:
        return np.ones(values.size)
    scores: Floats = (most - values) / (most - least)
    return scores


class Queue(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Requests that wait in the engine: llm-d's ``queue-scorer``, ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the shortest queue, 0 for the longest."""
        return less_is_better(estimated_waiting(view.table, view.now_s), candidates)


class RunningRequests(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Requests in the engine's batch: llm-d's ``running-requests-size-scorer``, ``(max - x) / (max - min)``."""

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for the smallest batch, 0 for the largest."""
        return less_is_better(estimated_running(view.table, view.now_s), candidates)


class ActiveRequests(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Requests that we sent and that have not ended: llm-d's ``active-request-scorer``.

    ``count <= idleThreshold``: 1; else ``(max - count) / max * maxBusyScore``.
    """

    idle_threshold: Count = 0
    max_busy_score: Share = 1.0

    def score(self, view: View, candidates: Bools) -> Floats:
        """Never late: we count ourselves."""
        counts = view.table.in_flight.astype(np.float64)
        most = float(counts[candidates].max(initial=0.0))
        if most <= 0:
            return np.ones(counts.size)
        busy = (most - counts) / most * self.max_busy_score
        scores: Floats = np.where(counts <= self.idle_threshold, 1.0, busy)
        return scores


class LoadAware(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The queue against a fixed length: llm-d's ``load-aware-scorer``, ``0.5 * (1 - min(waiting, t) / t)``."""

    threshold: Annotated[int, msgspec.Meta(ge=1)] = 128

    def score(self, view: View, candidates: Bools) -> Floats:
        """At most 0.5: there is always something to say for another scorer."""
        del candidates
        scores: Floats = 0.5 * (
            1 - np.minimum(estimated_waiting(view.table, view.now_s), self.threshold) / self.threshold
        )
        return scores


class TokenLoad(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Uncached tokens in flight and this prompt's: llm-d's ``token-load-scorer``, ``1 - min(T, Q) / Q``."""

    queue_threshold_tokens: Annotated[float, msgspec.Meta(gt=0)] = 4_194_304

    def score(self, view: View, candidates: Bools) -> Floats:
        """What waits for prefill drains as the engine works; tokens are counted as work, attention included."""
        del candidates
        tokens = backlogs(view.table, view.now_s) + view.demand.work
        scores: Floats = 1 - np.minimum(tokens, self.queue_threshold_tokens) / self.queue_threshold_tokens
        return scores


class LeastRequestScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Kthena's ``least-request`` score: ``(max - base) / max`` with ``base = F + 100 * max(F - R, 0)``.

    F: what we sent and what has not ended; R: what the engine says it runs. What it does not run it must be queueing.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 where nothing is in flight; all 1 if that is so everywhere."""
        sent = view.table.in_flight.astype(np.float64)
        base = sent + 100.0 * np.maximum(sent - estimated_running(view.table, view.now_s), 0.0)
        most = float(base[candidates].max(initial=0.0))
        return (most - base) / most if most > 0 else np.ones(base.size)
