# SPDX-License-Identifier: Apache-2.0
"""A reconciler of ModelInfers for tests of the shell alone: pods of all groups and roles, made, mended and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.kube.api_resources import MODEL_INFERS, PODS, Object, key_of
from controller.kube.reconcile_plan import Action, Annotate, Create, Delete, Plan
from controller.models.model_infer import names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.models.model_infer.model_infer_state import ModelInferState


def stand_in(observed: ModelInferState, now_s: float) -> Plan:  # noqa: ARG001 - time changes nothing here
    """Pods as the template says, with their labels; status: how many there are."""
    thing = observed.thing
    wanted = {key_of(one): one for one in _pods(thing)}
    has = {key_of(one): one for one in observed.pods}
    actions: list[Action] = [Create(PODS, one) for key, one in wanted.items() if key not in has]
    for key, pod in has.items():
        if key not in wanted and "deletionTimestamp" not in pod["metadata"]:
            actions.append(Delete(PODS, key, pod["metadata"]["uid"]))
        elif key in wanted and pod["metadata"]["labels"] != wanted[key]["metadata"]["labels"]:
            asked = wanted[key]["metadata"]["labels"]
            actions.append(Annotate(PODS, key, pod["metadata"]["uid"], labels=asked))
    ready = sum(_is_ready(one) for one in observed.pods)
    done = ready == len(wanted) == len(has)
    available = {
        "type": "Available",
        "status": "True" if done else "False",
        "reason": "AllReady" if done else "Waiting",
        "message": f"{ready} pods of {len(wanted)} are ready",
    }
    replicas = int(thing["spec"]["replicas"])
    return Plan(
        actions=tuple(actions),
        status={
            "replicas": replicas,
            "readyReplicas": replicas if done else 0,
            "labelSelector": f"{names.MODEL_INFER}={thing['metadata']['name']},{names.SCALE_UNIT}=true",
            "conditions": [available],
        },
    )


def _pods(thing: Object) -> Iterator[Object]:
    name, spec = thing["metadata"]["name"], thing["spec"]
    for group in range(spec["replicas"]):
        for role in spec["template"]["roles"]:
            for replica in range(role["replicas"]):
                for index in range(1 + role.get("workerReplicas", 0)):
                    template = role["workerTemplate"] if index else role["entryTemplate"]
                    yield _pod(thing, template, f"{name}-{group}-{role['name']}-{replica}-{index}", role["name"])


def _pod(thing: Object, template: dict[str, Any], name: str, role: str) -> Object:
    metadata = thing["metadata"]
    owner = {"uid": metadata["uid"], "name": metadata["name"], "controller": True, "blockOwnerDeletion": True}
    owner |= {"apiVersion": MODEL_INFERS.api_version, "kind": MODEL_INFERS.kind}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": {names.MODEL_INFER: metadata["name"], names.ROLE: role},
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
