# SPDX-License-Identifier: Apache-2.0
"""The desired state of a ModelInfer: spec, replicas of roles, and the template revisions of its pods."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from controller.api.model_infer import ModelInfer, ModelInferSpec, Workers
from controller.api.shared_types import PodMetadata, PodTemplate, Replicas, ShortName
from controller.kube.api_resources import CONTROLLER_REVISIONS, MODEL_INFERS, Object, parse_timestamp
from controller.models.model_infer import names
from controller.models.model_infer.pod_state import is_owned
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from controller.api.model_infer import GroupTemplate, Role
    from controller.api.shared_types import IntOrPercent
    from controller.models.model_infer.model_infer_state import ModelInferState

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


class _RevisionData(msgspec.Struct):
    """Of a ControllerRevision."""

    roles: Annotated[list[_KeptRole], msgspec.Meta(max_length=8)]
    replicas: Annotated[dict[str, Replicas], msgspec.Meta(max_length=8)] = {}


class RevisionHistory(msgspec.Struct, frozen=True, kw_only=True):
    """``update``: the revision of the template as it is. ``kept``: all that have a ControllerRevision, by hash."""

    update: Revision
    kept: Mapping[str, Revision]

    def get(self, revision: str) -> Revision | None:
        """The revision with this hash, None if its content is unknown."""
        return self.update if revision == self.update.hash else self.kept.get(revision)

    def with_role(self, role_revision: str, first: Revision) -> tuple[Revision, RoleRevision] | None:
        """A revision that has the role with this hash, ``first`` if it has; None if none is known."""
        for revision in (first, self.update, *self.kept.values()):
            for role in revision.roles:
                if role.hash == role_revision:
                    return revision, role
        return None

    def is_template_stored(self) -> bool:
        """Whether the template has its ControllerRevision."""
        return self.update.hash in self.kept

    def newest_number(self) -> int:
        """0 if there is none."""
        return max((one.number for one in self.kept.values()), default=0)


def revision_history(template: GroupTemplate, things: Sequence[Object]) -> RevisionHistory:
    """``things``: ControllerRevisions."""
    kept = {one.hash: one for one in map(_read, things) if one is not None}
    new = make_revision(template)
    return RevisionHistory(update=kept.get(new.hash, new), kept=kept)


def make_revision(template: GroupTemplate) -> Revision:
    """Of a template as the user wrote it."""
    return _revision([_hashed(one) for one in template.roles], {one.name: one.replicas for one in template.roles})


def revision_data(template: GroupTemplate) -> dict[str, Any]:
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
    whole = short_hash(sorted((one.name, one.hash) for one in read))
    return Revision(hash=whole, roles=read, replicas=dict(replicas))


def _role(data: Mapping[str, Any]) -> RoleRevision:
    worker = data.get("workerTemplate")
    return RoleRevision(
        name=data["name"],
        hash=short_hash(data),
        entry=_read_template(data["entryTemplate"]),
        worker=None if worker is None else _read_template(worker),
        workers=data.get("workerReplicas", 0),
    )


def _read_template(data: Mapping[str, Any]) -> PodTemplate:
    metadata = data.get("metadata") or {}
    found = PodMetadata(labels=metadata.get("labels") or {}, annotations=metadata.get("annotations") or {})
    return PodTemplate(spec=data["spec"], metadata=found)


def short_hash(value: object) -> str:
    """Short, of JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:_DIGITS]


