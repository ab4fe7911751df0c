# SPDX-License-Identifier: Apache-2.0
"""Notes on the parts of an EndpointPickerConfig that have no effect here, or another one than in llm-d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.picker_flow_control import (
    DEFAULT_DETECTOR,
    FAIRNESS,
    FEATURE_GATE,
    LONGEST_WAIT,
    ORDERS,
    AgentSessionHeaders,
    PriorityHoldback,
    feature_gates,
    saturation_detector_name,
)
from extproc.llmd.plugin_types import ACCEPTED, cache_tier_capacities
from extproc.scheduling.engine_metrics_config import EngineTypeMetrics
from extproc.scheduling.plugins.endpoint_attribute_plugins import EndpointAttributeFilter, EndpointAttributeScorer
from extproc.scheduling.plugins.label_plugins import RANGE_LABEL, context_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.model_server import ModelServerSpec
    from extproc.api.picker_config import EndpointPickerConfig, FlowControlSection, PluginSpec
    from extproc.scheduling.registry import PluginType

# Sections of the file, and what replaces them here.
_SECTIONS: Final[Mapping[str, str]] = {
    "data_layer": "the scraper, KV events and the configuration directory",
    "data": "the scraper, KV events and the configuration directory",
    "request_handler": "extproc's own parsers of every API",
    "parser": "extproc's own parsers of every API",
}
# Types that follow KV events, in llm-d and in Kthena.
_PRECISE: Final = frozenset(
    {"precise-prefix-cache-scorer", "precise-prefix-cache-producer", "kvcache-aware", "kvcache-aware-scorer"}
)
_PREFIX_SCORERS: Final = frozenset(
    {"prefix-cache-scorer", "prefix-cache", "precise-prefix-cache-scorer", "kvcache-aware"}
)
_EXTRACTORS: Final = frozenset({"core-metrics-extractor", "model-server-protocol-metrics"})
_DECIDERS: Final = frozenset({"deciders", "deciderPluginName", "prefillDeciderPluginName"})
_DETECTORS: Final = frozenset({"utilization-detector", "concurrency-detector"})


def ineffective_parameters(cls: type) -> Mapping[str, str]:
    """Parameters of a plugin that are accepted and not used, each with the reason."""
    found: Mapping[str, str] = getattr(cls, "WITHOUT_EFFECT", {})
    return found


def effective_parameters(spec: PluginSpec, cls: type) -> dict[str, Any]:
    """The parameters without those that have no effect here, which become notes."""
    others = ineffective_parameters(cls)
    return {key: value for key, value in (spec.parameters or {}).items() if key not in others}


def config_notes(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[str]:
    """For a file in which every plugin is known and every reference names one."""
    tiers = cache_tier_capacities(config)
    for spec in config.plugins:
        plugin = known[spec.type]
        if spec.effective_name in tiers:
            name = spec.effective_name
            yield f"{name}: a tier of its own, of {tiers[name]:.0f} tokens at each endpoint"
        elif plugin.kind == "accepted":
            yield f"{spec.type}: in its place, {ACCEPTED.get(spec.type, 'nothing')}"
        if spec.type == "pd-profile-handler" and not _DECIDERS & (spec.parameters or {}).keys():
            yield f"{spec.effective_name}: names no decider, so prefill stays with decode; name one in deciders.prefill"
        yield from _parameter_notes(spec.effective_name, spec.parameters or {}, plugin.cls)
        yield from _more_notes(spec, plugin.cls, config)
        note = getattr(plugin.cls, "TOLD", "")
        if note:
            yield f"{spec.effective_name}: {note}"
    yield from _profile_notes(config, known)
    for field in msgspec.structs.fields(config):
        if field.name in _SECTIONS and getattr(config, field.name):
            yield f"{field.encode_name}: read, and not used; in its place, {_SECTIONS[field.name]}"
    yield from _gate_notes(config)
    yield from _flow_control_notes(config, known)


def server_notes(config: EndpointPickerConfig, spec: ModelServerSpec) -> Iterator[str]:
    """Notes on parts of the file that have another effect because of the ModelServer that names it."""
    for plugin in config.plugins:
        if plugin.type in _PRECISE and spec.kv_events is None:
            what = "it has no kvEvents, so cached prefixes are estimated by what was sent where"
            yield f"{plugin.effective_name}: {what}, as by prefix-cache-scorer"
        if plugin.type == "context-length-aware":
            label = str((plugin.parameters or {}).get("label") or RANGE_LABEL)
            for endpoint in spec.endpoints:
                text = endpoint.labels.get(label)
                if text is not None and context_range(text) is None:
                    what = f"'{text}' is no range; write it as min-max, such as 0-8192"
                    yield f"{plugin.effective_name}: {endpoint.address}: label {label}: {what}. It matches no prompt"


def _parameter_notes(name: str, parameters: Mapping[str, Any], cls: type) -> Iterator[str]:
    reasons = ineffective_parameters(cls)
    for key in parameters:
        if key in reasons:
            yield f"{name}: {key} has no effect: {reasons[key]}"


def _more_notes(spec: PluginSpec, cls: type, config: EndpointPickerConfig) -> Iterator[str]:
    """Notes that depend on values of the plugin's parameters, or on other parts of the file."""
    given = spec.parameters or {}
    if cls in {EndpointAttributeFilter, EndpointAttributeScorer}:
        key = given.get("attribute") or given.get("attributeKey") or ""
        if given.get("source") == "metadata":
            yield f"{spec.effective_name}: no endpoint has a value: a request's metadata is not read"
        elif key not in _attributes(config):
            fails = given.get("onMissing") == "Fail" and not given.get("fallbackOnEmpty")
            what = f"no core-metrics-extractor has '{key}' in customMetrics{'; requests fail' if fails else ''}"
            yield f"{spec.effective_name}: no endpoint has a value: {what}"
    elif cls is AgentSessionHeaders and not feature_gates(config).get(FEATURE_GATE, False):
        what = f"no flows of agents without the feature gate {FEATURE_GATE}"
        yield f"{spec.effective_name}: {what}; plugins that name it still read its headers"
    elif cls is PriorityHoldback and given.get("domain") == "explicit":
        known = msgspec.convert(given, PriorityHoldback, str_keys=True).ceilings
        bands = config.flow_control.priority_bands if config.flow_control else ()
        for priority in sorted({0, *(band.priority for band in bands)} - known.keys()):
            yield f"{spec.effective_name}: ceilings name no priority {priority}, so its requests are never sent"


