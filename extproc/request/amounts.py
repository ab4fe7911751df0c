# SPDX-License-Identifier: Apache-2.0
"""How much a body asks for beyond the bytes of its prompt: numbers, prompts, media.

A client's numbers are bounded where they are read, so that no account ever sees one that is negative, fractional or
huge.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np

from extproc.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# More than any engine's context; larger numbers are mistakes or attacks.
MOST_TOKENS: Final = 10_000_000
# As OpenAI: the most answers to one prompt.
MOST_ANSWERS: Final = 128

# Engines refuse 0, except for completions, where ``echo`` with ``max_tokens: 0`` asks for the prompt's own tokens.
OutputTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None
OutputTokensOrNone = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None
Answers = Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)] | None
# What engines and the precise index hold of a token.
MOST_TOKEN_ID: Final = 2**32 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKEN_ID)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None

# What to send, by the name of a field that must be a number.
NUMBERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_tokens": f"a whole number from 1 to {MOST_TOKENS} (from 0 for completions)",
        "max_completion_tokens": f"a whole number from 1 to {MOST_TOKENS}",
        "max_output_tokens": f"a whole number from 1 to {MOST_TOKENS}",
        "n": f"a whole number from 1 to {MOST_ANSWERS}",
        "best_of": f"a whole number from 1 to {MOST_ANSWERS}",
        "priority": "a whole number from -2147483648 to 2147483647",
    }
)

# Tokens reserved for a part until the engine reports the prompt's. An image: OpenAI counts 765 for one of 1024 x 1024
# pixels, Qwen2.5-VL 1,369, LLaVA-1.5 576. Audio: 25 tokens a second (Qwen2-Audio) for 40 s. Video: vLLM samples 32
# frames; 300 each.
MEDIA_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"image": 1_000, "audio": 1_000, "video": 10_000})


class Media(msgspec.Struct, frozen=True):
    """The parts of a prompt that are not text. ``tokens``: estimated; ``size_bytes``: how long they are in the body."""

    tokens: int = 0
    size_bytes: int = 0


NO_MEDIA: Final = Media()


class _Part(msgspec.Struct, gc=False):
    """One of a message's parts: by its fields, as engines do not insist on ``type``."""

    image_url: msgspec.Raw = msgspec.Raw(b"")
    image_embeds: msgspec.Raw = msgspec.Raw(b"")
    image_pil: msgspec.Raw = msgspec.Raw(b"")
    file_id: msgspec.Raw = msgspec.Raw(b"")
    input_audio: msgspec.Raw = msgspec.Raw(b"")
    audio_url: msgspec.Raw = msgspec.Raw(b"")
    audio_embeds: msgspec.Raw = msgspec.Raw(b"")
    video_url: msgspec.Raw = msgspec.Raw(b"")
    # of the responses API: a message within ``input``
    content: msgspec.Raw = msgspec.Raw(b"")


# The fields of a part that hold media, with their kind.
_KINDS: Final = (
    ("image_url", "image"),
    ("image_embeds", "image"),
    ("image_pil", "image"),
    ("file_id", "image"),
    ("input_audio", "audio"),
    ("audio_url", "audio"),
    ("audio_embeds", "audio"),
    ("video_url", "video"),
)
_LIST: Final = ord("[")


def media_in(contents: Sequence[msgspec.Raw], *, deepest: int = 1) -> Media:
    """The media among the parts of these contents.

    ``deepest``: how many levels of ``content`` within parts count. The responses API has one; looking into each costs
    as much as reading all that is below it, so a client must not choose how many there are.
    """
    tokens = size_bytes = 0
    for content in contents:
        # looked at without a copy: most contents are plain strings, and long
        view = memoryview(content)
        if not view or view[0] != _LIST:
            continue
        try:
            parts = _parts_decoder.decode(view)
        except msgspec.DecodeError:
            # not parts: the engine says what is wrong
            continue
        for part in parts:
            inner = media_in([part.content], deepest=deepest - 1) if part.content and deepest else NO_MEDIA
            tokens += inner.tokens
            size_bytes += inner.size_bytes
            for name, kind in _KINDS:
                value: msgspec.Raw = getattr(part, name)
                if value and bytes(memoryview(value)[:4]) != b"null":
                    tokens += MEDIA_TOKENS[kind]
                    size_bytes += memoryview(value).nbytes
    return Media(tokens, size_bytes)


class Prompts(msgspec.Struct, frozen=True):
    """How many prompts a field holds. ``token_ids``: how many there are if they are tokens already; 0 for text."""

    count: int = 1
    token_ids: int = 0


ONE_PROMPT: Final = Prompts()


def prompts_in(value: msgspec.Raw, field: str) -> Prompts:
    """The prompts in ``prompt`` or ``input``: one text, a list of texts, a list of tokens, or a list of such lists.

    ``field``: its name. Raises BadRequest for a token that no engine knows.
    """
    view = memoryview(value)
    if bytes(view[:1]) != b"[":
        return ONE_PROMPT
    data = bytes(view)
    # however much white space a client writes before it
    found = _NO_SPACE.search(data, 1)
    first = b"" if found is None else found[0]
    if first == b'"':
        return Prompts(max(1, len(_list_decoder.decode(view))))
    # objects are other engines' ways to say a prompt
    if first != b"{" and not _are_short_numbers(data):
        _check_tokens(data, field)
    if first == b"[":
        return Prompts(max(1, data.count(b"[") - 1), data.count(b",") + 1)
    # a list of tokens
    return Prompts(1, data.count(b",") + 1)


def _are_short_numbers(data: bytes) -> bool:
    """Whether JSON holds whole numbers of few digits, in lists, and nothing else: almost every list of tokens.

    It takes a fraction of the time of making the numbers.
    """
    if any(mark in data for mark in _MARKS_OF_OTHERS):
        return False
    # brackets count as digits: what is taken for too long is only read, then
    runs = np.frombuffer(data, np.uint8) >= _ZERO
    for more in _DOUBLED:
        runs = runs[:-more] & runs[more:]
    return not runs.any()


def _check_tokens(data: bytes, field: str) -> None:
    try:
        _tokens_decoder.decode(data)
    except msgspec.ValidationError:
        raise BadRequest(
            f"'{field}' must be text, or hold tokens from 0 to {MOST_TOKEN_ID}; send the ids of the model's tokenizer.",
            param=field,
        ) from None


# All that is no whole number from 0 on has one of them: fractions, texts, objects, true, false and null.
_MARKS_OF_OTHERS: Final = (b"-", b".", b"e", b"E", b"l", b'"', b"{")
_ZERO: Final = ord("0")
# Runs of 2, 4, 8 and 10 digits; the largest token has 10.
_DOUBLED: Final = (1, 2, 4, 2)
_tokens_decoder: Final = msgspec.json.Decoder(list[TokenId | list[TokenId]])
_parts_decoder: Final = msgspec.json.Decoder(list[_Part])
_NO_SPACE: Final = re.compile(rb"[^ \t\r\n]")
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
