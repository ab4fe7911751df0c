# SPDX-License-Identifier: Apache-2.0
"""What pods get beside what their template says."""

from __future__ import annotations

from typing import Any

import pytest

from controller.api.shared_types import PodTemplate
from controller.models.model_infer import names
from controller.models.model_infer.child_objects import PodOptions, build_pod
from controller.models.model_infer.desired_state import Revision, RoleRevision
from controller.models.model_infer.names import PodPosition

OWNER = {
    "apiVersion": "attache.dev/v1alpha1",
    "kind": "ModelInfer",
    "metadata": {"name": "llama", "namespace": "default", "uid": "u"},
}


def made(index: int = 0, **spec: Any) -> dict[str, Any]:  # noqa: ANN401 - of a PodSpec
    """The spec of a pod of a role with a worker."""
    template = PodTemplate(spec={"containers": [{"name": "engine", "image": "i"}], **spec})
    role = RoleRevision(name="decode", hash="abc", entry=template, worker=template, workers=1)
    place = PodPosition(group=1, role="decode", replica=0, index=index)
    found: dict[str, Any] = build_pod(
        place, Revision(hash="all", roles=(role,), replicas={}), role, PodOptions(owner=OWNER)
    )
    return found


def test_entry_pods_of_a_role_go_to_different_nodes_where_they_can() -> None:
    found = made()
    (spread,) = found["spec"]["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
    assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
    chosen = spread["labelSelector"]["matchLabels"]
    assert chosen.items() <= found["metadata"]["labels"].items()
    assert chosen == {
        names.MODEL_INFER: "llama",
        names.ROLE: "decode",
        names.ROLE_REVISION: "abc",
        names.ENTRY: "true",
    }


def test_workers_stay_where_their_group_is() -> None:
    assert "topologySpreadConstraints" not in made(index=1)["spec"]


@pytest.mark.parametrize("own", [[], [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]])
def test_what_the_template_says_of_spreading_replaces_ours(own: list[dict[str, Any]]) -> None:
    assert made(topologySpreadConstraints=own)["spec"]["topologySpreadConstraints"] == own
