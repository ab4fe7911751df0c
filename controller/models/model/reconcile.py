# SPDX-License-Identifier: Apache-2.0
"""Model: from the observed state to objects to apply, objects to delete, and the status."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.kube.api_resources import MODEL_SERVERS, Object, key_of
from controller.kube.reconcile_plan import Apply, Delete, KubeEvent, Plan
from controller.models.model.children import (
    ChildObject,
    add_digest_annotation,
    child_objects,
    is_up_to_date,
    reported_start_times,
    stamped_digest,
)
from controller.models.model.hosted_models_status import ASK_EACH_S, pods_hosting_models
from controller.models.model.model_state import CHILDREN, ResolvedModel, Unresolved, resolve_model
from controller.models.model.status import Owned, Status, model_status, ready_replicas, unresolved_status
from controller.models.model.workload_templates import agent_images

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.models.model.model_state import ModelState


def reconcile(observed: ModelState, now_s: float) -> Plan:
    """``now_s``: seconds since the epoch. A Model that is being deleted needs nothing: its children go with it."""
    thing = observed.thing
    if "deletionTimestamp" in thing["metadata"]:
        return Plan()
    owned, foreign = _sorted_out(observed)
    model = resolve_model(observed)
    if isinstance(model, Unresolved):
        infers = [one.get("status") or {} for (kind, _), one in owned.items() if kind == "ModelInfer"]
        ready, there = (sum(int(one.get(name) or 0) for one in infers) for name in ("readyReplicas", "replicas"))
        status = unresolved_status(observed, model, ready, there, now_s)
        return Plan(status=status, events=tuple(_events(thing, status)))
    wanted = _wanted(model, observed, owned)
    taken = [
        f"{one.resource.kind} {name}" for one in wanted if (one.resource.kind, name := _name(one.thing)) in foreign
    ]
    applied = tuple(_applied(wanted, owned, foreign))
    changing = [(one.resource.kind, _name(one.thing)) for one in applied]
    status, until_s = model_status(observed, model, wanted, owned, changing, taken, now_s)
    asks = pods_hosting_models(model, observed.pods)
    wakes = [one for one in (until_s, now_s + ASK_EACH_S if asks else None) if one is not None]
    return Plan(
        actions=(*applied, *_deleted(wanted, owned)),
        status=status,
        events=tuple(_events(thing, status)),
        requeue_at_s=min(wakes, default=None),
        asks_loads_of=asks,
    )


def _wanted(model: ResolvedModel, observed: ModelState, owned: Owned) -> list[ChildObject]:
    """An upgrade of Attaché alone restarts no engine: pods keep their Attaché image until their spec changes."""
    ready = ready_replicas(owned, model)
    servers = {name: one for (kind, name), one in owned.items() if kind == MODEL_SERVERS.kind}
    starts = reported_start_times(model, observed.thing.get("status") or {}, servers)
    found = [_stamped(one) for one in child_objects(model, observed.settings, ready, starts)]
    images = {image for (kind, _), one in owned.items() if kind == "ModelInfer" for image in agent_images(one)}
    for image in sorted(images - {observed.settings.image}):
        settings = msgspec.structs.replace(observed.settings, image=image)
        earlier = [_stamped(one) for one in child_objects(model, settings, ready, starts)]
        found = [old if _is_applied(old, owned) else new for old, new in zip(earlier, found, strict=True)]
    return found


def _stamped(child: ChildObject) -> ChildObject:
    return ChildObject(child.resource, add_digest_annotation(child.thing), child.yields)


def _is_applied(child: ChildObject, owned: Owned) -> bool:
    found = owned.get((child.resource.kind, _name(child.thing)))
    return found is not None and stamped_digest(found) == stamped_digest(child.thing)


def _name(thing: Object) -> str:
    return str(thing["metadata"]["name"])


def _sorted_out(observed: ModelState) -> tuple[Owned, Owned]:
    """By kind and name: what the Model controls, and what others have under names that begin with its."""
    uid = observed.thing["metadata"].get("uid")
    owned: dict[tuple[str, str], Object] = {}
    foreign: dict[tuple[str, str], Object] = {}
    for one in observed.children:
        owners = one["metadata"].get("ownerReferences") or ()
        is_ours = any(each.get("uid") == uid and each.get("controller") for each in owners)
        (owned if is_ours else foreign)[str(one["kind"]), _name(one)] = one
    return owned, foreign


def _applied(wanted: Sequence[ChildObject], owned: Owned, foreign: Owned) -> Iterator[Apply]:
    for one in wanted:
        place = one.resource.kind, _name(one.thing)
        found = owned.get(place)
        if place in foreign or (found is not None and is_up_to_date(one.thing, found, one.yields)):
            continue
        yield Apply(resource=one.resource, thing=one.thing, yields=one.yields)


def _deleted(wanted: Sequence[ChildObject], owned: Owned) -> Iterator[Delete]:
    """Objects that requests depend on are deleted last: by then routes no longer name them."""
    kept = {(one.resource.kind, _name(one.thing)) for one in wanted}
    resources = {one.kind: one for one in CHILDREN}
    order = list(resources)
    gone = [place for place in owned if place not in kept and place[0] in resources]
    for place in sorted(gone, key=lambda one: (-order.index(one[0]), one[1])):
        thing = owned[place]
        if "deletionTimestamp" not in thing["metadata"]:
            yield Delete(resource=resources[place[0]], key=key_of(thing), uid=str(thing["metadata"]["uid"]))


def _events(thing: Object, status: Status) -> Iterator[KubeEvent]:
    """Changes of the phase, and why nothing can be made."""
    before = thing.get("status") or {}
    failure, last = status.get("failure"), before.get("failure")
    if status["phase"] != before.get("phase"):
        earlier = f"it was {before['phase']} before" if before.get("phase") else "it is new"
        yield KubeEvent("Normal", status["phase"], f"the model is {status['phase']}; {earlier}")
    if failure and failure["reason"] != (last or {}).get("reason"):
        yield KubeEvent("Warning", failure["reason"], failure["message"])
