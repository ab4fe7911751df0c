# SPDX-License-Identifier: Apache-2.0
"""Sessions of coding agents (callanjfox/kv-cache-tester), with ids of blocks.

A line is a session; an id names a block of prompt tokens, 64 in the published files. Replayed in a closed loop: a
request leaves ``think_time`` seconds after the previous answer, with a whole prompt. Sub-agents run in their place
while the parent waits. The file does not say when sessions begin; here they arrive as a Poisson process.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from bench.workload.formats.mooncake import pieces_of
from bench.workload.formats.rows import Count
from bench.workload.sessions import Session, SessionTurn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bench.workload.formats.rows import Rows

SESSIONS_PER_S: Final = 0.05


class AgentRequest(msgspec.Struct, frozen=True, tag_field="type", tag="s"):
    """A streamed request. Lengths in tokens. ``hash_runs``: ids in a row, as the first id and their number."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class PlainRequest(msgspec.Struct, frozen=True, tag_field="type", tag="n"):
    """A request that was not streamed."""

    hash_runs: list[tuple[int, int]]
    tokens: Count = msgspec.field(name="in")
    output_tokens: Count = msgspec.field(name="out")
    think_time: float = 0.0


class SubAgent(msgspec.Struct, frozen=True, tag_field="type", tag="subagent"):
    """Requests of a sub-agent. Their ids are in the scope of the parent."""

    requests: list[AgentRequest | PlainRequest]


class AgentSession(msgspec.Struct, frozen=True):
    """One line. ``tool_tokens`` and ``system_tokens``: the part of the prompt that many real sessions share."""

    id: str
    block_size: Count
    tool_tokens: Count
    system_tokens: Count
    hash_id_scope: Literal["local", "global"]
    requests: list[AgentRequest | PlainRequest | SubAgent]


def sessions(rows: Rows) -> list[Session]:
    """Each line is a session, and each of its requests a turn."""

    rng = random.Random(0)
    begins_at_s = 0.0
    found = []
    for one in rows.decoded(AgentSession):
        turns = tuple(_turns(one))
        if turns:
            found.append(Session(begins_at_s, turns, label=one.id))
            begins_at_s += rng.expovariate(SESSIONS_PER_S)
    return found


def _turns(session: AgentSession) -> Iterator[SessionTurn]:
    key = f"agent/{session.id}" if session.hash_id_scope == "local" else "agent"
    for request in _flat(session.requests):
        pieces = tuple(pieces_of(key, request.hash_runs, session.block_size, request.tokens))
        yield SessionTurn(pieces, max(1, request.output_tokens), max(0.0, request.think_time), is_whole=True)


def _flat(requests: Iterable[AgentRequest | PlainRequest | SubAgent]) -> Iterator[AgentRequest | PlainRequest]:
    for one in requests:
        if isinstance(one, SubAgent):
            yield from one.requests
        else:
            yield one
