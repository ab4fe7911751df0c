# SPDX-License-Identifier: Apache-2.0
"""The statuses of the kinds that the request path reads."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from controller.api.shared_types import Conditions
from extproc.api.spec import NonEmpty, ParentReference, Spec, list_map_keys


class CommonStatus(Spec, frozen=True):
    """Fields of every status. ``conditions``: aspects of the object's state."""

    # The generation of the object that this status is about.
    observed_generation: int | None = None
    conditions: Conditions = ()


class ParentStatus(Spec, frozen=True):
    """Status of a route at one gateway. ``parent_ref``: the gateway. ``controller_name``: the controller that wrote it.
    ``conditions``: Accepted, ResolvedRefs, Programmed.
    """

    parent_ref: ParentReference
    controller_name: NonEmpty
    conditions: Conditions = ()


class ModelRouteStatus(CommonStatus, frozen=True):
    """``conditions``: Accepted (no other route has its names), ResolvedRefs (its ModelServers exist), Programmed (it is
    in the served configuration). ``parents``: the same by gateway, where ``parentRefs`` name any.
    """

    parents: Annotated[tuple[ParentStatus, ...], msgspec.Meta(max_length=32)] = ()


class ModelServerStatus(CommonStatus, frozen=True):
    """``endpoints``: engines that requests may be sent to. ``ready``: those that get new requests. ``draining``: those
    that finish running requests; they get new ones only while no endpoint is ready. ``conditions``: Accepted,
    ResolvedRefs, Programmed, Available.
    """

    endpoints: int | None = None
    ready: int | None = None
    draining: int | None = None


class GatewayConfigStatus(CommonStatus, frozen=True):
    """``failure_mode``: Envoy's behaviour while extproc is unavailable: ``failureMode`` of the spec, or the default
    that the rest implies. ``conditions``: Accepted, ResolvedRefs, Programmed.
    """

    failure_mode: Literal["Open", "Close"] | None = None


class RoleStatus(Spec, frozen=True):
    """One role, over all groups. ``name``: the role's. ``replicas``: existing replicas. ``ready``: replicas that serve.
    ``updated``: replicas of the newest revision.
    """

    name: NonEmpty
    replicas: int = 0
    ready: int = 0
    updated: int = 0


class RecoveryStatus(Spec, frozen=True):
    """Pods that were recreated because one had failed. ``name``: of the recreated unit: its group, then role, replica
    and pod if only those were recreated. ``count``: consecutive recreations. ``at``: the last time. ``reason``: the
    cause, in one word.
    """

    name: NonEmpty
    count: int
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    reason: str | None = None


