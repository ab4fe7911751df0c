# SPDX-License-Identifier: Apache-2.0
"""What engines mean by their answers to calls that load and unload adapters."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

LoadResult = Literal["loaded", "already", "full", "failed"]

_ALREADY: Final = re.compile(r"already (been )?(loaded|exists|registered)", re.IGNORECASE)
_FULL: Final = re.compile(
    r"(maximum|max) number|max_(cpu_|loaded_)?loras|too many|(is|are) full|no (free |more )?(room|slot)|exceed",
    re.IGNORECASE,
)
# vLLM: 'LoRA rank 64 is greater than max_lora_rank 16': to unload another adapter would not help.
_NOT_FULL: Final = re.compile(r"rank", re.IGNORECASE)
_LONGEST: Final = 300


def load_result(status: int, body: bytes) -> LoadResult:
    """What became of an adapter."""
    if 200 <= status < 300:
        return "loaded"
    text = error_text(body)
    if _ALREADY.search(text):
        return "already"
    if _FULL.search(text) and not _NOT_FULL.search(text):
        return "full"
    return "failed"


def is_unloaded(status: int, body: bytes) -> bool:
    """Whether the engine does not hold the adapter now: it was unloaded, or was not there."""
    return 200 <= status < 300 or status == 404 or "not loaded" in error_text(body).lower()


def error_text(body: bytes) -> str:
    """The message of an error, whatever its shape."""
    try:
        content: Any = msgspec.json.decode(body)
    except (ValueError, RecursionError):  # of msgspec, of text that is no UTF-8, of nesting without end
        content = None
    while isinstance(content, dict):
        content = next(
            (content[key] for key in ("error", "message", "error_message", "detail") if content.get(key)), None
        )
    text = content if isinstance(content, str) else body.decode(errors="replace")
    return " ".join(text.split())[:_LONGEST]
