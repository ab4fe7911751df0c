# SPDX-License-Identifier: Apache-2.0
"""What has failed is made anew: as much of it as asked for, after a grace, later each time."""

from __future__ import annotations

from typing import Any

import pytest

from controller.kube.api_resources import timestamp_of
from tests.model_infer_cluster import START_S, Cluster, model_infer, role, template

CRASHED = {"exitCode": 139, "reason": "Error"}


def settled(**spec: Any) -> Cluster:  # noqa: ANN401 - any field of the spec
    """Two groups of prefill (entry and worker) and decode, all ready."""
    roles = [role("prefill", workerReplicas=1, workerTemplate=template()), role("decode")]
    cluster = Cluster(model_infer(*roles, replicas=2, **spec))
    cluster.settle()
    return cluster


def crash(cluster: Cluster, name: str, restarts: int = 1) -> None:
    """The engine has ended and is started again; it is not ready."""
    ended = {**CRASHED, "finishedAt": timestamp_of(cluster.now_s)}
    cluster.run(
        name,
        ready=False,
        restartCount=restarts,
        lastState={"terminated": ended},
        state={"waiting": {"reason": "CrashLoopBackOff"}},
    )


def going(cluster: Cluster) -> list[str]:
    """Names of pods that are being deleted."""
    return [one[:-1] for one in cluster.names() if one.endswith("-")]


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        ("Group", ["llama-1-decode-0-0", "llama-1-prefill-0-0", "llama-1-prefill-0-1"]),
        ("Role", ["llama-1-prefill-0-0", "llama-1-prefill-0-1"]),
        # its kubelet starts the container again
        ("Pod", []),
        ("None", []),
    ],
)
def test_a_crashed_worker_takes_along_what_it_works_with(recovery: str, expected: list[str]) -> None:
    cluster = settled(recovery=recovery)
    crash(cluster, "llama-1-prefill-0-1")
    cluster.look(after_s=1)
    assert going(cluster) == expected
    assert cluster.look(after_s=1).actions == ()
    cluster.settle()
    assert cluster.thing["status"]["readyReplicas"] == 2


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        ("Group", ["llama-1-decode-0-0", "llama-1-prefill-0-0", "llama-1-prefill-0-1"]),
        ("Role", ["llama-1-decode-0-0"]),
        ("Pod", ["llama-1-decode-0-0"]),
        ("None", []),
    ],
)
def test_a_pod_that_has_ended_is_made_anew(recovery: str, expected: list[str]) -> None:
    cluster = settled(recovery=recovery)
    cluster.run("llama-1-decode-0-0", ready=False, phase="Failed")
    cluster.look(after_s=1)
    assert going(cluster) == expected


def test_nothing_of_a_group_is_made_before_all_of_the_old_one_is_gone() -> None:
    cluster = settled(recovery="Group")
    cluster.run("llama-1-decode-0-0", ready=False, phase="Failed")
    cluster.look(after_s=1)
    cluster.gone("llama-1-decode-0-0")
    assert cluster.look(after_s=1).actions == ()
    cluster.gone("llama-1-prefill-0-1")
    assert cluster.look(after_s=1).actions == ()
    cluster.gone()
    cluster.look(after_s=1)
    assert len(cluster.names()) == 6


def test_the_engine_of_a_single_pod_is_left_to_its_kubelet() -> None:
    cluster = settled()
    crash(cluster, "llama-0-decode-0-0", restarts=5)
    assert cluster.look(after_s=3600).actions == ()
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "RuntimeUnhealthy")
    assert degraded["message"] == "pod llama-0-decode-0-0: container engine ended with code 139, 5 restarts"


def test_the_status_tells_the_last_lines_of_the_log_and_the_very_last_one_first() -> None:
    cluster = settled()
    crash(cluster, "llama-0-decode-0-0")
    cluster.log_tails = {"default/llama-0-decode-0-0": "Traceback:\n  a line\ntorch.OutOfMemoryError: 80 GiB\n"}
    cluster.look(after_s=1)
    said = "pod llama-0-decode-0-0: container engine ended with code 139, 1 restarts: torch.OutOfMemoryError: 80 GiB"
    assert cluster.condition("Degraded")["message"] == f"{said}\nbefore that it wrote:\nTraceback:\n  a line"
    assert cluster.thing["status"]["summary"] == f"RuntimeUnhealthy: {said}"
    assert cluster.thing["status"]["groups"] == {"Failed": 1, "Ready": 1}


