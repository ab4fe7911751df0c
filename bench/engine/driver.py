"""Runs the scheduler against the clock: every step takes as long as the model says, divided by the speed."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

from bench.engine.hardware import API_S
from bench.engine.journal import Journal
from bench.engine.request import Request, Token
from bench.engine.scheduler import Limits, Scheduler
from bench.engine.step_time import Roofline
from bench.engine.text import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.engine.hardware import Hardware
    from bench.engine.publisher import Publisher


class Driver:
    """One engine core. ``speed``: engine seconds in a second of ours."""

    def __init__(
        self, hardware: Hardware, limits: Limits, *, speed: float, seed: int, publisher: Publisher | None = None
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
        self._stalled_until = 0.0

    def stall(self, seconds: float) -> None:
        """Compute nothing for so long, as a GPU that hangs."""
        self._stalled_until = asyncio.get_running_loop().time() + seconds

    def new_request(self, prompt: bytes, output_tokens: int, *, model: str) -> Request:
        """A request whose answer will have ``output_tokens`` tokens."""
        answer = answer_text(self._rng, output_tokens)
        keeps_text = self._journal is not None
        return Request(next(self._keys), prompt, answer, model=model, block_size=self.block_size, keeps_text=keeps_text)

    async def tokens(self, request: Request) -> AsyncIterator[Token]:
        """Enter ``request`` and follow its answer. Leaving early aborts it."""
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
        """Step after step, until cancelled. Late wake-ups are made up for, so that engine time keeps its pace."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if loop.time() < self._stalled_until:
                await asyncio.sleep(self._stalled_until - loop.time())
            step = self.scheduler.begin_step(leaps=False)
            if step is None:
                self._work_came.clear()
                await self._work_came.wait()
                due = loop.time()
                continue
            due += step.seconds / self.speed
            await asyncio.sleep(due - loop.time())
            # a machine too slow for this speed must not run after its debts
            due = max(due, loop.time() - 0.1)
            tokens = self.scheduler.end_step(step)
            if self._publisher is not None and self._journal is not None:
                await self._publisher.publish(self._journal.take())
            for token in tokens:
                queue = self._answers.get(token.request.key)
                if queue is not None:
                    queue.put_nowait(token)
