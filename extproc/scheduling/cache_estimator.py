# SPDX-License-Identifier: Apache-2.0
"""Estimates a prompt's cached tokens and remaining prefill work at each endpoint.

There are two indexes. The approximate one (``prefix/approximate_index.py``) records which prompts were sent where. The
precise one (``prefix/kv_index.py``) follows the KV events of the engines. For an endpoint whose event feed is complete,
the precise index decides; for one whose feed started late or has a gap, the larger of both estimates; without a feed,
the approximate index.

A file may describe further tiers of caches by their capacity, such as host memory behind the GPU's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.learned_speeds import AnswerCost, DecodeSpeed, PromptCost
from extproc.prefix.approximate_index import (
    COVERED_UNITS,
    FIRST_BLOCK_BYTES,
    PrefixIndex,
    PrefixMatch,
    PromptTail,
    hash_blocks,
    max_blocks_per_endpoint,
    prompt_tail,
)
from extproc.prefix.kv_index import KvIndex
from extproc.scheduling.picker import RequestDemandByRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.engines.metrics import CacheConfig
    from extproc.prefix.approximate_index import BlockPin

# For English text and code in JSON; learned from reported usage afterwards.
INITIAL_BYTES_PER_TOKEN: Final = 4.0
# Roughly the KV cache of an 80 GB GPU with an 8B model, or of four with a 70B model; replaced by what engines report.
_INITIAL_CACHE_TOKENS: Final = 400_000
# After a change of the block size, look up this many requests in the index of the old size, too, for so long at most.
_PREVIOUS_USES: Final = 2000
_PREVIOUS_S: Final = 600.0
_BLOCK_BYTES_BOUNDS: Final = (32, 512)


# Successive requests meet the same few sets of holders.
@lru_cache(maxsize=1024)
def rows_of_bitmask(mask: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The row numbers set in a bit mask over ``rows`` rows, usable as an index of columns."""
    raw = np.frombuffer((mask & (1 << rows) - 1).to_bytes((rows + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=rows, bitorder="little").nonzero()[0]


class TieredPrefixIndexes:
    """An index of each tier. ``capacities``: in tokens, by name.

    llm-d's tiered prefix caches have one ``approx-prefix-cache-producer`` a tier, each with a capacity of its own, and
    a scorer for each. A tier records what was sent to an endpoint, and evicts the least recently sent first.
    """

    def __init__(self, capacities: Mapping[str, float], *, bytes_per_token: float, first_block_bytes: int) -> None:
        self.capacities = capacities
        self._indexes = {
            name: PrefixIndex(tokens * bytes_per_token, first_block_bytes) for name, tokens in capacities.items()
        }

    def limit_blocks(self, most_blocks: int) -> None:
        """Track so many blocks of an endpoint at most, in each tier."""
        for index in self._indexes.values():
            index.most_blocks = most_blocks

    def held_tokens(self, chain: list[int], rows: int, tokens_in: Callable[[int], float]) -> Mapping[str, Floats]:
        """Tokens of ``chain`` that each endpoint holds, by tier. ``tokens_in``: so many bytes, in the engines'
        blocks.
        """
        found: dict[str, Floats] = {}
        for name, index in self._indexes.items():
            tokens = found[name] = np.zeros(rows)
            for match in index.match(chain):
                tokens[rows_of_bitmask(match.holders, rows)] = tokens_in(index.covered_bytes(match.blocks))
        return found

    def record(self, row: int, chain: list[int], now: float) -> None:
        """A prompt with ``chain`` is sent to the endpoint of ``row``."""
        for index in self._indexes.values():
            index.record(row, chain, now)

    def forget_endpoint(self, row: int) -> None:
        """The endpoint of ``row`` was removed, or lost its caches."""
        for index in self._indexes.values():
            index.forget(row)


class Prompt(msgspec.Struct, frozen=True):
    """A prompt to look up.

    ``text``: as hashed by the approximate index. ``model``: its name in the engines. ``adapter``: the LoRA adapter,
    if any. ``scope``, ``salt``: prompts that differ in either share no cache. ``tokens``: the token IDs, if known.
    """

    text: bytes
    model: str
    adapter: str | None = None
    scope: str = ""
    salt: str | None = None
    tokens: Sequence[int] | None = None


class PromptExpectation(msgspec.Struct, frozen=True):
    """Estimates of a prompt before an endpoint is picked.

    ``chain``: its block hashes in the approximate index. ``kv_chains``: its block keys in the precise index by block
    size, None if that was not consulted. ``matches``: which endpoints were sent which whole blocks. ``input_tokens``:
    its length. ``demand``: what it requires of each endpoint. ``tail``: its text after the last whole block.
    """

    chain: list[int]
    kv_chains: dict[int, list[int]] | None
    matches: Sequence[PrefixMatch]
    input_tokens: float
    demand: RequestDemandByRow
    tail: PromptTail


class CacheEstimator:
    """The prefix indexes of one ModelServer, and the learned cost of its prompts and answers.

    ``bytes_per_token``: learned from ``ratio_samples`` answers. ``output_tokens``: mean length of an answer.
    ``whole_feeds``, ``partial_feeds``: bit masks of the rows whose feed of KV events is complete, or has missed
    events.
    """

    def __init__(self) -> None:
        self.bytes_per_token = INITIAL_BYTES_PER_TOKEN
        self.ratio_samples = 0
        self.prompt_cost = PromptCost()
        self.answer_cost = AnswerCost()
        self.decode_speed = DecodeSpeed()
        # initial guess: the mean is 343 in Mooncake's conversations, 211 in Azure's, 28 in Azure's code completions
        self.output_tokens = 200.0
        self._most_blocks = max_blocks_per_endpoint(1)
        self.index = self._new_index(FIRST_BLOCK_BYTES)
        self._previous: PrefixIndex | None = None
        self._previous_uses = 0
        self._previous_ends_s = math.inf
        self.kv_index: KvIndex | None = None
        self._tiers: TieredPrefixIndexes | None = None
        self.whole_feeds = 0
        self.partial_feeds = 0
        self._caches: dict[int, CacheConfig] = {}
        self._block_tokens = 1

    def forget_endpoint(self, row: int) -> None:
        """The endpoint of ``row`` has been removed."""
        self._forget_prefixes(row)
        self._caches.pop(row, None)
        self.set_feed_state(row, is_whole=None)
        if self.kv_index is not None:
            self.kv_index.forget(row)

    def tokens_held(self, row: int) -> int:
        """Tokens of prompts that the endpoint of ``row`` has cached: by its events if they are complete, else by the
        approximate index.
        """
        if self.kv_index is not None and self.whole_feeds >> row & 1:
            return self.kv_index.blocks_held(row) * self._block_tokens
        return int(self.index.bytes_held(row) / self.bytes_per_token)

    def configure(self, *, has_events: bool, tiers: Mapping[str, float]) -> None:
        """Whether engines send KV events; caches with a capacity of their own, in tokens by name. What stays is
        kept.
        """
        self.kv_index = (self.kv_index or KvIndex()) if has_events else None
        if self._tiers is None or self._tiers.capacities != tiers:
            self._tiers = self._new_tiers(tiers) if tiers else None

    def limit_blocks(self, most_blocks: int, *, of_source: int) -> None:
        """Limit what is kept of an endpoint in each approximate index, and of a source of KV events in the precise
        one.
        """
        self._most_blocks = self.index.most_blocks = most_blocks
        if self._tiers is not None:
            self._tiers.limit_blocks(most_blocks)
        if self.kv_index is not None:
            self.kv_index.limit_blocks(of_source)

    def set_cache_config(self, row: int, cache: CacheConfig) -> None:
        """Record the block size and capacity that the engine of ``row`` reports."""
        if self._caches.get(row) == cache:
            return
        self._caches[row] = cache
        self._block_tokens = min(one.block_tokens for one in self._caches.values())
        self.fit_block_size()
        self._set_capacity(row)

    def on_cache_lost(self, row: int) -> None:
        """The engine of ``row`` has restarted with an empty cache."""
        self._forget_prefixes(row)
        self._set_capacity(row)

    def set_feed_state(self, row: int, *, is_whole: bool | None) -> None:
        """Set whether the feed of KV events of ``row`` is complete or has missed events; None: there is no feed."""
        bit = 1 << row
        self.whole_feeds &= ~bit
        self.partial_feeds &= ~bit
        if is_whole:
            self.whole_feeds |= bit
        elif is_whole is False:
            self.partial_feeds |= bit

    def fit_block_size(self) -> None:
        """Match the size of text blocks to the engines' token blocks, rounded to a power of two.

        A new size means a new index, so it changes only when the ideal size is off by a factor of 1.6.
        """
        if not self._caches:
            return
        low, high = _BLOCK_BYTES_BOUNDS
        ideal = self._block_tokens * self.bytes_per_token
        size = min(high, max(low, 1 << round(math.log2(max(ideal, 1.0)))))
        current = self.index.first_block_bytes
        if size != current and not current / 1.6 < ideal < current * 1.6:
            if self.index.distinct_block_count:
                # what was sent so far is only in the index of the old size
                self._previous, self._previous_uses = self.index, _PREVIOUS_USES
                self._previous_ends_s = math.inf
            self.index = self._new_index(size)
            if self._tiers is not None:
                self._tiers = self._new_tiers(self._tiers.capacities)
            for row in self._caches:
                self._set_capacity(row)

    def estimate_prompt(
        self, prompt: Prompt, table: EndpointTable, now: float, *, chain: list[int] | None = None
    ) -> PromptExpectation:
        """What each endpoint probably has cached of ``prompt``, and what it would have to compute. ``chain``: its block
        hashes, if they are known.
        """
        seed = f"{prompt.model}\0{prompt.scope}\0{prompt.salt}" if prompt.scope or prompt.salt else prompt.model
        if chain is None:
            chain = hash_blocks(prompt.text, seed, self.index.first_block_bytes)
        input_tokens = max(len(prompt.text) / self.bytes_per_token, 1.0)
        if prompt.tokens is not None:
            input_tokens = float(max(len(prompt.tokens), 1))
        rows = len(table.addresses)
        cached = np.zeros(rows)
        unit = self.index.first_block_bytes
        tail, matches = prompt_tail(prompt.text, COVERED_UNITS[len(chain)] * unit), self.index.match(chain)
        for match in matches:
            covered = COVERED_UNITS[match.blocks] * unit
            held = self._round_to_blocks(covered / self.bytes_per_token, input_tokens)
            cached[rows_of_bitmask(match.holders, rows)] = held
            if chain[match.blocks - 1] in self.index.turns.by_block:
                self._add_turns(prompt, match, chain, covered, cached, input_tokens)
        if self._previous is not None:
            self._add_previous(self._previous, prompt.text, seed, cached, input_tokens, now)
        kv_chains = None
        if self.kv_index is not None:
            kv_chains = self._add_precise(self.kv_index, prompt, cached, input_tokens, now)
        work = self.prompt_cost.prefill_work(input_tokens - cached, cached)
        step_s = self.output_tokens * self.answer_cost.step_s_per_token
        tiers: Mapping[str, Floats] = {}
        if self._tiers is not None:
            ratio = self.bytes_per_token
            tiers = self._tiers.held_tokens(chain, rows, lambda size: self._round_to_blocks(size / ratio, input_tokens))
        demand = RequestDemandByRow(cached, work, step_s, tiers)
        return PromptExpectation(chain, kv_chains, matches, input_tokens, demand, tail)

    def indexed_tokens(self, expectation: PromptExpectation, row: int) -> tuple[float, float | None]:
        """The tokens in whole blocks that were sent to ``row`` before, and when the last block was used.

        The time in seconds is None if no block was sent there.
        """
        longest = max((match.blocks for match in expectation.matches if match.holders >> row & 1), default=0)
        if not longest:
            return 0.0, None
        tokens = COVERED_UNITS[longest] * self.index.first_block_bytes / self.bytes_per_token
        return self._round_to_blocks(tokens, expectation.input_tokens), self.index.last_use(
            row, expectation.chain, longest - 1
        )

    def record_sent(self, row: int, expectation: PromptExpectation, now: float) -> BlockPin:
        """The prompt is sent to the endpoint of ``row``, which will have it cached; returns what it holds there."""
        pin = self.pin(row, expectation.chain, now)
        if self.kv_index is not None and expectation.kv_chains is not None:
            self.kv_index.assume_held(row, expectation.kv_chains, now)
        return pin

    def pin(self, row: int, chain: list[int], now: float) -> BlockPin:
        """A prompt with this chain is sent to ``row``; returns what it holds there until its end."""
        if self._tiers is not None:
            self._tiers.record(row, chain, now)
        return self.index.pin(row, chain, now)

    def record(self, row: int, chain: list[int], now: float) -> None:
        """The endpoint of ``row`` has served a prompt with this chain."""
        self.index.unpin(row, self.pin(row, chain, now), now)

    def last_use_of(self, row: int, chain: Sequence[int], tokens: float) -> float | None:
        """When the endpoint of ``row`` last used the block of ``chain`` that contains token number ``tokens``."""
        length = tokens * self.bytes_per_token
        blocks = bisect_right(range(len(chain) + 1), length, key=self.index.covered_bytes) - 1
        return self.index.last_use(row, chain, blocks - 1) if blocks > 0 else None

    def _forget_prefixes(self, row: int) -> None:
        self.index.forget(row)
        if self._tiers is not None:
            self._tiers.forget_endpoint(row)
        if self._previous is not None:
            self._previous.forget(row)

    def _set_capacity(self, row: int) -> None:
        cache = self._caches.get(row)
        if cache is not None:
            self.index.set_capacity(row, cache.total_tokens * self.bytes_per_token)

    def _round_to_blocks(self, tokens: float, input_tokens: float) -> float:
        """Tokens in whole blocks, without the last one of the prompt: engines always compute that."""
        return float(min(tokens, input_tokens - 1.0) // self._block_tokens * self._block_tokens)

    def _add_turns(
        self,
        prompt: Prompt,
        match: PrefixMatch,
        chain: Sequence[int],
        covered: int,
        cached: Floats,
        input_tokens: float,
    ) -> None:
        """Add cached tokens of conversation turns that go on behind a match, which covers so many bytes."""
        for row, held in self.index.turns.rows_of_earlier_turns(
            chain[match.blocks - 1], memoryview(prompt.text)[covered:]
        ):
            tokens = self._round_to_blocks((covered + held) / self.bytes_per_token, input_tokens)
            if match.holders >> row & 1 and tokens > cached[row]:
                cached[row] = tokens

    def _add_previous(
        self, previous: PrefixIndex, text: bytes, seed: str, cached: Floats, input_tokens: float, now: float
    ) -> None:
        """Add matches from the index of the old block size."""
        matches = previous.match(hash_blocks(text, seed, previous.first_block_bytes))
        for match in matches:
            holders = rows_of_bitmask(match.holders, cached.size)
            held = self._round_to_blocks(previous.covered_bytes(match.blocks) / self.bytes_per_token, input_tokens)
            cached[holders] = np.maximum(cached[holders], held)
        self._previous_uses -= 1
        self._previous_ends_s = min(self._previous_ends_s, now + _PREVIOUS_S)
        if not self._previous_uses or now >= self._previous_ends_s:
            self._previous = None

    def _add_precise(
        self, kv_index: KvIndex, prompt: Prompt, cached: Floats, input_tokens: float, now: float
    ) -> dict[int, list[int]] | None:
        """Apply the precise index to ``cached``; returns the prompt's keys, None if the index cannot be used."""
        if prompt.tokens is None or not self.whole_feeds | self.partial_feeds:
            return None
        chains = kv_index.block_keys(prompt.tokens, adapter=prompt.adapter, salt=prompt.salt)
        precise = np.zeros(cached.size)
        for found in kv_index.match(chains, now):
            holders = rows_of_bitmask(found.holders, cached.size)
            precise[holders] = np.maximum(
                precise[holders], min(found.weighted, self._round_to_blocks(found.tokens, input_tokens))
            )
        whole = rows_of_bitmask(self.whole_feeds, cached.size)
        cached[whole] = precise[whole]
        partial = rows_of_bitmask(self.partial_feeds, cached.size)
        cached[partial] = np.maximum(cached[partial], precise[partial])
        return chains

    def _new_tiers(self, capacities: Mapping[str, float]) -> TieredPrefixIndexes:
        size = self.index.first_block_bytes
        tiers = TieredPrefixIndexes(capacities, bytes_per_token=self.bytes_per_token, first_block_bytes=size)
        tiers.limit_blocks(self._most_blocks)
        return tiers

    def _new_index(self, first_block_bytes: int) -> PrefixIndex:
        return PrefixIndex(_INITIAL_CACHE_TOKENS * INITIAL_BYTES_PER_TOKEN, first_block_bytes, self._most_blocks)
