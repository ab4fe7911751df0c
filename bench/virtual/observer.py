"""What a simulation can be told, and who may look into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from extproc.core.effects import Decision


# Names a request to a policy that has to know it again.
REQUEST_KEY: Final = "x-lab-request"


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


class Onlooker(Protocol):
    """Somebody who knows what our picker cannot: when tokens come, or even what goes on in the engines."""

    def begins(self, engines: Mapping[str, Scheduler]) -> None:
        """Before the start: the engines by address."""
        ...

    def arrives(self, request: Request, place: tuple[int, int], now: float) -> None:
        """Before a pick; ``place``: the number of its session in the workload, and of its turn."""
        ...

    def sent(self, request: Request, address: str, now: float) -> None:
        """After it."""
        ...

    def first_token(self, request: Request, now: float) -> None:
        """The prefill is over."""
        ...

    def ended(self, request: Request, now: float) -> None:
        """The last token has come."""
        ...
