# SPDX-License-Identifier: Apache-2.0
"""llm-d's plugins of a hub, whose endpoints are the gateways of whole clusters."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec

from extproc.scheduling.plugins.affinity import SessionAffinityFilter
from extproc.scheduling.plugins.label_plugins import LEVELS, LabelWeightScorer, topology_level_labels
from extproc.scheduling.plugins.latency import LeastLatencyScorer
from extproc.scheduling.plugins.load_scorers import ActiveRequestsScorer, KvCacheUtilizationScorer, PrefixCacheScorer

if TYPE_CHECKING:
    from collections.abc import Mapping

_HUB: Final = "write each cluster's gateway as an endpoint of the ModelServer"


class MulticlusterQueueScorer(ActiveRequestsScorer, frozen=True):
    """llm-d's ``multicluster-queue-scorer``: by requests in flight, as ``active-request-scorer``.

    llm-d reads the mean queue of each cluster's picker.
    """

    TOLD: ClassVar = f"by requests in flight to each cluster, whose picker is not asked for its queue; {_HUB}"


class MulticlusterKvCacheScorer(KvCacheUtilizationScorer, frozen=True):
    """llm-d's ``multicluster-kv-cache-utilization-scorer``, as ``kv-cache-utilization-scorer``.

    llm-d reads the mean of each cluster's picker; here only what an endpoint reports itself counts.
    """

    TOLD: ClassVar = f"a cluster whose gateway reports no KV cache counts as empty; {_HUB}"


class MulticlusterPrefixCacheScorer(PrefixCacheScorer, frozen=True):
    """llm-d's ``multicluster-prefix-cache-scorer``: ``prefix-cache-scorer`` by what was sent to each cluster."""


class MulticlusterSessionFilter(SessionAffinityFilter, frozen=True):
    """llm-d's ``multicluster-session-affinity-filter``: ``session-affinity-filter`` among clusters."""


class MulticlusterLatencyScorer(LeastLatencyScorer, frozen=True):
    """llm-d's ``latency-observation-scorer-hub``: by the recent mean TTFT of each cluster's answers.

    The best has ``(max - x) / (max - min)`` of 1, and a cluster without answers 0.5. llm-d ranks by percentiles and
    explores.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "explorationRate": "a cluster without recent answers scores 0.5, which explores enough",
            "minInflightGap": "a cluster without recent answers is not sent more for that",
            "ttftPercentilesProducerName": "TTFT is measured on every answer, whichever producer is named",
        }
    )

    ttft_tpot_weight_factor: Annotated[float, msgspec.Meta(ge=0, le=1)] = msgspec.field(
        default=1.0, name="TTFTTPOTWeightFactor"
    )


class MulticlusterTopologyScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``multicluster-topology-scorer``: the score that ``weights`` has for where an endpoint is.

    ``field``: the label of that level, by the file's ``topology-extractor``. A value without a weight scores 0.
    """

    field: Literal["", "region", "zone", "rack", "host"] = "region"
    weights: dict[str, float] = {}
    topology_producer_name: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> LabelWeightScorer:
        """With the label of the extractor."""
        labels = topology_level_labels(others, self.topology_producer_name)
        return LabelWeightScorer(labels[LEVELS.index(self.field or "region")], self.weights)
