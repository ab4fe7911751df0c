"""SGLang's ``cache_aware`` (now the Shepherd Model Gateway's): the best match in its tree, unless loads are apart.

Loads are requests in flight. More than 32 apart and the most more than 1.1 times the least: the least loaded. Else, if somebody holds more
than half of the prompt, who holds most of it; else the least loaded (before: the smallest tree, which ignores load: sgl-project/sglang issue
14305). Source: lightseekorg/smg, ``model_gateway/src/policies/cache_aware.rs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.choosing import in_flight, least, match_ratio

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
        may, load = view.candidates(), in_flight(view)
        most, fewest = float(load[may].max()), float(load[may].min())
        ratio = match_ratio(view)
        if (most - fewest > _APART and most > _TIMES * fewest) or float(ratio[may].max()) <= _MATCH:
            return least(view, load, rng)
        # between equal matches the lower load
        return least(view, -ratio + load / (1e6 * (1 + most)), rng, may & np.isfinite(load))
