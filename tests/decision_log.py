# SPDX-License-Identifier: Apache-2.0
"""Reads extproc's decision log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


class LoggedOutcome(msgspec.Struct, frozen=True):
    """A line of the decision log about the end of a request."""

    kind: str
    status: int = 0
    served: str = ""
    predicted_cached_tokens: float = 0.0
    is_precise: bool = False
    prompt_tokens: float | None = None
    cached_tokens: float | None = None


def read_outcomes(log: Path) -> list[LoggedOutcome]:
    """The ends of requests in a decision log."""
    lines = (msgspec.json.decode(line, type=LoggedOutcome) for line in log.read_bytes().splitlines())
    return [one for one in lines if one.kind == "outcome"]
