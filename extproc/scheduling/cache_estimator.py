"""What is known of the engines' caches, and what a prompt therefore asks of each engine.

Two indexes. The approximate one (``prefix/index.py``) remembers what was sent where. The precise one (``prefix/kv_index.py``)
is fed by the engines' own events; an endpoint whose feed is whole is judged by it alone, one whose feed began late or has
a gap by the better of both, one without a feed by the approximate index.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.answer_cost import AnswerCost
from extproc.endpoints.prompt_cost import PromptCost
from extproc.prefix.hashing import FIRST_BLOCK_BYTES, hash_blocks
from extproc.prefix.index import Match, PrefixIndex
from extproc.prefix.turns import Turns
from extproc.scheduling.picker import Demand

if TYPE_CHECKING:
    from extproc.endpoints.engine_reports import CacheConfig
    from extproc.endpoints.table import EndpointTable, Floats
    from extproc.prefix.kv_index import KvIndex

# English text and code in JSON, until the engines' reported usage says better.
INITIAL_BYTES_PER_TOKEN: Final = 4.0
# About what an 80 GB GPU with an 8B model, or four with a 70B one, hold; corrected by what engines report.
_INITIAL_CACHE_TOKENS: Final = 400_000
# For so many requests the index in blocks of the old size is asked, too.
_PREVIOUS_USES: Final = 2000
_BLOCK_BYTES_BOUNDS: Final = (32, 512)


class Prompt(msgspec.Struct, frozen=True):
    """What is to be assigned: text, the model's name in the engines, what parts caches (a salt, a tenant), and tokens if known."""

    text: bytes
    model: str
    adapter: str | None = None
    scope: str = ""
    salt: str | None = None
    tokens: Sequence[int] | None = None


class Expectation(msgspec.Struct, frozen=True):
    """A prompt against all that is known. ``matches``: who holds which whole blocks of it that were sent there before."""

    chain: Sequence[int]
    kv_chains: dict[int, list[int]] | None
    matches: Sequence[Match]
    input_tokens: float
    demand: Demand


