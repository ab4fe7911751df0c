# SPDX-License-Identifier: Apache-2.0
"""Ray Serve's ``PrefixCacheAffinityRouter``: best match, else power of two.

If requests in flight differ by at most 10: the best match if it covers a tenth of the prompt, else the endpoint with
the smallest part of the prefix tree, which never evicts. Source: ray-project/ray,
``python/ray/llm/_internal/serve/routing_policies/prefix_aware``, with the threshold of the documentation (that of the
code is infinite).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from bench.policies.least_cost import least_cost, match_ratio, requests_in_flight
from bench.policies.simple import PowerOfTwo

if TYPE_CHECKING:
    import random

    from extproc.endpoints.table import Floats
    from extproc.scheduling.picker import Pick, View

_APART: Final = 10
_MATCH: Final = 0.1


class PrefixAffinity:
    """Keeps the size of each endpoint's part of the tree: the tokens that it was the first to be sent."""

    def __init__(self) -> None:
        self._tree: Floats = np.zeros(0)

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """See the module."""
        self._tree = np.pad(self._tree, (0, len(view.table.addresses) - self._tree.size))
        may, load, ratio = view.candidates(), requests_in_flight(view), match_ratio(view)
        if float(load[may].max() - load[may].min()) > _APART:
            pick = PowerOfTwo().pick(view, rng=rng)
        elif float(ratio[may].max()) >= _MATCH:
            pick = least_cost(view, -ratio, rng)
        else:
            pick = least_cost(view, self._tree, rng)
        first = pick.rows[0]
        self._tree[first] += view.request.input_tokens - float(view.demand.cached_tokens[first])
        return pick
