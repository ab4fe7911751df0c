# SPDX-License-Identifier: Apache-2.0
"""What can be scaled, by kind: where its replicas stand, which pods it has, and which pods make one replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from controller.kube.api_resources import (
    DEPLOYMENTS,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    ApiResource,
    Object,
    key_of,
    parse_timestamp,
)
from controller.kube.pod_views import PodView
from controller.models.model_infer import names

PREFIX: Final = "attache.dev/"
# Our managers of replicas, in managedFields.
SCALER: Final = "attache-autoscaler"
# Annotation of a target: the binding that scales it, ``namespace/name/uid``.
SCALED_BY: Final = PREFIX + "scaled-by"
# Annotation of a target: the replicas that it had when we took it over, or that we last wrote.
SCALED_TO: Final = PREFIX + "scaled-to"
# Annotation of a binding: what was learned of its targets, JSON.
LEARNED: Final = PREFIX + "learned"
STATEFUL_SETS: Final = ApiResource("apps", "v1", "statefulsets", "StatefulSet")
LEADER_WORKER_SETS: Final = ApiResource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
# Two of 32 bits, and the words between them.
_LONGEST_NUMBERS: Final = 40
_LWS: Final = "leaderworkerset.sigs.k8s.io/"
Shape = Callable[[Object], tuple[Mapping[str, str], Mapping[str, str]]]
"""The selector and the template's labels of an object."""
UnitOf = Callable[[PodView], str]
"""Which replica a pod is a part of."""


class Scalable(msgspec.Struct, frozen=True, kw_only=True):
    """``replicas``: of its spec. ``selector``: labels of its pods; empty if labels alone do not select them.
    ``template``: labels of the pods that serve requests; ``roles``: the same by role of a ModelInfer. ``scaled_by`` and
    ``scaled_to``: our annotations; ``scaled_to`` has two numbers while we change one into the other. ``selects``: the
    whole selector, where ``selector`` has only those labels of which it allows one value; empty if that is all.
    ``is_ours``: the replicas were last written by us. ``writer`` and ``written_at_s``: the other last writer, and the
    time; empty and 0 if unknown. ``is_going``: it is being deleted.
    """

    resource: ApiResource
    key: str
    uid: str
    version: str
    replicas: int
    selector: Mapping[str, str]
    template: Mapping[str, str]
    roles: Mapping[str, Mapping[str, str]] = {}
    scaled_by: str = ""
    scaled_to: frozenset[int] = frozenset()
    is_ours: bool = False
    writer: str = ""
    written_at_s: float = 0.0
    is_going: bool = False
    selects: str = ""


def _always(_: PodView) -> bool:
    return True


class ScalableKind(msgspec.Struct, frozen=True, kw_only=True):
    """``shape``: see there. ``unit_of``: see there. ``serves``: whether requests are sent to a pod at all.
    ``drains_itself``: its controller lets engines finish before it deletes them. ``is_ordered``: its controller deletes
    the pod with the highest ordinal first. ``optional``: the cluster may lack it.
    """

    resource: ApiResource
    shape: Shape
    unit_of: UnitOf
    serves: Callable[[PodView], bool] = _always
    drains_itself: bool = False
    is_ordered: bool = False
    optional: bool = False


def parse_scalable(kind: ScalableKind, thing: Object) -> Scalable:
    """An object as the API server has it."""
    metadata = thing["metadata"]
    selector, template = kind.shape(thing)
    is_ours, writer, written_at_s = _writers(metadata.get("managedFields") or ())
    annotations = metadata.get("annotations") or {}
    replicas = (thing.get("spec") or {}).get("replicas")
    return Scalable(
        resource=kind.resource,
        key=key_of(thing),
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        replicas=1 if replicas is None else int(replicas),
        selector=selector,
        template=template,
        roles=_roles(thing) if kind.resource == MODEL_INFERS else {},
        scaled_by=annotations.get(SCALED_BY, ""),
        scaled_to=_numbers(annotations.get(SCALED_TO)),
        is_ours=is_ours,
        writer=writer,
        written_at_s=written_at_s,
        is_going="deletionTimestamp" in metadata,
    )


def _writers(managed: Any) -> tuple[bool, str, float]:  # noqa: ANN401 - JSON
    """Whether ``spec.replicas`` is ours, and its other owner, the last one to write."""
    is_ours, writer, at_s = False, "", 0.0
    for one in managed:
        if "f:replicas" not in ((one.get("fieldsV1") or {}).get("f:spec") or {}):
            continue
        if one.get("manager") == SCALER:
            is_ours = True
            continue
        its_s = parse_timestamp(one.get("time")) or 0.0
        if its_s >= at_s:
            writer, at_s = str(one.get("manager", "")), its_s
    return is_ours, writer, at_s


