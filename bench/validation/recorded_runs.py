# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of a real vLLM, and the same requests through the engine model."""

from __future__ import annotations

import gzip
import random
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bench.engine.request import Request, Token
from bench.engine.text import answer_text
from bench.reporting.distribution import Distribution, distribution
from bench.virtual.engines import EngineKind, VirtualEngine
from bench.virtual.event_queue import EventQueue
from bench.workload.text import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request as vLLM logged it, under its names. Instants in seconds of a monotonic clock."""

    input_toks: int
    output_toks: int
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


class RunSummary(msgspec.Struct, frozen=True):
    """The latencies of a run. ``makespan_s``: from the first arrival to the last token."""

    ttft_s: Distribution
    tpot_s: Distribution
    makespan_s: float


def read_requests(file: Path) -> list[RecordedRequest]:
    """Raises OSError or DecodeError."""
    with gzip.open(file, "rb") as lines:
        return [msgspec.json.decode(line, type=RecordedRequest) for line in lines]


def real(run: Sequence[RecordedRequest]) -> RunSummary:
    """The latencies that were measured."""
    start_at_s = min(one.queued_ts for one in run)
    return _summary(
        [(one.queued_ts, one.first_token_ts, one.last_token_ts, one.output_toks) for one in run], start_at_s
    )


def modelled(run: Sequence[RecordedRequest], kind: EngineKind) -> RunSummary:
    """The latencies of the same requests at the same instants on an engine of ``kind``.

    No two prompts share a prefix.
    """
    events, rng = EventQueue(), random.Random(0)
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}

    def note(tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            firsts.setdefault(token.request.key, now)
            if token.is_last:
                lasts[token.request.key] = now

    engine = VirtualEngine(kind, events, note, leaps=True)
    start_at_s = min(one.queued_ts for one in run)
    for key, one in enumerate(run):
        prompt = text_of(f"run/{key}", one.input_toks).encode()
        answer = answer_text(rng, one.output_toks)
        request = Request(key, prompt, answer, model="m", block_size=kind.limits.block_size)
        events.at(one.queued_ts - start_at_s, partial(engine.add, request))
    events.run()
    times = [(one.queued_ts - start_at_s, firsts[key], lasts[key], one.output_toks) for key, one in enumerate(run)]
    return _summary(times, 0.0)


def _summary(times: Sequence[tuple[float, float, float, int]], start_at_s: float) -> RunSummary:
    """``times``: of each request the instants of its arrival, first and last token, and its output tokens."""
    return RunSummary(
        ttft_s=distribution(first - queued for queued, first, _, _ in times),
        tpot_s=distribution((last - first) / (count - 1) for _, first, last, count in times if count > 1),
        makespan_s=max(last for _, _, last, _ in times) - start_at_s,
    )
