"""What most policies end with: the least of some number, chance deciding between equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from extproc.scheduling.picker import Pick

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View


def least(view: View, cost: Floats, rng: random.Random, among: Bools | None = None) -> Pick:
    """The rows with the least cost first, of ``among`` if that is anybody, else of all that may be chosen."""
    may = view.candidates()
    rows = np.flatnonzero(may & among) if among is not None else np.flatnonzero(may)
    if not rows.size:
        rows = np.flatnonzero(may)
    shuffled = rows[rng.sample(range(rows.size), rows.size)]
    ordered: list[int] = shuffled[cost[shuffled].argsort(kind="stable")].tolist()
    return Pick(ordered[: view.choices], float(view.ttft_s()[ordered[0]]))


def match_ratio(view: View) -> Floats:
    """The share of the prompt that each endpoint holds, 0 to 1."""
    ratio: Floats = view.demand.cached_tokens / max(view.request.input_tokens, 1.0)
    return ratio


def in_flight(view: View) -> Floats:
    """Requests that were sent and have not ended."""
    return view.table.in_flight.astype(np.float64)
