# SPDX-License-Identifier: Apache-2.0
"""Pickers from an EndpointPickerConfig, and its names that refer to plugins."""

from __future__ import annotations

import json
import random
import re
from typing import Final

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.llmd import picker_config_checks
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN, NOT_BUILT, installed_plugins
from extproc.scheduling.framework import NamedScorer, NeedsPlugins, Profile
from extproc.scheduling.plugins.filters import PrefixCacheAffinityFilter
from extproc.scheduling.plugins.load_scorers import PrefixCacheScorer, QueueScorer, TokenLoadScorer
from extproc.scheduling.plugins.score_selectors import MaxScoreSelector, WeightedRandomSelector
from tests.extproc.scheduling.plugins.views import view_of

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: prefix-cache-affinity-filter
    parameters: {affinityThreshold: 0.9}
  - type: token-load-scorer
  - name: prefix
    type: prefix-cache-scorer
    parameters: {matchLengthWeight: 0.5}
  - type: weighted-random-picker
    parameters: {maxNumOfEndpoints: 2}
  - type: single-profile-handler
schedulingProfiles:
  - name: default
    plugins:
      - pluginRef: prefix-cache-affinity-filter
      - pluginRef: token-load-scorer
      - pluginRef: prefix
        weight: 3
      - pluginRef: weighted-random-picker
"""


def profile_of(text: str) -> Profile:
    (profile,) = picker_from_text("epp.yaml", text, BUILT_IN).picker.profiles.values()
    return profile


def notes_of(text: str) -> tuple[str, ...]:
    return picker_from_text("epp.yaml", text, BUILT_IN).notes


def test_a_file_of_llm_ds_is_read_with_its_weights_and_parameters() -> None:
    profile = profile_of(CONFIG)
    assert [(one.name, one.plugin) for one in profile.filters] == [
        ("prefix-cache-affinity-filter", PrefixCacheAffinityFilter(affinity_threshold=0.9))
    ]
    assert profile.scorers == (
        NamedScorer("token-load-scorer", TokenLoadScorer(), 1.0),
        NamedScorer("prefix", PrefixCacheScorer(match_length_weight=0.5), 3.0),
    )
    assert profile.selector == WeightedRandomSelector(max_num_of_endpoints=2)


def test_it_picks_as_its_formulas_say() -> None:
    text = CONFIG.replace("weighted-random-picker", "max-score-picker")
    profile = profile_of(text)
    view = view_of(3, cached=[0, 950, 900])
    # two hold 0.9 of the prompt; the one that holds more has less to compute
    assert profile.pick(view, rng=random.Random(0)).rows == [1, 2]


def test_the_older_api_version_and_a_file_without_profiles_are_taken() -> None:
    text = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: queue-scorer
"""
    profile = profile_of(text)
    assert profile.scorers == (NamedScorer("queue-scorer", QueueScorer(), 1.0),)
    assert profile.selector == MaxScoreSelector()


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("type: token-load-scorer", "type: token-lod-scorer", "epp.yaml:6: plugins[1].type: there is no plugin type"),
        (
            "affinityThreshold",
            "affinityTreshold",
            "epp.yaml:5: plugins[0].parameters.affinityTreshold: there is no such",
        ),
        ("affinityThreshold: 0.9", "affinityThreshold: 9", "epp.yaml:5: plugins[0].parameters.affinityThreshold"),
        ("pluginRef: prefix\n", "pluginRef: prefx\n", "did you mean 'prefix'?"),
        ("weight: 3", "wait: 3", "epp.yaml:19: schedulingProfiles[0].plugins[2].wait: there is no such field"),
        ("weight: 3", "weight: -3", "epp.yaml:19:"),
        ("weight: 3", "weight: 1.0e+308", "epp.yaml:19:"),
        ("name: prefix\n", "name: token-load-scorer\n", "a second plugin called 'token-load-scorer'"),
        ("kind: Endpoint", "kind: Entpoint", "epp.yaml:2: kind"),
        ("plugins:\n  - type", "plugins:\n  - [", "not YAML"),
    ],
)
def test_a_mistake_is_placed_and_comes_with_advice(old: str, new: str, mistake: str) -> None:
    text = CONFIG.replace(old, new, 1)
    assert text != CONFIG
    with pytest.raises(ConfigInvalid, match=re.escape(mistake)):
        picker_from_text("epp.yaml", text, BUILT_IN)


