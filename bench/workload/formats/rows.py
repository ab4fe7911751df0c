"""Rows of a file, and the errors that say where one is wrong."""

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
    """A trace that cannot be read; the message says where and what is wrong."""


class Part(msgspec.Struct, frozen=True):
    """Which rows of a trace, in their order; times begin with the first of them. ``limit`` 0: to the end."""

    skip: int = 0
    limit: int = 400


class Rows:
    """An open trace, of which a part is wanted."""

    def __init__(self, path: Path, file: TextIO, part: Part) -> None:
        self._path = path
        self._file = file
        self.part = part

    def decoded(self, kind: type[T]) -> list[T]:
        """JSON lines as ``kind``."""
        return list(self._read(msgspec.json.Decoder(kind).decode, first_line=1))

    def table(self, kind: type[T], columns: Sequence[str]) -> list[T]:
        """CSV with a header that names at least ``columns``, in the order of ``kind``'s fields."""
        header = next(csv.reader(self._file), [])
        missing = [one for one in columns if one not in header]
        if missing:
            msg = f"{self._path}:1: there is no column {', '.join(missing)} among {', '.join(header)}"
            raise TraceInvalid(msg)
        places = [header.index(one) for one in columns]
        names = [one.name for one in msgspec.structs.fields(kind)]

        def read(line: str) -> T:
            values = next(csv.reader([line]))
            if len(values) < len(header):
                msg = f"has {len(values)} values for {len(header)} columns"
                raise ValueError(msg)
            row = {name: values[place] for name, place in zip(names, places, strict=True)}
            return msgspec.convert(row, kind, strict=False)

        return list(self._read(read, first_line=2))

    def _read(self, read: Callable[[str], T], *, first_line: int) -> Iterator[T]:
        stop = self.part.skip + self.part.limit if self.part.limit else None
        for number, line in islice(enumerate(self._file, first_line), self.part.skip, stop):
            try:
                yield read(line)
            except (ValueError, msgspec.MsgspecError) as error:
                msg = f"{self._path}:{number}: {error}; mend or remove the line"
                raise TraceInvalid(msg) from None


def open_trace(path: Path) -> TextIO:
    """Plain or gzipped text."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
