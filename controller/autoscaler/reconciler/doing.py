# SPDX-License-Identifier: Apache-2.0
"""Carries a decision out: claims targets, drains engines and writes replicas, each target for itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from controller.autoscaler.reconciler.acting import DecideAgain
from controller.autoscaler.reconciler.draining import drain, undone
from controller.autoscaler.reconciler.telling import Looked, Scaled
from controller.kube.errors import ApiError, ClusterError, Conflict, TooManyRequests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.autoscaler.decision.situation import EngineReport
    from controller.autoscaler.reconciler.acting import Actor
    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.deciding import Step
    from controller.autoscaler.reconciler.demand import DemandSource

log = logging.getLogger(__name__)

SOON_S: Final = 0.2
_SCALING: Final = ("Auto", "ScaleUpOnly")
_SERVER_FAULTS: Final = 500


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """``looked``: with what drains and what was refused. ``scaled``: what was written. ``again_s``: in how many seconds
    more is to be done. ``is_stale``: a target is not what was decided about any more. ``error``: why something could
    not be written; the look has failed then.
    """

    looked: Looked
    scaled: tuple[Scaled, ...] = ()
    again_s: float = float("inf")
    is_stale: bool = False
    error: ClusterError | None = None


class Doer:
    """What is wrong with one target keeps no other one of its binding from being scaled."""

    def __init__(self, actor: Actor, demand: DemandSource) -> None:
        self._actor = actor
        self._demand = demand

    async def do(self, view: BindingView, looked: Looked) -> Done:
        """All steps of a decision."""
        again_s, is_stale, errors = float("inf"), False, list[ClusterError]()
        waits_for, refused = dict[str, Sequence[str]](), dict[str, str]()
        scaled: list[Scaled] = []
        reports = _reports(self._demand, looked)
        for step in looked.steps:
            if not step.target.may_write or looked.policy is None or looked.policy.mode not in _SCALING:
                continue
            name = step.target.spec.name
            try:
                if await self._claimed(view, step):
                    # what it is from now on comes by the informer
                    again_s = min(again_s, SOON_S)
                if not step.writes or step.is_as_decided:
                    continue
                may_go, look_s, waits = await self._drained(step, reports, looked)
                again_s = min(again_s, look_s)
                if waits:
                    waits_for[name] = waits
                if may_go and (one := await self._scale(step)) is not None:
                    scaled.append(one)
            except DecideAgain:
                is_stale = True
            except ClusterError as error:
                errors.append(error)
                log.warning("%s: the target %s is not scaled: %s", view.key, name, error)
                if _is_refusal(error):
                    refused[name] = str(error)
        looked = msgspec.structs.replace(looked, waits_for=waits_for, refused=refused)
        # of several, the one that asks for the longest rest
        worst = max(errors, key=_asked_s, default=None)
        return Done(looked=looked, scaled=tuple(scaled), again_s=again_s, is_stale=is_stale, error=worst)

    async def _claimed(self, view: BindingView, step: Step) -> bool:
        """Whether it had to be said on the target that the binding scales it."""
        found = step.target.found
        if found is None or found.scaled_by == view.claim.text:
            return False
        await self._actor.claim(step.target.place, found, view.claim)
        return True

    async def _drained(
        self, step: Step, reports: Mapping[str, EngineReport], looked: Looked
    ) -> tuple[bool, float, Sequence[str]]:
        """Whether the replicas may be written, when to look again, and which pods are waited for."""
        target = step.target
        if target.kind is None or target.found is None or step.replicas is None or looked.policy is None:
            return False, float("inf"), ()
        if target.kind.drains_itself:
            return True, float("inf"), ()
        excess = target.found.replicas - step.replicas
        if excess <= 0:
            await self._actor.mark(undone(target.pods))
            return True, float("inf"), ()
        plan = drain(
            [one for one in target.pods if target.kind.serves(one)],
            excess,
            reports,
            is_ordered=target.kind.is_ordered,
            now_s=looked.now_s,
            drain_s=float(looked.policy.drain),
        )
        await self._actor.mark(plan.marks)
        again_s = float("inf") if plan.look_again_at_s is None else plan.look_again_at_s - looked.now_s
        return plan.may_go, max(SOON_S, again_s), plan.waits_for

    async def _scale(self, step: Step) -> Scaled | None:
        target = step.target
        if target.found is None or step.replicas is None or step.replicas == target.found.replicas:
            return None
        await self._actor.scale(target.place, target.found, step.replicas)
        what = f"{target.place[2]} {target.place[3]}"
        return Scaled(target.spec.name, what, target.found.replicas, step.replicas, step.decided.reason)


def _is_refusal(error: ClusterError) -> bool:
    """Whether it comes again whenever this is tried: people have to hear of it. Busy servers are no news for a
    status.
    """
    return (
        isinstance(error, ApiError)
        and error.status < _SERVER_FAULTS
        and not isinstance(error, Conflict | TooManyRequests)
    )


def _asked_s(error: ClusterError) -> float:
    asked_s = error.retry_after_s if isinstance(error, ApiError) else None
    return 0.0 if asked_s is None else asked_s


def _reports(demand: DemandSource, looked: Looked) -> Mapping[str, EngineReport]:
    """By IP address of a pod. Only where something may drain: what each engine does."""
    if not looked.situations or all(one.target.kind is None or one.target.kind.drains_itself for one in looked.steps):
        return {}
    servers = sorted({one.server for one in looked.resolved if one.server})
    return demand.view(servers, looked.now_s).reports
