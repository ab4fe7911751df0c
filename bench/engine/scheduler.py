"""Continuous batching with chunked prefill, as vLLM V1 does it (``vllm/v1/core/sched/scheduler.py``), in virtual time.

Each step has a budget of tokens. Requests that run come first, in their order; what is left of the budget goes to those that
wait, first come first served. When blocks run out, the request that began last gives up its own and waits at the front.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from bench.engine.blocks import BlockPool
from bench.engine.step_time import Work, step_seconds
from bench.engine.text import BlockHashes, count_tokens

if TYPE_CHECKING:
    from bench.engine.hardware import Hardware
    from bench.engine.journal import Journal


class Limits(msgspec.Struct, frozen=True):
    """vLLM's flags of the same names."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_gpu_blocks: int = 1024


class Request:
    """One request in the engine.

    ``model``: the name that was asked for, an adapter's maybe. ``words``: the answer, a token each, which it will have
    produced when it is done.
    """

    def __init__(
        self, key: int, prompt: bytes, words: list[str], *, model: str, block_size: int, keeps_text: bool = False
    ) -> None:
        self.key = key
        self.model = model
        self.words = words
        self.prompt_tokens = count_tokens(prompt)
        self.produced = 0
        self.computed = 0
        self.cached_tokens: int | None = None
        self.blocks: list[int] = []
        self.named = 0
        self.text = BlockHashes(model, block_size, keeps_text=keeps_text)
        self.text.extend(prompt)

    @property
    def tokens(self) -> int:
        """Of the prompt and of what has been produced."""
        return self.prompt_tokens + self.produced


class Token(msgspec.Struct, frozen=True):
    """A request has produced a token."""

    request: Request
    text: str
    is_last: bool


class Step(msgspec.Struct, frozen=True):
    """What a step does: requests with their numbers of new tokens, and how long it takes."""

    parts: list[tuple[Request, int]]
    seconds: float


class Counters(msgspec.Struct):
    """What has happened so far, in vLLM's terms; ``queries`` and ``hits`` of the prefix cache count tokens."""

    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """The engine's state. ``begin_step`` says what is computed and for how long, ``end_step`` what came of it."""

    def __init__(self, hardware: Hardware, limits: Limits, journal: Journal | None = None) -> None:
        """``journal`` is told what enters and leaves the cache; requests must then keep their text."""
        self._hardware = hardware
        self._limits = limits
        self._journal = journal
        self.pool = BlockPool(limits.num_gpu_blocks, journal)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counters = Counters()

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Its client has left. What it computed stays known."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def begin_step(self) -> Step | None:
        """Choose what to compute; None if there is nothing to do."""
        budget = self._limits.max_num_batched_tokens
        parts, was_short = self._schedule_running(budget)
        if not was_short:
            budget -= sum(count for _, count in parts)
            parts.extend(self._schedule_waiting(budget))
        if not parts:
            return None
        work = [Work(count, request.computed) for request, count in parts]
        return Step(parts, step_seconds(self._hardware, work))

    def end_step(self, step: Step) -> list[Token]:
        """Account for a step that has been computed; requests aborted meanwhile are passed over."""
        tokens = []
        alive = set(map(id, self.running))
        for request, count in step.parts:
            if id(request) not in alive:
                continue
            request.computed += count
            self._name_full_blocks(request)
            if request.computed == request.tokens:
                tokens.append(self._produce(request))
        self.running = [request for request in self.running if request.produced < len(request.words)]
        return tokens

    def _schedule_running(self, budget: int) -> tuple[list[tuple[Request, int]], bool]:
        """In order, each as much as it still has to compute. True: blocks ran out and somebody had to give way."""
        parts: list[tuple[Request, int]] = []
        was_short = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.tokens - request.computed, budget)
            while not self._grow(request, count):
                was_short = True
                if self._preempt_last() is request:
                    break
            else:
                parts.append((request, count))
                budget -= count
                index += 1
        return parts, was_short

    def _schedule_waiting(self, budget: int) -> list[tuple[Request, int]]:
        parts = []
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            # the last token is always computed: its logits are what the answer begins with
            usable = (request.tokens - 1) // self._limits.block_size
            shared = self.pool.match(request.text.hashes[:usable])
            cached = len(shared) * self._limits.block_size
            count = min(request.tokens - cached, budget)
            blocks = self.pool.take(shared, self._blocks_for(cached + count) - len(shared))
            if blocks is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            self._start(request, blocks, cached)
            parts.append((request, count))
            budget -= count
        return parts

    def _start(self, request: Request, blocks: list[int], cached: int) -> None:
        request.blocks, request.computed = blocks, cached
        request.named = cached // self._limits.block_size
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.counters.queries += request.prompt_tokens
            self.counters.hits += cached
            self.counters.prompt_tokens += request.prompt_tokens

    def _grow(self, request: Request, count: int) -> bool:
        missing = self._blocks_for(request.computed + count) - len(request.blocks)
        fresh = self.pool.take((), max(0, missing))
        if fresh is None:
            return False
        request.blocks.extend(fresh)
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self._release(request)
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        return request

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed, request.named = [], 0, 0

    def _name_full_blocks(self, request: Request) -> None:
        full = min(request.computed // self._limits.block_size, len(request.text.hashes))
        hashes = request.text.hashes
        new = [index for index in range(request.named, full) if self.pool.name(request.blocks[index], hashes[index])]
        if new and self._journal is not None:
            self._tell(self._journal, request, new)
        request.named = max(request.named, full)

    def _tell(self, journal: Journal, request: Request, new: list[int]) -> None:
        """Runs of blocks, each with the block before it."""
        hashes, blocks = request.text.hashes, request.text.blocks
        start = new[0]
        for index, following in zip(new, [*new[1:], -1], strict=True):
            if following != index + 1:
                parent = hashes[start - 1] if start else None
                journal.stored(hashes[start : index + 1], parent, blocks[start : index + 1], request.model)
                start = following

    def _produce(self, request: Request) -> Token:
        text = request.words[request.produced]
        request.produced += 1
        request.text.extend(text.encode())
        self.counters.generation_tokens += 1
        is_last = request.produced == len(request.words)
        if is_last:
            self._release(request)
        return Token(request, text, is_last)
