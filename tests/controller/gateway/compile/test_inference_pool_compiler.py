# SPDX-License-Identifier: Apache-2.0
"""One InferencePool as a directory: what cannot be used changes nothing, and pods are followed all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controller.gateway.compile.inference_pool_compiler import (
    LLM_D_OBJECTIVES,
    LLM_D_REWRITES,
    REWRITES,
    InferencePoolCompiler,
    InferencePoolResult,
)
from extproc.api.config_loader import load_snapshot
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.controller.gateway.compile.test_inference_pools import pool
from tests.kube_objects import Object, picker_config, pod

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

KEY = "team/llama"
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: max-score-picker}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}]
"""


def compiler(*pods: str, thing: Object | None = None, picker: str | None = None) -> InferencePoolCompiler:
    """With the pool and ready pods at 10.0.0.1, 10.0.0.2 and so on."""
    made = InferencePoolCompiler(KEY, picker)
    made.put("InferencePool", KEY, thing or pool())
    for number, name in enumerate(pods, start=1):
        made.put("Pod", f"team/{name}", pod(name, f"10.0.0.{number}", namespace="team"))
    return made


def snapshot(outcome: InferencePoolResult) -> Snapshot:
    assert outcome.files is not None
    return load_snapshot(outcome.files)


def addresses(outcome: InferencePoolResult) -> list[str]:
    (server,) = snapshot(outcome).servers
    assert server.metadata.key == KEY
    return [one.address for one in server.spec.endpoints]


def reasons(outcome: InferencePoolResult) -> list[str]:
    return [one.reason for one in outcome.problems]


def test_the_pools_pods_are_the_endpoints_of_a_server_of_its_name() -> None:
    outcome = compiler("a", "b").compile()
    assert addresses(outcome) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert reasons(outcome) == []
    assert (outcome.endpoints, outcome.ready) == (2, 2)


def test_streams_are_left_as_clients_asked_for_them_unless_the_pool_says_otherwise() -> None:
    assert snapshot(compiler("a").compile()).servers[0].spec.stream_usage == "AsRequested"
    always = compiler("a", thing=pool(annotation="streamUsage: Always"))
    assert snapshot(always.compile()).servers[0].spec.stream_usage == "Always"


def test_without_a_pool_there_is_nothing_to_serve() -> None:
    outcome = InferencePoolCompiler(KEY).compile()
    assert outcome.files is None
    assert reasons(outcome) == ["PoolNotFound"]


def test_another_pool_and_another_namespace_are_left_out() -> None:
    made = compiler("a")
    made.put("InferencePool", "team/other", pool("other", targetPorts=[{"number": 1}]))
    made.put("Pod", "else/b", pod("b", "10.0.0.9", namespace="else"))
    assert addresses(made.compile()) == ["10.0.0.1:8000"]


def test_a_pool_that_goes_stays_in_use_and_its_pods_are_followed() -> None:
    made = compiler("a")
    made.compile()
    made.put("InferencePool", KEY, None)
    made.put("Pod", "team/b", pod("b", "10.0.0.2", namespace="team"))
    outcome = made.compile()
    assert reasons(outcome) == ["PoolNotFound"]
    assert addresses(outcome) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_a_pool_with_a_mistake_leaves_what_was_in_use() -> None:
    made = compiler("a")
    made.compile()
    made.put("InferencePool", KEY, pool(annotation="engine: nvLLM"))
    outcome = made.compile()
    assert reasons(outcome) == ["PoolInvalid"]
    assert "engine" in outcome.problems[0].message
    assert addresses(outcome) == ["10.0.0.1:8000"]


def test_a_pool_without_pods_says_so() -> None:
    outcome = compiler().compile()
    assert reasons(outcome) == ["NoPods"]
    assert addresses(outcome) == []


def test_a_config_map_is_waited_for_and_then_kept() -> None:
    made = compiler("a", picker="team/how")
    assert made.compile().files is None
    made.put("ConfigMap", "team/how", picker_config("how", PICKER, namespace="team"))
    outcome = made.compile()
    assert reasons(outcome) == []
    assert snapshot(outcome).servers[0].spec.picker_config == "picker.team.how.yaml"
    for worse in (None, picker_config("how", "kind: Nonsense", namespace="team")):
        made.put("ConfigMap", "team/how", worse)
        outcome = made.compile()
        assert reasons(outcome) == ["PickerConfigNotFound"]
        assert snapshot(outcome).servers[0].spec.picker_config == "picker.team.how.yaml"


