# SPDX-License-Identifier: Apache-2.0
"""Instants as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds_of(text: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 instant; None of anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else found.replace(tzinfo=UTC).timestamp()


def text_of(at_s: float) -> str:
    """RFC 3339 with whole seconds, as Kubernetes writes it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
