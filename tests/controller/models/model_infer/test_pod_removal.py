# SPDX-License-Identifier: Apache-2.0
"""Who has to go is the one that is missed least, and it goes when nothing runs on it any more."""

from __future__ import annotations

from typing import Any

from controller.api.drain_mark import DRAINING
from controller.kube.reconcile_plan import Annotate, Delete
from controller.models.model_infer.model_infer_state import PodLoad
from tests.model_infer_cluster import Cluster, model_infer, role

DRAINS = {"drainTimeout": "5m"}


def settled(*roles: dict[str, Any], **spec: Any) -> Cluster:  # noqa: ANN401 - any field of the spec
    """All ready; pods have 5 minutes to drain."""
    cluster = Cluster(model_infer(*roles, template=DRAINS, **spec))
    cluster.settle()
    return cluster


def load(cluster: Cluster, **in_flight: int) -> None:
    """Requests by group: ``g0=3``."""
    cluster.loads = {f"default/llama-{name[1:]}-all-0-0": PodLoad(count, 0) for name, count in in_flight.items()}


def draining(cluster: Cluster) -> list[str]:
    """Names of pods with the mark."""
    return [
        name
        for name in (one.rstrip("-") for one in cluster.names())
        if DRAINING in cluster.pod(name)["metadata"].get("annotations", {})
    ]


def test_nobody_is_chosen_before_the_gateways_were_asked() -> None:
    cluster = settled(replicas=4)
    cluster.change(replicas=2)
    plan = cluster.look(after_s=1)
    assert plan.actions == ()
    assert plan.asks_loads_of == {f"default/llama-{group}-all-0-0" for group in range(4)}
    assert plan.requeue_at_s == cluster.now_s
    load(cluster, g0=0, g1=7, g2=9, g3=1)
    cluster.look()
    assert draining(cluster) == ["llama-0-all-0-0", "llama-3-all-0-0"]


def test_a_gateway_that_does_not_answer_is_not_waited_for() -> None:
    cluster = settled(replicas=4)
    cluster.change(replicas=2)
    cluster.look(after_s=1)
    cluster.look(after_s=1)
    # nothing is known, so the highest go
    assert draining(cluster) == ["llama-2-all-0-0", "llama-3-all-0-0"]


def test_the_choice_stands_when_the_loads_change() -> None:
    cluster = settled(replicas=3)
    cluster.change(replicas=2)
    load(cluster, g0=5, g1=1, g2=5)
    cluster.look(after_s=1)
    assert draining(cluster) == ["llama-1-all-0-0"]
    load(cluster, g0=0, g1=9, g2=0)
    cluster.look(after_s=1)
    assert draining(cluster) == ["llama-1-all-0-0"]


def test_a_group_goes_when_nothing_runs_on_it() -> None:
    cluster = settled(replicas=2)
    cluster.change(replicas=1)
    load(cluster, g0=2, g1=1)
    plan = cluster.look(after_s=1)
    assert [type(one) for one in plan.actions] == [Annotate]
    load(cluster, g0=2, g1=0)
    # gateways need a moment to hear of the mark
    assert cluster.look(after_s=1).actions == ()
    plan = cluster.look(after_s=2)
    assert [(type(one), one.key) for one in plan.actions] == [(Delete, "default/llama-1-all-0-0")]


def test_a_request_may_run_until_the_time_is_up() -> None:
    cluster = settled(replicas=2)
    cluster.change(replicas=1)
    load(cluster, g0=2, g1=1)
    cluster.look(after_s=1)
    plan = cluster.look(after_s=298)
    assert plan.actions == ()
    assert plan.requeue_at_s == cluster.now_s + 2
    assert [type(one) for one in cluster.look(after_s=2).actions] == [Delete]


def test_what_nobody_knows_the_load_of_may_be_busy() -> None:
    cluster = settled(replicas=2)
    cluster.change(replicas=1)
    cluster.look(after_s=1)
    cluster.look(after_s=1)
    assert draining(cluster) == ["llama-1-all-0-0"]
    assert cluster.look(after_s=299).actions == ()
    assert [type(one) for one in cluster.look(after_s=1).actions] == [Delete]


def test_the_mark_is_taken_off_when_the_group_may_stay() -> None:
    cluster = settled(replicas=2)
    cluster.change(replicas=1)
    load(cluster, g0=2, g1=1)
    cluster.look(after_s=1)
    cluster.change(replicas=2)
    cluster.look(after_s=1)
    assert draining(cluster) == []
    assert cluster.look(after_s=1).actions == ()
    assert cluster.thing["status"]["readyReplicas"] == 2


