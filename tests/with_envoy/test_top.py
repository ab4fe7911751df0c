# SPDX-License-Identifier: Apache-2.0
"""``attache top`` beside a real extproc: an engine that is killed is seen to be dead, and seen to be back."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from bench.stack.stack import EngineFlags, Stack, running_stack
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = EngineFlags(count=2, speed=20.0, stream_headers="first-token", apart=True)


@pytest_asyncio.fixture(loop_scope="module")
async def two(tmp_path: Path) -> AsyncIterator[Stack]:
    """Two engines in processes of their own."""
    async with running_stack(tmp_path / "stack", FLAGS) as running:
        yield running


async def screen(stack: Stack) -> list[str]:
    """What the command prints."""
    page = stack.metrics.removeprefix("http://")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "top", "--once", "--interval", "200ms", page), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


async def test_a_killed_engine_is_dead_on_the_screen_until_it_is_back(two: Stack) -> None:
    dead, alive = (one.removeprefix("http://") for one in two.engines)
    # the page is asked again and again, as it costs less than the command
    async with httpx.AsyncClient(timeout=60) as http:

        async def is_avoided() -> bool:
            return "attache_endpoint_avoided{" in (await http.get(f"{two.metrics}/metrics")).text

        async def is_well() -> bool:
            name = f'attache_engine_report_age_seconds{{endpoint="{dead}",server="default/llama"}} '
            page = (await http.get(f"{two.metrics}/metrics")).text
            return "attache_endpoint_avoided{" not in page and float(page.partition(name)[2].split()[0]) < 1

        async with Load(two.url, clients=4, pause_s=0.02) as load:
            await load.more(50)
            lines = await screen(two)
            assert lines[1] == "engines: 2 serving"
            assert all(row[8] == "ms" and float(row[7]) > 0 for row in engine_rows(lines).values())
            await two.processes.end("engine-0", signal.SIGKILL)
            await eventually(is_avoided)
        lines = await screen(two)
        assert lines[1] == "engines: 1 serving, 1 avoided"
        why = next(line for line in lines if line.startswith(f"{dead} of "))
        assert "is avoided since" in why
        assert "see that it runs" in why
        rows = engine_rows(lines)
        assert rows[alive][2] == "serving"
        # its TTFT is of another time; some of its last answers failed
        assert (rows[dead][2], rows[dead][7]) == ("AVOIDED", "-")
        assert rows[dead][8] != "0%"

        await two.processes.start_again("engine-0")
        # as many clients as one engine does not serve as fast, so that the other one is tried
        async with Load(two.url):
            await eventually(is_well)
        assert (await screen(two))[1] == "engines: 2 serving"


def engine_rows(lines: list[str]) -> dict[str, list[str]]:
    """Cells by engine."""
    return {row[1]: row for row in map(str.split, lines) if len(row) > 10 and row[0] == "default/llama"}
