# SPDX-License-Identifier: Apache-2.0
"""Roles that are scaled by themselves."""

from __future__ import annotations

from controller.kube.plan import Apply
from controller.kube.resources import MODEL_INFER_ROLES
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
