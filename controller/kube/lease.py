# SPDX-License-Identifier: Apache-2.0
"""One leader among replicas, by a Lease object of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Final

from controller.kube.errors import ClusterError, Conflict
from controller.kube.leadership import LeaseTiming, Sight, may_lead, new_lease, released, seen, taken
from controller.kube.resources import LEASES

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.resources import Object

log = logging.getLogger(__name__)

Lead = Callable[[], Awaitable[None]]
_RELEASE_S: Final = 2.0


class LeaderElection:
    """``run`` waits for the Lease, runs what only a leader may do, and cancels it before another can lead.

    ``identity`` must be unique: the pod's name with something random.
    """

    def __init__(
        self,
        client: Client,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: LeaseTiming = LeaseTiming(),  # noqa: B008 - frozen
        rng: Random | None = None,
    ) -> None:
        self.identity = identity
        self._client = client
        self._namespace = namespace
        self._name = name
        self._timing = timing
        self._rng = rng or Random()
        self._sight: Sight | None = None
        self._leads = False
        # when our last successful write was asked for; the server may have done it any time after
        self._written_at_s = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether we lead now."""
        return self._leads

    @property
    def leader(self) -> str:
        """Who held the Lease when it was last read or written; empty if nobody."""
        return str((self._sight.lease.get("spec") or {}).get("holderIdentity") or "") if self._sight else ""

    async def run(self, lead: Lead) -> None:
        """Wait until we lead, then run ``lead`` until it returns, leadership is lost (then wait again), or we are
        cancelled.

        ``lead`` is cancelled when leadership is lost, and must end within ``duration_s - renew_deadline_s``: after that
        another may lead. On the way out the Lease is given back, once ``lead`` has ended.
        """
        try:
            while True:
                await self._acquire()
                log.info("%s leads (%s)", self.identity, self._name)
                if await self._hold(lead):
                    return
                log.warning("%s has lost the lease %s", self.identity, self._name)
        finally:
            await self._release()

    async def _acquire(self) -> None:
        # ask again and again: who holds it is another process, and there is no event to wait for
        while not await self._attempt(self._timing.renew_deadline_s):  # noqa: ASYNC110
            # more often than the leader writes: the wait for a silent one counts from when its last write was seen
            await asyncio.sleep(self._timing.retry_s / 4 * self._rng.uniform(0.8, 1.2))
        self._leads = True

    async def _hold(self, lead: Lead) -> bool:
        """Run ``lead`` while the Lease is ours; whether it came to its own end."""
        work = asyncio.create_task(_awaited(lead), name=f"leader of {self._name}")
        renewal = asyncio.create_task(self._renew(), name=f"lease {self._name}")
        try:
            await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
            ended = work.done()
        finally:
            self._leads = False
            await _cancelled(work)
            # held until the work has ended: nobody else may begin before
            await _cancelled(renewal)
        if not renewal.cancelled():
            renewal.result()
        if ended:
            await work
        elif not work.cancelled() and (error := work.exception()):
            log.error("%s failed while it was stopped", work.get_name(), exc_info=error)
        return ended

    async def _renew(self) -> None:
        """Write the Lease until it is lost: taken by another, or not written for ``renew_deadline_s``."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._timing.retry_s)
            left_s = self._written_at_s + self._timing.renew_deadline_s - clock()
            if left_s <= 0:
                return
            if not await self._attempt(left_s) and self.leader not in ("", self.identity):
                return

    async def _attempt(self, within_s: float) -> bool:
        """Try to write ourselves into the Lease; whether that worked in time. Failures are logged.

        An answer that comes late is worth nothing: others may have seen the write long before, and count from there.
        """
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(within_s):
                wrote = await self._try()
        except (ClusterError, TimeoutError) as error:
            log.warning("lease %s: %r", self._name, error)
            return False
        if wrote:
            self._written_at_s = began_s
        return wrote

    async def _try(self) -> bool:
        clock = asyncio.get_running_loop().time
        lease = await self._client.find(LEASES, self._name, self._namespace)
        wall = datetime.now(UTC)
        if lease is None:
            first = new_lease(self._name, self._namespace, self.identity, self._timing, wall)
            self._saw(await self._client.create(LEASES, first))
            return True
        self._sight = seen(self._sight, lease, clock())
        if not may_lead(self._sight, self.identity, clock()):
            return False
        self._saw(await self._client.replace(LEASES, taken(lease, self.identity, self._timing, wall)))
        return True

    def _saw(self, lease: Object) -> None:
        self._sight = seen(self._sight, lease, asyncio.get_running_loop().time())

    async def _release(self) -> None:
        sight = self._sight
        if sight is None or self.leader != self.identity:
            return
        try:
            async with asyncio.timeout(_RELEASE_S):
                try:
                    await self._client.replace(LEASES, released(sight.lease, datetime.now(UTC)))
                except Conflict:
                    # a renewal that was cut off may have come to the server
                    found = await self._client.get(LEASES, self._name, self._namespace)
                    if found["spec"].get("holderIdentity") == self.identity:
                        await self._client.replace(LEASES, released(found, datetime.now(UTC)))
        except (ClusterError, TimeoutError) as error:
            log.warning("lease %s is not given back, it runs out by itself: %s", self._name, error)


async def _awaited(lead: Lead) -> None:
    await lead()


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task, if it still runs, and wait for its end, which need not be at once."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
