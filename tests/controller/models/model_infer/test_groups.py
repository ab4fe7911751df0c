# SPDX-License-Identifier: Apache-2.0
"""Groups are made, named, scaled and left alone."""

from __future__ import annotations

import pytest

from controller.kube.api_resources import CONTROLLER_REVISIONS, PODS, SERVICES
from controller.models.model_infer import names
from tests.model_infer_cluster import Cluster, model_infer, role, template


def pair() -> list[dict[str, object]]:
    """Prefill of two pods, and two decodes of one."""
    return [
        role("prefill", workerReplicas=1, workerTemplate=template("worker:1")),
        role("decode", replicas=2),
    ]


def test_a_group_has_all_pods_of_all_roles() -> None:
    cluster = Cluster(model_infer(*pair(), replicas=2))
    cluster.look()
    assert cluster.names() == [
        f"llama-{group}-{one}" for group in (0, 1) for one in ("decode-0-0", "decode-1-0", "prefill-0-0", "prefill-0-1")
    ]
    assert cluster.images()["llama-0-prefill-0-0"] == "vllm:1"
    assert cluster.images()["llama-0-prefill-0-1"] == "worker:1"
    assert list(cluster.of(SERVICES)) == ["default/llama-0-prefill-0", "default/llama-1-prefill-0"]
    assert len(cluster.of(CONTROLLER_REVISIONS)) == 1


