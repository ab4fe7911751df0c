# SPDX-License-Identifier: Apache-2.0
"""What a Model says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from controller.models.model.conditions import Condition, condition, condition_of, of_children
from controller.models.model.drift import is_settled
from controller.models.model.infers import initial_replicas
from controller.models.model.phases import BackendState, phase_fields, phase_of, transition_of
from controller.models.model.pod_report import failure_of, is_scheduled, of_backend, start_times
from controller.models.model.serving import shares
from controller.models.model.warming import cannot_warm

if TYPE_CHECKING:
    from controller.kube.resources import Object
    from controller.models.model.children import Child
    from controller.models.model.observed import Observed
    from controller.models.model.resolved import Resolved, Unresolved

Status = dict[str, Any]
Owned = Mapping[tuple[str, str], "Object"]

_BLOCKED: Final = frozenset({"BlockedByFailedLoad", "ProgressDeadlineExceeded"})
_URL_PATH: Final = "/v1"


def replicas_of(owned: Owned, model: Resolved) -> dict[str, int]:
    """Replicas that serve, by backend."""
    return {one.backend.name: _count(owned, model.child(one.backend), "readyReplicas") for one in model.backends}


def _count(owned: Owned, name: str, field: str) -> int:
    return int(((owned.get(("ModelInfer", name)) or {}).get("status") or {}).get(field) or 0)


def unresolved_status(observed: Observed, problem: Unresolved, ready: int, replicas: int, now_s: float) -> Status:
    """Nothing is changed: what runs goes on. ``ready`` and ``replicas``: of everything that was made before."""
    before = observed.thing.get("status") or {}
    phase = phase_fields("Loaded" if ready else "FailedToLoad", before, now_s)
    kept = {name: before[name] for name in ("url", "backends") if name in before}
    said = f"what ran before goes on: {problem.message}" if replicas else problem.message
    conditions = [
        condition("Resolved", False, problem.reason, problem.message),
        condition("Ready", ready > 0, problem.reason, said),
    ]
    return {
        **kept,
        **phase,
        "replicas": replicas,
        "readyReplicas": ready,
        "transitionStatus": "InvalidSpec",
        "failure": {"reason": problem.reason, "message": problem.message},
        "conditions": _of_generation(conditions, observed.thing),
        **_generation(observed.thing),
    }


def status_of(
    observed: Observed, model: Resolved, wanted: Sequence[Child], owned: Owned, taken: Sequence[str], now_s: float
) -> Status:
    """``owned``: what the Model has, by kind and name. ``taken``: objects of others that have names which it needs."""
    before = observed.thing.get("status") or {}
    states = [_state(model, made_name, wanted, owned, observed.pods) for made_name in _names(model)]
    phase = phase_of(states)
    failure = next((one.failure for one in states if one.failure is not None), None)
    if taken:
        failure = ("NameTaken", _taken(taken))
    found: Status = {
        **phase_fields(phase, before, now_s),
        "replicas": sum(one.there for one in states),
        "readyReplicas": sum(one.ready for one in states),
        "transitionStatus": "InvalidSpec" if taken else transition_of(states),
        "backends": _backends(model, states, observed, before),
        "conditions": _of_generation(_conditions(model, states, owned, taken, phase, failure), observed.thing),
        **_generation(observed.thing),
    }
    if failure is not None:
        found["failure"] = {"reason": failure[0], "message": failure[1]}
    if url := url_of(observed.gateways):
        found["url"] = url
    return found


def _taken(names: Sequence[str]) -> str:
    return f"{', '.join(names)} belong to others; delete them, or name the Model otherwise"


def _names(model: Resolved) -> list[str]:
    return [one.backend.name for one in model.backends]


def _state(
    model: Resolved, backend: str, wanted: Sequence[Child], owned: Owned, pods: Sequence[Object]
) -> BackendState:
    name = f"{model.name}-{backend}"
    infer = owned.get(("ModelInfer", name))
    (made,) = (one for one in model.backends if one.backend.name == backend)
    mine = of_backend(pods, backend)
    failed = failure_of(mine)
    failure = (failed.reason, failed.message) if failed is not None else None
    if infer is None:
        replicas = 0 if model.spec.stop else initial_replicas(made)
        return BackendState(name=backend, wanted=replicas, is_scheduled=is_scheduled(mine), failure=failure)
    degraded = condition_of(infer, "Degraded")
    if degraded.get("status") == "True":
        # it knows the log of what crashed; of that, a pod in its back-off shows no word
        failure = (str(degraded["reason"]), f"ModelInfer {name}: {degraded.get('message', '')}")
    reasons = {one.get("reason") for one in (infer.get("status") or {}).get("conditions") or ()}
    child = next(
        (one for one in wanted if one.resource.kind == "ModelInfer" and one.thing["metadata"]["name"] == name), None
    )
    status = infer.get("status") or {}
    has_seen = (status.get("observedGeneration") or 0) >= infer["metadata"].get("generation", 0)
    return BackendState(
        name=backend,
        wanted=int(infer["spec"].get("replicas", 1)),
        there=int(status.get("replicas") or 0),
        ready=int(status.get("readyReplicas") or 0),
        updated=int(status.get("updatedReplicas") or 0),
        is_current=has_seen and child is not None and is_settled(child.thing, infer, child.yields),
        is_blocked=bool(reasons & _BLOCKED),
        is_scheduled=is_scheduled(mine),
        failure=failure,
    )


def _backends(
    model: Resolved, states: Sequence[BackendState], observed: Observed, before: Mapping[str, Any]
) -> list[Status]:
    weights = shares(model, {one.name: one.ready for one in states})
    earlier = {one["name"]: one for one in before.get("backends") or ()}
    found = []
    for made, state in zip(model.backends, states, strict=True):
        start = start_times(of_backend(observed.pods, state.name)) or earlier.get(state.name, {}).get("start")
        line: Status = {
            "name": state.name,
            "runtime": str(made.preset),
            "replicas": state.there,
            "readyReplicas": state.ready,
            "updatedReplicas": state.updated,
            "weight": weights[state.name],
        }
        found.append({**line, "start": dict(start)} if start else line)
    return found


def _conditions(
    model: Resolved,
    states: Sequence[BackendState],
    owned: Owned,
    taken: Sequence[str],
    phase: str,
    failure: tuple[str, str] | None,
) -> list[Condition]:
    by_kind: dict[str, list[Object]] = {}
    for (kind, _), thing in sorted(owned.items()):
        by_kind.setdefault(kind, []).append(thing)
    resolved = condition(
        "Resolved", True, "Resolved", ", ".join(f"{one.backend.name}: {one.preset}" for one in model.backends)
    )
    if taken:
        resolved = condition("Resolved", False, "NameTaken", _taken(taken))
    route = of_children("ModelRoutesReady", "ModelRoute", by_kind.get("ModelRoute", ()))
    found = [
        resolved,
        _infers(states),
        of_children("ModelServersReady", "ModelServer", by_kind.get("ModelServer", ())),
        route,
    ]
    if bindings := by_kind.get("AutoscalingPolicyBinding"):
        found.append(of_children("AutoscalingReady", "AutoscalingPolicyBinding", bindings))
    if model.spec.warm:
        found.append(_warm(model, [*by_kind.get("DaemonSet", ()), *by_kind.get("Job", ())]))
    is_reached = any(condition_of(one, "Available").get("status") == "True" for one in by_kind.get("ModelServer", ()))
    return [*found, _ready(model, phase, failure, route, is_reached=is_reached)]


def _infers(states: Sequence[BackendState]) -> Condition:
    missing = [one for one in states if one.wanted and not one.ready]
    if not missing:
        return condition("ModelInfersReady", True, "ModelInferReady", "")
    said = "; ".join(
        f"backend '{one.name}': {one.failure[1] if one.failure else 'no replica is ready yet'}" for one in missing
    )
    reason = next((one.failure[0] for one in missing if one.failure), "NotReady")
    return condition("ModelInfersReady", False, reason, said)


def _ready(
    model: Resolved, phase: str, failure: tuple[str, str] | None, route: Condition, *, is_reached: bool
) -> Condition:
    """Whether a request would be answered. ``is_reached``: a gateway has an engine of it."""
    if model.spec.stop:
        return condition("Ready", False, "Stopped", "spec.stop is true")
    if phase != "Loaded":
        reason, message = failure or (phase, "no replica is ready")
        return condition("Ready", False, reason, message)
    if route["status"] != "True":
        return condition("Ready", False, route["reason"], f"no gateway serves it: {route['message']}")
    if not is_reached:
        return condition("Ready", False, "NotAvailable", "no gateway has an engine of it yet")
    return condition("Ready", True, "Serving", "")


def _warm(model: Resolved, warming: Sequence[Object]) -> Condition:
    if why := cannot_warm(model):
        return condition("WeightsWarm", False, "CannotWarm", why)
    done = [_is_done(one.get("kind", ""), one.get("status") or {}) for one in warming]
    if not done or not all(done):
        return condition("WeightsWarm", False, "Downloading", f"{sum(done)} of {len(done)} have fetched the weights")
    return condition("WeightsWarm", True, "Warm", "")


def _is_done(kind: str, status: Mapping[str, Any]) -> bool:
    if kind == "Job":
        return bool(status.get("succeeded"))
    wanted = status.get("desiredNumberScheduled")
    return wanted is not None and status.get("numberReady", 0) >= wanted


def _of_generation(conditions: Sequence[Condition], thing: Object) -> list[Condition]:
    return [{**one, **_generation(thing)} for one in conditions]


def _generation(thing: Object) -> Status:
    """Files have none."""
    generation = thing["metadata"].get("generation")
    return {} if generation is None else {"observedGeneration": generation}


def url_of(gateways: Sequence[Object]) -> str | None:
    """Of the first gateway: its load balancer's address, or else its name in the cluster."""
    for service in gateways:
        ports = service["spec"].get("ports") or [{"port": 80}]
        port = next((one["port"] for one in ports if one.get("name") == "http"), ports[0]["port"])
        ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
        metadata = service["metadata"]
        host = next(
            (one.get("hostname") or one.get("ip") for one in ingress if one.get("hostname") or one.get("ip")), None
        )
        host = host or f"{metadata['name']}.{metadata['namespace']}.svc"
        scheme = "https" if port == 443 else "http"
        return f"{scheme}://{host}{'' if port in (80, 443) else f':{port}'}{_URL_PATH}"
    return None
