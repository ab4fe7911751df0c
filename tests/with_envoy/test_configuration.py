# SPDX-License-Identifier: Apache-2.0
"""The configuration is replaced under load: what clients notice of it, which is nothing."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.loopback_stack import EngineFlags, Stack, documents, running_stack
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FLAGS = EngineFlags(count=3, speed=5.0, stream_headers="first-token")


@pytest.fixture
async def fresh(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of this test's own, to change."""
    async with running_stack(tmp_path / "stack", FLAGS, watch=True) as running:
        yield running


def replace(stack: Stack, text: str) -> None:
    fresh = stack.config / "attache.new"
    fresh.write_text(text)
    fresh.replace(stack.config / "attache.yaml")


@pytest.mark.slow
async def test_a_hundred_replacements_of_the_configuration_lose_no_request(fresh: Stack) -> None:
    addresses = [engine.removeprefix("http://") for engine in fresh.engines]
    rng = random.Random(0)

    def variant(number: int) -> str:
        if number % 5 == 4:
            return rng.choice(["kind: [", "kind: ModelServer\n", ""])
        engines = rng.sample(addresses, rng.randint(1, 3))
        return documents(engines, gateway=fresh.gateway, server=rng.choice(["llama", "llama-b", "llama-c"]))

    async with Load(fresh.url, pause_s=0.1) as load:
        for number in range(100):
            replace(fresh, variant(number))
            await asyncio.sleep(rng.choice([0.02, 0.05, 0.3]))
        final = documents(addresses[:1], gateway=fresh.gateway, server="llama-final")
        replace(fresh, final)

        async def is_applied() -> bool:
            async with httpx.AsyncClient(timeout=60) as http:
                text = (await http.get(f"{fresh.metrics}/metrics")).text
            return f'attache_in_flight{{endpoint="{addresses[0]}",server="default/llama-final"}}' in text

        await eventually(is_applied)
        await load.more(200)
    assert load.tally.lost == []
    assert load.tally.cut == 0


async def test_a_server_under_a_new_name_takes_over_without_a_lost_request(fresh: Stack) -> None:
    addresses = [engine.removeprefix("http://") for engine in fresh.engines]

    async def is_used_by_extproc(name: str) -> bool:
        async with httpx.AsyncClient(timeout=60) as http:
            return f'server="default/{name}"' in (await http.get(f"{fresh.metrics}/metrics")).text

    async def is_alone_in_envoy(name: str) -> bool:
        async with httpx.AsyncClient(timeout=60) as http:
            clusters = (await http.get(f"{fresh.admin}/clusters")).text
        others = {"first", "second", "llama"} - {name}
        return f"server/default/{name}::" in clusters and not any(
            f"server/default/{one}::" in clusters for one in others
        )

    async with Load(fresh.url, pause_s=0.1) as load:
        for name in ("first", "second"):
            replace(fresh, documents(addresses, gateway=fresh.gateway, server=name))
            await eventually(lambda name=name: is_used_by_extproc(name))
        await eventually(lambda: is_alone_in_envoy("second"))
    assert load.tally.lost == []
    assert load.tally.cut == 0