def _numbers(text: object) -> frozenset[int]:
    """``3``, or ``3 from 1``. Empty for what no manager of ours has written."""
    parts = text.split(" from ") if isinstance(text, str) and len(text) <= _LONGEST_NUMBERS else []
    return frozenset(map(int, parts)) if all(one.isdecimal() for one in parts) else frozenset()


def _by_selector(thing: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    spec = thing.get("spec") or {}
    selector = spec.get("selector") or {}
    template = _labels(spec.get("template"))
    return (selector.get("matchLabels") or {}), template


def _labels(template: object) -> dict[str, str]:
    """Objects of others' kinds may have anything there."""
    metadata = template.get("metadata") if isinstance(template, Mapping) else None
    found = metadata.get("labels") if isinstance(metadata, Mapping) else None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def _model_infer(thing: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    mine = {names.MODEL_INFER: thing["metadata"]["name"]}
    together: dict[str, str] = {}
    for one in _roles(thing).values():
        together |= one
    return mine, together


def _roles(thing: Object) -> dict[str, dict[str, str]]:
    name = thing["metadata"]["name"]
    roles = ((thing.get("spec") or {}).get("template") or {}).get("roles") or ()
    return {
        one.get("name", ""): {
            **_labels(one.get("entryTemplate")),
            names.MODEL_INFER: name,
            names.ROLE: one.get("name", ""),
            names.ENTRY: "true",
        }
        for one in roles
    }


def _model_infer_role(thing: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    spec = thing.get("spec") or {}
    mine = {names.MODEL_INFER: spec.get("modelInfer", ""), names.ROLE: spec.get("role", "")}
    return mine, {**mine, names.ENTRY: "true"}


def _leader_worker_set(thing: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    mine = {f"{_LWS}name": thing["metadata"]["name"]}
    template = (thing.get("spec") or {}).get("leaderWorkerTemplate") or {}
    leader = template.get("leaderTemplate") or template.get("workerTemplate")
    return mine, {**_labels(leader), **mine}


def _pod(pod: PodView) -> str:
    return pod.key


def _group(pod: PodView) -> str:
    return pod.labels.get(names.GROUP, pod.key)


def _role_replica(pod: PodView) -> str:
    """A role has as many replicas in each group: requests are spread over all groups, so they count together."""
    return pod.labels.get(names.ROLE_REPLICA, pod.key)


def _is_lws_leader(pod: PodView) -> bool:
    return pod.labels.get(f"{_LWS}worker-index", "0") == "0"


def _lws_group(pod: PodView) -> str:
    return pod.labels.get(f"{_LWS}group-index", pod.key)


KINDS: Final = (
    ScalableKind(resource=MODEL_INFERS, shape=_model_infer, unit_of=_group, drains_itself=True),
    ScalableKind(
        resource=MODEL_INFER_ROLES, shape=_model_infer_role, unit_of=_role_replica, drains_itself=True, optional=True
    ),
    ScalableKind(resource=DEPLOYMENTS, shape=_by_selector, unit_of=_pod),
    ScalableKind(resource=STATEFUL_SETS, shape=_by_selector, unit_of=_pod, is_ordered=True),
    ScalableKind(
        resource=LEADER_WORKER_SETS,
        shape=_leader_worker_set,
        unit_of=_lws_group,
        serves=_is_lws_leader,
        is_ordered=True,
        optional=True,
    ),
)


def foreign_scalable_kind(resource: ApiResource) -> ScalableKind:
    """A kind that is not built in: each pod counts as a replica, and its controller is assumed to honour deletion
    costs.
    """
    return ScalableKind(resource=resource, shape=_by_template, unit_of=_pod)


def _by_template(thing: Object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Many have a template of pods where Deployments have it; the selector stands in the scale."""
    spec = thing.get("spec")
    return {}, _labels(spec.get("template") if isinstance(spec, Mapping) else None)


_BY_NAME: Final = {(one.resource.group, one.resource.kind): one for one in KINDS}


def find_scalable_kind(group: str, kind: str) -> ScalableKind | None:
    """The kind of a reference, in any version; None if it is unsupported."""
    return _BY_NAME.get((group, kind))