def test_order_of_those_that_go() -> None:
    """Not ready first, then by deletion cost, then by requests, then by cache, then the highest."""
    cluster = settled(replicas=6)
    cost = "controller.kubernetes.io/pod-deletion-cost"
    cluster.pod("llama-0-all-0-0")["metadata"]["annotations"] = {cost: "-10"}
    cluster.ready("llama-1-all-0-0", yes=False)
    cluster.loads = {
        f"default/llama-{group}-all-0-0": PodLoad(in_flight, cached)
        for group, in_flight, cached in ((0, 9, 9), (1, 9, 9), (2, 1, 500), (3, 1, 100), (4, 1, 500), (5, 8, 0))
    }
    gone = []
    for replicas in (5, 4, 3, 2, 1):
        cluster.change(replicas=replicas)
        before = {one.rstrip("-") for one in cluster.names()}
        for _ in range(4):
            cluster.loads = {
                key: PodLoad(0 if key in marked(cluster) else one.in_flight, one.cached_tokens)
                for key, one in cluster.loads.items()
            }
            cluster.look(after_s=2)
            cluster.gone()
        (one,) = before - set(cluster.names())
        gone.append(int(one.split("-")[1]))
    assert gone == [1, 0, 3, 4, 2]


def marked(cluster: Cluster) -> set[str]:
    """Keys of pods with the mark."""
    return {f"default/{one}" for one in draining(cluster)}


def test_new_groups_take_the_ordinals_that_became_free() -> None:
    cluster = settled(replicas=4)
    cluster.change(replicas=2)
    load(cluster, g0=0, g1=0, g2=5, g3=5)
    for _ in range(4):
        cluster.look(after_s=2)
        cluster.gone()
    assert cluster.names() == ["llama-2-all-0-0", "llama-3-all-0-0"]
    cluster.change(replicas=3)
    cluster.settle()
    assert cluster.names() == ["llama-0-all-0-0", "llama-2-all-0-0", "llama-3-all-0-0"]


def test_prefill_goes_with_its_decode() -> None:
    """The prefill engine of a group that goes has nothing to do, but its decode engine still reads from it."""
    cluster = settled(role("prefill"), role("decode"), replicas=2)
    cluster.change(replicas=1)
    keys = [f"default/llama-{group}-{one}-0-0" for group in (0, 1) for one in ("prefill", "decode")]
    cluster.loads = dict(zip(keys, [PodLoad(4, 0), PodLoad(4, 0), PodLoad(0, 0), PodLoad(1, 0)], strict=True))
    cluster.look(after_s=1)
    assert draining(cluster) == ["llama-1-decode-0-0", "llama-1-prefill-0-0"]
    assert cluster.look(after_s=10).actions == ()
    cluster.loads["default/llama-1-decode-0-0"] = PodLoad(0, 0)
    assert len(cluster.look(after_s=1).actions) == 2


def test_a_rollout_drains_what_it_replaces() -> None:
    cluster = settled(replicas=2)
    cluster.change_image("vllm:2")
    load(cluster, g0=1, g1=1)
    cluster.look(after_s=1)
    assert draining(cluster) == ["llama-1-all-0-0"]
    # the other one is not touched while this one drains
    cluster.look(after_s=60)
    assert draining(cluster) == ["llama-1-all-0-0"]
    load(cluster, g0=1, g1=0)
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-all-0-0", "llama-1-all-0-0-"]


def test_a_pause_lets_a_draining_group_stay() -> None:
    cluster = settled(replicas=2)
    cluster.change_image("vllm:2")
    load(cluster, g0=1, g1=1)
    cluster.look(after_s=1)
    cluster.change(rollout={"paused": True})
    cluster.look(after_s=1)
    assert draining(cluster) == []


def test_one_replica_of_a_role_goes_alone() -> None:
    cluster = settled(role("prefill", replicas=2), role("decode"))
    cluster.thing["spec"]["template"]["roles"][0]["replicas"] = 1
    keys = [f"default/llama-0-prefill-{one}-0" for one in (0, 1)]
    cluster.loads = {keys[0]: PodLoad(0, 0), keys[1]: PodLoad(3, 0)}
    for _ in range(3):
        cluster.look(after_s=3)
        cluster.gone()
    assert cluster.names() == ["llama-0-decode-0-0", "llama-0-prefill-1-0"]
    assert cluster.thing["status"]["readyReplicas"] == 1


def test_what_serves_nobody_is_not_drained() -> None:
    cluster = settled(replicas=2)
    cluster.ready("llama-0-all-0-0", yes=False)
    cluster.change(replicas=1)
    assert [(type(one), one.key) for one in cluster.look(after_s=1).actions] == [(Delete, "default/llama-0-all-0-0")]
