# SPDX-License-Identifier: Apache-2.0
"""Small pieces of the manager's work: what is free on nodes, what is told how often, what is read of crashes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from bench.stack.processes import free_ports
from controller.api.pod_spec_checks import parse_quantity, resource_requests
from controller.kube.api_resources import key_of
from controller.kube.conditions import status_to_write, with_failure
from controller.kube.errors import Conflict, ServerError
from controller.kube.event_recorder import EventRecorder
from controller.kube.plan_executor import yielded_fields
from controller.kube.pod_views import trimmed_pod, view_of
from controller.kube.reconcile_plan import KubeEvent, without_paths
from controller.models.kind_reconciler import GatewayLoadSource
from controller.models.model_infer.model_infer_state import PodLoad
from controller.models.model_infer_reconciler import last_crash
from controller.models.node_capacity import LostNodes, node_capacities, trimmed_node
from extproc.api.status_page_contents import LOADS_LABEL

if TYPE_CHECKING:
    from controller.kube.api_resources import ApiResource, Object

SINCE = "2026-11-22T00:00:00Z"


class Server:
    """A client that notes what is written."""

    def __init__(self) -> None:
        self.written: list[Object] = []
        self.error: Exception | None = None

    async def create(self, _: ApiResource, thing: Object) -> Object:
        if self.error is not None:
            raise self.error
        self.written.append(thing)
        return thing


def thing(**status: Any) -> Object:  # noqa: ANN401 - JSON
    metadata = {"name": "a", "namespace": "n", "uid": "u", "generation": 2}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelInfer", "metadata": metadata, "status": status}


def node(name: str = "one", *, ready: str = "True", **spec: Any) -> Object:  # noqa: ANN401 - JSON
    conditions = [{"type": "Ready", "status": ready, "lastTransitionTime": SINCE, "lastHeartbeatTime": SINCE}]
    status = {"allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"}, "conditions": conditions, "images": ["big"]}
    metadata = {"name": name, "creationTimestamp": SINCE, "annotations": {"x": "y"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec, "status": status}


def pod(**more: Any) -> Object:  # noqa: ANN401 - JSON
    metadata = {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "1", "managedFields": ["long"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, **more}


def container(**asked: str) -> dict[str, Any]:
    return {"resources": {"requests": asked}}


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2", 2.0),
        ("250m", 0.25),
        ("1Gi", 2.0**30),
        ("1.5k", 1500.0),
        ("12e6", 12e6),
        (3, 3.0),
        ("?", 0.0),
        ("1E", 1e18),
    ],
)
def test_quantities_in_base_units(text: object, amount: float) -> None:
    assert parse_quantity(text) == pytest.approx(amount)


def test_a_pod_asks_for_its_containers_or_its_largest_init_container() -> None:
    spec = {
        "containers": [container(cpu="1"), {"resources": {"limits": {"cpu": "500m", "nvidia.com/gpu": "2"}}}],
        "initContainers": [container(cpu="3", memory="1Gi"), {**container(cpu="250m"), "restartPolicy": "Always"}],
        "overhead": {"memory": "1Mi"},
    }
    asked = {"cpu": 3.0, "nvidia.com/gpu": 2.0, "memory": 2.0**30 + 2.0**20}
    assert resource_requests(spec) == asked


def test_room_is_what_running_pods_leave_on_nodes_that_take_pods() -> None:
    running = pod(spec={"nodeName": "one", "containers": [container(cpu="1")]}, status={"phase": "Running"})
    ended = pod(spec={"nodeName": "one", "containers": [container(cpu="1")]}, status={"phase": "Succeeded"})
    nodes = [trimmed_node(one) for one in (node(), node("bad", ready="Unknown"), node("shut", unschedulable=True))]
    (found,) = node_capacities(nodes, [view_of(running), view_of(ended)])
    assert (found.name, found.free) == ("one", {"cpu": 3.0, "memory": 8 * 2.0**30, "pods": 9.0})


def test_a_lost_node_is_lost_since_it_was_not_ready_or_since_it_was_missed() -> None:
    nodes = {"good": node("good"), "bad": node("bad", ready="Unknown")}
    lost = LostNodes(nodes.get)
    not_ready_s = 1795305600.0
    assert lost.lost_since(["good", "bad", "gone"], 50.0) == {"bad": not_ready_s, "gone": 50.0}
    assert lost.lost_since(["gone"], 60.0) == {"gone": 50.0}
    nodes["gone"] = node("gone")
    assert lost.lost_since(["gone"], 70.0) == {}
    del nodes["gone"]
    assert lost.lost_since(["gone"], 80.0) == {"gone": 80.0}


def test_what_nobody_reads_is_not_kept() -> None:
    status = {"phase": "Running", "hostIP": "x", "containerStatuses": [{"name": "c", "imageID": "x", "ready": True}]}
    lean = trimmed_pod(pod(spec={"nodeName": "one", "containers": ["long"]}, status=status))
    assert "managedFields" not in lean["metadata"]
    assert lean["spec"] == {"nodeName": "one"}
    assert lean["status"] == {"phase": "Running", "containerStatuses": [{"name": "c", "ready": True}]}
    assert "annotations" not in trimmed_node(node())["metadata"]


@pytest.mark.parametrize(
    ("status", "crash"),
    [
        ({"ready": False, "lastState": {"terminated": {"exitCode": 3}}, "state": {"waiting": {}}}, (2, True)),
        ({"ready": False, "state": {"terminated": {"exitCode": 3}}}, (2, False)),
        ({"ready": True, "lastState": {"terminated": {"exitCode": 3}}}, None),
        ({"ready": False, "state": {"terminated": {"exitCode": 0}}}, None),
        ({"ready": False, "state": {"waiting": {"reason": "ImagePullBackOff"}}}, None),
    ],
)
def test_a_crash_is_a_bad_end_that_is_not_well_again(status: dict[str, Any], crash: tuple[int, bool] | None) -> None:
    found = last_crash(pod(status={"containerStatuses": [{"name": "c", "restartCount": 2, **status}]}))
    assert (found and (found.restarts, found.is_over)) == crash


async def test_the_same_reason_is_told_once_a_minute() -> None:
    server, clock = Server(), [100.0]
    recorder = EventRecorder(server, "manager", lambda: clock[0], lambda *_: None)  # type: ignore[arg-type]
    for seconds in (0, 1, 2, 59):
        clock[0] = 100.0 + seconds
        await recorder.record_events(thing(), [KubeEvent("Warning", "Crashed", "it crashed")])
    await recorder.record_events(thing(), [KubeEvent("Normal", "Ready", "it is ready")])
    clock[0] = 161.0
    await recorder.record_events(thing(), [KubeEvent("Warning", "Crashed", "it crashed")])
    said = [one["message"] for one in server.written]
    assert said == ["it crashed", "it is ready", "it crashed (and 3 more since the last such Event)"]
    server.error = ServerError(500)
    await recorder.record_events(thing(), [KubeEvent("Normal", "Other", "nobody hears of it")])


def test_a_status_is_written_where_it_says_something_new() -> None:
    condition = {"type": "Available", "status": "True", "reason": "Yes", "message": ""}
    status = {"replicas": 2, "groups": {}, "currentRevision": None, "conditions": [condition]}

    def write(before: Object) -> dict[str, Any] | None:
        return status_to_write("ModelInfer", before, status, SINCE)

    first = write(thing())
    assert first is not None
    assert first.keys() == {"replicas", "conditions", "observedGeneration"}
    # what the schema fills in, or another says, is nothing new
    assert write(thing(**first, updatedReplicas=0)) is None
    # what we said once and no longer say goes
    assert write(thing(**first, groups={"Ready": 2})) == first


def test_what_the_server_refuses_is_one_condition_beside_the_others() -> None:
    planned = {"replicas": 1, "conditions": [{"type": "Degraded", "status": "False"}, {"type": "Available"}]}
    said = with_failure(planned, {}, "Degraded", "True", reason="NameTaken", message="rename it")
    assert [one["type"] for one in said["conditions"]] == ["Available", "Degraded"]
    assert said["conditions"][1]["reason"] == "NameTaken"
    assert planned["conditions"][0]["status"] == "False"


def test_of_a_conflict_only_what_may_be_yielded_is() -> None:
    causes = [{"field": ".spec.replicas"}, {"field": ".spec.template.roles"}]
    conflict = Conflict(409, "Conflict", "", details={"causes": causes})
    assert yielded_fields(conflict, [("spec", "replicas"), ("spec", "paused")]) == [("spec", "replicas")]
    before = {"spec": {"replicas": 1, "paused": True}}
    assert without_paths(before, [("spec", "replicas"), ("status", "x")]) == {"spec": {"paused": True}}
    assert before == {"spec": {"replicas": 1, "paused": True}}


class Heard:
    """An informer that has heard these."""

    def __init__(self, *things: Object) -> None:
        self.synced = asyncio.Event()
        self.synced.set()
        self.objects = {key_of(one): one for one in things}


def reports_address(namespace: str, port: int, name: str = "gateway") -> Object:
    """A pod that says that it is a gateway."""
    metadata = {"name": name, "namespace": namespace, "labels": {LOADS_LABEL: str(port)}}
    return {"metadata": metadata, "status": {"podIP": "127.0.0.1", "phase": "Running"}}


def engine(namespace: str) -> Object:
    return {"metadata": {"name": "llama", "namespace": namespace}, "status": {"podIP": "10.0.0.1"}}


async def test_who_calls_himself_a_gateway_speaks_for_his_own_namespace_alone() -> None:
    """A label is anybody's: one pod that never answers must not hold up the drains of all others."""
    silent = free_ports(1)[0]
    theirs, ours = engine("theirs"), engine("ours")
    pods = {key_of(one): one for one in (theirs, ours)}
    async with aiohttp.ClientSession() as http:
        only = Heard(reports_address("theirs", silent))
        asked = GatewayLoadSource(http, only, pods.get)  # type: ignore[arg-type]
        assert await asked.fetch(pods) == {}, "who is not believed may still have requests under way"
        ended = reports_address("attache-system", silent)
        ended["status"]["phase"] = "Succeeded"
        heard = Heard(reports_address("theirs", silent), ended)
        found = await GatewayLoadSource(http, heard, pods.get, {"attache-system"}).fetch(pods)  # type: ignore[arg-type]
        assert found == {"ours/llama": PodLoad(0, 0)}
        heard = Heard(reports_address("attache-system", silent))
        assert await GatewayLoadSource(http, heard, pods.get, {"attache-system"}).fetch(pods) == {}  # type: ignore[arg-type]
        many = Heard(*(reports_address("theirs", silent, f"gateway-{number}") for number in range(1000)))
        asked = GatewayLoadSource(http, many, pods.get)  # type: ignore[arg-type]
        assert await asked.fetch(["theirs/llama"]) == {}, "nobody is asked"


@pytest.mark.parametrize(
    ("phase", "is_known"), [("Pending", True), ("Succeeded", True), ("Failed", True), ("Running", False)]
)
async def test_a_gateway_that_does_not_run_has_nothing_under_way(phase: str, is_known: bool) -> None:
    """Pods that nobody believes and that wait for a node, or have ended, hold up no drain."""
    elsewhere, ours = reports_address("theirs", free_ports(1)[0]), engine("ours")
    elsewhere["status"]["phase"] = phase
    async with aiohttp.ClientSession() as http:
        asked = GatewayLoadSource(http, Heard(elsewhere), {key_of(ours): ours}.get)  # type: ignore[arg-type]
        assert await asked.fetch(["ours/llama"]) == ({"ours/llama": PodLoad(0, 0)} if is_known else {})
