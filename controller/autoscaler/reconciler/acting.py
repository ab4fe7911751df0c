# SPDX-License-Identifier: Apache-2.0
"""Writes what was decided: who scales a target, its replicas, and the marks of pods that will go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.reconciler.names import SCALED_BY, SCALED_TO
from controller.kube.errors import Conflict, NotFound
from controller.kube.resources import PODS, split_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.autoscaler.reconciler.draining import Mark
    from controller.autoscaler.reconciler.owning import Claim, Place
    from controller.autoscaler.reconciler.scalables import Scalable
    from controller.kube.client import Client


class DecideAgain(Exception):
    """A target is not what was decided about any more."""


class Wrote(msgspec.Struct, frozen=True):
    """What we wrote last and may not have heard of yet."""

    uid: str
    version: str
    replicas: int


def _nobody(_: Place) -> None:
    """Needs to be told."""


class Actor:
    """``client``: under our own manager's name. ``counted``: called with kind and verb of each write. ``changed``:
    called with a target that is not as it was heard of any more.
    """

    def __init__(
        self, client: Client, counted: Callable[[str, str], None], changed: Callable[[Place], None] = _nobody
    ) -> None:
        self.client = client
        self._counted = counted
        self._changed = changed
        self._wrote: dict[Place, Wrote] = {}

    def latest(self, place: Place, found: Scalable) -> Scalable:
        """A target as it is after our own last write, of which the informer may not have told yet."""
        wrote = self._wrote.get(place)
        if wrote is None:
            return found
        if wrote.uid != found.uid or not is_older(found.version, wrote.version):
            del self._wrote[place]
            return found
        return msgspec.structs.replace(
            found,
            replicas=wrote.replicas,
            scaled_to=frozenset({wrote.replicas}),
            is_ours=True,
            version=wrote.version,
        )

    def forget(self, places: Sequence[Place]) -> None:
        """Nobody scales these any more."""
        for one in places:
            self._wrote.pop(one, None)

    async def claim(self, place: Place, found: Scalable, mine: Claim) -> None:
        """Say on the target that ``mine`` scales it. Raises DecideAgain if it has changed since."""
        try:
            await self._annotate(found, {SCALED_BY: mine.text, SCALED_TO: str(found.replicas)}, found.version)
        finally:
            self._changed(place)

    async def scale(self, place: Place, found: Scalable, replicas: int) -> None:
        """Write the replicas of a target, if it still is what was decided about: others' writes of anything else do not
        matter. Raises DecideAgain otherwise.

        What is intended is written first: a leader that ends in between leaves a number that its successor knows.
        """
        try:
            await self._scale(place, found, replicas)
        finally:
            self._changed(place)

    async def _scale(self, place: Place, found: Scalable, replicas: int) -> None:
        namespace, name = split_key(found.key)
        version = found.version
        for _ in range(3):
            try:
                intended = {SCALED_TO: f"{replicas} from {found.replicas}"}
                version = await self._patch(found, intended, version)
                patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
                written = await self.client.merge_patch(found.resource, name, namespace, patch, subresource="scale")
                break
            except NotFound as error:
                raise DecideAgain(f"{found.key} is gone") from error
            except Conflict:
                scale = await self._scale_of(found)
                if (scale["metadata"].get("uid"), scale["spec"].get("replicas", 0)) != (found.uid, found.replicas):
                    raise DecideAgain(f"{found.key} has changed") from None
                version = str(scale["metadata"]["resourceVersion"])
        else:
            raise DecideAgain(f"{found.key} changes all the time")
        self._counted(found.resource.kind, "scale")
        self._wrote[place] = Wrote(found.uid, written["metadata"]["resourceVersion"], replicas)
        # by this it is known later whether somebody else has changed them
        version = await self._annotate(found, {SCALED_TO: str(replicas)})
        self._wrote[place] = Wrote(found.uid, version, replicas)

    async def mark(self, marks: Sequence[Mark]) -> None:
        """Pods that are gone, or others of the same name by now, need no marks."""
        for one in marks:
            namespace, name = split_key(one.pod.key)
            patch = {"metadata": {"uid": one.pod.uid, "annotations": one.annotations}}
            try:
                await self.client.merge_patch(PODS, name, namespace, patch)
            except (NotFound, Conflict):
                continue
            self._counted(PODS.kind, "mark")

    async def _scale_of(self, found: Scalable) -> dict[str, dict[str, object]]:
        namespace, name = split_key(found.key)
        try:
            return await self.client.get(found.resource, name, namespace, subresource="scale")
        except NotFound as error:
            raise DecideAgain(f"{found.key} is gone") from error

    async def _annotate(self, found: Scalable, annotations: dict[str, str], version: str = "") -> str:
        """The version of the object after that. Raises DecideAgain."""
        try:
            return await self._patch(found, annotations, version)
        except (NotFound, Conflict) as error:
            raise DecideAgain(f"{found.key} has changed") from error

    async def _patch(self, found: Scalable, annotations: dict[str, str], version: str) -> str:
        namespace, name = split_key(found.key)
        metadata: dict[str, object] = {"uid": found.uid, "annotations": annotations}
        if version:
            metadata["resourceVersion"] = version
        written = await self.client.merge_patch(found.resource, name, namespace, {"metadata": metadata})
        self._counted(found.resource.kind, "claim")
        return str(written["metadata"]["resourceVersion"])


def is_older(version: str, than: str) -> bool:
    """Of two versions of one object. Where a server does not count, any other one is taken for newer."""
    if version.isdecimal() and than.isdecimal():
        return int(version) < int(than)
    return version == than
