# SPDX-License-Identifier: Apache-2.0
"""What a node does with a pod, step by step, in a time that the test makes."""

from __future__ import annotations

from typing import Any

from bench.cluster.node.pod_spec import pod_spec
from bench.cluster.node.pod_state_machine import (
    DeletePod,
    NodeTiming,
    PodStateMachine,
    PodStatusBuilder,
    RunProbe,
    StartProcess,
    StopContainer,
)

TIMING = NodeTiming(restart_s=10, restart_max_s=40, forget_crashes_s=600, pull_s=10, pull_max_s=20)


def machine(containers: list[dict[str, Any]] | None = None, **spec: Any) -> PodStateMachine:  # noqa: ANN401 - JSON
    metadata = {"name": "one", "namespace": "default", "uid": "u"}
    pod = {"metadata": metadata, "spec": {"containers": containers or [{"name": "main", "image": "i"}], **spec}}
    return PodStateMachine(pod_spec(pod), TIMING, 100.0)


def started(one: PodStateMachine, *names: str, now_s: float = 100.0) -> None:
    for name in names:
        one.on_started(name, now_s)


def test_containers_start_together() -> None:
    one = machine([{"name": "a"}, {"name": "b"}])
    assert one.step(100) == [StartProcess("a"), StartProcess("b")]
    assert one.step(100) == [], "each action is returned once"
    assert one.phase == "Pending"
    started(one, "a")
    assert one.phase == "Pending", "one of them has never run"
    started(one, "b")
    assert one.phase == "Running"


def test_init_containers_start_one_after_the_other() -> None:
    one = machine(initContainers=[{"name": "first"}, {"name": "second"}])
    assert one.step(100) == [StartProcess("first")]
    started(one, "first")
    assert one.step(101) == []
    one.on_exit("first", 0, 0, "", 101)
    assert one.step(101) == [StartProcess("second")]
    started(one, "second")
    one.on_exit("second", 0, 0, "", 102)
    assert one.step(102) == [StartProcess("main")]
    assert one.is_initialized


def test_a_sidecar_runs_on_beside_the_others_and_ends_after_them() -> None:
    one = machine(initContainers=[{"name": "side", "restartPolicy": "Always"}])
    assert one.step(100) == [StartProcess("side")]
    started(one, "side")
    assert one.step(100) == [StartProcess("main")]
    started(one, "main")
    one.delete(30)
    assert one.step(101) == [StopContainer("main", 30)]
    one.on_exit("main", 0, 0, "", 102)
    assert one.step(102) == [StopContainer("side", 30)]
    one.on_exit("side", 0, 0, "", 103)
    assert one.step(103) == [DeletePod()]


def test_a_failed_init_container_fails_a_pod_that_never_restarts() -> None:
    one = machine(initContainers=[{"name": "first"}], restartPolicy="Never")
    one.step(100)
    started(one, "first")
    one.on_exit("first", 2, 0, "", 101)
    assert one.phase == "Failed"
    assert one.step(102) == []


def test_crashes_in_a_row_are_waited_for_longer_and_longer() -> None:
    one = machine()
    waits = []
    now = 100.0
    for _ in range(5):
        assert one.step(now) == [StartProcess("main")]
        started(one, "main", now_s=now)
        one.on_exit("main", 1, 0, "", now + 1)
        due = one.wake_at_s()
        assert due is not None
        waits.append(due - now - 1)
        now = due
    assert waits == [0, 10, 20, 40, 40]
    assert one.containers["main"].restarts == 5
    assert one.containers["main"].reason == "CrashLoopBackOff"


def test_crashes_are_forgotten_after_a_long_run() -> None:
    one = machine()
    for began, ended in ((100.0, 101.0), (101.0, 102.0), (112.0, 1000.0)):
        one.step(began)
        started(one, "main", now_s=began)
        one.on_exit("main", 1, 0, "", ended)
    assert one.wake_at_s() == 1000


def test_on_failure_restarts_what_failed_and_nothing_else() -> None:
    one = machine([{"name": "good"}, {"name": "bad"}], restartPolicy="OnFailure")
    one.step(100)
    started(one, "good", "bad")
    one.on_exit("good", 0, 0, "", 101)
    one.on_exit("bad", 1, 0, "", 101)
    assert one.step(101) == [StartProcess("bad")]
    started(one, "bad")
    one.on_exit("bad", 0, 0, "", 102)
    assert one.phase == "Succeeded"


def test_a_missing_image_is_asked_for_again() -> None:
    one = machine()
    one.step(100)
    one.on_start_failed("main", "ErrImagePull", "no such image", 100)
    assert (one.containers["main"].reason, one.wake_at_s()) == ("ErrImagePull", 110)
    assert one.step(105) == []
    assert one.step(110) == [StartProcess("main")]
    one.on_start_failed("main", "ErrImagePull", "no such image", 110)
    assert (one.containers["main"].reason, one.wake_at_s()) == ("ImagePullBackOff", 130)
    assert one.phase == "Pending"


