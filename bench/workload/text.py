"""Text of a given length in tokens: equal keys give equal text, different keys differ from the first token on."""

from __future__ import annotations

import random


def text_of(key: str, tokens: int) -> str:
    """``tokens`` words of three letters and a space, which the engine counts as tokens, drawn by ``key``."""
    letters = random.Random(key).choices("abcdefghijklmnopqrstuvwxyz", k=3 * tokens)
    return "".join(f"{letters[index]}{letters[index + 1]}{letters[index + 2]} " for index in range(0, 3 * tokens, 3))