class CacheEstimator:
    """One ModelServer's prefix indexes and what its tokenizer makes of text."""

    def __init__(self) -> None:
        self.bytes_per_token = INITIAL_BYTES_PER_TOKEN
        self.ratio_samples = 0
        self.prompt_cost = PromptCost()
        self.answer_cost = AnswerCost()
        # of an answer, until answers have said: the mean of Mooncake's conversations is 343, of Azure's 211, of its code 28
        self.output_tokens = 200.0
        self.index = self._new_index(FIRST_BLOCK_BYTES)
        self._previous: PrefixIndex | None = None
        self._previous_uses = 0
        self.turns = Turns()
        self.kv_index: KvIndex | None = None
        # bit masks of endpoints by the state of their feed of KV events
        self.whole_feeds = 0
        self.partial_feeds = 0
        self._caches: dict[int, CacheConfig] = {}
        self._block_tokens = 1

    def forget(self, row: int) -> None:
        """The endpoint of ``row`` is gone."""
        self._forget_prefixes(row)
        self._caches.pop(row, None)
        self.set_feed_state(row, is_whole=None)
        if self.kv_index is not None:
            self.kv_index.forget(row)

    def set_cache_config(self, row: int, cache: CacheConfig) -> None:
        """The engine of ``row`` says how its cache is made."""
        if self._caches.get(row) == cache:
            return
        self._caches[row] = cache
        self._block_tokens = min(one.block_tokens for one in self._caches.values())
        self.fit_blocks()
        self._set_capacity(row)

    def cache_lost(self, row: int) -> None:
        """The engine of ``row`` has begun anew, with an empty cache."""
        self._forget_prefixes(row)
        self._set_capacity(row)

    def set_feed_state(self, row: int, *, is_whole: bool | None) -> None:
        """The feed of KV events of ``row`` is whole, or has missed something; None: there is none."""
        bit = 1 << row
        self.whole_feeds &= ~bit
        self.partial_feeds &= ~bit
        if is_whole:
            self.whole_feeds |= bit
        elif is_whole is False:
            self.partial_feeds |= bit

    def fit_blocks(self) -> None:
        """Blocks of text as large as the engines' blocks of tokens, to a power of two; only a factor of two begins anew."""
        if not self._caches:
            return
        low, high = _BLOCK_BYTES_BOUNDS
        queued = self._block_tokens * self.bytes_per_token
        size = min(high, max(low, 1 << round(math.log2(max(queued, 1.0)))))
        current = self.index.first_block_bytes
        if size != current and not current / 1.6 < queued < current * 1.6:
            # what was sent so far is still known in blocks of the old size
            self._previous, self._previous_uses = self.index, _PREVIOUS_USES
            self.index = self._new_index(size)
            self.turns = Turns()
            for row in self._caches:
                self._set_capacity(row)

    def expect(self, prompt: Prompt, table: EndpointTable, now: float) -> Expectation:
        """What each endpoint holds of ``prompt`` and would have to compute."""
        seed = f"{prompt.model}\0{prompt.scope}\0{prompt.salt}" if prompt.scope or prompt.salt else prompt.model
        chain = hash_blocks(prompt.text, seed, self.index.first_block_bytes)
        input_tokens = max(len(prompt.text) / self.bytes_per_token, 1.0)
        if prompt.tokens is not None:
            input_tokens = float(max(len(prompt.tokens), 1))
        rows = len(table.addresses)
        cached, work = np.zeros(rows), np.full(rows, self.prompt_cost.work(input_tokens, 0.0))
        matches = self.index.match(chain)
        for match in matches:
            held = self._whole(self.index.covered_bytes(match.blocks) / self.bytes_per_token, input_tokens)
            holders = rows_of_bitmask(match.holders, rows)
            cached[holders], work[holders] = held, self.prompt_cost.work(input_tokens - held, held)
        more = self._add_turns(prompt, matches, chain, cached, input_tokens)
        if self._previous is not None:
            more = self._add_previous(self._previous, prompt.text, seed, cached, input_tokens) or more
        kv_chains = self._add_precise(prompt, cached, input_tokens, now)
        if more or kv_chains is not None:
            work = self.prompt_cost.work(input_tokens - cached, cached)
        return Expectation(
            chain,
            kv_chains,
            matches,
            input_tokens,
            Demand(cached, work, self.output_tokens * self.answer_cost.step_s_per_token),
        )

    def indexed_tokens(self, expectation: Expectation, row: int) -> tuple[float, float | None]:
        """Of what the endpoint of ``row`` holds: the whole blocks that were sent there, and when the last was used."""
        longest = max((match.blocks for match in expectation.matches if match.holders >> row & 1), default=0)
        if not longest:
            return 0.0, None
        tokens = self.index.covered_bytes(longest) / self.bytes_per_token
        return self._whole(tokens, expectation.input_tokens), self.index.last_use(row, expectation.chain[longest - 1])

    def sent(self, row: int, expectation: Expectation, now: float) -> None:
        """The prompt goes to the endpoint of ``row``: it will hold it."""
        self.index.pin(row, expectation.chain, now)
        if self.kv_index is not None and expectation.kv_chains is not None:
            self.kv_index.speculate(row, expectation.kv_chains, now)

    def last_use_of(self, row: int, chain: Sequence[int], tokens: float) -> float | None:
        """When the endpoint of ``row`` last used the block with which the first ``tokens`` of a chain end."""
        length = tokens * self.bytes_per_token
        blocks = bisect_right(range(len(chain) + 1), length, key=self.index.covered_bytes) - 1
        return self.index.last_use(row, chain[blocks - 1]) if blocks > 0 else None

    def _forget_prefixes(self, row: int) -> None:
        self.index.forget(row)
        if self._previous is not None:
            self._previous.forget(row)

    def _set_capacity(self, row: int) -> None:
        cache = self._caches.get(row)
        if cache is not None:
            self.index.set_capacity(row, cache.total_tokens * self.bytes_per_token)

    def _whole(self, tokens: float, input_tokens: float) -> float:
        """Engines know whole blocks, and always compute the last token."""
        return float(min(tokens, input_tokens - 1.0) // self._block_tokens * self._block_tokens)

    def _add_turns(
        self, prompt: Prompt, matches: Sequence[Match], chain: Sequence[int], cached: Floats, input_tokens: float
    ) -> bool:
        """Whether anybody holds more than whole blocks."""
        found = False
        for match in matches:
            covered = self.index.covered_bytes(match.blocks)
            for row, held in self.turns.continued(chain[match.blocks - 1], memoryview(prompt.text)[covered:]):
                tokens = self._whole((covered + held) / self.bytes_per_token, input_tokens)
                if match.holders >> row & 1 and tokens > cached[row]:
                    cached[row], found = tokens, True
        return found

    def _add_previous(self, previous: PrefixIndex, text: bytes, seed: str, cached: Floats, input_tokens: float) -> bool:
        """Whether the index in blocks of the old size knows of anybody."""
        matches = previous.match(hash_blocks(text, seed, previous.first_block_bytes))
        for match in matches:
            holders = rows_of_bitmask(match.holders, cached.size)
            held = self._whole(previous.covered_bytes(match.blocks) / self.bytes_per_token, input_tokens)
            cached[holders] = np.maximum(cached[holders], held)
        self._previous_uses -= 1
        if not self._previous_uses:
            self._previous = None
        return bool(matches)

    def _add_precise(
        self, prompt: Prompt, cached: Floats, input_tokens: float, now: float
    ) -> dict[int, list[int]] | None:
        if self.kv_index is None or prompt.tokens is None or not self.whole_feeds | self.partial_feeds:
            return None
        chains = self.kv_index.keys(prompt.tokens, adapter=prompt.adapter, salt=prompt.salt)
        told = np.zeros(cached.size)
        for found in self.kv_index.match(chains, now):
            holders = rows_of_bitmask(found.rows, cached.size)
            told[holders] = np.maximum(told[holders], min(found.weighted, self._whole(found.tokens, input_tokens)))
        whole = rows_of_bitmask(self.whole_feeds, cached.size)
        cached[whole] = told[whole]
        partial = rows_of_bitmask(self.partial_feeds, cached.size)
        cached[partial] = np.maximum(cached[partial], told[partial])
        return chains

    def _new_index(self, first_block_bytes: int) -> PrefixIndex:
        return PrefixIndex(_INITIAL_CACHE_TOKENS * INITIAL_BYTES_PER_TOKEN, first_block_bytes)


# One after the other, requests of a conversation meet the same few sets of holders.
@lru_cache(maxsize=1024)
def rows_of_bitmask(mask: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """A bit mask as an index of columns."""
    raw = np.frombuffer((mask & (1 << rows) - 1).to_bytes((rows + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=rows, bitorder="little").nonzero()[0]
