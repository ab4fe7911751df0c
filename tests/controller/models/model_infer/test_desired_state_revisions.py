# SPDX-License-Identifier: Apache-2.0
"""A revision's hash is that of what pods are made of, however it is written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.api.model_infer import GroupTemplate
from controller.models.model_infer.desired_state import make_revision, revision_history, short_hash
from extproc.api.quantities import decode_quantity
from tests.model_infer_cluster import Cluster, model_infer, role, template


def read(**fields: Any) -> GroupTemplate:  # noqa: ANN401 - any field of the template
    """As it comes from an API server."""
    return msgspec.convert(fields, GroupTemplate, dec_hook=decode_quantity)


def hashed(*roles: dict[str, Any], **fields: Any) -> str:  # noqa: ANN401 - any field of the template
    """Of a template with these roles."""
    return make_revision(read(roles=list(roles), **fields)).hash


def test_the_hash_of_a_template_stays_what_it_is() -> None:
    """Another value here would make every pod of every user anew on the day of an upgrade."""
    assert hashed(role("all")) == "a0ff50c322"


@pytest.mark.parametrize(
    "same",
    [
        # what the API server fills in
        {**role("all"), "replicas": 1, "workerReplicas": 0, "scalable": False},
        {"entryTemplate": {"metadata": {}, **template()}, "name": "all"},
        {"entryTemplate": {"spec": {"containers": [{"image": "vllm:1", "name": "engine"}]}}, "name": "all"},
        # what is no part of a pod
        {**role("all"), "replicas": 7, "maxSurge": 1, "startsAfter": [], "scalable": True},
        # without workers their template makes no pod
        {**role("all"), "workerTemplate": template("other")},
    ],
)
def test_what_makes_the_same_pods_has_the_same_hash(same: dict[str, Any]) -> None:
    assert hashed(same) == hashed(role("all"))


def test_order_of_roles_and_settings_of_the_group_change_nothing() -> None:
    one, two = role("prefill"), role("decode")
    assert hashed(one, two) == hashed(two, one, drainTimeout="1s", gang={}, restartGracePeriod="1s")


@pytest.mark.parametrize(
    "other",
    [
        {**role("all"), "entryTemplate": template("vllm:2")},
        {**role("all"), "workerReplicas": 1, "workerTemplate": template()},
        {**role("all"), "entryTemplate": {**template(), "metadata": {"labels": {"a": "b"}}}},
        role("another"),
    ],
)
def test_what_makes_other_pods_has_another_hash(other: dict[str, Any]) -> None:
    assert hashed(other) != hashed(role("all"))


def test_only_the_role_that_changed_has_another_hash() -> None:
    before = make_revision(read(roles=[role("prefill"), role("decode")]))
    after = make_revision(read(roles=[role("prefill"), {**role("decode"), "entryTemplate": template("vllm:2")}]))
    assert before.roles[0].hash == after.roles[0].hash
    assert before.roles[1].hash != after.roles[1].hash


def test_a_controller_revision_gives_back_what_it_was_made_of() -> None:
    cluster = Cluster(model_infer(role("prefill", workerReplicas=2, workerTemplate=template("w")), role("decode")))
    cluster.look()
    observed = cluster.observed()
    found = revision_history(read(roles=[role("another")]), observed.revisions)
    (kept,) = found.kept.values()
    assert kept.hash == cluster.thing["status"]["updateRevision"]
    prefill = kept.role("prefill")
    assert prefill is not None
    assert (prefill.size, prefill.worker and prefill.worker.spec) == (3, template("w")["spec"])


@pytest.mark.parametrize("spoiled", [{"workerReplicas": 10**9}, {"entryTemplate": {"spec": "none"}}, {"name": None}])
def test_a_forged_controller_revision_is_none_although_its_hash_is_right(spoiled: dict[str, Any]) -> None:
    """Pods that point to it would be made a thousand million times."""
    cluster = Cluster(model_infer())
    cluster.look()
    (thing,) = cluster.observed().revisions
    thing["data"]["roles"][0] |= spoiled
    roles = [(one["name"], short_hash(one)) for one in thing["data"]["roles"]]
    thing["metadata"]["name"] = f"llama-{short_hash(roles)}"
    assert revision_history(read(roles=[role("all")]), [thing]).kept == {}


def test_a_controller_revision_that_somebody_spoiled_is_none() -> None:
    cluster = Cluster(model_infer())
    cluster.look()
    (thing,) = cluster.observed().revisions
    thing["data"]["roles"][0]["entryTemplate"] = template("other")
    assert revision_history(read(roles=[role("all")]), [thing]).kept == {}
    thing["data"] = {}
    assert revision_history(read(roles=[role("all")]), [thing]).kept == {}
