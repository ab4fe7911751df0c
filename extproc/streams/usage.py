# SPDX-License-Identifier: Apache-2.0
"""Token usage out of an answer that passes in pieces of any size, plain or streamed, without holding the answer.

Usage stands at the end: of the JSON object, or of one of the last events of a stream. So only the end of the current line is
kept, a few kilobytes, and where the line or the answer ends, the last ``"usage": {...}`` in it is read. Generated text cannot
be mistaken for it: a quotation mark inside of a JSON string is escaped.
"""

from __future__ import annotations

from json import JSONDecoder
from typing import Any, Final

import msgspec

# More than a usage object with all its details and what engines write behind it.
_KEPT_BYTES: Final = 16 * 1024
# Larger numbers are an engine's mistake: no answers to one request have as many tokens.
MOST_REPORTED: Final = 1_000_000_000
_KEY: Final = b'"usage":'


class ReportedUsage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class UsageReader:
    """Reads one answer, piece by piece."""

    def __init__(self) -> None:
        self.usage = ReportedUsage()
        self._line = bytearray()

    @property
    def kept_bytes(self) -> int:
        """How much of the answer is kept."""
        return len(self._line)

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the answer."""
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            self._keep(piece[start:end])
            self._read()
            self._line.clear()
            start = end + 1
        self._keep(piece[start:] if start else piece)

    def finish(self) -> ReportedUsage:
        """The answer has ended: return what it reported."""
        self._read()
        return self.usage

    def _keep(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > 2 * _KEPT_BYTES:
            del self._line[:-_KEPT_BYTES]

    def _read(self) -> None:
        at = self._line.rfind(_KEY)
        if at < 0:
            return
        text = self._line[at + len(_KEY) :].lstrip().decode(errors="replace")
        try:
            value, _ = _decoder.raw_decode(text)
        except (ValueError, RecursionError):
            # not JSON, a number of thousands of digits, or nested beyond reason
            return
        # null in every event but the last
        if isinstance(value, dict):
            self.usage = _usage(value)


def _usage(found: dict[str, Any]) -> ReportedUsage:
    """Read the fields of chat and completions, or those of the responses API."""
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    return ReportedUsage(
        prompt_tokens=_count(found.get("prompt_tokens", found.get("input_tokens"))),
        completion_tokens=_count(found.get("completion_tokens", found.get("output_tokens"))),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_REPORTED
    return value if isinstance(value, int) and is_count else None


_decoder: Final = JSONDecoder()
