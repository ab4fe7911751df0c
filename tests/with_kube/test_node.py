# SPDX-License-Identifier: Apache-2.0
"""Pods that are bound to our node are processes: they answer, die, come back and go as pods do."""

from __future__ import annotations

import asyncio
import os
import sys
from subprocess import PIPE, STDOUT
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from bench.cluster.node.in_process_node import Node, gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from controller.kube.api_resources import CONFIG_MAPS, DEPLOYMENTS, NODES, PODS, SECRETS, ApiResource
from controller.kube.client import Client
from controller.kube.errors import Forbidden
from tests.waiting import eventually
from tests.with_kube.kubes import REAL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import Object
    from tests.with_kube.kubes import Kube

QUICK = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.2, pull_max_s=0.4, heartbeat_s=1.0)
SERVE = [sys.executable, "-u", "-m", "http.server", "--bind", "0.0.0.0", "8000"]  # noqa: S104 - becomes the pod's address
PERSISTENT_VOLUMES = ApiResource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
CLAIMS = ApiResource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")


class Place(msgspec.Struct, frozen=True):
    """A node of a test's own, with two GPUs, and a namespace; pods made here go nowhere else."""

    client: Client
    namespace: str
    node: Node

    async def create(self, pod: Object) -> None:
        """Make a pod; a real server refuses the first ones of a namespace for a moment."""

        async def accepted() -> bool:
            try:
                await self.client.create(PODS, pod)
            except Forbidden:
                return False
            return True

        await eventually(accepted)

    def pod(self, name: str = "one", **spec: Any) -> Object:  # noqa: ANN401 - JSON
        """A pod with a container ``main`` that serves HTTP, unless ``spec`` says otherwise."""
        containers = spec.pop("containers", [container()])
        whole = {"containers": containers, "nodeSelector": {"test": self.namespace}, "terminationGracePeriodSeconds": 5}
        metadata = {"name": name, "namespace": self.namespace, "labels": {"app": "test"}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**whole, **spec}}

    async def status(self, name: str = "one") -> dict[str, Any]:
        found = await self.client.get(PODS, name, self.namespace)
        status: dict[str, Any] = found.get("status") or {}
        return status

    async def until(self, holds: Callable[[dict[str, Any]], bool], name: str = "one") -> dict[str, Any]:
        """The status once ``holds`` does."""
        seen: list[dict[str, Any]] = []

        async def ask() -> bool:
            seen.append(await self.status(name))
            return holds(seen[-1])

        try:
            await eventually(ask)
        except TimeoutError:
            pytest.fail(f"the status stays {seen[-1]}")
        return seen[-1]

    def log(self, name: str, container: str = "main") -> str:
        """What a container of a pod has written."""
        return "".join(
            path.read_text() for path in self.node.directory.glob(f"{self.namespace}_{name}/*/{container}.log")
        )


def container(name: str = "main", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"name": name, "image": "attache/host", "command": SERVE, **more}


