# SPDX-License-Identifier: Apache-2.0
"""The manager's page of rollouts: what statuses of Models and ModelInfers say, those with faults first.

Whoever reaches the port reads it. So faults are named by their reasons: their messages have lines of engines' logs, and
are for those who may read the objects.
"""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from controller.kube.api_resources import MODELS
from controller.kube.informer import owner_key
from controller.models.model.model_state import BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.kube.api_resources import Object
    from controller.models.model_status_metrics import Objects

ROLLOUTS_PATH: Final = "/rollouts"
_MOST: Final = 100
_MOST_TEXT: Final = 300
_MOST_FIND: Final = 200
# Of phases of both kinds: what needs somebody comes first, then what moves.
_FAULTS: Final = frozenset({"InvalidSpec", "BlockedByFailedLoad", "FailedToLoad"})
_IDLE: Final = frozenset({"UpToDate", "Loaded", "Standby"})


class ModelView(msgspec.Struct, frozen=True, rename="camel"):
    """``phase`` and ``transition``: of its status, empty before it has one. ``since``: of the phase, RFC 3339.
    ``message``: why it is not loaded, in one word.
    """

    name: str
    phase: str
    transition: str
    since: str
    replicas: int
    ready: int
    message: str


class RolloutView(msgspec.Struct, frozen=True, rename="camel"):
    """A ModelInfer. ``model`` and ``backend``: whose it is, empty without a Model. ``phase``: UpToDate, InProgress,
    Paused, BlockedByFailedLoad or InvalidSpec; empty before the manager has seen it. ``since``: of the phase, RFC 3339.
    ``groups``: desired; ``updated``: those of revision ``target``. ``share``: of the Model's requests, None if unknown.
    ``message``: the rollout's or the mistake in the spec, and the reason of a fault.
    """

    name: str
    model: str
    backend: str
    phase: str
    since: str
    current: str
    target: str
    groups: int
    updated: int
    ready: int
    share: float | None
    message: str


class RolloutsPage(msgspec.Struct, frozen=True, rename="camel"):
    """The first of ``model_count`` Models and ``rollout_count`` ModelInfers: those with faults, then those that
    change.
    """

    model_count: int
    models: tuple[ModelView, ...]
    rollout_count: int
    rollouts: tuple[RolloutView, ...]


def rollouts_page(objects: Objects, find: str = "") -> RolloutsPage:
    """``find``: a part of the key of a Model or ModelInfer, or of its Model's."""
    text = find.lower()
    models, infers = (list(one) for one in objects)
    by_key = {_key(one): one for one in models}
    found = [(_model_rank(one), key, one) for key, one in by_key.items() if text in key]
    changing = [
        (_rollout_rank(one), _key(one), one) for one in infers if text in _key(one) or text in (_model_of(one) or "")
    ]
    return RolloutsPage(
        len(found),
        tuple(_model(key, one) for _, key, one in nsmallest(_MOST, found, key=_order)),
        len(changing),
        tuple(_rollout(key, one, by_key) for _, key, one in nsmallest(_MOST, changing, key=_order)),
    )


def rollout_page_routes(objects: Callable[[], Objects], leads: Callable[[], bool]) -> Sequence[web.RouteDef]:
    """``objects``: Models and ModelInfers of the present term. ``leads``: whether this replica has any."""

    async def show(request: web.Request) -> web.Response:
        if not leads():
            return web.Response(status=503, text="this replica does not lead; ask the one that the Lease names\n")
        # thousands of objects would block the event loop too long
        found = await asyncio.to_thread(rollouts_page, objects(), request.query.get("find", "")[:_MOST_FIND])
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return [web.get(ROLLOUTS_PATH, show)]


def _order(row: tuple[int, str, Object]) -> tuple[int, str]:
    return row[:2]


def _rank(phase: str) -> int:
    return 0 if phase in _FAULTS else 2 if phase in _IDLE else 1


def _model_rank(thing: Object) -> int:
    status = thing.get("status") or {}
    return min(_rank(status.get("phase") or ""), _rank(status.get("transitionStatus") or "UpToDate"))


def _rollout_rank(thing: Object) -> int:
    conditions = _conditions(thing)
    is_degraded = conditions.get("Degraded", {}).get("status") == "True"
    return 0 if is_degraded else _rank(_phase(conditions)[0])


def _model(key: str, thing: Object) -> ModelView:
    status = thing.get("status") or {}
    failure = status.get("failure") or {}
    return ModelView(
        name=key,
        phase=status.get("phase") or "",
        transition=status.get("transitionStatus") or "",
        since=status.get("phaseSince") or "",
        replicas=status.get("replicas") or 0,
        ready=status.get("readyReplicas") or 0,
        message=(failure.get("reason") or "")[:_MOST_TEXT],
    )


def _rollout(key: str, thing: Object, models: Mapping[str, Object]) -> RolloutView:
    status, conditions, model = thing.get("status") or {}, _conditions(thing), _model_of(thing)
    backend = (thing["metadata"].get("labels") or {}).get(BACKEND, "") if model else ""
    phase, since = _phase(conditions)
    return RolloutView(
        name=key,
        model=model or "",
        backend=backend,
        phase=phase,
        since=since,
        current=status.get("currentRevision") or "",
        target=status.get("updateRevision") or "",
        groups=thing["spec"].get("replicas", 1),
        updated=status.get("updatedReplicas") or 0,
        ready=status.get("readyReplicas") or 0,
        share=_share(models.get(model or ""), backend),
        message=_message(conditions),
    )


def _phase(conditions: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The phase, and since when."""
    accepted = conditions.get("Accepted", {})
    found = accepted if accepted.get("status") == "False" else conditions.get("Progressing", {})
    return found.get("reason", ""), found.get("lastTransitionTime", "")


def _message(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    accepted, rollout, degraded = (conditions.get(one, {}) for one in ("Accepted", "Progressing", "Degraded"))
    told = accepted if accepted.get("status") == "False" else rollout
    words = [told.get("message", "")]
    # a rollout that has failed is a fault, too
    if degraded.get("status") == "True" and degraded.get("reason") != told.get("reason"):
        words.append(degraded.get("reason", ""))
    return "; ".join(filter(None, words))[:_MOST_TEXT]


def _share(model: Object | None, backend: str) -> float | None:
    backends = [] if model is None else (model.get("status") or {}).get("backends") or []
    weights = {one["name"]: one.get("weight") or 0 for one in backends}
    whole = sum(weights.values())
    return weights[backend] / whole if whole and backend in weights else None


def _conditions(thing: Object) -> Mapping[str, Mapping[str, Any]]:
    return {one["type"]: one for one in (thing.get("status") or {}).get("conditions") or ()}


def _key(thing: Object) -> str:
    return f"{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}"


def _model_of(thing: Object) -> str | None:
    kind, _, key = owner_key(thing).partition("/")
    return key if kind == MODELS.kind else None
