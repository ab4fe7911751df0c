# SPDX-License-Identifier: Apache-2.0
"""A sample of decisions and their outcomes, as JSON lines: two lines a request, joined by its ticket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.core.request_states import STEP_NAMES, RequestState

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from extproc.core.effects import Decision, OutcomeJoined
    from extproc.core.shadow_picks import ShadowComparison

# Sampled requests whose end has not been reported.
_MOST_OPEN: Final = 65_536


class DecisionLog:
    """``put``: takes a line and never waits. ``share``: of all requests, 0 to 1."""

    def __init__(
        self,
        put: Callable[[bytes], None],
        *,
        share: float,
        rng: random.Random,
        wall_clock: Callable[[], float],
        explains_all: bool = False,
    ) -> None:
        """``explains_all``: every decision has an explanation, whether it is sampled or not."""
        self._explains_all = explains_all
        self._put = put
        self._share = share
        self._rng = rng
        self._wall_clock = wall_clock
        # who asked, by ticket
        self._open: dict[str, dict[str, str]] = {}

    def draw_sample(self) -> bool:
        """Whether the next request is to be written down."""
        return self._share >= 1 or self._rng.random() < self._share

    def log_decision(self, decision: Decision) -> None:
        """A decision with an explanation was sampled."""
        history, why = decision.history, decision.history.explanation
        if why is None or (self._explains_all and not self.draw_sample()):
            return
        if len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        assignment = decision.assignment
        self._open[decision.ticket] = {
            "tenant": why.tenant,
            "user": why.user,
            "api_key": why.api_key,
            "request_id": why.request_id,
            "trace_id": why.trace_id,
        }
        line = {
            "kind": "decision",
            "at": self._wall_clock(),
            "ticket": decision.ticket,
            "is_precise": assignment.is_precise,
            **msgspec.to_builtins(why),
        }
        line |= {
            f"{STEP_NAMES[state]}_wait_s": waited_s
            for state, waited_s in history.waits.items()
            if waited_s and state is not RequestState.QUEUED
        }
        if history.leg is not None:
            line["prefill_leg"] = msgspec.to_builtins(history.leg)
        self._write(line)

    def log_shadow(self, pick: ShadowComparison) -> None:
        """A comparison with another picker was sampled."""
        if not self.draw_sample():
            return
        ours = None if pick.ours is None else msgspec.to_builtins(pick.ours)
        line = {"kind": "shadow", "at": self._wall_clock(), "verdict": pick.verdict, "theirs": pick.theirs}
        self._write({**line, "their_cost_s": pick.their_cost_s, "ours": ours, "server": pick.server})

    def log_outcome(self, settled: OutcomeJoined) -> None:
        """The outcome of a sampled request."""
        outcome = settled.outcome
        caller = self._open.pop(outcome.ticket, None)
        if caller is None:
            return
        assignment = settled.assignment
        line = {
            "kind": "outcome",
            "at": self._wall_clock(),
            "predicted_cached_tokens": assignment.cached_tokens,
            "is_precise": assignment.is_precise,
            "server": settled.server,
            **caller,
            **msgspec.to_builtins(outcome),
        }
        if settled.leg is not None:
            line["prefill_leg"] = msgspec.to_builtins(settled.leg)
        self._write(line)

    def _write(self, line: dict[str, object]) -> None:
        self._put(msgspec.json.encode(line) + b"\n")
