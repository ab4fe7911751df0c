# SPDX-License-Identifier: Apache-2.0
"""Token usage out of an answer that passes in pieces of any size, plain or streamed, without holding the answer.

Usage stands at the end: of the JSON object, or of one of the last events of a stream. So only the end of the current
line is kept, a few kilobytes, and where the line or the answer ends, the last ``"usage": {...}`` in it is read.
Generated text cannot be mistaken for it: a quotation mark inside of a JSON string is escaped.
"""

from __future__ import annotations

from json import JSONDecoder
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.scheduling.picker import PluginFailed
from extproc.streams.messages import ProcessingResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from extproc.scheduling.framework import UsageReporter

# More than a usage object with all its details and what engines write behind it.
_KEPT_BYTES: Final = 16 * 1024
# Larger numbers are an engine's mistake: no answers to one request have as many tokens.
MOST_REPORTED: Final = 1_000_000_000
_KEY: Final = b'"usage":'
# The first event of a stream of the Messages API.
_START: Final = b'"message_start"'
_NAMES: Final = (
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
    *("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
)
_decoder: Final = JSONDecoder()


class ReportedUsage(msgspec.Struct, frozen=True):
    """Tokens as the engine counted them; None where it did not report them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class UsageReader:
    """Reads one answer, piece by piece."""

    def __init__(self) -> None:
        # by the engines' names; a stream of the Messages API has some at its beginning and the others at its end
        self._counts: dict[str, int] = {}
        self._line = bytearray()

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the answer."""
        lines, found, rest = piece.rpartition(b"\n")
        # most pieces of a stream are whole events without usage
        if found and (self._line or _KEY in lines):
            for line in lines.split(b"\n"):
                self._keep(line)
                self._read()
                self._line.clear()
        self._keep(rest)

    def finish(self) -> ReportedUsage:
        """The answer has ended: return what it reported."""
        self._read()
        return _usage(self._counts)

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
            counts = _counts(value)
            if _START in self._line[:at]:
                # nothing is written yet: a client that hangs up now must not be charged for output
                counts.pop("output_tokens", None)
            self._counts.update(counts)


def _counts(found: dict[str, Any]) -> dict[str, int]:
    """The counts that matter, where cached tokens are one wherever they stand."""
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    given = {**found, "cached_tokens": details.get("cached_tokens") if isinstance(details, dict) else None}
    counts = {name: _count(given.get(name)) for name in _NAMES}
    return {name: count for name, count in counts.items() if count is not None}


def _usage(counts: dict[str, int]) -> ReportedUsage:
    """Of chat and completions, of the responses API, or of the Messages API, whose input is what was not cached."""
    read, created = counts.get("cache_read_input_tokens"), counts.get("cache_creation_input_tokens", 0)
    prompt, uncached = counts.get("prompt_tokens"), counts.get("input_tokens")
    if prompt is None and uncached is not None:
        prompt = uncached + (read or 0) + created
    return ReportedUsage(
        prompt_tokens=prompt,
        completion_tokens=counts.get("completion_tokens", counts.get("output_tokens")),
        cached_tokens=counts.get("cached_tokens", read),
    )


def _count(value: object) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_REPORTED
    return value if isinstance(value, int) and is_count else None


def usage_reports_metadata(
    reporters: Iterable[UsageReporter], usage: ReportedUsage, failed: Callable[[PluginFailed], None]
) -> bytes:
    """Of a serialized ProcessingResponse, to be appended to it; empty if there is nothing to report.

    ``failed``: called for each plugin that fails; the gateway gets no value of it.
    """
    if usage.prompt_tokens is None and usage.completion_tokens is None:
        return b""
    given = _as_reported(usage)
    answer = ProcessingResponse()
    for reporter in reporters:
        try:
            value = reporter.value(given)
        except PluginFailed as error:
            failed(error)
            continue
        if value:
            namespace = answer.dynamic_metadata.fields[reporter.namespace].struct_value
            namespace.fields[reporter.name].number_value = value
    return answer.SerializeToString()


def _as_reported(usage: ReportedUsage) -> dict[str, object]:
    """As an answer has it; and the details of the prompt under llm-d's name, too."""
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    given: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if usage.cached_tokens is not None:
        details = {"cached_tokens": usage.cached_tokens}
        given.update(prompt_tokens_details=details, prompt_token_details=details)
    return given
