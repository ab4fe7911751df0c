# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of a Model that are scaled apart: its binding, its ModelInfer, and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from controller.commands.render import render_models
from controller.kube.reconcile_plan import Apply
from controller.models.model.model_state import ModelState
from controller.models.model.reconcile import reconcile

Plain = dict[str, Any]
APART = {"prefill": 1, "decode": 2, "maxPrefill": 6, "maxDecode": 8}


def model(apart: Plain | None = None, *others: Plain, autoscaling: Plain | None = None, **backend: object) -> Plain:
    backends = [{"name": "apart", "disaggregation": apart or APART, **backend}, *others]
    spec = {"uri": "hf://org/llama", "autoscaling": autoscaling or {}, "backends": backends}
    metadata = {"name": "llama", "namespace": "default", "uid": "uid-of-llama", "generation": 1}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec}


def child(thing: Plain, kind: str) -> Plain:
    (made,) = render_models([thing])
    assert made.problem == ""
    return next(dict(one) for one in made.children if one["kind"] == kind)


def binding(thing: Plain) -> Plain:
    found: Plain = child(thing, "AutoscalingPolicyBinding")["spec"]
    return found


def test_each_stage_is_a_target_with_its_own_bounds() -> None:
    found = binding(model())
    assert [(one["name"], one["role"], one["stage"]) for one in found["targets"]] == [
        ("apart-prefill", "prefill", "Prefill"),
        ("apart-decode", "decode", "Decode"),
    ]
    assert [(one["minReplicas"], one["maxReplicas"]) for one in found["targets"]] == [(1, 6), (2, 8)]
    assert {one["ref"]["name"] for one in found["targets"]} == {"llama-apart"}
    assert "ratios" not in found


def test_a_stage_without_upper_bound_keeps_its_engines() -> None:
    found = binding(model({"prefill": 1, "decode": 2, "maxPrefill": 6}))
    assert [(one["minReplicas"], one["maxReplicas"]) for one in found["targets"]] == [(1, 6), (2, 2)]


@pytest.mark.parametrize("autoscaling", [{"scaleToZero": "5m"}, {"policyRef": "p"}])
def test_both_stages_go_to_zero_and_requests_wait_then(autoscaling: Plain) -> None:
    policy = {"metadata": {"name": "p", "namespace": "default"}, "spec": {"scaleToZero": {"idle": "5m"}}}

    def made(apart: Plain) -> tuple[list[int], bool]:
        plan = reconcile(ModelState(thing=model(apart, autoscaling=autoscaling), policies=[policy]), 0.0)
        things = {one.resource.kind: one.thing["spec"] for one in plan.actions if isinstance(one, Apply)}
        targets = things["AutoscalingPolicyBinding"]["targets"]
        return [one["minReplicas"] for one in targets], "activation" in things["ModelServer"]

    assert made({**APART, "decode": 1}) == ([0, 0], True)
    if "policyRef" in autoscaling:
        assert made(APART) == ([1, 2], False)


def test_the_ratio_is_of_prefill_to_decode() -> None:
    found = binding(model({**APART, "ratio": {"min": 0.25, "max": 2}}))
    assert found["ratios"] == [{"numerator": "apart-prefill", "denominator": "apart-decode", "min": 0.25, "max": 2.0}]


def test_a_backend_whose_groups_are_scaled_stands_beside_one_whose_stages_are() -> None:
    found = binding(model(None, {"name": "whole", "maxReplicas": 3}))
    assert [one["name"] for one in found["targets"]] == ["apart-prefill", "apart-decode", "whole"]


def test_its_roles_are_scalable_and_start_with_the_lower_bounds() -> None:
    template = child(model(), "ModelInfer")["spec"]["template"]
    assert [(one["name"], one["replicas"], one["scalable"]) for one in template["roles"]] == [
        ("prefill", 1, True),
        ("decode", 2, True),
    ]
    assert template["gang"] == {"minRoleReplicas": {"prefill": 1, "decode": 2}}


