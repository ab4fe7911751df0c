# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d and the Inference Extension that are not built here, and what takes their place.

A file that names one is refused: without it the file would do something else than it says.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLUSTERS: Final = "a picker in each cluster; a gateway in front chooses the cluster"
_LATENCY: Final = "latency-scorer"
_DECISION_TREE: Final = (
    "queue-scorer, kv-cache-utilization-scorer and lora-affinity-scorer, as the default there is now"
)

NOT_BUILT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "always-encode-decider": "nothing: there is no encode stage",
        "decision-tree-filter": _DECISION_TREE,
        "ed-profile-handler": "single-profile-handler: there is no encode stage",
        "latency-observation-scorer-hub": _CLUSTERS,
        "latency-observer-producer-hub": _CLUSTERS,
        "least-kv-cache-filter": _DECISION_TREE,
        "least-queue-filter": _DECISION_TREE,
        "lora-affinity-filter": _DECISION_TREE,
        "low-queue-filter": _DECISION_TREE,
        "pd-slo-pair-optimizer": _LATENCY,
        "slo-aware-profile-handler": "single-profile-handler",
        "slo-aware-routing": _LATENCY,
        "thunder-agent": "session-affinity-filter, and program-aware-fairness in flowControl",
    }
)
