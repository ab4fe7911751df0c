# SPDX-License-Identifier: Apache-2.0
"""What every proxy has: random, least request, power of two choices.

Round robin is extproc's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.policies.least_cost import least_cost, requests_in_flight

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import Pick, View


class RandomPick:
    """Every endpoint equally often."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Any order is as likely as any other."""
        return least_cost(view, np.zeros(len(view.table.addresses)), rng)


class LeastRequest:
    """The fewest requests in flight: nginx's ``least_conn``, Envoy's ``LEAST_REQUEST`` with all hosts as choices."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Counts are the router's own, so they are never late."""
        return least_cost(view, requests_in_flight(view), rng)


class PowerOfTwo:
    """The better of two random endpoints (Mitzenmacher, 2001): Envoy's ``LEAST_REQUEST`` with its defaults."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The other endpoints follow as fallbacks, in random order."""

        rows = np.flatnonzero(view.candidates())
        drawn = rows[rng.sample(range(rows.size), min(2, rows.size))]
        cost = np.full(len(view.table.addresses), np.inf)
        cost[drawn] = requests_in_flight(view)[drawn]
        return least_cost(view, cost, rng)
