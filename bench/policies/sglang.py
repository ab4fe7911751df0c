# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``cache_aware``: the best match in its tree, unless loads are unequal.

It is now part of the Shepherd Model Gateway. Loads are requests in flight. If they differ by more than 32 and the
highest is more than 1.1 times the lowest: the least loaded. Else, if an endpoint holds more than half of the prompt,
the one that holds most; else the least loaded (formerly the smallest tree, which ignores load: sgl-project/sglang
issue 14305). Source: lightseekorg/smg, ``model_gateway/src/policies/cache_aware.rs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.least_cost import least_cost, match_ratio, requests_in_flight

if TYPE_CHECKING:
    import random

    from extproc.scheduling.picker import Pick, View

_APART: Final = 32
_TIMES: Final = 1.1
_MATCH: Final = 0.5


class CacheAware:
    """Balance first, then the tree."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        may, load = view.candidates(), requests_in_flight(view)
        most, fewest = float(load[may].max()), float(load[may].min())
        ratio = match_ratio(view)
        if (most - fewest > _APART and most > _TIMES * fewest) or float(ratio[may].max()) <= _MATCH:
            return least_cost(view, load, rng)
        # the lower load between equal matches

        return least_cost(view, -ratio + load / (1e6 * (1 + most)), rng, may & np.isfinite(load))
