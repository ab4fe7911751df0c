# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: groups of roles, each with an entry pod and its worker pods."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from controller.api.common import IntOrPercent, PodTemplate, Replicas, ShortName
from controller.api.statuses import ModelInferRoleStatus, ModelInferStatus
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata, NonEmpty, Rule, Spec, keyed_by

Workers = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class Role(Spec, frozen=True):
    """What some pods of a group do: prefill, decode, or all of it.

    ``name``: part of the names of pods. ``entry_template``: the pod that requests are sent to. ``replicas``: of the
    role in each group. ``worker_replicas``: further pods that each replica's entry pod commands. ``worker_template``:
    those pods. ``starts_after``: roles of the group that must be ready before this one is started.
    ``max_unavailable`` and ``max_surge``: replicas that may be missing, or more than wanted, while the role changes.
    ``scalable``: the role gets a ModelInferRole, by which autoscalers set its replicas instead of ``replicas``.
    """

    CEL: ClassVar = (
        Rule("self.workerReplicas == 0 || has(self.workerTemplate)", "workers need a workerTemplate; write one"),
        Rule(
            "!has(self.maxUnavailable) || !(self.maxUnavailable == 0 || self.maxUnavailable == '0%') || "
            "(has(self.maxSurge) && !(self.maxSurge == 0 || self.maxSurge == '0%'))",
            "maxUnavailable of the role is 0 and it has no maxSurge, so it could never change; make one of them"
            " positive",
        ),
    )

    name: ShortName
    entry_template: PodTemplate
    replicas: Replicas = 1
    worker_replicas: Workers = 0
    worker_template: PodTemplate | None = None
    starts_after: Annotated[tuple[ShortName, ...], msgspec.Meta(max_length=8)] = ()
    max_unavailable: IntOrPercent | None = None
    max_surge: IntOrPercent | None = None
    scalable: bool = False


class Gang(Spec, frozen=True):
    """A group's pods start together or not at all. ``min_role_replicas``: replicas by role that suffice to start; all,
    if left out. ``timeout``: how long to wait for room before the pods that hold some are given up.
    """

    min_role_replicas: Annotated[dict[str, Replicas], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    timeout: Duration = Duration("10m")


class GroupTemplate(Spec, frozen=True):
    """One group, which serves one copy of the model. ``roles``: its parts. ``gang``: how its pods are started together.
    ``restart_grace_period``: how long a failed pod has to recover by itself. ``unresponsive_timeout``: how long a pod
    that was ready may run without being ready before it counts as failed; 0s means for ever. ``drain_timeout``: how
    long running requests have to end before a pod is deleted.
    """

    CEL: ClassVar = (
        Rule(
            "!has(self.gang) || !has(self.gang.minRoleReplicas) || "
            "self.gang.minRoleReplicas.all(name, self.roles.exists(role, role.name == name))",
            "gang.minRoleReplicas names a role that is not there",
        ),
        Rule(
            "self.roles.all(role, !has(role.startsAfter) || role.startsAfter.all(name, name != role.name && "
            "self.roles.exists(other, other.name == name)))",
            "startsAfter names another role of the same group",
        ),
    )

    roles: Annotated[tuple[Role, ...], msgspec.Meta(min_length=1, max_length=8, extra_json_schema=keyed_by("name"))]
    gang: Gang | None = None
    restart_grace_period: Duration = Duration("0s")
    unresponsive_timeout: Duration = Duration("5m")
    drain_timeout: Duration = Duration("5m")


class RolloutStrategy(Spec, frozen=True):
    """How groups change to a new revision. ``unit``: what is replaced at once. ``max_unavailable`` and ``max_surge``:
    groups that may be missing, or more than wanted, meanwhile. ``partition``: groups with a lower number keep the old
    revision. ``paused``: nothing changes. ``progress_deadline``: without progress for so long, the rollout has failed.
    ``on_failure``: what happens then; the old revision serves in either case. ``max_skew``: by how many replicas the
    roles of a group may differ in progress, with ``unit: Role``.
    """

    CEL: ClassVar = (
        Rule(
            # the server also tries the rule on the default {}, before it fills in what is inside
            "!has(self.maxUnavailable) || !has(self.maxSurge) || "
            "!(self.maxUnavailable == 0 || self.maxUnavailable == '0%') || "
            "!(self.maxSurge == 0 || self.maxSurge == '0%')",
            "maxUnavailable and maxSurge are both 0, so nothing could ever change; make one of them positive",
        ),
    )

    unit: Literal["Group", "Role"] = "Group"
    max_unavailable: IntOrPercent = 1
    max_surge: IntOrPercent = 0
    partition: IntOrPercent = 0
    paused: bool = False
    progress_deadline: Duration = Duration("30m")
    on_failure: Literal["Stop", "RollBack"] = "Stop"
    max_skew: IntOrPercent = "100%"


class ModelInferSpec(Spec, frozen=True):
    """Groups of pods that run a model.

    ``template``: one group. ``replicas``: groups. ``recovery``: what is made anew when a pod fails: its group, its
    replica of the role, the pod alone, or nothing. ``rollout``: how a changed template reaches the groups.
    ``scheduler_name``: of the pods. ``revision_history_limit``: old revisions that are kept to go back to.
    """

    template: GroupTemplate
    replicas: Replicas = 1
    recovery: Literal["Group", "Role", "Pod", "None"] = "Role"
    rollout: RolloutStrategy = RolloutStrategy()
    scheduler_name: NonEmpty | None = None
    revision_history_limit: Annotated[int, msgspec.Meta(ge=0, le=100)] = 10


class ModelInfer(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelInfer object."""

    metadata: Metadata
    spec: ModelInferSpec
    status: ModelInferStatus = ModelInferStatus()


class ModelInferRoleSpec(Spec, frozen=True):
    """The replicas of one role of a ModelInfer, for autoscalers. Attaché makes such objects for roles that are
    ``scalable``.

    ``model_infer``: whose role. ``role``: which. ``replicas``: of the role in each group.
    """

    model_infer: NonEmpty
    role: ShortName
    replicas: Replicas = 1


class ModelInferRole(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelInferRole object."""

    metadata: Metadata
    spec: ModelInferRoleSpec
    status: ModelInferRoleStatus = ModelInferRoleStatus()
