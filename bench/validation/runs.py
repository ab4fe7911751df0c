"""Runs of a real vLLM, request by request, and the same through the engine model."""

from __future__ import annotations

import gzip
import random
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bench.engine.request import Request, Token
from bench.engine.text import answer_text
from bench.lab.measures import Spread, spread
from bench.virtual.engines import Kind, Machine
from bench.virtual.events import Events
from bench.workload.text import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


class Served(msgspec.Struct, frozen=True):
    """One request of a run, as vLLM logged it; times in seconds of a monotonic clock."""

    input_toks: int
    output_toks: int
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


class PlayedRun(msgspec.Struct, frozen=True):
    """What a run came to."""

    ttft_s: Spread
    tpot_s: Spread
    makespan_s: float


def read_run(file: Path) -> list[Served]:
    """Raises OSError or DecodeError."""
    with gzip.open(file, "rb") as lines:
        return [msgspec.json.decode(line, type=Served) for line in lines]


def real(run: Sequence[Served]) -> PlayedRun:
    """As it was."""
    start = min(one.queued_ts for one in run)
    return _outcome([(one.queued_ts, one.first_token_ts, one.last_token_ts, one.output_toks) for one in run], start)


def modelled(run: Sequence[Served], kind: Kind) -> PlayedRun:
    """The same requests at the same times, each with a prompt of its own."""
    events, rng = Events(), random.Random(0)
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}

    def note(tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            firsts.setdefault(token.request.key, now)
            if token.is_last:
                lasts[token.request.key] = now

    machine = Machine(kind, events, note, leaps=True)
    start = min(one.queued_ts for one in run)
    for key, one in enumerate(run):
        prompt = text_of(f"run/{key}", one.input_toks).encode()
        answer = answer_text(rng, one.output_toks)
        request = Request(key, prompt, answer, model="m", block_size=kind.limits.block_size)
        events.at(one.queued_ts - start, partial(machine.add, request))
    events.run()
    times = [(one.queued_ts - start, firsts[key], lasts[key], one.output_toks) for key, one in enumerate(run)]
    return _outcome(times, 0.0)


def _outcome(times: Sequence[tuple[float, float, float, int]], start: float) -> PlayedRun:
    return PlayedRun(
        ttft_s=spread(first - queued for queued, first, _, _ in times),
        tpot_s=spread((last - first) / (count - 1) for _, first, last, count in times if count > 1),
        makespan_s=max(last for _, _, last, _ in times) - start,
    )
