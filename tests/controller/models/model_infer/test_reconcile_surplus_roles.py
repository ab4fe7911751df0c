# SPDX-License-Identifier: Apache-2.0
"""Roles that change one by one while no group may be unavailable."""

from __future__ import annotations

from tests.model_infer_cluster import Cluster, model_infer, role


def test_where_a_share_of_few_groups_lets_none_be_missing_a_role_changes_by_a_surplus_replica() -> None:
    rollout = {"unit": "Role", "maxUnavailable": "50%", "maxSurge": 1}
    cluster = Cluster(model_infer(role(), rollout=rollout))
    cluster.settle()
    cluster.change_image("vllm:2")
    cluster.look()
    assert cluster.names() == ["llama-0-all-0-0", "llama-0-all-1-0"]
    cluster.settle()
    assert cluster.images() == {"llama-0-all-1-0": "vllm:2"}


def test_a_rollout_by_role_is_no_failure_of_the_group() -> None:
    rollout = {"unit": "Role", "maxUnavailable": 1}
    cluster = Cluster(model_infer(role("one"), role("two"), rollout=rollout, recovery="Group"))
    cluster.settle()
    cluster.change_image("vllm:2", "two")
    cluster.look()
    assert cluster.names() == ["llama-0-one-0-0", "llama-0-two-0-0-"]
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-one-0-0", "llama-0-two-0-0-"]
    assert cluster.plan.events == ()


def test_a_surplus_replica_that_fails_leaves_the_group_that_serves_without_it() -> None:
    """Of one group none may be missing (50% of 1 is 0), so a second replica is made beside the first."""
    rollout = {"unit": "Role", "maxUnavailable": "50%", "maxSurge": 1}
    cluster = Cluster(model_infer(role("one"), rollout=rollout, recovery="Group"))
    cluster.settle()
    cluster.change_image("vllm:2")
    cluster.look()
    assert cluster.names() == ["llama-0-one-0-0", "llama-0-one-1-0"]
    cluster.run("llama-0-one-1-0", ready=False, phase="Failed")
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-one-0-0", "llama-0-one-1-0-"]
    cluster.gone()
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-one-0-0", "llama-0-one-1-0"]
