# SPDX-License-Identifier: Apache-2.0
"""The grace of ModelRoutes and ModelServers: what was deleted, or selects other pods now, serves on for some seconds.

So a Model that is deleted and made again, and a selector that is corrected at once, lose no request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from controller.gateway.compile.source_objects import SourceObject
from controller.kube.custom_resources import KINDS as CUSTOM_RESOURCES
from extproc.api.model_server import ModelServer
from extproc.api.spec import namespace_of

KINDS: Final = ("ModelRoute", "ModelServer")
# What says who may use routes and servers: one that is deleted together with these must not be outlived by them.
RESTRICTIONS: Final = ("Gateway", *(kind.name for kind in CUSTOM_RESOURCES if kind.restricts_access))
_OF_ALL_NAMESPACES: Final = ("Gateway", "GatewayConfig")
# For so long requests wait for the engines of a ModelServer that came back; after that they are refused at once.
_HOLDS_S: Final = 600.0
# Later than every time: of two routes with one name, the one that was deleted comes last.
_LAST: Final = "~"

Key = tuple[str, str]


class GraceState(msgspec.Struct, frozen=True, kw_only=True):
    """One object. ``source``: what is served. ``gone_until_s``: it was deleted, and is served until then.
    ``former``: the labels that a ModelServer selected before; until ``former_until_s`` their pods serve for it.
    ``held_until_s``: it came back, and until then its requests wait for an engine. A time is infinite where it does
    not apply.
    """

    source: SourceObject
    gone_until_s: float = math.inf
    former: Mapping[str, str] | None = None
    former_until_s: float = math.inf
    held_until_s: float = math.inf

    @property
    def next_expiry_s(self) -> float:
        """When the first of these times is over."""
        return min(self.gone_until_s, self.former_until_s, self.held_until_s)

    @property
    def is_deleted(self) -> bool:
        """Whether the object was deleted."""
        return self.gone_until_s < math.inf

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait while there is no engine: the object may come back, or has come back."""
        return self.is_deleted or self.held_until_s < math.inf

    @property
    def is_served_by_former_pods(self) -> bool:
        """Whether the pods that were selected before serve for it."""
        return self.former_until_s < math.inf

    def after_replacement(self, source: SourceObject, now_s: float, grace_s: float) -> GraceState:
        """The object is there, as ``source``."""
        is_back = self.is_deleted or self.source.uid != source.uid
        held_until_s = now_s + _HOLDS_S if is_back else self.held_until_s
        former, until_s, labels = self.former, self.former_until_s, selected_labels(self.source)
        if labels is not None and labels != selected_labels(source) and not self.is_served_by_former_pods:
            former, until_s = labels, now_s + grace_s
        return GraceState(source=source, former=former, former_until_s=until_s, held_until_s=held_until_s)

    def after_deletion(self, now_s: float, grace_s: float) -> GraceState:
        """The object is gone."""
        if self.is_deleted:
            return self
        source = msgspec.structs.replace(self.source, created=_LAST)
        return msgspec.structs.replace(self, source=source, gone_until_s=now_s + grace_s)

    def after_expiry(self, now_s: float) -> GraceState | None:
        """Without what is over; None: it is served no more."""
        if self.gone_until_s <= now_s:
            return None
        return msgspec.structs.replace(
            self,
            former_until_s=self.former_until_s if self.former_until_s > now_s else math.inf,
            held_until_s=self.held_until_s if self.held_until_s > now_s else math.inf,
        )


def selected_labels(source: SourceObject | None) -> Mapping[str, str] | None:
    """The labels of a ModelServer's pods; None if it has no pods."""
    if source is None or not isinstance(source.decoded, ModelServer):
        return None
    selector = source.decoded.spec.workload_selector
    return None if selector is None else selector.match_labels


class GracePeriods:
    """The states of all ModelRoutes and ModelServers. ``grace_s``: 0 for no grace."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._states: dict[Key, GraceState] = {}
        # those of them that have a time
        self._timed: dict[Key, GraceState] = {}
        # by namespace, "" for all: until when nothing is served that is deleted
        self._closed: dict[str, float] = {}

    def update(self, kind: str, key: str, source: SourceObject | None, now_s: float) -> GraceState | None:
        """An object as it is now, None if it was deleted; what is served, None for nothing."""
        before = self._states.get((kind, key))
        after: GraceState | None = None
        if source is not None:
            after = GraceState(source=source)
            if before is not None and self._grace_s:
                after = before.after_replacement(source, now_s, self._grace_s)
        elif before is not None and not before.source.mistakes and not self._is_closed(namespace_of(key), now_s):
            after = before.after_deletion(now_s, self._grace_s)
        self._set((kind, key), after)
        return after

    def on_restriction_deleted(self, kind: str, key: str, now_s: float) -> list[Key]:
        """One of ``RESTRICTIONS`` was deleted: nothing that is deleted shortly before or after it is served, which its
        authentication or policy does not guard any more. Kinds and keys of what is served no more.
        """
        namespace = "" if kind in _OF_ALL_NAMESPACES else namespace_of(key)
        self._closed[namespace] = now_s + self._grace_s
        ended = [
            one for one, state in self._timed.items() if state.is_deleted and namespace in {"", namespace_of(one[1])}
        ]
        for one in ended:
            self._set(one, None)
        return ended

    def advance(self, now_s: float) -> dict[Key, GraceState | None]:
        """What is served otherwise from now on, because a time is over."""
        self._closed = {name: until_s for name, until_s in self._closed.items() if until_s > now_s}
        found = {one: state.after_expiry(now_s) for one, state in self._timed.items() if state.next_expiry_s <= now_s}
        for one, state in found.items():
            self._set(one, state)
        return found

    @property
    def next_expiry_s(self) -> float:
        """When the next of all times is over; infinity if none runs."""
        return min((one.next_expiry_s for one in self._timed.values()), default=math.inf)

    @property
    def objects_in_grace(self) -> frozenset[Key]:
        """Kinds and keys of what is served by grace alone: it was deleted, or its selector's former pods serve."""
        return frozenset(
            one for one, state in self._timed.items() if state.is_deleted or state.is_served_by_former_pods
        )

    def _set(self, one: Key, state: GraceState | None) -> None:
        self._states.pop(one, None)
        self._timed.pop(one, None)
        if state is not None:
            self._states[one] = state
            if state.next_expiry_s < math.inf:
                self._timed[one] = state

    def _is_closed(self, namespace: str, now_s: float) -> bool:
        return not self._grace_s or any(self._closed.get(name, -math.inf) > now_s for name in ("", namespace))
