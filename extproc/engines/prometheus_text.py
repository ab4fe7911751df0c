# SPDX-License-Identifier: Apache-2.0
"""Pages in Prometheus' text format, as engines write them: series, values and labels.

A page has hundreds of lines, of which a dozen matter: they are found by search, without parsing the rest. A page may
have any content, so the number of lines that are read is bounded, and the time is linear in its length.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.engines.dialects import MetricName

# Of one name. Data-parallel ranks have one each; each change of what adapters run leaves one behind.
MOST_SERIES: Final = 1_024
# More than any count, number of seconds or Unix time.
_LARGEST: Final = 1e15
# Bytes by which a line may move from page to page, as numbers get longer.
_DRIFT: Final = 1024
# A metric that was missing is searched for again after so many pages.
RARE_PAGES: Final = 20
_AFTER_NAMES: Final = (b"{", b" ", b"\t")
# It begins where no name goes on, and no quantifier gives back what it took: the time is linear in any line.
_LABEL: Final = re.compile(r'(?<![a-zA-Z0-9_])([a-zA-Z_][a-zA-Z0-9_]*+)="([^"\\]*+(?:\\.[^"\\]*+)*+)"')


class MetricsPageRefused(ValueError):
    """A page has more of something than any engine's; the message names it, and what to do."""


class MetricScanner:
    """The series of one metric on successive pages: the first of several sources found.

    They are adjacent lines, but for histograms (``suffix``), where the lines of each rank or model follow each other.

    All are searched for near their position on the previous page, so a page costs microseconds.
    """

    # ten for each engine, of which there may be 20,000
    __slots__ = ("_is_scattered", "_label", "_misses", "_most_series", "_needle", "_needles", "_offset")

    def __init__(self, sources: tuple[MetricName, ...], suffix: str = "", *, most_series: int = MOST_SERIES) -> None:
        self._most_series = most_series
        self._is_scattered = bool(suffix)
        self._needles = _needles_of(sources, suffix)
        self._needle = self._label = b""
        self._offset = 0
        self._misses = 0

    def total(self, page: bytes) -> float | None:
        """Sum of the series; None if the page has none."""
        values = self._values(page)
        return sum(values) if values else None

    def mean(self, page: bytes) -> float | None:
        """Mean of the series; None if the page has none."""
        values = self._values(page)
        return sum(values) / len(values) if values else None

    def lines(self, page: bytes) -> list[bytes]:
        """The lines of the series; raises MetricsPageRefused for too many."""
        found: list[bytes] = []
        start = self._find(page)
        while start >= 0:
            if len(found) == self._most_series:
                raise _too_many(self._needle[1:-1], self._most_series)
            end = page.find(b"\n", start + 1)
            found.append(page[start + 1 :] if end < 0 else page[start + 1 : end])
            if end < 0:
                break
            start = end if page.startswith(self._needle, end) else self._find_next(page, end)
        return found

    def search_whole_next_page(self) -> None:
        """Search all of the next page, although the family was missing lately."""
        self._misses = 0

    def _values(self, page: bytes) -> list[float]:
        # every line has the empty label
        return [
            number
            for line in self.lines(page)
            if self._label in line and 0 <= (number := sample_number(line)) < _LARGEST
        ]

    def _find_next(self, page: bytes, start: int) -> int:
        """The same name in the rest of its family, which the next comment ends."""
        if not self._is_scattered:
            return -1
        stop = page.find(b"\n#", start)
        return page.find(self._needle, start, stop if stop >= 0 else len(page))

    def _find(self, page: bytes) -> int:
        offset = self._offset
        if self._needle:
            start = page.find(self._needle, offset - _DRIFT if offset > _DRIFT else 0, offset + _DRIFT)
            if start >= 0:
                self._offset = start
                return start
        elif self._misses:
            # searching a whole page for a missing family costs more than everything else
            self._misses -= 1
            return -1
        for needle, label in self._needles:
            start = page.find(needle)
            if start >= 0:
                self._needle, self._label, self._offset = needle, label, start
                return start
        self._needle, self._misses = b"", RARE_PAGES
        return -1


@lru_cache
def _needles_of(sources: tuple[MetricName, ...], suffix: str) -> tuple[tuple[bytes, bytes], ...]:
    """Each with the preceding line end and the following character, so that only whole names match; and the label."""
    return tuple(
        (f"\n{one.name}{suffix}{end}".encode(), b"" if one.where is None else '{}="{}"'.format(*one.where).encode())
        for one in sources
        for end in "{ "
    )


def metric_lines(page: bytes, name: bytes, *, most: int = MOST_SERIES) -> list[bytes]:
    """All lines of the metric ``name``, wherever they are. Raises MetricsPageRefused if there are more than ``most``,
    those of metrics whose names begin with this one included.
    """
    found: list[bytes] = []
    needle, length = b"\n" + name, len(name)
    start = 0 if page.startswith(name) else page.find(needle) + 1
    hits = 0
    while start or (page.startswith(name) and not hits):
        hits += 1
        if hits > most:
            raise _too_many(name, most)
        end = page.find(b"\n", start)
        line = page[start:] if end < 0 else page[start:end]
        if line[length : length + 1] in _AFTER_NAMES:
            found.append(line)
        start = 0 if end < 0 else page.find(needle, end) + 1
    return found


def sample_number(line: bytes) -> float:
    """The number in ``name{labels} number`` or ``name number``, with or without a timestamp; NaN if there is none."""
    rest = line[line.rfind(b"}") + 1 :] if b"}" in line else line.split(None, 1)[-1]
    try:
        return float(rest)
    except ValueError:
        parts = rest.split(None, 1)
        return sample_number(b" " + parts[0]) if len(parts) > 1 else math.nan


def sample_value(line: bytes) -> float | None:
    """The same as a count, sum or share: what is negative, infinite or no number is None."""
    number = sample_number(line)
    return number if 0 <= number < _LARGEST else None


def sample_labels(line: bytes) -> dict[str, str]:
    """Label names to values, as written."""
    text = line[line.find(b"{") + 1 : line.rfind(b"}")].decode(errors="replace")
    return dict(_LABEL.findall(text))


def _too_many(name: bytes, most: int) -> MetricsPageRefused:
    return MetricsPageRefused(
        f"its page has more than {most} series of {name.decode(errors='replace')}; "
        "start the engine again, or have it write fewer"
    )
