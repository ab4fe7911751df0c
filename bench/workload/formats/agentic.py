"""Sessions of coding agents (callanjfox/kv-cache-tester): one a line, with think times and an id for each 64 prompt tokens.

Replayed in a closed loop: a request leaves ``think_time`` after its predecessor's answer. Each request's prompt is given whole.
Sub-agents take their turn where they stand: the parent waits for them. The file does not say when sessions begin; here they do
so as a Poisson process.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from bench.workload.formats.mooncake import pieces_of
from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bench.workload.formats.rows import Rows

SESSIONS_PER_S: Final = 0.05


class AgentRequest(msgspec.Struct, frozen=True, tag_field="type", tag="s"):
    """A streamed request. Lengths in tokens; ``hash_runs``: first id and number of blocks."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class PlainRequest(msgspec.Struct, frozen=True, tag_field="type", tag="n"):
    """One that was not streamed."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    """Requests of a sub-agent, whose ids are the parent's."""

    requests: list[AgentRequest | PlainRequest]


class AgentSession(msgspec.Struct, frozen=True):
    """One line. ``tool_tokens`` and ``system_tokens``: of the prompt that many sessions share in reality."""

    id: str
    block_size: Count
    tool_tokens: Count
    system_tokens: Count
    hash_id_scope: Literal["local", "global"]
    requests: list[AgentRequest | PlainRequest | SubAgent]


def sessions(rows: Rows) -> list[Session]:
    """Each line a session, each of its requests a turn."""
    rng = random.Random(0)
    begins_s = 0.0
    found = []
    for one in rows.decoded(AgentSession):
        turns = tuple(_turns(one))
        if turns:
            found.append(Session(begins_s, turns, label=one.id))
            begins_s += rng.expovariate(SESSIONS_PER_S)
    return found


def _turns(session: AgentSession) -> Iterator[Turn]:
    key = f"agent/{session.id}" if session.hash_id_scope == "local" else "agent"
    for request in _flat(session.requests):
        pieces = tuple(pieces_of(key, request.hash_runs, session.block_size, request.tokens))
        yield Turn(pieces, max(1, request.output_tokens), max(0.0, request.think_time), is_whole=True)


def _flat(requests: Iterable[AgentRequest | PlainRequest | SubAgent]) -> Iterator[AgentRequest | PlainRequest]:
    for one in requests:
        if isinstance(one, SubAgent):
            yield from one.requests
        else:
            yield one
