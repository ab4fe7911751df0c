# SPDX-License-Identifier: Apache-2.0
"""Results of requests, and what people compare of them: percentiles, TTFT, TPOT, cache hits, confidence intervals.

Requests of one burst meet the same queues, so they are not independent observations; windows of a trace, and seeds,
nearly are. Two policies meet the same requests, so their windows are drawn in pairs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DRAWS: Final = 2000
WINDOWS: Final = 12


class RequestResult(msgspec.Struct, frozen=True):
    """One request, from the instant at which it was due to its last token.

    ``due_at_s``, ``first_token_at_s`` and ``last_token_at_s`` are seconds since the start of the run, by the wall clock
    for the load client, by engine time for the simulation.

    ``error``: empty for a good answer. ``label``: the session's. ``engine``: the address that served it, if known.
    ``position``: the number of its session in the workload, and of its turn in the session. ``prefilled_by``: the
    address of the engine that computed its prompt, if another.
    """

    due_at_s: float
    first_token_at_s: float
    last_token_at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str = ""
    label: str = ""
    engine: str = ""
    position: tuple[int, int] = (0, 0)
    prefilled_by: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token. From when the request was due, so that a late client does not hide a slow server."""
        return self.first_token_at_s - self.due_at_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, as vLLM defines it; 0 for an answer of one token."""
        more = self.output_tokens - 1
        return (self.last_token_at_s - self.first_token_at_s) / more if more > 0 else 0.0

    @property
    def e2e_s(self) -> float:
        """From when the request was due to its last token."""
        return self.last_token_at_s - self.due_at_s


class Distribution(msgspec.Struct, frozen=True):
    """In the unit of the values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def distribution(values: Iterable[float]) -> Distribution:
    """All 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0.0, 0.0, 0.0, 0.0, 0.0)
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(mean, *(nearest_rank(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values by the nearest rank. ``share``: above 0, at most 1. Needs at least one value."""
    return ordered[math.ceil(share * len(ordered)) - 1]


class ConfidenceInterval(msgspec.Struct, frozen=True):
    """An estimate, and the bounds of 95% of its resampled values."""

    value: float
    low: float
    high: float


def split_into_windows(values: Sequence[float], count: int = WINDOWS) -> list[Sequence[float]]:
    """Cut values in the order of time into ``count`` windows of equal numbers."""
    edges = np.linspace(0, len(values), min(count, max(1, len(values))) + 1).astype(int)
    return [values[low:high] for low, high in itertools.pairwise(edges) if high > low]


def mean_interval(blocks: Sequence[Sequence[float]], *, seed: int = 0) -> ConfidenceInterval:
    """The interval of the mean of all values. ``blocks``: windows, which are drawn whole."""
    sums = np.array([float(np.sum(block)) for block in blocks])
    counts = np.array([len(block) for block in blocks], float)
    if not counts.sum():
        return ConfidenceInterval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).integers(0, len(blocks), (_DRAWS, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return ConfidenceInterval(float(sums.sum() / counts.sum()), float(low), float(high))


def ratio_interval(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], *, seed: int = 0
) -> ConfidenceInterval:
    """The interval of the mean of ``ours`` over that of ``theirs``, minus 1, from paired windows: -0.1 is ten percent
    less.
    """

    ours_sums = np.array([float(np.sum(block)) for block in ours])
    their_sums = np.array([float(np.sum(block)) for block in theirs])
    if not their_sums.sum():
        return ConfidenceInterval(0.0, 0.0, 0.0)
    drawn = np.random.default_rng(seed).integers(0, len(ours), (_DRAWS, len(ours)))
    ratios = ours_sums[drawn].sum(axis=1) / np.maximum(their_sums[drawn].sum(axis=1), 1e-12) - 1
    low, high = np.percentile(ratios, [2.5, 97.5])
    return ConfidenceInterval(float(ours_sums.sum() / their_sums.sum() - 1), float(low), float(high))


class Summary(msgspec.Struct, frozen=True):
    """One run. Times are engine time: those of the clock that measured, multiplied by the speed."""

    requests: int
    errors: tuple[str, ...]
    ttft_s: Distribution
    tpot_s: Distribution
    prompt_tokens: int
    cached_token_ratio: float
    output_tokens_per_s: float
    duration_s: float


def ttfts_s(results: Iterable[RequestResult], *, speed: float = 1.0) -> list[float]:
    """Times to first token of good answers."""
    return [one.ttft_s * speed for one in results if not one.error]


def tpots_s(results: Iterable[RequestResult], *, speed: float = 1.0) -> list[float]:
    """Times per output token of good answers with more than one token."""
    return [one.tpot_s * speed for one in results if not one.error and one.output_tokens > 1]


def cached_token_ratio(results: Iterable[RequestResult]) -> float:
    """The share of the prompt tokens of good answers that came from a KV cache, 0 to 1."""
    good = [one for one in results if not one.error]
    prompt_tokens = sum(one.prompt_tokens for one in good)
    return sum(one.cached_tokens for one in good) / prompt_tokens if prompt_tokens else 0.0


def summarize(results: Sequence[RequestResult], *, speed: float = 1.0) -> Summary:
    """Errors are counted; all other numbers are of good answers.

    ``speed``: engine seconds per second of the results.
    """
    good = [one for one in results if not one.error]
    duration_s = max((one.last_token_at_s for one in good), default=0.0) * speed
    return Summary(
        requests=len(results),
        errors=tuple(one.error for one in results if one.error),
        ttft_s=distribution(ttfts_s(good, speed=speed)),
        tpot_s=distribution(tpots_s(good, speed=speed)),
        prompt_tokens=sum(one.prompt_tokens for one in good),
        cached_token_ratio=cached_token_ratio(good),
        output_tokens_per_s=sum(one.output_tokens for one in good) / duration_s if duration_s else 0.0,
        duration_s=duration_s,
    )
