# SPDX-License-Identifier: Apache-2.0
"""``python -m bench workload``: lengths of a workload, and how much of its prompts a cache could hold.

For a cache without a bound, and for caches of given sizes. Requests come in the order in which they would leave if
answers took no time, all against one cache with LRU eviction. Real engines have a cache each, so this is an upper
bound for any picking.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from bench.engine.fake_tokenizer import BlockHashes, Message, answer_text, render_chat
from bench.lab.trial import TrialConditions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from bench.workload.sessions import Session, Workload

CAPACITIES: Final = (500_000, 2_000_000, 8_000_000)


class PrefixHitRate(msgspec.Struct, frozen=True):
    """``reusable``: share of prompt tokens that are in the cache, 0 to 1.

    ``capacity``: tokens; None without a bound.
    """

    capacity: int | None
    reusable: float


class Statistics(msgspec.Struct, frozen=True):
    """Lengths in tokens. ``span_s``: from the start to the beginning of the last session."""

    requests: int
    span_s: float
    mean_prompt: float
    longest_prompt: int
    mean_output: float
    reuse: tuple[PrefixHitRate, ...]


def statistics(
    workload: Workload, rng: random.Random, capacities: Sequence[int] = CAPACITIES, block: int = 64
) -> Statistics:
    """Of all requests. ``capacities`` of caches and the size of a ``block`` in tokens."""
    caches = [_LruCache(None), *(_LruCache(capacity // block) for capacity in capacities)]
    prompts: list[int] = []
    outputs = 0
    for chain, tokens, output in _prompts(workload, rng, block):
        prompts.append(tokens)
        outputs += output
        for cache in caches:
            cache.ask(chain)
    total = sum(prompts) or 1
    return Statistics(
        requests=len(prompts),
        span_s=max(session.begins_at_s for session in workload.sessions),
        mean_prompt=total / max(1, len(prompts)),
        longest_prompt=max(prompts, default=0),
        mean_output=outputs / max(1, len(prompts)),
        reuse=tuple(
            PrefixHitRate(capacity, cache.hits * block / total)
            for capacity, cache in zip((None, *capacities), caches, strict=True)
        ),
    )


def _prompts(workload: Workload, rng: random.Random, block: int) -> Iterator[tuple[list[int], int, int]]:
    """Block hashes, prompt tokens and output tokens of each request, in the order of time."""

    order = itertools.count()
    heap: list[tuple[float, int, int, Session, list[Message]]] = [
        (session.begins_at_s, next(order), 0, session, []) for session in workload.sessions
    ]
    heapq.heapify(heap)
    while heap:
        now, _, index, session, messages = heapq.heappop(heap)
        turn = session.turns[index]
        if not index or turn.is_whole:
            messages = [Message(one["role"], one["content"]) for one in session.opening_messages()]
        messages.append(Message("user", turn.text))
        prompt = render_chat(messages)
        hashes = BlockHashes(session.adapter, block)
        hashes.extend(prompt)
        yield hashes.hashes, len(prompt) // 4, turn.output_tokens
        if index + 1 < len(session.turns):
            messages.append(Message("assistant", answer_text(rng, turn.output_tokens).decode()))
            heapq.heappush(heap, (now + session.turns[index + 1].think_s, next(order), index + 1, session, messages))


class _LruCache:
    def __init__(self, blocks: int | None) -> None:
        self.hits = 0
        self._blocks = blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def ask(self, chain: list[int]) -> None:
        held = self._held
        self.hits += next((at for at, block in enumerate(chain) if block not in held), len(chain))
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while self._blocks is not None and len(held) > self._blocks:
            held.popitem(last=False)


def describe_workload(options: argparse.Namespace, console: Console) -> int:
    """Print them. Raises TraceInvalid."""

    conditions = TrialConditions(
        options.trace, trace_format=options.format, skip=options.skip, limit=options.limit, seed=options.seed
    )
    workload = conditions.workload()
    found = statistics(workload, random.Random(options.seed))
    made = Table(title=workload.name, show_header=False)
    made.add_row("sessions", f"{len(workload.sessions):,}")
    made.add_row("requests", f"{found.requests:,}")
    made.add_row("sessions begin within", f"{found.span_s:,.0f} s")
    made.add_row("prompt, mean and longest", f"{found.mean_prompt:,.0f}, {found.longest_prompt:,} tokens")
    made.add_row("answer, mean", f"{found.mean_output:,.0f} tokens")
    for one in found.reuse:
        of = "without a bound" if one.capacity is None else f"of {one.capacity:,} tokens"
        made.add_row(f"reusable with one cache {of}", f"{one.reusable:.1%}")
    console.print(made)
    return 0
