# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: groups of roles, each with an entry pod and its worker pods; and validation beyond the schema."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from controller.api.pod_spec_checks import pod_spec_type_errors
from controller.api.shared_types import IntOrPercent, PodTemplate, Replicas, ShortName
from controller.api.statuses import ModelInferRoleStatus, ModelInferStatus
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Metadata, NonEmpty, Spec, list_map_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Workers = Annotated[int, msgspec.Meta(ge=0, le=1000)]
# Most pods of one object: the manager serves all users, and one large number must not exhaust its memory.
MOST_PODS: Final = 10_000
LONGEST_NAME: Final = 63
_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
# Digits reserved in names: groups and replicas may be scaled later, when names cannot change.
_GROUP_DIGITS: Final = 3
_REPLICA_DIGITS: Final = 2


class Role(Spec, frozen=True):
    """The part of a group that serves prefill, decode, or both.

    ``name``: part of the names of pods. ``entry_template``: the pod that requests are sent to. ``replicas``: of the
    role in each group. ``worker_replicas``: worker pods of each replica's entry pod. ``worker_template``: the worker
    pods. ``starts_after``: roles of the group that must be ready before this one is started. ``max_unavailable`` and
    ``max_surge``: replicas below and above the desired number while the role changes. ``scalable``: the role gets a
    ModelInferRole, in which autoscalers set its replicas instead of ``replicas``.
    """

    CEL: ClassVar = (
        CelRule("self.workerReplicas == 0 || has(self.workerTemplate)", "workers need a workerTemplate; write one"),
        CelRule(
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
    """A group's pods start together or not at all. ``min_role_replicas``: minimum replicas by role to start; by default
    all. ``timeout``: how long scheduled pods keep their nodes while others of the group find none; then they are
    deleted.
    """

    min_role_replicas: Annotated[dict[str, Replicas], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    timeout: Duration = Duration("10m")


class GroupTemplate(Spec, frozen=True):
    """One group, which serves one copy of the model. ``roles``: its parts. ``gang``: how its pods are started together.
    ``restart_grace_period``: how long a failed pod has to recover before it is recreated. ``unresponsive_timeout``: how
    long a pod that was ready may run without being ready before it counts as failed; 0s means for ever.
    ``drain_timeout``: how long running requests have to end before a pod is deleted.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.gang) || !has(self.gang.minRoleReplicas) || "
            "self.gang.minRoleReplicas.all(name, self.roles.exists(role, role.name == name))",
            "gang.minRoleReplicas names a role that is not there",
        ),
        CelRule(
            "self.roles.all(role, !has(role.startsAfter) || role.startsAfter.all(name, name != role.name && "
            "self.roles.exists(other, other.name == name)))",
            "startsAfter names another role of the same group",
        ),
    )

    roles: Annotated[
        tuple[Role, ...], msgspec.Meta(min_length=1, max_length=8, extra_json_schema=list_map_keys("name"))
    ]
    gang: Gang | None = None
    restart_grace_period: Duration = Duration("0s")
    unresponsive_timeout: Duration = Duration("5m")
    drain_timeout: Duration = Duration("5m")


class RolloutStrategy(Spec, frozen=True):
    """How groups change to a new revision. ``unit``: what is replaced at once. ``max_unavailable`` and ``max_surge``:
    groups below and above the desired number during the rollout. ``partition``: groups with a lower number keep the old
    revision. ``paused``: the rollout is suspended. ``progress_deadline``: time without progress after which the rollout
    has failed. ``on_failure``: the reaction to a failed rollout; the old revision serves in either case. ``max_skew``:
    by how many replicas the roles of a group may differ in progress, with ``unit: Role``.
    """

    CEL: ClassVar = (
        CelRule(
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

    ``template``: one group. ``replicas``: groups. ``recovery``: the unit that is recreated when a pod fails: its group,
    its replica of the role, the pod alone, or nothing. ``rollout``: how a changed template reaches the groups.
    ``scheduler_name``: of the pods. ``revision_history_limit``: number of old revisions that are kept for a rollback.
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

    ``model_infer``: the ModelInfer. ``role``: name of the role. ``replicas``: of the role in each group.
    """

    model_infer: NonEmpty
    role: ShortName
    replicas: Replicas = 1


class ModelInferRole(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelInferRole object."""

    metadata: Metadata
    spec: ModelInferRoleSpec
    status: ModelInferRoleStatus = ModelInferRoleStatus()


def validation_errors(found: ModelInfer) -> Iterator[str]:
    """Validation errors, each with the remedy. Admission denies such an object; an existing one is not reconciled."""
    yield from pod_limit_errors(found.spec, {one.name: one.replicas for one in found.spec.template.roles})
    yield from _names(found)
    yield from _circles(found)
    for role in found.spec.template.roles:
        for field, template in (("entryTemplate", role.entry_template), ("workerTemplate", role.worker_template)):
            if template is None:
                continue
            if not template.spec.get("containers"):
                yield f"{field} of role {role.name} has no containers"
            yield from pod_spec_type_errors(template.spec, f"{field} of role {role.name}")


def pod_limit_errors(spec: ModelInferSpec, replicas: Mapping[str, int]) -> Iterator[str]:
    """An error if the spec requests more pods than the limit. ``replicas``: of roles, as currently scaled."""
    each = sum(replicas.get(one.name, one.replicas) * (1 + one.worker_replicas) for one in spec.template.roles)
    if spec.replicas * each > MOST_PODS:
        yield (
            f"{spec.replicas} groups of {each} pods are {spec.replicas * each}, and one ModelInfer has {MOST_PODS} at "
            "most; ask for fewer replicas, or spread them over several objects"
        )


def _names(found: ModelInfer) -> Iterator[str]:
    name, spec = found.metadata.name, found.spec
    longest = max(spec.template.roles, key=lambda role: len(_suffix(role, spec.replicas)))
    length = len(name) + len(_suffix(longest, spec.replicas))
    if length > LONGEST_NAME:
        yield (
            f"pods of role {longest.name} would have names of {length} characters, and a host name has {LONGEST_NAME} "
            f"at most; use a name or a role's name that is {length - LONGEST_NAME} shorter"
        )
    if any(role.worker_replicas for role in spec.template.roles) and not _DNS_LABEL.fullmatch(name):
        yield (
            f"workers find their entry pod by host names that are made from '{name}'; use a name of lower case letters,"
            " digits and '-' that begins with a letter"
        )


def _suffix(role: Role, replicas: int) -> str:
    """What stands behind the ModelInfer's name in the name of a pod: ``-007-decode-03-1``."""
    return f"-{replicas:0{_GROUP_DIGITS}}-{role.name}-{role.replicas:0{_REPLICA_DIGITS}}-{role.worker_replicas}"


def _circles(found: ModelInfer) -> Iterator[str]:
    """An error for roles that wait for each other: they would never start."""
    after = {one.name: one.starts_after for one in found.spec.template.roles}
    started: set[str] = set()
    while ready := [name for name, first in after.items() if name not in started and started.issuperset(first)]:
        started.update(ready)
    waiting = [name for name in after if name not in started]
    if waiting:
        yield f"{', '.join(waiting)} wait for each other by startsAfter, so none of them would start; leave one out"
