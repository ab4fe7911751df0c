# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: from what is there and what is asked for to what to do now. Nothing is remembered between two looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.cluster.resources import CONTROLLER_REVISIONS, PODS, SERVICES, key_of
from controller.reconcile.model_infer import labels, names, pods, scale_units, services, statuses
from controller.reconcile.model_infer.conditions import conditions_of, failed_groups, problems_of
from controller.reconcile.model_infer.draining import drain
from controller.reconcile.model_infer.group_changes import changes
from controller.reconcile.model_infer.groups import groups_of
from controller.reconcile.model_infer.holds import may_be_made
from controller.reconcile.model_infer.pod_state import is_owned, pods_of
from controller.reconcile.model_infer.recovery import as_status, recover
from controller.reconcile.model_infer.revisions import controller_revision
from controller.reconcile.model_infer.rollout import rollout_of, told
from controller.reconcile.model_infer.target import read, target_of
from controller.reconcile.plan import Action, Annotate, Create, Delete, Plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.reconcile.model_infer.changes import Changes, Missing
    from controller.reconcile.model_infer.groups import Group
    from controller.reconcile.model_infer.observed import Observed
    from controller.reconcile.model_infer.target import Target


def reconcile(observed: Observed, now_s: float) -> Plan:
    """``now_s``: seconds since the epoch. A settled object gets no actions, and the same status each time."""
    thing = observed.thing
    if thing["metadata"].get("deletionTimestamp"):
        # the API server's garbage collector deletes what we own
        return Plan()
    found = read(thing)
    if isinstance(found, str):
        return Plan(status=statuses.refused(thing, [found]))
    target = target_of(observed, found.spec, now_s)
    groups = groups_of(pods_of(observed.pods, target.uid, observed.lost_nodes), target)
    rollout = rollout_of(groups, target, now_s)
    wanted = changes(groups, target, observed, is_moving=rollout.is_moving)
    recovered = recover(groups, target, observed, wanted.unwanted, now_s)
    drained = drain(wanted.leaving, groups, observed, now_s, found.spec.template.drain_timeout)
    missing = may_be_made(wanted, groups, recovered, target)
    problems = problems_of(groups, target, observed, rollout, ())
    times = [rollout.look_again_at_s, recovered.look_again_at_s, drained.look_again_at_s]
    return Plan(
        actions=(
            *_revisions(target),
            *rollout.notes,
            *drained.marked,
            *_renamed(wanted),
            *scale_units.corrected(groups, missing),
            *recovered.deleted,
            *drained.deleted,
            *_services(missing, target, observed),
            *_lost_services(groups, target, observed),
            *_pods(missing, target, groups),
            *_unused_services(groups, wanted, observed, target),
            *_old_revisions(groups, target),
        ),
        status=statuses.status_of(
            groups,
            target,
            rollout,
            told=conditions_of(groups, target, rollout, problems),
            failed=failed_groups(groups, target, observed),
            recoveries=as_status(recovered.attempts),
        ),
        events=(*told(thing.get("status") or {}, rollout), *recovered.events),
        look_again_at_s=now_s if wanted.asks_loads_of else min((one for one in times if one is not None), default=None),
        asks_loads_of=wanted.asks_loads_of | drained.asks_loads_of,
    )


def _revisions(target: Target) -> Iterator[Action]:
    history = target.history
    if not history.is_kept():
        number = history.newest_number() + 1
        thing = controller_revision(target.owner, target.spec.template, history.update.hash, number)
        yield Create(CONTROLLER_REVISIONS, thing)


def _old_revisions(groups: Sequence[Group], target: Target) -> Iterator[Delete]:
    """Beyond the limit, of what nothing is made of: the oldest."""
    used = {pod.revision for one in groups for pod in one.pods}
    used |= {target.history.update.hash, target.goal.hash, target.current.hash}
    unused = [one for one in target.history.kept.values() if one.hash not in used]
    count = len(unused) - target.spec.revision_history_limit
    for one in sorted(unused, key=lambda one: one.number)[: max(0, count)]:
        yield Delete(CONTROLLER_REVISIONS, one.key, one.uid)


def _renamed(wanted: Changes) -> Iterator[Annotate]:
    for pod, revision in wanted.renamed:
        yield Annotate(PODS, pod.key, pod.uid, labels={labels.REVISION: revision})


def _services(missing: Sequence[Missing], target: Target, observed: Observed) -> Iterator[Create]:
    """Before the pods, which look their entry up at once."""
    there = {one["metadata"]["name"] for one in observed.services}
    for one in missing:
        name = names.service_name(target.name, one.place)
        if one.role.workers and name not in there:
            there.add(name)
            yield Create(SERVICES, services.service(target.owner, one.place))


def _lost_services(groups: Sequence[Group], target: Target, observed: Observed) -> Iterator[Create]:
    """Of replicas that are there: somebody has deleted them."""
    there = {one["metadata"]["name"] for one in observed.services}
    for replica in (one for group in groups for one in group.replicas):
        if replica.size > 1 and not replica.is_going and names.service_name(target.name, replica.place) not in there:
            yield Create(SERVICES, services.service(target.owner, replica.place))


def _unused_services(groups: Sequence[Group], wanted: Changes, observed: Observed, target: Target) -> Iterator[Delete]:
    places = [one.place for group in groups for one in group.replicas] + [one.place for one in wanted.missing]
    used = {names.service_name(target.name, one) for one in places}
    for one in observed.services:
        if one["metadata"]["name"] not in used and is_owned(one, target.uid):
            yield Delete(SERVICES, key_of(one), one["metadata"].get("uid", ""))


def _pods(missing: Sequence[Missing], target: Target, groups: Sequence[Group]) -> Iterator[Create]:
    counted = scale_units.to_label(groups, missing)
    for one in missing:
        ask = pods.Ask(
            owner=target.owner,
            scheduler_name=target.spec.scheduler_name,
            drain_s=target.spec.template.drain_timeout,
            is_scale_unit=one.place in counted,
        )
        yield Create(PODS, pods.pod(one.place, one.revision, one.role, ask))