def _attributes(config: EndpointPickerConfig) -> frozenset[str]:
    """Those that endpoints can have."""
    return frozenset(
        metric.attribute_key
        for spec in config.plugins
        if spec.type in _EXTRACTORS
        for engine in msgspec.convert((spec.parameters or {}).get("engineConfigs") or [], tuple[EngineTypeMetrics, ...])
        for metric in engine.custom_metrics
    )


def _profile_notes(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[str]:
    kinds = {spec.effective_name: known[spec.type].kind for spec in config.plugins}
    tiers = cache_tier_capacities(config)
    one_index = {
        spec.effective_name
        for spec in config.plugins
        if spec.type in _PREFIX_SCORERS and (spec.parameters or {}).get("prefixMatchInfoProducerName") not in tiers
    }
    for profile in config.scheduling_profiles:
        for ref in profile.plugins:
            if ref.weight is not None and kinds[ref.plugin_ref] not in {"scorer", "filter and scorer"}:
                what = f"a weight for '{ref.plugin_ref}' has no effect: it is no scorer"
                yield f"schedulingProfiles '{profile.name}': {what}"
        same = [ref.plugin_ref for ref in profile.plugins if ref.plugin_ref in one_index]
        if len(same) > 1:
            yield f"schedulingProfiles '{profile.name}': {' and '.join(same)} score by one estimate of cached prefixes"


def _gate_notes(config: EndpointPickerConfig) -> Iterator[str]:
    others = [gate for gate in feature_gates(config) if gate != FEATURE_GATE]
    if others:
        yield f"featureGates: {', '.join(others)}: read, and not used"


def _flow_control_notes(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[str]:
    section = config.flow_control
    if not feature_gates(config).get(FEATURE_GATE, False):
        if section is not None or config.saturation_detector is not None:
            what = "flowControl" if section is not None else "saturationDetector"
            yield f"{what}: not used without the feature gate {FEATURE_GATE}; requests go to the engines at once"
        return
    types = {spec.effective_name: spec.type for spec in config.plugins}
    detector = types.get(saturation_detector_name(config), saturation_detector_name(config))
    if detector not in _DETECTORS:
        yield f"saturationDetector: {detector} is not built here; in its place, {DEFAULT_DETECTOR} with its defaults"
    if section is not None:
        yield from _section_notes(section, types, known)


def _section_notes(
    section: FlowControlSection, types: Mapping[str, str], known: Mapping[str, PluginType]
) -> Iterator[str]:
    usage = section.usage_limit_policy_plugin_ref
    if usage and known[types.get(usage, usage)].kind == "accepted":
        yield "usageLimitPolicyPluginRef: read, and not used; a ModelServer's flowControl has ceilings by band"
    if section.enable_eviction:
        yield "enableEviction: read, and not used; what has gone to an engine is not taken back"
    for key, ttl in (
        ("defaultRequestTTL", section.default_request_ttl),
        ("noEndpointRequestTTL", section.no_endpoint_request_ttl),
    ):
        if ttl is not None and not 0 < ttl <= LONGEST_WAIT:
            yield f"{key}: {ttl}: requests wait {LONGEST_WAIT} at most, as Envoy's own time-outs do"
    bands = [section.default_priority_band, section.default_negative_priority_band, *section.priority_bands]
    for band in bands:
        if band is None:
            continue
        if band.default_request_ttl is not None:
            yield f"band {band.priority}: defaultRequestTTL has no effect: all bands wait as flowControl's says"
        fairness, order = (types.get(ref, ref) for ref in (band.fairness_policy_ref, band.ordering_policy_ref))
        if fairness and fairness not in FAIRNESS:
            yield f"band {band.priority}: {fairness} is not built here; in its place, global-strict-fairness-policy"
        if order and order not in ORDERS:
            yield f"band {band.priority}: {order} is not built here; in its place, fcfs-ordering-policy"
