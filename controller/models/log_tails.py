# SPDX-License-Identifier: Apache-2.0
"""The last lines of crashed containers' logs, read once for each crash."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from controller.kube.errors import ClusterError
from controller.kube.resources import Object, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from controller.kube.client import Client

log = logging.getLogger(__name__)

_LINES: Final = 10
_BYTES: Final = 4096
_REMEMBERED: Final = 1000
# At once: a node that is gone keeps each of them waiting.
_READERS: Final = 4


class Crash(msgspec.Struct, frozen=True):
    """A container that has ended badly. ``is_over``: it has been started again since, so the log is the previous
    one's.
    """

    pod: str
    uid: str
    container: str
    restarts: int
    is_over: bool


class LogTails:
    """``of`` answers with what is known and has the rest read by ``run``, which calls ``read`` with the pod when it
    has.
    """

    def __init__(self, client: Client, read: Callable[[Object], None]) -> None:
        self._client = client
        self._read = read
        # the oldest go; None: being read
        self._known: OrderedDict[Crash, str | None] = OrderedDict()
        self._wanted: asyncio.Queue[tuple[Crash, Object]] = asyncio.Queue(_REMEMBERED)

    def of(self, pods: Iterable[Object]) -> dict[str, str]:
        """By key of those pods whose containers crashed, as far as they have been read."""
        found: dict[str, str] = {}
        for pod in pods:
            crash = crash_of(pod)
            if crash is None:
                continue
            if crash not in self._known and not self._wanted.full():
                self._known[crash] = None
                self._wanted.put_nowait((crash, pod))
            tail = self._known.get(crash)
            if tail:
                found[crash.pod] = tail
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_READERS):
                tasks.create_task(self._follow(), name="reader of logs")

    async def _follow(self) -> None:
        while True:
            crash, pod = await self._wanted.get()
            tail = await self._tail(crash)
            if tail and crash in self._known:
                self._known[crash] = tail
                self._read(pod)

    async def _tail(self, crash: Crash) -> str:
        try:
            return await self._client.log_tail(
                crash.pod, crash.container, previous=crash.is_over, lines=_LINES, most_bytes=_BYTES
            )
        except ClusterError as error:
            log.info("the log of %s in %s cannot be read: %s", crash.container, crash.pod, error)
            return ""


def crash_of(pod: Object) -> Crash | None:
    """The last crash of the first container that has crashed and is not well again."""
    status = pod.get("status") or {}
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        if not one.get("ready") and any(_is_crash(state) for state in _ended(one)):
            is_over = not _is_crash((one.get("state") or {}).get("terminated") or {})
            restarts = int(one.get("restartCount") or 0)
            return Crash(key_of(pod), pod["metadata"]["uid"], one["name"], restarts, is_over)
    return None


def _ended(container: Object) -> Iterator[Object]:
    for name in ("state", "lastState"):
        yield (container.get(name) or {}).get("terminated") or {}


def _is_crash(terminated: Object) -> bool:
    return int(terminated.get("exitCode") or 0) != 0
