# SPDX-License-Identifier: Apache-2.0
"""How many input tokens to reserve for a prompt that has not been tokenized.

    reserve = margin * (bytes / bytes_per_token + extra)

``extra`` is the number of tokens that the chat template adds, learned from short prompts. ``margin`` is the factor by
which long prompts exceed what their bytes predict. Both rise at once to what an answer reports and decay slowly, so
estimates are rarely too low; what is reserved in excess is refunded.
"""

from __future__ import annotations

from typing import Final

_INITIAL_EXTRA: Final = 16.0
_MAX_EXTRA: Final = 512.0
_INITIAL_MARGIN: Final = 1.1
_MARGIN_BOUNDS: Final = (1.0, 4.0)
# Prompts shorter than this teach ``extra``, the others ``margin``.
_SHORT_TOKENS: Final = 256
_DECAY: Final = 0.005


class InputEstimate:
    """The estimate for the prompts of one model."""

    def __init__(self) -> None:
        self._extra = _INITIAL_EXTRA
        self._margin = _INITIAL_MARGIN

    def tokens(self, prompt_bytes: int, bytes_per_token: float) -> float:
        """Tokens to reserve for a prompt of ``prompt_bytes`` bytes."""
        return self._margin * (prompt_bytes / bytes_per_token + self._extra)

    def learn(self, *, prompt_bytes: int, bytes_per_token: float, tokens: int) -> None:
        """Update the estimate from a prompt of ``tokens`` tokens."""
        plain = prompt_bytes / bytes_per_token
        if tokens < _SHORT_TOKENS:
            self._extra = min(_MAX_EXTRA, _rise_at_once(self._extra, max(0.0, tokens - plain)))
        else:
            low, high = _MARGIN_BOUNDS
            seen = tokens / (plain + self._extra)
            self._margin = min(high, max(low, _rise_at_once(self._margin, seen)))


def _rise_at_once(current: float, seen: float) -> float:
    return seen if seen > current else current + _DECAY * (seen - current)
