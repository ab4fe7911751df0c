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
        "disaggregatedset-rollout-screener": "groupKey: disaggregatedset.x-k8s.io/revision of disagg-profile-handler,"
        " which pairs engines of one revision only",
        "dp-rank-header-handler": "each rank is an endpoint of its own, with its own port",
        "metrics-data-source": "the scraper",
        "core-metrics-extractor": "the scraper",
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
        "always-disagg-multimodal-decider": "nothing: there is no encode stage",
        "request-attribute-reporter": "extproc's metrics",
        "round-robin-fairness-policy": "flow control: RoundRobin",
        "global-strict-fairness-policy": "flow control: GlobalStrict",
        "program-aware-fairness": "flow control: SlidingWindow, the least service within a minute, by every strategy",
        "program-aware-fairness-policy": "flow control: SlidingWindow, the least service within a minute",
        "fcfs-ordering-policy": "flow control: FirstCome",
        "edf-ordering-policy": "flow control: Deadline",
        "slo-deadline-ordering-policy": "flow control: Deadline",
        "static-usage-limit-policy": "flow control: bands' ceilings",
        "priority-holdback-policy": "flow control: bands' ceilings",
    }
)