def test_nobody_else_sets_the_number_of_groups() -> None:
    """The autoscaler counts the engines of one group."""
    for thing, expected in ((model(), ()), (model({"prefill": 1}, maxReplicas=2), (("spec", "replicas"),))):
        plan = reconcile(ModelState(thing=thing), 0.0)
        (infer,) = (one for one in plan.actions if isinstance(one, Apply) and one.resource.kind == "ModelInfer")
        assert (infer.thing["spec"]["replicas"], infer.yields) == (1, expected)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (model(maxReplicas=2), "scale the engines of one group; remove maxReplicas"),
        (model(replicas=2), "scale the engines of one group; remove maxReplicas, and replicas above 1"),
        (model(replicas=1), ""),
        (model({**APART, "prefill": 7}), "disaggregation: prefill is above maxPrefill"),
        (model({**APART, "decode": 9}), "disaggregation: decode is above maxDecode"),
        (model({"ratio": {"min": 1, "max": 2}}), "disaggregation.ratio needs maxPrefill or maxDecode"),
        (model({"prefill": 1}), "autoscaling needs a backend with maxReplicas, or with maxPrefill or maxDecode"),
        (model(autoscaling={"scaleToZero": "5m"}), "with scaleToZero write prefill: 1 and decode: 1"),
        (model({**APART, "decode": 1}, autoscaling={"scaleToZero": "5m"}), ""),
        (model(minReplicas=0), "With maxPrefill or maxDecode remove it"),
        (model(None, {"name": "apart-prefill", "maxReplicas": 2}), "scaled under the name 'apart-prefill'; rename"),
    ],
)
def test_bounds_that_cannot_hold_are_refused_with_what_to_write(thing: Plain, words: str) -> None:
    (made,) = render_models([thing])
    assert words in made.problem
    assert bool(words) == bool(made.problem)


def test_the_status_counts_the_engines_of_each_stage() -> None:
    thing = model()
    infer = child(thing, "ModelInfer")
    infer["metadata"] |= {"uid": "uid-of-infer", "generation": 1}
    roles = [
        {"name": "prefill", "replicas": 3, "ready": 2, "updated": 3},
        {"name": "decode", "replicas": 2, "ready": 2, "updated": 2},
    ]
    counts = {"replicas": 1, "readyReplicas": 1, "updatedReplicas": 1}
    infer["status"] = {"observedGeneration": 1, **counts, "roles": roles}
    status = reconcile(ModelState(thing=thing, children=[infer]), 0.0).status
    assert status is not None
    (found,) = status["backends"]
    assert found["roles"] == roles
    assert (status["replicas"], status["readyReplicas"], status["phase"]) == (1, 1, "Loaded")


@pytest.mark.parametrize(("available", "phase"), [("True", "Standby"), ("False", "Pending")])
def test_without_engines_it_is_in_standby_if_it_should_have_none(available: str, phase: str) -> None:
    thing = model({**APART, "decode": 1}, autoscaling={"scaleToZero": "5m"})
    applied = [one.thing for one in reconcile(ModelState(thing=thing), 0.0).actions if isinstance(one, Apply)]
    infer = dict(next(one for one in applied if one["kind"] == "ModelInfer"))
    infer["metadata"] = {**infer["metadata"], "uid": "uid-of-infer", "generation": 1}
    counts = {"replicas": 0, "readyReplicas": 0, "updatedReplicas": 0}
    condition = {"type": "Available", "status": available, "reason": "any", "message": ""}
    infer["status"] = {"observedGeneration": 1, **counts, "conditions": [condition]}
    status = reconcile(ModelState(thing=thing, children=[infer]), 0.0).status
    assert status is not None
    assert (status["phase"], status["transitionStatus"] == "UpToDate") == (phase, available == "True")


def test_a_backend_that_is_not_apart_has_no_stages_in_its_status() -> None:
    thing = model()
    thing["spec"] = {"uri": "hf://org/llama"}
    infer = child(thing, "ModelInfer")
    infer["status"] = {"replicas": 1, "roles": [{"name": "engine", "replicas": 1, "ready": 1, "updated": 1}]}
    status = reconcile(ModelState(thing=thing, children=[infer]), 0.0).status
    assert status is not None
    assert "roles" not in status["backends"][0]