def test_a_pool_that_names_a_config_map_which_is_not_there_leaves_what_was_in_use() -> None:
    made = compiler("a")
    made.compile()
    made.put("InferencePool", KEY, pool(annotation="pickerConfig: missing"))
    outcome = made.compile()
    assert reasons(outcome) == ["PickerConfigNotFound"]
    assert snapshot(outcome).servers[0].spec.picker_config is None
    made.put("ConfigMap", "team/missing", picker_config("missing", PICKER, namespace="team"))
    assert snapshot(made.compile()).servers[0].spec.picker_config == "picker.team.missing.yaml"


def test_a_config_map_with_an_unknown_plugin_changes_nothing_and_says_which() -> None:
    made = InferencePoolCompiler(KEY, "team/how", check_picker=InstalledPluginChecker())
    made.put("InferencePool", KEY, pool())
    unknown = picker_config("how", PICKER.replace("queue-scorer", "queue-scorr"), namespace="team")
    made.put("ConfigMap", "team/how", unknown)
    assert made.compile().files is None
    made.put("ConfigMap", "team/how", picker_config("how", PICKER, namespace="team"))
    assert snapshot(made.compile()).servers[0].spec.picker_config == "picker.team.how.yaml"
    made.put("ConfigMap", "team/how", unknown)
    outcome = made.compile()
    assert snapshot(outcome).servers[0].spec.picker_config == "picker.team.how.yaml"
    assert "there is no plugin type 'queue-scorr'" in outcome.problems[0].message


def test_config_maps_that_nobody_names_are_not_written() -> None:
    made = compiler("a")
    made.put("ConfigMap", "team/other", picker_config("other", PICKER, namespace="team"))
    outcome = made.compile()
    assert outcome.files is not None
    assert not [name for name in outcome.files if name.startswith("picker.")]


def objective(priority: int, *, of: str = "llama", group: str = "inference.networking.x-k8s.io") -> Object:
    metadata = {"name": "batch", "namespace": "team"}
    spec = {"priority": priority, "poolRef": {"name": of}}
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": metadata,
        "spec": spec,
    }


def test_objectives_of_the_pool_are_taken_llm_ds_own_first() -> None:
    made = compiler("a")
    made.put("InferenceObjective", "team/batch", objective(1, of="other"))
    assert snapshot(made.compile()).objectives == ()
    made.put("InferenceObjective", "team/batch", objective(1))
    assert [one.spec.priority for one in snapshot(made.compile()).objectives] == [1]
    made.put(LLM_D_OBJECTIVES, "team/batch", objective(-1, group="llm-d.ai"))
    assert [one.spec.priority for one in snapshot(made.compile()).objectives] == [-1]
    made.put(LLM_D_OBJECTIVES, "team/batch", None)
    assert [one.spec.priority for one in snapshot(made.compile()).objectives] == [1]


