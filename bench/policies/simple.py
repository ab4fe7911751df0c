"""What every proxy has: by chance, the least requests, the better of two. (Round robin is extproc's own.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.policies.choosing import in_flight, least

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import Pick, View


class ByChance:
    """Every endpoint equally often."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Nothing is looked at."""
        return least(view, np.zeros(len(view.table.addresses)), rng)


class LeastRequest:
    """The fewest requests in flight: nginx's ``least_conn``, Envoy's ``LEAST_REQUEST`` with a choice of all."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Never late: we count ourselves."""
        return least(view, in_flight(view), rng)


class PowerOfTwo:
    """Two by chance, of which the one with fewer requests (Mitzenmacher, 2001): Envoy's ``LEAST_REQUEST`` as it comes."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The others stay as fallbacks, in any order."""
        rows = np.flatnonzero(view.candidates())
        drawn = rows[rng.sample(range(rows.size), min(2, rows.size))]
        cost = np.full(len(view.table.addresses), np.inf)
        cost[drawn] = in_flight(view)[drawn]
        return least(view, cost, rng)
