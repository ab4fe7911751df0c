# SPDX-License-Identifier: Apache-2.0
"""The directory is followed; what is broken is refused."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from extproc.config.directory import ConfigDirectory
from extproc.config.report import ConfigReport, content_digest
from extproc.core.core import Core
from extproc.feeds.directory import DirectoryFeed
from extproc.metrics.registry import Metrics
from extproc.scheduling.framework import ConfiguredPicker
from tests.extproc.conftest import CONFIG
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


class Watched:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "all.yaml"
        self.file.write_bytes(CONFIG)
        followed = ConfigDirectory(directory)
        snapshot = followed.read()
        self.core = Core(snapshot, rng=random.Random(0), ticket_prefix="t")
        self.metrics = Metrics(self.core.pools.values, lambda: 0.0, lambda: 0.0)
        self.feed = DirectoryFeed(
            followed, self.core, self.metrics, settle_s=0.3, apply=lambda new: self.core.apply(new, 0.0)
        )
        self.feed.started_with(snapshot)

    def names(self) -> list[str]:
        return [model.name for model in self.core.intake.models]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def until(self, holds: Callable[[], bool]) -> None:
        async def answer() -> bool:
            return holds()

        await eventually(answer)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    one = Watched(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(one.feed.watch())
        yield one
        watching.cancel()


async def test_a_replaced_file_is_applied(watched: Watched) -> None:
    fresh = watched.file.with_suffix(".new")
    fresh.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk"))
    fresh.replace(watched.file)

    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert watched.sample("attache_config_reloads_total", result="applied") == 2


@pytest.mark.parametrize("content", [b"", b"kind: [", CONFIG[: len(CONFIG) // 2], b"kind: ModelRoot\n"])
async def test_a_broken_or_half_written_file_changes_nothing_until_it_is_mended(
    watched: Watched, content: bytes
) -> None:
    in_use = watched.feed.report.files
    assert in_use == {"all.yaml": content_digest(CONFIG)}
    watched.file.write_bytes(content)
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert watched.names() == ["chat", "sql"]
    assert watched.feed.report.files == in_use
    assert "all.yaml" in watched.feed.report.refused

    watched.file.write_bytes(CONFIG)
    await watched.until(lambda: watched.sample("attache_config_valid") == 1)
    assert watched.names() == ["chat", "sql"]
    assert watched.feed.report == ConfigReport(files=in_use)


async def test_a_directory_that_is_gone_for_a_while_changes_nothing(watched: Watched) -> None:
    directory = watched.file.parent
    directory.rename(directory.with_name("away"))
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert watched.names() == ["chat", "sql"]

    directory.with_name("away").rename(directory)
    await watched.until(lambda: watched.sample("attache_config_valid") == 1)


async def test_a_new_server_waits_until_envoy_knows_it_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, list[str]]] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append((seconds, sorted(watched.core.pools)))
        await real_sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watched.file.write_bytes(CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert (0.3, ["default/llama"]) in waits

    waits.clear()
    watched.file.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk"))
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert 0.3 not in {seconds for seconds, _ in waits}


PICKER = b"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: random-picker}]
"""


async def test_a_picker_is_replaced_with_its_file_and_a_broken_one_is_refused(watched: Watched) -> None:
    file = watched.file.with_name("epp.yaml")
    file.write_bytes(PICKER)
    watched.file.write_bytes(CONFIG.replace(b"spec:\n  model:", b"spec:\n  pickerConfig: epp.yaml\n  model:"))

    def picker() -> object:
        return watched.core.pools["default/llama"].picker

    await watched.until(lambda: isinstance(picker(), ConfiguredPicker))
    pool = watched.core.pools["default/llama"]
    pool.table.in_flight[0] = 3
    file.write_bytes(PICKER.replace(b"random-picker", b"max-score-picker"))
    await watched.until(lambda: "MaxScore" in repr(picker()))
    assert watched.core.pools["default/llama"] is pool
    assert pool.table.in_flight[0] == 3, "what is known of the engines stays"
    file.write_bytes(PICKER.replace(b"queue-scorer", b"queue-scorr"))
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert "MaxScore" in repr(picker())
    file.write_bytes(PICKER)
    await watched.until(lambda: "Random" in repr(picker()))