def only(type_name: str, parameters: str = "{}") -> str:
    return f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: {type_name}
    parameters: {parameters}
"""


@pytest.mark.parametrize(
    ("type_name", "parameters", "advice"),
    [
        ("approx-prefix-cache-producer", "{autoTone: true}", "parameters.autoTone: there is no such field; did you"),
        ("inflight-load-producer", "{outputRatios: 1}", "did you mean 'outputRatio'?"),
        ("openai-parser", "{pace: 1}", "parameters.pace: there is no such field"),
        ("fcfs-ordering-policy", "{by: age}", "parameters.by: there is no such field"),
    ],
)
def test_a_misspelt_parameter_of_a_type_without_effect_is_refused(type_name: str, parameters: str, advice: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(advice)):
        picker_from_text("epp.yaml", only(type_name, parameters), BUILT_IN)


@pytest.mark.parametrize(
    ("type_name", "parameters"),
    [
        ("sheddable-eviction-filter", "{}"),
        ("priority-then-time-eviction-order-policy", "{}"),
        ("inflight-load-producer", "{outputRatio: 1.5, syncCrossReplicaState: true}"),
        ("burst-prefix-cache-producer", "{balanceBy: tokens, maxBatchSize: 8, blockSizeTokens: 64}"),
        ("predicted-latency-producer", "{useEncoderCacheFeatures: true, encoderCacheMatchInfoProducerName: ''}"),
        ("k8s-notification-source", "{group: '', version: v1, kind: Pod}"),
        ("single-profile-handler", "{scorer: kv-cache-scorer, picker: random-picker}"),
    ],
)
def test_types_and_parameters_of_llm_d_010_are_taken_and_told(type_name: str, parameters: str) -> None:
    assert any(type_name in note for note in notes_of(only(type_name, parameters)))


def test_a_weight_of_a_plugin_that_is_no_scorer_is_told() -> None:
    text = CONFIG.replace("pluginRef: weighted-random-picker", "pluginRef: weighted-random-picker\n        weight: 2")
    assert any("'weighted-random-picker' has no effect: it is no scorer" in note for note in notes_of(text))


def test_a_declared_picker_serves_a_profile_that_names_none() -> None:
    text = CONFIG.replace("      - pluginRef: weighted-random-picker\n", "")
    assert profile_of(text).selector == WeightedRandomSelector(max_num_of_endpoints=2)
    assert profile_of(
        text.replace("  - type: weighted-random-picker\n    parameters: {maxNumOfEndpoints: 2}\n", "")
    ) == (msgspec.structs.replace(profile_of(text), selector=MaxScoreSelector()))


def test_parameters_without_effect_are_taken_and_told_with_the_reason() -> None:
    text = CONFIG.replace("{affinityThreshold: 0.9}", "{affinityThreshold: 0.9, explorationProbability: 0.01}")
    assert profile_of(text) == profile_of(CONFIG)
    reason = PrefixCacheAffinityFilter.WITHOUT_EFFECT["explorationProbability"]
    assert f"prefix-cache-affinity-filter: explorationProbability has no effect: {reason}" in notes_of(text)


def test_the_older_names_of_a_prefix_scorers_parameters_count() -> None:
    (older,) = profile_of(
        CONFIG.replace("matchLengthWeight: 0.5", "prefixLengthWeight: 0.5, maxModelLen: 2000")
    ).scorers[1:]
    view = view_of(2, cached=[1000, 500])
    # half of it by length, a quarter of the scale squared, and half by the ratio
    assert older.plugin.score(view, view.table.is_active)[1] == pytest.approx(0.5 * 0.0625 + 0.5 * 0.5)


def test_a_type_of_llm_ds_that_is_not_built_is_refused_with_what_takes_its_place() -> None:
    with pytest.raises(ConfigInvalid, match="in its place, latency-scorer in both profiles"):
        picker_from_text("epp.yaml", CONFIG.replace("type: token-load-scorer", "type: pd-slo-pair-optimizer"), BUILT_IN)


def test_a_second_picker_and_a_second_document_are_refused() -> None:
    doubled = (
        CONFIG.replace("- type: single-profile-handler", "- type: random-picker") + "      - pluginRef: random-picker\n"
    )
    with pytest.raises(ConfigInvalid, match="a second picker"):
        picker_from_text("epp.yaml", doubled, BUILT_IN)
    with pytest.raises(ConfigInvalid, match="has 2 documents"):
        picker_from_text("epp.yaml", CONFIG + "---\n" + CONFIG, BUILT_IN)


def test_a_plugin_of_another_package_is_found_but_takes_no_name_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> object:
            return BUILT_IN["random-picker"]

    entries = [Entry("their-picker"), Entry("queue-scorer")]
    monkeypatch.setattr("extproc.scheduling.registry.entry_points", lambda **_: entries)
    assert installed_plugins()["their-picker"].kind == "picker"
    assert installed_plugins()["queue-scorer"].kind == "scorer"


# Types that llm-d-router registers, without those for tests, by its sources of September 2026.
LLM_DS: Final = """
active-request-scorer agent-identity always-disagg-multimodal-decider always-disagg-pd-decider anthropic-parser
approx-prefix-cache-producer burst-prefix-cache-producer by-label by-label-selector concurrency-detector
context-length-aware core-metrics-extractor data-parallel-profile-handler dcgm-data-source dcgm-extractor decode-filter
disagg-headers-handler disagg-profile-handler disaggregatedset-rollout-screener edf-ordering-policy encode-filter
label-producer local-syncer redis-syncer endpoint-attribute-weight-scorer
endpoint-attribute-filter endpoint-attribute-scorer endpoint-notification-source eviction-priority-then-time-ordering
eviction-sheddable-filter fcfs-ordering-policy file-discovery global-strict-fairness-policy
header-label-affinity-scorer header-profile-handler inflight-load-producer k8s-notification-source
kv-cache-utilization-scorer label-selector-filter latency-scorer latency-slo-admitter load-aware-scorer
lora-affinity-scorer max-score-picker metrics-data-source mm-embeddings-cache-producer mm-embeddings-cache-scorer
models-data-extractor models-data-source models-responder multicluster-approx-prefix-cache-producer
multicluster-file-discovery
multicluster-kv-cache-utilization-scorer multicluster-metrics-data-source multicluster-metrics-extractor
multicluster-prefix-cache-scorer multicluster-queue-scorer multicluster-session-affinity-filter
multicluster-topology-scorer no-hit-lru-scorer openai-parser outlen-bucket p2p-source-producer passthrough-parser
pd-profile-handler precise-prefix-cache-producer precise-prefix-cache-scorer predicted-latency-producer
prefill-filter prefill-header-handler prefix-based-pd-decider prefix-cache-affinity-filter prefix-cache-scorer
priority-holdback-policy probabilistic-admitter queue-scorer random-picker request-attribute-reporter
round-robin-fairness-policy running-requests-size-scorer session-affinity-filter session-affinity-scorer
session-id-producer sglanghttp-parser single-profile-handler slo-deadline-ordering-policy slo-headroom-tier-filter
soft-reflective-ceiling-policy static-usage-limit-policy token-load-scorer token-producer topology-affinity-filter
thunder-agent topology-affinity-scorer topology-extractor topology-stamp-handler utilization-detector utilization-filter
vertexai-parser vllmgrpc-parser vllmhttp-parser weighted-random-picker
"""


def test_every_type_of_llm_ds_is_taken() -> None:
    assert [name for name in LLM_DS.split() if name not in BUILT_IN] == []
    assert not NOT_BUILT.keys() & BUILT_IN.keys()


@pytest.mark.parametrize("name", sorted(NOT_BUILT))
def test_a_type_of_no_release_is_refused_with_what_takes_its_place(name: str) -> None:
    text = CONFIG.replace("type: token-load-scorer", f"type: {name}\n    name: token-load-scorer")
    with pytest.raises(ConfigInvalid, match=re.escape(f"in its place, {NOT_BUILT[name]}")):
        picker_from_text("epp.yaml", text, BUILT_IN)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_plugin_works_with_its_defaults(name: str) -> None:
    kind = BUILT_IN[name].kind
    needed: dict[str, dict[str, object]] = {
        "request-attribute-reporter": {"attributes": [{"key": {"name": "cost"}, "expression": "usage.total_tokens"}]},
        "header-label-affinity-scorer": {"headerName": "x-zone", "labelKey": "zone"},
        "by-label": {"label": "zone"},
        "endpoint-attribute-weight-scorer": {"attributeKey": "a", "weights": {"b": 1.0}},
        "decision-tree-filter": {"current": {"pluginRef": "low-queue-filter"}},
        "priority-holdback-policy": {"minCeiling": 0.5},
        "endpoint-attribute-filter": {"attribute": "a", "algorithm": {"type": "topK", "topK": {"k": 1}}},
        "endpoint-attribute-scorer": {"attributeKey": "a", "algorithm": {"type": "linear_lower_is_better"}},
    }
    plugin = msgspec.convert(needed.get(name, {}), BUILT_IN[name].cls)
    plugin = plugin.with_plugins({}) if isinstance(plugin, NeedsPlugins) else plugin
    view = view_of(4)
    needs_more = {"prefill-filter", "encode-filter", "by-label", "header-based-testing-filter"}
    if kind == "filter":
        assert plugin.keep(view, view.table.is_active).sum() == (0 if name in needs_more else 4)
    elif kind == "scorer":
        assert plugin.score(view, view.table.is_active).shape == view.table.is_active.shape
    elif kind == "reporter":
        assert plugin.reporter().value({"total_tokens": 7}) == 7
    elif kind == "picker":
        assert len(plugin.order(view.demand.work[:4], random.Random(0))) == 4


HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def text_of(references: dict[str, str]) -> str:
    """Decision trees by name, each with the one that it refers to, and a filter called ``end``."""
    trees = [
        {"type": "decision-tree-filter", "name": name, "parameters": {"current": {"pluginRef": target}}}
        for name, target in references.items()
    ]
    return json.dumps({**HEAD, "plugins": [*trees, {"type": "session-affinity-filter", "name": "end"}]})


def refused(references: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigInvalid) as error:
        picker_from_text("epp.json", text_of(references), BUILT_IN)
    return str(error.value).splitlines()


def test_the_names_of_a_circle_are_told_in_order_and_what_leads_to_it_is_not() -> None:
    found = refused({"lead": "a", "a": "b", "b": "c", "c": "a", "fine": "end"})
    assert [line.partition("itself: ")[2] for line in found] == [
        "a -> b -> c -> a; break the circle",
        "b -> c -> a -> b; break the circle",
        "c -> a -> b -> c; break the circle",
    ]


def test_a_circle_of_a_thousand_is_told_in_a_few_lines() -> None:
    found = refused({f"t{n}": f"t{(n + 1) % 1000}" for n in range(1000)})
    assert len(found) == 10
    assert all(len(line) < 200 for line in found)


def test_long_chains_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_config_checks, "_circle", lambda *_: pytest.fail("a chain with an end is no circle"))
    chain = {f"t{n}": f"t{n + 1}" for n in range(2000)} | {"t1999": "end"}
    picker_from_text("epp.json", text_of(chain), BUILT_IN)
