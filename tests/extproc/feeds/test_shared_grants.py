# SPDX-License-Identifier: Apache-2.0
"""What workers grant at the same time counts once, though none was told of the others' grants."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest

from extproc.admission.buckets import Limit
from extproc.admission.limits import BudgetPart, Charge
from extproc.admission.local_limits import LocalLimits
from extproc.core.accounts import Accounts
from extproc.errors import BudgetSpent
from extproc.feeds import shared_grants
from extproc.feeds.shared_grants import SharedGrants

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MOST = 20.0
ENDS_AT_S = 4e9
PART = BudgetPart("default/chat/b", "b", "tenant", "month", "requests")


def charge(amount: float = 1.0, key: str = "k") -> Charge:
    return Charge(key, Limit(0.0, MOST, ENDS_AT_S), "requests", amount, budget=PART)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def workers(tmp_path: Path, clock: Clock) -> list[SharedGrants]:
    return [SharedGrants(tmp_path, name, clock) for name in "xyz"]


def grants(worker: SharedGrants, *charges: Charge) -> int:
    with worker.turn():
        return worker.add(charges)


def unheard(worker: SharedGrants, key: str = "k") -> float:
    with worker.turn():
        return worker.unheard(key)


def test_others_see_a_grant_until_they_are_told_of_it(workers: list[SharedGrants]) -> None:
    one, other, third = workers
    first = grants(one, charge(3.0), charge(1.0, "l"))
    second = grants(one, charge(2.0))
    assert [unheard(one), unheard(other), unheard(other, "l"), unheard(third)] == [0.0, 5.0, 1.0, 5.0]
    other.ingest("x", first)
    # the message may be faster than this
    third.ingest("x", second)
    assert [unheard(other), unheard(other, "l"), unheard(third)] == [2.0, 0.0, 0.0]
    other.ingest("x", second)
    assert unheard(other) == 0.0
    assert not other._unheard
    assert not other._granted


def test_what_is_never_told_is_forgotten(workers: list[SharedGrants], clock: Clock) -> None:
    one, other, third = workers
    grants(one, charge(3.0))
    assert unheard(other) == 3.0
    clock.now += shared_grants._KEPT_S
    assert (unheard(other), unheard(third)) == (0.0, 0.0)


def test_a_worker_that_reads_seldom_sees_the_last_of_many(
    workers: list[SharedGrants], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_grants, "_MOST_RECORDS", 8)
    for _ in range(100):
        grants(workers[0], charge())
    assert unheard(workers[1]) == 8.0


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1e300])
def test_an_amount_that_is_none_counts_nothing(workers: list[SharedGrants], amount: float) -> None:
    grants(workers[0], charge(amount))
    assert unheard(workers[1]) == 0.0


def test_a_grant_that_a_killed_worker_has_half_written_is_not_read(workers: list[SharedGrants]) -> None:
    one, other, _ = workers
    grants(one, charge(3.0))
    one._memory[: shared_grants._COUNT.size] = shared_grants._COUNT.pack(0)
    assert unheard(other) == 0.0


def test_a_worker_that_hangs_in_its_turn_does_not_stop_the_others(
    workers: list[SharedGrants], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, _ = workers
    started_s = time.monotonic()  # noqa: TID251 - an edge: the wait is real
    one._clock = other._clock = lambda: 100.0 + time.monotonic() - started_s  # noqa: TID251 - as above
    grants(one, charge(3.0))
    hangs = os.open(tmp_path / "granted", os.O_RDWR)
    fcntl.flock(hangs, fcntl.LOCK_EX)
    # what was granted before counts
    assert unheard(other) == 3.0
    assert "see whether it hangs" in caplog.text
    # nothing is written without the lock
    grants(one, charge(1.0))
    assert unheard(other) == 3.0
    os.close(hangs)
    one._retry_at_s = other._retry_at_s = 0.0
    grants(one, charge(1.0))
    assert unheard(other) == 4.0


def test_a_refusal_ends_the_turn(workers: list[SharedGrants]) -> None:
    one, other, _ = workers
    accounts = Accounts(LocalLimits(), machine="here", recent=one)
    accounts.reserve([charge(MOST)], 0.0, [])
    with pytest.raises(BudgetSpent):
        Accounts(LocalLimits(), machine="here", recent=other).reserve([charge(1.0)], 0.0, [])
    assert unheard(other) == MOST


WORKER = """
    import sys, time
    from pathlib import Path
    from extproc.admission.local_limits import LocalLimits
    from extproc.core.accounts import Accounts
    from extproc.errors import BudgetSpent
    from extproc.feeds.shared_grants import SharedGrants
    from tests.extproc.feeds.test_shared_grants import charge

    recent = SharedGrants(Path(sys.argv[1]), sys.argv[2], time.monotonic)
    accounts = Accounts(LocalLimits(), machine="here", recent=recent)
    print("ready", flush=True)
    sys.stdin.readline()
    granted = 0
    for _ in range(200):
        try:
            accounts.reserve([charge()], 0.0, [])
        except BudgetSpent:
            continue
        granted += 1
    print(granted, flush=True)
"""


async def started(directory: Path, name: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", textwrap.dedent(WORKER), str(directory), name)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def granted_by(processes: Sequence[asyncio.subprocess.Process]) -> list[int]:
    """They begin at once."""
    for one in processes:
        assert one.stdin is not None
        one.stdin.write(b"go\n")
    return [int((await one.communicate())[0]) for one in processes]


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_real_workers_that_are_told_nothing_grant_a_budget_once(tmp_path: Path, count: int) -> None:
    processes = [await started(tmp_path, str(number)) for number in range(count)]
    assert sum(await granted_by(processes)) == MOST


HOLDER = """
    import fcntl, os, sys
    file = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    print(flush=True)
    input()
"""


async def test_the_lock_of_a_killed_worker_is_free(tmp_path: Path, clock: Clock) -> None:
    one, pipe = SharedGrants(tmp_path, "x", clock), asyncio.subprocess.PIPE
    command = (sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "granted"))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    with one.turn():
        assert one._is_locked
