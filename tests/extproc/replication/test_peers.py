# SPDX-License-Identifier: Apache-2.0
"""What comes over the buses: batches that come twice, and batches that cannot be repeated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from extproc.admission.buckets import Limit
from extproc.core.peers import Alive, EventBatch, PeerEvent, Spent, encode
from extproc.metrics.registry import Metrics
from extproc.replication.buses import LocalBus
from extproc.replication.peers import Peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPENT = Spent("here", "default/chat/0/requests/acme", Limit(1.0, 10.0), 1.0)


class MemoryBus:
    """Gives what one process sends to all others on it, in the same moment."""

    def __init__(self, wire: list[MemoryBus]) -> None:
        self._wire = wire
        self._receive: Callable[[bytes], None] | None = None
        wire.append(self)

    async def run(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        await asyncio.Event().wait()

    async def send(self, payload: bytes) -> None:
        for one in self._wire:
            if one._receive is not None:
                one._receive(payload)


def metrics() -> Metrics:
    return Metrics(list, lambda: 0.0, lambda: 0.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a list gives no event
        await asyncio.sleep(0)


def test_what_comes_over_two_buses_is_repeated_once() -> None:
    heard: list[PeerEvent] = []

    async def talk() -> None:
        wires: list[list[MemoryBus]] = [[], []]
        one, other = (Peers([MemoryBus(wire) for wire in wires], metrics(), origin=name) for name in "ab")
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(one.run(hear=lambda _: None, beat=lambda: None)),
                tasks.create_task(other.run(hear=lambda batch: heard.extend(batch.events), beat=lambda: None)),
            ]
            for number in range(1, 4):
                one.tell(SPENT)
                await until(lambda number=number: len(heard) >= number)  # type: ignore[misc]
            one.tell(Alive([]))
            await until(lambda: Alive([]) in heard)
            for task in running:
                task.cancel()

    asyncio.run(talk())
    assert heard == [SPENT, SPENT, SPENT, Alive([])]


def test_a_batch_that_cannot_be_repeated_does_not_end_the_process(caplog: pytest.LogCaptureFixture) -> None:
    found = metrics()
    peers = Peers([], found, origin="a")

    def hear(batch: EventBatch) -> None:
        raise OverflowError(batch.origin)

    peers._receive(hear, encode(EventBatch("b", [Alive([])], 1)))
    assert "could not be repeated" in caplog.text
    assert found.registry.get_sample_value("attache_shared_messages_total", {"result": "failed"}) == 1


def test_batches_without_a_number_are_all_repeated() -> None:
    heard: list[EventBatch] = []
    peers = Peers([], metrics(), origin="a")
    for _ in range(2):
        peers._receive(heard.append, encode(EventBatch("b", [SPENT])))
    assert len(heard) == 2


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x91\xa1\xff", b"\x93\xa1\xff\x90\x01", b"\x91" * 200_000, b"[]", b"\xff" * 9]
)
def test_a_message_that_is_no_batch_is_counted_and_told_once(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    found = metrics()
    peers = Peers([], found, origin="a")
    for _ in range(3):
        peers._receive(lambda _: None, payload)
    assert found.registry.get_sample_value("attache_shared_messages_total", {"result": "unreadable"}) == 3
    assert caplog.text.count("cannot be read") == 1


async def test_a_bus_between_workers_can_be_run_again(tmp_path: Path) -> None:
    one, other = (LocalBus(tmp_path, number, 2) for number in range(2))
    heard: list[bytes] = []
    for _ in range(2):
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(bus.run(heard.append)) for bus in (one, other)]
            while not heard:
                await one.send(b"hello")
                await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
        heard.clear()
