# SPDX-License-Identifier: Apache-2.0
"""Names in an EndpointPickerConfig: each refers to a plugin or profile that can do what is asked of it."""

from __future__ import annotations

import re

import pytest

from extproc.config.errors import ConfigInvalid
from extproc.scheduling.picker_config import picker_from_text
from extproc.scheduling.registry import BUILT_IN

HEAD = """\
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
"""
SINGLE = """\
plugins:
  - {type: queue-scorer}
  - {type: openai-parser, name: parser}
  - {type: metrics-data-source}
  - {type: core-metrics-extractor, name: engines}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: queue-scorer}]}
"""
PAIRS = """\
plugins:
  - {type: queue-scorer}
  - {type: always-disagg-pd-decider, name: always}
  - {type: disagg-profile-handler, parameters: {%s}}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: queue-scorer}]}
  - {name: decode, plugins: [{pluginRef: queue-scorer}]}
"""


def load(text: str) -> None:
    picker_from_text("epp.yaml", HEAD + text, BUILT_IN)


@pytest.mark.parametrize(
    "section",
    [
        "requestHandler: {parsers: [{pluginRef: parser}, {pluginRef: anthropic-parser}]}",
        "parser: {pluginRef: parser}",
        "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: engines}]}]}",
        "dataLayer: {injectDefaults: false}",
        "saturationDetector: {pluginRef: concurrency-detector}",
        "flowControl: {saturationDetector: {pluginRef: utilization-detector}}",
        "flowControl: {usageLimitPolicyPluginRef: static-usage-limit-policy}",
        "flowControl: {defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}}",
    ],
)
def test_names_of_plugins_and_types_that_need_no_parameters_are_taken(section: str) -> None:
    load(SINGLE + section)


@pytest.mark.parametrize(
    ("section", "mistake"),
    [
        ("requestHandler: {parsers: [{pluginRef: persar}]}", "parsers[0].pluginRef: no plugin is called 'persar'"),
        ("parser: {pluginRef: queue-scorer}", "'queue-scorer' is a queue-scorer, and no parser"),
        ("dataLayer: {sources: [{pluginRef: none}]}", "dataLayer.sources[0].pluginRef: no plugin is called 'none'"),
        (
            "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: engnes}]}]}",
            "did you mean 'engines'?",
        ),
        ("dataLayer: {discovery: {endpoints: {pluginRef: none}}}", "endpoints.pluginRef: no plugin is called 'none'"),
        ("saturationDetector: {pluginRef: queue-scorer}", "and no saturation detector"),
        ("flowControl: {saturationDetector: {pluginRef: none}}", "saturationDetector.pluginRef: no plugin is called"),
        ("flowControl: {usageLimitPolicyPluginRef: parser}", "'parser' is no usage limit policy"),
        ("flowControl: {priorityBands: [{priority: 1, fairnessPolicyRef: none}]}", "no plugin is called 'none'"),
        ("flowControl: {priorityBands: [{priority: 1, orderingPolicyRef: queue-scorer}]}", "and no ordering policy"),
        ("flowControl: {defaultNegativePriorityBand: {fairnessPolicyRef: fcfs-ordering-policy}}", "no fairness policy"),
    ],
)
def test_a_name_that_names_nothing_that_could_serve_is_refused(section: str, mistake: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(mistake)):
        load(SINGLE + section)


@pytest.mark.parametrize(
    "parameters",
    [
        "deciders: {prefill: always}",
        "deciderPluginName: always",
        "prefillDeciderPluginName: always, decodeProfile: decode, encodeProfile: encode",
        "deciders: {prefill: always, encode: always-disagg-multimodal-decider}",
        "prefixPluginName: named-and-never-looked-up, primaryPort: 8000",
    ],
)
def test_a_handler_names_deciders_by_each_of_its_parameters(parameters: str) -> None:
    load(PAIRS % parameters)


@pytest.mark.parametrize(
    ("parameters", "mistake"),
    [
        ("deciders: {prefill: queue-scorer}", "and no decider of prefill"),
        ("deciders: {prefill: always-disagg-multimodal-decider}", "and no decider of prefill"),
        ("deciderPluginName: prefix-based-pd-decider", "no plugin is called 'prefix-based-pd-decider'"),
    ],
)
def test_a_decider_that_could_not_be_asked_is_refused(parameters: str, mistake: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(mistake)):
        load(PAIRS % parameters)


def test_a_producer_is_named_by_its_own_name_or_its_type() -> None:
    scorer = "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: %s}}%s]"
    load(scorer % ("approx-prefix-cache-producer", ""))
    load(scorer % ("mine", ", {type: precise-prefix-cache-producer, name: mine}"))
    with pytest.raises(ConfigInvalid, match="no plugin is called 'mine'"):
        load(scorer % ("mine", ""))
    with pytest.raises(ConfigInvalid, match="and no producer"):
        load(scorer % ("best", ", {type: max-score-picker, name: best}"))


def test_a_profile_that_a_parameter_names_is_there() -> None:
    source = "plugins: [{type: queue-scorer}, {type: p2p-source-producer, parameters: {prefillProfileName: %s}}]"
    load(source % "default")
    load(source % '""')
    with pytest.raises(ConfigInvalid, match="there is no profile 'prefil'"):
        load(source % "prefil")
    with pytest.raises(ConfigInvalid, match="there is no profile"):
        load(source % "[default]")


def test_what_is_null_is_absent() -> None:
    load("""
featureGates:
plugins:
  - {type: queue-scorer, name: null, parameters: }
  - {type: concurrency-detector, parameters: {headroom: null, maxConcurrency: 7}}
schedulingProfiles:
flowControl: {priorityBands: , defaultRequestTTL: , maxBytes: null}
dataLayer:
saturationDetector: {pluginRef: }
""")


@pytest.mark.parametrize("value", ["{a: 1}", "[1]", "7", "true"])
def test_parameters_of_another_shape_are_no_accident(value: str) -> None:
    load(f"""
plugins:
  - {{type: queue-scorer}}
  - {{type: approx-prefix-cache-producer, parameters: {{autoTune: {value}, lruCapacityPerServer: {value}}}}}
  - {{type: inflight-load-producer, parameters: {{prefixMatchInfoProducerName: {value}}}}}
""")
