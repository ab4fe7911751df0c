"""Ray Serve's ``PrefixCacheAffinityRouter``: the best match if queues are level, else the better of two.

Queues (requests in flight) at most 10 apart: the best match if it covers a tenth of the prompt, else who has the smallest part of the tree,
which is never evicted. Else power of two. Source: ray-project/ray, ``python/ray/llm/_internal/serve/routing_policies/prefix_aware`` and
the documentation's threshold (the code's own is infinite).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.choosing import in_flight, least, match_ratio
from bench.policies.simple import PowerOfTwo

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

_APART: Final = 10
_MATCH: Final = 0.1


class PrefixAffinity:
    """``tree``: tokens that each endpoint was the first to be sent, by row."""

    def __init__(self) -> None:
        self._tree: Floats = np.zeros(0)

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._tree = np.pad(self._tree, (0, len(view.table.addresses) - self._tree.size))
        may, load, ratio = view.candidates(), in_flight(view), match_ratio(view)
        if float(load[may].max() - load[may].min()) > _APART:
            pick = PowerOfTwo().pick(view, rng=rng)
        elif float(ratio[may].max()) >= _MATCH:
            pick = least(view, -ratio, rng)
        else:
            pick = least(view, self._tree, rng)
        first = pick.rows[0]
        self._tree[first] += view.request.input_tokens - float(view.demand.cached_tokens[first])
        return pick
