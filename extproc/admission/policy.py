# SPDX-License-Identifier: Apache-2.0
"""The protocol of fairness policies, which decide whose request is dispatched next.

A policy keeps a column or two with one row for each flow. Service is counted in weighted tokens (an output token
costs more than an input token), divided by the flow's own weight. A flow is charged the expected service when a
request is dispatched; the charge is settled when the engine has reported the actual usage.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np

from extproc.endpoints.table import Bools, Floats


class FlowHeads(msgspec.Struct, frozen=True):
    """The first waiting request of each flow, by row.

    ``waiting``: whether the flow has one. ``keys``: its order key. ``cached``: its prompt tokens cached at the
    endpoint that holds most.
    """

    waiting: Bools
    keys: Floats
    cached: Floats


class FairnessPolicy(Protocol):
    """Chooses which flow sends its next request. A flow is identified by its row."""

    def grow(self, rows: int) -> None:
        """Extend the columns to ``rows`` flows; new ones start at 0."""
        ...

    def activate(self, row: int, waiting: Bools) -> None:
        """A flow without waiting requests is about to get one; ``waiting``: the flows that have some."""
        ...

    def choose(self, candidates: Bools, heads: FlowHeads, now: float) -> int:
        """The row of the flow whose head is dispatched next; at least one of ``candidates`` is set."""
        ...

    def charge(self, row: int, service: float, now: float) -> None:
        """A request of the flow is dispatched. ``service``: expected, in weighted tokens over the flow's weight."""
        ...

    def settle(self, row: int, service: float, now: float) -> None:
        """A request of the flow has ended. ``service``: actual minus expected service; negative is a refund."""
        ...

    def forget(self, row: int) -> None:
        """The row will be given to another flow."""
        ...

    def debt(self, row: int) -> float:
        """The service that the flow received beyond others; idle flows with the least debt are forgotten first."""
        ...


def grown(column: Floats, rows: int) -> Floats:
    """``column`` extended with zeros to ``rows`` entries."""
    return np.pad(column, (0, rows - column.size))
