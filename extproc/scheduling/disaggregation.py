# SPDX-License-Identifier: Apache-2.0
"""Whether another engine prefills a prompt, and the seconds that its KV cache takes from one to the other.

    local(d)  = cost(d) + stall * work(d) * (running(d) + 1) / rate(d)
    remote(d) = min over prefill endpoints p of d's group (cost(p)) + transfer(p, d) + load(d)

=================  ========  ====================================================================
symbol             unit      meaning
=================  ========  ====================================================================
``cost(e)``        s         the default picker's cost of the prompt at e: what waits there and its own work
``load(d)``        s         the part of that cost that the answer has, wherever its prompt is computed
``work(d)``        tokens    prefill work of the prompt at d: uncached tokens and attention
``running(d)``     requests  in flight at d; their answers stop while d prefills, and so does the one expected next
``rate(d)``        tokens/s  learned prefill rate of d
``transfer(p, d)`` s         bytes of what is uncached at d over the bandwidth of the pair, and a fixed part
``stall``          0.2       weight of a second by which a running answer is stopped
=================  ========  ====================================================================

A prompt is prefilled by another engine if that costs less and at least ``min_uncached_tokens`` of it are uncached where
it would be decoded. So short and cached prompts stay, a long prompt leaves an engine that writes many answers, and
decode engines help when the queues of prefill engines grow: a fleet with too few prefill engines is then no worse than
one of whole engines.

When the prefill has ended, the decode endpoint is chosen once more by what is known then: no decode endpoint has had
the request yet. The one that was picked stays unless another one is clearly better (``choose_decode``).

The transfer is learned, because neither the bytes of a token nor the bandwidth of a pair are known here. All pairs
share a line over the tokens; each pair has a factor, so that a slow link is avoided.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec
import numpy as np

from extproc.endpoints.learned_speeds import Number, RelativeLeastSquares
from extproc.endpoints.table import Bools, Floats

# Before anything is measured: an 8B model with grouped-query attention, over one adapter of 100 Gbit/s.
_PRIOR_BYTES_PER_TOKEN: Final = 131_072
_PRIOR_BANDWIDTH: Final = 12.5e9
_PRIOR_FIXED_S: Final = 0.03
_PRIOR_TOKENS: Final = (1_000.0, 10_000.0, 50_000.0)
_PRIOR_WEIGHT: Final = 1.0
# The weight of one more transfer in the factor of its pair, and the bounds of that.
_PAIR_WEIGHT: Final = 0.1
_FACTOR_BOUNDS: Final = (0.1, 100.0)
# Anything else was not measured.
_TOKENS_BOUNDS: Final = (1.0, 1e8)
_SECONDS_BOUNDS: Final = (1e-5, 1e4)
_MOST_PAIRS: Final = 4096
# After a prefill, another decode endpoint must cost less by that: two requests in flight, and a tenth.
_DECODE_MARGIN_S: Final = 0.01
_DECODE_MARGIN_SHARE: Final = 0.1


class TransferTimes:
    """Seconds from the end of a prefill to the first token at the decode endpoint, learned from such requests.

        seconds = (fixed_s + s_per_token * tokens) * factor of the pair

    At most 4,096 pairs have a factor; the one that was learned from least recently goes first.
    """

    def __init__(self) -> None:
        self.fixed_s = _PRIOR_FIXED_S
        self.s_per_token = _PRIOR_BYTES_PER_TOKEN / _PRIOR_BANDWIDTH
        self._fit = RelativeLeastSquares(2)
        for tokens in _PRIOR_TOKENS:
            self._fit.add_prior(_features(tokens), self.typical_s(tokens), weight=_PRIOR_WEIGHT / len(_PRIOR_TOKENS))
        # of pairs of addresses, in the order in which they were learned from last
        self._factors: dict[tuple[str, str], float] = {}

    def seconds(self, tokens: float, prefill: str, decode: str) -> float:
        """Of ``tokens`` tokens between two addresses."""
        return float(self.typical_s(tokens)) * self.factor(prefill, decode)

    @property
    def has_factors(self) -> bool:
        """Whether any pair was measured."""
        return bool(self._factors)

    def factor(self, prefill: str, decode: str) -> float:
        """Of a pair of addresses; 1 if it was not measured."""
        return self._factors.get((prefill, decode), 1.0)

    def learn(self, prefill: str, decode: str, *, tokens: float, seconds: float) -> None:
        """Update the estimate from one transfer of ``tokens`` tokens that took ``seconds``."""
        (fewest, most), (shortest_s, longest_s) = _TOKENS_BOUNDS, _SECONDS_BOUNDS
        if not (fewest <= tokens <= most and shortest_s <= seconds <= longest_s):
            return
        low, high = _FACTOR_BOUNDS
        pair = (prefill, decode)
        factor = self._factors.pop(pair, 1.0)
        ratio = min(high, max(low, seconds / self.typical_s(tokens)))
        self._factors[pair] = min(high, max(low, factor * (ratio / factor) ** _PAIR_WEIGHT))
        if len(self._factors) > _MOST_PAIRS:
            del self._factors[next(iter(self._factors))]
        found = self._fit.learn(_features(tokens), seconds, weight=1.0)
        if found is not None:
            fixed_s, s_per_thousand = found
            # never negative, and never free: a transfer of no time would make every prompt leave
            self.fixed_s = max(1e-3, fixed_s)
            self.s_per_token = max(1e-9, s_per_thousand / 1000)

    def typical_s(self, tokens: Number) -> Number:
        """Of a pair that was not measured."""
        return self.fixed_s + self.s_per_token * tokens


def _features(tokens: float) -> list[float]:
    return [1.0, tokens / 1e3]


class PrefillCosts(msgspec.Struct, frozen=True):
    """Both choices for a prompt, by row of the decode endpoints; other rows may hold anything.

    | field | unit | meaning |
    |---|---|---|
    | `uncached_tokens` | tokens | of the prompt, at the decode endpoint |
    | `local_s` | s | cost if the decode endpoint prefills |
    | `stalled_s` | s | by which its running answers would be stopped, all together |
    | `prefill_s` | s | cost at the cheapest prefill endpoint of its group; infinite if there is none |
    | `waiting` | requests | without a first token at that prefill endpoint |
    | `transfer_s` | s | from there to the decode endpoint |
    | `load_s` | s | cost of the answer at the decode endpoint |
    """

    uncached_tokens: Floats
    local_s: Floats
    stalled_s: Floats
    prefill_s: Floats
    waiting: Floats
    transfer_s: Floats
    load_s: Floats


def choose_decode(cost_s: Floats, kept: int | None) -> int:
    """The row of the decode endpoint: ``kept``, unless another one is clearly better. ``cost_s``: by row."""
    best = int(cost_s.argmin())
    if kept is None:
        return best
    saved_s = cost_s[kept] - cost_s[best]
    return best if saved_s > _DECODE_MARGIN_S + _DECODE_MARGIN_SHARE * cost_s[kept] else kept


class PrefillDecision(msgspec.Struct, frozen=True):
    """By row. ``is_remote``: another engine prefills. ``is_short``: no other, for the prompt lacks too few tokens.
    ``cost_s``: of the request, as decided.
    """

    is_remote: Bools
    is_short: Bools
    cost_s: Floats


class DisaggregationRule(Protocol):
    """Decides for every decode endpoint as if it were picked."""

    def __call__(self, choices: PrefillCosts) -> PrefillDecision:
        """Pure: the same for the same choices."""
        ...


class ExpectedSeconds(msgspec.Struct, frozen=True):
    """The module's formula."""

    min_uncached_tokens: float
    stall: float = 0.2

    def __call__(self, choices: PrefillCosts) -> PrefillDecision:
        """Another engine prefills where that costs less."""
        local_s = choices.local_s + self.stall * choices.stalled_s
        remote_s = choices.prefill_s + choices.transfer_s + choices.load_s
        is_short = choices.uncached_tokens < self.min_uncached_tokens
        is_remote = ~is_short & (remote_s < local_s)
        return PrefillDecision(is_remote, is_short, np.where(is_remote, remote_s, local_s))


class UncachedTokens(msgspec.Struct, frozen=True):
    """Another engine prefills what lacks at least ``min_uncached_tokens`` (llm-d's ``prefix-based-pd-decider``; 0:
    ``always-disagg-pd-decider``), unless ``max_waiting`` requests wait there (Dynamo's conditional disaggregation).
    """

    min_uncached_tokens: float
    max_waiting: float = float("inf")

    def __call__(self, choices: PrefillCosts) -> PrefillDecision:
        """The cost does not matter."""
        is_short = choices.uncached_tokens < self.min_uncached_tokens
        is_remote = ~is_short & np.isfinite(choices.prefill_s) & (choices.waiting < self.max_waiting)
        cost_s = np.where(is_remote, choices.load_s + choices.prefill_s, choices.local_s)
        return PrefillDecision(is_remote, is_short, cost_s)