def test_a_log_does_not_steer_the_terminal_of_who_reads_the_status() -> None:
    cluster = settled()
    crash(cluster, "llama-0-decode-0-0")
    cluster.log_tails = {"default/llama-0-decode-0-0": "a\x1b]0;owned\x07\n\tb\x00"}
    cluster.look(after_s=1)
    assert cluster.condition("Degraded")["message"].endswith(
        "1 restarts: b\ufffd\nbefore that it wrote:\na\ufffd]0;owned\ufffd"
    )
    assert cluster.thing["status"]["summary"].startswith("RuntimeUnhealthy: pod llama-0-decode-0-0: container")
    assert cluster.thing["status"]["groups"] == {"Failed": 1, "Ready": 1}


def test_the_grace_lets_a_pod_recover_by_itself() -> None:
    cluster = settled(template={"restartGracePeriod": "60s", "drainTimeout": "0s"})
    crash(cluster, "llama-1-prefill-0-1")
    plan = cluster.look(after_s=1)
    assert plan.actions == ()
    assert plan.requeue_at_s == cluster.now_s + 59
    cluster.ready()
    assert cluster.look(after_s=59).actions == ()
    crash(cluster, "llama-1-prefill-0-1")
    cluster.look(after_s=60)
    assert going(cluster) == ["llama-1-prefill-0-0", "llama-1-prefill-0-1"]


def test_a_crash_loop_waits_longer_each_time_and_is_told() -> None:
    """At once, then 10, 20, 40 seconds after the last time, and 300 at most."""
    cluster = settled()
    waits = []
    for _ in range(8):
        crashed_s = cluster.now_s
        crash(cluster, "llama-1-prefill-0-1")
        plan = cluster.look()
        while not going(cluster):
            assert plan.requeue_at_s is not None
            plan = cluster.look(after_s=plan.requeue_at_s - cluster.now_s)
        waits.append(cluster.now_s - crashed_s)
        assert [one.reason for one in plan.events if one.type == "Warning"] == ["Recovering"]
        cluster.gone()
        cluster.look()
        assert going(cluster) == []
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    (said,) = cluster.thing["status"]["recoveries"]
    assert (said["name"], said["count"], said["reason"]) == ("1/prefill/0", 8, "RuntimeUnhealthy")


def test_what_has_run_for_ten_minutes_has_recovered() -> None:
    cluster = settled()
    crash(cluster, "llama-1-prefill-0-1")
    cluster.look(after_s=1)
    cluster.settle()
    (said,) = cluster.thing["status"]["recoveries"]
    assert said["count"] == 1
    assert cluster.plan.requeue_at_s is not None
    cluster.look(after_s=cluster.plan.requeue_at_s - cluster.now_s)
    assert cluster.thing["status"]["recoveries"] == []
    assert cluster.plan.requeue_at_s is None


def test_a_lost_node_is_given_half_a_minute_and_its_pods_go_without_it() -> None:
    cluster = settled()
    cluster.pod("llama-1-decode-0-0")["spec"]["nodeName"] = "node-2"
    cluster.lost_nodes = {"node-2": cluster.now_s}
    plan = cluster.look(after_s=1)
    assert plan.actions == ()
    assert plan.requeue_at_s == cluster.now_s + 29
    assert cluster.thing["status"]["readyReplicas"] == 1
    assert cluster.condition("Degraded")["reason"] == "NodeLost"
    cluster.look(after_s=29)
    # deleted with no grace, so gone at once
    assert "llama-1-decode-0-0" not in cluster.names()
    cluster.look(after_s=1)
    assert "llama-1-decode-0-0" in cluster.names()


def test_a_pod_that_goes_on_a_node_that_is_lost_is_not_waited_for() -> None:
    cluster = settled()
    cluster.change(replicas=1)
    cluster.look(after_s=1)
    cluster.look()
    assert len(going(cluster)) == 3
    cluster.lost_nodes = {"node-1": cluster.now_s}
    cluster.look(after_s=30)
    assert going(cluster) == []


