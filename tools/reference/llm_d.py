# SPDX-License-Identifier: Apache-2.0
"""The reference pages of llm-d's plugins, flags and published EndpointPickerConfigs: what each does here, or why not.

``llm_d_files.json`` has the plugin types of each file and the names of their parameters; each file was loaded when this
was written. The parameters are those of llm-d-router's plugins after its release 0.10 and, where files in public
repositories still have them, of releases before.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import inspect

from controller.commands.llm_d_picker_flags import FLAGS
from extproc.llmd.compatibility_notes import ineffective_parameters
from extproc.llmd.plugin_types import ACCEPTED, ACCEPTED_PARAMETERS, BUILT_IN, NOT_BUILT, AcceptedType
from tools.reference.kinds import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FILES: Final = Path(__file__).with_name("llm_d_files.json")
# Files that something else than a type refuses, here and in llm-d's present release.
_FILES_BY_HAND: Final[Mapping[str, str]] = MappingProxyType(
    {
        "guides/agentic-serving/router/agentic-serving-gpu.values.yaml": (
            "a profile names active-request-scorer, which no plugin is called; llm-d refuses it, too"
        ),
        "deploy/config/pd-slo-epp-config.yaml": "a draft with a field profileHandler, which no release had",
    }
)
_FILES_HEAD: Final = """\
# Published EndpointPickerConfigs

Files of llm-d, of the Gateway API Inference Extension, of KServe and of guides elsewhere, of this year and before, also
those inside of Helm values and of documentation, that were loaded here. What of them has no effect, `attache check`
tells.
"""
_HEADER: Final = """# llm-d's flags

