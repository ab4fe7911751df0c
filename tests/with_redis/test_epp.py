# SPDX-License-Identifier: Apache-2.0
"""Replicas of attache epp share what they know: what one has sent, the other expects in the engines' caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from tests.waiting import eventually
from tests.with_envoy.gateways import engines, gateway
from tests.with_envoy.test_file_discovery import CHAT, CONFIG
from tests.with_envoy.test_standard_protocol import chat

if TYPE_CHECKING:
    from pathlib import Path

    from tests.redis_server import Redis

SYNCER = "  - type: redis-syncer\n    parameters: {address: 'ADDRESS', passwordEnv: ''}\n  - type: random-picker\n"


async def test_replicas_share_by_flag_or_by_the_files_redis_syncer(tmp_path: Path, redis: Redis) -> None:
    async with engines(2) as addresses:
        first = CONFIG.format(path=tmp_path / "a" / "config" / "endpoints.json")
        second = CONFIG.format(path=tmp_path / "b" / "config" / "endpoints.json")
        second = second.replace("  - type: random-picker\n", SYNCER, 1).replace(
            "ADDRESS", redis.url.removeprefix("redis://")
        )
        flags = ["--redis", redis.url]
        async with (
            gateway(tmp_path / "a", addresses, picker=first, is_epp=True, flags=flags) as one,
            gateway(tmp_path / "b", addresses, picker=second, is_epp=True) as other,
            httpx.AsyncClient() as http,
        ):

            async def value(name: str) -> float:
                page = (await http.get(f"{other.metrics}/metrics")).text
                return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

            async def is_peer() -> bool:
                return await value("attache_peers") == 1

            await eventually(is_peer)
            assert await value("attache_prefix_blocks") == 0
            assert (await http.post(one.url + CHAT, content=chat(20_000))).status_code == 200

            async def has_blocks() -> bool:
                return await value("attache_prefix_blocks") > 0

            await eventually(has_blocks)
            assert await value("attache_picks_total{") == 0
