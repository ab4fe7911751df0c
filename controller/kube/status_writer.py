# SPDX-License-Identifier: Apache-2.0
"""Writes statuses of objects, and Events where a condition changed; a status that says it all already is left alone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Literal

from controller.kube.conditions import WantedStatus, merged, transitions
from controller.kube.errors import ClusterError, Conflict, NotFound
from controller.kube.recorder import event_of, now
from controller.kube.resources import (
    EVENTS,
    GATEWAY_CLASSES,
    GATEWAY_CONFIGS,
    GATEWAYS,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    MODEL_ACCESS_POLICIES,
    MODEL_ROUTES,
    MODEL_SERVERS,
    Object,
    split_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.kube.client import Client

log = logging.getLogger(__name__)

_KINDS: Final = (
    GATEWAY_CLASSES,
    GATEWAY_CONFIGS,
    GATEWAYS,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    MODEL_ACCESS_POLICIES,
    MODEL_ROUTES,
    MODEL_SERVERS,
)
_RESOURCES: Final = {one.kind: one for one in _KINDS}
_BAD_WHEN_TRUE: Final = ("Conflicted",)
_RETRY_S: Final = 2.0

Key = tuple[str, str]


class StatusWriter:
    """``want`` says what statuses should be; ``run``, which only the leader runs, writes them.

    ``observed``: an object as last heard, by kind and key.
    """

    def __init__(self, client: Client, observed: Callable[[str, str], Object | None], controller: str) -> None:
        self._client = client
        self._observed = observed
        self._controller = controller
        self._wanted: Mapping[Key, WantedStatus] = {}
        self._stale: set[Key] = set()
        self._wake = asyncio.Event()
        self.writes = 0

    def want(self, statuses: Mapping[Key, WantedStatus]) -> None:
        """From now on statuses should be these."""
        self._stale |= {key for key, status in statuses.items() if self._wanted.get(key) != status}
        self._wanted = statuses
        self._wake.set()

    def look_at(self, key: Key) -> None:
        """The object has changed, maybe its status."""
        if key in self._wanted:
            self._stale.add(key)
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A write that fails is tried again."""
        self._stale |= set(self._wanted)
        while True:
            self._wake.clear()
            stale, self._stale = self._stale, set()
            failed = [key for key in sorted(stale) if not await self._write(key)]
            if failed:
                await asyncio.sleep(_RETRY_S)
                self._stale |= set(failed)
            elif not self._stale:
                await self._wake.wait()

    async def _write(self, key: Key) -> bool:
        """Whether it is done with."""
        wanted, thing = self._wanted.get(key), self._observed(*key)
        if wanted is None or thing is None:
            return True
        if thing["metadata"].get("generation", 0) != wanted.generation:
            # one of the two is older; the newer one brings us here again
            return True
        before = thing.get("status") or {}
        status = merged(wanted, before, now())
        if status is None:
            return True
        try:
            await self._send(wanted, thing, status)
            self.writes += 1
            for condition in transitions(status, before):
                await self._client.create(EVENTS, self._event(thing, condition))
        except (NotFound, Conflict):
            # it is gone, or somebody else wrote it, of which we shall hear
            return True
        except ClusterError as error:
            log.warning("the status of %s %s cannot be written, tried again: %s", *key, error)
            return False
        return True

    async def _send(self, wanted: WantedStatus, thing: Object, status: Mapping[str, Any]) -> None:
        """Raises Conflict if somebody else has written a list that we share with them."""
        resource = _RESOURCES[wanted.kind]
        namespace, name = split_key(wanted.key)
        if wanted.is_shared:
            # such lists are replaced as a whole, others' items included
            patch = {"metadata": {"resourceVersion": thing["metadata"]["resourceVersion"]}, "status": status}
            await self._client.merge_patch(resource, name, namespace, patch, subresource="status")
            return
        applied = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": name} if namespace is None else {"name": name, "namespace": namespace},
            "status": status,
        }
        await self._client.apply(resource, applied, subresource="status", force=True)

    def _event(self, thing: Object, condition: Mapping[str, Any]) -> Object:
        is_good = (condition["status"] == "True") != (condition["type"] in _BAD_WHEN_TRUE)
        message = condition["message"] or f"{condition['type']} is {condition['status']}"
        type_: Literal["Normal", "Warning"] = "Normal" if is_good else "Warning"
        return event_of(thing, type_, reason=condition["reason"], message=message, component=self._controller)
