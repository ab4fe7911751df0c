# SPDX-License-Identifier: Apache-2.0
"""PodSpecs of people who write anything: each is told, none raises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.api.pod_spec_checks import parse_quantity, pod_spec_type_errors, resource_requests
from controller.models.model.model_state import ModelState
from controller.models.model.reconcile import reconcile
from controller.models.model_infer.model_infer_state import NodeCapacity
from tests.controller.models.model.test_reconcile import NOW_S, model
from tests.model_infer_cluster import Cluster, model_infer, role

NAMES = (
    "containers",
    "initContainers",
    "env",
    "resources",
    "limits",
    "requests",
    "name",
    "volumes",
    "ports",
    "overhead",
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=3)
    | st.sampled_from(["engine", "agent", "1e999", "1.2.3"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from([*NAMES, "nodeSelector", "tolerations", "affinity", "$patch"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
POD = st.dictionaries(st.sampled_from([*NAMES, "nodeSelector", "tolerations", "affinity"]), JSON, max_size=3)


@given(POD)
def test_any_template_of_a_model_infer_is_decided(pod: dict[str, Any]) -> None:
    spec = {"containers": [{"name": "engine", "image": "vllm:1"}], **pod}
    workers = {"workerReplicas": 1, "workerTemplate": {"spec": spec}}
    cluster = Cluster(model_infer({"name": "all", "entryTemplate": {"spec": spec}, **workers}, template={"gang": {}}))
    cluster.room = [
        NodeCapacity(name="one", free={"pods": 10.0, "cpu": 8.0}, labels={}, taints=[{"effect": "NoSchedule"}])
    ]
    assert cluster.look().status is not None


@given(POD, POD, POD)
def test_any_pod_of_a_model_its_template_and_its_runtime_is_decided(
    own: dict[str, Any], below: dict[str, Any], preset: dict[str, Any]
) -> None:
    thing = model(backends=[{"name": "a", "config": {"pod": own}}], baseRefs=["base"])
    base = {"metadata": {"name": "base"}, "spec": {"backends": [{"name": "a", "config": {"pod": below}}]}}
    spec = {"engine": "vLLM", "supports": [{"name": "huggingface"}], "pod": preset, "config": {"image": "vllm:1"}}
    observed = ModelState(thing=thing, templates=[base], runtimes=[{"metadata": {"name": "mine"}, "spec": spec}])
    assert reconcile(observed, NOW_S).status is not None


def test_the_message_says_where() -> None:
    spec = {"containers": [{"name": "engine", "env": 5}]}
    assert list(pod_spec_type_errors(spec, "entryTemplate")) == [
        "entryTemplate is no part of a PodSpec: Expected `array | null`, got `int` - at `$.containers[0].env`"
    ]
    cluster = Cluster(model_infer(role("all", entryTemplate={"spec": spec})))
    plan = cluster.look()
    assert plan.actions == ()
    assert plan.status is not None
    assert "containers[0].env" in plan.status["conditions"][0]["message"]


@pytest.mark.parametrize(
    ("text", "amount"), [("1.5", 1.5), ("1e3", 1000.0), ("1e999999", 0.0), ("1.2.3", 0.0), (".", 0.0)]
)
def test_no_quantity_is_too_large_or_too_odd(text: str, amount: float) -> None:
    assert parse_quantity(text) == amount


def test_an_init_container_runs_beside_the_sidecars_before_it() -> None:
    def container(cpu: str, **more: str) -> dict[str, object]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    sidecar, init = container("1", restartPolicy="Always"), container("4")
    assert resource_requests({"containers": [container("2")], "initContainers": [sidecar, init]}) == {"cpu": 5.0}
    assert resource_requests({"containers": [container("2")], "initContainers": [init, sidecar]}) == {"cpu": 4.0}
