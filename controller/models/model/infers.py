# SPDX-License-Identifier: Apache-2.0
"""The ModelInfer of a backend: its groups, roles and rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.api.crds.schema import to_plain
from controller.models.model.pods import template

if TYPE_CHECKING:
    from controller.models.model.observed import Settings
    from controller.models.model.resolved import Resolved, ResolvedBackend, ResolvedRole


def infer_spec(model: Resolved, made: ResolvedBackend, settings: Settings) -> dict[str, Any]:
    """``replicas`` is left to autoscalers by whoever applies it."""
    group: dict[str, Any] = {
        "roles": [_role(model, made, role, settings) for role in made.roles],
        "drainTimeout": str(max((role.engine.config.drain_timeout for role in made.roles), key=float)),
    }
    if len(made.roles) > 1 or any(role.engine.config.nodes > 1 for role in made.roles):
        # half an engine, or prefill without decode, would hold GPUs for nothing
        group["gang"] = {}
    return {
        "replicas": 0 if model.spec.stop else initial_replicas(made),
        "template": group,
        "rollout": to_plain(made.backend.rollout),
    }


def initial_replicas(made: ResolvedBackend) -> int:
    """What is written, or where autoscaling may begin."""
    backend = made.backend
    if backend.replicas is not None:
        return backend.replicas
    return max(backend.min_replicas if backend.min_replicas is not None else 1, 0)


def _role(model: Resolved, made: ResolvedBackend, role: ResolvedRole, settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": role.name,
        "replicas": role.replicas,
        "entryTemplate": template(model, made, role, "entry", settings),
    }
    if role.engine.config.nodes > 1:
        found["workerReplicas"] = role.engine.config.nodes - 1
        found["workerTemplate"] = template(model, made, role, "worker", settings)
    return found
