# SPDX-License-Identifier: Apache-2.0
"""Plugin types of llm-d that are accepted without effect.

They name what is always on here or configured elsewhere: data producers, parsers, metric sources and extractors,
header handlers, and flow control.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.scheduling.plugins.reasons import NO_ENCODE_STAGE

if TYPE_CHECKING:
    from collections.abc import Mapping


class Accepted(msgspec.Struct, frozen=True):
    """Accepts any parameters and ignores them."""


_NO_ENCODE_STAGE: Final = f"nothing: {NO_ENCODE_STAGE}"

# What does the work of each type here.
ACCEPTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "approx-prefix-cache-producer": "the pool's own prefix index",
        "precise-prefix-cache-producer": "the ModelServer's kvEvents",
        "inflight-load-producer": "the in-flight ledger",
        "predicted-latency-producer": "learned prefill rates",
        "burst-prefix-cache-producer": "the index is written at the pick",
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
        "encoder-header-handler": _NO_ENCODE_STAGE,
        "openai-parser": "extproc's own parser",
        "anthropic-parser": "extproc's own parser",
        "vllmhttp-parser": "extproc's own parser",
        "sglanghttp-parser": "extproc's own parser",
        "passthrough-parser": "extproc's own parser",
        "always-disagg-multimodal-decider": _NO_ENCODE_STAGE,
        "always-encode-decider": _NO_ENCODE_STAGE,
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
        **dict.fromkeys(
            ("local-syncer", "redis-syncer", "redis-state-store"),
            "each replica decides by what it sees; with --redis, extproc's replicas share limits and sessions",
        ),
        "session-manager": "nothing: session plugins read ids in their headers; KV events do not carry them",
        "slo-request-tracker": "latencies, learned of every answer",
        "latency-observer-producer-hub": "TTFT, measured on every answer",
        "multicluster-approx-prefix-cache-producer": "the pool's own prefix index",
        "multicluster-file-discovery": "the ModelServer's endpoints: write each cluster's gateway as one",
        "multicluster-metrics-data-source": "what was sent to each cluster: their pickers are not asked for their load",
        "multicluster-metrics-extractor": "what was sent to each cluster: their pickers are not asked for their load",
        "destination-endpoint-served-verifier": "nothing: answers are not marked for conformance tests",
    }
)
