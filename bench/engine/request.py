# SPDX-License-Identifier: Apache-2.0
"""A request in the engine, its tokens, and the steps that compute them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

import msgspec

from bench.engine.fake_tokenizer import BYTES_PER_TOKEN, BlockHashes, count_tokens

if TYPE_CHECKING:
    from bench.engine.structured_outputs import FinishReason

# One token of an answer to keys and values that were overwritten.
GARBAGE: Final = b"\\?# "


class Request:
    """One request in the engine. All counts are tokens.

    | attribute | meaning |
    |---|---|
    | `key` | number, unique in one engine or simulation |
    | `model` | the requested name, maybe an adapter's |
    | `adapter` | the LoRA adapter that it needs, empty for none |
    | `answer` | the whole answer, four bytes a token, known from the start |
    | `finish_reason` | why the answer ends where it does, as OpenAI's API calls it |
    | `salt` | requests share cached blocks with the same alone, empty for none |
    | `tokens` | of the prompt and of what has been produced |
    | `produced` | of the answer so far |
    | `computed` | whose keys and values are in the cache |
    | `cached_tokens` | found in the cache when the request first began; None before |
    | `blocks` | KV blocks that it holds, in the order of its text |
    | `named` | how many of `blocks` are full and cached by their hash |
    | `text` | hashes of its full blocks |
    | `is_exported` | its blocks are kept when it ends, for another engine (``Scheduler.pop_finished_exports``) |
    | `is_remote` | another engine has computed its prompt; False again as soon as that was transferred |
    | `transferred` | of the prompt, what came from another engine |
    """

    def __init__(
        self,
        key: int,
        prompt: bytes,
        answer: bytes,
        *,
        model: str,
        block_size: int,
        keeps_text: bool = False,
        adapter: str = "",
        salt: str = "",
    ) -> None:
        """``block_size``: tokens of a KV block. ``keeps_text``: blocks keep their text, for KV events."""
        self.key = key
        self.model = model
        self.adapter = adapter
        self.answer = answer
        self.output_tokens = len(answer) // BYTES_PER_TOKEN
        self.prompt_tokens = count_tokens(prompt)
        self.tokens = self.prompt_tokens
        self.produced = 0
        self.computed = 0
        self.cached_tokens: int | None = None
        self.blocks: list[int] = []
        self.named = 0
        self.is_running = False
        self.is_exported = self.is_remote = False
        self.transferred = 0
        self.finish_reason: FinishReason = "length"
        self.salt = salt
        self.text = BlockHashes(model, block_size, salt=salt, keeps_text=keeps_text)
        self.text.extend(prompt)

    @property
    def is_done(self) -> bool:
        """All of the answer has been produced."""
        return self.produced >= self.output_tokens

    def prefill_leg(self, key: int) -> Request:
        """The same prompt with an answer of one token, for another engine."""
        leg = copy.copy(self)
        leg.key, leg.answer, leg.output_tokens = key, self.answer[:BYTES_PER_TOKEN], 1
        leg.blocks, leg.text = [], self.text.copy()
        return leg

    def corrupt_answer(self) -> None:
        """The keys and values of its prompt are those of another text: nothing of the answer is right."""
        self.answer = GARBAGE * (len(self.answer) // BYTES_PER_TOKEN)


class Token(msgspec.Struct, frozen=True):
    """A token that a request has produced; after a leap, all of its tokens as one.

    ``is_last``: the answer is complete.
    """

    request: Request
    text: str
    is_last: bool


class EngineStep(msgspec.Struct):
    """One step of the engine, or a leap: ``count`` equal steps in a row.

    ``parts``: requests, each with the tokens that a step computes for it. ``first_s``: duration of the first step.
    ``growth_s``: how much longer each further step takes than the one before it.
    """

    parts: list[tuple[Request, int]]
    first_s: float
    count: int = 1
    growth_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Of all the steps."""
        return self._until(self.count)

    def cut_short(self, after_s: float) -> None:
        """Shorten a leap: end it with the step that runs ``after_s`` seconds after its beginning."""
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
