# SPDX-License-Identifier: Apache-2.0
"""Continuous batching with chunked prefill, as vLLM V1 does it.

Source: ``vllm/v1/core/sched/scheduler.py``. Each step has a budget of tokens. Running requests come first, in their
order; the rest of the budget goes to waiting requests, first come, first served. When blocks run out, the request
that began last is preempted: it gives up its blocks and waits at the front.

Prefill and decode on separate engines: the blocks of an exported request stay held when it ends. A remote request gets
blocks for its prompt as soon as there is room, and holds them without a place in the batch until the keys and values
have come (``loaded``); it then computes the prompt's last token alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from bench.engine.fake_tokenizer import BYTES_PER_TOKEN
from bench.engine.kv_cache import BlockPool
from bench.engine.request import EngineStep, Request, Token
from bench.engine.step_time import StepBatch

if TYPE_CHECKING:
    from bench.engine.kv_cache import CacheJournal
    from bench.engine.step_time import StepTimeModel


class EngineLimits(msgspec.Struct, frozen=True):
    """vLLM's flags of the same names: requests in a batch, tokens of a step, tokens of a KV block, KV blocks.

    ``max_loras``: LoRA adapters in a batch, 0 for any number; requests for others wait, and those behind them do not.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    num_gpu_blocks: int = 1024
    max_loras: int = 0


class SchedulerCounters(msgspec.Struct):
    """Totals in vLLM's terms. ``queries`` and ``hits``: tokens looked up and found in the prefix cache.
    ``transferred``: prompt tokens that came from other engines.
    """

    queries: int = 0
    hits: int = 0
    transferred: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    first_tokens: int = 0