class ModelInferStatus(CommonStatus, frozen=True):
    """``replicas``: existing groups. ``ready_replicas``: groups that serve in all roles. ``updated_replicas``:
    groups of ``updateRevision``. ``current_revision``: the revision of all groups before the rollout.
    ``update_revision``: the desired revision. ``label_selector``: selects one pod of each group, for autoscalers.
    ``summary``: the fault or the pending step, in a few words. ``groups``: number of groups by state. ``roles``: counts
    by role. ``recoveries``: recent recreations after failures. ``conditions``: Accepted, Available, Progressing,
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
    roles: Annotated[tuple[RoleStatus, ...], msgspec.Meta(max_length=8, extra_json_schema=list_map_keys("name"))] = ()
    recoveries: Annotated[
        tuple[RecoveryStatus, ...], msgspec.Meta(max_length=256, extra_json_schema=list_map_keys("name"))
    ] = ()


class ModelInferRoleStatus(CommonStatus, frozen=True):
    """``replicas``: of the role, in a group. ``ready_replicas``: replicas that serve, in the group with the fewest.
    ``label_selector``: the role's entry pods, for autoscalers. ``conditions``: none so far.
    """

    replicas: int = 0
    ready_replicas: int = 0
    label_selector: str | None = None


class EngineStartDurations(Spec, frozen=True):
    """Start times of the engine that became ready last. ``scheduling_seconds``: from the pod's creation until it was
    scheduled. ``download_seconds``: download of the weights. ``load_seconds``: from then until the model answered.
    """

    scheduling_seconds: float | None = None
    download_seconds: float | None = None
    load_seconds: float | None = None


class BackendStatus(Spec, frozen=True):
    """``name``: of the backend. ``runtime``: the preset that it uses, with its namespace if it has one. ``replicas``:
    existing replicas. ``ready_replicas``: replicas that serve. ``updated_replicas``: replicas of the newest revision.
    ``weight``: its current share of requests. ``roles``: its engines of prefill and of decode, if they are apart.
    ``start``: duration of the last start.
    """

    name: NonEmpty
    runtime: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    weight: int = 0
    roles: Annotated[tuple[RoleStatus, ...], msgspec.Meta(max_length=8, extra_json_schema=list_map_keys("name"))] = ()
    start: EngineStartDurations | None = None


class PhaseDuration(Spec, frozen=True):
    """``name``: of a phase. ``seconds``: time that the Model spent in it before the current stay."""

    name: NonEmpty
    seconds: float = 0.0


class ModelFailure(Spec, frozen=True):
    """``reason``: in one word. ``message``: for people, and what to do."""

    reason: NonEmpty
    message: str = ""


class HostedModelStatus(Spec, frozen=True):
    """One of many models. ``name``: its name. ``state``: Loaded on some server, Loading, Failed, or NotLoaded until a
    request names it. ``servers``: how many have it. ``message``: why the last load failed, on any server.
    """

    name: NonEmpty
    state: Literal["Loaded", "Loading", "Failed", "NotLoaded"]
    servers: int = 0
    message: str = ""


class ModelStatus(CommonStatus, frozen=True):
    """``url``: where the model is served. ``replicas`` and ``ready_replicas``: of all backends. ``phase``: of the
    model. ``transition_status``: whether the observed state matches the spec. ``phase_since``: when the phase began.
    ``phase_times``: time spent in each phase, without the current stay. ``failure``: why it is not loaded.
    ``backends``: status of each backend. ``models``: of each of many models. ``conditions``: Ready, and one for each
    kind of created object.
    """

    url: str | None = None
    replicas: int = 0
    ready_replicas: int = 0
    phase: Literal["Pending", "Standby", "Loading", "Loaded", "FailedToLoad"] | None = None
    transition_status: Literal["UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"] | None = None
    phase_since: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    phase_times: Annotated[
        tuple[PhaseDuration, ...], msgspec.Meta(max_length=8, extra_json_schema=list_map_keys("name"))
    ] = ()
    failure: ModelFailure | None = None
    backends: Annotated[
        tuple[BackendStatus, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))
    ] = ()
    models: Annotated[
        tuple[HostedModelStatus, ...], msgspec.Meta(max_length=1000, extra_json_schema=list_map_keys("name"))
    ] = ()


class TargetStatus(Spec, frozen=True):
    """One target of a binding. ``name``: the target's. ``current``: observed replicas. ``desired``: desired replicas.
    ``ready``: replicas that serve. ``reason``: why this number is desired.
    """

    name: NonEmpty
    current: int | None = None
    desired: int | None = None
    ready: int | None = None
    reason: str | None = None


class AutoscalingPolicyStatus(CommonStatus, frozen=True):
    """``bindings``: how many use it. ``conditions``: Accepted."""

    bindings: int | None = None


class AutoscalingPolicyBindingStatus(CommonStatus, frozen=True):
    """``targets``: their observed and desired replicas. ``last_scaled_at``: when replicas were last written.
    ``last_decision``: the change written then, and its reason. ``conditions``: TargetsResolved, MetricsAvailable,
    ScalingActive, ScalingLimited, CapacityBlocked.
    """

    targets: Annotated[
        tuple[TargetStatus, ...], msgspec.Meta(max_length=32, extra_json_schema=list_map_keys("name"))
    ] = ()
    last_scaled_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    last_decision: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
