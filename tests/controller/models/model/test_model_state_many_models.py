# SPDX-License-Identifier: Apache-2.0
"""A Model of many models: the runtime that loads them, what agents and gateways are told, and the status of each."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from controller.kube.reconcile_plan import Apply, Plan
from controller.models.model.model_state import ModelState, ReportedModel
from controller.models.model.reconcile import reconcile

Plain = dict[str, Any]
NOW_S = 1_700_000_000.0
IRIS: Plain = {"name": "iris", "uri": "s3://models/iris", "memory": "1Gi"}
WINE: Plain = {"name": "wine", "uri": "s3://models/wine", "memory": "2Gi", "pinned": True}
LIMITED: Plain = {"config": {"models": {"memory": "4Gi"}}}


def trees(*models: Plain, status: Plain | None = None, **backend: object) -> Plain:
    return {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "trees", "namespace": "default", "uid": "1", "generation": 1},
        "spec": {
            "format": {"name": "sklearn"},
            "models": list(models or (IRIS, WINE)),
            "backends": [{"name": "default", **backend}],
        },
        "status": status or {},
    }


def plan_of(thing: Plain, **more: Any) -> Plan:  # noqa: ANN401 - fields of a ModelState
    return reconcile(ModelState(thing=thing, **more), NOW_S)


def applied(plan: Plan) -> dict[str, Plain]:
    return {one.resource.kind: one.thing for one in plan.actions if isinstance(one, Apply)}


def failure(plan: Plan) -> tuple[str, str]:
    assert plan.status is not None
    return plan.status["failure"]["reason"], plan.status["failure"]["message"]


def declared(plan: Plan) -> Plain:
    found: Plain = json.loads(applied(plan)["ConfigMap"]["data"]["adapters.json"])
    return found


def pod(name: str, phase: str = "Running", **labels: str) -> Plain:
    labels = {"attache.dev/model": "trees", "attache.dev/backend": "default", **labels}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "status": {"phase": phase, "podIP": "10.0.0.1"},
    }


def test_agents_and_gateways_are_told_the_same_models() -> None:
    plan = plan_of(trees(**LIMITED))
    assert declared(plan) == {
        "iris": {"uri": "s3://models/iris", "pinned": False, "memory": 2**30, "format": "sklearn"},
        "wine": {"uri": "s3://models/wine", "pinned": True, "memory": 2**31, "format": "sklearn"},
    }
    server, route = applied(plan)["ModelServer"]["spec"], applied(plan)["ModelRoute"]["spec"]
    assert server["protocol"] == "V2"
    assert server["adapterLoading"] == {
        "port": 9000,
        "memory": "4Gi",
        "adapters": [
            {"name": "iris", "source": "s3://models/iris", "memory": "1Gi"},
            {"name": "wine", "source": "s3://models/wine", "memory": "2Gi", "pinned": True},
        ],
    }
    assert route["loraAdapters"] == ["iris", "wine"]
    # the Model's own name is no model
    assert "modelName" not in route
    assert server["model"] not in route["loraAdapters"]


def test_another_model_changes_no_pod() -> None:
    more = {"name": "digits", "uri": "s3://models/digits", "memory": "1Gi", "format": {"name": "xgboost"}}
    before, after = plan_of(trees(**LIMITED)), plan_of(trees(more, IRIS, WINE, **LIMITED))
    assert "digits" in declared(after)
    assert applied(after)["ModelInfer"] == applied(before)["ModelInfer"]


def test_without_memory_all_are_on_every_server() -> None:
    plan = plan_of(trees({"name": "iris", "uri": "s3://models/iris"}))
    template = applied(plan)["ModelInfer"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    args = template["initContainers"][0]["args"]
    assert not [one for one in args if one.startswith("--max-memory")]
    assert "--idle-unload=7200" in args
    assert "memory" not in applied(plan)["ModelServer"]["spec"]["adapterLoading"]


@pytest.mark.parametrize(
    ("models", "backend", "reason", "words"),
    [
        (
            [{**IRIS, "memory": "5Gi"}],
            LIMITED,
            "InvalidSpec",
            "'iris' needs 5Gi of memory, more than the 4Gi of config.models.memory",
        ),
        ([{"name": "a", "uri": "s3://m/a"}], LIMITED, "InvalidSpec", "'a' has no memory"),
        ([IRIS], {"runtime": "vllm"}, "InvalidSpec", "vllm cannot load them; models need a runtime with multiModel"),
        ([IRIS], {"runtime": "triton"}, "InvalidSpec", "triton reads no format 'sklearn', which 'iris' of models has"),
        ([{**IRIS, "format": {"name": "novel"}}], {}, "NoSupportingRuntime", "no runtime supports format 'novel'"),
        (
            [IRIS, {**WINE, "format": {"name": "onnx"}}],
            {},
            "InvalidSpec",
            "mlserver reads no format 'onnx', which 'wine' of models has; put that into another Model",
        ),
    ],
)
def test_what_no_server_could_load_is_refused_with_what_to_write(
    models: list[Plain], backend: Plain, reason: str, words: str
) -> None:
    plan = plan_of(trees(*models, **backend))
    found, message = failure(plan)
    assert found == reason
    assert words in message
    assert not plan.actions


def test_the_runtime_is_one_that_reads_all_formats() -> None:
    own = {
        "metadata": {"name": "all", "namespace": "default"},
        "spec": {
            "engine": "Triton",
            "multiModel": True,
            "supports": [{"name": name, "autoSelect": True} for name in ("sklearn", "onnx")],
            "config": {"image": "triton"},
            "agent": {"dialect": "Triton"},
        },
    }
    models = [IRIS, {**WINE, "format": {"name": "onnx"}}]
    assert failure(plan_of(trees(*models)))[0] == "InvalidSpec"
    plan = plan_of(trees(*models), runtimes=[own])
    assert plan.status is not None
    assert plan.status["backends"][0]["runtime"] == "ServingRuntime all"


def test_agents_of_running_pods_are_asked_every_ten_seconds() -> None:
    pods = [pod("a"), pod("b"), pod("c", "Pending"), pod("d", **{"attache.dev/purpose": "warm"})]
    plan = plan_of(trees(), pods=pods)
    assert plan.asks_loads_of == {"default/a", "default/b"}
    assert plan.requeue_at_s == NOW_S + 10.0
    one = trees()
    one["spec"] = {"uri": "hf://org/model"}
    assert plan_of(one, pods=pods).requeue_at_s is None


def told(**lists: list[ReportedModel]) -> tuple[list[Plain], Plain]:
    """The status of the models, and the condition."""
    plan = plan_of(trees(), pods=[pod(name) for name in lists], lists={f"default/{k}": v for k, v in lists.items()})
    assert plan.status is not None
    (condition,) = (one for one in plan.status["conditions"] if one["type"] == "ModelsLoadable")
    return plan.status["models"], condition


def test_the_status_says_how_many_servers_have_a_model_and_why_one_has_failed() -> None:
    models, condition = told(
        a=[ReportedModel("iris", "loaded"), ReportedModel("wine", "failed", "wine could not be downloaded: 404")],
        b=[ReportedModel("iris", "unloading"), ReportedModel("wine", "failed", "wine could not be downloaded: 404")],
    )
    assert models == [
        {"name": "iris", "state": "Loaded", "servers": 2},
        {"name": "wine", "state": "Failed", "servers": 0, "message": "wine could not be downloaded: 404"},
    ]
    assert (condition["status"], condition["reason"]) == ("False", "ModelLoadFailed")
    assert condition["message"] == "wine could not be downloaded: 404"


def test_a_model_that_one_server_has_and_another_could_not_load_is_loaded() -> None:
    models, condition = told(a=[ReportedModel("iris", "loaded")], b=[ReportedModel("iris", "failed", "no room")])
    assert models[0] == {"name": "iris", "state": "Loaded", "servers": 1, "message": "no room"}
    assert models[1] == {"name": "wine", "state": "NotLoaded", "servers": 0}
    assert condition["status"] == "True"


def test_an_agents_words_are_bounded_and_only_about_models_of_the_model() -> None:
    models, condition = told(a=[ReportedModel("nobody", "loaded"), ReportedModel("iris", "failed", "x" * 100_000)])
    assert [one["name"] for one in models] == ["iris", "wine"]
    assert len(models[0]["message"]) == len(condition["message"]) == 300


def test_while_no_agent_answers_the_last_status_stays() -> None:
    known = [{"name": "iris", "state": "Loaded", "servers": 2}, {"name": "gone", "state": "Loaded", "servers": 1}]
    plan = plan_of(trees(status={"models": known}), pods=[pod("a")])
    assert plan.status is not None
    assert plan.status["models"] == known[:1]
    # where nothing runs, nothing is loaded
    plan = plan_of(trees(status={"models": known}), pods=[pod("a", "Pending")])
    assert plan.status is not None
    assert [(one["state"], one["servers"]) for one in plan.status["models"]] == [("NotLoaded", 0)] * 2


def test_templates_add_models_by_name() -> None:
    shared = {"models": [{**IRIS, "pinned": True}, {"name": "digits", "uri": "s3://models/digits"}]}
    template = {"metadata": {"name": "shared", "namespace": "default"}, "spec": shared}
    thing = trees(IRIS, WINE)
    thing["spec"]["baseRefs"] = ["shared"]
    found = declared(plan_of(thing, templates=[template]))
    assert found.keys() == {"iris", "wine", "digits"}
    assert found["iris"]["pinned"]


def test_a_broken_model_does_not_make_the_others_unready() -> None:
    children = [copy.deepcopy(one) for one in applied(plan_of(trees())).values()]
    for one in children:
        one["metadata"] |= {"uid": one["kind"], "generation": 1}
        if one["kind"] == "ModelInfer":
            one["status"] = {"observedGeneration": 1, "replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
        elif one["kind"] != "ConfigMap":
            said = {"status": "True", "reason": "Yes", "message": ""}
            one["status"] = {"conditions": [{"type": about, **said} for about in ("Programmed", "Available")]}
    lists = {"default/a": [ReportedModel("iris", "failed", "broken")]}
    plan = plan_of(trees(), children=children, pods=[pod("a")], lists=lists)
    assert plan.status is not None
    states = {one["type"]: one["status"] for one in plan.status["conditions"]}
    assert (states["Ready"], states["ModelsLoadable"]) == ("True", "False")
