# SPDX-License-Identifier: Apache-2.0
"""What workers grant at the same time counts once, though none was told of the others' grants."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import sys
import textwrap
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from extproc.admission.local_limits import LocalLimits
from extproc.admission.rate_limits import Charge, ChargedBudget
from extproc.admission.token_buckets import Limit
from extproc.core.limit_accounting import LimitAccounting
from extproc.feeds import shared_limit_grants
from extproc.feeds.shared_limit_grants import MmapGrantLedger
from extproc.refusals import BudgetSpent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST = 20.0
ENDS_AT_S = 4e9
PART = ChargedBudget("default/chat/b", "b", "b", "tenant", "month", "requests")


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
def workers(tmp_path: Path, clock: Clock) -> list[MmapGrantLedger]:
    return [MmapGrantLedger(tmp_path, name, clock) for name in "xyz"]


def grants(worker: MmapGrantLedger, *charges: Charge) -> int:
    with worker:
        return worker.record_grants(charges)


def unheard(worker: MmapGrantLedger, key: str = "k") -> float:
    with worker:
        return worker.unseen_amount(key)


def test_others_see_a_grant_until_they_are_told_of_it(workers: list[MmapGrantLedger]) -> None:
    one, other, third = workers
    first = grants(one, charge(3.0), charge(1.0, "l"))
    second = grants(one, charge(2.0))
    assert [unheard(one), unheard(other), unheard(other, "l"), unheard(third)] == [0.0, 5.0, 1.0, 5.0]
    other.mark_seen("x", first)
    # the message may be faster than this
    third.mark_seen("x", second)
    assert [unheard(other), unheard(other, "l"), unheard(third)] == [2.0, 0.0, 0.0]
    other.mark_seen("x", second)
    assert unheard(other) == 0.0
    assert not other._unheard
    assert not other._granted


def test_what_is_never_told_is_forgotten(workers: list[MmapGrantLedger], clock: Clock) -> None:
    one, other, third = workers
    grants(one, charge(3.0))
    assert unheard(other) == 3.0
    clock.now += shared_limit_grants._KEPT_S
    assert (unheard(other), unheard(third)) == (0.0, 0.0)


def test_a_worker_that_reads_seldom_sees_the_last_of_many(
    workers: list[MmapGrantLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_limit_grants, "_MOST_RECORDS", 8)
    for _ in range(100):
        grants(workers[0], charge())
    assert unheard(workers[1]) == 8.0


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1e300])
def test_an_amount_that_is_none_counts_nothing(workers: list[MmapGrantLedger], amount: float) -> None:
    grants(workers[0], charge(amount))
    assert unheard(workers[1]) == 0.0


def test_a_grant_that_a_killed_worker_has_half_written_is_not_read(workers: list[MmapGrantLedger]) -> None:
    one, other, _ = workers
    grants(one, charge(3.0))
    one._memory[: shared_limit_grants._COUNT.size] = shared_limit_grants._COUNT.pack(0)
    assert unheard(other) == 0.0


def test_a_worker_that_hangs_in_its_turn_does_not_stop_the_others(
    workers: list[MmapGrantLedger], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, _ = workers
    started_s = time.monotonic()  # noqa: TID251 - an edge: the wait is real
    one._clock = other._clock = lambda: 100.0 + time.monotonic() - started_s  # noqa: TID251 - as above
    grants(one, charge(3.0))
    with held_by_another(tmp_path):
        # what was granted before counts
        assert unheard(other) == 3.0
        assert "see whether it hangs" in caplog.text
        # nothing is written without the lock
        grants(one, charge(1.0))
        assert unheard(other) == 3.0
    one._retry_at_s = other._retry_at_s = 0.0
    grants(one, charge(1.0))
    assert unheard(other) == 4.0


def test_a_refusal_ends_the_turn(workers: list[MmapGrantLedger]) -> None:
    one, other, _ = workers
    accounts = LimitAccounting(LocalLimits(), machine="here", recent=one)
    accounts.reserve([charge(MOST)], 0.0, [])
    with pytest.raises(BudgetSpent):
        LimitAccounting(LocalLimits(), machine="here", recent=other).reserve([charge(1.0)], 0.0, [])
    assert unheard(other) == MOST


def ends(worker: MmapGrantLedger) -> None:
    """As the kernel does it for a process."""
    worker._memory.close()
    os.close(worker._file)


@contextmanager
def held_by_another(directory: Path) -> Iterator[None]:
    """The lock, by one that hangs."""
    hangs = os.open(directory / "grants", os.O_RDWR)
    fcntl.flock(hangs, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(hangs)


def test_a_worker_that_is_alone_asks_for_no_lock_and_whoever_comes_sees_what_it_granted(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one = MmapGrantLedger(tmp_path, "x", clock)
    grants(one, charge(1.0))
    with held_by_another(tmp_path):
        grants(one, charge(2.0))
    assert not caplog.records
    other = MmapGrantLedger(tmp_path, "y", clock)
    assert unheard(other) == 3.0
    # neither is alone
    grants(other, charge(4.0))
    grants(one, charge(8.0))
    assert (unheard(one), unheard(other)) == (4.0, 11.0)


def test_a_worker_that_comes_in_the_turn_of_one_that_is_alone_sees_its_grant(tmp_path: Path, clock: Clock) -> None:
    one = MmapGrantLedger(tmp_path, "x", clock)
    grants(one)
    with one:
        other = MmapGrantLedger(tmp_path, "y", clock)
        one.record_grants([charge(3.0)])
    assert unheard(other) == 3.0


def test_a_worker_is_alone_again_once_what_the_others_have_granted_counts_no_more(
    workers: list[MmapGrantLedger], tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    one, other, third = workers
    grants(other, charge(3.0))
    ends(other)
    ends(third)
    clock.now += shared_limit_grants._KEPT_S - 1.0
    assert unheard(one) == 3.0
    clock.now += 1.0
    assert unheard(one) == 0.0
    with held_by_another(tmp_path):
        grants(one, charge(1.0))
    assert not caplog.records


def test_where_nobody_can_know_that_it_is_alone_all_take_turns(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    one = MmapGrantLedger(tmp_path, "x", clock)
    with one:
        assert one._is_locked
    other = MmapGrantLedger(tmp_path, "y", clock)
    grants(one, charge(3.0))
    assert unheard(other) == 3.0


def test_a_worker_that_cannot_show_that_it_is_there_shares_by_messages_alone(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    with pytest.raises(OSError, match="No locks"):
        MmapGrantLedger(tmp_path, "x", clock)


WORKER = """
    import sys, time
    from pathlib import Path
    from extproc.admission.local_limits import LocalLimits
    from extproc.core.limit_accounting import LimitAccounting
    from extproc.refusals import BudgetSpent
    from extproc.feeds.shared_limit_grants import MmapGrantLedger
    from tests.extproc.feeds.test_shared_limit_grants import charge

    recent = MmapGrantLedger(Path(sys.argv[1]), sys.argv[2], time.monotonic)
    accounts = LimitAccounting(LocalLimits(), machine="here", recent=recent)
    print("ready", flush=True)
    granted = 0
    # each line: how many requests come
    for line in sys.stdin:
        for _ in range(int(line)):
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


