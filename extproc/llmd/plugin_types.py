# SPDX-License-Identifier: Apache-2.0
"""The types that an EndpointPickerConfig may name: plugins, and what has no part in picks here.

``ACCEPTED`` are types of llm-d without effect here: they name what is always on or configured elsewhere (data
producers, parsers, metric sources and extractors, header handlers, flow control). ``NOT_BUILT`` are types that are
refused: without them the file would have another effect than it describes. Most are of published drafts or of llm-d's
own tests, and no release of llm-d takes them. ``reserve-endpoint`` answers a coordinator's queries; without it, the
query would be sent to an engine.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.picker_flow_control import AGENT_IDENTITY, POLICIES, AgentSessionHeaders
from extproc.scheduling.plugins.ineffective_parameters import NO_ENCODE_STAGE
from extproc.scheduling.registry import PLUGIN_TYPES, external_plugins, plugin_types_by_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.picker_config import EndpointPickerConfig
    from extproc.scheduling.registry import PluginType

_NO_ENCODE_STAGE: Final = f"nothing: {NO_ENCODE_STAGE}"
# The replacement of each type here.
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
        "dcgm-data-source": "nothing: GPU metrics are not read; load comes from engines' reports and from requests "
        "sent to them",
        "dcgm-extractor": "nothing: its GPUUtilization is an attribute without a value",
        "topology-stamp-handler": "nothing: prefill and decode of a request are picked here, one after the other",
        "k8s-notification-source": "the gateway role",
        "mm-embeddings-cache-producer": "the pool's own prefix index",
        "mm-embeddings-cache-scorer": "prefix-cache-scorer: media are part of the prompt whose prefixes it finds",
        "outlen-bucket": "the recent mean length of answers, and max_tokens",
        **dict.fromkeys(
            (
                "sheddable-eviction-filter",
                "priority-then-time-eviction-order-policy",
                # their names before llm-d 0.9
                "eviction-sheddable-filter",
                "eviction-priority-then-time-ordering",
            ),
            "nothing: what has gone to an engine is not taken back",
        ),
        "round-robin-fairness-policy": "flow control: RoundRobin",
        "global-strict-fairness-policy": "flow control: GlobalStrict",
        "program-aware-fairness": "flow control: SlidingWindow, the least service within a minute, by every strategy",
        "program-aware-fairness-policy": "flow control: SlidingWindow, the least service within a minute",
        "fcfs-ordering-policy": "flow control: FirstCome",
        "edf-ordering-policy": "flow control: Deadline",
        "slo-deadline-ordering-policy": "flow control: Deadline",
        **dict.fromkeys(
            ("local-syncer", "redis-syncer", "redis-state-store"),
            "each replica decides by its own data; with --redis, extproc's replicas share limits and sessions",
        ),
        "session-manager": "nothing: session plugins read ids in their headers; KV events do not carry them",
        "slo-request-tracker": "latencies, learned of every answer",
        "latency-observer-producer-hub": "TTFT, measured on every answer",
        "multicluster-approx-prefix-cache-producer": "the pool's own prefix index",
        "multicluster-file-discovery": "the ModelServer's endpoints: write each cluster's gateway as one",
        "multicluster-metrics-data-source": "requests sent to each cluster; their pickers are not asked for their load",
        "multicluster-metrics-extractor": "requests sent to each cluster; their pickers are not asked for their load",
        "destination-endpoint-served-verifier": "nothing: answers are not marked for conformance tests",
    }
)
# The parameters that each of them takes in llm-d; those that are not here take none.
ACCEPTED_PARAMETERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "approx-prefix-cache-producer": (
            "autoTune blockSizeTokens blockSize maxPrefixBlocksToMatch maxPrefixTokensToMatch"
            " lruCapacityPerServer prefixHashSource"
        ),
        "precise-prefix-cache-producer": (
            "sessionManager tokenProcessorConfig indexerConfig kvEventsConfig speculativeIndexing speculativeTTL"
        ),
        "inflight-load-producer": (
            "addEstimatedOutputTokens outputRatio maxEstimatedOutputTokens prefixMatchInfoProducerName"
            " syncCrossReplicaState"
        ),
        "predicted-latency-producer": (
            "samplingMean maxDecodeTokenSamplesForPrediction sloBufferFactor contextTTL streamingMode"
            " endpointRoleLabel predictInProduce prefixMatchInfoProducerName inFlightLoadProducerName"
            " useEncoderCacheFeatures encoderCacheMatchInfoProducerName"
        ),
        "burst-prefix-cache-producer": (
            "windowDurationMs maxPerReplica minColocateBlocks balanceBy maxBatchSize blockSizeTokens"
            " maxPrefixTokensToMatch"
        ),
        "token-producer": "backend modelName vllm estimate",
        "tokenizer": "modelName udsTokenizerConfig",
        "p2p-source-producer": "prefixMatchInfoProducerName minCachedTokenDelta prefillProfileName",
        "models-data-source": "scheme path insecureSkipVerify caCertPath clientCertPath clientKeyPath interval",
        "file-discovery": "path watchFile",
        "disagg-headers-handler": "prefillProfile encodeProfile",
        "prefill-header-handler": "prefillProfile",
        "encoder-header-handler": "encodeProfile",
        "openai-parser": "propagatePriority",
        "dcgm-data-source": "scheme path port insecureSkipVerify useNodeAddress interval",
        "k8s-notification-source": "group version kind",
        "mm-embeddings-cache-producer": "cacheSizeInMBPerServer cacheSizeInMB",
        "program-aware-fairness": (
            "strategy lasWeightService lasWeightHeadWait lasDecayFactor lasHalfLifeSeconds evictionTtlSeconds"
            " evictionSweepSeconds"
        ),
        "program-aware-fairness-policy": (
            "strategy lasWeightService lasWeightHeadWait lasDecayFactor lasHalfLifeSeconds evictionTtlSeconds"
            " evictionSweepSeconds"
        ),
        "redis-syncer": "address passwordEnv passwordFile db stateTTL coordinationTTL",
        "session-manager": "deploymentID hmacKeyFile tokenProducer eventCorrelationEnabled bindingTTL maxBindings",
        "latency-observer-producer-hub": (
            "intervalDuration windowSize maxObservationAge maxRequests minRequests lowPercentile"
            " typicalPercentile bucketDuration bucketHistorySize"
        ),
        "multicluster-approx-prefix-cache-producer": (
            "autoTune blockSizeTokens maxPrefixBlocksToMatch maxPrefixTokensToMatch lruCapacityPerServer"
        ),
        "multicluster-file-discovery": "path watchFile",
        "multicluster-metrics-data-source": (
            "scheme path insecureSkipVerify caCertPath clientCertPath clientKeyPath interval families"
        ),
    }
)
_TIER: Final = "approx-prefix-cache-producer"
# As in llm-d, of a producer that names no size and does not take it from the engines.
_BLOCK_TOKENS: Final = 16
# Of drafts, so that nobody knows which parameters they take.
_DRAFTS: Final = frozenset(
    {
        "dp-rank-header-handler",
        "latency-predictor-producer",
        "outlen-bucket",
        "redis-state-store",
        "topology-stamp-handler",
    }
)
_PAIRS: Final = "latency-scorer in both profiles of a disagg-profile-handler"
NOT_BUILT: Final[Mapping[str, str]] = MappingProxyType(
    {
        # llm-d makes it itself, and no release has a factory of it
        "cross-replica-publisher": "redis-syncer, by which replicas share what they know",
        "mock-metrics-source": "nothing: it is of llm-d's own tests",
        "pd-slo-optimizer": _PAIRS,
        "pd-slo-pair-optimizer": _PAIRS,
        "pd-slo-profile-handler": "disagg-profile-handler",
        "reserve-endpoint": "disagg-profile-handler, which picks both endpoints of a pair at once",
    }
)


class AcceptedType(msgspec.Struct, frozen=True):
    """Accepts any parameters and ignores them."""


def _accepted(name: str) -> type:
    """Accepts the parameters of the type ``name`` with any value, and no others: a misspelt one is a mistake."""
    if name in _DRAFTS:
        return AcceptedType
    fields = [(parameter, Any, None) for parameter in ACCEPTED_PARAMETERS.get(name, "").split()]
    return msgspec.defstruct("AcceptedType", fields, frozen=True, forbid_unknown_fields=True)


BUILT_IN: Final[Mapping[str, PluginType]] = MappingProxyType(
    {
        **plugin_types_by_name("accepted", {name: _accepted(name) for name in ACCEPTED}),
        **PLUGIN_TYPES,
        **plugin_types_by_name("flow control", {**POLICIES, AGENT_IDENTITY: AgentSessionHeaders}),
    }
)


def installed_plugins() -> Mapping[str, PluginType]:
    """All that can be configured here. A package cannot take a name that is ours."""
    return MappingProxyType({**external_plugins(), **BUILT_IN})


def cache_tier_capacities(config: EndpointPickerConfig) -> Mapping[str, float]:
    """Tokens that each tier holds at an endpoint, by the name of its producer.

    A producer is a tier if a plugin names it and its own parameters have a capacity. All others are the pool's own
    index.
    """
    named = {str((spec.parameters or {}).get("prefixMatchInfoProducerName")) for spec in config.plugins}
    return MappingProxyType(
        {
            spec.effective_name: _tokens(spec.parameters or {})
            for spec in config.plugins
            if spec.type == _TIER and spec.effective_name in named and _tokens(spec.parameters or {})
        }
    )


def _tokens(parameters: Mapping[str, Any]) -> float:
    blocks, size = parameters.get("lruCapacityPerServer"), parameters.get("blockSizeTokens") or _BLOCK_TOKENS
    if parameters.get("autoTune", True) is not False or not isinstance(blocks, int) or not isinstance(size, int):
        return 0.0
    return float(max(0, blocks) * max(0, size))