def shell(script: str, name: str = "main", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {"name": name, "image": "registry.test/attache/host:v1", "command": ["sh", "-c", script], **more}


def condition(status: dict[str, Any], kind: str) -> str:
    return next((one["status"] for one in status.get("conditions") or () if one["type"] == kind), "")


def is_ready(status: dict[str, Any]) -> bool:
    return condition(status, "Ready") == "True"


def only(status: dict[str, Any]) -> dict[str, Any]:
    """The status of the only container."""
    (one,) = status.get("containerStatuses") or [{}]
    found: dict[str, Any] = one
    return found


def waits_for(status: dict[str, Any]) -> str:
    return str(((only(status).get("state") or {}).get("waiting") or {}).get("reason", ""))


async def body(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert answer.status == 200
        return await answer.text()


@pytest_asyncio.fixture(loop_scope="session")
async def place(client: Client, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Place]:
    """A node for this test."""
    spec = gpu_node(f"node-{namespace}", gpus=2, labels={"test": namespace})
    schedules = kube.fake is not None
    async with running_nodes(client, [spec], tmp_path, timing=QUICK, schedules=schedules) as nodes:
        yield Place(client, namespace, nodes[spec.name])
        for pod in (await client.list(PODS, namespace)).items:
            await client.delete(PODS, pod["metadata"]["name"], namespace, grace_s=0)
        await client.delete(NODES, spec.name)


async def test_a_pod_becomes_something_that_answers(place: Place) -> None:
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    main = container(readinessProbe=probe, ports=[{"name": "http", "containerPort": 8000}])
    await place.create(place.pod(containers=[main]))
    status = await place.until(is_ready)
    assert status["phase"] == "Running"
    assert status["podIP"].startswith("127.")
    assert only(status)["state"]["running"]
    assert "Directory listing" in await body(f"http://{status['podIP']}:8000/")
    kinds = {one["type"] for one in status["conditions"]}
    assert {"PodScheduled", "Initialized", "ContainersReady", "Ready"} <= kinds


async def test_an_engine_answers(place: Place) -> None:
    engine = {
        "name": "engine",
        "image": "attache/engine-sim:latest",
        "args": ["--model", "$(MODEL)", "--port", "8000"],
        "env": [{"name": "MODEL", "value": "tiny"}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    await place.create(place.pod(containers=[engine]))
    status = await place.until(is_ready)
    assert '"tiny"' in await body(f"http://{status['podIP']}:8000/v1/models")


async def test_two_engines_with_the_same_port_are_two_engines(place: Place) -> None:
    for name in ("one", "two"):
        engine = {
            "name": "engine",
            "image": "attache/engine-sim",
            "args": ["--model", f"model-{name}", "--port", "8000"],
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
        }
        await place.create(place.pod(name, containers=[engine]))
    for name in ("one", "two"):
        status = await place.until(is_ready, name)
        assert f'"model-{name}"' in await body(f"http://{status['podIP']}:8000/v1/models")


async def test_two_pods_listen_on_the_same_port(place: Place) -> None:
    probe = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    for name in ("one", "two"):
        await place.create(place.pod(name, containers=[container(readinessProbe=probe)]))
    first, second = await place.until(is_ready, "one"), await place.until(is_ready, "two")
    assert first["podIP"] != second["podIP"]


async def test_a_killed_process_is_started_again(place: Place) -> None:
    await place.create(place.pod())
    await place.until(is_ready)
    place.node.kill(f"{place.namespace}/one")
    status = await place.until(lambda one: only(one).get("restartCount") == 1 and is_ready(one))
    ended = only(status)["lastState"]["terminated"]
    assert (ended["exitCode"], ended["signal"], ended["reason"]) == (137, 9, "Error")


async def test_what_crashes_again_and_again_is_backed_off(place: Place) -> None:
    await place.create(place.pod(containers=[shell("exit 3")]))
    status = await place.until(lambda one: waits_for(one) == "CrashLoopBackOff")
    assert only(status)["lastState"]["terminated"]["exitCode"] == 3
    assert not is_ready(status)
    assert status["phase"] == "Running"


async def test_an_unknown_image_is_not_pulled(place: Place) -> None:
    await place.create(place.pod(containers=[{"name": "main", "image": "nobody/nothing:v1"}]))
    status = await place.until(lambda one: waits_for(one) == "ImagePullBackOff")
    assert status["phase"] == "Pending"


async def test_an_image_can_be_made_to_be_missing(place: Place) -> None:
    place.node.faults.break_image_pulls("attache/host")
    await place.create(place.pod())
    await place.until(lambda one: waits_for(one) in ("ErrImagePull", "ImagePullBackOff"))
    place.node.faults.clear()
    await place.until(is_ready)


async def test_a_pod_can_be_made_to_crash(place: Place) -> None:
    key = f"{place.namespace}/one"
    place.node.faults.crash_at_start(key)
    await place.create(place.pod())
    await place.until(lambda one: waits_for(one) == "CrashLoopBackOff")
    place.node.faults.clear()
    await place.until(is_ready)


async def test_work_that_ends_succeeds_or_fails(place: Place) -> None:
    await place.create(place.pod("good", containers=[shell("exit 0")], restartPolicy="Never"))
    await place.create(place.pod("bad", containers=[shell("exit 1")], restartPolicy="Never"))
    good = await place.until(lambda one: one.get("phase") == "Succeeded", "good")
    bad = await place.until(lambda one: one.get("phase") == "Failed", "bad")
    assert only(good)["state"]["terminated"]["reason"] == "Completed"
    assert only(bad)["state"]["terminated"]["exitCode"] == 1


async def test_init_containers_run_before_one_after_the_other(place: Place) -> None:
    volume = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    first = shell("echo first >> /shared/order", "first", **volume)
    second = shell("echo second >> /shared/order", "second", **volume)
    main = shell("cat /shared/order; sleep 60", **volume)
    spec = {"initContainers": [first, second], "volumes": [{"name": "shared", "emptyDir": {}}]}
    await place.create(place.pod(containers=[main], **spec))
    status = await place.until(is_ready)
    assert condition(status, "Initialized") == "True"
    assert [one["state"]["terminated"]["exitCode"] for one in status["initContainerStatuses"]] == [0, 0]
    await eventually(lambda: place.log("one") == "first\nsecond\n")


async def claim(place: Place, name: str) -> None:
    """A claim and the volume that it is bound to, without which a real scheduler waits."""
    volume = f"{place.namespace}-{name}"
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    whole = {"capacity": size, "accessModes": modes, "hostPath": {"path": "/ignored"}, "storageClassName": ""}
    claimed = {"resources": {"requests": size}, "accessModes": modes, "volumeName": volume, "storageClassName": ""}
    for resource, spec, names in (
        (PERSISTENT_VOLUMES, whole, {"name": volume}),
        (CLAIMS, claimed, {"name": name, "namespace": place.namespace}),
    ):
        thing = {"apiVersion": "v1", "kind": resource.kind, "metadata": names, "spec": spec}
        await place.client.create(resource, thing)


async def test_host_paths_and_claims_outlive_their_pods(place: Place, kube: Kube) -> None:
    volumes = [
        {"name": "cache", "hostPath": {"path": "/var/cache/models"}},
        {"name": "claimed", "persistentVolumeClaim": {"claimName": "weights"}},
    ]
    if kube.fake is None:
        await claim(place, "weights")
    mounts = [{"name": "cache", "mountPath": "/cache"}, {"name": "claimed", "mountPath": "/claimed"}]
    for name in ("first", "second"):
        both = shell("echo $HOSTNAME | tee -a /cache/names /claimed/names", volumeMounts=mounts)
        await place.create(place.pod(name, containers=[both], volumes=volumes, restartPolicy="Never"))
        await place.until(lambda one: one.get("phase") == "Succeeded", name)
        await place.client.delete(PODS, name, place.namespace)
    for kept in ("host/var/cache/models/names", f"../claims/{place.namespace}/weights/names"):
        assert (place.node.directory / kept).read_text() == "first\nsecond\n"


async def test_an_init_container_that_fails_keeps_the_pod_pending(place: Place) -> None:
    await place.create(place.pod(initContainers=[shell("exit 1", "first")]))

    def failed(status: dict[str, Any]) -> bool:
        return any(one["restartCount"] > 1 for one in status.get("initContainerStatuses") or ())

    status = await place.until(failed)
    assert status["phase"] == "Pending"
    assert condition(status, "Initialized") == "False"


async def test_a_slow_start_delays_readiness(place: Place) -> None:
    startup = {"exec": {"command": ["test", "-e", "up"]}, "periodSeconds": 1, "failureThreshold": 30}
    await place.create(place.pod(containers=[shell("sleep 1; touch up; sleep 60", startupProbe=startup)]))
    status = await place.until(lambda one: "running" in (only(one).get("state") or {}))
    assert only(status)["started"] is False
    assert not is_ready(status)
    assert only(await place.until(is_ready))["started"] is True


async def test_a_failing_liveness_probe_restarts(place: Place) -> None:
    liveness = {"exec": {"command": ["false"]}, "periodSeconds": 1, "failureThreshold": 1}
    await place.create(place.pod(containers=[shell("exec sleep 60", livenessProbe=liveness)]))
    status = await place.until(lambda one: int(only(one).get("restartCount", 0)) > 0)
    assert only(status)["lastState"]["terminated"]["exitCode"] == 128 + 15


async def test_a_readiness_probe_that_turns_takes_the_pod_out(place: Place) -> None:
    # the probe may come before the container's program
    works = ["sh", "-c", "[ -e began ] && [ ! -e down ]"]
    readiness = {"exec": {"command": works}, "periodSeconds": 1, "failureThreshold": 1}
    await place.create(place.pod(containers=[shell("touch began; sleep 60", readinessProbe=readiness)]))
    await place.until(is_ready)
    (began,) = place.node.directory.glob(f"{place.namespace}_one/*/began")
    began.with_name("down").touch()
    status = await place.until(lambda one: not is_ready(one))
    assert only(status)["restartCount"] == 0


async def test_deletion_is_graceful(place: Place) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo stopping >> notes"]}}}
    script = "trap 'echo bye >> notes; exit 0' TERM; touch began; while true; do sleep 0.05; done"
    await place.create(place.pod(containers=[shell(script, lifecycle=hook)]))
    await place.until(is_ready)
    found: list[Path] = []
    await eventually(lambda: bool(found.extend(place.node.directory.glob(f"{place.namespace}_one/*/began")) or found))
    await place.client.delete(PODS, "one", place.namespace)
    deleted = await place.client.get_or_none(PODS, "one", place.namespace)
    assert deleted is None or "deletionTimestamp" in deleted["metadata"]
    await eventually(lambda: gone(place, "one"))
    assert found[0].with_name("notes").read_text() == "stopping\nbye\n"


async def test_who_ignores_the_signal_is_killed_after_the_grace(place: Place) -> None:
    script = "trap '' TERM; touch began; while true; do sleep 0.1; done"
    await place.create(place.pod(containers=[shell(script)], terminationGracePeriodSeconds=1))
    await place.until(is_ready)
    pid = place.node.workers[f"{place.namespace}/one"].pid("main")
    await place.client.delete(PODS, "one", place.namespace)
    await eventually(lambda: gone(place, "one"))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_pod_deleted_without_grace_is_gone_with_its_process(place: Place) -> None:
    await place.create(place.pod())
    await place.until(is_ready)
    pid = place.node.workers[f"{place.namespace}/one"].pid("main")
    await place.client.delete(PODS, "one", place.namespace, grace_s=0)

    def ended() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    await eventually(ended)


async def test_variables_and_files_come_from_the_cluster(place: Place) -> None:
    names = {"namespace": place.namespace}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", **names}, "data": {"colour": "red"}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s", **names}, "stringData": {"key": "k"}}
    await place.client.create(SECRETS, secret)
    main = shell(
        "echo $COLOUR $KEY $NAME $POD; cat /etc/config/colour; sleep 60",
        env=[
            {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "colour"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        volumeMounts=[{"name": "config", "mountPath": "/etc/config"}],
    )
    await place.create(place.pod(containers=[main], volumes=[{"name": "config", "configMap": {"name": "c"}}]))
    status = await place.until(lambda one: waits_for(one) == "CreateContainerConfigError")
    assert "not found" in only(status)["state"]["waiting"]["message"]
    await place.client.create(CONFIG_MAPS, config)
    status = await place.until(is_ready)
    await eventually(lambda: place.log("one") == f"red k one {status['podIP']}\nred")


@REAL
async def test_a_process_has_its_pods_service_account(place: Place) -> None:
    script = (
        "import asyncio;from controller.kube.cluster_access import *;from controller.kube.client import *;"
        "from controller.kube.api_resources import *\n"
        "async def main():\n"
        "  async with connect(find_access(), manager='pod') as client:\n"
        "    try: await client.list(SECRETS, 'default')\n"
        "    except Exception as error: print(error)\n"
        "asyncio.run(main())"
    )
    main = container(command=[sys.executable, "-u", "-c", script])
    await place.create(place.pod(containers=[main], restartPolicy="Never"))
    await place.until(lambda one: one.get("phase") in ("Succeeded", "Failed"))
    assert f'User "system:serviceaccount:{place.namespace}:default" cannot list' in place.log("one")


async def test_a_pod_waits_for_gpus(place: Place) -> None:
    def asking(gpus: int) -> list[dict[str, Any]]:
        return [container(resources={"limits": {"nvidia.com/gpu": str(gpus)}})]

    await place.create(place.pod("first", containers=asking(2)))
    await place.until(is_ready, "first")
    await place.create(place.pod("second", containers=asking(1)))
    status = await place.until(lambda one: condition(one, "PodScheduled") == "False", "second")
    (why,) = [one for one in status["conditions"] if one["type"] == "PodScheduled"]
    assert why["reason"] == "Unschedulable"
    assert "Insufficient nvidia.com/gpu" in why["message"]
    await place.client.delete(PODS, "first", place.namespace)
    await place.until(is_ready, "second")


async def test_a_lost_node_takes_its_pods_along(place: Place) -> None:
    await place.create(place.pod())
    await place.until(is_ready)
    pid = place.node.workers[f"{place.namespace}/one"].pid("main")
    await place.node.fail()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not is_ready(await place.status())
    node = await place.client.get(NODES, place.node.spec.name)
    assert condition(node["status"], "Ready") == "Unknown"
    assert [one["effect"] for one in node["spec"]["taints"]] == ["NoSchedule"], "it gets no pods"
    await place.node.recover()
    await place.until(is_ready)
    assert "taints" not in (await place.client.get(NODES, place.node.spec.name))["spec"]


@REAL
async def test_a_deployment_replaces_what_is_deleted(place: Place) -> None:
    template = {"metadata": {"labels": {"app": "test"}}, "spec": place.pod()["spec"]}
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "test"}}, "template": template}
    metadata = {"name": "many", "namespace": place.namespace}
    await place.client.apply(
        DEPLOYMENTS, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    )

    async def ready() -> list[str]:
        pods = await place.client.list(PODS, place.namespace, labels="app=test")
        return [one["metadata"]["name"] for one in pods.items if is_ready(one.get("status") or {})]

    async def two_are_ready() -> bool:
        return len(await ready()) == 2

    await eventually(two_are_ready)
    victim = (await ready())[0]
    await place.client.delete(PODS, victim, place.namespace)
    await eventually(lambda: gone(place, victim))
    await eventually(two_are_ready)
    await place.client.delete(DEPLOYMENTS, "many", place.namespace, propagation="Background")

    async def all_gone() -> bool:
        return not (await place.client.list(PODS, place.namespace)).items

    await eventually(all_gone)


async def gone(place: Place, name: str) -> bool:
    return await place.client.get_or_none(PODS, name, place.namespace) is None


@REAL
async def test_kubectl_prints_what_a_container_says(place: Place, plane: ControlPlane, assets: ClusterBinaries) -> None:
    await place.create(place.pod(containers=[shell("for i in 1 2 3; do echo line $i; done; sleep 60")]))
    await place.until(is_ready)
    command = [
        str(assets.binary("kubectl")),
        "--kubeconfig",
        str(plane.kubeconfig),
        "-n",
        place.namespace,
        "logs",
        "one",
    ]

    async def said(*words: str) -> list[str]:
        process = await asyncio.create_subprocess_exec(*command, *words, stdout=PIPE, stderr=STDOUT)
        output, _ = await process.communicate()
        return output.decode().splitlines()

    assert await said() == ["line 1", "line 2", "line 3"]
    assert await said("--tail", "1") == ["line 3"]
    assert "is not valid" in (await said("-c", "other"))[0]
