# SPDX-License-Identifier: Apache-2.0
"""Envoy and extproc: each knows whether the other is there, and the operator is told if they miss each other."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.loopback_stack import ALIAS, documents
from bench.stack.processes import Processes, free_ports
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stack.loopback_stack import Stack


async def gauge(metrics: str, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{metrics}/metrics")).text
    (found,) = re.findall(rf"^attache_{name} (\S+)$", page, re.MULTILINE)
    return float(found)


@pytest.mark.asyncio(loop_scope="module")
async def test_envoys_health_checks_and_streams_are_noted(stack: Stack) -> None:
    async def has_asked() -> bool:
        return await gauge(stack.metrics, "last_health_check_timestamp_seconds") > 0

    await eventually(has_asked)
    before = await gauge(stack.metrics, "last_stream_timestamp_seconds")
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": ALIAS, "prompt": "hello", "max_tokens": 1}
        assert (await http.post(f"{stack.url}/v1/completions", json=body)).status_code == 200
    assert await gauge(stack.metrics, "last_stream_timestamp_seconds") > before
    assert await gauge(stack.metrics, "envoy_misses_extproc") == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_reload_that_makes_envoy_call_elsewhere_is_said(stack: Stack) -> None:
    file = stack.config / "attache.yaml"
    good = file.read_text()
    address = str(stack.gateway["extproc"])
    log = stack.directory / "extproc.log"

    async def misses() -> bool:
        return await gauge(stack.metrics, "envoy_misses_extproc") == 1

    async def meets() -> bool:
        return not await misses()

    file.write_text(good.replace(address, "127.0.0.1:1"))
    try:
        await eventually(misses)
        await eventually(lambda: f"call 127.0.0.1:1, and extproc listens on {address}" in log.read_text())
    finally:
        file.write_text(good)
    await eventually(meets)


async def test_an_extproc_that_listens_elsewhere_says_so_at_the_start_and_is_ready(tmp_path: Path) -> None:
    listen, metrics, other = free_ports(3)
    config = tmp_path / "config"
    config.mkdir()
    (config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={"extproc": f"127.0.0.1:{other}"}))
    words = ["--config", str(config), "--listen", f"127.0.0.1:{listen}", "--metrics", f"127.0.0.1:{metrics}"]
    async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
        await processes.start("extproc", [sys.executable, "-m", "extproc", *words])

        async def is_ready() -> bool:
            try:
                return (await http.get(f"http://127.0.0.1:{metrics}/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await processes.wait_ready("extproc", is_ready)
        assert await gauge(f"http://127.0.0.1:{metrics}", "envoy_misses_extproc") == 1
        assert await gauge(f"http://127.0.0.1:{metrics}", "last_health_check_timestamp_seconds") == 0
    said = f"call 127.0.0.1:{other}, and extproc listens on 127.0.0.1:{listen}"
    assert (tmp_path / "extproc.log").read_text().count(said) == 1
