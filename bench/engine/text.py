"""Text as the engine sees it: four bytes are a token, 16 tokens a block, and every block has a hash of all before it.

A real tokenizer makes about four bytes of English a token. Messages are padded to whole tokens, so that a conversation's
next prompt begins with exactly the tokens of this prompt and its answer, as with real chat templates.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

if TYPE_CHECKING:
    import random

BYTES_PER_TOKEN: Final = 4


class Message(msgspec.Struct):
    """One message of a chat; ``content`` is text, or OpenAI's list of parts, of which text counts."""

    role: str
    content: str | list[dict[str, object]] | None = None


def render_chat(messages: list[Message]) -> bytes:
    """The prompt of a chat: its messages and the beginning of the answer."""
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
    """Chained hashes of a growing text's full blocks; ``model`` keeps models and adapters apart."""

    def __init__(self, model: str, block_size: int, *, keeps_text: bool = False) -> None:
        """``keeps_text``: the blocks themselves are kept in ``blocks``."""
        self.blocks: list[bytes] = []
        self._keeps_text = keeps_text
        self._bytes_per_block = block_size * BYTES_PER_TOKEN
        self._last = xxhash.xxh3_64_intdigest(model.encode())
        self._pending = b""
        self.hashes: list[int] = []

    def extend(self, text: bytes) -> None:
        """Take more text; every block that it fills gets its hash."""
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
    """An answer of ``count`` tokens that no other answer begins with: words of three letters and a space."""
    text = bytearray(base64.b64encode(rng.randbytes(3 * count)))
    text[3::4] = b" " * count
    return bytes(text)
