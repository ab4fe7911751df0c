"""The seam of fairness between flows: which of those that wait may send its next request.

Each policy keeps a column or two, a row a flow. Service is counted in tokens, weighted (an output token costs more than one of
input) and over the flow's own weight. A flow is charged when a request goes, by what is expected, and corrected when the
engines have said what it was.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from extproc.endpoints.table import Bools, Floats


class FlowHeads(msgspec.Struct, frozen=True):
    """Who waits, by row, and of their first requests the ``keys`` of the order inside their flow and tokens ``cached`` in an engine."""

    waiting: Bools
    keys: Floats
    cached: Floats


class FairnessPolicy(Protocol):
    """Chooses a flow. Rows are numbers of flows; their columns grow with ``grow``."""

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` flows; new ones begin at 0."""
        ...

    def activate(self, row: int, waiting: Bools) -> None:
        """A flow that had nothing waiting now has; ``waiting``: the others that have."""
        ...

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The row whose head goes; at least one is ``candidates``."""
        ...

    def charge(self, row: int, service: float, now: float) -> None:
        """One of the flow's requests goes, and is expected to take this much."""
        ...

    def settle(self, row: int, service: float, now: float) -> None:
        """It took so much more, or, below 0, less."""
        ...

    def forget(self, row: int) -> None:
        """The row will be another flow's."""
        ...

    def debt(self, row: int) -> float:
        """What the flow has had beyond others; flows with the least are forgotten first."""
        ...


def grown(column: Floats, rows: int) -> Floats:
    """With room for ``rows`` flows, 0 for the new ones."""
    return np.pad(column, (0, rows - column.size))
