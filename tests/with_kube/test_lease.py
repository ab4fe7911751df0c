# SPDX-License-Identifier: Apache-2.0
"""One leader at a time, and a next one when it goes."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.stack.processes import free_ports
from controller.kube.api_resources import LEASES
from controller.kube.client import connect
from controller.kube.leader_election import LeaderElection, LeaseTiming
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE

if TYPE_CHECKING:
    from controller.kube.client import Client
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube

QUICK = LeaseTiming(duration_s=3.0, renew_deadline_s=2.0, retry_s=0.1)


class Candidate:
    """A replica that notes who leads at the same time."""

    def __init__(
        self, client: Client, namespace: str, name: str, leading: set[str], timing: LeaseTiming = QUICK
    ) -> None:
        self._leading = leading
        self._name = name
        self.terms = 0
        self.overlapped = False
        self.election = LeaderElection(
            client, namespace=namespace, name="test", identity=name, timing=timing, rng=Random(1)
        )
        self.task = asyncio.create_task(self.election.run(self._lead))

    async def _lead(self) -> None:
        self.overlapped |= bool(self._leading)
        self._leading.add(self._name)
        self.terms += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._leading.discard(self._name)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def test_one_leads_and_hands_over_at_once(client: Client, namespace: str) -> None:
    leading: set[str] = set()
    first = Candidate(client, namespace, "first", leading)
    await eventually(lambda: leading == {"first"})
    second = Candidate(client, namespace, "second", leading)
    await eventually(lambda: second.election.leader == "first")
    assert first.election.is_leader
    assert not second.election.is_leader
    await first.stop()
    await eventually(lambda: leading == {"second"})
    lease = await client.get(LEASES, "test", namespace)
    assert lease["spec"]["holderIdentity"] == "second"
    assert lease["spec"]["leaseTransitions"] == 1
    await second.stop()
    assert (await client.get(LEASES, "test", namespace))["spec"]["holderIdentity"] == ""
    assert not (first.overlapped)
    assert not (second.overlapped)


async def test_a_silent_leader_is_replaced_when_its_lease_runs_out(client: Client, kube: Kube, namespace: str) -> None:
    leading: set[str] = set()
    async with connect(kube.admin, manager="first") as cut_off:
        first = Candidate(cut_off, namespace, "first", leading)
        await eventually(lambda: leading == {"first"})
        second = Candidate(client, namespace, "second", leading)
        # its calls fail from now on, as if its network were gone
        (port,) = free_ports(1)
        cut_off.access = msgspec.structs.replace(kube.admin, server=f"http://127.0.0.1:{port}")
        await eventually(lambda: leading == {"second"})
        assert not first.election.is_leader
        await first.stop()
        await second.stop()
        assert not second.overlapped


async def test_who_is_robbed_of_the_lease_stops(client: Client, namespace: str) -> None:
    leading: set[str] = set()
    first = Candidate(client, namespace, "first", leading)
    await eventually(lambda: leading == {"first"})
    stolen = {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 3600}}
    await client.merge_patch(LEASES, "test", namespace, stolen)
    await eventually(lambda: not leading)
    assert first.election.leader == "thief"
    await first.stop()
    assert (await client.get(LEASES, "test", namespace))["spec"]["holderIdentity"] == "thief"


@FAKE
async def test_conflicts_do_not_end_a_term(client: Client, fake: FakeServer, namespace: str) -> None:
    leading: set[str] = set()
    # a machine that stands still for seconds ends no term either
    timing = LeaseTiming(duration_s=60.0, renew_deadline_s=50.0, retry_s=0.1)
    first = Candidate(client, namespace, "first", leading, timing)
    await eventually(lambda: leading == {"first"})
    fake.faults.conflicts(3)
    written = fake.storage.version
    await eventually(lambda: fake.storage.version > written + 2)
    assert first.terms == 1
    await first.stop()


@FAKE
async def test_an_answer_that_comes_too_late_makes_no_leader(client: Client, fake: FakeServer, namespace: str) -> None:
    fake.faults.slow(30.0, of=lambda call: call.verb == "create")
    leading: set[str] = set()
    timing = LeaseTiming(duration_s=0.3, renew_deadline_s=0.2, retry_s=0.05)
    first = Candidate(client, namespace, "first", leading, timing)
    before = fake.requests
    await eventually(lambda: fake.requests > before + 4)
    assert first.terms == 0, "it asks again, and does not believe the old attempts"
    fake.faults.heal()
    await eventually(lambda: leading == {"first"})
    await first.stop()


async def test_work_that_ends_gives_the_lease_back(client: Client, namespace: str) -> None:
    async def lead() -> None:
        await asyncio.sleep(0)

    election = LeaderElection(client, namespace=namespace, name="test", identity="one", timing=QUICK)
    async with asyncio.timeout(120):
        await election.run(lead)
    assert (await client.get(LEASES, "test", namespace))["spec"]["holderIdentity"] == ""
    assert not election.is_leader


async def test_work_that_fails_is_said_and_gives_the_lease_back(client: Client, namespace: str) -> None:
    async def lead() -> None:
        raise ValueError("no")

    election = LeaderElection(client, namespace=namespace, name="test", identity="one", timing=QUICK)
    with pytest.raises(ValueError, match="no"):
        await election.run(lead)
    assert (await client.get(LEASES, "test", namespace))["spec"]["holderIdentity"] == ""
