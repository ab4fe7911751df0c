# SPDX-License-Identifier: Apache-2.0
"""Loads by name, each in a half to tune on and a half that is held back."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from bench.autoscale.capacity import Mean, capacity
from bench.autoscale.shapes import Lines, Shape, Sines, arrivals, days, spikes, steps
from bench.autoscale.variants import ONE, SEVERAL, Variant
from bench.lab.measures import LatencyObjective
from bench.workload.sessions import Session, SessionTurn, Workload
from bench.workload.text import Piece
from bench.workload.traces import Excerpt, TraceInvalid, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Half(enum.StrEnum):
    """TUNING: policies may be set by it. HELD: what they are then judged by."""

    TUNING = "tuning"
    HELD = "held"


class Lengths(msgspec.Struct, frozen=True):
    """Of generated requests, in tokens: an instruction that ``groups`` of requests share, and lognormal lengths of the
    rest of the prompt and of the answer. ``sigma``: of both logarithms.
    """

    shared: int = 1500
    prompt: int = 3000
    output: int = 450
    groups: int = 8
    sigma: float = 0.6
    longest: int = 16_000

    @property
    def mean(self) -> Mean:
        """Once an engine has seen the instructions."""
        return Mean(uncached=self.prompt, cached=self.shared, output=self.output)

    def draw(self, mean: int, rng: random.Random) -> int:
        """One length."""
        return max(1, min(self.longest, round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma))))


class Load(msgspec.Struct, frozen=True):
    """What a fleet has to carry. ``shapes``: by half, for generated requests. ``trace``: a file instead, whose first
    half of time is for tuning. ``copies``: how many requests of the lab one of the trace is. ``mean``: the mean request
    of a trace. ``duration_s``: of a half; of a trace: at most. ``min_replicas``: 0 where policies that can may go to
    zero.
    """

    name: str
    duration_s: float
    shapes: Mapping[Half, Shape] = {}
    lengths: Lengths = Lengths()
    trace: str = ""
    copies: float = 1.0
    trace_mean: Mean | None = None
    objective: LatencyObjective = LatencyObjective(ttft_s=3.0, tpot_s=0.075)
    variants: tuple[Variant, ...] = ONE
    min_replicas: int = 1

    @property
    def mean(self) -> Mean:
        """The mean request."""
        return self.lengths.mean if self.trace_mean is None else self.trace_mean

    def workload(self, half: Half, seed: int, traces: Path) -> Workload:
        """``traces``: the directory with trace files. Raises TraceInvalid."""
        if self.trace:
            return self._replayed(half, seed, traces)
        rng = random.Random(f"{self.name}/{half}/{seed}")
        shape = self.shapes[half]
        per_engine = capacity(self.variants[0].kind(), self.mean, self.objective.tpot_s).requests_per_s
        begins = arrivals(shape, per_engine, self.duration_s, rng)
        key = f"{self.name}/{half}/{seed}"
        return Workload(key, tuple(self._session(key, number, at_s, rng) for number, at_s in enumerate(begins)))

    def _session(self, key: str, number: int, at_s: float, rng: random.Random) -> Session:
        lengths = self.lengths
        pieces = (
            Piece(f"instruction/{rng.randrange(lengths.groups)}", lengths.shared),
            Piece(f"{key}/{number}", lengths.draw(lengths.prompt, rng)),
        )
        return Session(at_s, (SessionTurn(pieces, lengths.draw(lengths.output, rng)),))

    def _replayed(self, half: Half, seed: int, traces: Path) -> Workload:
        sessions = _read(traces / self.trace)
        middle_s = sessions[-1].begins_at_s / 2
        begin_s = 0.0 if half is Half.TUNING else middle_s
        end_s = min(middle_s, self.duration_s)
        mine = [
            msgspec.structs.replace(one, begins_at_s=one.begins_at_s - begin_s)
            for one in sessions
            if begin_s <= one.begins_at_s < begin_s + end_s
        ]
        copied = copies(mine, self.copies, random.Random(f"{self.name}/{seed}"))
        return Workload(f"{self.name}/{half}/{seed}", tuple(copied))


def copies(sessions: Sequence[Session], count: float, rng: random.Random, *, apart_s: float = 5.0) -> list[Session]:
    """``count`` sessions for each, in the mean: the rate grows, and how it changes stays.

    ``apart_s``: copies begin up to so much later. Copies share no text with what they were copied from beyond what the
    original shares with others.
    """
    made: list[Session] = []
    for one in sessions:
        number = int(count) + (rng.random() < count % 1)
        for copy in range(number):
            begins_at_s = one.begins_at_s + (rng.uniform(0, apart_s) if copy else 0.0)
            turns = one.turns if not copy else tuple(_renamed(turn, copy) for turn in one.turns)
            made.append(msgspec.structs.replace(one, begins_at_s=begins_at_s, turns=turns))
    return sorted(made, key=lambda one: one.begins_at_s)


def _renamed(turn: SessionTurn, copy: int) -> SessionTurn:
    pieces = tuple(Piece(f"{piece.key}/{copy}", piece.tokens, piece.first) for piece in turn.pieces)
    return msgspec.structs.replace(turn, pieces=pieces)


def _read(file: Path) -> Sequence[Session]:
    if not file.exists():
        msg = f"{file}: is not there; give the directory of the traces with --traces, or other --loads"
        raise TraceInvalid(msg)
    return sorted(read_trace(file, Excerpt(0, 0)).sessions, key=lambda one: one.begins_at_s)


def _shaped(name: str, tuning: Shape, held: Shape, duration_s: float, variants: tuple[Variant, ...] = ONE) -> Load:
    return Load(name, duration_s, {Half.TUNING: tuning, Half.HELD: held}, variants=variants)


_RAMP_TUNING: Final = Lines(((0, 2), (120, 2), (600, 9), (720, 9), (960, 3)))
_RAMP_HELD: Final = Lines(((0, 3), (90, 3), (330, 10), (540, 10), (1020, 2)))
_LOADS: Final = (
    _shaped("steps", steps((0, 2), (240, 7), (720, 3)), steps((0, 3), (180, 9), (420, 5), (660, 8), (900, 2)), 1080),
    _shaped("ramps", _RAMP_TUNING, _RAMP_HELD, 1140),
    _shaped(
        "spikes",
        spikes(3, (200, 75, 8), (560, 45, 9), (860, 90, 7)),
        spikes(2, (150, 60, 7), (420, 120, 6), (780, 40, 10)),
        1080,
    ),
    _shaped("sines", Sines(5, ((400, 3), (90, 0.7))), Sines(6, ((280, 2.5), (700, 2), (60, 0.5))), 1200),
    _shaped("days", days(5, 1200), days(6, 900, begins_at=5), 1200),
    _shaped("noise", Sines(5, ()), Sines(3.4, ()), 1200),
    msgspec.structs.replace(
        _shaped(
            "idle",
            steps((0, 4), (180, 0.05), (480, 5), (660, 0), (960, 3)),
            steps((0, 3), (240, 0), (540, 6), (660, 0.05), (900, 4)),
            1140,
        ),
        min_replicas=0,
    ),
    _shaped("kinds", _RAMP_TUNING, _RAMP_HELD, 1140, SEVERAL),
    Load("azure-code", 720, trace="azure2023_code_a.csv.gz", copies=3, trace_mean=Mean(2048, 0, 28)),
    Load("azure-chat", 900, trace="azure2023_conv_a.csv.gz", copies=2.5, trace_mean=Mean(1155, 0, 211)),
    Load(
        "mooncake",
        1000,
        trace="mooncake_conversation_a.jsonl.gz",
        copies=0.6,
        trace_mean=Mean(8000, 4000, 343),
        objective=LatencyObjective(ttft_s=8.0, tpot_s=0.1),
    ),
)
LOADS: Final[Mapping[str, Load]] = MappingProxyType({one.name: one for one in _LOADS})
# To see that everything runs; nobody is judged by them.
_QUICK_SHAPE: Final = steps((0, 1.5), (80, 5))
QUICK_LOADS: Final[Mapping[str, Load]] = MappingProxyType(
    {
        "quick": _shaped("quick", _QUICK_SHAPE, _QUICK_SHAPE, 180),
        "quick-kinds": _shaped("quick-kinds", _QUICK_SHAPE, _QUICK_SHAPE, 180, SEVERAL),
    }
)


def load_named(name: str) -> Load:
    """Raises KeyError."""
    return LOADS[name] if name in LOADS else QUICK_LOADS[name]
