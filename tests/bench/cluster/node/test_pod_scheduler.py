# SPDX-License-Identifier: Apache-2.0
"""Where a pod goes when our own scheduler decides."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cluster.node.pod_scheduler import PodUnschedulable, choose_node, node_capacities, pod_resource_requests


def node(name: str, gpus: int = 2, *, ready: str = "True", **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {
        "metadata": {"name": name, "labels": {"name": name}},
        "spec": spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "pods": "3", "cpu": "4"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod(gpus: int = 0, on: str = "", phase: str = "Pending", **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    whole = {"containers": [{"name": "main", "resources": {"limits": limits}}], **spec}
    return {
        "metadata": {"name": "p"},
        "spec": {**whole, **({"nodeName": on} if on else {})},
        "status": {"phase": phase},
    }


def chosen(one: dict[str, Any], nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> str:
    return choose_node(one, node_capacities(nodes, pods), len(nodes))


def test_a_pod_goes_where_gpus_are_left() -> None:
    nodes = [node("a"), node("b")]
    assert chosen(pod(2), nodes, [pod(1, on="a")]) == "b"
    assert chosen(pod(1), nodes, [pod(1, on="a")]) == "b", "fewest pods first"
    assert chosen(pod(2), nodes, [pod(2, on="a", phase="Succeeded"), pod(2, on="b")]) == "a"


def test_what_fits_nowhere_is_said_as_kube_scheduler_says_it() -> None:
    nodes = [node("a"), node("b", gpus=8, ready="Unknown")]
    with pytest.raises(PodUnschedulable) as error:
        chosen(pod(3), nodes, [])
    assert str(error.value) == "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) were not ready."
    with pytest.raises(PodUnschedulable, match="no nodes"):
        chosen(pod(), [], [])


def test_selectors_taints_and_the_number_of_pods_count() -> None:
    tainted = node("b", taints=[{"key": "gpu", "value": "yes", "effect": "NoSchedule"}])
    nodes = [node("a"), tainted]
    with pytest.raises(PodUnschedulable, match="untolerated taint"):
        chosen(pod(nodeSelector={"name": "b"}), nodes, [])
    tolerating = [{"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}]
    assert chosen(pod(nodeSelector={"name": "b"}, tolerations=tolerating), nodes, []) == "b"
    assert chosen(pod(nodeSelector={"name": "b"}, tolerations=[{"operator": "Exists"}]), nodes, []) == "b"
    with pytest.raises(PodUnschedulable, match="Too many pods"):
        chosen(pod(), [node("a")], [pod(on="a") for _ in range(3)])
    with pytest.raises(PodUnschedulable, match="not ready"):
        chosen(pod(), [node("a", unschedulable=True)], [])


def test_a_pod_asks_for_the_sum_of_its_containers_or_its_largest_init_container() -> None:
    def asking(cpu: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}, "limits": {"cpu": "64"}}}

    one = {"spec": {"containers": [asking("500m"), asking("1")], "initContainers": [asking("1"), asking("2")]}}
    assert pod_resource_requests(one) == {"cpu": 2.0, "pods": 1.0}
