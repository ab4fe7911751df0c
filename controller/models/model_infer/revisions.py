# SPDX-License-Identifier: Apache-2.0
"""Revisions: what of a template the pods are made of, and the objects that keep old ones.

Replicas, order of start, gang, drain and everything under ``rollout`` and ``recovery`` are no part of it: they change
without changing pods. Fields that have their default are left out, and the rest is sorted. So neither the order in
which fields or roles are written, nor a new field with a default in a later version, changes a hash. The defaults of
the fields that are hashed must therefore never change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from controller.api.common import ObjectMetadata, PodTemplate, Replicas, ShortName
from controller.api.model_infer import Workers
from controller.kube.resources import CONTROLLER_REVISIONS, MODEL_INFERS
from controller.models.model_infer import labels, names
from controller.models.model_infer.times import seconds_of

if TYPE_CHECKING:
    from controller.api.model_infer import GroupTemplate, Role
    from controller.kube.resources import Object

_DIGITS: Final = 10


class RoleRevision(msgspec.Struct, frozen=True, kw_only=True):
    """One role of a revision. ``hash``: of its pods. ``entry`` and ``worker``: templates. ``workers``: worker pods."""

    name: str
    hash: str
    entry: PodTemplate
    worker: PodTemplate | None
    workers: int

    @property
    def size(self) -> int:
        """Pods of one replica."""
        return 1 + self.workers


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """One state of the template. ``hash``: of all roles. ``replicas``: of the roles when it was new, for roles that the
    template has no more. ``number``: higher is newer. ``uid``: of its ControllerRevision, empty before there is one.
    ``since_s``: since when it is being rolled out. ``failed``: its rollout was given up. ``reached``: all groups at or
    above the partition were ready with it.
    """

    hash: str
    roles: tuple[RoleRevision, ...]
    replicas: Mapping[str, int]
    number: int = 0
    key: str = ""
    uid: str = ""
    since_s: float = math.inf
    failed: bool = False
    reached: bool = False

    def role(self, name: str) -> RoleRevision | None:
        """The role of this name, if the revision has it."""
        return next((one for one in self.roles if one.name == name), None)


class _KeptRole(msgspec.Struct, rename="camel"):
    name: ShortName
    entry_template: PodTemplate
    worker_template: PodTemplate | None = None
    worker_replicas: Workers = 0


class _Kept(msgspec.Struct):
    """Of a ControllerRevision."""

    roles: Annotated[list[_KeptRole], msgspec.Meta(max_length=8)]
    replicas: Annotated[dict[str, Replicas], msgspec.Meta(max_length=8)] = {}


class History(msgspec.Struct, frozen=True, kw_only=True):
    """``update``: the revision of the template as it is. ``kept``: all that have a ControllerRevision, by hash."""

    update: Revision
    kept: Mapping[str, Revision]

    def get(self, revision: str) -> Revision | None:
        """The revision with this hash, None if nothing says what it was."""
        return self.update if revision == self.update.hash else self.kept.get(revision)

    def with_role(self, role_revision: str, first: Revision) -> tuple[Revision, RoleRevision] | None:
        """A revision that has the role with this hash, ``first`` if it has; None if none is known."""
        for revision in (first, self.update, *self.kept.values()):
            for role in revision.roles:
                if role.hash == role_revision:
                    return revision, role
        return None

    def is_kept(self) -> bool:
        """Whether the template has its ControllerRevision."""
        return self.update.hash in self.kept

    def newest_number(self) -> int:
        """0 if there is none."""
        return max((one.number for one in self.kept.values()), default=0)


def history_of(template: GroupTemplate, things: Sequence[Object]) -> History:
    """``things``: ControllerRevisions."""
    kept = {one.hash: one for one in map(_read, things) if one is not None}
    new = revision_of(template)
    return History(update=kept.get(new.hash, new), kept=kept)


def revision_of(template: GroupTemplate) -> Revision:
    """Of a template as the user wrote it."""
    return _revision([_hashed(one) for one in template.roles], {one.name: one.replicas for one in template.roles})


def as_data(template: GroupTemplate) -> dict[str, Any]:
    """What a ControllerRevision keeps of ``template``."""
    return {
        "roles": [_hashed(one) for one in template.roles],
        "replicas": {one.name: one.replicas for one in template.roles},
    }


def _hashed(role: Role) -> dict[str, Any]:
    found: dict[str, Any] = {"name": role.name, "entryTemplate": _template(role.entry_template)}
    if role.worker_replicas:
        found["workerReplicas"] = role.worker_replicas
    if role.worker_replicas and role.worker_template is not None:
        found["workerTemplate"] = _template(role.worker_template)
    return found


def _template(template: PodTemplate) -> dict[str, Any]:
    metadata = {"labels": template.metadata.labels, "annotations": template.metadata.annotations}
    given = {name: dict(values) for name, values in metadata.items() if values}
    return {"spec": template.spec, **({"metadata": given} if given else {})}


def _revision(roles: Sequence[Mapping[str, Any]], replicas: Mapping[str, int]) -> Revision:
    read = tuple(_role(one) for one in roles)
    whole = hash_of(sorted((one.name, one.hash) for one in read))
    return Revision(hash=whole, roles=read, replicas=dict(replicas))


def _role(data: Mapping[str, Any]) -> RoleRevision:
    worker = data.get("workerTemplate")
    return RoleRevision(
        name=data["name"],
        hash=hash_of(data),
        entry=_read_template(data["entryTemplate"]),
        worker=None if worker is None else _read_template(worker),
        workers=data.get("workerReplicas", 0),
    )


def _read_template(data: Mapping[str, Any]) -> PodTemplate:
    metadata = data.get("metadata") or {}
    found = ObjectMetadata(labels=metadata.get("labels") or {}, annotations=metadata.get("annotations") or {})
    return PodTemplate(spec=data["spec"], metadata=found)


def hash_of(value: object) -> str:
    """Short, of JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:_DIGITS]


