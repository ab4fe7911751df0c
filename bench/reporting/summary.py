# SPDX-License-Identifier: Apache-2.0
"""Results to the numbers that people compare: TTFT, TPOT, cache hits, throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.reporting.distribution import Distribution, distribution

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.reporting.results import RequestResult


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
