# SPDX-License-Identifier: Apache-2.0
"""Progress as a condition of our own pod: ``attache.dev/WeightsReady``.

It is for people who look at the pod; where it cannot be written, the download goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from controller.kube.errors import ClusterError, Forbidden, NotFound
from controller.kube.resources import PODS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.agents.downloader.core.progress import Progress
    from controller.kube.client import Client
    from controller.kube.resources import Object

_LOG: Final = logging.getLogger("attache.download")
CONDITION: Final = "attache.dev/WeightsReady"
_EVERY_S: Final = 10.0
_LAST_S: Final = 5.0


def condition_of(progress: Progress, since: str) -> Object:
    """What the pod's status says; ``since``: RFC 3339, when the condition last changed between True and False."""
    return {
        "type": CONDITION,
        "status": "True" if progress.phase == "Ready" else "False",
        "reason": progress.reason or progress.phase,
        "message": progress.sentence()[:1000],
        "lastTransitionTime": since,
    }


class PodCondition:
    """Remembers the newest progress; ``run`` writes it now and then, and once more at the end."""

    def __init__(self, client: Client, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._newest: Progress | None = None
        self._written: Progress | None = None
        self._since = ("", "")
        self._changed = asyncio.Event()

    def tell(self, progress: Progress) -> None:
        """Something to write."""
        is_other = self._newest is None or self._newest.phase != progress.phase
        self._newest = progress
        if is_other:
            self._changed.set()

    @contextlib.asynccontextmanager
    async def written(self) -> AsyncIterator[None]:
        """Writes while inside, and the last state when left, however that is."""
        writing = asyncio.create_task(self._write_on())
        try:
            yield
        finally:
            writing.cancel()
            await asyncio.wait({writing})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_S):
                    await self._write()

    async def _write_on(self) -> None:
        while await self._write():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await self._changed.wait()

    async def _write(self) -> bool:
        """False: it is no use to try again."""
        self._changed.clear()
        progress = self._newest
        if progress is None or progress == self._written:
            return True
        condition = condition_of(progress, "")
        if condition["status"] != self._since[0]:
            self._since = (condition["status"], datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"))
        pod = {
            "apiVersion": PODS.api_version,
            "kind": PODS.kind,
            "metadata": {"namespace": self._namespace, "name": self._name},
            "status": {"conditions": [condition_of(progress, self._since[1])]},
        }
        try:
            await self._client.apply(PODS, pod, subresource="status", force=True)
        except (Forbidden, NotFound) as error:
            _LOG.warning("the pod's condition is not written: %s", error)
            return False
        except ClusterError as error:
            _LOG.info("the pod's condition was not written: %s", error)
            return True
        self._written = progress
        return True
