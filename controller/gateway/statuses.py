# SPDX-License-Identifier: Apache-2.0
"""Statuses of the gateway role's objects: which files the directory's consumers use, and the writes to the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.gateway.compile.programmed_condition import ConfigConsumer
from controller.kube.api_resources import (
    EVENTS,
    GATEWAY_CLASSES,
    GATEWAYS,
    GRPC_ROUTES,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    Object,
    split_key,
    timestamp_of,
)
from controller.kube.conditions import WantedStatus, condition_transitions, merge_status
from controller.kube.controller import wall_clock_s
from controller.kube.custom_resources import GATEWAY_KINDS
from controller.kube.errors import ClusterError, Conflict, NotFound
from controller.kube.event_recorder import make_event
from extproc.api.addresses import parse_address
from extproc.api.status_page_contents import REPORT_PATH, ConfigReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.kube.client import Client

log = logging.getLogger(__name__)

_FOREIGN: Final = (GATEWAY_CLASSES, GATEWAYS, HTTP_ROUTES, GRPC_ROUTES, INFERENCE_POOLS)
_RESOURCES: Final = {one.kind: one for one in (*_FOREIGN, *(kind.resource for kind in GATEWAY_KINDS))}
_BAD_WHEN_TRUE: Final = ("Conflicted",)
_RETRY_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_SOON_S: Final = 0.3
_LATER_S: Final = 5.0
_MAX_BYTES: Final = 4_000_000

Key = tuple[str, str]


class ConsumerReportPoller:
    """``run`` polls ``addresses`` (by the consumer's name) and calls ``on_change`` when a report has changed.
    ``is_settled``: no object waits for a report, so consumers are polled less often.
    """

    def __init__(self, addresses: Mapping[str, str], on_change: Callable[[], None]) -> None:
        self._addresses = addresses
        self._on_change = on_change
        self._reports: dict[str, ConfigReport | None] = dict.fromkeys(addresses)
        self._wake = asyncio.Event()
        self.is_settled = False

    @property
    def consumers(self) -> Sequence[ConfigConsumer]:
        """The polled consumers, with their last reports."""
        return [ConfigConsumer(name, report) for name, report in self._reports.items()]

    def poll_soon(self) -> None:
        """Something has been written."""
        self._wake.set()

    async def run(self) -> None:
        """Poll the reports until cancelled; returns at once if there are no addresses."""
        if not self._addresses:
            return
        while True:
            self._wake.clear()
            answers = await asyncio.gather(
                *(asyncio.to_thread(read_report, address) for address in self._addresses.values())
            )
            reports = dict(zip(self._addresses, answers, strict=True))
            if reports != self._reports:
                self._reports = reports
                self._on_change()
            if self.is_settled:
                # not wait_for, which in Python 3.11 loses a cancellation that comes together with what it waits for
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LATER_S):
                        await self._wake.wait()
            await asyncio.sleep(_SOON_S)


def read_report(address: str) -> ConfigReport | None:
    """The report of the consumer at ``address``; None if none listens there, or it is no report."""
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", REPORT_PATH)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            return None
        return msgspec.json.decode(answer.read(_MAX_BYTES), type=ConfigReport)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):  # the decoder's error is a ValueError
        return None
    finally:
        connection.close()


class StatusWriter:
    """``set_wanted`` sets the statuses that objects should have; ``run``, on the leader alone, writes them, and Events
    where a condition changed. A status that an object has already is not written.

    ``observed``: an object as informers have it, by kind and key.
    """

    def __init__(self, client: Client, observed: Callable[[str, str], Object | None], controller: str) -> None:
        self._client = client
        self._observed = observed
        self._controller = controller
        self._wanted: Mapping[Key, WantedStatus] = {}
        self._stale: set[Key] = set()
        self._wake = asyncio.Event()
        self.writes = 0

    def set_wanted(self, statuses: Mapping[Key, WantedStatus]) -> None:
        """From now on statuses should be these."""
        self._stale |= {key for key, status in statuses.items() if self._wanted.get(key) != status}
        self._wanted = statuses
        self._wake.set()

    def mark_stale(self, key: Key) -> None:
        """The object has changed, maybe its status."""
        if key in self._wanted:
            self._stale.add(key)
            self._wake.set()

    async def run(self) -> None:
        """Write stale statuses until cancelled. A write that fails is tried again."""
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
        """Whether nothing remains to be written for it."""
        wanted, thing = self._wanted.get(key), self._observed(*key)
        if wanted is None or thing is None:
            return True
        if thing["metadata"].get("generation", 0) != wanted.generation:
            # one of the two is older; the newer one brings us here again
            return True
        before = thing.get("status") or {}
        status = merge_status(wanted, before, timestamp_of(wall_clock_s()))
        if status is None:
            return True
        try:
            await self._send(wanted, thing, status)
            self.writes += 1
            for condition in condition_transitions(status, before):
                await self._client.create(EVENTS, self._event(thing, condition))
        except (NotFound, Conflict):
            # it was deleted, or another client wrote it: that event will follow
            return True
        except ClusterError as error:
            log.warning("the status of %s %s cannot be written, tried again: %s", *key, error)
            return False
        return True

    async def _send(self, wanted: WantedStatus, thing: Object, status: Mapping[str, Any]) -> None:
        """Raises Conflict if another controller has written a shared list."""
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
        return make_event(thing, type_, reason=condition["reason"], message=message, component=self._controller)
