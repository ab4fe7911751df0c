"""Public traces as workloads: Mooncake's JSONL and Azure's CSV, plain or gzipped.

Traces hold lengths, not text. Mooncake's rows name their prompt's blocks of 512 tokens by ``hash_ids``: equal ids become
equal text, so that prompts share prefixes exactly where the real ones did. Azure's say nothing of prefixes: all differ.
"""

from __future__ import annotations

import csv
import gzip
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final, TextIO, TypeVar

import msgspec

from bench.workload.sessions import Session, Turn, Workload
from bench.workload.text import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_MOONCAKE_BLOCK: Final = 512
T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceInvalid(Exception):
    """A trace that cannot be read; the message says where and what is wrong."""


class Part(msgspec.Struct, frozen=True):
    """Which rows of a trace, in their order; times begin with the first of them."""

    skip: int = 0
    limit: int = 400


class MooncakeRow(msgspec.Struct, frozen=True):
    """``timestamp`` in milliseconds, lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]


class AzureRow(msgspec.Struct, frozen=True):
    """Lengths in tokens."""

    at_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path, part: Part) -> Workload:
    """The ``part`` of the trace in ``path``; raises TraceInvalid with file and line."""
    name = path.name.removesuffix(".gz")
    try:
        with _open(path) as file:
            if name.endswith(".jsonl"):
                sessions = _mooncake(path, file, part)
            elif name.endswith(".csv"):
                sessions = _azure(path, file, part)
            else:
                msg = f"{path}: is neither .jsonl (Mooncake) nor .csv (Azure), plain or .gz; rename or convert it"
                raise TraceInvalid(msg)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise TraceInvalid(msg) from None
    if not sessions:
        msg = f"{path}: has no rows after the first {part.skip}; skip fewer"
        raise TraceInvalid(msg)
    rows = f"rows {part.skip + 1} to {part.skip + len(sessions)}"
    return Workload(f"{path.name}, {rows}", tuple(sessions))


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _mooncake(path: Path, file: TextIO, part: Part) -> list[Session]:
    decoder = msgspec.json.Decoder(MooncakeRow)
    rows = list(_rows(path, file, part, decoder.decode, first_line=1))
    blocks = _Blocks()
    return [
        Session(
            (row.timestamp - rows[0].timestamp) / 1000,
            (Turn(blocks.prompt(row), max(1, row.output_length)),),
        )
        for row in rows
    ]


class _Blocks:
    """Text by hash id, made once."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def prompt(self, row: MooncakeRow) -> str:
        text = "".join(self._text(key) for key in row.hash_ids)
        return text[: row.input_length * len("abc ")]

    def _text(self, key: int) -> str:
        if key not in self._texts:
            self._texts[key] = text_of(f"mooncake/{key}", _MOONCAKE_BLOCK)
        return self._texts[key]


def _azure(path: Path, file: TextIO, part: Part) -> list[Session]:
    header = next(csv.reader(file), [])
    wanted = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
    if header != wanted:
        msg = f"{path}:1: the columns are {','.join(header)}; Azure's traces have {','.join(wanted)}"
        raise TraceInvalid(msg)
    rows = list(_rows(path, file, part, _azure_row, first_line=2))
    return [
        Session(
            row.at_s - rows[0].at_s, (Turn(text_of(f"azure/{number}", row.input_tokens), max(1, row.output_tokens)),)
        )
        for number, row in enumerate(rows, part.skip)
    ]


def _azure_row(line: str) -> AzureRow:
    at, context, generated = next(csv.reader([line]))
    # seven digits of a second; Python reads six
    moment = datetime.fromisoformat(at[:26])
    return AzureRow(moment.timestamp(), int(context), int(generated))


def _rows(path: Path, file: Iterable[str], part: Part, read: Callable[[str], T], *, first_line: int) -> Iterator[T]:
    for number, line in islice(enumerate(file, first_line), part.skip, part.skip + part.limit):
        try:
            yield read(line)
        except (ValueError, msgspec.DecodeError) as error:
            msg = f"{path}:{number}: {error}; mend or remove the line"
            raise TraceInvalid(msg) from None
