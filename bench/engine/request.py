"""A request in the engine, and what a step does with it."""

from __future__ import annotations

import msgspec

from bench.engine.text import BYTES_PER_TOKEN, BlockHashes, count_tokens


class Request:
    """One request in the engine.

    ``model``: the name that was asked for, an adapter's maybe. ``answer``: four bytes a token, which it will have produced
    when it is done.
    """

    def __init__(
        self, key: int, prompt: bytes, answer: bytes, *, model: str, block_size: int, keeps_text: bool = False
    ) -> None:
        self.key = key
        self.model = model
        self.answer = answer
        self.output_tokens = len(answer) // BYTES_PER_TOKEN
        self.prompt_tokens = count_tokens(prompt)
        # of the prompt and of what has been produced
        self.tokens = self.prompt_tokens
        self.produced = 0
        self.computed = 0
        self.cached_tokens: int | None = None
        self.blocks: list[int] = []
        self.named = 0
        self.is_running = False
        self.text = BlockHashes(model, block_size, keeps_text=keeps_text)
        self.text.extend(prompt)

    @property
    def is_done(self) -> bool:
        """All of the answer has been produced."""
        return self.produced >= self.output_tokens


class Token(msgspec.Struct, frozen=True):
    """A request has produced a token, or the last of several."""

    request: Request
    text: str
    is_last: bool


class Step(msgspec.Struct):
    """What a step does: requests with their numbers of new tokens.

    ``count``: so many steps in a row do the same, each of them ``growth_s`` longer than the one before, the first takes
    ``first_s``.
    """

    parts: list[tuple[Request, int]]
    first_s: float
    count: int = 1
    growth_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all the steps."""
        return self._until(self.count)

    def cut(self, after_s: float) -> None:
        """End with the step that runs after so many seconds: something has come that must not wait for the rest."""
        low, high = 1, self.count
        while low < high:
            middle = (low + high) // 2
            if self._until(middle) >= after_s:
                high = middle
            else:
                low = middle + 1
        self.count = low

    def _until(self, count: int) -> float:
        return count * self.first_s + self.growth_s * count * (count - 1) / 2
