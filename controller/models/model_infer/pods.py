# SPDX-License-Identifier: Apache-2.0
"""One pod of a group, made from the template of its role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import PODS, Object
from controller.models.model_infer import labels, names
from controller.models.model_infer.revisions import owner_reference

if TYPE_CHECKING:
    from controller.models.model_infer.names import Place
    from controller.models.model_infer.revisions import Revision, RoleRevision

_DEFAULT_GRACE_S: Final = 30


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What pods get beside their template. ``labels`` and ``annotations``: of the gang. ``drain_s``: how long running
    requests have to end. ``is_scale_unit``: autoscalers count this pod for its group.
    """

    owner: Object
    scheduler_name: str | None = None
    drain_s: float = 0.0
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    is_scale_unit: bool = False


def pod(place: Place, revision: Revision, role: RoleRevision, ask: Ask) -> Object:
    """A pod to create. What the template says beyond this module's fields passes through as it is."""
    owner = ask.owner["metadata"]
    template = role.entry if place.index == 0 or role.worker is None else role.worker
    given = {
        labels.MODEL_INFER: owner["name"],
        labels.REVISION: revision.hash,
        labels.ROLE_REVISION: role.hash,
        **place.labels,
        **ask.labels,
        **({labels.SCALE_UNIT: "true"} if ask.is_scale_unit else {}),
    }
    metadata: dict[str, Any] = {
        "name": names.pod_name(owner["name"], place),
        "namespace": owner["namespace"],
        "labels": {**template.metadata.labels, **given},
        "ownerReferences": [owner_reference(ask.owner)],
    }
    annotations = {**template.metadata.annotations, **ask.annotations}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": metadata,
        "spec": _spec(template.spec, place, role, ask),
    }


def _spec(template: Mapping[str, Any], place: Place, role: RoleRevision, ask: Ask) -> dict[str, Any]:
    env = environment(place, role, ask.owner["metadata"]["name"], ask.owner["metadata"]["namespace"])
    spec = dict(template)
    for name in ("containers", "initContainers"):
        if isinstance(spec.get(name), list):
            spec[name] = [_with_env(one, env) for one in spec[name]]
    if role.workers:
        spec["hostname"] = names.pod_name(ask.owner["metadata"]["name"], place)
        spec["subdomain"] = names.service_name(ask.owner["metadata"]["name"], place)
    if place.index == 0 and "topologySpreadConstraints" not in spec:
        spec["topologySpreadConstraints"] = [_spread(place, role, ask)]
    if ask.scheduler_name and "schedulerName" not in spec:
        spec["schedulerName"] = ask.scheduler_name
    grace = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if isinstance(grace, int) and grace < ask.drain_s:
        spec["terminationGracePeriodSeconds"] = math.ceil(ask.drain_s)
    return spec


def _spread(place: Place, role: RoleRevision, ask: Ask) -> dict[str, Any]:
    """Entry pods of one role and revision go to different nodes where they can: else engines without requests of their
    own for memory or CPUs may all land on one. Workers stay near the others of their group.
    """
    chosen = {
        labels.MODEL_INFER: ask.owner["metadata"]["name"],
        labels.ROLE: place.role,
        labels.ROLE_REVISION: role.hash,
        labels.ENTRY: "true",
    }
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": chosen},
    }


def environment(place: Place, role: RoleRevision, owner: str, namespace: str) -> dict[str, str]:
    """What tells a container where it stands in its group.

    The names beginning with ``LWS_`` are those of LeaderWorkerSet, which published start scripts of vLLM and SGLang
    read. The entry pod's address is a name that DNS resolves as soon as the pod is there, ready or not. A replica of
    one pod has no Service, and its entry is itself.
    """
    entry = msgspec.structs.replace(place, index=0)
    host = f"{names.pod_name(owner, entry)}.{names.service_name(owner, place)}.{namespace}.svc"
    address = host if role.workers else "localhost"
    size, index = str(role.size), str(place.index)
    return {
        "ENTRY_ADDRESS": address,
        "GROUP_SIZE": size,
        "WORKER_INDEX": index,
        "GROUP_INDEX": str(place.group),
        "ROLE_NAME": place.role,
        "ROLE_REPLICA_INDEX": str(place.replica),
        "LWS_LEADER_ADDRESS": address,
        "LWS_GROUP_SIZE": size,
        "LWS_WORKER_INDEX": index,
    }


def _with_env(container: object, env: Mapping[str, str]) -> object:
    """Ours stand first, so that the template's own variables may refer to them by ``$(NAME)``, and win over equal
    names: a copied value would send a worker to another group's entry pod. What is no list of variables stays as it is:
    the API server says what is wrong with it.
    """
    if not isinstance(container, Mapping):
        return container
    given = container.get("env") or []
    if not isinstance(given, list):
        return container
    own = [one for one in given if not (isinstance(one, Mapping) and str(one.get("name")) in env)]
    return {**container, "env": [*({"name": name, "value": value} for name, value in env.items()), *own]}