def rewrite(*rules: Object, of: str = "llama", created: str = "2026-01-01T00:00:00Z") -> Object:
    metadata = {"name": "r", "namespace": "team", "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"poolRef": {"name": of}, "rules": list(rules)}}


def rule(*targets: str | tuple[str, int], models: tuple[str, ...] = ()) -> Object:
    listed = [
        {"modelRewrite": one} if isinstance(one, str) else {"modelRewrite": one[0], "weight": one[1]} for one in targets
    ]
    return {"targets": listed, "matches": [{"model": {"type": "Exact", "value": one}} for one in models]}


def rewrites(made: InferencePoolCompiler) -> list[tuple[tuple[str, ...], list[tuple[str, int]]]]:
    (server,) = snapshot(made.compile()).servers
    return [(one.models, [(each.model, each.weight) for each in one.targets]) for one in server.spec.model_rewrites]


def test_model_rewrites_of_the_pool_are_taken_in_llm_ds_order() -> None:
    made = compiler("a")
    made.put(REWRITES, "team/other", rewrite(rule("x"), of="other"))
    assert rewrites(made) == []
    made.put(
        REWRITES, "team/young", rewrite(rule("base"), rule("v2", models=("chat",)), created="2026-02-01T00:00:00Z")
    )
    made.put(LLM_D_REWRITES, "team/old", rewrite(rule(("v1", 9), ("canary", 1), "unweighted", models=("chat", "gpt"))))
    assert rewrites(made) == [
        (("chat", "gpt"), [("v1", 9), ("canary", 1)]),
        (("chat",), [("v2", 1)]),
        ((), [("base", 1)]),
    ]
    # of one name, llm-d's own group counts
    made.put(LLM_D_REWRITES, "team/young", rewrite(rule("other", "another")))
    assert rewrites(made)[-1] == ((), [("other", 1), ("another", 1)])
    made.put(LLM_D_REWRITES, "team/young", None)
    made.put(REWRITES, "team/young", None)
    made.put(LLM_D_REWRITES, "team/old", rewrite(of="other"))
    assert rewrites(made) == []


@pytest.mark.parametrize(
    "broken",
    [
        "text",
        {"targets": "b"},
        {"targets": []},
        {},
        {"targets": ["b"]},
        {"targets": [{"modelRewrite": ""}]},
        {"targets": [{"modelRewrite": "b", "weight": -1}]},
        {"targets": [{"modelRewrite": "b"}] * 65},
        {"targets": [{"modelRewrite": "b"}], "matches": [{"model": "chat"}]},
        # these match no request in llm-d, and must not match all of them
        {"targets": [{"modelRewrite": "b"}], "matches": [{}]},
        {"targets": [{"modelRewrite": "b"}], "matches": [None]},
        {"targets": [{"modelRewrite": "b"}], "matches": [{"model": {"value": ""}}]},
        {"targets": [{"modelRewrite": "b"}], "matches": [{"model": {"type": "Prefix", "value": "gpt"}}]},
        {"targets": [{"modelRewrite": "b"}], "matches": [{"model": {"value": "gpt"}}] * 1001},
    ],
)
def test_a_rule_of_a_rewrite_that_cannot_be_is_left_out_and_the_pool_is_served(broken: Any) -> None:  # noqa: ANN401 - of any shape
    made = compiler("a")
    made.put(REWRITES, "team/odd", rewrite(broken, rule("v2", models=("chat",))))
    assert rewrites(made) == [(("chat",), [("v2", 1)])]
    (problem,) = made.compile().problems
    assert problem.reason == "ModelRewriteInvalid"
    assert problem.message.startswith("InferenceModelRewrite r, rules[0] is left out: ")
    made.put(REWRITES, "team/odd", rewrite(rule("v2")))
    assert made.compile().problems == ()


@pytest.mark.parametrize(
    ("targets", "drawn", "complaint"),
    [
        ([("a", 0), ("b", 0)], [("a", 1), ("b", 1)], "all are drawn alike"),
        ([("a", 3), ("b", 0)], [("a", 3)], "targets without a weight above 0 are not drawn"),
        ([("a", 3), "b"], [("a", 3)], "targets without a weight above 0 are not drawn"),
    ],
)
def test_weights_that_llm_d_does_not_allow_are_taken_as_it_takes_them_and_reported(
    targets: list[str | tuple[str, int]], drawn: list[tuple[str, int]], complaint: str
) -> None:
    made = compiler("a")
    made.put(LLM_D_REWRITES, "team/r", rewrite(rule(*targets)))
    assert rewrites(made) == [((), drawn)]
    assert complaint in made.compile().problems[0].message


def test_rewrites_cannot_stop_a_pool() -> None:
    made = compiler("a")
    made.put(REWRITES, "team/many", rewrite(*[rule("b", models=(f"m{number}",)) for number in range(1001)]))
    assert len(rewrites(made)) == 1000
    assert "1 rules beyond 1000 are left out" in made.compile().problems[0].message
    made.put(REWRITES, "team/many", {**rewrite(), "spec": {"poolRef": {"name": "llama"}, "rules": "text"}})
    assert made.compile().problems[0].message == "InferenceModelRewrite r is left out: spec.rules is no list"
    made.put(REWRITES, "team/many", rewrite(*[{}] * 7))
    assert made.compile().problems[0].message.endswith("; and 2 more")
    # a pool whose engines have no such API
    made = compiler("a", thing=pool(annotation="protocol: V2"))
    made.put(REWRITES, "team/r", rewrite(rule("b")))
    assert rewrites(made) == []
    assert "none is used: " in made.compile().problems[0].message


@pytest.mark.parametrize("spec", ["text", [], {"poolRef": "llama"}, {"poolRef": {"name": "llama"}, "rules": {"a": 1}}])
def test_objects_of_another_shape_leave_the_pool_as_it_is(spec: Any) -> None:  # noqa: ANN401 - of any shape
    made = compiler("a")
    for kind in (REWRITES, LLM_D_REWRITES, "InferenceObjective", LLM_D_OBJECTIVES):
        made.put(kind, "team/odd", {**rewrite(), "apiVersion": "x/v1", "kind": "InferenceObjective", "spec": spec})
    assert rewrites(made) == []
