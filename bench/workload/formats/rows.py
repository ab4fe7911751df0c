# SPDX-License-Identifier: Apache-2.0
"""Rows of a trace file, decoded; errors name the file and the line."""

from __future__ import annotations

import csv
import gzip
from itertools import islice
from typing import TYPE_CHECKING, Annotated, TextIO, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceInvalid(Exception):
    """A trace or generator that cannot be read; the message says where and what is wrong."""


class Excerpt(msgspec.Struct, frozen=True):
    """Which rows of a trace, or sessions of a generator: ``limit`` of them after the first ``skip``.

    ``limit`` 0: to the end. Time begins with the first of them.
    """

    skip: int = 0
    limit: int = 400


class Rows:
    """An open trace, and the excerpt to read of it."""

    def __init__(self, path: Path, file: TextIO, excerpt: Excerpt) -> None:
        self._path = path
        self._file = file
        self.excerpt = excerpt

    def decoded(self, kind: type[T]) -> list[T]:
        """JSON lines as ``kind``."""
        return list(self._read(msgspec.json.Decoder(kind).decode, first_line=1))

    def table(self, kind: type[T], columns: Sequence[str]) -> list[T]:
        """CSV as ``kind``. ``columns``: for each field of ``kind``, the heading of its column."""
        header = next(csv.reader(self._file), [])
        missing = [one for one in columns if one not in header]
        if missing:
            msg = f"{self._path}:1: there is no column {', '.join(missing)} among {', '.join(header)}"
            raise TraceInvalid(msg)
        indices = [header.index(one) for one in columns]
        names = [one.name for one in msgspec.structs.fields(kind)]

        def read(line: str) -> T:
            values = next(csv.reader([line]))
            if len(values) < len(header):
                msg = f"has {len(values)} values for {len(header)} columns"
                raise ValueError(msg)
            row = {name: values[index] for name, index in zip(names, indices, strict=True)}
            return msgspec.convert(row, kind, strict=False)

        return list(self._read(read, first_line=2))

    def _read(self, read: Callable[[str], T], *, first_line: int) -> Iterator[T]:
        stop = self.excerpt.skip + self.excerpt.limit if self.excerpt.limit else None
        for number, line in islice(enumerate(self._file, first_line), self.excerpt.skip, stop):
            try:
                yield read(line)
            except (ValueError, msgspec.MsgspecError) as error:
                msg = f"{self._path}:{number}: {error}; mend or remove the line"
                raise TraceInvalid(msg) from None


def open_trace(path: Path) -> TextIO:
    """Open plain or gzipped text."""

    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
