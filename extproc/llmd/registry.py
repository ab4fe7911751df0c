# SPDX-License-Identifier: Apache-2.0
"""Plugins by their configured names: llm-d's, Kthena's, ours, and other packages'.

``ACCEPTED`` are types of llm-d without effect here: they name what is always on or configured elsewhere (data
producers, parsers, metric sources and extractors, header handlers, flow control). ``NOT_BUILT`` are types that are
refused: without them the file would have another effect than it describes. Most are of published drafts or of llm-d's
own tests, and no release of llm-d takes them. ``reserve-endpoint`` answers a coordinator's queries; without it, the
query would be sent to an engine.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from extproc.api.picker_flow_control import AGENT_IDENTITY, POLICIES, AgentIdentity
from extproc.llmd import older_types
from extproc.scheduling import metrics_source
from extproc.scheduling.external_plugins import raised_at
from extproc.scheduling.plugins import (
    affinity,
    attributes,
    clusters,
    filters,
    handlers,
    label_plugins,
    latency,
    reporters,
    selectors,
)
from extproc.scheduling.plugins import load_scorers as load
from extproc.scheduling.plugins.reasons import NO_ENCODE_STAGE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

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
Kind = Literal[
    "filter",
    "scorer",
    "filter and scorer",
    "picker",
    "decider",
    "profile handler",
    "admitter",
    "screener",
    "reporter",
    "flow control",
    "data source",
    "accepted",
]
# A package that brings plugins lists them in this group: each a name and a PluginType.
ENTRY_POINTS: Final = "attache.scheduling"
_FILTERS: Final = {
    # llm-d's
    "session-affinity-filter": affinity.SessionAffinityFilter,
    "prefix-cache-affinity-filter": filters.PrefixCacheAffinity,
    "utilization-detector": filters.SaturationFilter,
    "concurrency-detector": filters.Concurrency,
    "utilization-filter": filters.Utilization,
    "topology-affinity-filter": label_plugins.TopologyAffinityFilter,
    "endpoint-attribute-filter": attributes.EndpointAttributeFilter,
    "slo-headroom-tier-filter": latency.SloHeadroomTier,
    "label-selector-filter": label_plugins.LabelSelector,
    "by-label-selector": label_plugins.LabelSelector,
    "by-label": label_plugins.ByLabel,
    "prefill-filter": label_plugins.PrefillRole,
    "decode-filter": label_plugins.DecodeRole,
    "encode-filter": label_plugins.EncodeRole,
    "multicluster-session-affinity-filter": clusters.ClusterSession,
    "header-based-testing-filter": older_types.HeaderBasedTesting,
    "low-queue-filter": older_types.LowQueue,
    "least-queue-filter": older_types.LeastQueue,
    "least-kv-cache-filter": older_types.LeastKvCache,
    "lora-affinity-filter": older_types.LoraSoftAffinity,
    "decision-tree-filter": older_types.DecisionTree,
    # Kthena's, and ours
    "lora-affinity": filters.LoraLoaded,
    "lora-loaded-filter": filters.LoraLoaded,
    "least-request-filter": filters.LeastRequestFilter,
    "model-loaded-filter": filters.ModelLoaded,
    "healthy-filter": filters.Healthy,
    "subset-hint-filter": filters.SubsetHint,
}
_SCORERS: Final = {
    # llm-d's
    "queue-scorer": load.Queue,
    "running-requests-size-scorer": load.RunningRequests,
    "active-request-scorer": load.ActiveRequests,
    "load-aware-scorer": load.LoadAware,
    "token-load-scorer": load.TokenLoad,
    "lmetric-scorer": load.LMetric,
    "kv-cache-utilization-scorer": load.KvCacheUtilization,
    "kv-cache-scorer": load.KvCacheUtilization,  # its name before llm-d 0.3
    "kvcache-aware-scorer": load.PrecisePrefixCache,
    "prefix-cache-scorer": load.PrefixCacheScorer,
    "precise-prefix-cache-scorer": load.PrecisePrefixCache,
    "no-hit-lru-scorer": load.NoHitLru,
    "lora-affinity-scorer": affinity.LoraAffinity,
    "session-affinity-scorer": affinity.SessionAffinity,
    "header-label-affinity-scorer": label_plugins.HeaderLabelAffinity,
    "topology-affinity-scorer": label_plugins.TopologyAffinityScorer,
    "endpoint-attribute-scorer": attributes.EndpointAttributeScorer,
    "latency-scorer": latency.LatencyScorer,
    "endpoint-attribute-weight-scorer": label_plugins.AttributeWeight,
    "slo-aware-routing": older_types.SloAwareRouting,
    "slo-scorer": older_types.SloAwareRouting,
    "thunder-agent": affinity.ThunderAgent,
    "latency-observation-scorer-hub": clusters.ClusterLatency,
    "multicluster-kv-cache-utilization-scorer": clusters.ClusterKvCache,
    "multicluster-prefix-cache-scorer": clusters.ClusterPrefixCache,
    "multicluster-queue-scorer": clusters.ClusterQueue,
    "multicluster-topology-scorer": clusters.ClusterTopology,
    # Kthena's, and ours
    "least-request": load.LeastRequestScorer,
    "least-request-scorer": load.LeastRequestScorer,
    "least-latency": latency.LeastLatency,
    "least-latency-scorer": latency.LeastLatency,
    "gpu-usage": load.KvCacheUtilization,
    "prefix-cache": load.PrefixCacheScorer,
    "kvcache-aware": load.PrecisePrefixCache,
    "random": latency.RandomScore,
    "random-scorer": latency.RandomScore,
    "cost-scorer": latency.CostScorer,
}
_PICKERS: Final = {
    # llm-d's
    "max-score-picker": selectors.MaxScore,
    "max-score": selectors.MaxScore,
    "random-picker": selectors.Random,
    "weighted-random-picker": selectors.WeightedRandom,
    # ours
    "power-of-two-picker": selectors.PowerOfTwoSelector,
    "softmax-picker": selectors.Softmax,
}
_HANDLERS: Final = {
    "single-profile-handler": handlers.SingleProfile,
    "single-profile": handlers.SingleProfile,
    "header-profile-handler": handlers.HeaderProfile,
    "data-parallel-profile-handler": handlers.DataParallel,
    "header-phase-profile-handler": handlers.HeaderPhase,
    "disagg-profile-handler": handlers.Disaggregation,
    "pd-profile-handler": handlers.Disaggregation,
    "ed-profile-handler": handlers.EncodeDecode,
    "slo-aware-profile-handler": older_types.SloAwareProfile,
}
_DECIDERS: Final = {
    "prefix-based-pd-decider": handlers.PrefixBasedDecider,
    "always-disagg-pd-decider": handlers.AlwaysDecider,
}
_ADMITTERS: Final = {
    "probabilistic-admitter": latency.ProbabilisticAdmitter,
    "latency-slo-admitter": latency.LatencySloAdmitter,
}
_SCREENERS: Final = {
    "disaggregatedset-rollout-screener": handlers.RolloutScreener,
    "endpoint-pin-screener": handlers.EndpointPin,
}
_SOURCES: Final = {
    label_plugins.EXTRACTOR_TYPE: label_plugins.TopologyExtractor,
    "core-metrics-extractor": metrics_source.MetricsExtractor,
    "metrics-data-source": metrics_source.MetricsSource,
    "model-server-protocol-metrics": metrics_source.MetricsExtractor,  # its name in the Inference Extension up to 1.3
    "label-producer": label_plugins.LabelProducer,
    "session-id-producer": affinity.SessionIdProducer,
}


class AcceptedType(msgspec.Struct, frozen=True):
    """Accepts any parameters and ignores them."""


def _accepted(name: str) -> type:
    """Accepts the parameters of the type ``name`` with any value, and no others: a misspelt one is a mistake."""
    if name in _DRAFTS:
        return AcceptedType
    fields = [(parameter, Any, None) for parameter in ACCEPTED_PARAMETERS.get(name, "").split()]
    return msgspec.defstruct("AcceptedType", fields, frozen=True, forbid_unknown_fields=True)


class PluginType(msgspec.Struct, frozen=True):
    """A plugin is the struct of its parameters: ``cls`` is both. ``problem``: why it cannot be used, if it cannot."""

    kind: Kind
    cls: type
    problem: str = ""


def _all(kind: Kind, types: Mapping[str, type]) -> dict[str, PluginType]:
    return {name: PluginType(kind, cls) for name, cls in types.items()}


BUILT_IN: Final[Mapping[str, PluginType]] = MappingProxyType(
    {
        **_all("accepted", {name: _accepted(name) for name in ACCEPTED}),
        **_all("filter", _FILTERS),
        **_all("scorer", _SCORERS),
        **_all("filter and scorer", {"context-length-aware": label_plugins.ContextLength}),
        **_all("picker", _PICKERS),
        **_all("profile handler", _HANDLERS),
        **_all("decider", _DECIDERS),
        **_all("reporter", {"request-attribute-reporter": reporters.RequestAttributeReporter}),
        **_all("admitter", _ADMITTERS),
        **_all("screener", _SCREENERS),
        **_all("data source", _SOURCES),
        **_all("flow control", {**POLICIES, AGENT_IDENTITY: AgentIdentity}),
    }
)


def installed_plugins() -> Mapping[str, PluginType]:
    """All that can be configured here. A package cannot take a name that is ours.

    One that cannot be loaded is a problem only for a file that names it.
    """
    theirs = {entry.name: _loaded(entry) for entry in entry_points(group=ENTRY_POINTS)}
    return MappingProxyType({**theirs, **BUILT_IN})


def _loaded(entry: EntryPoint) -> PluginType:
    try:
        found: object = entry.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is told where a file names the plugin
        problem = f"cannot be loaded: {type(error).__name__}: {error} ({raised_at(error)})"
    else:
        cls: object = found.cls if isinstance(found, PluginType) else None
        if not isinstance(found, PluginType) or not isinstance(cls, type) or not issubclass(cls, msgspec.Struct):
            problem = "is no plugin; make it PluginType(KIND, CLASS), where CLASS is a msgspec.Struct"
        elif found.kind not in get_args(Kind):
            problem = f"has the kind '{found.kind}'; write one of {', '.join(get_args(Kind))}"
        else:
            return found
    return PluginType("accepted", AcceptedType, f"{entry.value} {problem}")
