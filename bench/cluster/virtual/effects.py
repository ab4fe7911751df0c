# SPDX-License-Identifier: Apache-2.0
"""What the actions of plans do to a virtual server, and what statuses are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.cluster.fake.answers import Refused
from controller.kube.plan import Action, Annotate, Apply, Create, Delete, SetStatus
from controller.kube.resources import Object, key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.cluster.virtual.server import Server

NAME: Final = "attache-manager"


def perform(server: Server, action: Action) -> None:
    """Raises Refused where a manager would take it for a failure."""
    match action:
        case Create():
            _create(server, action)
        case Apply():
            server.apply(action.resource, _yielded(server, action), NAME)
        case Annotate():
            changes = {"annotations": dict(action.annotations), "labels": dict(action.labels)}
            metadata = {"uid": action.uid, **{name: one for name, one in changes.items() if one}}
            server.patch(action.resource, action.key, {"metadata": metadata}, NAME)
        case Delete():
            _delete(server, action)
        case SetStatus():
            thing = server.find(action.resource, action.key)
            if thing is not None and thing["metadata"]["uid"] == action.uid:
                status = {**(thing.get("status") or {}), **msgspec.to_builtins(action.fields)}
                server.set_status(action.resource, thing, status)


def _create(server: Server, action: Create) -> None:
    """That it is there already is no failure: its name says what it is."""
    try:
        server.create(action.resource, action.thing, NAME)
    except Refused as error:
        if error.reason != "AlreadyExists":
            raise


def _delete(server: Server, action: Delete) -> None:
    """That it is gone already is no failure; another of its name is not touched."""
    try:
        server.delete(action.resource, action.key, uid=action.uid, grace_s=action.grace_s)
    except Refused as error:
        if error.code != 404:
            raise


def _yielded(server: Server, action: Apply) -> Object:
    """Without the fields that others own."""
    thing: Object = msgspec.json.decode(msgspec.json.encode(action.thing))
    for path in action.yields:
        if server.is_owned_by_another(action.resource, key_of(thing), path, NAME):
            holder = thing
            for name in path[:-1]:
                holder = holder.get(name, {})
            holder.pop(path[-1], None)
    return thing


def differ(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two statuses say something else, leaving times aside."""
    return _without_times(one) != _without_times(other)


def with_times(status: Mapping[str, object], before: Mapping[str, object], now: str) -> dict[str, object]:
    """A status with the times at which conditions became what they are."""
    plain = msgspec.to_builtins(status)
    old = msgspec.to_builtins(before).get("conditions") or ()
    known = {(one["type"], one["status"]): one["lastTransitionTime"] for one in old}
    conditions = [
        {**one, "lastTransitionTime": known.get((one["type"], one["status"]), now)}
        for one in plain.get("conditions") or ()
    ]
    return {**plain, "conditions": conditions}


def _without_times(status: Mapping[str, object]) -> dict[str, object]:
    plain = msgspec.to_builtins(status)
    conditions = [
        {name: value for name, value in one.items() if name != "lastTransitionTime"}
        for one in plain.get("conditions") or ()
    ]
    return {**plain, "conditions": conditions}
