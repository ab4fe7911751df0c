# SPDX-License-Identifier: Apache-2.0
"""What engines and runtime agents say, read into bounded types, and what they mean by it

They are trusted to be sincere, not to be well formed: whatever is wrong with an answer is an Unreadable, and nothing
else.

vLLM (``entrypoints/openai/models/serving.py``) answers a load with 200 and a sentence, 400 for an adapter that it has
already, 404 or 500 for weights that it cannot use, and FastAPI's own 404 where ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` is
not set. An agent answers 503 while all adapters are in use, 501 for engines that load none, and 502 for weights that
cannot be had.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

from extproc.core.record import LoadProblem
from extproc.request.model import TokenId

_ALREADY: Final = re.compile(r"already (been )?loaded", re.IGNORECASE)
_FULL: Final = re.compile(r"(maximum|max) number|max_(cpu_|loaded_)?loras|no (free |more )?(room|slot)", re.IGNORECASE)
_LONGEST: Final = 300
_NO_SUCH_CALL: Final = frozenset({405, 501})
_NOT_ALLOWED: Final = frozenset({401, 403})
_BUSY: Final = frozenset({409, 429, 503})
_MOST_MODELS: Final = 4_096
# vLLM lists a model with an object of permissions in it. Objects take tens of times their bytes in memory.
_MOST_OBJECTS: Final = 4 * _MOST_MODELS
# A template adds its own tokens to those of the prompt, of which no tokenizer makes more than one of a byte.
_TEMPLATE_TOKENS: Final = 16_384
_MOST_TOKENS: Final = 2**20

_T = TypeVar("_T")


class Unreadable(ValueError):
    """What came from an engine is not what was asked for; the message says what it is, and what to do."""


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes, what: str) -> _T:
    """``body`` as JSON, which is ``what``. Raises Unreadable."""
    if body.count(b"{") > _MOST_OBJECTS:
        raise Unreadable(f"{what} has more than {_MOST_OBJECTS} objects; see what answers at this address")
    try:
        return decoder.decode(body)
    except RecursionError:
        raise Unreadable(f"{what} is nested too deeply; see what answers at this address") from None
    except ValueError as error:  # of msgspec, and of text that is no UTF-8
        raise Unreadable(f"{what} cannot be read: {error}; see what answers at this address") from None


class _Model(msgspec.Struct, gc=False):
    id: Annotated[str, msgspec.Meta(max_length=1024)]


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(max_length=_MOST_MODELS)]


def models_in(body: bytes) -> frozenset[str]:
    """The names of ``GET /v1/models``. Raises Unreadable."""
    return frozenset([model.id for model in decoded(_models, body, "the list of models").data])


class _Tokens(msgspec.Struct):
    tokens: list[TokenId]


def most_tokens(payload: bytes) -> int:
    """How many tokens a prompt may have that was sent in ``payload``."""
    return min(_MOST_TOKENS, 2 * len(payload) + _TEMPLATE_TOKENS)


def tokens_in_answer(body: bytes, most: int) -> list[int]:
    """Of ``POST /tokenize``, at most ``most``. Raises Unreadable."""
    # counted before they are made: each takes more memory than its digits
    if body.count(b",") > most + _LONGEST:
        raise Unreadable(f"more than {most} tokens came for a prompt; see what answers at this address")
    return decoded(_tokens, body, "the list of tokens").tokens


class LoadAnswer(msgspec.Struct, frozen=True):
    """``problem``: None if the adapter is there. ``message``: what was said. ``was_there``: before it was asked for."""

    problem: LoadProblem | None = None
    message: str = ""
    was_there: bool = False
    # adapters that an agent unloaded to make room, if it says so
    unloaded: tuple[str, ...] = ()


def answer_to_load(status: int, body: bytes) -> LoadAnswer:
    """What became of a load."""
    content, message = _content(body), said(body)
    if 200 <= status < 300:
        evicted = content.get("evicted") if isinstance(content, dict) else None
        names = [evicted] if isinstance(evicted, str) else evicted if isinstance(evicted, list) else []
        return LoadAnswer(message=message, unloaded=tuple(one for one in names if isinstance(one, str)))
    if _ALREADY.search(message):
        return LoadAnswer(message=message, was_there=True)
    said_so = f"{status} {message}"
    if status in _BUSY or (_FULL.search(message) and "rank" not in message.lower()):
        return LoadAnswer(LoadProblem.BUSY, said_so)
    is_of_a_model = isinstance(content, dict) and ("error" in content or content.get("object") == "error")
    if status in _NO_SUCH_CALL or status in _NOT_ALLOWED or (status == 404 and not is_of_a_model):
        return LoadAnswer(LoadProblem.UNREACHABLE, said_so)
    return LoadAnswer(LoadProblem.BROKEN, said_so)


def is_unloaded(status: int) -> bool:
    """Whether the engine does not hold the adapter any more: it was unloaded, or was not there."""
    return 200 <= status < 300 or status == 404


def said(body: bytes) -> str:
    """The message of an answer, whatever its shape, in one line that a log may have."""
    content = _content(body)
    while isinstance(content, dict):
        content = next((content[key] for key in ("error", "message", "detail") if content.get(key)), None)
    text = content if isinstance(content, str) else body.decode(errors="replace")
    line = " ".join(text.split())[:_LONGEST]
    return "".join([mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in line])


def _content(body: bytes) -> Any:  # noqa: ANN401 - whatever a server of unknown kind answers
    try:
        return decoded(_anything, body, "the answer")
    except Unreadable:
        return body.decode(errors="replace")


_models: Final = msgspec.json.Decoder(_Models)
_tokens: Final = msgspec.json.Decoder(_Tokens)
_anything: Final = msgspec.json.Decoder()
