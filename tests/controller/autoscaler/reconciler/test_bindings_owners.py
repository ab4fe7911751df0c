# SPDX-License-Identifier: Apache-2.0
"""Who may write a target's replicas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.api.autoscaling_binding import ScaleTarget
from controller.autoscaler.reconciler.bindings import (
    TargetClaim,
    autoscaler_trimmer,
    manual_override,
    other_annotated_owner,
    prior_claimant,
    scalable_ref,
    targets_of_other_autoscalers,
)
from controller.autoscaler.reconciler.scalables import (
    KINDS,
    SCALED_BY,
    SCALED_TO,
    SCALER,
    Scalable,
    find_scalable_kind,
    parse_scalable,
)
from controller.kube.api_resources import DEPLOYMENTS

MINE = TargetClaim("2026-11-22T08:00:00Z", "default/a", "1")
WROTE_AT_S = 1_795_341_600.0  # 2026-11-22T10:00:00Z


def deployment(replicas: int, *, writer: str = "", annotations: dict[str, str] | None = None) -> Scalable:
    managed = [
        {"manager": writer, "time": "2026-11-22T10:00:00Z", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
        {"manager": "somebody", "time": "2026-11-22T11:00:00Z", "fieldsV1": {"f:metadata": {"f:labels": {}}}},
    ]
    metadata = {"name": "llama", "namespace": "default", "uid": "7", "resourceVersion": "3"}
    thing: dict[str, Any] = {
        "metadata": {**metadata, "annotations": annotations or {}, "managedFields": managed if writer else []},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "x"}}},
    }
    kind = next(one for one in KINDS if one.resource == DEPLOYMENTS)
    return parse_scalable(kind, thing)


def ours(to: object) -> dict[str, str]:
    return {SCALED_BY: MINE.annotation_value, SCALED_TO: str(to)}


def test_the_older_binding_has_the_right_and_among_equals_the_first_name() -> None:
    younger = TargetClaim("2026-11-22T09:00:00Z", "default/0", "2")
    equal = TargetClaim("2026-11-22T08:00:00Z", "default/b", "3")
    assert prior_claimant(MINE, [younger, equal]) == ""
    assert prior_claimant(younger, [MINE]) == "default/a"
    assert prior_claimant(equal, [MINE, younger]) == "default/a"


def test_a_mark_of_a_binding_that_is_gone_keeps_nobody_off() -> None:
    found = deployment(2, annotations={SCALED_BY: "default/b/9"})
    assert other_annotated_owner(found, MINE, lambda _: True) == "default/b"
    assert other_annotated_owner(found, MINE, lambda _: False) == ""
    assert other_annotated_owner(deployment(2, annotations=ours(2)), MINE, lambda _: True) == ""


@pytest.mark.parametrize(
    ("replicas", "writer", "annotations", "is_held"),
    [
        (7, "kubectl", ours(3), True),
        (3, "kubectl", ours(3), False),  # who wrote the same changed nothing
        (7, SCALER, ours(3), False),  # ours, and the annotation was not written any more
        (7, "kubectl", {}, False),  # as it was when we came
        (7, "", ours(3), True),  # a server that does not say who
        (7, "", ours("7 from 3"), False),  # a leader that ended after it wrote the replicas
        (3, "", ours("7 from 3"), False),  # and one that ended before
        (5, "kubectl", ours("7 from 3"), True),
        (5, "kubectl", ours("many"), False),  # somebody wrote into our annotation
    ],
)
def test_what_somebody_else_wrote_is_held(
    replicas: int, writer: str, annotations: dict[str, str], is_held: bool
) -> None:
    found = deployment(replicas, writer=writer, annotations=annotations)
    hold = manual_override(found, MINE, WROTE_AT_S, hold_s=600.0, now_s=WROTE_AT_S + 599)
    assert (hold is not None) == is_held
    assert manual_override(found, MINE, WROTE_AT_S, hold_s=600.0, now_s=WROTE_AT_S + 600) is None


def test_a_hold_counts_from_when_it_was_written_not_from_when_it_was_seen() -> None:
    found = deployment(7, writer="kubectl", annotations=ours(3))
    hold = manual_override(found, MINE, WROTE_AT_S + 300, hold_s=600.0, now_s=WROTE_AT_S + 300)
    assert hold is not None
    assert (hold.writer, hold.replicas, hold.until_s) == ("kubectl", 7, WROTE_AT_S + 600)


def test_a_role_of_a_model_infer_is_an_object_of_its_own() -> None:
    spec = {"name": "main", "ref": {"kind": "ModelInfer", "name": "llama"}, "maxReplicas": 3}
    groups = msgspec.convert(spec, ScaleTarget)
    role = msgspec.convert({**spec, "role": "decode"}, ScaleTarget)
    assert scalable_ref("default", groups) == ("default", "attache.dev", "ModelInfer", "llama")
    assert scalable_ref("default", role) == ("default", "attache.dev", "ModelInferRole", "llama-decode")
    assert find_scalable_kind("apps", "ReplicaSet") is None


def test_other_autoscalers_are_found_by_what_they_scale() -> None:
    metadata = {"name": "one", "namespace": "default"}
    hpa = autoscaler_trimmer("HorizontalPodAutoscaler")(
        {"metadata": metadata, "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "a"}}}
    )
    keda = autoscaler_trimmer("ScaledObject", "Deployment", "apps")(
        {"metadata": metadata, "spec": {"scaleTargetRef": {"name": "b"}}}
    )
    broken = autoscaler_trimmer("ScaledObject")({"metadata": metadata, "spec": {}})
    assert targets_of_other_autoscalers([hpa, keda, broken]) == {
        ("default", "apps", "Deployment", "a"): "HorizontalPodAutoscaler one",
        ("default", "apps", "Deployment", "b"): "ScaledObject one",
    }
