# SPDX-License-Identifier: Apache-2.0
"""Roles that are scaled by themselves."""

from __future__ import annotations

from controller.kube.api_resources import MODEL_INFER_ROLES
from controller.kube.reconcile_plan import Apply
from tests.model_infer_cluster import Cluster, model_infer, role

KEY = "default/llama-decode"


def scalable() -> Cluster:
    """Two groups of one prefill engine and two decode engines, of which only decode is scaled by itself."""
    cluster = Cluster(model_infer(role("prefill"), role("decode", replicas=2, scalable=True), replicas=2))
    cluster.settle()
    return cluster


def test_a_scalable_role_has_an_object_with_a_scale() -> None:
    cluster = scalable()
    assert list(cluster.of(MODEL_INFER_ROLES)) == [KEY]
    found = cluster.of(MODEL_INFER_ROLES)[KEY]
    assert found["spec"] == {"modelInfer": "llama", "role": "decode", "replicas": 2}
    assert found["status"] == {
        "observedGeneration": 0,
        "replicas": 2,
        "readyReplicas": 2,
        # as many pods as one group has, whatever the number of groups
        "labelSelector": (
            "attache.dev/model-infer=llama,attache.dev/group=0,attache.dev/role=decode,attache.dev/entry=true"
        ),
    }


def test_an_autoscaler_sets_the_replicas_in_each_group() -> None:
    cluster = scalable()
    cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] = 3
    cluster.settle()
    assert [one for one in cluster.names() if "decode" in one] == [
        f"llama-{group}-decode-{replica}-0" for group in (0, 1) for replica in (0, 1, 2)
    ]
    assert cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] == 3
    assert cluster.thing["status"]["readyReplicas"] == 2


def test_a_template_with_other_replicas_is_written_and_yields_to_the_autoscaler() -> None:
    cluster = scalable()
    cluster.thing["spec"]["template"]["roles"][1]["replicas"] = 4
    (action,) = [one for one in cluster.look().actions if isinstance(one, Apply)]
    assert action.yields == (("spec", "replicas"),)
    assert action.thing["spec"]["replicas"] == 4


def test_a_role_that_is_no_longer_scalable_follows_the_template() -> None:
    cluster = scalable()
    cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] = 3
    cluster.settle()
    del cluster.thing["spec"]["template"]["roles"][1]["scalable"]
    cluster.settle()
    assert cluster.of(MODEL_INFER_ROLES) == {}
    assert len([one for one in cluster.names() if "decode" in one]) == 4


def test_a_group_serves_while_an_autoscaler_adds_engines_to_it() -> None:
    cluster = scalable()
    cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] = 3
    cluster.look()
    assert "llama-1-decode-2-0" in cluster.names()
    assert cluster.thing["status"]["readyReplicas"] == 2
    assert cluster.thing["status"]["groups"] == {"Ready": 2}
    assert cluster.condition("Available")["status"] == "True"


def test_a_group_with_fewer_engines_than_its_template_has_does_not_serve() -> None:
    cluster = scalable()
    cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] = 3
    cluster.settle()
    for name in ("llama-0-decode-0-0", "llama-0-decode-1-0"):
        cluster.run(name, ready=False)
    cluster.look()
    assert cluster.thing["status"]["readyReplicas"] == 1


def test_a_group_of_which_all_roles_are_at_zero_is_not_missing_and_starts_again_as_a_whole() -> None:
    thing = model_infer(role("prefill", scalable=True), role("decode", scalable=True))
    thing["spec"]["template"]["gang"] = {"minRoleReplicas": {"prefill": 1, "decode": 1}}
    cluster = Cluster(thing)
    cluster.settle()
    engines = cluster.names()
    scales = cluster.of(MODEL_INFER_ROLES).values()
    for one in scales:
        one["spec"]["replicas"] = 0
    cluster.settle()
    assert cluster.names() == []
    status = cluster.thing["status"]
    assert (status["replicas"], status["readyReplicas"], status["groups"]) == (0, 0, {})
    assert (status["summary"], cluster.condition("Available")["message"]) == ("Ready", "0 of 0 groups are ready")
    assert cluster.condition("Available")["status"] == "True"
    for one in scales:
        one["spec"]["replicas"] = 1
    cluster.look()
    assert (cluster.names(), cluster.condition("Available")["status"]) == (engines, "False")
    cluster.settle()
    assert cluster.thing["status"]["readyReplicas"] == 1


def test_an_autoscaler_may_ask_for_fewer_than_the_template() -> None:
    cluster = scalable()
    cluster.of(MODEL_INFER_ROLES)[KEY]["spec"]["replicas"] = 1
    cluster.settle()
    assert cluster.thing["status"]["readyReplicas"] == 2
