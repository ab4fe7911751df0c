"""Results to the numbers that people compare: TTFT, TPOT, cached-token ratio, tokens per second."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.client import Result


class Distribution(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True):
    """Of one run. Times are engine time: the wall clock's times the speed."""

    requests: int
    errors: tuple[str, ...]
    ttft: Distribution
    tpot: Distribution
    prompt_tokens: int
    cached_token_ratio: float
    output_tokens_per_s: float
    duration_s: float


def ttfts(results: Sequence[Result], speed: float) -> list[float]:
    """Seconds from when a request was due to its first token, of good answers."""
    return [(one.first_token_s - one.due_s) * speed for one in results if not one.error]


def tpots(results: Sequence[Result], speed: float) -> list[float]:
    """Seconds per output token after the first, of good answers with more than one: vLLM's definition."""
    return [
        (one.last_token_s - one.first_token_s) / (one.output_tokens - 1) * speed
        for one in results
        if not one.error and one.output_tokens > 1
    ]


def summarize(results: Sequence[Result], speed: float) -> Summary:
    """Errors are counted and kept apart: only good answers have times."""
    good = [one for one in results if not one.error]
    prompt_tokens = sum(one.prompt_tokens for one in good)
    duration_s = max((one.last_token_s for one in good), default=0.0) * speed
    return Summary(
        requests=len(results),
        errors=tuple(one.error for one in results if one.error),
        ttft=distribution(ttfts(results, speed)),
        tpot=distribution(tpots(results, speed)),
        prompt_tokens=prompt_tokens,
        cached_token_ratio=sum(one.cached_tokens for one in good) / prompt_tokens if prompt_tokens else 0.0,
        output_tokens_per_s=sum(one.output_tokens for one in good) / duration_s if duration_s else 0.0,
        duration_s=duration_s,
    )


def distribution(values: Sequence[float]) -> Distribution:
    """Percentiles by the nearest rank; all 0 without values."""
    if not values:
        return Distribution(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(values)
    return Distribution(sum(ordered) / len(ordered), *(rank(ordered, share) for share in (0.5, 0.9, 0.99)))


def rank(ordered: Sequence[float], share: float) -> float:
    """The percentile by the nearest rank of values in their order, of which there is one at least."""
    return ordered[math.ceil(share * len(ordered)) - 1]
