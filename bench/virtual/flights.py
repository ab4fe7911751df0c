# SPDX-License-Identifier: Apache-2.0
"""Requests of a simulation: asked, and on their way"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.engine.request import Request
from bench.workload.sessions import Session


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
