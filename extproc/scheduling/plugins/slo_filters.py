# SPDX-License-Identifier: Apache-2.0
"""A filter by latency objectives."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import msgspec

from extproc.scheduling.plugins.noise import uniforms
from extproc.scheduling.plugins.objectives import meets_objectives
from extproc.scheduling.plugins.reasons import LEARNED_LATENCY

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools
    from extproc.scheduling.picker import View

# Makes the draw independent of that of other plugins.
_STREAM: Final = 1


class SloHeadroomTier(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``slo-headroom-tier-filter``: the endpoints expected to meet the request's objectives, or the others.

    Two tiers: those that meet every objective that the request has, and those that miss one. If both have endpoints,
    the first is kept, but the second with the probability ``epsilonExploreNeg``, so that what is expected of its
    endpoints is put to the test again. The draw is a hash of the request's time.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"latencyPredictionInfoProducerName": LEARNED_LATENCY})

    epsilon_explore_neg: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.01

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if the request has no objective, or if all are in one tier."""
        meets = meets_objectives(view)
        if meets is None:
            return candidates
        good, bad = candidates & meets, candidates & ~meets
        if not good.any() or not bad.any():
            return candidates
        return bad if float(uniforms(view.now_s, 1, stream=_STREAM)[0]) < self.epsilon_explore_neg else good
