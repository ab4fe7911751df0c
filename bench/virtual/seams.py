"""What a simulation can be told, and who may look into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from extproc.passage import Decision


class Delays(msgspec.Struct, frozen=True):
    """Seconds between two readings of an engine's metrics, and until access logs and KV events are there."""

    scrape_s: float = 0.2
    log_s: float = 0.2
    events_s: float = 0.05


class Watch(Protocol):
    """Somebody who wants to see all that happens, as it happens; ``label`` is the session's."""

    def held(self, label: str, ticket: str, now: float) -> None:
        """A request has to wait."""
        ...

    def sent(self, label: str, decision: Decision, input_tokens: int, now: float) -> None:
        """One goes to an engine."""
        ...

    def token(self, label: str, now: float) -> None:
        """One has a token of output."""
        ...

    def ended(self, label: str, tokens: int, now: float) -> None:
        """One has all of them; ``tokens``: of its prompt and its answer."""
        ...


class Seer(Protocol):
    """A picker that may know what no real one can: the engines themselves, and the request's own blocks."""

    def see(self, engines: Mapping[str, Scheduler]) -> None:
        """Before the start."""
        ...

    def arrives(self, request: Request, now: float) -> None:
        """Before each pick."""
        ...
