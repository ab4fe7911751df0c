# SPDX-License-Identifier: Apache-2.0
"""Observers of a simulation: by request and engine, or by token and session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from extproc.core.effects import Decision


# The header by which an observer recognises a request in a picker's view.
REQUEST_KEY: Final = "x-lab-request"


class TokenObserver(Protocol):
    """Sees every token, so that no two steps of an engine are taken at once. ``label``: the session's.

    All instants are seconds of virtual time.
    """

    def on_held(self, label: str, ticket: str, now: float) -> None:
        """A request waits in the queue in front of the engines."""
        ...

    def on_sent(self, label: str, decision: Decision, input_tokens: int, now: float) -> None:
        """A request goes to an engine."""
        ...

    def on_token(self, label: str, now: float) -> None:
        """A request has a token of output."""
        ...

    def on_ended(self, label: str, tokens: int, now: float) -> None:
        """A request has its last token. ``tokens``: of its prompt and its answer."""
        ...


class RequestObserver(Protocol):
    """Sees what a picker cannot: when first tokens come, and the engines themselves."""

    def on_begin(self, engines: Mapping[str, Scheduler]) -> None:
        """Before the first request: the engines by address."""
        ...

    def on_arrival(self, request: Request, position: tuple[int, int], now: float) -> None:
        """Before the pick. ``position``: the number of its session in the workload, and of its turn in the session."""
        ...

    def on_sent(self, request: Request, address: str, now: float) -> None:
        """After the pick of the engine at ``address``."""
        ...

    def on_first_token(self, request: Request, now: float) -> None:
        """The prefill is over."""
        ...

    def on_ended(self, request: Request, now: float) -> None:
        """The last token has come."""
        ...
