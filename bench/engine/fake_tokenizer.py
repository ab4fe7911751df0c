# SPDX-License-Identifier: Apache-2.0
"""Text as the engine sees it: four bytes are a token; blocks have chained hashes.

A real tokenizer needs a token for about four bytes of English. Messages are padded to whole tokens, so that the next
prompt of a conversation begins with exactly the tokens of this prompt and its answer, as with real chat templates.
"""

from __future__ import annotations

import base64
import copy
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    import random

BYTES_PER_TOKEN: Final = 4


class Message(msgspec.Struct):
    """One message of a chat. ``content``: text, or OpenAI's list of parts, of which only text is used."""

    role: str
    content: str | list[dict[str, object]] | None = None


def render_chat(messages: list[Message]) -> bytes:
    """The prompt of a chat: its messages, and the header of the answer."""
    return b"".join([*(_render(message) for message in messages), _opening("assistant")])


def _render(message: Message) -> bytes:
    content = message.content
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return _opening(message.role) + _padded((content or "").encode() + b"<|eot|>\n")


def _opening(role: str) -> bytes:
    return _padded(f"<|{role}|>".encode())


def _padded(text: bytes) -> bytes:
    return text + b" " * (-len(text) % BYTES_PER_TOKEN)


def tokens_of(text: bytes) -> list[int]:
    """``text`` as token ids: four bytes each."""
    padded = text + bytes(-len(text) % BYTES_PER_TOKEN)
    return list(memoryview(padded).cast("I"))


def count_tokens(text: bytes) -> int:
    """Tokens of ``text``, at least one."""
    return max(1, -(-len(text) // BYTES_PER_TOKEN))


class BlockHashes:
    """Chained hashes of the full blocks of a growing text. ``model`` and ``salt`` seed the chain: adapters share no
    blocks, and neither do prompts with different salts.
    """

    def __init__(self, model: str, block_size: int, *, salt: str = "", keeps_text: bool = False) -> None:
        """``block_size``: tokens. ``keeps_text``: keep the text of the blocks in ``blocks``."""
        self.blocks: list[bytes] = []
        self._keeps_text = keeps_text
        self._bytes_per_block = block_size * BYTES_PER_TOKEN
        self._last = xxhash.xxh3_64_intdigest(model.encode())
        if salt:
            self._last = xxhash.xxh3_64_intdigest(salt.encode(), self._last)
        self._pending = b""
        self.hashes: list[int] = []

    def copy(self) -> BlockHashes:
        """The same text, to be extended by another."""
        copied = copy.copy(self)
        copied.hashes, copied.blocks = list(self.hashes), list(self.blocks)
        return copied

    def extend(self, text: bytes) -> None:
        """Append text; every block that it fills gets a hash."""
        text = self._pending + text if self._pending else text
        size, last, digest = self._bytes_per_block, self._last, xxhash.xxh3_64_intdigest
        end = len(text) // size * size
        for start in range(0, end, size):
            block = text[start : start + size]
            last = digest(block, last)
            self.hashes.append(last)
            if self._keeps_text:
                self.blocks.append(block)
        self._last, self._pending = last, text[end:]


def answer_text(rng: random.Random, count: int) -> bytes:
    """A random answer of ``count`` tokens: words of three letters and a space."""

    text = bytearray(base64.b64encode(rng.randbytes(3 * count)))
    text[3::4] = b" " * count
    return bytes(text)
