# SPDX-License-Identifier: Apache-2.0
"""A changed template reaches the groups step by step, and never takes more of them than it may."""

from __future__ import annotations

from typing import Any

import pytest

from controller.kube.api_resources import CONTROLLER_REVISIONS
from tests.model_infer_cluster import Cluster, model_infer, role


def settled(*roles: dict[str, Any], **spec: Any) -> Cluster:  # noqa: ANN401 - any field of the spec
    """All ready, of vllm:1."""
    cluster = Cluster(model_infer(*roles, **spec))
    cluster.settle()
    return cluster


def short(cluster: Cluster) -> list[str]:
    """Groups of one pod by ordinal: the version of the image, with a minus if it is going, a question mark if
    unready.
    """
    found = []
    for name, image in cluster.images().items():
        pod = cluster.pod(name)
        ready = any(one["status"] == "True" for one in pod.get("status", {}).get("conditions", ()))
        going = pod["metadata"].get("deletionTimestamp")
        found.append(f"{name.split('-')[1]}:{image.partition(':')[2]}" + ("-" if going else "" if ready else "?"))
    return found


def test_one_after_the_other_from_the_highest() -> None:
    cluster = settled(replicas=3)
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1", "1:1", "2:1-"]
    cluster.look(after_s=1)
    assert cluster.plan.actions == ()
    cluster.gone()
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1", "1:1", "2:2?"]
    assert cluster.look(after_s=60).actions == ()
    cluster.ready()
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1", "1:1-", "2:2"]
    cluster.settle()
    assert short(cluster) == ["0:2", "1:2", "2:2"]


def test_with_surge_nobody_is_missed_and_each_group_starts_once() -> None:
    """Of 3 groups with one more allowed: 3 is made, 2 and 1 are replaced, and 0 just goes."""
    cluster = settled(replicas=3, rollout={"maxUnavailable": 0, "maxSurge": 1})
    cluster.change_image("vllm:2")
    seen = []
    for _ in range(20):
        cluster.look(after_s=1)
        seen.append(short(cluster))
        cluster.gone()
        cluster.look(after_s=1)
        ready = cluster.thing["status"]["readyReplicas"]
        assert ready >= 3
        assert len(cluster.names()) <= 4
        cluster.ready()
    assert seen[:4] == [
        ["0:1", "1:1", "2:1", "3:2?"],
        ["0:1", "1:1", "2:1-", "3:2"],
        ["0:1", "1:1-", "2:2", "3:2"],
        ["0:1-", "1:2", "2:2", "3:2"],
    ]
    assert short(cluster) == ["1:2", "2:2", "3:2"]
    assert cluster.thing["status"]["currentRevision"] == cluster.thing["status"]["updateRevision"]


def test_half_of_the_groups_at_once() -> None:
    cluster = settled(replicas=4, rollout={"maxUnavailable": "50%"})
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1", "1:1", "2:1-", "3:1-"]


def test_a_share_that_is_less_than_one_group_still_moves() -> None:
    cluster = settled(replicas=2, rollout={"maxUnavailable": "10%"})
    cluster.change_image("vllm:2")
    cluster.settle()
    assert short(cluster) == ["0:2", "1:2"]


def test_an_unready_group_goes_first_and_counts_as_missing() -> None:
    cluster = settled(replicas=3)
    cluster.ready("llama-0-all-0-0", yes=False)
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1-", "1:1", "2:1"]


def test_groups_below_the_partition_keep_the_old_revision() -> None:
    cluster = settled(replicas=3, rollout={"partition": 2})
    cluster.change_image("vllm:2")
    cluster.settle()
    assert short(cluster) == ["0:1", "1:1", "2:2"]


