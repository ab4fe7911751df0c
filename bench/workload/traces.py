# SPDX-License-Identifier: Apache-2.0
"""Public traces as workloads, by the name of their format; plain or gzipped.

Traces hold lengths, not text. Where they name the blocks of their prompts, equal names become equal text.

Mooncake's traces (FAST 2025) and Bailian's: times, lengths, and ids of blocks.

An id names a block of prompt tokens. Equal ids become equal text, so that prompts share prefixes exactly where the
recorded ones did. Mooncake's blocks have 512 tokens, Bailian's (Qwen's usage traces) 16.

Sessions of coding agents (callanjfox/kv-cache-tester), with ids of blocks.

A line is a session; an id names a block of prompt tokens, 64 in the published files. Replayed in a closed loop: a
request leaves ``think_time`` seconds after the previous answer, with a whole prompt. Sub-agents run in their place
while the parent waits. The file has no start times of sessions; here they arrive as a Poisson process.

The Chatbot Arena log of VTC's artifact (OSDI 2024): requests of 27 clients.

Azure's traces of 2023 (Splitwise, ISCA 2024): times and lengths.

They have no data on prefixes, so all prompts differ.

BurstGPT's traces (Wang et al., KDD 2025): times and lengths by model.

The requests went to an Azure OpenAI service. Rows without an answer are requests that failed there; they are left out.
The traces have no data on prefixes, so all prompts differ.
"""

from __future__ import annotations

import csv
import gzip
import random
from datetime import datetime
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal, TextIO, TypeVar

import msgspec

from bench.workload.sessions import Session, SessionTurn, TextPiece, Workload, single_piece
from extproc.wire_names import TENANT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

T = TypeVar("T", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0)]
_BLOCK: Final = 512
_BAILIAN_BLOCK: Final = 16
SESSIONS_PER_S: Final = 0.05
ARENA_COLUMNS = (
    "req_time",
    "adapter_dir",
    "prompt_len",
    "output_len",
    "FCFS_first_token_latency",
    "VTC_first_token_latency",
)
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
# Words in a file's name that identify its format.
_GUESSES: Final = {
    "agentic": "agentic",
    "trace_": "agentic",
    "arena": "arena",
    "vtc": "arena",
    "burst": "burstgpt",
    "blksz_16": "bailian",
    "bailian": "bailian",
}


class TraceInvalid(Exception):
    """A trace or generator that cannot be read; the message has the place and the mistake."""


class Excerpt(msgspec.Struct, frozen=True):
    """Which rows of a trace, or sessions of a generator: ``limit`` of them after the first ``skip``.

    ``limit`` 0: to the end. Time begins with the first of them.
    """

    skip: int = 0
    limit: int = 400


class TraceRows:
    """An open trace, and the excerpt to read of it."""

    def __init__(self, path: Path, file: TextIO, excerpt: Excerpt) -> None:
        self._path = path
        self._file = file
        self.excerpt = excerpt

    def decode_json_lines(self, kind: type[T]) -> list[T]:
        """JSON lines as ``kind``."""
        return list(self._read(msgspec.json.Decoder(kind).decode, first_line=1))

    def decode_csv(self, kind: type[T], columns: Sequence[str]) -> list[T]:
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


class MooncakeRow(msgspec.Struct, frozen=True):
    """``timestamp``: arrival in milliseconds. Lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def __post_init__(self) -> None:
        """Other counts are those of blocks of another size; prompts would be cut, or share what they did not."""
        _check(self.hash_ids, self.input_length, _BLOCK)


class BailianRow(msgspec.Struct, frozen=True):
    """``timestamp``: arrival in seconds. Lengths in tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]

    def __post_init__(self) -> None:
        """As MooncakeRow's."""
        _check(self.hash_ids, self.input_length, _BAILIAN_BLOCK)


