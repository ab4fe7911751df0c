"""How many tokens to reserve for a prompt whose tokens nobody has counted yet: rather too many, for the rest comes back.

    reserve = margin * (bytes / bytes_per_token + extra)

``extra`` is what a chat template adds, learned from short prompts; ``margin`` what long ones have beyond their bytes' due. Both
jump up to what an answer reports and come down slowly, so that an estimate is seldom too low.
"""

from __future__ import annotations

from typing import Final

_FIRST_EXTRA: Final = 16.0
_MOST_EXTRA: Final = 512.0
_FIRST_MARGIN: Final = 1.1
_MARGIN_BOUNDS: Final = (1.0, 4.0)
# Below it the template's tokens weigh more than what bytes say.
_SHORT_TOKENS: Final = 256
_DECAY: Final = 0.005


class InputEstimate:
    """Of one model's prompts."""

    def __init__(self) -> None:
        self._extra = _FIRST_EXTRA
        self._margin = _FIRST_MARGIN

    def tokens(self, prompt_bytes: int, bytes_per_token: float) -> float:
        """What to reserve."""
        return self._margin * (prompt_bytes / bytes_per_token + self._extra)

    def learn(self, prompt_bytes: int, bytes_per_token: float, tokens: int) -> None:
        """A prompt had so many."""
        plain = prompt_bytes / bytes_per_token
        if tokens < _SHORT_TOKENS:
            self._extra = min(_MOST_EXTRA, _up_at_once(self._extra, max(0.0, tokens - plain)))
        else:
            low, high = _MARGIN_BOUNDS
            seen = tokens / (plain + self._extra)
            self._margin = min(high, max(low, _up_at_once(self._margin, seen)))


def _up_at_once(held: float, seen: float) -> float:
    return seen if seen > held else held + _DECAY * (seen - held)
