# SPDX-License-Identifier: Apache-2.0
"""The statuses of the kinds that the request path reads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from controller.api.common import Conditions
from extproc.api.spec import NonEmpty, ParentReference, Spec, keyed_by


class Status(Spec, frozen=True):
    """What every status says. ``conditions``: aspects of the object's state."""

    # The generation of the object that this status is about.
    observed_generation: int | None = None
    conditions: Conditions = ()


class ParentStatus(Spec, frozen=True):
    """What one gateway made of a route. ``parent_ref``: the gateway. ``controller_name``: who speaks.
    ``conditions``: Accepted, ResolvedRefs, Programmed.
    """

    parent_ref: ParentReference
    controller_name: NonEmpty
    conditions: Conditions = ()


class ModelRouteStatus(Status, frozen=True):
    """``conditions``: Accepted (no other route has its names), ResolvedRefs (its ModelServers are there), Programmed
    (it is in the configuration that is served). ``parents``: the same by gateway, where ``parentRefs`` name any.
    """

    parents: Annotated[tuple[ParentStatus, ...], msgspec.Meta(max_length=32)] = ()


class ModelServerStatus(Status, frozen=True):
    """``endpoints``: engines that requests may be sent to. ``ready``: those of them that get new requests.
    ``draining``: the others, which finish what they have; only while there are no others do they get new requests.
    ``conditions``: Accepted, ResolvedRefs, Programmed, Available.
    """

    endpoints: int | None = None
    ready: int | None = None
    draining: int | None = None


class GatewayConfigStatus(Status, frozen=True):
    """``failure_mode``: what Envoy does without extproc, ``failureMode`` of the spec or what follows from the rest.
    ``conditions``: Accepted, ResolvedRefs, Programmed.
    """

    failure_mode: Literal["Open", "Close"] | None = None


class ModelAccessPolicyStatus(Status, frozen=True):
    """``conditions``: Accepted (where it is not, nobody may use what it is attached to), ResolvedRefs (its targets are
    there), Programmed (it is in the configuration that is served).
    """


class GroupStatus(Spec, frozen=True):
    """One role, over all groups. ``name``: the role's. ``replicas``: how many there are. ``ready``: how many serve.
    ``updated``: how many are of the newest revision.
    """

    name: NonEmpty
    replicas: int = 0
    ready: int = 0
    updated: int = 0


class Recovery(Spec, frozen=True):
    """Pods that were made anew because one had failed. ``name``: group, role, replica, pod, as far as they were made
    anew together. ``count``: how many times in a row. ``at``: the last time. ``reason``: why, in one word.
    """

    name: NonEmpty
    count: int
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    reason: str | None = None


class ModelInferStatus(Status, frozen=True):
    """``replicas``: groups that are there. ``ready_replicas``: those of them that are ready in all roles.
    ``updated_replicas``: those of ``updateRevision``. ``current_revision``: what all groups had before the rollout.
    ``update_revision``: what they are to have. ``label_selector``: picks one pod a group, for autoscalers. ``summary``:
    what is wrong, or what is waited for, in a few words. ``groups``: how many are in which state. ``roles``: counts by
    role. ``recoveries``: what has failed lately and was made anew. ``conditions``: Accepted, Available, Progressing,
    Degraded.
    """

    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    current_revision: str | None = None
    update_revision: str | None = None
    label_selector: str | None = None
    summary: str | None = None
    groups: dict[str, int] = msgspec.field(default_factory=dict)
    roles: Annotated[tuple[GroupStatus, ...], msgspec.Meta(max_length=8, extra_json_schema=keyed_by("name"))] = ()
    recoveries: Annotated[tuple[Recovery, ...], msgspec.Meta(max_length=256, extra_json_schema=keyed_by("name"))] = ()


class ModelInferRoleStatus(Status, frozen=True):
    """``replicas``: of the role, in a group. ``ready_replicas``: those of them that serve, in the group with the
    fewest.
    ``label_selector``: the role's entry pods, for autoscalers. ``conditions``: none so far.
    """

    replicas: int = 0
    ready_replicas: int = 0
    label_selector: str | None = None


class StartTimes(Spec, frozen=True):
    """How long the engine that became ready last took to start. ``scheduling_seconds``: from the pod's creation until
    it had a node. ``download_seconds``: fetching weights. ``load_seconds``: from there until the model answered.
    """

    scheduling_seconds: float | None = None
    download_seconds: float | None = None
    load_seconds: float | None = None


class BackendStatus(Spec, frozen=True):
    """``name``: of the backend. ``runtime``: the preset that it uses, with its namespace if it has one. ``replicas``:
    how many there are. ``ready_replicas``: how many serve. ``updated_replicas``: how many are of the newest revision.
    ``weight``: its share of requests now. ``start``: what the last start took.
    """

    name: NonEmpty
    runtime: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    weight: int = 0
    start: StartTimes | None = None


class PhaseTime(Spec, frozen=True):
    """``name``: of a phase. ``seconds``: that the Model spent in it before the present stay."""

    name: NonEmpty
    seconds: float = 0.0


class ModelFailure(Spec, frozen=True):
    """``reason``: in one word. ``message``: for people, and what to do."""

    reason: NonEmpty
    message: str = ""


class ModelStatus(Status, frozen=True):
    """``url``: where the model is served. ``replicas`` and ``ready_replicas``: of all backends. ``phase``: of the
    model.
    ``transition_status``: whether what runs is what is written. ``phase_since``: when the phase began. ``phase_times``:
    how long each phase was, without the present one. ``failure``: why it is not loaded. ``backends``: each way to run
    it. ``conditions``: Ready, and one by kind of object that was made.
    """

    url: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    phase: Literal["Pending", "Standby", "Loading", "Loaded", "FailedToLoad"] | None = None
    transition_status: Literal["UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"] | None = None
    phase_since: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    phase_times: Annotated[tuple[PhaseTime, ...], msgspec.Meta(max_length=8, extra_json_schema=keyed_by("name"))] = ()
    failure: ModelFailure | None = None
    backends: Annotated[tuple[BackendStatus, ...], msgspec.Meta(max_length=16, extra_json_schema=keyed_by("name"))] = ()


class TargetStatus(Spec, frozen=True):
    """One target of a binding. ``name``: the target's. ``current``: replicas that it has. ``desired``: replicas that it
    should have. ``ready``: those that serve. ``reason``: why so many.
    """

    name: NonEmpty
    current: int | None = None
    desired: int | None = None
    ready: int | None = None
    reason: str | None = None


class AutoscalingPolicyStatus(Status, frozen=True):
    """``bindings``: how many use it. ``conditions``: Accepted."""

    bindings: int | None = None


class AutoscalingPolicyBindingStatus(Status, frozen=True):
    """``targets``: what they have and should have. ``last_scaled_at``: when replicas were last written.
    ``last_decision``: what was written then, and why. ``conditions``: TargetsResolved, MetricsAvailable, ScalingActive,
    ScalingLimited, CapacityBlocked.
    """

    targets: Annotated[tuple[TargetStatus, ...], msgspec.Meta(max_length=16, extra_json_schema=keyed_by("name"))] = ()
    last_scaled_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    last_decision: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
