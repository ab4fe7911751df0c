# SPDX-License-Identifier: Apache-2.0
"""A reconciler's plan: what to write, the status, events, and when to reconcile again."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from controller.kube.api_resources import ApiResource, Object


class Create(msgspec.Struct, frozen=True):
    """Create ``thing``. If it exists already, that is no failure: the cache was late, and its name identifies its
    content.
    """

    resource: ApiResource
    thing: Object


class Apply(msgspec.Struct, frozen=True):
    """Own the fields of ``thing`` by server-side apply. ``yields``: paths of fields, such as ``("spec", "replicas")``,
    that are left out where another manager owns them with another value; all other fields are taken from others.
    """

    resource: ApiResource
    thing: Object
    yields: tuple[tuple[str, ...], ...] = ()


class Annotate(msgspec.Struct, frozen=True):
    """Set labels and annotations of one object, None removes; only while it still is the one with ``uid``."""

    resource: ApiResource
    key: str
    uid: str
    annotations: Mapping[str, str | None] = {}
    labels: Mapping[str, str | None] = {}


class Delete(msgspec.Struct, frozen=True):
    """Delete one object, if it still is the one with ``uid``. ``grace_s``: None leaves it to the object."""

    resource: ApiResource
    key: str
    uid: str
    grace_s: int | None = None


class SetStatus(msgspec.Struct, frozen=True):
    """Set ``fields`` in the status of one object that the reconciled one owns; only while it still is the one with
    ``uid``. Other fields stay.
    """

    resource: ApiResource
    key: str
    uid: str
    fields: Mapping[str, Any]


Action = Create | Apply | Annotate | Delete | SetStatus


class KubeEvent(msgspec.Struct, frozen=True):
    """An Event for ``kubectl describe``. ``reason``: one word in CamelCase."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The actions, status and events of one reconcile of an object.

    ``actions``: in their order; after one fails, the rest waits for the next reconcile. ``status``: the object's status
    without times of transitions, which the writer adds; None leaves it alone. ``events``: recorded once the actions are
    done. ``requeue_at_s``: the next instant, in seconds since the epoch, at which time alone may change the plan; None:
    only a change of an object does. ``asks_loads_of``: pods, by key, whose loads the next reconcile needs.
    """

    actions: tuple[Action, ...] = ()
    status: Mapping[str, Any] | None = None
    events: tuple[KubeEvent, ...] = ()
    requeue_at_s: float | None = None
    asks_loads_of: frozenset[str] = frozenset()


def without_paths(thing: Object, paths: Iterable[tuple[str, ...]]) -> Object:
    """A copy that lacks the fields at ``paths``, such as those of ``Apply.yields``."""
    new = copy.deepcopy(thing)
    for *way, last in paths:
        holder: Any = new
        for name in way:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder.pop(last, None)
    return new
