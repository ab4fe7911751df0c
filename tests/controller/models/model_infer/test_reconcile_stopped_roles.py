# SPDX-License-Identifier: Apache-2.0
"""Rollouts by role that have stopped: what serves of the old revision goes on serving."""

from __future__ import annotations

from tests.model_infer_cluster import Cluster, model_infer, role, template


def fail(cluster: Cluster, *names: str) -> None:
    """These pods end, and are deleted, and are gone."""
    for one in names:
        cluster.run(one, ready=False, phase="Failed")
    cluster.look(after_s=1)
    cluster.gone(*names)


def test_old_replicas_stay_when_all_new_ones_of_a_stopped_rollout_have_gone() -> None:
    """Of two prefill replicas one may be missing and one too many: two of three become new. Decode waits for them."""
    workers = {"workerReplicas": 1, "workerTemplate": template()}
    prefill = role("prefill", replicas=2, maxUnavailable=1, maxSurge=1, **workers)
    rollout = {"unit": "Role", "maxUnavailable": "100%", "progressDeadline": "10m"}
    cluster = Cluster(model_infer(prefill, role("decode", startsAfter=["prefill"]), recovery="Role", rollout=rollout))
    cluster.settle()
    cluster.change_image("vllm:2")
    for _ in range(3):
        cluster.look(after_s=1)
        cluster.gone()
    new = [f"llama-0-prefill-{replica}-{index}" for replica in (1, 2) for index in (0, 1)]
    assert cluster.names() == ["llama-0-prefill-0-0", "llama-0-prefill-0-1", *new]
    for one in new:
        cluster.run(one, ready=False)
    cluster.look(after_s=601)
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    fail(cluster, *new)
    # the revision has failed, so what is missing comes back as it was
    cluster.settle()
    old = ["llama-0-decode-0-0", *(f"llama-0-prefill-{replica}-{index}" for replica in (0, 1) for index in (0, 1))]
    assert cluster.images() == dict.fromkeys(old, "vllm:1")
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    assert cluster.look(after_s=7200).actions == ()


def test_a_group_that_fails_after_the_stop_comes_back_with_the_old_revision() -> None:
    """Group 1 has the new revision, which never becomes ready; of group 0 the only pod fails later."""
    rollout = {"unit": "Role", "maxUnavailable": 1, "progressDeadline": "10m"}
    cluster = Cluster(model_infer(role(), replicas=2, recovery="Group", rollout=rollout))
    cluster.settle()
    cluster.change_image("vllm:2")
    cluster.look(after_s=1)
    cluster.gone()
    cluster.look(after_s=1)
    cluster.run("llama-1-all-0-0", ready=False)
    cluster.look(after_s=601)
    assert cluster.condition("Progressing")["reason"] == "BlockedByFailedLoad"
    assert cluster.images() == {"llama-0-all-0-0": "vllm:1", "llama-1-all-0-0": "vllm:2"}
    # the new group fails as a whole
    fail(cluster, "llama-1-all-0-0")
    cluster.look(after_s=1)
    assert cluster.images() == {"llama-0-all-0-0": "vllm:1", "llama-1-all-0-0": "vllm:1"}
    cluster.ready()
    assert cluster.look(after_s=7200).actions == ()


def test_a_share_that_is_less_than_one_replica_still_moves() -> None:
    """50% of one replica is none, and there is no surplus: so one may be missing, as of groups."""
    one = role(replicas=1, maxUnavailable="50%", maxSurge=0)
    cluster = Cluster(model_infer(one, rollout={"unit": "Role", "maxUnavailable": 1}))
    cluster.settle()
    cluster.change_image("vllm:2")
    cluster.settle()
    assert cluster.images() == {"llama-0-all-0-0": "vllm:2"}
