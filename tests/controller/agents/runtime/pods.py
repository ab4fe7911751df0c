# SPDX-License-Identifier: Apache-2.0
"""A simulated engine and ``attache agent`` beside it, both as processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.controller.agents.runtime.doubles import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.stack.orphan_reaper import ProcessGuard

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@contextlib.asynccontextmanager
async def process(guard: ProcessGuard, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    one = await asyncio.create_subprocess_exec(sys.executable, "-m", *words, start_new_session=True)
    guard.add(one.pid)
    try:
        yield one
    finally:
        if one.returncode is None:
            one.kill()
        await one.wait()
        # the number is free for any other process now, which the guard must not end
        guard.remove(one.pid)


class Pod:
    """An engine and its agent; each is started by its context."""

    def __init__(self, guard: ProcessGuard) -> None:
        self.guard = guard
        self.engine_url = f"http://127.0.0.1:{free_port()}"
        self.agent_url = f"http://127.0.0.1:{free_port()}"
        self.http = httpx.AsyncClient(timeout=60, trust_env=False)

    def engine(self, *more: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
        port = self.engine_url.rpartition(":")[2]
        return process(self.guard, "bench.engine", "--port", port, "--model", MODEL, *more)

    def agent(self, *more: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
        words = ("--listen", self.agent_url.removeprefix("http://"), "--engine", self.engine_url)
        return process(self.guard, "attache", "agent", *words, "--probe-interval", "0.05", *more)

    async def ask(self, path: str) -> httpx.Response:
        return await self.http.get(f"{self.agent_url}{path}")

    async def load(self, name: str, source: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": source}
        return await self.http.post(f"{self.agent_url}/v1/load_lora_adapter", json=body)

    async def listens(self) -> bool:
        try:
            return (await self.http.get(f"{self.engine_url}/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def is_ready(self) -> bool:
        return await self._readiness() == 200

    async def is_unready(self) -> bool:
        return await self._readiness() == 503

    async def runs(self) -> bool:
        return await self.metric("engine_running_requests") > 0

    async def _readiness(self) -> int:
        try:
            return (await self.ask("/ready")).status_code
        except httpx.TransportError:
            return 0

    async def complete(self, model: str, tokens: int) -> httpx.Response:
        body = {"model": model, "prompt": "Hello", "max_tokens": tokens}
        return await self.http.post(f"{self.engine_url}/v1/completions", json=body)

    async def generate(self, tokens: int) -> int:
        """The tokens of a streamed answer that came."""
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "stream": True}
        count = 0
        async with self.http.stream("POST", f"{self.engine_url}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                count += line.startswith('data: {"')
        return count

    async def running_stream(self, tokens: int) -> asyncio.Task[int]:
        """A ``generate`` that the agent has seen run: another one, if it ended unseen on a busy machine."""
        stream = asyncio.create_task(self.generate(tokens))
        while not await self.runs():
            if stream.done():
                # raises, if it has failed
                await stream
                stream = asyncio.create_task(self.generate(tokens))
        return stream

    async def fault(self, **fault: object) -> None:
        (await self.http.post(f"{self.engine_url}/faults", json=fault)).raise_for_status()

    async def metric(self, name: str) -> float:
        """0 if the agent does not show it."""
        page = (await self.ask("/metrics")).text
        lines = (line for line in page.splitlines() if line.startswith(f"attache_{name}"))
        return next((float(line.split()[-1]) for line in lines), 0.0)


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