class Scheduler:
    """The engine's state.

    ``begin_step`` chooses what to compute; ``end_step`` accounts for it and returns the tokens.
    """

    def __init__(self, speed: StepTimeModel, limits: EngineLimits, journal: CacheJournal | None = None) -> None:
        """``journal``: takes what enters and leaves the cache; requests must then keep their text."""
        self.speed = speed
        self.limits = limits
        self._journal = journal
        self.pool = BlockPool(limits.num_gpu_blocks, journal)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.counters = SchedulerCounters()
        self.loading: dict[int, Request] = {}
        self._wanted: list[tuple[Request, int]] = []
        self._exported: list[tuple[Request, list[int]]] = []
        self._computed: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """The client of a request has left. What was computed for it stays in the cache."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.loading.pop(request.key, None)
        self._release(request)

    def pop_transfers_to_start(self) -> list[tuple[Request, int]]:
        """Remote requests whose blocks were reserved since the last call, with the tokens to transfer for each."""
        found, self._wanted = self._wanted, []
        return found

    def pop_finished_exports(self) -> list[tuple[Request, list[int]]]:
        """Exported requests that have ended since the last call, with their blocks, which stay held."""
        found, self._exported = self._exported, []
        return found

    def pop_sendable_tokens(self) -> list[tuple[Request, int]]:
        """Exported requests, with the tokens of their prompts that can be sent, for each step since the last call."""
        found, self._computed = self._computed, []
        return found

    def on_transfer_ended(self, request: Request, tokens: int) -> None:
        """A transfer has ended; the request is the next to begin. ``tokens``: that came, 0 if it failed: the prompt is
        then computed here. No effect on a request that was aborted.
        """
        if self.loading.pop(request.key, None) is None:
            return
        request.is_remote = False
        request.transferred = tokens
        self.counters.transferred += tokens
        if tokens:
            # the last token is always computed: the answer begins with its logits
            request.computed = min(request.tokens - 1, request.computed + tokens)
            self._name_full_blocks(request)
        else:
            self._release(request)
        self.waiting.appendleft(request)

    def begin_step(self, *, leaps: bool = False) -> EngineStep | None:
        """Choose what to compute; None if there is nothing to do.

        ``leaps``: return many steps as one while all of them are the same: only decodes, no request ends, and none is
        admitted. An arrival must then cut the leap short (EngineStep.cut).
        """
        budget = self.limits.max_num_batched_tokens
        parts, was_short = self._schedule_running(budget)
        running = len(parts)
        if not was_short:
            budget -= sum(count for _, count in parts)
            parts.extend(self._schedule_waiting(budget))
        if not parts:
            return None
        batch = _batch(parts)
        step = EngineStep(parts, self.speed.seconds(batch))
        if leaps and not was_short and len(parts) == running == len(self.running) == batch.decodes:
            self._leap(step, budget)
        return step

    def _leap(self, step: EngineStep, budget: int) -> None:
        growth_s = self.speed.growth_per_step_s(len(step.parts))
        if growth_s is None or budget <= 0 or any(not request.produced for request, _ in step.parts):
            return
        count = min(request.output_tokens - request.produced for request, _ in step.parts)
        while count > 1 and not self._has_blocks(step, count):
            count //= 2
        step.count, step.growth_s = count, growth_s

    def _has_blocks(self, step: EngineStep, count: int) -> bool:
        missing = sum(self._blocks_for(request.computed + count) - len(request.blocks) for request, _ in step.parts)
        return missing <= self.pool.free_blocks

    def end_step(self, step: EngineStep) -> list[Token]:
        """Account for a step that has been computed, and return its tokens. Requests aborted meanwhile are skipped."""
        tokens = []
        has_ended = False
        for request, count in step.parts:
            if not request.is_running:
                continue
            new = count + step.count - 1
            if step.count > 1:
                self._grow(request, new)
            request.computed += new
            if request.is_exported and not request.produced:
                self._computed.append((request, request.computed))
            has_token = request.computed >= request.tokens
            text = self._produce(request, step.count) if has_token else ""
            if request.computed // self.limits.block_size > request.named:
                self._name_full_blocks(request)
            if has_token:
                if request.is_done:
                    has_ended = True
                    if request.is_exported:
                        self._exported.append((request, request.blocks))
                        request.blocks = []
                    self._release(request)
                tokens.append(Token(request, text, request.is_done))
        if has_ended:
            self.running = [request for request in self.running if request.is_running]
        return tokens

    def _schedule_running(self, budget: int) -> tuple[list[tuple[Request, int]], bool]:
        """In order, each with the tokens that it still has to compute.

        True: blocks ran out and a request was preempted.
        """
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
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if self.limits.max_loras and request.adapter and not self._has_slot(request.adapter):
                skipped.append(self.waiting.popleft())
                continue
            count = self._begin(request, budget)
            if count is None:
                break
            self.waiting.popleft()
            if request.is_remote:
                continue
            self.running.append(request)
            request.is_running = True
            parts.append((request, count))
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        return parts

    def _begin(self, request: Request, budget: int) -> int | None:
        """Hold the blocks for its next tokens, and return how many that are; None: there are too few blocks.

        For a remote request, blocks for the whole prompt; it waits for its transfer.
        """
        if request.blocks:  # what was transferred
            return min(request.tokens - request.computed, budget)
        # the last token is always computed: the answer begins with its logits
        usable = (request.tokens - 1) // self.limits.block_size
        shared = self.pool.match_prefix(request.text.hashes[:usable])
        cached = len(shared) * self.limits.block_size
        count = request.tokens - cached if request.is_remote else min(request.tokens - cached, budget)
        blocks = self.pool.allocate(shared, self._blocks_for(cached + count) - len(shared))
        if blocks is None:
            return None
        self._start(request, blocks, cached)
        if request.is_remote:
            self.loading[request.key] = request
            self._wanted.append((request, count))
        return count

    def _has_slot(self, adapter: str) -> bool:
        """Whether the batch may use the adapter: it does already, or it uses few enough others."""
        used = {request.adapter for request in self.running if request.adapter}
        return adapter in used or len(used) < self.limits.max_loras

    def _start(self, request: Request, blocks: list[int], cached: int) -> None:
        request.blocks, request.computed = blocks, cached
        request.named = cached // self.limits.block_size
        if request.cached_tokens is None:
            request.cached_tokens = cached
            self.counters.queries += request.prompt_tokens
            self.counters.hits += cached
            self.counters.prompt_tokens += request.prompt_tokens

    def _grow(self, request: Request, count: int) -> bool:
        missing = self._blocks_for(request.computed + count) - len(request.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate((), missing)
        if fresh is None:
            return False
        request.blocks.extend(fresh)
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _preempt_last(self) -> Request:
        request = self.running.pop()
        self._release(request)
        self.waiting.appendleft(request)
        self.counters.preemptions += 1
        return request

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed, request.named, request.is_running = [], 0, 0, False

    def _name_full_blocks(self, request: Request) -> None:
        full = min(request.computed // self.limits.block_size, len(request.text.hashes))
        hashes = request.text.hashes
        new = [
            index for index in range(request.named, full) if self.pool.register(request.blocks[index], hashes[index])
        ]
        if new and self._journal is not None:
            self._emit_stored(self._journal, request, new)
        request.named = max(request.named, full)

    def _emit_stored(self, journal: CacheJournal, request: Request, new: list[int]) -> None:
        """One change for each run of blocks in a row."""
        hashes, blocks = request.text.hashes, request.text.blocks
        start = new[0]
        for index, following in zip(new, [*new[1:], -1], strict=True):
            if following != index + 1:
                parent = hashes[start - 1] if start else None
                stored = blocks[start : index + 1]
                journal.on_stored(hashes[start : index + 1], parent, stored, request.model, request.salt)
                start = following

    def _produce(self, request: Request, count: int) -> str:
        start = request.produced * BYTES_PER_TOKEN
        text = request.answer[start : start + count * BYTES_PER_TOKEN]
        self.counters.first_tokens += not request.produced
        request.produced += count
        request.tokens += count
        request.text.extend(text)
        self.counters.generation_tokens += count
        return text.decode()


def _batch(parts: list[tuple[Request, int]]) -> StepBatch:
    """The same as ``step_batch``, without an object for each request."""

    tokens = read = decodes = 0
    pairs = 0.0
    for request, count in parts:
        tokens += count
        if count == 1:
            decodes += 1
            read += request.computed
        else:
            pairs += count * (request.computed + count / 2)
    return StepBatch(requests=len(parts), tokens=tokens, pairs=pairs, read=read, decodes=decodes)