`attache epp` takes the flags of llm-d's endpoint picker and of the Inference Extension's before it, with one dash or
two, and in `camelCase` too. Any other flag is refused.
[Moving from llm-d](../migrating.md#from-llm-ds-endpoint-picker) has the steps.

This page is written by `make generate`.
"""
_TITLES: Final = (
    ("obeyed", "## Obeyed", "what it does"),
    ("accepted", "## Accepted, without effect: a line in the log reports it", "why"),
    ("refused", "## Refused, unless the value asks for nothing", "why"),
)
_NONE: Final = ""
LLM_D: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{name: ACCEPTED_PARAMETERS.get(name, "") for name in ACCEPTED},
        # filters
        "decision-tree-filter": "current nextOnSuccess nextOnFailure nextOnSuccessOrFailure",
        "header-based-testing-filter": _NONE,
        "least-kv-cache-filter": _NONE,
        "least-queue-filter": _NONE,
        "lora-affinity-filter": "threshold",
        "low-queue-filter": "threshold",
        "multicluster-session-affinity-filter": (
            "strategy profileName encodedEndpointHeaderConfig sessionIdConfig headerName"
        ),
        "context-length-aware": "label enableFiltering reusableTokensProducerName",
        "by-label": "label validValues allowsNoLabel",
        "by-label-selector": "matchLabels matchExpressions",
        "decode-filter": _NONE,
        "encode-filter": _NONE,
        "endpoint-attribute-filter": "attribute producer onMissing fallbackOnEmpty algorithm",
        "label-selector-filter": "matchLabels matchExpressions",
        "prefill-filter": _NONE,
        "prefix-cache-affinity-filter": (
            "affinityThreshold explorationProbability maxTTFTPenaltyMs ttftSource"
            " peakPrefillThroughput penaltySource maxTokensInFlightPenalty prefixMatchInfoProducerName"
            " latencyPredictionInfoProducerName inFlightLoadProducerName prefillCalibrationFile"
            " prefillCalibrationFingerprint prefillCalibrationRequired"
        ),
        "session-affinity-filter": (
            "strategy profileName encodedEndpointHeaderConfig sessionIdConfig headerName sessionIDProducerName"
        ),
        "slo-headroom-tier-filter": "epsilonExploreNeg latencyPredictionInfoProducerName",
        "topology-affinity-filter": "minAffinity topologyProducerName peerTopologyHeader",
        "utilization-filter": "conditions fallbackOnEmpty inFlightLoadProducerName",
        # scorers
        "active-request-scorer": "idleThreshold maxBusyScore inFlightLoadProducerName requestTimeout",
        "endpoint-attribute-weight-scorer": "attributeKey weights producer",
        "endpoint-attribute-scorer": "attributeKey algorithm source metadataNamespace metadataField",
        "header-label-affinity-scorer": "headerName labelKey stampResponseHeader",
        "kv-cache-utilization-scorer": _NONE,
        "latency-observation-scorer-hub": "explorationRate minInflightGap ttftPercentilesProducerName",
        "multicluster-kv-cache-utilization-scorer": _NONE,
        "multicluster-prefix-cache-scorer": ("matchLengthWeight matchLengthScaleTokens prefixMatchInfoProducerName"),
        "multicluster-queue-scorer": _NONE,
        "multicluster-topology-scorer": "field weights topologyProducerName",
        "slo-aware-routing": "headroomSelectionStrategy",
        "slo-scorer": _NONE,
        "latency-scorer": (
            "ttftWeight tpotWeight headroomSelectionStrategy compositeKVWeight compositeQueueWeight"
            " compositePrefixWeight latencyPredictionInfoProducerName prefixMatchInfoProducerName"
        ),
        "lmetric-scorer": "prefixMatchInfoProducerName inFlightLoadProducerName",
        "load-aware-scorer": "threshold",
        "lora-affinity-scorer": _NONE,
        "no-hit-lru-scorer": "lruSize prefixPluginType prefixPluginName prefixMatchInfoProducerName",
        "precise-prefix-cache-scorer": (
            "tokenProcessorConfig indexerConfig kvEventsConfig speculativeIndexing speculativeTTL"
        ),
        "prefix-cache-scorer": (
            "matchLengthWeight matchLengthScaleTokens prefixLengthWeight maxModelLen"
            " prefixMatchInfoProducerName hashBlockSize blockSize blockSizeTokens autoTune maxPrefixBlocksToMatch"
            " maxPrefixTokensToMatch lruCapacityPerServer mode indexerConfig kvEventsConfig"
        ),
        "queue-scorer": _NONE,
        "running-requests-size-scorer": _NONE,
        "session-affinity-scorer": (
            "strategy profileName encodedEndpointHeaderConfig sessionIdConfig headerName sessionIDProducerName"
            " algorithm evictionTtlSeconds evictionSweepSeconds missThreshold maxAge secure sameSite"
        ),
        "token-load-scorer": "queueThresholdTokens nonTextTokenWeight inFlightLoadProducerName",
        "topology-affinity-scorer": "topologyProducerName",
        # pickers
        "max-score-picker": "maxNumOfEndpoints",
        "random-picker": "maxNumOfEndpoints",
        "weighted-random-picker": "maxNumOfEndpoints",
        # profile handlers and deciders
        "always-disagg-pd-decider": _NONE,
        "data-parallel-profile-handler": "primaryPort targetPort",
        "ed-profile-handler": "decodeProfile encodeProfile deciderPluginName",
        "slo-aware-profile-handler": _NONE,
        "disagg-profile-handler": (
            "profiles deciders stageOrder decodeProfile prefillProfile encodeProfile"
            " deciderPluginName prefillDeciderPluginName encodeDeciderPluginName primaryPort prefixPluginType"
            " prefixPluginName prefixMatchInfoProducerName"
        ),
        "header-profile-handler": "headerName defaultProfile",
        "prefix-based-pd-decider": "nonCachedTokens promptTokens prefixMatchInfoProducerName",
        "single-profile-handler": "scorer picker",
        # flow control
        "agent-identity": "additionalSessionHeaders",
        "concurrency-detector": "concurrencyMode maxConcurrency maxTokenConcurrency headroom inFlightLoadProducerName",
        "priority-holdback-policy": "shape domain minCeiling maxCeiling ceilings",
        "soft-reflective-ceiling-policy": _NONE,
        "thunder-agent": (
            "capacityTokens utilThreshold idleLeaseSeconds headWaitStarvationMs evictionTtlSeconds"
            " evictionSweepSeconds actingHalfLifeSeconds bufferTokensPerProgram shedIdleSeconds sessionFinalHeader"
            " nextTurnPredictor admissionPolicy"
        ),
        "static-usage-limit-policy": "threshold",
        "utilization-detector": "queueDepthThreshold kvCacheUtilThreshold metricsStalenessThreshold headroom",
        # admitters and screeners
        "disaggregatedset-rollout-screener": ("scope headerSelectors revisionGating"),
        "endpoint-pin-screener": _NONE,
        "reserve-endpoint": _NONE,
        "latency-slo-admitter": "latencyPredictionInfoProducerName",
        "probabilistic-admitter": "queueDepthThreshold kvCacheUtilThreshold power k",
        # producers
        "session-id-producer": "headerName cookieName lruSize ttl",
        # sources, extractors, discovery
        "core-metrics-extractor": "defaultEngine engineConfigs engineLabelKey",
        "metrics-data-source": (
            "scheme path port insecureSkipVerify caCertPath clientCertPath clientKeyPath interval families"
        ),
        "label-producer": "labels label attributeKey valueType",
        "topology-extractor": "host rack zone region",
        # parsers and reports
        "request-attribute-reporter": "attributes",
    }
)
_TIER: Final = (
    "taken if a scorer names the producer and autoTune is false: a tier of its own; else the pool's own index"
)
_BY_HAND: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {("approx-prefix-cache-producer", one): _TIER for one in ("autoTune", "blockSizeTokens", "lruCapacityPerServer")}
)
_HEAD: Final = """\
# llm-d's plugins, parameter by parameter

Every plugin type of llm-d, with each of its parameters: taken, without effect because something else does its work, or
not built. A file that names a type that is not built is refused with a message, and so is a parameter that is not in
this table. `attache check` reports fields without effect. [Plugins](../picking.md#plugins) explains how they work
together.

| type | parameter | here |
|---|---|---|
"""
_REFUSED: Final = "refused"


def files_page() -> str:
    """The Markdown page."""
    found = list(verdicts())
    loads = sum(not refused for *_, refused in found)
    summary = f"Of {len(found)} files {loads} load. The others:\n"
    rows = [f"| {repo} | `{path}` | {refused} |" for repo, path, refused in found if refused]
    table = ["| repository | file | refused because of |", "|---|---|---|", *rows]
    loaded = ["## Files that load", "", "| repository | file |", "|---|---|"]
    loaded += [f"| {repo} | `{path}` |" for repo, path, refused in found if not refused]
    return "\n".join([MARK, "", _FILES_HEAD, summary, *table, "", *loaded]) + "\n"


def verdicts() -> Iterator[tuple[str, str, str]]:
    """Repository, path, and what refuses the file; empty if it loads."""
    for repo, files in json.loads(_FILES.read_text()).items():
        for path, plugins in sorted(files.items()):
            yield repo, path, _FILES_BY_HAND.get(path) or ", ".join(_missing(plugins.split()))


def _missing(plugins: list[str]) -> Iterator[str]:
    for one in plugins:
        name, _, parameters = one.partition(":")
        if name not in BUILT_IN:
            yield f"`{name}` ({NOT_BUILT[name]})" if name in NOT_BUILT else f"`{name}`"
            continue
        refused = [parameter for parameter in parameters.split("+") if not is_taken(name, parameter)]
        if refused:
            yield f"`{name}`: {', '.join(f'`{parameter}`' for parameter in refused)}"


def flags_page() -> str:
    """The whole page."""
    parts = [_HEADER]
    for fate, title, what in _TITLES:
        flags = [one for one in FLAGS if one.fate == fate]
        third = {"obeyed": "default", "accepted": "", "refused": "taken all the same"}[fate]
        head = ["flag", *([third] if third else []), what]
        rows = [
            [f"`--{one.name}`", *([_shown(one.default or one.harmless)] if third else []), one.note] for one in flags
        ]
        parts += [title, "", _row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
    return "\n".join(parts)


def _shown(value: str) -> str:
    return f"`{value}`" if value else ""


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def parameters_page() -> str:
    """The Markdown page."""
    rows = [
        f"| `{name}` | {parameter and f'`{parameter}`'} | {here} |" for name, parameter, here in parameter_verdicts()
    ]
    return f"{MARK}\n\n{_HEAD}" + "\n".join(rows) + "\n"


def parameter_verdicts() -> Iterator[tuple[str, str, str]]:
    """Type, parameter (empty for a type without any), and what becomes of it."""
    for name, parameters in sorted(LLM_D.items()):
        for parameter in parameters.split() or [""]:
            yield name, parameter, _verdict(name, parameter)


def unknown_parameters() -> list[tuple[str, str]]:
    """Parameters that a type that is built here would refuse."""
    return [(name, parameter) for name, parameter, here in parameter_verdicts() if here == _REFUSED]


def _verdict(name: str, parameter: str) -> str:
    if (name, parameter) in _BY_HAND:
        return _BY_HAND[name, parameter]
    plugin = BUILT_IN.get(name)
    if plugin is None:
        return f"not built; in its place, {NOT_BUILT[name]}"
    if plugin.kind == "accepted" and is_taken(name, parameter):
        return f"without effect; in its place, {ACCEPTED[name]}"
    reasons = ineffective_parameters(plugin.cls)
    if parameter in reasons:
        return f"without effect: {reasons[parameter]}"
    return "taken" if is_taken(name, parameter) else _REFUSED


def is_taken(name: str, parameter: str) -> bool:
    """Whether a plugin of this type, which is built, can have the parameter, with or without effect."""
    plugin = BUILT_IN[name]
    if not parameter or plugin.cls is AcceptedType or parameter in ineffective_parameters(plugin.cls):
        return True
    kind = inspect.type_info(plugin.cls)
    assert isinstance(kind, inspect.StructType)  # noqa: S101 - a plugin is a struct
    return parameter in {field.encode_name for field in kind.fields}
