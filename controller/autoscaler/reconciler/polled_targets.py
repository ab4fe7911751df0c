# SPDX-License-Identifier: Apache-2.0
"""Targets of other kinds, such as a CRD with a scale subresource: polled, as they have no informer.

API discovery gives the kind's resource. A read of the scale gives replicas and the pods' selector; a read of the object
its annotations. So the only permissions needed are ``get`` and ``patch`` of both.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.autoscaler.reconciler.fair_semaphore import FairSemaphore
from controller.autoscaler.reconciler.scalables import Scalable, ScalableKind, foreign_scalable_kind, parse_scalable
from controller.kube.api_resources import ApiResource, Object, is_older, required_labels
from controller.kube.errors import ClusterError, Forbidden, NotFound, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.autoscaler.reconciler.bindings import ScalableRef
    from controller.kube.client import Client

log = logging.getLogger(__name__)

_VERSION: Final = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[a-z]([-a-z0-9]*[a-z0-9])?")
_EACH_S: Final = 5.0
# However many targets there are, at most fifty reads begin in a second.
_GAP_S: Final = 0.02
# So many are read side by side, and each group of kinds has a share: behind it may be a server of its own that is slow.
_SIDE_BY_SIDE: Final = 16
# What has not been read by then cannot be read.
_DEADLINE_S: Final = 10.0
# Discovery and granted permissions are checked again after so long; denied permissions at each read.
_KNOWN_S: Final = 300.0
_REVIEWS: Final = ApiResource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)


class Unscalable(NamedTuple):
    """Why a target cannot be scaled. ``reason``: of a condition. ``message``: for people."""

    reason: str
    message: str


class PolledTarget(msgspec.Struct, frozen=True):
    """A target as read last. ``found``: None if ``lacks`` has a reason."""

    kind: ScalableKind | None = None
    found: Scalable | None = None
    lacks: Unscalable | None = None


def target_from_scale(kind: ScalableKind, place: ScalableRef, thing: Object, scale: Mapping[str, Any]) -> PolledTarget:
    """``thing``: the object. ``scale``: its scale."""
    text = str((scale.get("status") or {}).get("selector") or "")
    try:
        required = required_labels(text)
    except ValueError as error:
        return PolledTarget(
            kind,
            lacks=Unscalable("SelectorUnknown", f"the pods of {target_display_name(place)} are not known: {error}"),
        )
    if not required:
        message = (
            "its scale's status.selector names no label with one value" if text else "its scale has no status.selector"
        )
        return PolledTarget(
            kind,
            lacks=Unscalable("SelectorUnknown", f"the pods of {target_display_name(place)} are not known: {message}"),
        )
    spec = thing.get("spec")
    plain = parse_scalable(kind, {**thing, "spec": {**spec, "replicas": None} if isinstance(spec, dict) else {}})
    replicas = int((scale.get("spec") or {}).get("replicas") or 0)
    made = msgspec.structs.replace(
        plain, replicas=replicas, selector=required, selects=text, template={**required, **plain.template}
    )
    return PolledTarget(kind, made)


def target_ref_problem(place: ScalableRef, version: str) -> Unscalable | None:
    """What would lead to another path of the API server: servers resolve dots, and some read an escaped slash as
    one.
    """
    if _VERSION.fullmatch(version) is None:
        message = f"{version} {place[2]} cannot be scaled here: {version!r} is no apiVersion, such as apps/v1"
        return Unscalable("UnknownKind", message)
    if place[3] in {".", ".."} or set("/%") & set(place[3]):
        return Unscalable("TargetNotFound", f"{place[3]!r} is no name of an object")
    return None


def target_display_name(place: ScalableRef) -> str:
    """For people."""
    return f"{place[2]} {place[0]}/{place[3]}"


class PolledTargets:
    """``run`` does the work. ``changed``: called with each target of which something new was read."""

    def __init__(
        self,
        client: Client,
        changed: Callable[[ScalableRef], None],
        *,
        each_s: float = _EACH_S,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._client = client
        self._changed = changed
        self._each_s = each_s
        self._deadline_s = deadline_s
        self._shares = FairSemaphore(_SIDE_BY_SIDE)
        # being read, or waiting for it
        self._reading: set[ScalableRef] = set()
        self._asked: dict[str, Mapping[ScalableRef, str]] = {}
        self._wanted: dict[ScalableRef, str] = {}
        self._read: dict[ScalableRef, PolledTarget] = {}
        self._due_at_s: dict[ScalableRef, float] = {}
        self._failing_since_s: dict[ScalableRef, float] = {}
        self._kinds: dict[tuple[str, str], tuple[float, ScalableKind]] = {}
        self._allowed_at_s: dict[tuple[ApiResource, str], float] = {}
        self._wake = asyncio.Event()
        # grows with each change
        self.version = 0

    def set_wanted(self, key: str, places: Mapping[ScalableRef, str]) -> None:
        """Set the targets of the binding ``key``; their API version is the value."""
        if self._asked.get(key, {}) == places:
            return
        self._asked[key] = places
        if not places:
            del self._asked[key]
        self._wanted = {place: version for each in self._asked.values() for place, version in each.items()}
        for place in self._read.keys() - self._wanted.keys():
            del self._read[place]
            self._failing_since_s.pop(place, None)
        self._due_at_s = {place: self._due_at_s.get(place, 0.0) for place in self._wanted}
        self._wake.set()

    def last_read(self, place: ScalableRef) -> PolledTarget:
        """As read last; empty before that."""
        return self._read.get(place, PolledTarget())

    def are_targets_read(self, key: str) -> bool:
        """Whether each target of the binding ``key`` has been read at least once, with or without success."""
        return all(map(self.has_been_tried, self._asked.get(key, ())))

    def has_been_tried(self, place: ScalableRef) -> bool:
        """Whether it has been tried."""
        return place in self._read

    def read_soon(self, place: ScalableRef) -> None:
        """It has changed: read it soon."""
        if place in self._wanted:
            self._due_at_s[place] = 0.0
            self._wake.set()

    def on_write_answered(self, place: ScalableRef, thing: Object, scale: Object) -> None:
        """What the server answered to a write of a target and of its scale."""
        kind = self.last_read(place).kind
        now = PolledTarget() if kind is None else target_from_scale(kind, place, thing, scale)
        if now.found is not None:
            self._take(place, now)

    def disconnected_s(self, namespace: str) -> float | None:
        """For how long targets of a namespace could not be read; None if they could."""
        since_s = [at_s for place, at_s in self._failing_since_s.items() if place[0] == namespace]
        return _loop_s() - min(since_s) if since_s else None

    async def run(self) -> None:
        """Poll all targets until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                for place in self._due():
                    self._reading.add(place)
                    tasks.create_task(self._one(place), name=f"read {target_display_name(place)}")
                    await asyncio.sleep(_GAP_S)
                    if self._wake.is_set():
                        break
                if not self._wake.is_set():
                    await _until(self._wake, self._next_s())

    def _due(self) -> list[ScalableRef]:
        now_s = _loop_s()
        return [one for one, at_s in self._due_at_s.items() if at_s <= now_s and one not in self._reading]

    def _next_s(self) -> float:
        """Seconds until the next target is due. One that is overdue and being read wakes the loop at its end."""
        now_s = _loop_s()
        left_s = [at_s - now_s for one, at_s in self._due_at_s.items() if at_s > now_s or one not in self._reading]
        return max(min(left_s, default=float("inf")), 0.0)

    async def _one(self, place: ScalableRef) -> None:
        try:
            async with self._shares.acquire(place[1]):
                await self._read_place(place)
        except Exception as error:  # whatever is wrong with one object, the others are read
            log.exception("%s cannot be read", target_display_name(place))
            self._take(
                place,
                PolledTarget(
                    lacks=Unscalable("TargetNotFound", f"{target_display_name(place)} cannot be read: {error!r}")
                ),
            )
        finally:
            self._reading.discard(place)
            if self._due_at_s.get(place, float("inf")) <= _loop_s():
                self._wake.set()

    async def _read_place(self, place: ScalableRef) -> None:
        if place not in self._wanted:
            return
        self._due_at_s[place] = _loop_s() + self._each_s
        before = self.last_read(place)
        try:
            now = await self._in_time(place, before)
            self._failing_since_s.pop(place, None)
        except ClusterError as error:
            self._failing_since_s.setdefault(place, _loop_s())
            log.warning("%s cannot be read, and is as it was: %s", target_display_name(place), error)
            unread = PolledTarget(
                lacks=Unscalable("TargetNotFound", f"{target_display_name(place)} cannot be read: {error}")
            )
            now = before if place in self._read else unread
        self._take(place, now)

    async def _in_time(self, place: ScalableRef, before: PolledTarget) -> PolledTarget:
        """Raises ClusterError."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._now(place, self._wanted[place], before)
        except TimeoutError:
            raise Unreachable(f"the API server has not answered within {self._deadline_s:g} s") from None

    def _take(self, place: ScalableRef, now: PolledTarget) -> None:
        before = self.last_read(place)
        if place in self._wanted and (place not in self._read or now != before) and not _is_outdated(now, before):
            self._read[place] = now
            self.version += 1
            self._changed(place)

    async def _now(self, place: ScalableRef, version: str, before: PolledTarget) -> PolledTarget:
        """Raises ClusterError if the target cannot be read."""
        wrong = target_ref_problem(place, version)
        if wrong is not None:
            return PolledTarget(lacks=wrong)
        try:
            kind = await self._kind(place, version)
            if isinstance(kind, Unscalable):
                return PolledTarget(lacks=kind)
            lacks = await self._denied(kind.resource, place[0])
            if lacks is not None:
                return PolledTarget(kind, lacks=lacks)
            return await self._target(kind, place, before)
        except NotFound:
            return PolledTarget(lacks=Unscalable("TargetNotFound", f"there is no {target_display_name(place)}"))
        except Forbidden as error:
            self._allowed_at_s.clear()
            return PolledTarget(
                lacks=Unscalable("TargetForbidden", f"{target_display_name(place)} cannot be read: {error.message}")
            )

    async def _kind(self, place: ScalableRef, version: str) -> ScalableKind | Unscalable:
        """How the API server serves it."""
        known = self._kinds.get((version, place[2]))
        if known is not None and _loop_s() < known[0] + _KNOWN_S:
            return known[1]
        named = f"{version} {place[2]}"
        try:
            served = await self._client.served_resources(version)
        except NotFound:
            return Unscalable("UnknownKind", f"{named} cannot be scaled here: the cluster does not serve {version}")
        plain = [one for one in served if one.get("kind") == place[2] and "/" not in one.get("name", "")]
        scaled = {one.get("name") for one in served}
        if not plain:
            return Unscalable("UnknownKind", f"{named} cannot be scaled here: the cluster has no such kind")
        plural = plain[0]["name"]
        if f"{plural}/scale" not in scaled or not plain[0].get("namespaced"):
            return Unscalable(
                "UnknownKind", f"{named} cannot be scaled: {plural} have no scale subresource in a namespace"
            )
        kind = foreign_scalable_kind(ApiResource(place[1], version.rpartition("/")[2], plural, place[2]))
        self._kinds[version, place[2]] = _loop_s(), kind
        return kind

    async def _denied(self, resource: ApiResource, namespace: str) -> Unscalable | None:
        """What must be granted to us; None if we may do all that it takes."""
        checked_at_s = self._allowed_at_s.get((resource, namespace))
        if checked_at_s is not None and _loop_s() < checked_at_s + _KNOWN_S:
            return None
        missing = [
            f"{verb} {resource.plural}{'/' + part if part else ''}"
            for part in ("", "scale")
            for verb in ("get", "patch")
            if not await self._may(resource, namespace, verb, part)
        ]
        if not missing:
            self._allowed_at_s[resource, namespace] = _loop_s()
            return None
        message = f"the manager must not {', '.join(missing)} of the API group {resource.group!r} in {namespace}"
        grant = "grant it by a ClusterRole with the label attache.dev/aggregate-to-scaled-kinds=true"
        return Unscalable("TargetForbidden", f"{message}; {grant}")

    async def _may(self, resource: ApiResource, namespace: str, verb: str, part: str) -> bool:
        attributes = {"group": resource.group, "resource": resource.plural, "verb": verb, "namespace": namespace}
        spec = {"resourceAttributes": {**attributes, "subresource": part} if part else attributes}
        review: Object = {"apiVersion": _REVIEWS.api_version, "kind": _REVIEWS.kind, "metadata": {}, "spec": spec}
        try:
            answer = await self._client.create(_REVIEWS, review)
        except (NotFound, Forbidden):
            # a server without such reviews refuses the write itself
            return True
        return bool((answer.get("status") or {}).get("allowed"))

    async def _target(self, kind: ScalableKind, place: ScalableRef, before: PolledTarget) -> PolledTarget:
        name, namespace = place[3], place[0]
        scale = await self._client.get(kind.resource, name, namespace, subresource="scale")
        known = before.found
        if known is not None and scale["metadata"].get("resourceVersion") == known.version:
            return before
        thing = await self._client.get(kind.resource, name, namespace)
        if thing["metadata"].get("resourceVersion") != scale["metadata"].get("resourceVersion"):
            # written in between: once more, and the next read has any later change
            scale = await self._client.get(kind.resource, name, namespace, subresource="scale")
            thing["metadata"]["resourceVersion"] = scale["metadata"].get("resourceVersion", "")
        return target_from_scale(kind, place, thing, scale)


def _is_outdated(read: PolledTarget, by: PolledTarget) -> bool:
    """Whether a read began before our write that ``by`` has."""
    old, new = read.found, by.found
    return old is not None and new is not None and old.uid == new.uid and is_older(old.version, new.version)


def _loop_s() -> float:
    return asyncio.get_running_loop().time()


async def _until(event: asyncio.Event, wait_s: float) -> None:
    """Returns once it is set, or after this time."""
    try:
        async with asyncio.timeout(wait_s if wait_s < _KNOWN_S else None):
            await event.wait()
    except TimeoutError:
        return
