# SPDX-License-Identifier: Apache-2.0
"""A group starts whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from controller.api.pod_spec_checks import parse_quantity, resource_requests
from controller.kube.api_resources import MODEL_INFER_ROLES, PODS, SCHEDULER_POD_GROUPS, VOLCANO_POD_GROUPS, ApiResource
from controller.models.model_infer.gang import is_schedulable, total_requests
from controller.models.model_infer.model_infer_state import GangSchedulingApis, NodeCapacity
from tests.model_infer_cluster import Cluster, model_infer, role

GPU = "nvidia.com/gpu"


def engine(gpus: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - any part of a PodSpec
    """A template with so many GPUs, 4 cores and 1 GiB."""
    resources = {"limits": {GPU: gpus}, "requests": {"cpu": "4", "memory": "1Gi"}}
    return {"spec": {"containers": [{"name": "engine", "image": "vllm:1", "resources": resources}], **fields}}


def ganged(replicas: int = 1, **spec: Any) -> Cluster:  # noqa: ANN401 - any field of the spec
    """Groups of one entry pod and one worker of 8 GPUs each, and a router of none."""
    roles = [
        {"name": "all", "entryTemplate": engine(8), "workerReplicas": 1, "workerTemplate": engine(8)},
        {"name": "router", "entryTemplate": engine(0)},
    ]
    return Cluster(model_infer(*roles, replicas=replicas, template={"gang": {}}, **spec))


def node(name: str, gpus: float, **more: Any) -> NodeCapacity:  # noqa: ANN401 - labels, taints
    """A node with cores and memory enough."""
    return NodeCapacity(name=name, free={GPU: gpus, "cpu": 100.0, "memory": 2.0**40, "pods": 100.0}, **more)


@pytest.mark.parametrize(
    ("scheduler", "kind", "served"),
    [
        ("volcano", VOLCANO_POD_GROUPS, GangSchedulingApis(volcano=True)),
        ("gang-scheduler", SCHEDULER_POD_GROUPS, GangSchedulingApis(scheduler_plugins=True)),
    ],
)
def test_a_pod_group_says_how_many_pods_start_together(
    scheduler: str, kind: ApiResource, served: GangSchedulingApis
) -> None:
    cluster = ganged(replicas=2, schedulerName=scheduler)
    cluster.gang = served
    cluster.look()
    assert list(cluster.of(kind)) == ["default/llama-0", "default/llama-1"]
    spec = cluster.of(kind)["default/llama-0"]["spec"]
    assert spec["minMember"] == 3
    assert spec["minResources"] == {"cpu": "12", "memory": str(3 * 2**30), GPU: "16"}
    pod = cluster.pod("llama-0-all-0-1")
    marks = {**pod["metadata"]["labels"], **pod["metadata"].get("annotations", {})}
    assert pod["spec"]["schedulerName"] == scheduler
    assert "llama-0" in (marks.get("scheduling.k8s.io/group-name"), marks.get("scheduling.x-k8s.io/pod-group"))
    cluster.settle()
    cluster.change(replicas=1)
    cluster.settle()
    assert list(cluster.of(kind)) == ["default/llama-0"]


def test_a_pod_group_follows_the_replicas_of_its_roles() -> None:
    cluster = ganged(schedulerName="volcano")
    cluster.gang = GangSchedulingApis(volcano=True)
    cluster.settle()
    cluster.thing["spec"]["template"]["roles"][0]["replicas"] = 2
    cluster.settle()
    assert cluster.of(VOLCANO_POD_GROUPS)["default/llama-0"]["spec"]["minMember"] == 5
    assert cluster.look().actions == ()


def test_fewer_replicas_may_suffice_to_start() -> None:
    cluster = ganged(schedulerName="volcano")
    cluster.gang = GangSchedulingApis(volcano=True)
    cluster.thing["spec"]["template"]["gang"] = {"minRoleReplicas": {"all": 1, "router": 0}}
    cluster.thing["spec"]["template"]["roles"][0]["replicas"] = 4
    cluster.look()
    assert cluster.of(VOLCANO_POD_GROUPS)["default/llama-0"]["spec"]["minMember"] == 2


def test_volcanos_queue_is_taken_from_the_annotation() -> None:
    cluster = ganged(schedulerName="volcano")
    cluster.thing["metadata"]["annotations"] = {"scheduling.volcano.sh/queue-name": "research"}
    cluster.gang = GangSchedulingApis(volcano=True)
    cluster.look()
    assert cluster.of(VOLCANO_POD_GROUPS)["default/llama-0"]["spec"]["queue"] == "research"


def test_kueue_is_told_by_marks_on_pods() -> None:
    cluster = ganged()
    cluster.thing["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    cluster.gang = GangSchedulingApis(kueue=True)
    cluster.look()
    metadata = cluster.pod("llama-0-router-0-0")["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == "llama-0"
    assert metadata["annotations"] == {
        "kueue.x-k8s.io/pod-group-total-count": "3",
        "kueue.x-k8s.io/pod-group-serving": "true",
    }


def test_without_any_of_these_a_group_waits_until_there_is_room_for_all_of_it() -> None:
    """Two nodes: 8 GPUs on one and 7 on the other are not twice 8."""
    cluster = ganged()
    cluster.room = [node("a", 8), node("b", 7)]
    plan = cluster.look()
    assert cluster.names() == []
    assert plan.requeue_at_s == cluster.now_s + 15
    degraded = cluster.condition("Degraded")
    assert degraded["reason"] == "NoRoom"
    assert "group 0 waits until its 3 pods find room together" in degraded["message"]
    assert "8 nvidia.com/gpu" in degraded["message"]
    cluster.room = [node("a", 8), node("b", 8)]
    cluster.look(after_s=15)
    assert len(cluster.names()) == 3


def test_room_is_given_to_one_group_only() -> None:
    cluster = ganged(replicas=2)
    cluster.room = [node("a", 16), node("b", 8)]
    cluster.look()
    assert {one.split("-")[1] for one in cluster.names()} == {"0"}


def test_pods_that_have_no_node_yet_are_counted() -> None:
    cluster = ganged(replicas=1)
    cluster.room = [node("a", 16)]
    cluster.look()
    cluster.change(replicas=2)
    cluster.look(after_s=1)
    assert {one.split("-")[1] for one in cluster.names()} == {"0"}
    cluster.room = [node("a", 32)]
    cluster.look(after_s=1)
    assert {one.split("-")[1] for one in cluster.names()} == {"0", "1"}


def test_where_nobody_looked_for_room_nothing_waits() -> None:
    cluster = ganged()
    cluster.look()
    assert len(cluster.names()) == 3


def test_a_group_that_holds_room_without_starting_gives_it_up_and_waits_longer_each_time() -> None:
    """After 10 minutes, the default of the time-out; then it stays away for 10 and for 20 seconds."""
    cluster = ganged()
    cluster.room = [node("a", 16)]
    for wait_s in (10, 20):
        cluster.look()
        assert len(cluster.names()) == 3
        cluster.run("llama-0-router-0-0", ready=True)
        assert cluster.look(after_s=599).actions == ()
        assert cluster.plan.requeue_at_s == cluster.now_s + 1
        cluster.look(after_s=1)
        assert [one.reason for one in cluster.plan.events] == ["NoRoom"]
        assert all(one.endswith("-") for one in cluster.names())
        cluster.gone()
        cluster.look(after_s=wait_s - 1)
        assert cluster.names() == []
        cluster.now_s += 1


def test_engines_that_an_autoscaler_adds_wait_alone_and_cost_those_that_serve_nothing() -> None:
    roles = [{"name": name, "entryTemplate": engine(8), "scalable": True} for name in ("prefill", "decode")]
    cluster = Cluster(model_infer(*roles, template={"gang": {}}))
    cluster.room = [node("a", 16)]
    cluster.settle()
    cluster.of(MODEL_INFER_ROLES)["default/llama-decode"]["spec"]["replicas"] = 3
    # pending pods are what a cluster's autoscaler adds nodes for
    cluster.room = []
    cluster.look(after_s=1)
    serving, added = ["llama-0-decode-0-0", "llama-0-prefill-0-0"], ["llama-0-decode-1-0", "llama-0-decode-2-0"]
    assert cluster.names() == sorted([*serving, *added])
    cluster.look(after_s=7200)
    assert cluster.names() == sorted([*serving, *added])
    assert cluster.thing["status"]["readyReplicas"] == 1


def test_a_group_of_which_no_pod_has_a_node_holds_nothing() -> None:
    cluster = ganged()
    cluster.look()
    assert cluster.look(after_s=7200).actions == ()


def test_order_of_start_within_a_gang() -> None:
    """Who starts later is not waited for by the scheduler: it is not made before."""
    cluster = ganged(schedulerName="volcano")
    cluster.gang = GangSchedulingApis(volcano=True)
    cluster.thing["spec"]["template"]["roles"][1]["startsAfter"] = ["all"]
    cluster.look()
    assert cluster.of(VOLCANO_POD_GROUPS)["default/llama-0"]["spec"]["minMember"] == 2
    assert cluster.names() == ["llama-0-all-0-0", "llama-0-all-0-1"]


def test_a_role_starts_after_another_is_ready() -> None:
    roles = [role("store"), role("prefill", replicas=2, startsAfter=["store"]), role("decode", startsAfter=["prefill"])]
    cluster = Cluster(model_infer(*roles))
    seen = []
    for _ in range(3):
        cluster.look()
        seen.append(cluster.names()[:])
        assert cluster.look().actions == ()
        cluster.ready()
    assert seen == [
        ["llama-0-store-0-0"],
        ["llama-0-prefill-0-0", "llama-0-prefill-1-0", "llama-0-store-0-0"],
        ["llama-0-decode-0-0", "llama-0-prefill-0-0", "llama-0-prefill-1-0", "llama-0-store-0-0"],
    ]
    # what has started once is not held up again
    cluster.settle()
    cluster.ready("llama-0-store-0-0", yes=False)
    cluster.thing["spec"]["template"]["roles"][1]["replicas"] = 3
    cluster.look()
    assert "llama-0-prefill-2-0" in cluster.names()


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("500m", 0.5), ("1Gi", 2**30), ("1.5k", 1500), ("2e3", 2000), (4, 4), ("1Ki", 1024), ("n/a", 0)],
)
def test_quantities(text: object, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)


def test_what_a_pod_asks_for() -> None:
    """Containers and sidecars together; an init container only where it needs more than they do."""
    spec = {
        "containers": [
            {"resources": {"requests": {"cpu": "500m"}, "limits": {GPU: "2"}}},
            {"resources": {"requests": {"cpu": "1"}}},
        ],
        "initContainers": [
            {"restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}},
            {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}},
        ],
        "overhead": {"cpu": "50m"},
    }
    assert resource_requests(spec) == {"cpu": 1.8, GPU: 2.0, "memory": 2.0**30}
    assert total_requests([spec, spec]) == {"cpu": "3600m", "memory": str(2**31), GPU: "4"}


@pytest.mark.parametrize(
    ("spec", "is_taken"),
    [
        ({}, False),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "gpu", "value": "other"}]}, False),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"kind": "h100"}}, True),
        ({"tolerations": [{"operator": "Exists"}], "nodeSelector": {"kind": "a100"}}, False),
        ({"tolerations": [{"operator": "Exists"}], "affinity": ["In", ["h100"]]}, True),
        ({"tolerations": [{"operator": "Exists"}], "affinity": ["NotIn", ["h100"]]}, False),
    ],
)
def test_which_node_takes_a_pod(spec: dict[str, Any], is_taken: bool) -> None:
    if "affinity" in spec:
        operator, values = spec["affinity"]
        term = {"matchExpressions": [{"key": "kind", "operator": operator, "values": values}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec = {**spec, "affinity": {"nodeAffinity": required}}
    found = node("a", 8, labels={"kind": "h100"}, taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    assert is_schedulable(found, spec) == is_taken


def test_the_gang_changes_no_pod() -> None:
    cluster = ganged()
    cluster.settle()
    before = {key: one["metadata"]["uid"] for key, one in cluster.of(PODS).items()}
    del cluster.thing["spec"]["template"]["gang"]
    cluster.settle()
    assert {key: one["metadata"]["uid"] for key, one in cluster.of(PODS).items()} == before
