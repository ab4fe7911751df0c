# SPDX-License-Identifier: Apache-2.0
"""Which byte ranges are missing, from a journal of those on the disk; when to retry; when a server sends too slowly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from controller.agents.downloader.core.listing import Listing, RemoteFile

_HEAD: Final = "attache-journal-1"


class Span(msgspec.Struct, frozen=True, order=True):
    """Bytes from ``start`` up to, not including, ``end``."""

    start: int
    end: int


class Part(msgspec.Struct, frozen=True):
    """One request's worth of a file. ``end`` None: until the server has no more (a file of unknown size)."""

    file: int
    start: int
    end: int | None


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same bytes in order, without overlaps or neighbours."""
    found: list[Span] = []
    for span in sorted(one for one in spans if one.end > one.start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def missing(size: int, there: Sequence[Span]) -> list[Span]:
    """What of ``size`` bytes is not ``there``."""
    found: list[Span] = []
    at = 0
    for span in merged(there):
        if span.start > at:
            found.append(Span(at, min(span.start, size)))
        at = max(at, span.end)
    if at < size:
        found.append(Span(at, size))
    return [one for one in found if one.end > one.start]


def parts_of(index: int, file: RemoteFile, there: Sequence[Span], part_size: int) -> Iterator[Part]:
    """The requests that complete a file; one for all of it, if it cannot be had in ranges."""
    if file.size is None or not file.ranges:
        if file.size is None or missing(file.size, there):
            yield Part(index, 0, file.size)
        return
    for span in missing(file.size, there):
        for start in range(span.start, span.end, part_size):
            yield Part(index, start, min(start + part_size, span.end))


def journal_head(listing: Listing, digest: str) -> str:
    """The first line of a journal: it belongs to this listing and no other."""
    return f"{_HEAD} {len(listing.files)} {digest}\n"


def journal_line(file: int, span: Span) -> str:
    """Says that these bytes of a file are on the disk."""
    return f"{file} {span.start} {span.end}\n"


def forgetting_line(file: int) -> str:
    """Says that nothing of a file is there any more."""
    return f"{file} 0 0\n"


def read_journal(text: str, head: str) -> dict[int, list[Span]] | None:
    """What is there, by file. None: the journal is of another listing. A last line cut short by a crash is left out."""
    if not text.startswith(head):
        return None
    there: dict[int, list[Span]] = {}
    for line in text[len(head) :].splitlines(keepends=True):
        words = line.split()
        if not line.endswith("\n") or len(words) != 3 or not all(word.isdecimal() for word in words):
            continue
        file, start, end = map(int, words)
        if end == 0:
            there[file] = []
        else:
            there.setdefault(file, []).append(Span(start, end))
    return {file: merged(spans) for file, spans in there.items()}


class RetryPolicy(msgspec.Struct, frozen=True):
    """``attempts``: in a row without a byte of progress. ``first_s`` and ``longest_s``: of the waits between them."""

    attempts: int = 8
    first_s: float = 0.5
    longest_s: float = 30.0


def wait_s(retry: RetryPolicy, failures: int, asked_s: float | None, chance: random.Random) -> float | None:
    """How long to wait after so many ``failures`` in a row; None: give up.

    Full jitter: pods that failed together do not come back together. A server's own ``Retry-After`` is a lower bound,
    up to ten times the longest wait.
    """
    if failures >= retry.attempts:
        return None
    bound_s = min(retry.longest_s, retry.first_s * 2 ** (failures - 1))
    waited_s = chance.uniform(bound_s / 2, bound_s)
    return waited_s if asked_s is None else max(waited_s, min(asked_s, 10 * retry.longest_s))


class Pace:
    """Finds a server that sends just enough to pass for alive: less than ``least_bytes`` in each ``window_s``."""

    def __init__(self, window_s: float, least_bytes: int, now_s: float) -> None:
        self._window_s = window_s
        self._least_bytes = least_bytes
        self._since_s = now_s
        self._bytes = 0

    def is_too_slow(self, count: int, now_s: float) -> bool:
        """Take ``count`` more bytes into account."""
        self._bytes += count
        if now_s - self._since_s < self._window_s:
            return False
        slow = self._bytes < self._least_bytes
        self._since_s, self._bytes = now_s, 0
        return slow
