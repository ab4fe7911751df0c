"""The least time to the first token that any picking could give: an idle engine that holds all that anybody has sent before.

What a request takes beyond that, its excess, is what a picker can change; of a prompt of 100,000 tokens that is little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.engine.hardware import API_S
from bench.engine.step_time import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.virtual.engines import Kind


class LowerBound:
    """``kind``: the fastest engine there is."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._seen: set[int] = set()
        self._seconds: dict[tuple[int, int], float] = {}

    def seconds(self, place: tuple[int, int]) -> float:
        """Of the request with this place; 0 if it was never decided on."""
        return self._seconds.get(place, 0.0)

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """Their state does not matter."""

    def arrives(self, request: Request, place: tuple[int, int], now: float) -> None:
        """Reckon, and remember its blocks."""
        del now
        hashes = request.text.hashes
        known = next((at for at, value in enumerate(hashes) if value not in self._seen), len(hashes))
        self._seen.update(hashes)
        size = self._kind.limits.block_size
        cached = min(known, (request.prompt_tokens - 1) // size) * size
        self._seconds[place] = API_S + self._prefill_s(request.prompt_tokens - cached, cached)

    def sent(self, request: Request, address: str, now: float) -> None:
        """Nothing to do with it."""

    def first_token(self, request: Request, now: float) -> None:
        """Nor with when it really came."""

    def ended(self, request: Request, now: float) -> None:
        """Its answer is known from now on, too."""
        del now
        self._seen.update(request.text.hashes)

    def _prefill_s(self, tokens: int, history: int) -> float:
        seconds = 0.0
        while tokens > 0:
            chunk = min(tokens, self._kind.limits.max_num_batched_tokens)
            seconds += self._kind.speed.seconds(Batch(1, chunk, chunk * (history + chunk / 2), 0, 0))
            tokens, history = tokens - chunk, history + chunk
        return seconds
