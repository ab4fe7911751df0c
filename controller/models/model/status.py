# SPDX-License-Identifier: Apache-2.0
"""The status of a Model: phases in KServe's words, conditions, and what its pods report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.kube.api_resources import key_of, parse_timestamp
from controller.models.model.children import is_up_to_date, traffic_weights
from controller.models.model.hosted_models_status import failed_models, hosted_models_status
from controller.models.model.model_state import BACKEND, PURPOSE
from controller.models.model.readiness import (
    Condition,
    Place,
    ReadyParts,
    children_condition,
    condition,
    current_condition,
    gateway_wait,
    reached_condition,
    ready_condition,
)
from controller.models.model.workload_templates import DOWNLOAD, ENGINE, initial_replicas, why_no_warming
from controller.models.runtimes.prefill_connectors import why_sidecar_needed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from controller.kube.api_resources import Object
    from controller.models.model.children import ChildObject
    from controller.models.model.model_state import ModelState, ResolvedBackend, ResolvedModel, Unresolved

Phase = Literal["Pending", "Standby", "Loading", "Loaded", "FailedToLoad"]
Transition = Literal["UpToDate", "InProgress", "BlockedByFailedLoad", "InvalidSpec"]
# Lasting reasons; others, such as a pod without a node or on a lost one, may be temporary.
_LOADING_FAILED: Final = frozenset(
    {
        *("ModelLoadFailed", "RuntimeUnhealthy", "PodFailed", "BlockedByFailedLoad"),
        *("ImagePullFailed", "ContainerConfigFailed"),
    }
)
# Why a container waits, where waiting alone does not help.
_STUCK: Final = frozenset(
    {
        *("CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"),
        *("CreateContainerError", "RunContainerError"),
    }
)
Status = dict[str, Any]
Owned = Mapping[Place, "Object"]
_BLOCKED: Final = frozenset({"BlockedByFailedLoad", "ProgressDeadlineExceeded"})


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    """``wanted``, ``there``, ``ready`` and ``updated``: replicas. ``is_current``: its ModelInfer has the Model's
    fields, and reports that it has applied them. ``is_blocked``: the new revision does not become ready.
    ``any_pod_scheduled``: a pod has a node. ``failure``: a reason and a message, of a pod or of the ModelInfer.
    ``roles``: engines of prefill and of decode; empty if they are not apart.
    """

    name: str
    wanted: int = 0
    there: int = 0
    ready: int = 0
    updated: int = 0
    is_current: bool = False
    is_blocked: bool = False
    is_scheduled: bool = False
    failure: tuple[str, str] | None = None
    roles: Sequence[Mapping[str, Any]] = ()

    @property
    def has_failed(self) -> bool:
        """Whether it does not load, and trying again alone will not help."""
        return self.is_blocked or (self.failure is not None and self.failure[0] in _LOADING_FAILED)

    @property
    def is_settled(self) -> bool:
        """Whether exactly the desired replicas exist, all in the newest revision."""
        return self.is_current and self.there == self.ready == self.updated == self.wanted


def model_phase(backends: Sequence[BackendState]) -> Phase:
    """The best that any backend has reached: requests go where one serves."""
    if any(one.ready for one in backends):
        return "Loaded"
    if not any(one.wanted for one in backends):
        return "Standby"
    trying = [one for one in backends if one.wanted]
    if all(one.has_failed for one in trying):
        return "FailedToLoad"
    return "Loading" if any(one.is_scheduled for one in trying) else "Pending"


def rollout_transition(backends: Sequence[BackendState]) -> Transition:
    """Whether what runs is what is written."""
    if any(one.is_blocked or (one.has_failed and not one.is_settled) for one in backends):
        return "BlockedByFailedLoad"
    return "UpToDate" if all(one.is_settled for one in backends) else "InProgress"


def phase_fields(phase: Phase, before: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """Fields of the status. ``before``: the status as it is. The present stay is added when it ends."""
    last, since = before.get("phase"), before.get("phaseSince")
    since_s = parse_timestamp(since)
    times = {one["name"]: one["seconds"] for one in before.get("phaseTimes") or ()}
    if phase == last and since_s is not None:
        return {"phase": phase, "phaseSince": since, "phaseTimes": _listed(times)}
    if last and since_s is not None:
        stayed_s = now_s - since_s
        times[last] = round(times.get(last, 0.0) + max(stayed_s, 0.0), 1)
    return {"phase": phase, "phaseSince": _written(now_s), "phaseTimes": _listed(times)}


def _listed(times: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "seconds": times[name]} for name in sorted(times)]


def _written(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class PodFailure(msgspec.Struct, frozen=True):
    """``reason``: ModelLoadFailed or RuntimeUnhealthy, as KServe has them. ``message``: which pod and why."""

    reason: str
    message: str


def backend_pods(pods: Iterable[Object], backend: str) -> list[Object]:
    """The engine pods of one backend that are not being deleted, by name."""
    found = []
    for one in pods:
        labels = one["metadata"].get("labels") or {}
        if labels.get(BACKEND) == backend and PURPOSE not in labels and "deletionTimestamp" not in one["metadata"]:
            found.append(one)
    return sorted(found, key=key_of)


def first_pod_failure(pods: Sequence[Object]) -> PodFailure | None:
    """Of the first pod that cannot go on by itself."""
    return next((found for pod in pods for found in _failures(pod)), None)


def _failures(pod: Object) -> Iterator[PodFailure]:
    status = pod.get("status") or {}
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in _STUCK:
            continue
        ended = (one.get("lastState") or {}).get("terminated") or {}
        details = [str(waiting["reason"])]
        if "exitCode" in ended:
            details.append(f"exit status {ended['exitCode']}")
        details += [str(text).strip() for text in (ended.get("message") or waiting.get("message"),) if text]
        reason = "ModelLoadFailed" if one.get("name") == DOWNLOAD else "RuntimeUnhealthy"
        yield PodFailure(reason, f"pod {pod['metadata']['name']}, container {one.get('name')}: {', '.join(details)}")


def any_pod_scheduled(pods: Iterable[Object]) -> bool:
    """Whether any pod has a node."""
    return any(_condition(one, "PodScheduled").get("status") == "True" for one in pods)


def start_phase_durations(pods: Iterable[Object]) -> Mapping[str, float] | None:
    """As the status has them, of the pod that became ready last; None while none is."""
    ready = [one for one in pods if _condition(one, "Ready").get("status") == "True"]
    if not ready:
        return None
    pod = max(ready, key=lambda one: (_condition(one, "Ready").get("lastTransitionTime") or "", key_of(one)))
    download = ((_container(pod, "initContainerStatuses", DOWNLOAD).get("state") or {}).get("terminated")) or {}
    engine = (_container(pod, "containerStatuses", ENGINE).get("state") or {}).get("running") or {}
    spans = {
        "schedulingSeconds": (
            pod["metadata"].get("creationTimestamp"),
            _condition(pod, "PodScheduled").get("lastTransitionTime"),
        ),
        "downloadSeconds": (download.get("startedAt"), download.get("finishedAt")),
        "loadSeconds": (engine.get("startedAt"), _condition(pod, "Ready").get("lastTransitionTime")),
    }
    return {name: seconds for name, (start, end) in spans.items() if (seconds := _between(start, end)) is not None}


def _condition(pod: Object, type_: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == type_), {})


def _container(pod: Object, field: str, name: str) -> Mapping[str, Any]:
    return next((one for one in (pod.get("status") or {}).get(field) or () if one.get("name") == name), {})


def _between(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    return max((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 0.0)


def ready_replicas(owned: Owned, model: ResolvedModel) -> dict[str, int]:
    """Replicas that serve, by backend."""
    return {one.backend.name: _count(owned, model.child_name(one.backend), "readyReplicas") for one in model.backends}


def _count(owned: Owned, name: str, field: str) -> int:
    return int(((owned.get(("ModelInfer", name)) or {}).get("status") or {}).get(field) or 0)


def unresolved_status(observed: ModelState, problem: Unresolved, ready: int, replicas: int, now_s: float) -> Status:
    """The status while nothing is changed: running engines continue. ``ready`` and ``replicas``: of all existing
    children.
    """
    before = observed.thing.get("status") or {}
    phase = phase_fields("Loaded" if ready else "FailedToLoad", before, now_s)
    kept = {name: before[name] for name in ("url", "backends", "models") if name in before}
    message = f"what ran before goes on: {problem.message}" if replicas else problem.message
    # what ran before does not answer by the protocol that the Model asks for
    is_ready = ready > 0 and problem.reason != "ProtocolNotServed"
    conditions = [
        condition("Resolved", False, problem.reason, problem.message),
        condition("Ready", is_ready, problem.reason, message),
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


def model_status(
    observed: ModelState,
    model: ResolvedModel,
    wanted: Sequence[ChildObject],
    owned: Owned,
    changing: Collection[Place],
    taken: Sequence[str],
    now_s: float,
) -> tuple[Status, float | None]:
    """The status, and when time alone changes it. ``owned``: what the Model has, by kind and name. ``changing``: what
    is about to be written. ``taken``: objects of others that have names which it needs.
    """
    before = observed.thing.get("status") or {}
    states = [_state(model, made, wanted, owned, observed.pods) for made in model.backends]
    steps = [_state(model, made, wanted, owned, observed.pods) for made in model.steps]
    phase = model_phase(states)
    failure = next((one.failure for one in (*states, *steps) if one.failure is not None), None)
    if taken:
        failure = ("NameTaken", _taken(taken))
    found: Status = {
        **phase_fields(phase, before, now_s),
        "replicas": sum(one.there for one in states),
        "readyReplicas": sum(one.ready for one in states),
        "transitionStatus": "InvalidSpec" if taken else rollout_transition([*states, *steps]),
        "backends": _backends(model, states, observed, before),
        **_generation(observed.thing),
    }
    hosted = hosted_models_status(model, observed)
    if hosted:
        found["models"] = hosted
    parts = _parts(model, states, steps, owned, changing, taken)
    limit_s = observed.settings.gateway_wait_s
    wait = gateway_wait(before, found["phaseSince"], [parts.routed, parts.servers, *parts.steps], now_s, limit_s)
    ready, until_s = ready_condition(model, phase, failure, parts, wait)
    conditions = [*parts.shown, *parts.steps, ready]
    if model.spec.models:
        failed = failed_models(hosted)
        reason = "ModelLoadFailed" if failed else "ModelsLoadable"
        conditions.insert(-1, condition("ModelsLoadable", not failed, reason, failed))
    found["conditions"] = _of_generation(conditions, observed.thing)
    if failure is not None:
        found["failure"] = {"reason": failure[0], "message": failure[1]}
    if url := gateway_url(observed.gateways, _base_path(model)):
        found["url"] = url
    return found, until_s


def _taken(names: Sequence[str]) -> str:
    return f"not of this Model, but there already: {', '.join(names)}; delete them, or name the Model otherwise"


def _state(
    model: ResolvedModel, made: ResolvedBackend, wanted: Sequence[ChildObject], owned: Owned, pods: Sequence[Object]
) -> BackendState:
    backend, name = made.backend.name, model.child_name(made.backend)
    infer = owned.get(("ModelInfer", name))
    mine = backend_pods(pods, backend)
    failed = first_pod_failure(mine)
    failure = (failed.reason, failed.message) if failed is not None else None
    if infer is None:
        replicas = 0 if model.spec.stop else initial_replicas(made)
        return BackendState(name=backend, wanted=replicas, is_scheduled=any_pod_scheduled(mine), failure=failure)
    degraded = current_condition(infer, "Degraded")
    if degraded.get("status") == "True":
        # it has the log of the crashed container, which the status of a pod in back-off lacks
        failure = (str(degraded["reason"]), f"ModelInfer {name}: {degraded.get('message', '')}")
    reasons = {one.get("reason") for one in (infer.get("status") or {}).get("conditions") or ()}
    child = next(
        (one for one in wanted if one.resource.kind == "ModelInfer" and one.thing["metadata"]["name"] == name), None
    )
    status = infer.get("status") or {}
    there = int(status.get("replicas") or 0)
    # its group has no pods, and should have none
    is_at_zero = (
        made.backend.scales_stages and not there and current_condition(infer, "Available").get("status") == "True"
    )
    has_seen = (status.get("observedGeneration") or 0) >= infer["metadata"].get("generation", 0)
    return BackendState(
        name=backend,
        wanted=0 if is_at_zero else int(infer["spec"].get("replicas", 1)),
        there=there,
        ready=int(status.get("readyReplicas") or 0),
        updated=int(status.get("updatedReplicas") or 0),
        is_current=has_seen and child is not None and is_up_to_date(child.thing, infer, child.yields),
        is_blocked=bool(reasons & _BLOCKED),
        is_scheduled=any_pod_scheduled(mine),
        failure=failure,
        roles=status.get("roles") or () if made.backend.disaggregation is not None else (),
    )


def _backends(
    model: ResolvedModel, states: Sequence[BackendState], observed: ModelState, before: Mapping[str, Any]
) -> list[Status]:
    weights = traffic_weights(model, {one.name: one.ready for one in states})
    earlier = {one["name"]: one for one in before.get("backends") or ()}
    found = []
    for made, state in zip(model.backends, states, strict=True):
        start = start_phase_durations(backend_pods(observed.pods, state.name)) or earlier.get(state.name, {}).get(
            "start"
        )
        line: Status = {
            "name": state.name,
            "runtime": str(made.preset),
            "replicas": state.there,
            "readyReplicas": state.ready,
            "updatedReplicas": state.updated,
            "weight": weights[state.name],
            **({"roles": list(state.roles)} if state.roles else {}),
        }
        found.append({**line, "start": dict(start)} if start else line)
    return found


def _parts(
    model: ResolvedModel,
    states: Sequence[BackendState],
    steps: Sequence[BackendState],
    owned: Owned,
    changing: Collection[Place],
    taken: Sequence[str],
) -> ReadyParts:
    by_kind: dict[str, list[Object]] = {}
    for (kind, _), thing in sorted(owned.items()):
        by_kind.setdefault(kind, []).append(thing)
    resolved = condition("Resolved", True, "Resolved", ", ".join(_resolved(one) for one in model.backends))
    if taken:
        resolved = condition("Resolved", False, "NameTaken", _taken(taken))
    route = children_condition("ModelRoutesReady", "ModelRoute", by_kind.get("ModelRoute", ()), changing)
    of_servers = by_kind.get("ModelServer", ())
    reported = {
        name: current_condition(one, "Available")
        for one in of_servers
        if ("ModelServer", name := str(one["metadata"]["name"])) not in changing
    }
    reached = reached_condition([model.child_name(one.backend) for one in model.backends], reported)
    servers = children_condition("ModelServersReady", "ModelServer", of_servers, changing)
    if reached["status"] == "Unknown":
        # though one beside it has failed: since when it is waited for is read from this condition
        servers = {**servers, "status": "Unknown"}
    shown = [resolved, _infers(states), servers, route]
    if bindings := by_kind.get("AutoscalingPolicyBinding"):
        shown.append(children_condition("AutoscalingReady", "AutoscalingPolicyBinding", bindings, changing))
    if model.spec.warm:
        shown.append(_warm(model, [*by_kind.get("DaemonSet", ()), *by_kind.get("Job", ())]))
    # of another owner, if it is not there
    routed = resolved if taken and "ModelRoute" not in by_kind else route
    of_steps = [
        _step(made, one, reached_condition([model.child_name(made.backend)], reported))
        for made, one in zip(model.steps, steps, strict=True)
    ]
    return ReadyParts(shown, routed, servers, reached, of_steps)


def _resolved(made: ResolvedBackend) -> str:
    """Its runtime, and what its user still has to do."""
    wanted, found = made.backend.disaggregation, f"{made.backend.name}: {made.preset}"
    why = why_sidecar_needed(made.preset.spec.engine, wanted) if wanted is not None else ""
    return f"{found} ({why}; run a sidecar that does)" if why else found


def _step(made: ResolvedBackend, state: BackendState, reached: Condition) -> Condition:
    """Named as KServe names it: TransformerReady, ExplainerReady."""
    type_ = f"{made.backend.name.capitalize()}Ready"
    if not state.ready:
        reason, message = state.failure or ("NotReady", "no replica is ready yet")
        return condition(type_, False, reason, message)
    return {**reached, "type": type_, **({"reason": "Ready"} if reached["status"] == "True" else {})}


def _infers(states: Sequence[BackendState]) -> Condition:
    missing = [one for one in states if one.wanted and not one.ready]
    if not missing:
        return condition("ModelInfersReady", True, "ModelInferReady", "")
    message = "; ".join(
        f"backend '{one.name}': {one.failure[1] if one.failure else 'no replica is ready yet'}" for one in missing
    )
    reason = next((one.failure[0] for one in missing if one.failure), "NotReady")
    return condition("ModelInfersReady", False, reason, message)


def _warm(model: ResolvedModel, warming: Sequence[Object]) -> Condition:
    if why := why_no_warming(model):
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
    return [{**_generation(thing), **one} for one in conditions]


def _generation(thing: Object) -> Status:
    """Files have none."""
    generation = thing["metadata"].get("generation")
    return {} if generation is None else {"observedGeneration": generation}


def _base_path(model: ResolvedModel) -> str:
    """Where the API begins. A Model whose backends speak several protocols has the first one's."""
    return "/v2" if model.backends and model.backends[0].protocol == "V2" else "/v1"


def gateway_url(gateways: Sequence[Object], path: str) -> str | None:
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
        return f"{scheme}://{host}{'' if port in (80, 443) else f':{port}'}{path}"
    return None
