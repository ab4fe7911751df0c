# SPDX-License-Identifier: Apache-2.0
"""Requests of a simulation: asked, on their way, and what became of them"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.engine.request import Request
from bench.reporting.results import RequestResult
from bench.workload.sessions import Session
from extproc.core.record import Outcome


class Asked(msgspec.Struct):
    """A request from its arrival on. ``position``: of session and turn. ``done``: called with the end's instant."""

    session: Session
    position: tuple[int, int]
    request: Request
    due_at_s: float
    done: Callable[[float], None]


class Flight(msgspec.Struct):
    """A request from its pick to its last token."""

    asked: Asked
    ticket: str
    address: str
    first_token_at_s: float = 0.0


def refused(asked: Asked, error: str) -> RequestResult:
    """No engine served it."""
    due_at_s = asked.due_at_s
    return RequestResult(
        due_at_s, due_at_s, due_at_s, 0, 0, 0, error=error, label=asked.session.label, position=asked.position
    )


def served(flight: Flight, request: Request, now: float) -> RequestResult:
    """It has its last token."""
    asked = flight.asked
    return RequestResult(
        due_at_s=asked.due_at_s,
        first_token_at_s=flight.first_token_at_s,
        last_token_at_s=now,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens or 0,
        output_tokens=request.produced,
        label=asked.session.label,
        engine=flight.address,
        position=asked.position,
    )


def outcome_of(flight: Flight, request: Request, now: float) -> Outcome:
    """What its access log entry says."""
    asked = flight.asked
    return Outcome(
        ticket=flight.ticket,
        status=200,
        served=flight.address,
        duration_s=now - asked.due_at_s,
        ttfb_s=flight.first_token_at_s - asked.due_at_s,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.produced,
        cached_tokens=request.cached_tokens or None,
    )
