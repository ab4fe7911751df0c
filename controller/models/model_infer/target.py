# SPDX-License-Identifier: Apache-2.0
"""What a ModelInfer asks for, read once: spec, revisions, replicas of roles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from controller.api.model_infer import ModelInfer, ModelInferSpec
from controller.kube.resources import Object
from controller.models.model_infer import labels, names, revisions
from controller.models.model_infer.pod_state import is_owned
from controller.models.model_infer.revisions import History, Revision
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from controller.api.common import IntOrPercent
    from controller.models.model_infer.observed import Observed


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """``owner``: the object. ``history``: its revisions. ``goal``: what groups are to become: the template as it is, or
    what it was before, if a failed rollout goes back. ``current``: what groups had before the rollout. ``counts``:
    replicas by role, as the template or the role's own scale says. ``is_restarted``: the rollout begins again: the
    template has gone back to a state that it had before, or a pause is over.
    """

    owner: Object
    spec: ModelInferSpec
    history: History
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
    def first_moving(self) -> int:
        """Groups with a lower ordinal keep the current revision."""
        return up(self.spec.rollout.partition, self.spec.replicas)

    def replicas_of(self, revision: Revision, role: str) -> int:
        """Of a role in each group. A role that the template has no more keeps what it had."""
        return self.counts.get(role, revision.replicas.get(role, 1))


def read(thing: Object) -> ModelInfer | str:
    """The object, or the mistake in it."""
    metadata = {name: thing["metadata"].get(name, "default") for name in ("name", "namespace")}
    try:
        document = {"metadata": metadata, "spec": thing.get("spec") or {}}
        return msgspec.convert(document, ModelInfer, dec_hook=decode_quantity)
    except (msgspec.ValidationError, ValueError) as error:
        return str(error)


def target_of(observed: Observed, spec: ModelInferSpec, now_s: float) -> Target:
    """``spec``: of the observed object."""
    thing = observed.thing
    uid = thing["metadata"]["uid"]
    history = revisions.history_of(spec.template, [one for one in observed.revisions if is_owned(one, uid)])
    is_restarted = history.is_kept() and _is_restarted(thing, history.update, spec)
    if is_restarted:
        begun = msgspec.structs.replace(history.update, since_s=now_s, failed=False, reached=False)
        history = msgspec.structs.replace(history, update=begun)
    current = _current(observed, history)
    goes_back = spec.rollout.on_failure == "RollBack" and history.update.failed
    return Target(
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


def _current(observed: Observed, history: History) -> Revision:
    """As the status says; else the newest other one that pods have; the template itself, if there is none."""
    said = (observed.thing.get("status") or {}).get("currentRevision")
    found = history.get(said) if isinstance(said, str) else None
    if found is not None:
        return found
    used = {(one["metadata"].get("labels") or {}).get(labels.REVISION) for one in observed.pods}
    others = [one for one in history.kept.values() if one.hash in used and one.hash != history.update.hash]
    return max(others, key=lambda one: one.number, default=history.update)


def _counts(observed: Observed, spec: ModelInferSpec) -> Mapping[str, int]:
    """By the roles' own scales, where they are scaled by themselves."""
    own = {names.role_scale_name(observed.thing["metadata"]["name"], one.name): one for one in spec.template.roles}
    counts = {one.name: one.replicas for one in spec.template.roles}
    for one in observed.role_scales:
        role, said = own.get(one["metadata"]["name"]), (one.get("spec") or {}).get("replicas")
        if role is not None and role.scalable and isinstance(said, int):
            counts[role.name] = said
    return counts


def down(value: IntOrPercent, of: int) -> int:
    """A number, or a share of ``of``, rounded down."""
    return value if isinstance(value, int) else int(value[:-1]) * of // 100


def up(value: IntOrPercent, of: int) -> int:
    """A number, or a share of ``of``, rounded up."""
    return value if isinstance(value, int) else math.ceil(int(value[:-1]) * of / 100)
