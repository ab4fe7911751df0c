# SPDX-License-Identifier: Apache-2.0
"""What all gateways together know of each engine: what they sent there, what it reports, and how fast it is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.situation import EngineReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.status_pages import EngineDemand, ServerDemand


class EngineSignal(msgspec.Struct, frozen=True, gc=False):
    """One engine. ``role``: ``prefill``, ``decode``, or empty for both. ``heard_at_s``: when a gateway last spoke of
    it.
    ``reported_at_s``: when the engine itself last said something; None if it never did. ``prefill_tokens_per_s``,
    ``step_s``, ``step_s_per_token``: its learned speed, the mean of the gateways; None where nobody has learned it.
    """

    report: EngineReport
    role: str = ""
    heard_at_s: float = 0.0
    reported_at_s: float | None = None
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    step_s_per_token: float | None = None


def merged(said: Iterable[tuple[ServerDemand, float]]) -> dict[str, EngineSignal]:
    """By address. ``said``: what each process says of a ModelServer, and when it was heard.

    Requests are each process's own and add up. Reports are the same, seen by all: the newest counts.
    """
    several = list(said)
    if len(several) == 1:
        server, heard_at_s = several[0]
        return {address: _of_one(engine, heard_at_s) for address, engine in server.engines.items()}
    by_address: dict[str, list[tuple[EngineDemand, float]]] = {}
    for server, heard_at_s in several:
        for address, engine in server.engines.items():
            by_address.setdefault(address, []).append((engine, heard_at_s))
    return {address: _merged(found) for address, found in by_address.items()}


def _of_one(one: EngineDemand, heard_at_s: float) -> EngineSignal:
    """As ``_merged`` of what a single process says, which is the most frequent case."""
    reported_at_s = None if one.report_age_s is None else heard_at_s - one.report_age_s
    return EngineSignal(
        EngineReport(
            heard_at_s if reported_at_s is None else reported_at_s,
            one.in_flight,
            one.in_flight_tokens,
            one.waiting,
            one.running,
            one.kv_usage,
            one.kv_capacity_tokens,
        ),
        one.role,
        heard_at_s,
        reported_at_s,
        one.prefill_tokens_per_s,
        one.step_s,
        one.step_s_per_token,
    )


def _merged(several: list[tuple[EngineDemand, float]]) -> EngineSignal:
    newest, reported_at_s = max(
        ((one, -math.inf if one.report_age_s is None else at_s - one.report_age_s) for one, at_s in several),
        key=lambda found: found[1],
    )
    heard_at_s = max(at_s for _, at_s in several)
    has_reported = reported_at_s > -math.inf
    return EngineSignal(
        report=EngineReport(
            at_s=reported_at_s if has_reported else heard_at_s,
            in_flight=sum(one.in_flight for one, _ in several),
            in_flight_tokens=sum(one.in_flight_tokens for one, _ in several),
            waiting=newest.waiting,
            running=newest.running,
            kv_usage=newest.kv_usage,
            kv_capacity_tokens=newest.kv_capacity_tokens,
        ),
        role=next((one.role for one, _ in several if one.role), ""),
        heard_at_s=heard_at_s,
        reported_at_s=reported_at_s if has_reported else None,
        prefill_tokens_per_s=_mean(one.prefill_tokens_per_s for one, _ in several),
        step_s=_mean(one.step_s for one, _ in several),
        step_s_per_token=_mean(one.step_s_per_token for one, _ in several),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None
