# SPDX-License-Identifier: Apache-2.0
"""Services go with what needed them."""

from __future__ import annotations

from controller.kube.api_resources import SERVICES
from tests.model_infer_cluster import Cluster, model_infer, role, template


def test_a_role_that_has_no_workers_any_more_loses_its_services() -> None:
    workers = {"workerReplicas": 1, "workerTemplate": template()}
    cluster = Cluster(model_infer(role(**workers)))
    cluster.settle()
    assert list(cluster.of(SERVICES)) == ["default/llama-0-all-0"]
    cluster.change(template={"roles": [role()], "drainTimeout": "0s"})
    cluster.settle()
    assert list(cluster.of(SERVICES)) == []
