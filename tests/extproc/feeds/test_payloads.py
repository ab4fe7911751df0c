# SPDX-License-Identifier: Apache-2.0
"""The payload log's queue: bounded, whatever its sink does."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from extproc.api.payload_log import PayloadLog, PayloadSink
from extproc.core.payloads import Capacity, Capture
from extproc.feeds.payloads import MOST_WAITING, PayloadExporter

if TYPE_CHECKING:
    from pathlib import Path


class Scene:
    def __init__(self, sink: PayloadSink | None) -> None:
        self.sink = sink
        self.registry = CollectorRegistry()
        self.capacity = Capacity(1000)
        self.exporter = PayloadExporter(
            lambda: self.sink, dict, self.registry, clock=lambda: 0.0, wall_clock=lambda: 1e9, source="urn:x"
        )

    def captured(self, number: int = 0) -> Capture:
        made = Capture(PayloadLog(mode="Request"), {"ticket": f"t-{number}"}, self.capacity, 0.0)
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
    assert not scene.capacity.take(1)
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
    assert scene.capacity.take(1000)


async def test_without_a_sink_nothing_is_kept() -> None:
    scene = Scene(None)
    scene.exporter.add(scene.captured())
    await scene.exporter.close()
    assert scene.count("dropped") == 1
    assert scene.capacity.take(1000)