async def granted_by(*processes: asyncio.subprocess.Process, count: int = 200) -> list[int]:
    """They begin at once, with so many requests each. Returns how many each has granted, ever."""
    for one in processes:
        assert one.stdin is not None
        one.stdin.write(f"{count}\n".encode())
    return [int(await one.stdout.readline()) for one in processes if one.stdout is not None]


async def end_all(*processes: asyncio.subprocess.Process) -> None:
    for one in processes:
        if one.returncode is None:
            one.kill()
            await one.wait()


@pytest.mark.parametrize("count", [1, 2, 4])
async def test_real_workers_that_are_told_nothing_grant_a_budget_once(tmp_path: Path, count: int) -> None:
    processes = [await started(tmp_path, str(number)) for number in range(count)]
    try:
        assert sum(await granted_by(*processes)) == MOST
    finally:
        await end_all(*processes)


async def test_real_workers_of_which_one_was_alone_grant_a_budget_once(tmp_path: Path) -> None:
    first = await started(tmp_path, "first")
    second = None
    try:
        assert await granted_by(first, count=7) == [7]
        second = await started(tmp_path, "second")
        assert sum(await granted_by(first, second)) == MOST
    finally:
        await end_all(first, *([] if second is None else [second]))


async def test_what_a_killed_worker_has_granted_while_it_was_alone_is_not_granted_again(tmp_path: Path) -> None:
    first = await started(tmp_path, "first")
    assert await granted_by(first, count=7) == [7]
    await end_all(first)
    second = await started(tmp_path, "second")
    try:
        assert await granted_by(second) == [MOST - 7]
    finally:
        await end_all(second)


HOLDER = """
    import fcntl, os, sys
    file = os.open(sys.argv[1], os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    print(flush=True)
    input()
"""


async def test_the_lock_of_a_killed_worker_is_free(tmp_path: Path, clock: Clock) -> None:
    one, pipe = MmapGrantLedger(tmp_path, "x", clock), asyncio.subprocess.PIPE
    command = (sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / "grants"))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    await process.wait()
    with one:
        assert one._is_locked
