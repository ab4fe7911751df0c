# SPDX-License-Identifier: Apache-2.0
"""The last step of most policies: the least cost, ties broken by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extproc.scheduling.picker import Pick

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View


def least_cost(view: View, cost: Floats, rng: random.Random, among: Bools | None = None) -> Pick:
    """The candidates by cost, the least first. ``cost``: by row of the endpoint table.

    ``among``: the rows to choose from; all candidates if it is None or holds no candidate. Raises ValueError if a
    row has no cost, or one that is not a number.
    """
    may = view.candidates()
    rows = np.flatnonzero(may & among) if among is not None else np.flatnonzero(may)
    if not rows.size:
        rows = np.flatnonzero(may)
    if cost.ndim != 1 or cost.size <= rows[-1]:
        msg = f"cost has the shape {cost.shape}; it needs a number for each row of view.table, here to row {rows[-1]}"
        raise ValueError(msg)
    if np.isnan(cost[rows]).any():
        msg = f"the cost of row {rows[np.isnan(cost[rows])][0]} is not a number (nan), as after 0/0"
        raise ValueError(msg)
    shuffled = rows[rng.sample(range(rows.size), rows.size)]
    ordered: list[int] = shuffled[cost[shuffled].argsort(kind="stable")].tolist()
    return Pick(ordered[: view.choices], float(view.ttft_s()[ordered[0]]))


def match_ratio(view: View) -> Floats:
    """By row, the share of the prompt that the endpoint has in its cache, 0 to 1."""
    ratio: Floats = view.demand.cached_tokens / max(view.request.input_tokens, 1.0)
    return ratio


def requests_in_flight(view: View) -> Floats:
    """By row, the requests that were sent and have not ended."""

    return view.table.in_flight.astype(np.float64)
