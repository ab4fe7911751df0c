# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: from the observed and the desired state to the actions of one reconcile.

There is no state between two reconciles: timers are read from objects, and counts from the status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.api.model_infer import pod_limit_errors, validation_errors
from controller.kube.reconcile_plan import Plan
from controller.models.model_infer import child_objects
from controller.models.model_infer.child_objects import role_scale_actions
from controller.models.model_infer.desired_state import desired_state, parse_model_infer
from controller.models.model_infer.gang import pod_group_actions, pod_group_deletions, schedule_gangs
from controller.models.model_infer.groups import groups_from_pods
from controller.models.model_infer.pod_changes import pod_changes, pods_to_create
from controller.models.model_infer.pod_removal import drain
from controller.models.model_infer.pod_state import parse_owned_pods
from controller.models.model_infer.recovery import attempts_status, recover
from controller.models.model_infer.rollout import rollout_events, rollout_state
from controller.models.model_infer.status import (
    degraded_reasons,
    failed_groups,
    model_infer_conditions,
    model_infer_status,
    refused_status,
)

if TYPE_CHECKING:
    from controller.models.model_infer.model_infer_state import ModelInferState


def reconcile(observed: ModelInferState, now_s: float) -> Plan:
    """``now_s``: seconds since the epoch. A settled object gets no actions, and the same status each time."""
    thing = observed.thing
    if thing["metadata"].get("deletionTimestamp"):
        # the API server's garbage collector deletes what we own
        return Plan()
    found = parse_model_infer(thing)
    wrong = [found] if isinstance(found, str) else list(validation_errors(found))
    if isinstance(found, str) or wrong:
        return Plan(status=refused_status(thing, wrong))
    target = desired_state(observed, found.spec, now_s)
    # roles may have scales of their own, which no webhook sees
    if wrong := list(pod_limit_errors(found.spec, target.counts)):
        return Plan(status=refused_status(thing, wrong))
    groups = groups_from_pods(parse_owned_pods(observed.pods, target.uid, observed.lost_nodes), target)
    rollout = rollout_state(groups, target, now_s)
    wanted = pod_changes(groups, target, observed, is_moving=rollout.is_moving)
    recovered = recover(groups, target, observed, wanted.unwanted, now_s)
    drained = drain(wanted.leaving, groups, observed, now_s, found.spec.template.drain_timeout)
    missing = pods_to_create(wanted, groups, recovered, target)
    ganged = schedule_gangs(missing, groups, target, observed, now_s)
    revisions = child_objects.revision_by_group(groups, wanted)
    problems = degraded_reasons(groups, target, observed, rollout, ganged.problems)
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
            *child_objects.scale_label_corrections(groups, ganged.missing),
            *child_objects.deduplicate_deletions((*recovered.deleted, *ganged.deleted, *drained.deleted)),
            *pod_group_actions(revisions, target, observed, ganged.form),
            *child_objects.new_services(groups, wanted, target, observed),
            *child_objects.new_pods(ganged.missing, target, groups, ganged.form),
            *child_objects.unused_services(groups, wanted, target, observed),
            *pod_group_deletions(revisions, target, observed, ganged.form),
            *child_objects.old_revisions(groups, target),
            *role_scale_actions(groups, target, observed),
        ),
        status=model_infer_status(
            groups,
            target,
            rollout,
            conditions=model_infer_conditions(groups, target, rollout, problems),
            failed=failed_groups(groups, target, observed),
            recoveries=attempts_status((*recovered.attempts, *ganged.attempts)),
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
