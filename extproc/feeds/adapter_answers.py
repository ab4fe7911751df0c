# SPDX-License-Identifier: Apache-2.0
"""What engines and runtime agents mean by their answers to calls that load and unload adapters

vLLM (``entrypoints/openai/models/serving.py``) answers 200 with a sentence, 400 for an adapter that it has already, 404
or 500 for weights that it cannot use, and FastAPI's own 404 where ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` is not set. An
agent answers 503 while all adapters are in use, 501 for engines that load none, and 502 for weights that cannot be had.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from extproc.core.types import LoadProblem

_ALREADY: Final = re.compile(r"already (been )?loaded", re.IGNORECASE)
_FULL: Final = re.compile(r"(maximum|max) number|max_(cpu_|loaded_)?loras|no (free |more )?(room|slot)", re.IGNORECASE)
_LONGEST: Final = 300
_NO_SUCH_CALL: Final = frozenset({405, 501})
_NOT_ALLOWED: Final = frozenset({401, 403})
_BUSY: Final = frozenset({409, 429, 503})


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
    """The message of an answer, whatever its shape, in one line."""
    content = _content(body)
    while isinstance(content, dict):
        content = next((content[key] for key in ("error", "message", "detail") if content.get(key)), str(content))
    return " ".join(str(content).split())[:_LONGEST]


def _content(body: bytes) -> Any:  # noqa: ANN401 - whatever a server of unknown kind answers
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")
