"""A workload as plain data: sessions that begin when they begin, each with turns that follow each other."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bench.workload.text import Piece, join


class Turn(msgspec.Struct, frozen=True):
    """One request: what the user adds to the conversation, and how long the answer is to be.

    ``think_s``: seconds between the end of the answer before and this turn. ``is_whole``: what is said is all of the prompt,
    and not an addition to the conversation so far.
    """

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0
    is_whole: bool = False

    @property
    def text(self) -> str:
        """What the user says."""
        return join(self.pieces)


class Session(msgspec.Struct, frozen=True):
    """A conversation, or a single request of a trace. ``begins_s``: seconds from the start of the workload.

    ``headers``: of its requests, as a trusted gateway would write them: who asks, and what for. ``label``: of its results.
    ``adapter``: what to ask for instead of the model itself.
    """

    begins_s: float
    turns: tuple[Turn, ...]
    system: tuple[Piece, ...] = ()
    headers: Mapping[str, str] = {}
    label: str = ""
    adapter: str = ""

    def opening(self) -> list[dict[str, str]]:
        """The messages with which the conversation begins."""
        return [{"role": "system", "content": join(self.system)}] if self.system else []


class Workload(msgspec.Struct, frozen=True):
    """Sessions in the order of their beginning. ``name`` says where they are from, and which part."""

    name: str
    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        """How many there are in all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def adapters(self) -> tuple[str, ...]:
        """All that are asked for."""
        return tuple(sorted({session.adapter for session in self.sessions if session.adapter}))


def says(key: str, tokens: int) -> tuple[Piece, ...]:
    """A text of its own."""
    return (Piece(key, tokens),)


def faster(workload: Workload, rate: float) -> Workload:
    """The same sessions, beginning ``rate`` times as often. What happens within them keeps its pace."""
    if rate == 1:
        return workload
    sessions = tuple(msgspec.structs.replace(one, begins_s=one.begins_s / rate) for one in workload.sessions)
    return Workload(f"{workload.name}, {rate:g} times as fast", sessions)
