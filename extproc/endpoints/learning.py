"""What outcomes teach about endpoints: how fast they prefill, and when to leave one alone for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.endpoints.table import EndpointTable

# The weight of one more answer: the mean of the first ones, then slowly forgetting.
_LEAST_WEIGHT: Final = 0.03
# Below this, time to first token is overhead and says nothing about the rate of prefill.
_MIN_TOKENS: Final = 512.0
_RATE_BOUNDS: Final = (200.0, 1_000_000.0)
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


def learn_prefill_rate(table: EndpointTable, row: int, *, tokens_ahead: float, ttft_s: float) -> None:
    """``tokens_ahead``: uncached input of the request and of those before it at the pick, all computed in ``ttft_s``."""
    if tokens_ahead < _MIN_TOKENS or ttft_s <= 0:
        return
    low, high = _RATE_BOUNDS
    rate = min(high, max(low, tokens_ahead / ttft_s))
    # the first answer and what was assumed weigh the same; in the logarithm: twice too high is as wrong as twice too low
    weight = max(_LEAST_WEIGHT, 1 / (2 + int(table.rate_samples[row])))
    table.prefill_rate[row] *= (rate / table.prefill_rate[row]) ** weight
    table.rate_samples[row] += 1
    table.assume_peers_rates()


def note_failure(table: EndpointTable, row: int, now: float) -> None:
    """The endpoint did not serve what it was given: avoid it, twice as long each time.

    A dead engine has no load, so it would look like the best choice for every request.
    """
    table.avoid_until_s[row] = now + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(int(table.failures[row]), 10))
    table.failures[row] += 1


def note_success(table: EndpointTable, row: int) -> None:
    """The endpoint serves."""
    table.failures[row] = 0
    table.avoid_until_s[row] = 0.0
