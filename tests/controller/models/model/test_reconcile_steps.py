# SPDX-License-Identifier: Apache-2.0
"""Transformers and explainers of Models: when the Model is ready, what becomes of them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from controller.models.model.model_state import ModelSettings
from controller.models.model.reconcile import reconcile
from tests.controller.models.model.test_reconcile import (
    NOW_S,
    applied,
    condition,
    deleted,
    model,
    on_server,
    seen,
    told,
)

Plain = dict[str, Any]
STEPS = {"transformer": {"image": "units"}, "explainer": {"image": "reasons"}}
LORA = {"name": "sql", "uri": "hf://org/sql", "pinned": True}
FORMAT = {"format": {"name": "sklearn"}}


def iris(**spec: object) -> Plain:
    return model(**{**FORMAT, **spec})


def names(children: list[Plain]) -> set[str]:
    return {f"{one['kind']} {one['metadata']['name']}" for one in children}


def reported(children: list[Plain], **ready: int) -> list[Plain]:
    """``ready``: replicas of each step; one that is served where it is not 0."""
    found = []
    for one in told(children):
        name = one["metadata"]["name"].removeprefix("llama-")
        if ready.get(name) == 0:
            found += told([{key: value for key, value in one.items() if key != "status"}], ready=0, is_served=False)
        else:
            found.append(one)
    return found


def test_each_step_is_a_modelinfer_and_a_modelserver_and_one_route_is_of_steps() -> None:
    children = on_server(reconcile(seen(iris(**STEPS), []), NOW_S))
    assert names(children) >= {
        *(f"ModelInfer llama-{one}" for one in ("default", "transformer", "explainer")),
        *(f"ModelServer llama-{one}" for one in ("default", "transformer", "explainer")),
        "ModelRoute llama",
        "ModelRoute llama-predictor",
    }
    routes = {one["metadata"]["name"]: one["spec"] for one in children if one["kind"] == "ModelRoute"}
    to = {
        name: [[each["modelServerName"] for each in rule["targetModels"]] for rule in one["rules"]]
        for name, one in routes.items()
    }
    assert to == {"llama": [["llama-explainer"], ["llama-transformer"]], "llama-predictor": [["llama-default"]]}
    assert {name: one.get("callers") for name, one in routes.items()} == {"llama": None, "llama-predictor": "Steps"}


def test_an_explainer_alone_leaves_predictions_to_the_engines() -> None:
    made = applied(reconcile(seen(iris(explainer={"image": "reasons"}), []), NOW_S))
    rules = made["ModelRoute llama"]["spec"]["rules"]
    assert [one["targetModels"][0]["modelServerName"] for one in rules] == ["llama-explainer", "llama-default"]


def test_a_settled_model_with_steps_causes_no_write() -> None:
    thing = iris(**STEPS)
    children = reported(on_server(reconcile(seen(thing, []), NOW_S)))
    second = reconcile(seen(thing, children), NOW_S)
    assert second.actions == ()
    assert condition(second, "Ready")["status"] == "True"
    assert second.status is not None
    assert (second.status["transitionStatus"], second.status["replicas"]) == ("UpToDate", 1)


@pytest.mark.parametrize("step", ["transformer", "explainer"])
def test_a_model_is_ready_only_with_its_steps(step: str) -> None:
    thing = iris(**STEPS)
    children = reported(on_server(reconcile(seen(thing, []), NOW_S)), **{step: 0})
    plan = reconcile(seen(thing, children), NOW_S)
    assert condition(plan, f"{step.capitalize()}Ready")["status"] == "False"
    ready = condition(plan, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", f"{step.capitalize()}NotReady")


def test_steps_that_are_removed_are_deleted_after_the_routes_have_changed() -> None:
    children = reported(on_server(reconcile(seen(iris(**STEPS), []), NOW_S)))
    plan = reconcile(seen(iris(), children), NOW_S)
    assert deleted(plan) == [
        "ModelRoute default/llama-predictor",
        *(f"ModelServer default/llama-{one}" for one in ("explainer", "transformer")),
        *(f"ModelInfer default/llama-{one}" for one in ("explainer", "transformer")),
    ]
    route = applied(plan)["ModelRoute llama"]["spec"]
    assert [one["targetModels"][0]["modelServerName"] for one in route["rules"]] == ["llama-default"]


def test_replicas_that_are_left_out_are_anybodys_and_a_stopped_model_has_none() -> None:
    thing = iris(transformer={"image": "units"})
    children = reported(on_server(reconcile(seen(thing, []), NOW_S)))
    for one in children:
        if one["metadata"]["name"] == "llama-transformer" and one["kind"] == "ModelInfer":
            one["spec"]["replicas"] = 5
    assert reconcile(seen(thing, children), NOW_S).actions == ()
    stopped = applied(reconcile(seen(iris(transformer={"image": "units"}, stop=True), children), NOW_S))
    assert stopped["ModelInfer llama-transformer"]["spec"]["replicas"] == 0


def test_the_address_of_the_gateway_is_the_managers() -> None:
    settings = ModelSettings(steps="gw.example:8081")
    made = applied(reconcile(seen(iris(**STEPS), [], settings=settings), NOW_S))
    (container,) = made["ModelInfer llama-transformer"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"][
        "containers"
    ]
    assert "--predictor_host=gw.example:8081" in container["args"]
    assert "initContainers" not in made["ModelInfer llama-transformer"]["spec"]["template"]["roles"][0]["entryTemplate"]


HOSTILE = "$(HOME) {port} --predictor_host=evil '\"é"


def test_a_hostile_name_stays_one_argument() -> None:
    made = applied(reconcile(seen(iris(servedName=HOSTILE, **STEPS), []), NOW_S))
    (container,) = made["ModelInfer llama-transformer"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"][
        "containers"
    ]
    assert f"--model_name={HOSTILE}" in container["args"]
    hosts = [one for one in container["args"] if one.startswith("--predictor_host")]
    assert hosts == ["--predictor_host=attache-gateway-steps.attache-system.svc"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"transformer": {}}, "transformer names no image"),
        ({"explainer": {"args": ["--x"]}}, "explainer names no image"),
        (
            {"transformer": {"image": "x"}, "backends": [{"name": "transformer"}]},
            "a backend is called 'transformer'",
        ),
        (
            {"transformer": {"image": "x", "colocated": True, "replicas": 2}},
            "transformer.replicas has no effect with colocated",
        ),
        (
            {"transformer": {"image": "x", "colocated": True, "port": 8000}},
            "transformer.port is 8000, where the engine listens",
        ),
        (
            {"transformer": {"image": "x", "colocated": True, "port": 9000}},
            "transformer.port is 9000, where the agent listens",
        ),
        ({"transformer": {"image": "x", "resources": {"limits": 3}}}, "transformer.resources"),
        ({"transformer": {"image": "x", "pod": {"containers": 3}}}, "spec.transformer.pod"),
    ],
)
def test_mistakes_change_nothing_and_say_what_to_write(spec: Plain, message: str) -> None:
    plan = reconcile(seen(iris(**spec), []), NOW_S)
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["failure"]["reason"] == "InvalidSpec"
    assert message in plan.status["failure"]["message"]


def test_a_transformer_of_a_model_with_openais_api_has_that_too_and_no_protocol_of_kserve() -> None:
    made = applied(reconcile(seen(model(transformer={"image": "units"}, adapters=[LORA]), []), NOW_S))
    assert "protocol" not in made["ModelServer llama-transformer"]["spec"]
    infer = made["ModelInfer llama-transformer"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    (container,) = infer["containers"]
    assert not [one for one in container["args"] if one.startswith("--predictor_protocol")]
    # weights and adapters are the engines'
    assert infer.get("volumes", []) == []
    assert made["ModelRoute llama-predictor"]["spec"]["loraAdapters"] == ["sql"]


def test_a_colocated_transformer_is_what_requests_reach_and_the_engine_what_is_drained() -> None:
    made = applied(reconcile(seen(iris(transformer={"image": "units", "colocated": True}), []), NOW_S))
    assert not any("transformer" in name or "predictor" in name for name in made)
    assert made["ModelServer llama-default"]["spec"]["workloadPort"] == {"port": 8080}
    pod = made["ModelInfer llama-default"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    engine, beside = pod["containers"]
    assert (engine["name"], beside["name"]) == ("engine", "transformer-container")
    assert "--predictor_host=localhost:8000" in beside["args"]
    assert engine["lifecycle"] == beside["lifecycle"]
    (agent,) = [one for one in pod["initContainers"] if one["name"] == "agent"]
    assert "--engine=http://127.0.0.1:8000" in agent["args"]
