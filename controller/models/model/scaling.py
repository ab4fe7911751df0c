# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicy and AutoscalingPolicyBinding of a Model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from controller.models.model.resolved import Resolved, ResolvedBackend


def policy_spec(model: Resolved) -> dict[str, Any] | None:
    """The default policy; None where the Model names one, or does not scale."""
    wanted = model.spec.autoscaling
    if wanted is None or wanted.policy_ref is not None or model.spec.stop:
        return None
    return {"scaleToZero": {"idle": str(wanted.scale_to_zero)}} if wanted.scale_to_zero is not None else {}


def binding_spec(model: Resolved) -> dict[str, Any] | None:
    """Backends that have bounds are its targets. A stopped Model is not scaled."""
    wanted = model.spec.autoscaling
    if wanted is None or model.spec.stop:
        return None
    return {
        "policyRef": wanted.policy_ref or model.name,
        "targets": [_target(model, one) for one in model.backends if one.backend.max_replicas is not None],
    }


def _target(model: Resolved, made: ResolvedBackend) -> dict[str, Any]:
    backend = made.backend
    found: dict[str, Any] = {
        "name": backend.name,
        "ref": {"apiVersion": API_VERSION, "kind": "ModelInfer", "name": model.child(backend)},
        "minReplicas": backend.min_replicas if backend.min_replicas is not None else _least(model),
        "maxReplicas": backend.max_replicas,
        "cost": backend.cost,
        "spot": backend.spot,
    }
    return {**found, "accelerator": backend.accelerator} if backend.accelerator else found


def _least(model: Resolved) -> int:
    """A Model that may be scaled to zero says so once, here or in the policy that it names."""
    wanted = model.spec.autoscaling
    return 0 if model.to_zero is not None or (wanted is not None and wanted.scale_to_zero is not None) else 1
