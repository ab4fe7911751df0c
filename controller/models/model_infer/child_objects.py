# SPDX-License-Identifier: Apache-2.0
"""Objects that a ModelInfer owns, pods, Services, ModelInferRoles and revisions: created, relabelled, deleted.

By a ModelInferRole autoscalers set the replicas of one role. An autoscaler multiplies its ratio with the number of pods
that the selector finds, so the selector finds as many as one group has: the role's entry pods of the first group.
Requests are spread over all groups alike, so one group stands for the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import CONTROLLER_REVISIONS, MODEL_INFER_ROLES, PODS, SERVICES, Object, key_of
from controller.kube.reconcile_plan import Action, Annotate, Apply, Create, Delete, KubeEvent, SetStatus
from controller.models.model_infer import names
from controller.models.model_infer.desired_state import controller_revision, owner_reference
from controller.models.model_infer.gang import gang_pod_metadata
from controller.models.model_infer.groups import entry_pods
from controller.models.model_infer.pod_state import is_owned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.api.model_infer import Role
    from controller.models.model_infer.desired_state import DesiredState, Revision, RoleRevision
    from controller.models.model_infer.gang import Form
    from controller.models.model_infer.groups import Group
    from controller.models.model_infer.model_infer_state import ModelInferState
    from controller.models.model_infer.names import PodPosition
    from controller.models.model_infer.pod_changes import MissingPod, PodChanges

_DEFAULT_GRACE_S: Final = 30


class PodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What pods get in addition to their template. ``labels`` and ``annotations``: of the gang. ``drain_s``: how long
    running requests have to end. ``is_scale_unit``: autoscalers count this pod for its group.
    """

    owner: Object
    scheduler_name: str | None = None
    drain_s: float = 0.0
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    is_scale_unit: bool = False


def build_pod(place: PodPosition, revision: Revision, role: RoleRevision, ask: PodOptions) -> Object:
    """A pod to create. Fields of the template that this module does not set pass through unchanged."""
    owner = ask.owner["metadata"]
    template = role.entry if place.index == 0 or role.worker is None else role.worker
    given = {
        names.MODEL_INFER: owner["name"],
        names.REVISION: revision.hash,
        names.ROLE_REVISION: role.hash,
        names.GROUP_REVISION: names.group_revision_label(place.group, revision.hash),
        **place.labels,
        **ask.labels,
        **({names.SCALE_UNIT: "true"} if ask.is_scale_unit else {}),
    }
    metadata: dict[str, Any] = {
        "name": names.pod_name(owner["name"], place),
        "namespace": owner["namespace"],
        "labels": {**template.metadata.labels, **given},
        "ownerReferences": [owner_reference(ask.owner)],
    }
    annotations = {**template.metadata.annotations, **ask.annotations}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.kind,
        "metadata": metadata,
        "spec": _spec(template.spec, place, role, ask),
    }


def _spec(template: Mapping[str, Any], place: PodPosition, role: RoleRevision, ask: PodOptions) -> dict[str, Any]:
    env = pod_environment(place, role, ask.owner["metadata"]["name"], ask.owner["metadata"]["namespace"])
    spec = dict(template)
    for name in ("containers", "initContainers"):
        if isinstance(spec.get(name), list):
            spec[name] = [_with_env(one, env) for one in spec[name]]
    if role.workers:
        spec["hostname"] = names.pod_name(ask.owner["metadata"]["name"], place)
        spec["subdomain"] = names.service_name(ask.owner["metadata"]["name"], place)
    if place.index == 0 and "topologySpreadConstraints" not in spec:
        spec["topologySpreadConstraints"] = [_spread(place, role, ask)]
    if ask.scheduler_name and "schedulerName" not in spec:
        spec["schedulerName"] = ask.scheduler_name
    grace = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_S)
    if isinstance(grace, int) and grace < ask.drain_s:
        spec["terminationGracePeriodSeconds"] = math.ceil(ask.drain_s)
    return spec


def _spread(place: PodPosition, role: RoleRevision, ask: PodOptions) -> dict[str, Any]:
    """Entry pods of one role and revision go to different nodes where they can: else engines without requests of their
    own for memory or CPUs may all land on one. Workers stay near the others of their group.
    """
    chosen = {
        names.MODEL_INFER: ask.owner["metadata"]["name"],
        names.ROLE: place.role,
        names.ROLE_REVISION: role.hash,
        names.ENTRY: "true",
    }
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": chosen},
    }


