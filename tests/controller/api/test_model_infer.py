# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a ModelInfer that no schema finds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.api.model_infer import ModelInfer, validation_errors
from controller.kube.api_resources import MODEL_INFER_ROLES
from extproc.api.quantities import decode_quantity
from tests.model_infer_cluster import Cluster, model_infer, role, template

WORKERS = {"workerReplicas": 1, "workerTemplate": template()}


def found(*roles: dict[str, Any], name: str = "llama", **spec: Any) -> list[str]:  # noqa: ANN401 - any field
    """Mistakes of such a ModelInfer."""
    thing = model_infer(*roles, name=name, **spec)
    document = {"metadata": {"name": name}, "spec": thing["spec"]}
    return list(validation_errors(msgspec.convert(document, ModelInfer, dec_hook=decode_quantity)))


def test_a_plain_one_has_none() -> None:
    assert found(role("prefill", **WORKERS), role("decode", startsAfter=["prefill"])) == []


def test_names_of_pods_must_be_host_names() -> None:
    """``-001-all-01-0`` has 13 characters, so 50 are left."""
    assert found(name="a" * 50) == []
    (said,) = found(name="a" * 51)
    assert said == (
        "pods of role all would have names of 64 characters, and a host name has 63 at most; "
        "use a name or a role's name that is 1 shorter"
    )


def test_pods_are_counted_before_any_is_planned() -> None:
    """A million groups of a million pods are refused by arithmetic: nothing is made of them, not even in memory."""
    assert found(role("all", replicas=100), replicas=100) == []
    (said,) = found(role("all", replicas=101), replicas=100)
    assert said.startswith("100 groups of 101 pods are 10100, and one ModelInfer has 10000 at most")
    assert found(role("all", replicas=1_000_000, workerReplicas=1000, workerTemplate=template()), replicas=1_000_000)


def test_a_role_that_is_scaled_too_far_is_told() -> None:
    cluster = Cluster(model_infer(role("all", scalable=True)))
    cluster.look()
    cluster.of(MODEL_INFER_ROLES)["default/llama-all"]["spec"]["replicas"] = 1_000_000
    plan = cluster.look()
    assert plan.actions == ()
    assert "1 groups of 1000000 pods" in plan.status["conditions"][0]["message"]


@pytest.mark.parametrize("name", ["llama-3.1", "3-llama"])
def test_workers_find_each_other_by_dns(name: str) -> None:
    assert found(name=name) == []
    (said,) = found(role(**WORKERS), name=name)
    assert "begins with a letter" in said


def test_roles_that_wait_for_each_other() -> None:
    (said,) = found(role("a", startsAfter=["b"]), role("b", startsAfter=["a"]), role("c"))
    assert said == "a, b wait for each other by startsAfter, so none of them would start; leave one out"


def test_a_pod_without_containers() -> None:
    assert found({"name": "a", "entryTemplate": {"spec": {}}}) == ["entryTemplate of role a has no containers"]


def test_nothing_is_done_for_an_object_with_a_mistake() -> None:
    cluster = Cluster(model_infer(name="a" * 60))
    assert cluster.look().actions == ()
    assert cluster.condition("Accepted")["reason"] == "InvalidSpec"
    assert cluster.thing["status"]["summary"].startswith("InvalidSpec: pods of role all")