def _read(thing: Object) -> Revision | None:
    """None for what somebody has spoiled."""
    data, metadata = thing.get("data") or {}, thing["metadata"]
    try:
        # others may write such objects, and pods are made of them: the bounds of our own kind hold here, too
        kept = msgspec.convert(data, _Kept)
        found = _revision(data["roles"], kept.replicas)
    except msgspec.ValidationError:
        return None
    if metadata["name"].rpartition("-")[2] != found.hash:
        return None
    annotations = metadata.get("annotations") or {}
    return msgspec.structs.replace(
        found,
        number=int(thing.get("revision") or 0),
        key=f"{metadata.get('namespace', '')}/{metadata['name']}",
        uid=metadata.get("uid", ""),
        since_s=seconds_of(annotations.get(labels.ROLLED_OUT_SINCE) or metadata.get("creationTimestamp")) or 0.0,
        failed=labels.FAILED in annotations,
        reached=labels.REACHED in annotations,
    )


def controller_revision(owner: Object, template: GroupTemplate, revision: str, number: int) -> Object:
    """The object that keeps ``template``."""
    metadata = owner["metadata"]
    return {
        "apiVersion": CONTROLLER_REVISIONS.api_version,
        "kind": CONTROLLER_REVISIONS.kind,
        "metadata": {
            "name": names.revision_name(metadata["name"], revision),
            "namespace": metadata["namespace"],
            "labels": {labels.MODEL_INFER: metadata["name"], labels.REVISION: revision},
            "ownerReferences": [owner_reference(owner)],
        },
        "data": as_data(template),
        "revision": number,
    }


def owner_reference(owner: Object) -> dict[str, Any]:
    """By which the API server's garbage collector finds what a ModelInfer owned."""
    return {
        "apiVersion": MODEL_INFERS.api_version,
        "kind": MODEL_INFERS.kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