def pod_environment(place: PodPosition, role: RoleRevision, owner: str, namespace: str) -> dict[str, str]:
    """Environment variables with a container's place in its group.

    The names beginning with ``LWS_`` are those of LeaderWorkerSet, which published start scripts of vLLM and SGLang
    read. The entry pod's address is a name that DNS resolves as soon as the pod exists, ready or not. A replica of one
    pod has no Service, and its entry is itself.
    """
    entry = msgspec.structs.replace(place, index=0)
    host = f"{names.pod_name(owner, entry)}.{names.service_name(owner, place)}.{namespace}.svc"
    address = host if role.workers else "localhost"
    size, index = str(role.size), str(place.index)
    return {
        "ENTRY_ADDRESS": address,
        "GROUP_SIZE": size,
        "WORKER_INDEX": index,
        "GROUP_INDEX": str(place.group),
        "ROLE_NAME": place.role,
        "ROLE_REPLICA_INDEX": str(place.replica),
        "LWS_LEADER_ADDRESS": address,
        "LWS_GROUP_SIZE": size,
        "LWS_WORKER_INDEX": index,
    }


def _with_env(container: object, env: Mapping[str, str]) -> object:
    """Ours come first, so that the template's own variables may refer to them by ``$(NAME)``, and override equal names:
    a copied value would send a worker to another group's entry pod. An ``env`` that is no list is left for the API
    server to refuse.
    """
    if not isinstance(container, Mapping):
        return container
    given = container.get("env") or []
    if not isinstance(given, list):
        return container
    own = [one for one in given if not (isinstance(one, Mapping) and str(one.get("name")) in env)]
    return {**container, "env": [*({"name": name, "value": value} for name, value in env.items()), *own]}


def build_service(owner: Object, place: PodPosition) -> Object:
    """The Service of the replica at ``place``. No ports: it gives names to pods, and nothing is sent through it."""
    metadata = owner["metadata"]
    found = {
        names.MODEL_INFER: metadata["name"],
        names.GROUP: str(place.group),
        names.ROLE: place.role,
        names.ROLE_REPLICA: str(place.replica),
    }
    return {
        "apiVersion": SERVICES.api_version,
        "kind": SERVICES.kind,
        "metadata": {
            "name": names.service_name(metadata["name"], place),
            "namespace": metadata["namespace"],
            "labels": found,
            "ownerReferences": [owner_reference(owner)],
        },
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": found},
    }


def scale_label_positions(groups: Sequence[Group], missing: Sequence[MissingPod]) -> frozenset[PodPosition]:
    """Which of the pods that are made carry it: the first entry pod of a group of which no pod does."""
    has_one = {one.ordinal for one in groups if any(pod.is_scale_unit for pod in one.pods)}
    found: dict[int, PodPosition] = {}
    for one in missing:
        if one.place.index == 0 and one.place.group not in has_one:
            found.setdefault(one.place.group, one.place)
    return frozenset(found.values())


def scale_label_corrections(groups: Sequence[Group], missing: Sequence[MissingPod]) -> Iterator[Annotate]:
    """Pods that get or lose the label, because the one that had it is gone for good, or two have it."""
    made = {one.group for one in scale_label_positions(groups, missing)}
    for group in groups:
        live = [one for one in entry_pods(group.replicas) if not one.is_going]
        has = [one for one in live if one.is_scale_unit]
        for one in has[1:]:
            yield Annotate(PODS, one.key, one.uid, labels={names.SCALE_UNIT: None})
        if live and group.ordinal not in made and not any(one.is_scale_unit for one in group.pods):
            yield Annotate(PODS, live[0].key, live[0].uid, labels={names.SCALE_UNIT: "true"})


