"""A workload as plain data: sessions that begin when they begin, each with turns that follow each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One request: what the user adds to the conversation, and how long the answer is to be.

    ``think_s``: seconds between the end of the answer before and this turn.
    """

    text: str
    output_tokens: int
    think_s: float = 0.0


class Session(msgspec.Struct, frozen=True):
    """A conversation, or a single request of a trace. ``begins_s``: seconds from the start of the workload.

    ``headers``: of its requests, as a trusted gateway would write them: who asks, and what for. ``label``: of its results.
    """

    begins_s: float
    turns: tuple[Turn, ...]
    system: str = ""
    headers: Mapping[str, str] = {}
    label: str = ""


class Workload(msgspec.Struct, frozen=True):
    """Sessions in the order of their beginning. ``name`` says where they are from, and which part."""

    name: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        """How many there are in all sessions."""
        return sum(len(session.turns) for session in self.sessions)
