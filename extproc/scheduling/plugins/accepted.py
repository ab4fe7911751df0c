# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d that are accepted without effect.

They name what is always on here or configured elsewhere: data producers, parsers, metric sources and extractors,
header handlers, and flow control.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Accepted(msgspec.Struct, frozen=True):
    """Accepts any parameters and ignores them."""


_CLUSTERS: Final = (
    "it picks among whole clusters, which is not done here; let routes send to each cluster's own picker, by weights,"
    " and remove the multicluster plugins"
)
# Types that a file cannot do without if it names them, and what to write in their place.
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "disaggregatedset-rollout-screener": (
            "pairs of different revisions are kept apart by a label here; set groupKey: "
            "disaggregatedset.x-k8s.io/revision of disagg-profile-handler, and remove it"
        ),
        **dict.fromkeys(
            (
                "multicluster-file-discovery",
                "multicluster-kv-cache-utilization-scorer",
                "multicluster-metrics-data-source",
                "multicluster-metrics-extractor",
                "multicluster-prefix-cache-scorer",
                "multicluster-queue-scorer",
                "multicluster-session-affinity-filter",
                "multicluster-topology-scorer",
            ),
            _CLUSTERS,
        ),
    }
)
# What does the work of each type here.
ACCEPTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "approx-prefix-cache-producer": "the pool's own prefix index",
        "precise-prefix-cache-producer": "the ModelServer's kvEvents",
        "inflight-load-producer": "the in-flight ledger",
        "predicted-latency-producer": "learned prefill rates",
        "burst-prefix-cache-producer": "the index is written at the pick",
        "session-id-producer": "the session plugins read their header themselves",
        "token-producer": "the ModelServer's tokenizer",
        "tokenizer": "the ModelServer's tokenizer",
        "p2p-source-producer": "nothing: pulling KV caches from peers is not done",
        "latency-predictor-producer": "learned prefill rates",
        "dp-rank-header-handler": "each rank is an endpoint of its own, with its own port",
        "metrics-data-source": "the scraper",
        "models-data-source": "the scraper",
        "models-data-extractor": "the scraper",
        "models-responder": "extproc answers GET /v1/models itself",
        "endpoint-notification-source": "the configuration directory",
        "file-discovery": "the configuration directory",
        "disagg-headers-handler": "pairs always set x-prefiller-host-port",
        "prefill-header-handler": "pairs always set x-prefiller-host-port",
        "encoder-header-handler": "nothing: there is no encode stage",
        "openai-parser": "extproc's own parser",
        "anthropic-parser": "extproc's own parser",
        "vllmhttp-parser": "extproc's own parser",
        "sglanghttp-parser": "extproc's own parser",
        "passthrough-parser": "extproc's own parser",
        "always-disagg-multimodal-decider": (
            "nothing: there is no encode stage; engines of the other stages encode media themselves"
        ),
        "vllmgrpc-parser": "nothing: gRPC requests of --pool go by load, without a look at their prompts",
        "vertexai-parser": "nothing: gRPC requests of --pool go by load, without a look at their prompts",
        "dcgm-data-source": "nothing: GPU metrics are not read; load is what engines say and what was sent to them",
        "dcgm-extractor": "nothing: its GPUUtilization is an attribute without a value",
        "topology-stamp-handler": "nothing: prefill and decode of a request are picked here, one after the other",
        "k8s-notification-source": "the gateway role",
        "mm-embeddings-cache-producer": "the pool's own prefix index",
        "mm-embeddings-cache-scorer": "prefix-cache-scorer: media are part of the prompt whose prefixes it finds",
        "outlen-bucket": "the recent mean length of answers, and max_tokens",
        "eviction-sheddable-filter": "nothing: what has gone to an engine is not taken back",
        "eviction-priority-then-time-ordering": "nothing: what has gone to an engine is not taken back",
        "round-robin-fairness-policy": "flow control: RoundRobin",
        "global-strict-fairness-policy": "flow control: GlobalStrict",
        "program-aware-fairness": "flow control: SlidingWindow, the least service within a minute, by every strategy",
        "program-aware-fairness-policy": "flow control: SlidingWindow, the least service within a minute",
        "fcfs-ordering-policy": "flow control: FirstCome",
        "edf-ordering-policy": "flow control: Deadline",
        "slo-deadline-ordering-policy": "flow control: Deadline",
    }
)
