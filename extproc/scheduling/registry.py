# SPDX-License-Identifier: Apache-2.0
"""Plugins by their configured names: llm-d's, Kthena's, ours, and other packages'."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

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
    older_types,
    reporters,
    selectors,
)
from extproc.scheduling.plugins import load_scorers as load

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

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


class PluginType(msgspec.Struct, frozen=True):
    """A plugin is the struct of its parameters: ``cls`` is both. ``problem``: why it cannot be used, if it cannot.
    ``is_external``: another package brings it.
    """

    kind: Kind
    cls: type
    problem: str = ""
    is_external: bool = False


class _Unusable(msgspec.Struct, frozen=True):
    """In place of a plugin that cannot be loaded."""


def types_of(kind: Kind, classes: Mapping[str, type]) -> dict[str, PluginType]:
    """``classes`` by their configured names."""
    return {name: PluginType(kind, cls) for name, cls in classes.items()}


PLUGIN_TYPES: Final[Mapping[str, PluginType]] = MappingProxyType(
    {
        **types_of("filter", _FILTERS),
        **types_of("scorer", _SCORERS),
        **types_of("filter and scorer", {"context-length-aware": label_plugins.ContextLength}),
        **types_of("picker", _PICKERS),
        **types_of("profile handler", _HANDLERS),
        **types_of("decider", _DECIDERS),
        **types_of("reporter", {"request-attribute-reporter": reporters.RequestAttributeReporter}),
        **types_of("admitter", _ADMITTERS),
        **types_of("screener", _SCREENERS),
        **types_of("data source", _SOURCES),
    }
)


def external_plugins() -> Mapping[str, PluginType]:
    """Those of other packages. One that cannot be loaded is a problem only for a file that names it."""
    return {entry.name: _loaded(entry) for entry in entry_points(group=ENTRY_POINTS)}


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
            return msgspec.structs.replace(found, is_external=True)
    return PluginType("accepted", _Unusable, f"{entry.value} {problem}", is_external=True)