def test_an_engine_that_lives_and_does_not_answer_is_made_anew() -> None:
    """It was ready, and is not for 5 minutes."""
    cluster = settled()
    cluster.now_s += 60
    cluster.ready("llama-0-decode-0-0", yes=False)
    assert cluster.look(after_s=299).actions == ()
    assert cluster.plan.requeue_at_s == cluster.now_s + 1
    cluster.look(after_s=1)
    assert going(cluster) == ["llama-0-decode-0-0"]


def test_an_engine_that_takes_an_hour_to_load_is_left_alone() -> None:
    cluster = Cluster(model_infer())
    cluster.look()
    cluster.ready(yes=False)
    assert cluster.look(after_s=3600).actions == ()


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [
        ("Group", ["llama-1-decode-0-0", "llama-1-prefill-0-0", "llama-1-prefill-0-1"]),
        ("Role", ["llama-1-prefill-0-0", "llama-1-prefill-0-1"]),
        ("Pod", ["llama-1-prefill-0-1"]),
    ],
)
def test_a_pod_that_somebody_deletes_takes_along_what_it_works_with(recovery: str, expected: list[str]) -> None:
    cluster = settled(recovery=recovery)
    cluster.pod("llama-1-prefill-0-1")["metadata"]["deletionTimestamp"] = timestamp_of(START_S)
    cluster.look(after_s=1)
    assert going(cluster) == expected
    cluster.settle()
    assert len(cluster.names()) == 6


def test_a_pod_that_vanished_unseen_takes_along_those_that_knew_it() -> None:
    cluster = settled()
    cluster.pod("llama-1-prefill-0-0")["metadata"]["deletionTimestamp"] = timestamp_of(START_S)
    cluster.gone()
    cluster.look(after_s=1)
    assert going(cluster) == ["llama-1-prefill-0-1"]


def test_a_replica_of_which_only_half_could_be_made_is_completed() -> None:
    cluster = Cluster(model_infer(role("all", workerReplicas=1, workerTemplate=template())))
    cluster.look()
    cluster.pod("llama-0-all-0-1")["metadata"]["deletionTimestamp"] = timestamp_of(START_S)
    cluster.gone()
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-all-0-0", "llama-0-all-0-1"]


def test_a_recovered_group_of_an_old_revision_comes_back_as_it_was() -> None:
    cluster = settled(rollout={"partition": 2})
    cluster.change_image("vllm:2", "decode")
    cluster.settle()
    cluster.run("llama-1-decode-0-0", ready=False, phase="Failed")
    cluster.settle()
    assert cluster.images()["llama-1-decode-0-0"] == "vllm:1"


def test_a_pod_that_cannot_be_scheduled_is_told() -> None:
    cluster = Cluster(model_infer())
    cluster.look()
    said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have 8 GPUs"}
    cluster.pod("llama-0-all-0-0")["status"] = {"phase": "Pending", "conditions": [said]}
    cluster.look()
    assert cluster.thing["status"]["summary"] == "Unschedulable: pod llama-0-all-0-0: 0/3 nodes have 8 GPUs"


def test_weights_that_cannot_be_fetched_are_told() -> None:
    cluster = Cluster(model_infer())
    cluster.look()
    cluster.ready(yes=False)
    ended = {"exitCode": 1, "finishedAt": timestamp_of(START_S)}
    cluster.pod("llama-0-all-0-0")["status"]["initContainerStatuses"] = [
        {"name": "weights", "ready": False, "lastState": {"terminated": ended}}
    ]
    cluster.look()
    assert cluster.condition("Degraded")["reason"] == "ModelLoadFailed"


def test_a_pod_that_is_deleted_while_it_fetches_its_weights_has_not_failed() -> None:
    cluster = Cluster(model_infer(replicas=2))
    cluster.look()
    cluster.ready(yes=False)
    cluster.change(replicas=1)
    cluster.look()
    going = next(name for name in cluster.names() if name.endswith("-"))
    ended = {"exitCode": 143, "finishedAt": timestamp_of(START_S)}
    cluster.pod(going.removesuffix("-"))["status"]["initContainerStatuses"] = [
        {"name": "download", "ready": False, "state": {"terminated": ended}}
    ]
    cluster.look()
    assert cluster.condition("Degraded")["status"] == "False"
