"""The engines of one ModelServer with all that is known of them; one call assigns a request to an ordered list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from extproc.endpoints.ledger import backlog_of, charge, prefill_work
from extproc.endpoints.table import EndpointTable, Place
from extproc.prefix.hashing import covered_bytes
from extproc.prefix.index import PrefixIndex
from extproc.scheduling.picker import Demand, RequestFacts, View
from extproc.scheduling.prefix_aware import PrefixAware, PrefixAwareParameters
from extproc.scheduling.round_robin import RoundRobin

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from extproc.config.types import ModelServerSpec
    from extproc.prefix.index import Match
    from extproc.scheduling.picker import Picker

    MakePicker = Callable[[ModelServerSpec], Picker]

# English text and code in JSON, until the engines' reported usage says better.
_INITIAL_BYTES_PER_TOKEN: Final = 4.0
# About what an 80 GB GPU with an 8B model, or four with a 70B one, hold; corrected by what engines report.
_INITIAL_CACHE_TOKENS: Final = 400_000
_CHOICES: Final = 4


class Assignment(msgspec.Struct, frozen=True):
    """A pick and its explanation. ``addresses``: first choice, then fallbacks.

    ``cached_since_s``: when the last block that is thought to be cached was last used there. ``tokens_ahead``: prefill
    work of this request and of those before it.
    """

    place: Place
    addresses: tuple[str, ...]
    input_tokens: float
    cached_tokens: float
    cached_since_s: float | None
    tokens_ahead: float
    cost_s: float


class Prompt(msgspec.Struct, frozen=True):
    """What is to be assigned: the chain of block hashes, the size, the model's name in the engines, and the headers."""

    chain: Sequence[int]
    size_bytes: int
    model: str
    headers: Mapping[str, str] = {}


class Pool:
    """One ModelServer's endpoint table, prefix index and picker, and what its tokenizer makes of text."""

    def __init__(self, name: str, spec: ModelServerSpec, make_picker: MakePicker) -> None:
        self.name = name
        self._make_picker = make_picker
        self.spec = spec
        self.table = EndpointTable()
        self.index = PrefixIndex(_INITIAL_CACHE_TOKENS * _INITIAL_BYTES_PER_TOKEN)
        self.bytes_per_token = _INITIAL_BYTES_PER_TOKEN
        self.typical_ttft_s = 0.0
        self.reports_cached_tokens = False
        self._picker = make_picker(spec)
        self.update(spec)

    def update(self, spec: ModelServerSpec) -> None:
        """Follow the configuration; endpoints that stay keep all that is known of them."""
        if spec.picker != self.spec.picker:
            self._picker = self._make_picker(spec)
        self.spec = spec
        for row in self.table.replace(endpoint.address for endpoint in spec.endpoints):
            self.index.forget(row)

    def assign(self, prompt: Prompt, *, now: float, rng: random.Random) -> Assignment:
        """Choose endpoints for a prompt and count it as theirs; raises NoEndpoint."""
        chain = prompt.chain
        input_tokens = prompt.size_bytes / self.bytes_per_token
        matches = self.index.match(chain)
        demand = self._demand(matches, input_tokens)
        adapter = prompt.model if prompt.model != self.spec.model else None
        facts = RequestFacts(prompt.model, input_tokens, adapter, prompt.headers)
        pick = self._picker.pick(View(self.table, demand, facts, now), rng=rng)
        first = pick.rows[0]
        if not matches:
            self.table.cold_at_s[first] = now
        cached, work = float(demand.cached_tokens[first]), float(demand.work[first])
        tokens_ahead = backlog_of(self.table, first, now) + work
        cached_since_s = self._cached_since(matches, chain, first)
        self.index.record(first, chain, now)
        return Assignment(
            place=charge(self.table, first, prefill_tokens=work, now=now),
            addresses=tuple(self.table.addresses[row] for row in pick.rows),
            input_tokens=input_tokens,
            cached_tokens=cached,
            cached_since_s=cached_since_s,
            tokens_ahead=tokens_ahead,
            cost_s=pick.cost_s,
        )

    def _demand(self, matches: list[Match], input_tokens: float) -> Demand:
        rows = len(self.table.addresses)
        cached_tokens, work = np.zeros(rows), np.full(rows, prefill_work(input_tokens, 0.0))
        for match in matches:
            held = min(covered_bytes(match.blocks) / self.bytes_per_token, input_tokens - 1.0)
            holders = _rows_of(match.holders, rows)
            cached_tokens[holders] = held
            work[holders] = prefill_work(input_tokens - held, held)
        return Demand(cached_tokens, work)

    def _cached_since(self, matches: list[Match], chain: Sequence[int], row: int) -> float | None:
        longest = max((match.blocks for match in matches if match.holders >> row & 1), default=0)
        return self.index.last_use(row, chain[longest - 1]) if longest else None


# One after the other, requests of a conversation meet the same few sets of holders.
@lru_cache(maxsize=1024)
def _rows_of(holders: int, rows: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """A bit mask as an index of columns."""
    raw = np.frombuffer(holders.to_bytes((rows + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=rows, bitorder="little").nonzero()[0]


def default_picker(spec: ModelServerSpec) -> Picker:
    """The picker that a ModelServer names."""
    if spec.picker == "RoundRobin":
        return RoundRobin(_CHOICES)
    return PrefixAware(PrefixAwareParameters(choices=_CHOICES))