def test_a_worker_knows_where_its_entry_is() -> None:
    cluster = Cluster(model_infer(*pair()))
    cluster.look()
    pod = cluster.pod("llama-0-prefill-0-1")
    env = {one["name"]: one["value"] for one in pod["spec"]["containers"][0]["env"]}
    assert env == {
        "ENTRY_ADDRESS": "llama-0-prefill-0-0.llama-0-prefill-0.default.svc",
        "GROUP_SIZE": "2",
        "WORKER_INDEX": "1",
        "GROUP_INDEX": "0",
        "ROLE_NAME": "prefill",
        "ROLE_REPLICA_INDEX": "0",
        "LWS_LEADER_ADDRESS": "llama-0-prefill-0-0.llama-0-prefill-0.default.svc",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    }
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("llama-0-prefill-0-1", "llama-0-prefill-0")
    service = cluster.of(SERVICES)["default/llama-0-prefill-0"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_pods_are_owned_and_labelled() -> None:
    cluster = Cluster(model_infer(*pair()))
    cluster.look()
    entry, worker = cluster.pod("llama-0-prefill-0-0")["metadata"], cluster.pod("llama-0-prefill-0-1")["metadata"]
    (owner,) = entry["ownerReferences"]
    assert owner == {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "ModelInfer",
        "name": "llama",
        "uid": "uid-of-llama",
        "controller": True,
        "blockOwnerDeletion": True,
    }
    place = {names.GROUP: "0", names.ROLE: "prefill", names.ROLE_REPLICA: "0"}
    assert {names.MODEL_INFER: "llama", names.ENTRY: "true", names.WORKER_INDEX: "0", **place}.items() <= (
        entry["labels"].items()
    )
    assert names.ENTRY not in worker["labels"]
    assert worker["labels"][names.WORKER_INDEX] == "1"


def test_one_pod_of_each_group_is_counted_by_autoscalers() -> None:
    cluster = Cluster(model_infer(*pair(), replicas=2))
    cluster.settle()
    assert counted(cluster) == ["llama-0-prefill-0-0", "llama-1-prefill-0-0"]
    assert cluster.thing["status"]["labelSelector"] == "attache.dev/model-infer=llama,attache.dev/scale-unit=true"


def test_another_pod_is_counted_when_the_counted_role_is_scaled_to_nothing() -> None:
    cluster = Cluster(model_infer(*pair(), replicas=2))
    cluster.settle()
    cluster.thing["spec"]["template"]["roles"][0]["replicas"] = 0
    cluster.settle()
    assert counted(cluster) == ["llama-0-decode-0-0", "llama-1-decode-0-0"]


def counted(cluster: Cluster) -> list[str]:
    """Pods with the label of the scale unit."""
    return [
        one["metadata"]["name"] for one in cluster.of(PODS).values() if names.SCALE_UNIT in one["metadata"]["labels"]
    ]


def test_a_settled_object_gets_no_action_and_the_same_status() -> None:
    cluster = Cluster(model_infer(*pair(), replicas=3))
    cluster.settle()
    first = cluster.look(after_s=3600)
    second = cluster.look(after_s=3600)
    assert (first.actions, first.events, first.requeue_at_s) == ((), (), None)
    assert first == second


def test_scaling_out_makes_the_lowest_free_ordinals() -> None:
    cluster = Cluster(model_infer(replicas=1))
    cluster.settle()
    cluster.change(replicas=3)
    cluster.settle()
    assert cluster.names() == ["llama-0-all-0-0", "llama-1-all-0-0", "llama-2-all-0-0"]


def test_scaling_in_deletes_and_tidies() -> None:
    cluster = Cluster(model_infer(*pair(), replicas=3))
    cluster.settle()
    cluster.change(replicas=1)
    cluster.settle()
    assert {one.split("-")[1] for one in cluster.names()} == {"0"}
    assert list(cluster.of(SERVICES)) == ["default/llama-0-prefill-0"]


def test_a_group_that_is_still_going_is_waited_for() -> None:
    cluster = Cluster(model_infer(replicas=2))
    cluster.settle()
    cluster.change(replicas=1)
    cluster.look(after_s=1)
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-all-0-0", "llama-1-all-0-0-"]
    cluster.change(replicas=2)
    assert cluster.look(after_s=1).actions == ()
    cluster.gone()
    cluster.look(after_s=1)
    assert cluster.names() == ["llama-0-all-0-0", "llama-1-all-0-0"]


@pytest.mark.parametrize("field", ["replicas", "drainTimeout", "recovery", "scheduler", "order"])
def test_what_is_no_part_of_a_pod_rolls_nothing(field: str) -> None:
    cluster = Cluster(model_infer(*pair(), replicas=2))
    cluster.settle()
    before = cluster.thing["status"]["updateRevision"]
    match field:
        case "replicas":
            cluster.thing["spec"]["template"]["roles"][1]["replicas"] = 2
        case "drainTimeout":
            cluster.thing["spec"]["template"]["drainTimeout"] = "9m"
        case "order":
            cluster.thing["spec"]["template"]["roles"].reverse()
        case "recovery":
            cluster.change(recovery="Group")
        case _:
            cluster.change(schedulerName="volcano")
    assert cluster.look(after_s=1).actions == ()
    assert cluster.thing["status"]["updateRevision"] == before


def test_a_wrong_spec_is_told_and_what_runs_runs_on() -> None:
    cluster = Cluster(model_infer(replicas=2))
    cluster.settle()
    cluster.thing["spec"]["recovery"] = "Perhaps"
    assert cluster.look(after_s=1).actions == ()
    assert cluster.condition("Accepted")["reason"] == "InvalidSpec"


def test_an_object_that_is_deleted_makes_nothing_more() -> None:
    cluster = Cluster(model_infer(replicas=2))
    cluster.thing["metadata"]["deletionTimestamp"] = "2026-11-22T00:00:00Z"
    assert cluster.look().actions == ()


def test_the_pod_spec_passes_through() -> None:
    spec = {
        "priorityClassName": "high",
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]}},
        "terminationGracePeriodSeconds": 900,
    }
    cluster = Cluster(model_infer({"name": "all", "entryTemplate": template(**spec)}))
    cluster.look()
    assert spec.items() <= cluster.pod("llama-0-all-0-0")["spec"].items()


def test_pods_have_time_enough_to_drain() -> None:
    cluster = Cluster(model_infer(template={"drainTimeout": "90s"}))
    cluster.look()
    assert cluster.pod("llama-0-all-0-0")["spec"]["terminationGracePeriodSeconds"] == 90


def test_groups_that_come_and_go_are_told_once() -> None:
    cluster = Cluster(model_infer(replicas=2))
    (made,) = cluster.look().events
    assert (made.reason, made.message.partition(" of ")[0]) == ("GroupsCreated", "groups 0, 1")
    assert cluster.look().events == ()
    cluster.settle()
    cluster.change(replicas=1)
    cluster.look()
    told = [one for one in cluster.look().events if one.reason.startswith("Groups")]
    assert [(one.reason, one.message) for one in told] == [("GroupsDeleted", "group 1")]
    assert cluster.look().events == ()


def test_the_first_look_at_a_new_template_sets_no_timer_that_never_comes() -> None:
    cluster = Cluster(model_infer(replicas=2))
    cluster.settle()
    cluster.change_image("vllm:2")
    assert cluster.look().requeue_at_s is None
    # 30 minutes after the ControllerRevision was made
    assert cluster.look(after_s=5).requeue_at_s == cluster.now_s + 1795
