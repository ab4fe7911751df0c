# SPDX-License-Identifier: Apache-2.0
"""One leader among replicas, by a Lease object of the cluster.

A holder renews its Lease periodically. Others acquire it once they have observed it unchanged for its whole duration
*by their own clock*: times written by another machine are never compared with ours.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import LEASES, Object
from controller.kube.errors import ClusterError, Conflict

if TYPE_CHECKING:
    from controller.kube.client import Client

log = logging.getLogger(__name__)
Lead = Callable[[], Awaitable[None]]
_RELEASE_S: Final = 2.0


class LeaseTiming(msgspec.Struct, frozen=True):
    """As client-go has them.

    ``duration_s``: others wait so long before they take over. ``renew_deadline_s``: a leader that cannot write for so
    long stops leading, before others may begin. ``retry_s``: between attempts.
    """

    duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_s > self.renew_deadline_s > self.retry_s > 0:
            raise ValueError("a lease needs duration_s > renew_deadline_s > retry_s > 0")


class ObservedLease(msgspec.Struct, frozen=True):
    """A Lease as it was first seen with this content, at ``seen_at_s`` of our monotonic clock."""

    lease: Object
    seen_at_s: float


def observe_lease(before: ObservedLease | None, lease: Object, now_s: float) -> ObservedLease:
    """The sight after reading ``lease``: an unchanged one keeps its time."""
    if before is not None and _version(before.lease) == _version(lease):
        return before
    return ObservedLease(lease, now_s)


def can_acquire_lease(sight: ObservedLease, identity: str, now_s: float) -> bool:
    """Whether ``identity`` may acquire the Lease: it holds it, the Lease has no holder, or the holder's renewal is
    overdue.
    """
    spec = sight.lease.get("spec") or {}
    holder = spec.get("holderIdentity")
    return not holder or holder == identity or now_s >= sight.seen_at_s + float(spec.get("leaseDurationSeconds") or 0)


def acquired_lease(lease: Object, identity: str, timing: LeaseTiming, wall: datetime) -> Object:
    """The Lease to write in order to acquire or renew it. Its version makes the write fail if another process was
    faster.
    """
    new = copy.deepcopy(lease)
    spec = new.setdefault("spec", {})
    if spec.get("holderIdentity") != identity:
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["acquireTime"] = _micro_time(wall)
    spec["holderIdentity"] = identity
    spec["leaseDurationSeconds"] = max(1, round(timing.duration_s))
    spec["renewTime"] = _micro_time(wall)
    return new


def released_lease(lease: Object, wall: datetime) -> Object:
    """The Lease to write at the end: without a holder, so that the next leader need not wait."""
    new = copy.deepcopy(lease)
    new["spec"].update(holderIdentity="", leaseDurationSeconds=1, renewTime=_micro_time(wall))
    return new


def new_lease(name: str, namespace: str, identity: str, timing: LeaseTiming, wall: datetime) -> Object:
    """The first Lease of this name, held by ``identity``."""
    empty: dict[str, Any] = {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": {"name": name, "namespace": namespace},
    }
    lease = acquired_lease(empty, identity, timing, wall)
    lease["spec"]["leaseTransitions"] = 0
    return lease


def _version(lease: Object) -> Any:  # noqa: ANN401 - opaque, compared for equality only
    return lease["metadata"].get("resourceVersion")


def _micro_time(wall: datetime) -> str:
    return wall.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


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
        self._sight: ObservedLease | None = None
        self._leads = False
        # when our last successful write was sent; the server may have done it any time after
        self._written_at_s = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether we lead now."""
        return self._leads

    @property
    def leader(self) -> str:
        """The holder of the Lease when it was last read or written; empty if there was none."""
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
        # polled: another process holds it, and there is no event to wait for
        while not await self._attempt(self._timing.renew_deadline_s):  # noqa: ASYNC110
            # more often than the leader writes: the wait for a silent one counts from when its last write was seen
            await asyncio.sleep(self._timing.retry_s / 4 * self._rng.uniform(0.8, 1.2))
        self._leads = True

    async def _hold(self, lead: Lead) -> bool:
        """Run ``lead`` while the Lease is ours; returns whether it ended by itself."""
        work = asyncio.create_task(_awaited(lead), name=f"leader of {self._name}")
        renewal = asyncio.create_task(self._renew(), name=f"lease {self._name}")
        try:
            await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
            ended = work.done()
        finally:
            self._leads = False
            await _cancelled(work)
            # held until the work has ended: no other leader may begin before
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
        """Try to acquire or renew the Lease; returns whether that succeeded in time. Failures are logged.

        A late response does not count: others may have observed the write long before, and measure from then.
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
        lease = await self._client.get_or_none(LEASES, self._name, self._namespace)
        wall = datetime.now(UTC)
        if lease is None:
            first = new_lease(self._name, self._namespace, self.identity, self._timing, wall)
            self._saw(await self._client.create(LEASES, first))
            return True
        self._sight = observe_lease(self._sight, lease, clock())
        if not can_acquire_lease(self._sight, self.identity, clock()):
            return False
        self._saw(await self._client.replace(LEASES, acquired_lease(lease, self.identity, self._timing, wall)))
        return True

    def _saw(self, lease: Object) -> None:
        self._sight = observe_lease(self._sight, lease, asyncio.get_running_loop().time())

    async def _release(self) -> None:
        sight = self._sight
        if sight is None or self.leader != self.identity:
            return
        try:
            async with asyncio.timeout(_RELEASE_S):
                try:
                    await self._client.replace(LEASES, released_lease(sight.lease, datetime.now(UTC)))
                except Conflict:
                    # the server may have processed an interrupted renewal
                    found = await self._client.get(LEASES, self._name, self._namespace)
                    if found["spec"].get("holderIdentity") == self.identity:
                        await self._client.replace(LEASES, released_lease(found, datetime.now(UTC)))
        except (ClusterError, TimeoutError) as error:
            log.warning("lease %s is not given back, it runs out by itself: %s", self._name, error)


async def _awaited(lead: Lead) -> None:
    await lead()


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task, if it still runs, and wait for its end, which need not be at once."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