def probed_container(**probes: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    named = {f"{kind}Probe": {"tcpSocket": {"port": 1}, **given} for kind, given in probes.items()}
    return [{"name": "main", **named}]


def test_readiness_follows_its_probe() -> None:
    one = machine(probed_container(readiness={"periodSeconds": 5, "failureThreshold": 2, "initialDelaySeconds": 3}))
    one.step(100)
    started(one, "main")
    assert one.step(100) == []
    assert one.wake_at_s() == 103
    assert one.step(103) == [RunProbe("main", "readiness")]
    assert one.wake_at_s() is None, "it runs"
    one.on_probe_result("main", "readiness", ok=True)
    assert one.containers["main"].is_ready
    for now, ready in ((108, True), (113, False)):
        assert one.step(now) == [RunProbe("main", "readiness")]
        one.on_probe_result("main", "readiness", ok=False)
        assert one.containers["main"].is_ready is ready
    assert one.step(114) == [], "a container that is not ready runs on"


def test_the_startup_probe_comes_before_the_others() -> None:
    one = machine(probed_container(startup={"failureThreshold": 2}, liveness={}, readiness={}))
    one.step(100)
    started(one, "main")
    assert one.step(100) == [RunProbe("main", "startup")]
    one.on_probe_result("main", "startup", ok=False)
    assert one.step(110) == [RunProbe("main", "startup")]
    one.on_probe_result("main", "startup", ok=True)
    assert one.step(110) == [RunProbe("main", "liveness"), RunProbe("main", "readiness")]


def test_a_startup_that_takes_too_long_is_ended() -> None:
    one = machine(probed_container(startup={"failureThreshold": 1}), terminationGracePeriodSeconds=7)
    one.step(100)
    started(one, "main")
    one.step(100)
    one.on_probe_result("main", "startup", ok=False)
    assert one.step(101) == [StopContainer("main", 7)]


def test_a_dead_container_is_stopped_with_the_probes_own_grace() -> None:
    one = machine(probed_container(liveness={"failureThreshold": 1, "terminationGracePeriodSeconds": 2}))
    one.step(100)
    started(one, "main")
    one.step(100)
    one.on_probe_result("main", "liveness", ok=False)
    assert one.step(101) == [StopContainer("main", 2)]
    one.on_exit("main", 137, 9, "", 103)
    assert one.step(103) == [StartProcess("main")]
    assert one.containers["main"].probes == {}, "the next run begins anew"


def test_the_result_of_a_run_that_is_over_does_not_count() -> None:
    one = machine(probed_container(liveness={"failureThreshold": 1}))
    one.step(100)
    started(one, "main")
    one.step(100)
    one.on_exit("main", 1, 0, "", 101)
    one.on_probe_result("main", "liveness", ok=False)
    assert one.step(101) == [StartProcess("main")]


def test_a_pod_that_ends_is_asked_for_its_readiness_only() -> None:
    one = machine(probed_container(liveness={"failureThreshold": 1}, readiness={"failureThreshold": 1}))
    one.step(100)
    started(one, "main")
    one.step(100)
    one.on_probe_result("main", "liveness", ok=True)
    one.on_probe_result("main", "readiness", ok=True)
    one.delete(30)
    assert one.step(110) == [StopContainer("main", 30)]
    one.on_exit("main", 0, 0, "", 111)
    assert one.step(111) == [DeletePod()]
    assert one.step(112) == []


def test_a_deletion_while_a_container_starts_stops_it_once_it_runs() -> None:
    one = machine()
    one.step(100)
    one.delete(30)
    assert one.step(100) == []
    started(one, "main")
    assert one.step(100) == [StopContainer("main", 30)]


def test_a_deletion_before_anything_ran_removes_at_once() -> None:
    one = machine()
    one.delete(30)
    assert one.step(100) == [DeletePod()]


def test_a_shorter_grace_counts_and_a_longer_does_not() -> None:
    one = machine()
    one.step(100)
    started(one, "main")
    one.delete(5)
    one.delete(30)
    assert one.step(100) == [StopContainer("main", 5)]


def test_a_deadline_ends_a_pod() -> None:
    one = machine(activeDeadlineSeconds=50, terminationGracePeriodSeconds=3)
    one.step(100)
    started(one, "main")
    assert one.wake_at_s() == 150
    assert one.step(150) == [StopContainer("main", 3)]
    assert (one.phase, one.reason) == ("Failed", "DeadlineExceeded")


def test_the_status_is_that_of_a_kubelet() -> None:
    one = machine(initContainers=[{"name": "first", "image": "f"}])
    writer = PodStatusBuilder(host_ip="127.0.0.1", pod_ip="127.1.0.1")
    one.step(100)
    before = writer.status({"metadata": {}}, one, 100)
    assert before["phase"] == "Pending"
    assert before["containerStatuses"][0]["state"] == {"waiting": {"reason": "PodInitializing"}}
    started(one, "first")
    one.on_exit("first", 0, 0, "", 101)
    one.step(101)
    started(one, "main", now_s=102.0)
    running = writer.status({"metadata": {}}, one, 102)
    assert {one["type"]: (one["status"], one["lastTransitionTime"][-9:]) for one in running["conditions"]} == {
        "PodReadyToStartContainers": ("True", "00:01:42Z"),
        "Initialized": ("True", "00:01:42Z"),
        "Ready": ("True", "00:01:42Z"),
        "ContainersReady": ("True", "00:01:42Z"),
        "PodScheduled": ("True", "00:01:40Z"),
    }
    assert running["podIPs"] == [{"ip": "127.1.0.1"}]
    again = writer.status({"metadata": {}}, one, 999)
    assert again == running, "times change only with what they are of"


def test_a_readiness_gate_must_hold_too() -> None:
    one = machine(readinessGates=[{"conditionType": "attache.dev/warm"}])
    one.step(100)
    started(one, "main")
    writer = PodStatusBuilder(host_ip="127.0.0.1", pod_ip="127.1.0.1")

    def ready(pod: dict[str, Any]) -> tuple[str, str]:
        found = {one["type"]: one for one in writer.status(pod, one, 100)["conditions"]}
        return found["Ready"]["status"], found["Ready"].get("reason", "")

    assert ready({}) == ("False", "ReadinessGatesNotReady")
    assert ready({"status": {"conditions": [{"type": "attache.dev/warm", "status": "True"}]}}) == ("True", "")
