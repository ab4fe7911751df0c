# SPDX-License-Identifier: Apache-2.0
"""Actions on what a ModelInfer owns: made, tidied away, labelled anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.kube.plan import Annotate, Create, Delete, Happened
from controller.kube.resources import CONTROLLER_REVISIONS, PODS, SERVICES, key_of
from controller.models.model_infer import labels, names, pods, scale_units, services
from controller.models.model_infer.gang import marks
from controller.models.model_infer.pod_state import is_owned
from controller.models.model_infer.revisions import controller_revision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.models.model_infer.changes import Changes, Missing
    from controller.models.model_infer.gang import Form
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.names import Place
    from controller.models.model_infer.observed import Observed
    from controller.models.model_infer.revisions import Revision
    from controller.models.model_infer.target import Target


def new_revision(target: Target) -> Iterator[Create]:
    """The ControllerRevision of the template, if there is none yet."""
    history = target.history
    if not history.is_kept():
        number = history.newest_number() + 1
        thing = controller_revision(target.owner, target.spec.template, history.update.hash, number)
        yield Create(CONTROLLER_REVISIONS, thing)


def old_revisions(groups: Sequence[Group], target: Target) -> Iterator[Delete]:
    """Beyond the limit, of what nothing is made of: the oldest."""
    used = {pod.revision for one in groups for pod in one.pods}
    used |= {target.history.update.hash, target.goal.hash, target.current.hash}
    unused = [one for one in target.history.kept.values() if one.hash not in used]
    count = len(unused) - target.spec.revision_history_limit
    for one in sorted(unused, key=lambda one: one.number)[: max(0, count)]:
        yield Delete(CONTROLLER_REVISIONS, one.key, one.uid)


def renamed(wanted: Changes) -> Iterator[Annotate]:
    """Pods whose role has not changed become part of the new revision as they are."""
    for pod, revision in wanted.renamed:
        yield Annotate(PODS, pod.key, pod.uid, labels={labels.REVISION: revision})


def revisions_wanted(groups: Sequence[Group], wanted: Changes) -> Mapping[int, Revision]:
    """Of the groups that there are to be, made or not; those that go are not among them."""
    found = {one.place.group: one.revision for one in wanted.missing}
    for group in groups:
        if any(one.place not in wanted.unwanted for one in group.replicas):
            found[group.ordinal] = group.revision
    return found


def new_services(groups: Sequence[Group], wanted: Changes, target: Target, observed: Observed) -> Iterator[Create]:
    """Of replicas of more than one pod, before the pods, which look their entry up at once."""
    there = {one["metadata"]["name"] for one in observed.services}
    for place in _with_service(groups, wanted):
        name = names.service_name(target.name, place)
        if name not in there:
            there.add(name)
            yield Create(SERVICES, services.service(target.owner, place))


def unused_services(groups: Sequence[Group], wanted: Changes, target: Target, observed: Observed) -> Iterator[Delete]:
    """Of replicas of which nothing is left."""
    there = [one.place for group in groups for one in group.replicas if max(one.size, len(one.pods)) > 1]
    used = {names.service_name(target.name, one) for one in (*there, *_with_service(groups, wanted))}
    for one in observed.services:
        if one["metadata"]["name"] not in used and is_owned(one, target.uid):
            yield Delete(SERVICES, key_of(one), one["metadata"].get("uid", ""))


def _with_service(groups: Sequence[Group], wanted: Changes) -> Iterator[Place]:
    for group in groups:
        yield from (one.place for one in group.replicas if one.size > 1 and one.place not in wanted.unwanted)
    yield from (one.place for one in wanted.missing if one.role.workers)


def new_pods(
    missing: Sequence[Missing], target: Target, groups: Sequence[Group], form: Form | None
) -> Iterator[Create]:
    """In the order in which they are missing."""
    counted = scale_units.to_label(groups, missing)
    for one in missing:
        marked = marks(one.place, one.revision, target, form)
        ask = pods.Ask(
            owner=target.owner,
            labels=marked.labels,
            annotations=marked.annotations,
            scheduler_name=target.spec.scheduler_name,
            drain_s=target.spec.template.drain_timeout,
            is_scale_unit=one.place in counted,
        )
        yield Create(PODS, pods.pod(one.place, one.revision, one.role, ask))


def told(groups: Sequence[Group], missing: Sequence[Missing], deleted: Sequence[Delete]) -> Iterator[Happened]:
    """Groups that come and go, one Event for all of them."""
    there = {one.ordinal for one in groups}
    new = {one.place.group: one.revision.hash for one in missing if one.place.group not in there}
    gone = {one.key for one in deleted}
    leaving = [
        one.ordinal for one in groups if not one.is_going and all(pod.is_going or pod.key in gone for pod in one.pods)
    ]
    if new:
        revisions = ", ".join(sorted({*new.values()}))
        yield Happened("Normal", "GroupsCreated", f"{_listed(sorted(new))} of revision {revisions}")
    if leaving:
        yield Happened("Normal", "GroupsDeleted", _listed(leaving))


def _listed(ordinals: Sequence[int]) -> str:
    more = f" and {len(ordinals) - 10} more" if len(ordinals) > 10 else ""
    return f"group{'s' if len(ordinals) > 1 else ''} {', '.join(map(str, ordinals[:10]))}{more}"


def once(deletions: Sequence[Delete]) -> Iterator[Delete]:
    """A pod may have to go for several reasons: for the first of them."""
    yield from {one.uid: one for one in reversed(deletions)}.values()
