# SPDX-License-Identifier: Apache-2.0
"""A sample of decisions and what came of them, as JSON lines: two lines a request, joined by its ticket."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, TextIO

import msgspec

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from extproc.core.effects import Decision, Settled

log = logging.getLogger(__name__)

# Sampled requests whose end has not been heard of.
_MOST_OPEN: Final = 65_536


class DecisionLog:
    """Writes to ``file``; ``share`` of all requests, 0 to 1. A disk that is full ends the log, not the requests."""

    def __init__(self, file: TextIO, *, share: float, rng: random.Random, wall_clock: Callable[[], float]) -> None:
        self._file: TextIO | None = file
        self._share = share
        self._rng = rng
        self._wall_clock = wall_clock
        self._open: dict[str, None] = {}

    def samples(self) -> bool:
        """Whether the next request is to be written down."""
        return self._file is not None and (self._share >= 1 or self._rng.random() < self._share)

    def decided(self, decision: Decision) -> None:
        """A decision with an explanation was sampled."""
        if self._file is None or decision.explanation is None:
            return
        if len(self._open) >= _MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        self._open[decision.ticket] = None
        assignment = decision.assignment
        line = {
            "kind": "decision",
            "at": self._wall_clock(),
            "ticket": decision.ticket,
            "is_precise": assignment.is_precise,
            **msgspec.to_builtins(decision.explanation),
        }
        if decision.adapter_wait_s:
            line["adapter_wait_s"] = decision.adapter_wait_s
        if decision.engine_wait_s:
            line["engine_wait_s"] = decision.engine_wait_s
        self._write(line)

    def settled(self, settled: Settled) -> None:
        """What came of it."""
        outcome = settled.outcome
        if self._file is None or self._open.pop(outcome.ticket, self) is self:
            return
        assignment = settled.assignment
        line = {
            "kind": "outcome",
            "at": self._wall_clock(),
            "predicted_cached_tokens": assignment.cached_tokens,
            "is_precise": assignment.is_precise,
            **msgspec.to_builtins(outcome),
        }
        self._write(line)

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(line).decode() + "\n")
            self._file.flush()
        except OSError as error:
            log.error("the decision log ends here: %s", error)
            self._file = None