def role_scale_actions(groups: Sequence[Group], target: DesiredState, observed: ModelInferState) -> Iterator[Action]:
    """Create missing ModelInferRoles; set replicas that changed in the template, unless an autoscaler owns them; write
    their statuses.
    """
    known = {one["metadata"]["name"]: one for one in observed.role_scales if is_owned(one, target.uid)}
    wanted = {names.role_scale_name(target.name, one.name): one for one in target.spec.template.roles if one.scalable}
    for name, role in wanted.items():
        thing = _scale(name, role, target)
        old = known.get(name)
        if old is None or _asked(old) != str(role.replicas):
            yield Apply(MODEL_INFER_ROLES, thing, (("spec", "replicas"),))
        if old is not None:
            fields = _status(role, groups, target, old)
            if any((old.get("status") or {}).get(field) != value for field, value in fields.items()):
                yield SetStatus(MODEL_INFER_ROLES, key_of(old), old["metadata"].get("uid", ""), fields)
    for name, old in known.items():
        if name not in wanted:
            yield Delete(MODEL_INFER_ROLES, key_of(old), old["metadata"].get("uid", ""))


def _asked(thing: Object) -> str | None:
    """The template's replicas when the object was last written: autoscalers change only the replicas of the spec."""
    found = (thing["metadata"].get("annotations") or {}).get(names.TEMPLATE_REPLICAS)
    return None if found is None else str(found)


def _scale(name: str, role: Role, target: DesiredState) -> Object:
    return {
        "apiVersion": MODEL_INFER_ROLES.api_version,
        "kind": MODEL_INFER_ROLES.kind,
        "metadata": {
            "name": name,
            "namespace": target.owner["metadata"]["namespace"],
            "labels": {names.MODEL_INFER: target.name, names.ROLE: role.name},
            "annotations": {names.TEMPLATE_REPLICAS: str(role.replicas)},
            "ownerReferences": [owner_reference(target.owner)],
        },
        "spec": {"modelInfer": target.name, "role": role.name, "replicas": role.replicas},
    }


def _status(role: Role, groups: Sequence[Group], target: DesiredState, old: Object) -> dict[str, Any]:
    staying = [one for one in groups if not one.is_being_deleted]
    counts = [[each for each in one.replicas_of_role(role.name) if not each.is_being_deleted] for one in staying]
    first = staying[0].ordinal if staying else 0
    return {
        "observedGeneration": old["metadata"].get("generation", 0),
        "replicas": len(counts[0]) if counts else 0,
        "readyReplicas": min((len([each for each in one if each.is_ready]) for one in counts), default=0),
        "labelSelector": names.label_selector(target.name, GROUP=str(first), ROLE=role.name, ENTRY="true"),
    }


def new_revision(target: DesiredState) -> Iterator[Create]:
    """The ControllerRevision of the template, if there is none yet."""
    history = target.history
    if not history.is_template_stored():
        number = history.newest_number() + 1
        thing = controller_revision(target.owner, target.spec.template, history.update.hash, number)
        yield Create(CONTROLLER_REVISIONS, thing)


def old_revisions(groups: Sequence[Group], target: DesiredState) -> Iterator[Delete]:
    """Beyond the limit, of what nothing is made of: the oldest."""
    used = {pod.revision for one in groups for pod in one.pods}
    used |= {target.history.update.hash, target.goal.hash, target.current.hash}
    unused = [one for one in target.history.kept.values() if one.hash not in used]
    count = len(unused) - target.spec.revision_history_limit
    for one in sorted(unused, key=lambda one: one.number)[: max(0, count)]:
        yield Delete(CONTROLLER_REVISIONS, one.key, one.uid)


def relabelled_pods(groups: Sequence[Group], wanted: PodChanges) -> Iterator[Annotate]:
    """Pods whose role has not changed are relabelled with the new revision. They form pairs with the engines of another
    role that has changed once no more of these serve in the old revision than in the new one.
    """
    renamed = {pod.key: revision for pod, revision in wanted.renamed}
    for group in groups:
        for pod in (each for one in group.replicas for each in one.live_pods):
            revision = renamed.get(pod.key, pod.revision)
            if not revision:
                continue
            labels = {names.REVISION: revision}
            if _has_partners(group, revision, renamed):
                labels[names.GROUP_REVISION] = names.group_revision_label(group.ordinal, revision)
            changed = {name: value for name, value in labels.items() if pod.labels.get(name) != value}
            if changed:
                yield Annotate(PODS, pod.key, pod.uid, labels=changed)


