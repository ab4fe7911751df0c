# SPDX-License-Identifier: Apache-2.0
"""Lines of the usage log that extproc writes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry

from extproc.api.gateway_config import UsageLog
from extproc.api.usage_log import LEFT_SUFFIX, UsageLine
from extproc.feeds.usage_log_writer import UsageLogWriter
from tests.usage_lines import line
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path


class Scene:
    def __init__(self, path: Path | None) -> None:
        self.config = None if path is None else UsageLog(path=str(path))
        self.registry = CollectorRegistry()
        self.lines = UsageLogWriter(lambda: self.config, self.registry)

    def count(self, result: str) -> float:
        return self.registry.get_sample_value("attache_usage_log_lines_total", {"result": result}) or 0.0


def names(path: Path) -> list[str]:
    found = path.with_name(path.name + LEFT_SUFFIX).read_bytes().splitlines()
    return [msgspec.json.decode(one, type=UsageLine, strict=False).id for one in found]


async def test_lines_are_appended_beside_the_log(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "usage.log")
    scene.lines.add(line("a"))
    scene.lines.add(line("b"))
    await eventually(lambda: scene.count("written") == 2)
    await scene.lines.close()
    assert names(tmp_path / "usage.log") == ["a", "b"]
    assert not (tmp_path / "usage.log").exists()


async def test_another_path_loses_no_line(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "usage.log")
    scene.lines.add(line("a"))
    scene.config = UsageLog(path=str(tmp_path / "other.log"))
    scene.lines.add(line("b"))
    await scene.lines.close()
    assert (names(tmp_path / "usage.log"), names(tmp_path / "other.log")) == (["a"], ["b"])


async def test_lines_that_cannot_be_written_are_counted(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "nowhere" / "usage.log")
    scene.lines.add(line("a"))
    await eventually(lambda: scene.count("failed") == 1)
    await scene.lines.close()
    without = Scene(None)
    without.lines.add(line("b"))
    await without.lines.close()
    assert without.count("dropped") == 1
