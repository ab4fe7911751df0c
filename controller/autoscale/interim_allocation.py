# SPDX-License-Identifier: Apache-2.0
"""Replicas of each target, in the binding's order; to be replaced by the choice of the cheapest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.autoscale.situation import Target


def shared_out(units: float, targets: Sequence[Target]) -> Mapping[str, int]:
    """Fills one target after the other."""
    found = {one.name: one.spec.min_replicas for one in targets}
    left = units - sum(one.spec.min_replicas * one.capacity for one in targets)
    for target in targets:
        more = min(target.spec.max_replicas - target.spec.min_replicas, math.ceil(left / target.capacity - 1e-6))
        if more > 0:
            found[target.name] += more
            left -= more * target.capacity
    return found
