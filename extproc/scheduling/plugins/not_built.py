# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d and the Inference Extension that are not built here, and what takes their place.

A file that names one is refused: without it the file would do something else than it says.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_OWN_REPORTS: Final = "what engines report of themselves: kv-cache-utilization-scorer, queue-scorer"
_GROUP: Final = "groupKey of disagg-profile-handler"
_CLUSTERS: Final = "a picker in each cluster; a gateway in front chooses the cluster"
_LATENCY: Final = "latency-scorer"
_DECISION_TREE: Final = (
    "queue-scorer, kv-cache-utilization-scorer and lora-affinity-scorer, as the default there is now"
)

NOT_BUILT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "agent-identity": "a ModelServer's flowControl: flowBy: Header and sessionHeader",
        "always-encode-decider": "nothing: there is no encode stage",
        "data-parallel-profile-handler": "single-profile-handler: each port of a pod is an endpoint of its own",
        "dcgm-data-source": _OWN_REPORTS,
        "dcgm-extractor": _OWN_REPORTS,
        "decision-tree-filter": _DECISION_TREE,
        "ed-profile-handler": "single-profile-handler: there is no encode stage",
        "endpoint-attribute-filter": "utilization-filter",
        "endpoint-attribute-scorer": "queue-scorer, running-requests-size-scorer, kv-cache-utilization-scorer",
        "latency-observation-scorer-hub": _CLUSTERS,
        "latency-observer-producer-hub": _CLUSTERS,
        "latency-slo-admitter": "a ModelServer's flowControl: order: Deadline and shedFrom",
        "least-kv-cache-filter": _DECISION_TREE,
        "least-queue-filter": _DECISION_TREE,
        "lora-affinity-filter": _DECISION_TREE,
        "low-queue-filter": _DECISION_TREE,
        "mm-embeddings-cache-producer": "the pool's own prefix index, which covers images in prompts",
        "mm-embeddings-cache-scorer": "prefix-cache-scorer",
        "multicluster-file-discovery": _CLUSTERS,
        "multicluster-kv-cache-utilization-scorer": _CLUSTERS,
        "multicluster-metrics-data-source": _CLUSTERS,
        "multicluster-metrics-extractor": _CLUSTERS,
        "multicluster-queue-scorer": _CLUSTERS,
        "pd-slo-pair-optimizer": _LATENCY,
        "probabilistic-admitter": "a ModelServer's flowControl: shedFrom",
        "slo-aware-profile-handler": "single-profile-handler",
        "slo-aware-routing": _LATENCY,
        "slo-headroom-tier-filter": _LATENCY,
        "soft-reflective-ceiling-policy": "a ModelServer's flowControl: ceilings of bands",
        "thunder-agent": "session-affinity-filter, and program-aware-fairness in flowControl",
        "topology-affinity-filter": _GROUP,
        "topology-affinity-scorer": _GROUP,
        "topology-extractor": _GROUP,
        "vertexai-parser": "nothing: clients send the OpenAI or Anthropic API",
        "vllmgrpc-parser": "nothing: engines are spoken to over HTTP",
    }
)
