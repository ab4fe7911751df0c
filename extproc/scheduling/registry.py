# SPDX-License-Identifier: Apache-2.0
"""Plugins by their configured names: llm-d's, Kthena's, ours, and other packages'."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from extproc.scheduling import engine_metrics_config
from extproc.scheduling.external_plugin_guards import raised_at
from extproc.scheduling.plugins import (
    affinity,
    deprecated_types,
    endpoint_attribute_plugins,
    filters,
    label_plugins,
    latency,
    multicluster,
    profile_handlers,
    score_selectors,
    usage_reporters,
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
    "prefix-cache-affinity-filter": filters.PrefixCacheAffinityFilter,
    "utilization-detector": filters.SaturationFilter,
    "concurrency-detector": filters.ConcurrencyFilter,
    "utilization-filter": filters.UtilizationFilter,
    "topology-affinity-filter": label_plugins.TopologyAffinityFilter,
    "endpoint-attribute-filter": endpoint_attribute_plugins.EndpointAttributeFilter,
    "slo-headroom-tier-filter": latency.SloHeadroomTierFilter,
    "label-selector-filter": label_plugins.LabelSelectorFilter,
    "by-label-selector": label_plugins.LabelSelectorFilter,
    "by-label": label_plugins.LabelValueFilter,
    "prefill-filter": label_plugins.PrefillRoleFilter,
    "decode-filter": label_plugins.DecodeRoleFilter,
    "encode-filter": label_plugins.EncodeRoleFilter,
    "multicluster-session-affinity-filter": multicluster.MulticlusterSessionFilter,
    "header-based-testing-filter": deprecated_types.HeaderBasedTestingFilter,
    "low-queue-filter": deprecated_types.LowQueueFilter,
    "least-queue-filter": deprecated_types.LeastQueueFilter,
    "least-kv-cache-filter": deprecated_types.LeastKvCacheFilter,
    "lora-affinity-filter": deprecated_types.LoraSoftAffinityFilter,
    "decision-tree-filter": deprecated_types.DecisionTreeParameters,
    # Kthena's, and ours
    "lora-affinity": filters.LoraLoadedFilter,
    "lora-loaded-filter": filters.LoraLoadedFilter,
    "least-request-filter": filters.LeastRequestFilter,
    "model-loaded-filter": filters.ModelLoadedFilter,
    "healthy-filter": filters.HealthyFilter,
    "subset-hint-filter": filters.SubsetHintFilter,
}
_SCORERS: Final = {
    # llm-d's
    "queue-scorer": load.QueueScorer,
    "running-requests-size-scorer": load.RunningRequestsScorer,
    "active-request-scorer": load.ActiveRequestsScorer,
    "load-aware-scorer": load.LoadAwareScorer,
    "token-load-scorer": load.TokenLoadScorer,
    "lmetric-scorer": load.LMetricScorer,
    "kv-cache-utilization-scorer": load.KvCacheUtilizationScorer,
    "kv-cache-scorer": load.KvCacheUtilizationScorer,  # its name before llm-d 0.3
    "kvcache-aware-scorer": load.PrecisePrefixCacheScorer,
    "prefix-cache-scorer": load.PrefixCacheScorer,
    "precise-prefix-cache-scorer": load.PrecisePrefixCacheScorer,
    "no-hit-lru-scorer": load.NoHitLruScorer,
    "lora-affinity-scorer": affinity.LoraAffinityScorer,
    "session-affinity-scorer": affinity.SessionAffinityScorer,
    "header-label-affinity-scorer": label_plugins.HeaderLabelAffinityScorer,
    "topology-affinity-scorer": label_plugins.TopologyAffinityScorer,
    "endpoint-attribute-scorer": endpoint_attribute_plugins.EndpointAttributeScorer,
    "latency-scorer": latency.LatencyScorer,
    "endpoint-attribute-weight-scorer": label_plugins.AttributeWeightParameters,
    "slo-aware-routing": deprecated_types.SloAwareScorer,
    "slo-scorer": deprecated_types.SloAwareScorer,
    "thunder-agent": affinity.ThunderAgentAffinity,
    "latency-observation-scorer-hub": multicluster.MulticlusterLatencyScorer,
    "multicluster-kv-cache-utilization-scorer": multicluster.MulticlusterKvCacheScorer,
    "multicluster-prefix-cache-scorer": multicluster.MulticlusterPrefixCacheScorer,
    "multicluster-queue-scorer": multicluster.MulticlusterQueueScorer,
    "multicluster-topology-scorer": multicluster.MulticlusterTopologyScorer,
    # Kthena's, and ours
    "least-request": load.LeastRequestScorer,
    "least-request-scorer": load.LeastRequestScorer,
    "least-latency": latency.LeastLatencyScorer,
    "least-latency-scorer": latency.LeastLatencyScorer,
    "gpu-usage": load.KvCacheUtilizationScorer,
    "prefix-cache": load.PrefixCacheScorer,
    "kvcache-aware": load.PrecisePrefixCacheScorer,
    "random": latency.RandomScorer,
    "random-scorer": latency.RandomScorer,
    "cost-scorer": latency.CostScorer,
}
_PICKERS: Final = {
    # llm-d's
    "max-score-picker": score_selectors.MaxScoreSelector,
    "max-score": score_selectors.MaxScoreSelector,
    "random-picker": score_selectors.RandomSelector,
    "weighted-random-picker": score_selectors.WeightedRandomSelector,
    # ours
    "power-of-two-picker": score_selectors.PowerOfTwoSelector,
    "softmax-picker": score_selectors.SoftmaxSelector,
}
_HANDLERS: Final = {
    "single-profile-handler": profile_handlers.SingleProfileHandler,
    "single-profile": profile_handlers.SingleProfileHandler,
    "header-profile-handler": profile_handlers.HeaderProfileHandler,
    "data-parallel-profile-handler": profile_handlers.DataParallelProfileHandler,
    "header-phase-profile-handler": profile_handlers.HeaderPhaseHandler,
    "disagg-profile-handler": profile_handlers.DisaggregatedProfileHandler,
    "pd-profile-handler": profile_handlers.DisaggregatedProfileHandler,
    "ed-profile-handler": profile_handlers.EncodeDecodeProfileHandler,
    "slo-aware-profile-handler": deprecated_types.SloAwareProfileHandler,
}
_DECIDERS: Final = {
    "prefix-based-pd-decider": profile_handlers.PrefixBasedPrefillDecider,
    "always-disagg-pd-decider": profile_handlers.AlwaysRemotePrefillDecider,
}
_ADMITTERS: Final = {
    "probabilistic-admitter": latency.ProbabilisticAdmitter,
    "latency-slo-admitter": latency.LatencySloAdmitter,
}
_SCREENERS: Final = {
    "disaggregatedset-rollout-screener": profile_handlers.RolloutScreenerParameters,
    "endpoint-pin-screener": profile_handlers.EndpointPinScreener,
}
_SOURCES: Final = {
    label_plugins.EXTRACTOR_TYPE: label_plugins.TopologyExtractor,
    "core-metrics-extractor": engine_metrics_config.MetricsExtractor,
    "metrics-data-source": engine_metrics_config.MetricsSource,
    # its name in the Inference Extension up to 1.3
    "model-server-protocol-metrics": engine_metrics_config.MetricsExtractor,
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


def plugin_types_by_name(kind: Kind, classes: Mapping[str, type]) -> dict[str, PluginType]:
    """``classes`` by their configured names."""
    return {name: PluginType(kind, cls) for name, cls in classes.items()}


PLUGIN_TYPES: Final[Mapping[str, PluginType]] = MappingProxyType(
    {
        **plugin_types_by_name("filter", _FILTERS),
        **plugin_types_by_name("scorer", _SCORERS),
        **plugin_types_by_name("filter and scorer", {"context-length-aware": label_plugins.ContextLengthAware}),
        **plugin_types_by_name("picker", _PICKERS),
        **plugin_types_by_name("profile handler", _HANDLERS),
        **plugin_types_by_name("decider", _DECIDERS),
        **plugin_types_by_name("reporter", {"request-attribute-reporter": usage_reporters.RequestAttributeReporter}),
        **plugin_types_by_name("admitter", _ADMITTERS),
        **plugin_types_by_name("screener", _SCREENERS),
        **plugin_types_by_name("data source", _SOURCES),
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