def test_a_lost_group_below_the_partition_comes_back_as_it_was() -> None:
    cluster = settled(replicas=3, rollout={"partition": 2})
    cluster.change_image("vllm:2")
    cluster.settle()
    cluster.pod("llama-1-all-0-0")["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    cluster.gone()
    cluster.settle()
    assert short(cluster) == ["0:1", "1:1", "2:2"]
    cluster.change(rollout={"partition": "34%"})
    cluster.settle()
    # 34% of 3, rounded up, are 2 groups
    assert short(cluster) == ["0:1", "1:1", "2:2"]
    cluster.change(rollout={})
    cluster.settle()
    assert short(cluster) == ["0:2", "1:2", "2:2"]


def test_a_paused_rollout_stays_where_it_is() -> None:
    cluster = settled(replicas=3)
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    cluster.gone()
    cluster.look(after_s=1)
    cluster.ready()
    cluster.change(rollout={"paused": True})
    assert cluster.look(after_s=1).actions == ()
    assert short(cluster) == ["0:1", "1:1", "2:2"]
    cluster.change(rollout={"paused": False})
    cluster.settle()
    assert short(cluster) == ["0:2", "1:2", "2:2"]


def test_back_to_the_old_template_before_the_new_one_is_everywhere() -> None:
    cluster = settled(replicas=3)
    first = cluster.thing["status"]["updateRevision"]
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    cluster.gone()
    cluster.look(after_s=1)
    cluster.change_image("vllm:1")
    cluster.settle()
    assert short(cluster) == ["0:1", "1:1", "2:1"]
    assert cluster.thing["status"]["updateRevision"] == first


@pytest.mark.parametrize("unit", ["Group", "Role"])
def test_only_what_changed_rolls(unit: str) -> None:
    cluster = settled(role("prefill"), role("decode"), replicas=2, rollout={"unit": unit})
    before = {name: cluster.pod(name)["metadata"]["uid"] for name in cluster.names()}
    cluster.change_image("vllm:2", "decode")
    cluster.settle()
    kept = {name for name, uid in before.items() if cluster.pod(name)["metadata"]["uid"] == uid}
    assert kept == (set() if unit == "Group" else {"llama-0-prefill-0-0", "llama-1-prefill-0-0"})
    assert cluster.thing["status"]["updatedReplicas"] == 2
    assert [one["updated"] for one in cluster.thing["status"]["roles"]] == [2, 2]


def test_by_role_a_surplus_replica_keeps_the_group_whole() -> None:
    cluster = settled(role("prefill"), role("decode", replicas=2, maxSurge=1), replicas=1, rollout={"unit": "Role"})
    cluster.change_image("vllm:2", "decode")
    for _ in range(12):
        cluster.look(after_s=1)
        cluster.gone()
        cluster.look(after_s=1)
        assert cluster.thing["status"]["readyReplicas"] == 1
        assert len(cluster.names()) <= 4
        cluster.ready()
    assert set(cluster.images().values()) == {"vllm:1", "vllm:2"}
    assert [one["updated"] for one in cluster.thing["status"]["roles"]] == [1, 2]
    assert cluster.look().actions == ()


def test_by_role_where_no_group_may_be_missing_roles_change_by_a_surplus_replica() -> None:
    cluster = settled(
        role("prefill"), role("decode"), replicas=2, rollout={"unit": "Role", "maxUnavailable": 0, "maxSurge": 1}
    )
    cluster.change_image("vllm:2", "decode")
    for _ in range(12):
        cluster.look(after_s=1)
        cluster.gone()
        cluster.look(after_s=1)
        assert cluster.thing["status"]["readyReplicas"] >= 2
        assert len(cluster.names()) <= 5
        cluster.ready()
    cluster.settle()
    assert len(cluster.names()) == 4
    assert cluster.thing["status"]["updatedReplicas"] == 2


def test_by_role_only_so_many_groups_change_at_once() -> None:
    cluster = settled(role("prefill"), role("decode"), replicas=3, rollout={"unit": "Role", "maxUnavailable": 1})
    cluster.change_image("vllm:2", "decode")
    cluster.look(after_s=1)
    assert [one for one in cluster.names() if one.endswith("-")] == ["llama-2-decode-0-0-"]
    cluster.gone()
    cluster.look(after_s=1)
    assert [one for one in cluster.names() if one.endswith("-")] == []
    cluster.ready()
    cluster.look(after_s=1)
    assert [one for one in cluster.names() if one.endswith("-")] == ["llama-1-decode-0-0-"]


def test_roles_change_within_the_skew() -> None:
    """Prefill of 2, decode of 8, 25% apart: decode must have 6 of 8 before prefill takes its second half."""
    cluster = settled(
        role("prefill", replicas=2),
        role("decode", replicas=8),
        replicas=1,
        rollout={"unit": "Role", "maxSkew": "25%"},
    )
    cluster.change_image("vllm:2")
    widest = 0.0
    for _ in range(30):
        cluster.look(after_s=1)
        cluster.gone()
        cluster.look(after_s=1)
        cluster.ready()
        images = cluster.images()
        share = {
            name: sum(image == "vllm:2" for pod, image in images.items() if f"-{name}-" in pod) / count
            for name, count in (("prefill", 2), ("decode", 8))
        }
        widest = max(widest, abs(share["prefill"] - share["decode"]))
    assert share == {"prefill": 1.0, "decode": 1.0}
    # after the first step of both, 1/2 and 1/8; without a bound it would be 2/2 and 2/8
    assert widest == 0.375


def test_a_removed_role_goes_and_a_new_one_comes() -> None:
    for unit in ("Group", "Role"):
        cluster = settled(role("prefill"), role("decode"), rollout={"unit": unit})
        cluster.thing["spec"]["template"]["roles"] = [role("decode"), role("embed")]
        cluster.settle()
        assert cluster.names() == ["llama-0-decode-0-0", "llama-0-embed-0-0"]


def until_stopped(cluster: Cluster) -> None:
    """The new revision is made somewhere, and never becomes ready."""
    cluster.change_image("vllm:2")
    for _ in range(3):
        cluster.look(after_s=1)
        cluster.gone()
    # 30 minutes, the default of progressDeadline
    cluster.look(after_s=1800)


def test_a_revision_that_never_becomes_ready_stops_and_the_old_one_serves() -> None:
    cluster = settled(replicas=3)
    until_stopped(cluster)
    assert short(cluster) == ["0:1", "1:1", "2:2?"]
    progressing = cluster.condition("Progressing")
    assert (progressing["status"], progressing["reason"]) == ("False", "BlockedByFailedLoad")
    assert cluster.condition("Available")["status"] == "True"
    assert cluster.condition("Degraded")["reason"] == "BlockedByFailedLoad"
    assert [one.reason for one in cluster.plan.events] == ["BlockedByFailedLoad"]
    assert cluster.look(after_s=60).events == ()
    # an old group that fails now comes back as it was
    cluster.pod("llama-0-all-0-0")["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    cluster.gone()
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1?", "1:1", "2:2?"]


def test_a_template_without_any_replica_is_rolled_out_at_once_and_written_no_more() -> None:
    cluster = settled(replicas=2)
    for one in cluster.thing["spec"]["template"]["roles"]:
        one["replicas"] = 0
    cluster.change_image("vllm:2")
    cluster.settle()
    assert cluster.names() == []
    assert cluster.condition("Progressing")["reason"] == "UpToDate"
    # twice the deadline
    assert cluster.look(after_s=3600).actions == ()


def test_a_stopped_rollout_stays_stopped_when_its_only_new_group_has_gone() -> None:
    rollout = {"maxUnavailable": 0, "maxSurge": 1, "progressDeadline": "10m"}
    cluster = Cluster(model_infer(role(), recovery="Group", rollout=rollout))
    cluster.settle()
    cluster.change_image("vllm:2")
    cluster.look()
    cluster.run("llama-1-all-0-0", ready=False)
    cluster.look(after_s=601)
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    cluster.run("llama-1-all-0-0", ready=False, phase="Failed")
    cluster.look(after_s=1)
    cluster.gone()
    cluster.look(after_s=1)
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    assert cluster.names() == ["llama-0-all-0-0"]
    assert cluster.look(after_s=3600).actions == ()


def test_a_stopped_rollout_goes_on_when_the_group_becomes_ready_after_all() -> None:
    cluster = settled(replicas=3)
    until_stopped(cluster)
    cluster.ready()
    cluster.settle()
    assert short(cluster) == ["0:2", "1:2", "2:2"]
    assert cluster.condition("Progressing")["reason"] == "UpToDate"


def test_a_stopped_rollout_is_mended_by_the_next_template() -> None:
    cluster = settled(replicas=3)
    until_stopped(cluster)
    cluster.change_image("vllm:3")
    cluster.settle()
    assert short(cluster) == ["0:3", "1:3", "2:3"]


@pytest.mark.parametrize(("replicas", "surge"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_a_failed_rollout_goes_back_if_asked_to(replicas: int, surge: int) -> None:
    rollout = {"onFailure": "RollBack", "maxSurge": surge, "maxUnavailable": 1 - surge}
    cluster = settled(replicas=replicas, rollout=rollout)
    until_stopped(cluster)
    cluster.settle()
    assert set(cluster.images().values()) == {"vllm:1"}
    assert len(cluster.names()) == replicas
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    status = cluster.thing["status"]
    assert status["currentRevision"] != status["updateRevision"]
    # it is not tried again by itself
    assert cluster.look(after_s=86400).actions == ()


def test_what_failed_is_tried_again_when_it_is_asked_for_again() -> None:
    cluster = settled(replicas=2, rollout={"onFailure": "RollBack"})
    until_stopped(cluster)
    cluster.settle()
    cluster.change_image("vllm:1")
    cluster.settle()
    assert cluster.condition("Progressing")["reason"] == "UpToDate"
    cluster.change_image("vllm:2")
    cluster.settle()
    assert set(cluster.images().values()) == {"vllm:2"}


def test_a_pause_does_not_count_towards_the_deadline() -> None:
    cluster = settled(replicas=3)
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    cluster.change(rollout={"paused": True})
    cluster.look(after_s=7200)
    assert cluster.condition("Progressing")["reason"] == "Paused"
    cluster.change(rollout={"paused": False})
    cluster.look(after_s=1)
    assert cluster.condition("Progressing")["reason"] == "InProgress"
    cluster.look(after_s=1)
    assert cluster.condition("Progressing")["reason"] == "InProgress"


def test_a_crash_long_after_a_canary_does_not_undo_it() -> None:
    cluster = settled(replicas=3, rollout={"partition": 2, "onFailure": "RollBack"})
    cluster.change_image("vllm:2")
    cluster.settle()
    cluster.look(after_s=86400)
    cluster.ready("llama-2-all-0-0", yes=False)
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1", "1:1", "2:2?"]
    assert cluster.condition("Progressing")["reason"] == "InProgress"


def test_old_revisions_are_kept_to_go_back_to() -> None:
    cluster = settled(replicas=1, revisionHistoryLimit=2)
    for version in range(2, 7):
        cluster.change_image(f"vllm:{version}")
        cluster.settle()
    numbers = sorted(one["revision"] for one in cluster.of(CONTROLLER_REVISIONS).values())
    # of 6, the one in use and two before
    assert numbers == [4, 5, 6]


def test_a_rollout_is_told_when_it_begins_and_when_it_is_done() -> None:
    cluster = settled(replicas=2)
    cluster.change_image("vllm:2")
    seen = []
    for _ in range(8):
        seen += [one.reason for one in cluster.look(after_s=1).events if one.reason.startswith("Rollout")]
        cluster.gone()
        cluster.ready()
    assert seen == ["RolloutStarted", "RolloutDone"]
    cluster.ready("llama-0-all-0-0", yes=False)
    assert cluster.look(after_s=1).events == ()


def test_a_revision_that_could_not_be_made_yet_has_not_failed() -> None:
    """The only group goes for an hour, and with it the deadline of 30 minutes; then the new one has 30 minutes."""
    cluster = settled(replicas=1, rollout={"onFailure": "RollBack"})
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    assert short(cluster) == ["0:1-"]
    cluster.look(after_s=1805)
    cluster.look(after_s=1795)
    assert cluster.condition("Progressing")["reason"] == "InProgress"
    cluster.gone()
    cluster.look(after_s=1)
    assert short(cluster) == ["0:2?"]
    cluster.look(after_s=1799)
    assert cluster.condition("Progressing")["reason"] == "InProgress"
    cluster.look(after_s=1)
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
