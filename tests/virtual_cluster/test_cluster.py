# SPDX-License-Identifier: Apache-2.0
"""The virtual cluster itself: pods live, fail and end as on a real one, and a manager sees late and dies at any
call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controller.kube.api_resources import MODEL_INFERS, NODES, PODS, Object, key_of
from controller.kube.reconcile_plan import Action, Annotate, Create, Delete, Plan
from controller.models.model_infer import names
from tests.fake_api.answers import ApiError
from tests.virtual_cluster.cluster import VirtualCluster
from tests.virtual_cluster.engine_pod import CRASHES, GOOD, MISSING, NEVER_READY
from tests.virtual_cluster.manager import perform
from tests.virtual_cluster.requests import is_ready

if TYPE_CHECKING:
    from controller.models.model_infer.model_infer_state import ModelInferState
    from tests.virtual_cluster.manager import ReconcileRecord

ENTRY = {names.ENTRY: "true", names.MODEL_INFER: "one"}


def reconcile(observed: ModelInferState, now_s: float) -> Plan:  # noqa: ARG001 - as reconcilers are called
    """As many pods as replicas, and no more."""
    replicas = observed.thing["spec"]["replicas"]
    pods = {one["metadata"]["name"]: one for one in observed.pods}
    wanted = [f"one-{number}" for number in range(replicas)]
    actions: list[Action] = [Create(PODS, pod(name, owner=observed.thing)) for name in wanted if name not in pods]
    actions += [Delete(PODS, key_of(one), one["metadata"]["uid"]) for name, one in pods.items() if name not in wanted]
    ready = sum(map(is_ready, pods.values()))
    conditions = [{"type": "Available", "status": str(ready == replicas), "reason": "Counted", "message": ""}]
    return Plan(actions=tuple(actions), status={"replicas": len(pods), "conditions": conditions})


class Notes:
    """What the manager did."""

    def __init__(self) -> None:
        self.looks: list[ReconcileRecord] = []
        self.actions: list[Action] = []
        self.statuses = 0

    def record_reconcile(self, record: ReconcileRecord) -> None:
        self.looks.append(record)

    def before_action(self, _: ReconcileRecord, action: Action) -> None:
        self.actions.append(action)

    def wrote_status(self, _: str) -> None:
        self.statuses += 1


def pod(name: str, image: str = GOOD, *, owner: Object | None = None) -> Object:
    metadata: dict[str, Any] = {"name": name, "namespace": "default", "labels": {**ENTRY, names.ROLE_REPLICA: name}}
    if owner is not None:
        ids = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        metadata["ownerReferences"] = [
            {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelInfer", "controller": True, **ids}
        ]
    probe = {"httpGet": {"port": 8000, "path": "/health"}}
    asks = {"limits": {"nvidia.com/gpu": "1"}}
    container = {"name": "engine", "image": image, "readinessProbe": probe, "resources": asks}
    return {"metadata": metadata, "spec": {"containers": [container], "terminationGracePeriodSeconds": 60}}


def infer(replicas: int) -> Object:
    template = {"roles": [{"name": "all", "entryTemplate": {"spec": pod("x")["spec"]}}]}
    return {"metadata": {"name": "one", "namespace": "default"}, "spec": {"replicas": replicas, "template": template}}


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def cluster(notes: Notes) -> VirtualCluster:
    one = VirtualCluster(1, reconcile, notes)
    for name in ("a", "b"):
        one.nodes.add(name, {"cpu": "8", "pods": "20", "nvidia.com/gpu": "4"})
    return one


def the(cluster: VirtualCluster, name: str) -> Object:
    found = cluster.server.find(PODS, f"default/{name}")
    assert found is not None
    return found


def container_of(one: Object) -> dict[str, Any]:
    status: dict[str, Any] = one["status"]["containerStatuses"][0]
    return status


def test_a_pod_is_bound_started_and_ready(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    cluster.run_for(1)
    assert the(cluster, "one-0")["spec"]["nodeName"] in ("a", "b")
    cluster.run_for(100)
    assert is_ready(the(cluster, "one-0"))


def test_a_pod_waits_where_no_node_has_room_and_says_why(cluster: VirtualCluster) -> None:
    for number in range(9):
        cluster.server.create(PODS, pod(f"one-{number}"))
    cluster.run_for(10)
    waiting = [one for one in cluster.server.pods() if not one["spec"].get("nodeName")]
    assert len(waiting) == 1
    assert waiting[0]["status"]["conditions"][0]["message"] == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    cluster.nodes.add("c", {"cpu": "8", "pods": "20", "nvidia.com/gpu": "4"})
    cluster.run_for(10)
    assert all(one["spec"].get("nodeName") for one in cluster.server.pods())


def test_an_engine_that_crashes_backs_off(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0", CRASHES))
    cluster.run_for(600)
    status = container_of(the(cluster, "one-0"))
    assert status["restartCount"] in range(4, 9)
    assert status["lastState"]["terminated"]["exitCode"] == 1


@pytest.mark.parametrize(("image", "running"), [(NEVER_READY, True), (MISSING, False)])
def test_an_engine_may_never_be_ready(cluster: VirtualCluster, image: str, *, running: bool) -> None:
    cluster.server.create(PODS, pod("one-0", image))
    cluster.run_for(3600)
    assert not is_ready(the(cluster, "one-0"))
    assert ("running" in container_of(the(cluster, "one-0"))["state"]) == running


def test_an_engine_that_hangs_is_running_and_not_ready(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    cluster.run_for(100)
    cluster.nodes.living()[0].hang()
    cluster.run_for(1000)
    found = the(cluster, "one-0")
    assert not is_ready(found)
    assert "running" in container_of(found)["state"]


def test_a_deleted_pod_stays_until_its_requests_have_ended_or_its_grace(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    cluster.run_for(100)
    cluster.requests.flow(each_s=0.5, until_s=cluster.clock.now_s + 20)
    cluster.run_for(20)
    uid = the(cluster, "one-0")["metadata"]["uid"]
    assert cluster.requests.in_flight(uid) > 0
    cluster.server.delete(PODS, "default/one-0")
    cluster.run_for(1)
    assert "deletionTimestamp" in the(cluster, "one-0")["metadata"]
    cluster.run_for(61)
    assert cluster.server.find(PODS, "default/one-0") is None
    assert all(cut.why == "stopped" for cut in cluster.requests.cuts)


def test_a_lost_node_is_noticed_its_pods_are_not_ready_and_come_back_with_it(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    cluster.run_for(100)
    node = the(cluster, "one-0")["spec"]["nodeName"]
    cluster.nodes.lose(node, back_after_s=100, rebooted=True)
    cluster.run_for(41)
    assert not is_ready(the(cluster, "one-0"))
    cluster.run_for(200)
    assert is_ready(the(cluster, "one-0"))
    assert container_of(the(cluster, "one-0"))["restartCount"] == 1


def test_a_node_that_never_returns_takes_its_pods_along(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    cluster.run_for(100)
    node = the(cluster, "one-0")["spec"]["nodeName"]
    cluster.nodes.lose(node, back_after_s=None, rebooted=False)
    cluster.run_for(400)
    # evicted, but its kubelet cannot say that it has ended
    assert "deletionTimestamp" in the(cluster, "one-0")["metadata"]
    cluster.run_for(600)
    assert cluster.server.find(PODS, "default/one-0") is None
    assert cluster.server.find(NODES, node) is None


def test_a_manager_brings_about_what_the_object_says(cluster: VirtualCluster, notes: Notes) -> None:
    cluster.manager.start()
    cluster.server.create(MODEL_INFERS, infer(3))
    cluster.run_for(300)
    thing = cluster.server.find(MODEL_INFERS, "default/one")
    assert thing is not None
    assert thing["spec"]["recovery"] == "Role"
    assert [one["metadata"]["name"] for one in cluster.server.pods()] == ["one-0", "one-1", "one-2"]
    assert thing["status"]["conditions"][0]["status"] == "True"
    assert len(notes.actions) == 3
    written = notes.statuses
    cluster.run_for(3600)
    assert notes.statuses == written


def test_what_a_manager_wrote_is_not_decided_again_before_it_is_seen(cluster: VirtualCluster, notes: Notes) -> None:
    cluster.faults.lags = {"pods": 5.0}
    cluster.manager.start()
    cluster.server.create(MODEL_INFERS, infer(3))
    cluster.run_for(300)
    assert len(notes.actions) == 3


@pytest.mark.parametrize("calls", [0, 1, 2, 3, 100])
def test_another_manager_goes_on_where_one_was_killed(cluster: VirtualCluster, calls: int) -> None:
    cluster.manager.start()
    cluster.server.create(MODEL_INFERS, infer(3))
    cluster.manager.kill_after(calls, back_after_s=5.0)
    cluster.run_for(0.3)
    assert cluster.manager.is_running == (calls > 4)
    cluster.run_for(300)
    assert cluster.manager.is_running
    assert len(cluster.server.pods()) == 3


def test_what_is_made_after_its_owner_has_gone_is_collected(cluster: VirtualCluster) -> None:
    owner = cluster.server.create(MODEL_INFERS, infer(1))
    cluster.server.delete(MODEL_INFERS, "default/one")
    cluster.server.create(PODS, pod("one-0", owner=owner))
    cluster.run_for(60)
    assert cluster.server.pods() == []


def test_calls_that_fail_are_made_again(cluster: VirtualCluster) -> None:
    cluster.faults.refused, cluster.faults.lost = 0.3, 0.3
    cluster.manager.start()
    cluster.server.create(MODEL_INFERS, infer(6))
    cluster.run_for(600)
    assert len(cluster.server.pods()) == 6


def test_an_annotation_is_for_one_uid_only(cluster: VirtualCluster) -> None:
    cluster.server.create(PODS, pod("one-0"))
    action = Annotate(PODS, "default/one-0", "another", annotations={"a": "b"})
    with pytest.raises(ApiError):
        perform(cluster.server, action)


def test_the_same_seed_is_the_same_history() -> None:
    ends = []
    for _ in range(2):
        notes = Notes()
        cluster = VirtualCluster(7, reconcile, notes)
        cluster.nodes.add("a", {"cpu": "8", "pods": "20", "nvidia.com/gpu": "4"})
        cluster.faults.refused = 0.2
        cluster.manager.start()
        cluster.server.create(MODEL_INFERS, infer(3))
        cluster.run_for(400)
        ends.append((cluster.server.pods(), [record.at_s for record in notes.looks]))
    assert ends[0] == ends[1]