def _has_partners(group: Group, revision: str, renamed: Mapping[str, str]) -> bool:
    """Whether in each role no more replicas serve in another revision than in ``revision``."""
    surplus: Counter[str] = Counter()
    for one in group.replicas:
        if one.is_ready:
            is_of_it = all(renamed.get(pod.key, pod.revision) == revision for pod in one.live_pods)
            surplus[one.place.role] += 1 if is_of_it else -1
    return min(surplus.values(), default=0) >= 0


def revision_by_group(groups: Sequence[Group], wanted: PodChanges) -> Mapping[int, Revision]:
    """Of the groups that there are to be, made or not; those that go are not among them."""
    found = {one.place.group: one.revision for one in wanted.missing}
    for group in groups:
        if any(one.place not in wanted.unwanted for one in group.replicas):
            found[group.ordinal] = group.revision
    return found


def new_services(
    groups: Sequence[Group], wanted: PodChanges, target: DesiredState, observed: ModelInferState
) -> Iterator[Create]:
    """Services of replicas with more than one pod, created before the pods, which resolve their entry at once."""
    there = {one["metadata"]["name"] for one in observed.services}
    for place in _with_service(groups, wanted):
        name = names.service_name(target.name, place)
        if name not in there:
            there.add(name)
            yield Create(SERVICES, build_service(target.owner, place))


def unused_services(
    groups: Sequence[Group], wanted: PodChanges, target: DesiredState, observed: ModelInferState
) -> Iterator[Delete]:
    """Of replicas of which nothing is left."""
    there = [one.place for group in groups for one in group.replicas if max(one.size, len(one.pods)) > 1]
    used = {names.service_name(target.name, one) for one in (*there, *_with_service(groups, wanted))}
    for one in observed.services:
        if one["metadata"]["name"] not in used and is_owned(one, target.uid):
            yield Delete(SERVICES, key_of(one), one["metadata"].get("uid", ""))


def _with_service(groups: Sequence[Group], wanted: PodChanges) -> Iterator[PodPosition]:
    for group in groups:
        yield from (one.place for one in group.replicas if one.size > 1 and one.place not in wanted.unwanted)
    yield from (one.place for one in wanted.missing if one.role.workers)


def new_pods(
    missing: Sequence[MissingPod], target: DesiredState, groups: Sequence[Group], form: Form | None
) -> Iterator[Create]:
    """In the order in which they are missing."""
    counted = scale_label_positions(groups, missing)
    for one in missing:
        marked = gang_pod_metadata(one.place, one.revision, target, form)
        ask = PodOptions(
            owner=target.owner,
            labels=marked.labels,
            annotations=marked.annotations,
            scheduler_name=target.spec.scheduler_name,
            drain_s=target.spec.template.drain_timeout,
            is_scale_unit=one.place in counted,
        )
        yield Create(PODS, build_pod(one.place, one.revision, one.role, ask))


def group_events(
    groups: Sequence[Group], missing: Sequence[MissingPod], deleted: Sequence[Delete]
) -> Iterator[KubeEvent]:
    """Created and deleted groups, one Event for all of them."""
    there = {one.ordinal for one in groups}
    new = {one.place.group: one.revision.hash for one in missing if one.place.group not in there}
    gone = {one.key for one in deleted}
    leaving = [
        one.ordinal
        for one in groups
        if not one.is_being_deleted and all(pod.is_going or pod.key in gone for pod in one.pods)
    ]
    if new:
        revisions = ", ".join(sorted({*new.values()}))
        yield KubeEvent("Normal", "GroupsCreated", f"{_listed(sorted(new))} of revision {revisions}")
    if leaving:
        yield KubeEvent("Normal", "GroupsDeleted", _listed(leaving))


def _listed(ordinals: Sequence[int]) -> str:
    more = f" and {len(ordinals) - 10} more" if len(ordinals) > 10 else ""
    return f"group{'s' if len(ordinals) > 1 else ''} {', '.join(map(str, ordinals[:10]))}{more}"


def deduplicate_deletions(deletions: Sequence[Delete]) -> Iterator[Delete]:
    """A pod may have to go for several reasons: for the first of them."""
    yield from {one.uid: one for one in reversed(deletions)}.values()
