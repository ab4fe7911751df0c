# SPDX-License-Identifier: Apache-2.0
"""ModelInfer: from what is observed and what is asked for to what to do now.

Nothing is remembered between two reconciles: timers are read from objects, and counts from the status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.api.model_infer_mistakes import mistakes, too_many
from controller.kube.plan import Plan
from controller.models.model_infer import owned
from controller.models.model_infer.changes import changes, may_be_made
from controller.models.model_infer.drain import drain
from controller.models.model_infer.gang import gang_of, pod_groups, unused_pod_groups
from controller.models.model_infer.groups import groups_of
from controller.models.model_infer.owned import role_scales
from controller.models.model_infer.pod_state import pods_of
from controller.models.model_infer.recovery import as_status, recover
from controller.models.model_infer.rollout import rollout_of, told
from controller.models.model_infer.status import conditions_of, failed_groups, problems_of, refused_status, status_of
from controller.models.model_infer.target import read, target_of

if TYPE_CHECKING:
    from controller.models.model_infer.observed import Observed


def reconcile(observed: Observed, now_s: float) -> Plan:
    """``now_s``: seconds since the epoch. A settled object gets no actions, and the same status each time."""
    thing = observed.thing
    if thing["metadata"].get("deletionTimestamp"):
        # the API server's garbage collector deletes what we own
        return Plan()
    found = read(thing)
    wrong = [found] if isinstance(found, str) else list(mistakes(found))
    if isinstance(found, str) or wrong:
        return Plan(status=refused_status(thing, wrong))
    target = target_of(observed, found.spec, now_s)
    # roles may have scales of their own, which no webhook sees
    if wrong := list(too_many(found.spec, target.counts)):
        return Plan(status=refused_status(thing, wrong))
    groups = groups_of(pods_of(observed.pods, target.uid, observed.lost_nodes), target)
    rollout = rollout_of(groups, target, now_s)
    wanted = changes(groups, target, observed, is_moving=rollout.is_moving)
    recovered = recover(groups, target, observed, wanted.unwanted, now_s)
    drained = drain(wanted.leaving, groups, observed, now_s, found.spec.template.drain_timeout)
    missing = may_be_made(wanted, groups, recovered, target)
    ganged = gang_of(missing, groups, target, observed, now_s)
    revisions = owned.revisions_wanted(groups, wanted)
    problems = problems_of(groups, target, observed, rollout, ganged.problems)
    asked_s = now_s if wanted.asks_loads_of else None
    times = [
        asked_s,
        rollout.look_again_at_s,
        recovered.look_again_at_s,
        drained.look_again_at_s,
        ganged.look_again_at_s,
    ]
    return Plan(
        actions=(
            *owned.new_revision(target),
            *rollout.notes,
            *drained.marked,
            *owned.renamed(wanted),
            *owned.corrected(groups, ganged.missing),
            *owned.once((*recovered.deleted, *ganged.deleted, *drained.deleted)),
            *pod_groups(revisions, target, observed, ganged.form),
            *owned.new_services(groups, wanted, target, observed),
            *owned.new_pods(ganged.missing, target, groups, ganged.form),
            *owned.unused_services(groups, wanted, target, observed),
            *unused_pod_groups(revisions, target, observed, ganged.form),
            *owned.old_revisions(groups, target),
            *role_scales(groups, target, observed),
        ),
        status=status_of(
            groups,
            target,
            rollout,
            told=conditions_of(groups, target, rollout, problems),
            failed=failed_groups(groups, target, observed),
            recoveries=as_status((*recovered.attempts, *ganged.attempts)),
        ),
        events=(
            *told(target, rollout),
            *recovered.events,
            *ganged.events,
            *owned.told(groups, ganged.missing, drained.deleted),
        ),
        look_again_at_s=min((one for one in times if one is not None), default=None),
        asks_loads_of=wanted.asks_loads_of | drained.asks_loads_of,
    )
