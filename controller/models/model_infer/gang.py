# SPDX-License-Identifier: Apache-2.0
"""How a group is started whole: by a PodGroup, by Kueue's marks, or by our own hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.kube.plan import Apply, Create, Delete
from controller.kube.resources import SCHEDULER_POD_GROUPS, VOLCANO_POD_GROUPS, key_of
from controller.models.model_infer import labels, names
from controller.models.model_infer.pod_state import is_owned
from controller.models.model_infer.revisions import owner_reference
from controller.models.model_infer.room import total

if TYPE_CHECKING:
    from controller.kube.resources import Object, Resource
    from controller.models.model_infer.names import Place
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.revisions import Revision
    from controller.models.model_infer.target import Target

Form = Literal["Kueue", "Volcano", "SchedulerPlugins", "Hold"]

_KUEUE_QUEUE: Final = "kueue.x-k8s.io/queue-name"
_VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
_VOLCANO: Final = "volcano"


class Marks(msgspec.Struct, frozen=True):
    """What tells a scheduler which group a pod belongs to."""

    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


def form_of(target: Target, observed: Observed) -> Form | None:
    """None where no gang is asked for. A PodGroup helps only with a scheduler that reads it, so one must be named."""
    if target.spec.template.gang is None:
        return None
    if observed.gang.kueue and _queue(target):
        return "Kueue"
    if target.spec.scheduler_name == _VOLCANO and observed.gang.volcano:
        return "Volcano"
    if target.spec.scheduler_name not in (None, _VOLCANO) and observed.gang.scheduler_plugins:
        return "SchedulerPlugins"
    return "Hold"


def _queue(target: Target) -> str:
    """Kueue's label of the ModelInfer, which its pods inherit."""
    return str((target.owner["metadata"].get("labels") or {}).get(_KUEUE_QUEUE, ""))


def marks(place: Place, revision: Revision, target: Target, form: Form | None) -> Marks:
    """Of one pod."""
    name = names.pod_group_name(target.name, place.group)
    match form:
        case "Kueue":
            count = len(specs(revision, target, everything=True))
            return Marks(
                {_KUEUE_QUEUE: _queue(target), "kueue.x-k8s.io/pod-group-name": name},
                {"kueue.x-k8s.io/pod-group-total-count": str(count), "kueue.x-k8s.io/pod-group-serving": "true"},
            )
        case "Volcano":
            task = f"{place.role}-{place.replica}"
            return Marks({}, {"scheduling.k8s.io/group-name": name, "volcano.sh/task-spec": task})
        case "SchedulerPlugins":
            return Marks({"scheduling.x-k8s.io/pod-group": name})
    return Marks()


def specs(revision: Revision, target: Target, *, everything: bool = False) -> list[Mapping[str, Any]]:
    """PodSpecs of a group: of those that must start together, or of all. Roles that start after others cannot be waited
    for: they are made only when the first ones are ready.
    """
    gang = target.spec.template.gang
    least = gang.min_role_replicas if gang is not None else {}
    later = {one.name for one in target.spec.template.roles if one.starts_after}
    found: list[Mapping[str, Any]] = []
    for role in revision.roles:
        count = target.replicas_of(revision, role.name)
        if not everything:
            count = 0 if role.name in later else min(count, least.get(role.name, count))
        worker = role.worker or role.entry
        found += [*[role.entry.spec], *([worker.spec] * role.workers)] * count
    return found


def pod_groups(
    wanted: Mapping[int, Revision], target: Target, observed: Observed, form: Form | None
) -> Iterator[Create | Apply]:
    """PodGroups that are missing, or say something else. ``wanted``: revisions of the groups that there are to be."""
    kind = _kind(form)
    if kind is None:
        return
    known = {one["metadata"]["name"]: one for one in observed.pod_groups}
    for ordinal, revision in sorted(wanted.items()):
        thing = _pod_group(ordinal, revision, target, kind)
        old = known.get(thing["metadata"]["name"])
        if old is None:
            yield Create(kind, thing)
        elif not thing["spec"].items() <= (old.get("spec") or {}).items():
            yield Apply(kind, thing)


def unused_pod_groups(
    wanted: Mapping[int, Revision], target: Target, observed: Observed, form: Form | None
) -> Iterator[Delete]:
    """Of groups that are no more, or of another kind than is used now."""
    kind = _kind(form)
    names_used = {names.pod_group_name(target.name, one) for one in wanted} if kind is not None else set()
    for one in observed.pod_groups:
        found = SCHEDULER_POD_GROUPS if _is_of(one, SCHEDULER_POD_GROUPS) else VOLCANO_POD_GROUPS
        if is_owned(one, target.uid) and (found != kind or one["metadata"]["name"] not in names_used):
            yield Delete(found, key_of(one), one["metadata"].get("uid", ""))


def _kind(form: Form | None) -> Resource | None:
    kinds: Mapping[str | None, Resource] = {"Volcano": VOLCANO_POD_GROUPS, "SchedulerPlugins": SCHEDULER_POD_GROUPS}
    return kinds.get(form)


def _is_of(thing: Object, kind: Resource) -> bool:
    return str(thing.get("apiVersion", "")).partition("/")[0] == kind.group


def _pod_group(ordinal: int, revision: Revision, target: Target, kind: Resource) -> Object:
    together = specs(revision, target)
    spec: dict[str, Any] = {"minMember": len(together)}
    resources = total(together)
    if resources:
        spec["minResources"] = resources
    gang = target.spec.template.gang
    metadata = target.owner["metadata"]
    queue = (metadata.get("annotations") or {}).get(_VOLCANO_QUEUE)
    if kind == VOLCANO_POD_GROUPS and queue:
        spec["queue"] = queue
    if kind == SCHEDULER_POD_GROUPS and gang is not None:
        spec["scheduleTimeoutSeconds"] = max(1, int(gang.timeout))
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": names.pod_group_name(target.name, ordinal),
            "namespace": metadata["namespace"],
            "labels": {labels.MODEL_INFER: target.name, labels.GROUP: str(ordinal)},
            "ownerReferences": [owner_reference(target.owner)],
        },
        "spec": spec,
    }
