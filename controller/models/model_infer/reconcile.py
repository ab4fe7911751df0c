# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: from the observed and the desired state to the actions of one reconcile.

There is no state between two reconciles: timers are read from objects, and counts from the status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.api.model_infer import mistakes, pod_limit_errors
from controller.kube.plan import Plan
from controller.models.model_infer import child_objects
from controller.models.model_infer.changes import changes, may_be_made
from controller.models.model_infer.child_objects import role_scales
from controller.models.model_infer.gang import gang_of, pod_groups, unused_pod_groups
from controller.models.model_infer.groups import groups_of
from controller.models.model_infer.pod_state import pods_of
from controller.models.model_infer.recovery import as_status, recover
from controller.models.model_infer.removal import drain
from controller.models.model_infer.rollout import rollout_events, rollout_of
from controller.models.model_infer.status import conditions_of, failed_groups, problems_of, refused_status, status_of
from controller.models.model_infer.target import parse_model_infer, target_of

if TYPE_CHECKING:
    from controller.models.model_infer.model_infer_state import ModelInferState


def reconcile(observed: ModelInferState, now_s: float) -> Plan:
    """``now_s``: seconds since the epoch. A settled object gets no actions, and the same status each time."""
    thing = observed.thing
    if thing["metadata"].get("deletionTimestamp"):
        # the API server's garbage collector deletes what we own
        return Plan()
    found = parse_model_infer(thing)
    wrong = [found] if isinstance(found, str) else list(mistakes(found))
    if isinstance(found, str) or wrong:
        return Plan(status=refused_status(thing, wrong))
    target = target_of(observed, found.spec, now_s)
    # roles may have scales of their own, which no webhook sees
    if wrong := list(pod_limit_errors(found.spec, target.counts)):
        return Plan(status=refused_status(thing, wrong))
    groups = groups_of(pods_of(observed.pods, target.uid, observed.lost_nodes), target)
    rollout = rollout_of(groups, target, now_s)
    wanted = changes(groups, target, observed, is_moving=rollout.is_moving)
    recovered = recover(groups, target, observed, wanted.unwanted, now_s)
    drained = drain(wanted.leaving, groups, observed, now_s, found.spec.template.drain_timeout)
    missing = may_be_made(wanted, groups, recovered, target)
    ganged = gang_of(missing, groups, target, observed, now_s)
    revisions = child_objects.revisions_wanted(groups, wanted)
    problems = problems_of(groups, target, observed, rollout, ganged.problems)
    asked_s = now_s if wanted.asks_loads_of else None
    times = [
        asked_s,
        rollout.requeue_at_s,
        recovered.requeue_at_s,
        drained.requeue_at_s,
        ganged.requeue_at_s,
    ]
    return Plan(
        actions=(
            *child_objects.new_revision(target),
            *rollout.notes,
            *drained.marked,
            *child_objects.relabelled_pods(groups, wanted),
            *child_objects.label_corrections(groups, ganged.missing),
            *child_objects.once((*recovered.deleted, *ganged.deleted, *drained.deleted)),
            *pod_groups(revisions, target, observed, ganged.form),
            *child_objects.new_services(groups, wanted, target, observed),
            *child_objects.new_pods(ganged.missing, target, groups, ganged.form),
            *child_objects.unused_services(groups, wanted, target, observed),
            *unused_pod_groups(revisions, target, observed, ganged.form),
            *child_objects.old_revisions(groups, target),
            *role_scales(groups, target, observed),
        ),
        status=status_of(
            groups,
            target,
            rollout,
            conditions=conditions_of(groups, target, rollout, problems),
            failed=failed_groups(groups, target, observed),
            recoveries=as_status((*recovered.attempts, *ganged.attempts)),
        ),
        events=(
            *rollout_events(target, rollout),
            *recovered.events,
            *ganged.events,
            *child_objects.group_events(groups, ganged.missing, drained.deleted),
        ),
        requeue_at_s=min((one for one in times if one is not None), default=None),
        asks_loads_of=wanted.asks_loads_of | drained.asks_loads_of,
    )
