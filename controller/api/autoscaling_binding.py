# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicyBinding: what a policy scales."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from controller.api.shared_types import ObjectReference, Positive, Replicas, Share, TargetName
from controller.api.statuses import AutoscalingPolicyBindingStatus
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Metadata, Name, NonEmpty, Spec, list_map_keys


class EngineCapacity(Spec, frozen=True):
    """The speed of one replica, used until it is measured. ``prefill_tokens_per_second``: uncached prompt tokens.
    ``step``: duration of a decode step with one short request. ``step_per_token``: time that each token in flight adds
    to a step. ``kv_tokens``: capacity of its KV cache, in tokens.
    """

    prefill_tokens_per_second: Positive | None = None
    step: Duration | None = None
    step_per_token: Duration | None = None
    kv_tokens: Positive | None = None


class ScaleTarget(Spec, frozen=True):
    """A scalable object. ``name``: of the target, in the status and in ratios. ``ref``: the object, which has a scale
    subresource. ``role``: a role of the ModelInfer with scalable: true; by default its groups are scaled. ``stage``:
    the stages that its engines serve: both, or one of prefill and decode. ``server``: the ModelServer of its engines;
    by default the one whose selector matches them, and with it those of the same pods at other ports. ``min_replicas``:
    fewest replicas. ``max_replicas``: most replicas. ``cost``: of a replica and hour, relative to other targets.
    ``accelerator``: its kind of GPU: words of the label of its nodes, such as H100 or nvidia-h100-80gb in any case, or
    the resource, such as nvidia.com/gpu. ``accelerators``: of one replica. ``priority``: the target with the highest is
    filled first. ``weight``: its share with the allocation Weights. ``spot``: its nodes may be reclaimed. ``capacity``:
    the speed of a replica, used until it is measured. ``start_time``: from the creation of a replica to its first
    request, used until it is measured.
    """

    CEL: ClassVar = (
        CelRule("!has(self.minReplicas) || self.minReplicas <= self.maxReplicas", "minReplicas is above maxReplicas"),
    )

    name: TargetName
    ref: ObjectReference
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    role: NonEmpty | None = None
    stage: Literal["Both", "Prefill", "Decode"] = "Both"
    server: Name | None = None
    min_replicas: Replicas = 1
    cost: Positive = 1.0
    accelerator: NonEmpty | None = None
    accelerators: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 1
    priority: int = 0
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1
    spot: bool = False
    capacity: EngineCapacity = EngineCapacity()
    start_time: Duration = Duration("60s")


class RatioConstraint(Spec, frozen=True):
    """How many replicas of one target go with one of another. ``numerator`` and ``denominator``: targets by name.
    ``min`` and ``max``: of the ratio.
    """

    CEL: ClassVar = (CelRule("self.min <= self.max", "min is above max"),)

    numerator: TargetName
    denominator: TargetName
    min: Positive
    max: Positive


class Budget(Spec, frozen=True):
    """``cost_per_hour``: of all replicas together. ``accelerators``: by kind; a target counts if its ``accelerator``
    contains all words of the kind, as nvidia-h100-80gb those of H100.
    """

    cost_per_hour: Positive | None = None
    accelerators: dict[str, Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]] = msgspec.field(default_factory=dict)


class AutoscalingPolicyBindingSpec(Spec, frozen=True):
    """What a policy scales. ``policy_ref``: the policy, of the same namespace. ``targets``: the objects that serve the
    load together. ``allocation``: how replicas are distributed over several targets: Cheapest has the least cost,
    Priority fills one after the other, Weights keeps their shares, Expansion takes batches of growing size, the
    cheapest first. ``expansion_rate_percent``: growth of these batches. ``min_on_demand``: the minimum share of
    capacity that is not spot. ``budget``: limits of all targets together. ``ratios``: between targets. ``priority``:
    where several bindings need the same accelerators, the one with the highest priority gets them first; among equals,
    the oldest.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.ratios) || self.ratios.all(one, self.targets.exists(target, target.name == one.numerator) && "
            "self.targets.exists(target, target.name == one.denominator))",
            "a ratio names a target that is not there",
        ),
    )

    policy_ref: Name
    targets: Annotated[
        tuple[ScaleTarget, ...], msgspec.Meta(min_length=1, max_length=32, extra_json_schema=list_map_keys("name"))
    ]
    allocation: Literal["Cheapest", "Priority", "Weights", "Expansion"] = "Cheapest"
    expansion_rate_percent: Annotated[int, msgspec.Meta(ge=101, le=10_000)] = 200
    min_on_demand: Share = 0.0
    budget: Budget | None = None
    ratios: Annotated[tuple[RatioConstraint, ...], msgspec.Meta(max_length=16)] = ()
    priority: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 0


class AutoscalingPolicyBinding(msgspec.Struct, frozen=True, kw_only=True):
    """An AutoscalingPolicyBinding object."""

    metadata: Metadata
    spec: AutoscalingPolicyBindingSpec
    status: AutoscalingPolicyBindingStatus = AutoscalingPolicyBindingStatus()
