# SPDX-License-Identifier: Apache-2.0
"""What requests for a Model do while no engine is there: the activation of its ModelServers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from extproc.api.quantities import Duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.kube.resources import Object
    from controller.models.model.resolved import Resolved, ResolvedBackend

_SPANS: Final = ("schedulingSeconds", "downloadSeconds", "loadSeconds")
# Measured starts are told in such steps, up to so many seconds: a ModelServer that changed with each would be written
# often.
_STEPS: Final = ((120.0, 15.0), (600.0, 30.0), (math.inf, 60.0))
# What is told stays while the measured start differs by no more than this share.
_TOLERATED: Final = 0.25


def may_be_at_zero(model: Resolved, made: ResolvedBackend) -> bool:
    """Whether autoscaling may take the last replica of a backend. A stopped Model has none, and nothing starts one."""
    wanted, backend = model.spec.autoscaling, made.backend
    if wanted is None or model.spec.stop or backend.max_replicas is None:
        return False
    says_so = backend.min_replicas is None and model.to_zero is not None
    return wanted.scale_to_zero is not None or backend.min_replicas == 0 or says_so


def activation_spec(model: Resolved, made: ResolvedBackend, start_times: Mapping[str, str]) -> dict[str, Any] | None:
    """``start_times``: what starts take, by backend, where that is known. None: its engines never all go."""
    if not may_be_at_zero(model, made):
        return None
    start_time = start_times.get(made.backend.name)
    spec = {} if start_time is None else {"startTime": start_time}
    return spec if model.to_zero is None else {**spec, "holdTimeout": str(model.to_zero.hold_timeout)}


def told_start_times(model: Resolved, status: Mapping[str, Any], servers: Mapping[str, Object]) -> dict[str, str]:
    """By backend. ``status``: of the Model. ``servers``: ModelServers as they are, by name."""
    measured = {
        one["name"]: sum(one["start"].get(span) or 0.0 for span in _SPANS)
        for one in status.get("backends") or ()
        if one.get("start")
    }
    found = {}
    for made in model.backends:
        server = servers.get(model.child(made.backend), {})
        told = ((server.get("spec") or {}).get("activation") or {}).get("startTime")
        start_time = start_time_of(measured.get(made.backend.name), told)
        if start_time is not None:
            found[made.backend.name] = start_time
    return found


def start_time_of(measured_s: float | None, told: str | None) -> str | None:
    """What to tell of a start that took ``measured_s``, where ``told`` was told before; None: nothing is known."""
    if not measured_s:
        return told
    if told is not None and abs(measured_s - Duration(told)) <= _TOLERATED * Duration(told):
        return told
    step_s = next(step for most_s, step in _STEPS if measured_s <= most_s)
    return f"{math.ceil(measured_s / step_s) * step_s:g}s"