def _check(hash_ids: list[int], tokens: int, block: int) -> None:
    if len(hash_ids) != (needed := -(-tokens // block)):
        msg = (
            f"has {len(hash_ids)} hash_ids for {tokens} tokens; blocks of {block} tokens make {needed}"
            f" (--format mooncake has blocks of {_BLOCK} tokens and milliseconds, bailian of {_BAILIAN_BLOCK} and"
            " seconds)"
        )
        raise ValueError(msg)


def mooncake_sessions(rows: TraceRows) -> list[Session]:
    """Each row is a session of one request."""
    return _sessions(rows.decode_json_lines(MooncakeRow), "mooncake", block=_BLOCK, ticks_per_s=1000)


def bailian_sessions(rows: TraceRows) -> list[Session]:
    """Each row is a session of one request: it is played at its own time, also if it continues a chat."""
    return _sessions(rows.decode_json_lines(BailianRow), "bailian", block=_BAILIAN_BLOCK, ticks_per_s=1)


def _sessions(read: Sequence[MooncakeRow | BailianRow], key: str, *, block: int, ticks_per_s: int) -> list[Session]:
    return [
        Session(
            (row.timestamp - read[0].timestamp) / ticks_per_s,
            (
                SessionTurn(
                    tuple(block_pieces(key, consecutive_runs(row.hash_ids), block, row.input_length)),
                    max(1, row.output_length),
                ),
            ),
        )
        for row in read
    ]


def consecutive_runs(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ids, as the first of them and their number."""
    first = count = 0
    for one in ids:
        if count and one == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = one, 1
    if count:
        yield first, count


def block_pieces(key: str, runs: Iterable[tuple[int, int]], block: int, tokens: int) -> Iterator[TextPiece]:
    """The text of runs of blocks, ``tokens`` in all: the last block may be partial.

    ``key``: the name of the text. ``runs``: first id and number of blocks. ``block``: tokens of a block.
    """

    for first, count in runs:
        length = min(tokens, count * block)
        if length > 0:
            yield TextPiece(key, length, first * block)
        tokens -= length


class StreamedRequest(msgspec.Struct, frozen=True, tag_field="type", tag="s"):
    """A streamed request. Lengths in tokens. ``hash_runs``: ids in a row, as the first id and their number."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class NonStreamedRequest(msgspec.Struct, frozen=True, tag_field="type", tag="n"):
    """A request that was not streamed."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    """Requests of a sub-agent. Their ids are in the scope of the parent."""

    requests: list[StreamedRequest | NonStreamedRequest]


class AgentSession(msgspec.Struct, frozen=True):
    """One line. ``tool_tokens`` and ``system_tokens``: the part of the prompt that many real sessions share."""

    id: str
    block_size: Count
    tool_tokens: Count
    system_tokens: Count
    hash_id_scope: Literal["local", "global"]
    requests: list[StreamedRequest | NonStreamedRequest | SubAgent]


def agentic_sessions(rows: TraceRows) -> list[Session]:
    """Each line is a session, and each of its requests a turn."""

    rng = random.Random(0)
    begins_at_s = 0.0
    found = []
    for one in rows.decode_json_lines(AgentSession):
        turns = tuple(_turns(one))
        if turns:
            found.append(Session(begins_at_s, turns, label=one.id))
            begins_at_s += rng.expovariate(SESSIONS_PER_S)
    return found


def _turns(session: AgentSession) -> Iterator[SessionTurn]:
    key = f"agent/{session.id}" if session.hash_id_scope == "local" else "agent"
    for request in _flat(session.requests):
        pieces = tuple(block_pieces(key, request.hash_runs, session.block_size, request.tokens))
        yield SessionTurn(pieces, max(1, request.output_tokens), max(0.0, request.think_time), is_whole=True)


def _flat(
    requests: Iterable[StreamedRequest | NonStreamedRequest | SubAgent],
) -> Iterator[StreamedRequest | NonStreamedRequest]:
    for one in requests:
        if isinstance(one, SubAgent):
            yield from one.requests
        else:
            yield one


class ArenaRow(msgspec.Struct, frozen=True):
    """``at_s``: arrival, from the start. Lengths in tokens. TTFT as measured under two schedulers, FCFS and VTC."""

    at_s: float
    client: str
    input_tokens: Count
    output_tokens: Count
    fcfs_ttft_s: float
    vtc_ttft_s: float


def read_arena_rows(rows: TraceRows) -> list[ArenaRow]:
    """The rows with their measurements."""
    return rows.decode_csv(ArenaRow, ARENA_COLUMNS)


def arena_sessions(rows: TraceRows) -> list[Session]:
    """Each row is a session of one request; the client is the tenant."""

    found = read_arena_rows(rows)
    return [
        Session(
            row.at_s - found[0].at_s,
            (SessionTurn(single_piece(f"arena/{number}", row.input_tokens), max(1, row.output_tokens)),),
            headers={TENANT: row.client},
            label=row.client,
        )
        for number, row in enumerate(found, rows.excerpt.skip)
    ]


class AzureRow(msgspec.Struct, frozen=True):
    """``at``: arrival as ISO 8601 without a zone. Lengths in tokens."""

    at: str
    input_tokens: Count
    output_tokens: Count

    def at_s(self) -> float:
        """The arrival in Unix seconds, the machine's zone assumed. The trace has seven decimals; Python reads six."""
        return datetime.fromisoformat(self.at[:26]).timestamp()

    def __post_init__(self) -> None:
        self.at_s()  # raises ValueError here, where the line number is known


def azure_sessions(rows: TraceRows) -> list[Session]:
    """Each row is a session of one request."""

    read = rows.decode_csv(AzureRow, AZURE_COLUMNS)
    return [
        Session(
            row.at_s() - read[0].at_s(),
            (SessionTurn(single_piece(f"azure/{number}", row.input_tokens), max(1, row.output_tokens)),),
        )
        for number, row in enumerate(read, rows.excerpt.skip)
    ]


class BurstGptRow(msgspec.Struct, frozen=True):
    """``at_s``: arrival, from the start of the trace. Lengths in tokens."""

    at_s: float
    model: str
    input_tokens: Count
    output_tokens: Count


def burstgpt_sessions(rows: TraceRows) -> list[Session]:
    """Each row is a session of one request, labelled with its model."""

    read = rows.decode_csv(BurstGptRow, BURSTGPT_COLUMNS)
    return [
        Session(
            row.at_s - read[0].at_s,
            (SessionTurn(single_piece(f"burstgpt/{number}", row.input_tokens), row.output_tokens),),
            label=row.model,
        )
        for number, row in enumerate(read, rows.excerpt.skip)
        if row.output_tokens
    ]


FORMATS: Final[Mapping[str, Callable[[TraceRows], list[Session]]]] = MappingProxyType(
    {
        "mooncake": mooncake_sessions,
        "bailian": bailian_sessions,
        "azure": azure_sessions,
        "burstgpt": burstgpt_sessions,
        "agentic": agentic_sessions,
        "arena": arena_sessions,
    }
)


def read_trace(path: Path, excerpt: Excerpt, format_name: str | None = None) -> Workload:
    """An excerpt of the trace in ``path``. Raises TraceInvalid with file and line.

    ``format_name``: a key of FORMATS; None: by the file name.
    """
    if not path.exists():
        raise TraceInvalid(f"{path}: cannot be read: No such file or directory")
    if path.is_dir():
        raise TraceInvalid(f"{path}: is a directory; name a file of it")
    name = format_name or _guess(path)
    if name not in FORMATS:
        msg = f"{path}: there is no format {name}; there are {', '.join(FORMATS)}"
        raise TraceInvalid(msg)
    try:
        with open_trace(path) as file:
            sessions = FORMATS[name](TraceRows(path, file, excerpt))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        msg = f"{path}: cannot be read: {error}"
        raise TraceInvalid(msg) from None
    if not sessions:
        msg = f"{path}: has no rows after the first {excerpt.skip}; skip fewer"
        raise TraceInvalid(msg)
    rows = f"rows {excerpt.skip + 1} to {excerpt.skip + len(sessions)}"
    return Workload(f"{path.name}, {rows}", tuple(sessions))


def _guess(path: Path) -> str:
    name = path.name.removesuffix(".gz").lower()
    for word, format_name in _GUESSES.items():
        if word in name:
            return format_name
    if name.endswith(".jsonl"):
        return "mooncake"
    if name.endswith(".csv"):
        return "azure"
    msg = f"{path}: its name does not say what it is; give --format {', '.join(FORMATS)}"

    raise TraceInvalid(msg)