def _read(thing: Object) -> Revision | None:
    """None if its content was changed and cannot be read."""
    data, metadata = thing.get("data") or {}, thing["metadata"]
    try:
        # others may write such objects, and pods are made of them: the bounds of our own kind hold here, too
        kept = msgspec.convert(data, _RevisionData)
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
        since_s=parse_timestamp(annotations.get(names.ROLLED_OUT_SINCE) or metadata.get("creationTimestamp")) or 0.0,
        failed=names.FAILED in annotations,
        reached=names.REACHED in annotations,
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
            "labels": {names.MODEL_INFER: metadata["name"], names.REVISION: revision},
            "ownerReferences": [owner_reference(owner)],
        },
        "data": revision_data(template),
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


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """``owner``: the object. ``history``: its revisions. ``goal``: the revision that groups are to become: the
    template's, or the one before, if a failed rollout goes back. ``current``: that of the groups before the rollout.
    ``counts``: replicas by role, from the template or the role's own scale. ``is_restarted``: the rollout begins again:
    the template has returned to an earlier state, or a pause is over.
    """

    owner: Object
    spec: ModelInferSpec
    history: RevisionHistory
    goal: Revision
    current: Revision
    counts: Mapping[str, int]
    is_restarted: bool = False

    @property
    def name(self) -> str:
        """Of the ModelInfer."""
        return str(self.owner["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Of the ModelInfer."""
        return str(self.owner["metadata"]["uid"])

    @property
    def first_updated_ordinal(self) -> int:
        """Groups with a lower ordinal keep the current revision."""
        return round_percent_up(self.spec.rollout.partition, self.spec.replicas)

    @property
    def group_count(self) -> int:
        """That should have pods: none while all roles are scaled to 0."""
        return self.spec.replicas if any(self.replicas_of(self.goal, one.name) for one in self.goal.roles) else 0

    def replicas_of(self, revision: Revision, role: str) -> int:
        """Of a role in each group. A role that the template no longer has keeps its replicas."""
        return self.counts.get(role, revision.replicas.get(role, 1))


def parse_model_infer(thing: Object) -> ModelInfer | str:
    """The object, or the mistake in it."""
    metadata = {name: thing["metadata"].get(name, "default") for name in ("name", "namespace")}
    try:
        document = {"metadata": metadata, "spec": thing.get("spec") or {}}
        return msgspec.convert(document, ModelInfer, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        return str(error)


def desired_state(observed: ModelInferState, spec: ModelInferSpec, now_s: float) -> DesiredState:
    """``spec``: of the observed object."""
    thing = observed.thing
    uid = thing["metadata"]["uid"]
    history = revision_history(spec.template, [one for one in observed.revisions if is_owned(one, uid)])
    is_restarted = history.is_template_stored() and _is_restarted(thing, history.update, spec)
    if is_restarted:
        begun = msgspec.structs.replace(history.update, since_s=now_s, failed=False, reached=False)
        history = msgspec.structs.replace(history, update=begun)
    current = _current(observed, history)
    goes_back = spec.rollout.on_failure == "RollBack" and history.update.failed
    return DesiredState(
        owner=thing,
        spec=spec,
        history=history,
        goal=current if goes_back else history.update,
        current=current,
        counts=_counts(observed, spec),
        is_restarted=is_restarted,
    )


def _is_restarted(thing: Object, update: Revision, spec: ModelInferSpec) -> bool:
    status = thing.get("status") or {}
    reasons = {one.get("type"): one.get("reason") for one in status.get("conditions") or ()}
    was_paused = reasons.get("Progressing") == "Paused" and not spec.rollout.paused
    return was_paused or (status.get("updateRevision") or update.hash) != update.hash


def _current(observed: ModelInferState, history: RevisionHistory) -> Revision:
    """The one in the status; else the newest other one that pods have; else the template's."""
    said = (observed.thing.get("status") or {}).get("currentRevision")
    found = history.get(said) if isinstance(said, str) else None
    if found is not None:
        return found
    used = {(one["metadata"].get("labels") or {}).get(names.REVISION) for one in observed.pods}
    others = [one for one in history.kept.values() if one.hash in used and one.hash != history.update.hash]
    return max(others, key=lambda one: one.number, default=history.update)


def _counts(observed: ModelInferState, spec: ModelInferSpec) -> Mapping[str, int]:
    """By the roles' own scales, where they are scaled by themselves."""
    own = {names.role_scale_name(observed.thing["metadata"]["name"], one.name): one for one in spec.template.roles}
    counts = {one.name: one.replicas for one in spec.template.roles}
    for one in observed.role_scales:
        role, said = own.get(one["metadata"]["name"]), (one.get("spec") or {}).get("replicas")
        if role is not None and role.scalable and isinstance(said, int):
            counts[role.name] = said
    return counts


def round_percent_down(value: IntOrPercent, of: int) -> int:
    """A number, or a share of ``of``, rounded down."""
    return value if isinstance(value, int) else int(value[:-1]) * of // 100


def round_percent_up(value: IntOrPercent, of: int) -> int:
    """A number, or a share of ``of``, rounded up."""
    return value if isinstance(value, int) else math.ceil(int(value[:-1]) * of / 100)
