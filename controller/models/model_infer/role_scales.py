# SPDX-License-Identifier: Apache-2.0
"""ModelInferRoles: by them autoscalers set the replicas of one role.

An autoscaler multiplies its ratio with the number of pods that the selector finds, so the selector finds as many as one
group has: the role's entry pods of the first group. Requests are spread over all groups alike, so one group stands for
the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.kube.plan import Action, Apply, Delete, SetStatus
from controller.kube.resources import MODEL_INFER_ROLES, key_of
from controller.models.model_infer import labels, names
from controller.models.model_infer.pod_state import is_owned
from controller.models.model_infer.revisions import owner_reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.api.model_infer import Role
    from controller.kube.resources import Object
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.target import Target


def role_scales(groups: Sequence[Group], target: Target, observed: Observed) -> Iterator[Action]:
    """What is missing is made; what the template newly asks for is written, if no autoscaler owns it; the rest is
    told.
    """
    known = {one["metadata"]["name"]: one for one in observed.role_scales if is_owned(one, target.uid)}
    wanted = {names.role_scale_name(target.name, one.name): one for one in target.spec.template.roles if one.scalable}
    for name, role in wanted.items():
        thing = _scale(name, role, target)
        old = known.get(name)
        if old is None or _asked(old) != str(role.replicas):
            yield Apply(MODEL_INFER_ROLES, thing, (("spec", "replicas"),))
        if old is not None:
            fields = _status(role, groups, target, old)
            if any((old.get("status") or {}).get(field) != value for field, value in fields.items()):
                yield SetStatus(MODEL_INFER_ROLES, key_of(old), old["metadata"].get("uid", ""), fields)
    for name, old in known.items():
        if name not in wanted:
            yield Delete(MODEL_INFER_ROLES, key_of(old), old["metadata"].get("uid", ""))


def _asked(thing: Object) -> str | None:
    """What the template asked for when the object was last written: autoscalers change only the replicas."""
    found = (thing["metadata"].get("annotations") or {}).get(labels.TEMPLATE_REPLICAS)
    return None if found is None else str(found)


def _scale(name: str, role: Role, target: Target) -> Object:
    return {
        "apiVersion": MODEL_INFER_ROLES.api_version,
        "kind": MODEL_INFER_ROLES.kind,
        "metadata": {
            "name": name,
            "namespace": target.owner["metadata"]["namespace"],
            "labels": {labels.MODEL_INFER: target.name, labels.ROLE: role.name},
            "annotations": {labels.TEMPLATE_REPLICAS: str(role.replicas)},
            "ownerReferences": [owner_reference(target.owner)],
        },
        "spec": {"modelInfer": target.name, "role": role.name, "replicas": role.replicas},
    }


def _status(role: Role, groups: Sequence[Group], target: Target, old: Object) -> dict[str, Any]:
    staying = [one for one in groups if not one.is_going]
    counts = [[each for each in one.of_role(role.name) if not each.is_going] for one in staying]
    first = staying[0].ordinal if staying else 0
    return {
        "observedGeneration": old["metadata"].get("generation", 0),
        "replicas": len(counts[0]) if counts else 0,
        "readyReplicas": min((len([each for each in one if each.is_ready]) for one in counts), default=0),
        "labelSelector": names.selector(target.name, GROUP=str(first), ROLE=role.name, ENTRY="true"),
    }
