# SPDX-License-Identifier: Apache-2.0
"""The payload log's queue: bounded, whatever its sink does."""

from __future__ import annotations

import asyncio
import gc
import json
from types import TracebackType
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from extproc.api.payload_log import PayloadLog, PayloadSink
from extproc.core.payload_log import ByteCapacity, PayloadCapture
from extproc.feeds import payload_exporter
from extproc.feeds.payload_exporter import MOST_WAITING, PayloadExporter

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class Scene:
    def __init__(self, sink: PayloadSink | None) -> None:
        self.sink = sink
        self.registry = CollectorRegistry()
        self.capacity = ByteCapacity(1000)
        self.exporter = PayloadExporter(
            lambda: self.sink, dict, self.registry, clock=lambda: 0.0, wall_clock=lambda: 1e9, source="urn:x"
        )

    def captured(self, number: int = 0) -> PayloadCapture:
        made = PayloadCapture(PayloadLog(mode="Request"), {"ticket": f"t-{number}"}, self.capacity, 0.0)
        made.request.add(b"{}")
        return made

    def count(self, result: str) -> float:
        return self.registry.get_sample_value("attache_payload_events_total", {"result": result}) or 0.0


async def test_what_waits_is_bounded_and_what_is_dropped_is_free_again() -> None:
    scene = Scene(PayloadSink(url="http://127.0.0.1:1/"))
    for number in range(MOST_WAITING + 100):
        scene.exporter.add(scene.captured(number))
    # most had no capacity left for their bodies
    assert scene.count("dropped") == 100
    assert not scene.capacity.try_reserve(1)
    await scene.exporter.close()
    assert scene.count("dropped") + scene.count("failed") == MOST_WAITING + 100


async def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "payload.log"
    scene = Scene(PayloadSink(path=str(file)))
    for number in range(20):
        scene.exporter.add(scene.captured(number))
    await scene.exporter.close()
    await asyncio.sleep(0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["id"] for one in lines] == [f"t-{number}" for number in range(20)]
    assert all(one["data"] == {} for one in lines)
    assert scene.capacity.try_reserve(1000)


async def test_without_a_sink_nothing_is_kept() -> None:
    scene = Scene(None)
    scene.exporter.add(scene.captured())
    await scene.exporter.close()
    assert scene.count("dropped") == 1
    assert scene.capacity.try_reserve(1000)


async def test_calls_that_failed_leave_nothing_to_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_exporter, "_TIMEOUT_S", 0.05)
    never = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with never:
        scene = Scene(PayloadSink(url=f"http://127.0.0.1:{never.sockets[0].getsockname()[1]}/"))
        gc.collect()
        gc.disable()
        try:
            for number in range(8):
                scene.exporter.add(scene.captured(number))
            await scene.exporter.close()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [one for one in gc.garbage if isinstance(one, TracebackType)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert scene.count("failed") == 8
    assert left == []


async def test_what_a_slow_sink_has_not_taken_at_the_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_exporter, "_CLOSE_S", 0.05)
    never = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    async with never:
        scene = Scene(PayloadSink(url=f"http://127.0.0.1:{never.sockets[0].getsockname()[1]}/"))
        for number in range(10):
            scene.exporter.add(scene.captured(number))
        await scene.exporter.close()
    assert (scene.count("dropped"), scene.count("failed")) == (10, 0)
    # two were never tried
    assert scene.capacity.try_reserve(1000 - 2 * len("{}"))
