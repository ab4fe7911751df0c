# SPDX-License-Identifier: Apache-2.0
"""Mistakes, planted one at a time, and a story in which each must be noticed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from controller.kube.api_resources import PODS
from controller.kube.reconcile_plan import Create, Delete, Plan
from controller.models.model_infer import child_objects as owned
from controller.models.model_infer import groups as sizing
from controller.models.model_infer import pod_changes as holds
from controller.models.model_infer import pod_removal, pod_state, reconcile
from tests.controller.models.model_infer.chaos import events, specs
from tests.controller.models.model_infer.chaos.history import Start
from tests.virtual_cluster import manager as managers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from controller.models.model_infer.model_infer_state import ModelInferState

    Plant = Callable[[pytest.MonkeyPatch], None]

replace = msgspec.structs.replace
_WIDE: dict[str, Any] = {"template": {**specs.simple()["template"], "drainTimeout": "5m"}}


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """``plant``: makes the mistake. ``caught_by``: the invariants of which one must not hold then."""

    name: str
    plant: Plant
    caught_by: tuple[str, ...]
    happenings: tuple[events.Event, ...]
    spec: dict[str, Any] = {}
    noise: float = 0.0

    def start(self, seed: int = 0) -> Start:
        """Busy, so that a cut request is noticed."""
        return Start(
            spec={**specs.simple(), **_WIDE, **self.spec}, seed=seed, nodes=12, request_each_s=2.0, noise=self.noise
        )


def _ignores_deletion(patch: pytest.MonkeyPatch) -> None:
    """A pod that is being deleted counts as ready as long as its kubelet says so."""
    read = pod_state._read

    def mistaken(thing: Any, lost_nodes: Any) -> Any:  # noqa: ANN401 - as the original
        found = read(thing, lost_nodes)
        conditions = {one["type"]: one["status"] for one in (thing.get("status") or {}).get("conditions") or ()}
        return None if found is None else replace(found, is_going=False, is_ready=conditions.get("Ready") == "True")

    patch.setattr(pod_state, "_read", mistaken)


def _forgets_uids(patch: pytest.MonkeyPatch) -> None:
    _change_plans(
        patch, lambda plan: _mapped(plan, lambda one: replace(one, uid="") if isinstance(one, Delete) else one)
    )


def _does_not_drain(patch: pytest.MonkeyPatch) -> None:
    drain = pod_removal.drain
    patch.setattr(reconcile, "drain", lambda *given: drain(*given[:-1], 0.0))


def _drains_by_memory(patch: pytest.MonkeyPatch) -> None:
    """When it began to drain a pod is known to this process only, and gateways are never told."""
    began: dict[str, float] = {}
    drain = pod_removal.drain

    def mistaken(leaving: Any, groups: Any, observed: Any, now_s: float, drain_s: float) -> Any:  # noqa: ANN401
        found = drain(leaving, groups, observed, now_s, drain_s)
        for one in found.marked:
            began.setdefault(one.uid, now_s)
        due = [one for one in found.marked if now_s - began[one.uid] > 5.0]
        gone = tuple(Delete(PODS, one.key, one.uid) for one in due)
        return replace(found, marked=(), deleted=(*found.deleted, *gone), requeue_at_s=now_s + 1.0)

    patch.setattr(reconcile, "drain", mistaken)


def _counts_one_more(field: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        original = sizing.group_changes

        def mistaken(members: Any, size: Any) -> Any:  # noqa: ANN401 - as the original
            return original(members, replace(size, **{field: getattr(size, field) + 1}))

        patch.setattr(holds, "group_changes", mistaken)

    return plant


def _removes_by_force(patch: pytest.MonkeyPatch) -> None:
    _change_plans(
        patch, lambda plan: _mapped(plan, lambda one: replace(one, grace_s=0) if isinstance(one, Delete) else one)
    )


def _makes_orphans(patch: pytest.MonkeyPatch) -> None:
    def orphan(one: Any) -> Any:  # noqa: ANN401 - any action
        if not isinstance(one, Create) or one.resource != PODS:
            return one
        metadata = {name: value for name, value in one.thing["metadata"].items() if name != "ownerReferences"}
        return replace(one, thing={**one.thing, "metadata": metadata})

    _change_plans(patch, lambda plan: _mapped(plan, orphan))


def _looks_all_the_time(patch: pytest.MonkeyPatch) -> None:
    _change_plans(patch, lambda plan: replace(plan, requeue_at_s=0.0))


def _looks_each_minute(patch: pytest.MonkeyPatch) -> None:
    decide = reconcile.reconcile
    patch.setattr(reconcile, "reconcile", lambda seen, now_s: replace(decide(seen, now_s), requeue_at_s=now_s + 60.0))


def _tells_the_time(patch: pytest.MonkeyPatch) -> None:
    decide = reconcile.reconcile

    def mistaken(seen: ModelInferState, now_s: float) -> Plan:
        plan = decide(seen, now_s)
        return replace(plan, status={**(plan.status or {}), "summary": f"looked at {math.floor(now_s)}"})

    patch.setattr(reconcile, "reconcile", mistaken)


def _keeps_services(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(owned, "unused_services", lambda *_: iter(()))


def _starts_all_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(holds, "pods_to_create", lambda wanted, *_: wanted.missing)
    patch.setattr(reconcile, "pods_to_create", lambda wanted, *_: wanted.missing)


def _does_not_wait_for_its_writes(patch: pytest.MonkeyPatch) -> None:
    """The manager decides again before its caches show what it has written."""
    patch.setattr(managers.Caches, "has_seen", lambda *_: True)


def _change_plans(patch: pytest.MonkeyPatch, change: Callable[[Plan], Plan]) -> None:
    decide = reconcile.reconcile
    patch.setattr(reconcile, "reconcile", lambda seen, now_s: change(decide(seen, now_s)))


def _mapped(plan: Plan, change: Callable[[Any], Any]) -> Plan:
    return replace(plan, actions=tuple(map(change, plan.actions)))


ROLLOUT: Sequence[events.Event] = (
    events.Wait(200.0),
    events.NewImage("engine:good-2", frozenset()),
    events.Wait(300.0),
)
SCALE_IN = (events.Scale(4), events.Wait(300.0), events.Scale(1), events.Wait(60.0))
_SURGE = {"rollout": {**specs.simple()["rollout"], "maxUnavailable": 0, "maxSurge": 1}}
_BUDGET = "never fewer than maxUnavailable allows"
_IN_ORDER = [specs.role("prefill", 1, 0), {**specs.role("decode", 1, 0), "startsAfter": ["prefill"]}]

MUTANTS = (
    Mutant(
        name="a deleted pod counts as ready",
        plant=_ignores_deletion,
        happenings=(*ROLLOUT,),
        caught_by=("deleted once",),
        spec={"replicas": 4, "template": {**specs.simple()["template"], "drainTimeout": "0s"}},
    ),
    Mutant(name="no uid", plant=_forgets_uids, happenings=(*ROLLOUT,), caught_by=("only what was seen is deleted",)),
    Mutant(name="no drain", plant=_does_not_drain, happenings=SCALE_IN, caught_by=("drained before deletion",)),
    Mutant(
        name="memory instead of marks",
        plant=_drains_by_memory,
        happenings=SCALE_IN,
        caught_by=("drained before deletion",),
    ),
    Mutant(
        name="one more may be missing",
        plant=_counts_one_more("max_unavailable"),
        happenings=(*ROLLOUT,),
        caught_by=(_BUDGET,),
        spec=_SURGE,
    ),
    Mutant(
        name="one more surplus",
        plant=_counts_one_more("max_surge"),
        happenings=(*ROLLOUT,),
        caught_by=("no pod beyond the surge",),
    ),
    Mutant(
        name="by force",
        plant=_removes_by_force,
        happenings=(*ROLLOUT,),
        caught_by=("no two live pods of one name",),
    ),
    Mutant(name="orphans", plant=_makes_orphans, happenings=(*ROLLOUT,), caught_by=("everything has its owner",)),
    Mutant(name="a hot loop", plant=_looks_all_the_time, happenings=(*ROLLOUT,), caught_by=("no hot loop",)),
    Mutant(
        name="a look each minute",
        plant=_looks_each_minute,
        happenings=(*ROLLOUT,),
        caught_by=("settled means hardly a look",),
    ),
    Mutant(
        name="a status that differs each time",
        plant=_tells_the_time,
        happenings=(*ROLLOUT,),
        caught_by=("no hot loop", "every history ends", "settled means no write"),
    ),
    Mutant(
        name="Services stay",
        plant=_keeps_services,
        happenings=SCALE_IN,
        caught_by=("ends in the desired state",),
    ),
    Mutant(
        name="no order of roles",
        plant=_starts_all_at_once,
        happenings=(events.Wait(100.0),),
        caught_by=("roles start in their order",),
        spec={"template": {"roles": _IN_ORDER, "drainTimeout": "30s"}},
    ),
    Mutant(
        name="no wait for one's own writes",
        plant=_does_not_wait_for_its_writes,
        happenings=(events.Wait(200.0), events.Late("pods", 10.0, 2000.0), *SCALE_IN, *ROLLOUT, *SCALE_IN, *ROLLOUT),
        caught_by=(_BUDGET, "no pod beyond the surge", "drained before deletion", "no hot loop"),
    ),
)
