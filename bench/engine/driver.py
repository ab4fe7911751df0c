# SPDX-License-Identifier: Apache-2.0
"""Runs the scheduler in real time: steps take as long as the model says.

Durations are divided by the speed.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

from bench.engine.hardware import API_S
from bench.engine.journal import Journal
from bench.engine.request import Request, Token
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import Roofline
from bench.engine.text import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.engine.hardware import Hardware
    from bench.engine.publisher import KvEventPublisher


class Driver:
    """One engine core in real time. ``speed``: engine seconds per second of the wall clock."""

    def __init__(
        self,
        hardware: Hardware,
        limits: EngineLimits,
        *,
        speed: float,
        seed: int,
        publisher: KvEventPublisher | None = None,
    ) -> None:
        self._publisher = publisher
        self._journal = Journal() if publisher is not None else None
        self.scheduler = Scheduler(Roofline(hardware), limits, self._journal)
        self.block_size = limits.block_size
        self.speed = speed
        self._rng = random.Random(seed)
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Queue[Token]] = {}
        self._work_came = asyncio.Event()
        self._stalled_until_s = 0.0

    def stall(self, duration_s: float) -> None:
        """Compute nothing for this long on the wall clock, like a GPU that hangs."""
        self._stalled_until_s = max(self._stalled_until_s, asyncio.get_running_loop().time() + duration_s)

    async def read_weights(self, duration_s: float) -> None:
        """Read an adapter's weights for this long, in engine seconds: between two steps, of which none runs
        meanwhile.
        """
        if duration_s:
            self.stall(duration_s / self.speed)
            await asyncio.sleep(duration_s / self.speed)

    def new_request(self, prompt: bytes, output_tokens: int, *, model: str, adapter: str = "") -> Request:
        """A request whose answer will have ``output_tokens`` tokens. ``adapter``: that it needs, empty for none."""
        return Request(
            next(self._keys),
            prompt,
            answer_text(self._rng, output_tokens),
            model=model,
            block_size=self.block_size,
            keeps_text=self._journal is not None,
            adapter=adapter,
        )

    async def tokens(self, request: Request) -> AsyncIterator[Token]:
        """Add ``request`` and follow its answer. A caller that stops early aborts it."""
        queue: asyncio.Queue[Token] = asyncio.Queue()
        # the time that vLLM's API server takes before its engine sees a request
        await asyncio.sleep(API_S / self.speed)
        self._answers[request.key] = queue
        self.scheduler.add(request)
        self._work_came.set()
        try:
            while True:
                token = await queue.get()
                yield token
                if token.is_last:
                    return
        finally:
            del self._answers[request.key]
            if not request.is_done:
                self.scheduler.abort(request)

    async def run(self) -> None:
        """Step after step, until cancelled.

        A late wake-up shortens the next sleep, so that engine time keeps its pace.
        """
        loop = asyncio.get_running_loop()
        due_at_s = loop.time()
        while True:
            if loop.time() < self._stalled_until_s:
                await asyncio.sleep(self._stalled_until_s - loop.time())
            step = self.scheduler.begin_step(leaps=False)
            if step is None:
                self._work_came.clear()
                await self._work_came.wait()
                due_at_s = loop.time()
                continue
            due_at_s += step.duration_s / self.speed
            await asyncio.sleep(due_at_s - loop.time())
            # a machine too slow for this speed must not try to catch up for ever
            due_at_s = max(due_at_s, loop.time() - 0.1)

            tokens = self.scheduler.end_step(step)
            if self._publisher is not None and self._journal is not None:
                await self._publisher.publish(self._journal.take())
            for token in tokens:
                queue = self._answers.get(token.request.key)
                if queue is not None:
                    queue.put_nowait(token)
