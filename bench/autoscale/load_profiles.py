# SPDX-License-Identifier: Apache-2.0
"""Loads by name, in a tuning half and a held-back half; their shapes over time; the cheapest mix of engines for each.

A load has two kinds, each with at most 16 replicas, so there are few mixes. The live autoscaler's allocation is another
program (``controller.autoscaler.decision.allocation``): the evaluation does not use the evaluated code.
"""

from __future__ import annotations

import enum
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from bench.autoscale.simulated_fleet import ONE, SEVERAL, MeanRequestTokens, Variant, engine_capacity
from bench.lab.measures import LatencyObjective
from bench.workload.sessions import Session, SessionTurn, TextPiece, Workload
from bench.workload.traces import Excerpt, TraceInvalid, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Of a day in the life of a service, by hour; scaled to a mean of 1.
_DAY: Final = (3, 2, 2, 2, 2, 3, 4, 6, 9, 11, 12, 12, 10, 11, 13, 13, 12, 10, 8, 7, 7, 6, 5, 4)
# Rounding of sums of capacities.
_NOTHING = 1e-9


class LoadCurve(Protocol):
    """Load by time."""

    @property
    def peak(self) -> float:
        """Never exceeded."""
        ...

    def load_at(self, at_s: float) -> float:
        """Engines' worth of requests at an instant."""
        ...


class PiecewiseLinearLoad(msgspec.Struct, frozen=True):
    """Straight lines between ``points`` of time and load; the first and the last level go on. Two points at one instant
    are a step.
    """

    points: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """The highest point."""
        return max(load for _, load in self.points)

    def load_at(self, at_s: float) -> float:
        """By interpolation."""
        after = bisect_right(self.points, at_s, key=lambda one: one[0])
        if after == 0:
            return self.points[0][1]
        if after == len(self.points):
            return self.points[-1][1]
        (begin_s, low), (end_s, high) = self.points[after - 1], self.points[after]
        return low + (high - low) * (at_s - begin_s) / (end_s - begin_s)


class SineLoad(msgspec.Struct, frozen=True):
    """``mean`` and ``waves`` of a period and an amplitude each; never below 0."""

    mean: float
    waves: tuple[tuple[float, float], ...]

    @property
    def peak(self) -> float:
        """All waves at once."""
        return self.mean + sum(amplitude for _, amplitude in self.waves)

    def load_at(self, at_s: float) -> float:
        """The sum at an instant."""
        waves = (amplitude * math.sin(2 * math.pi * at_s / period_s) for period_s, amplitude in self.waves)
        return max(0.0, self.mean + sum(waves))


def step_load(*levels: tuple[float, float]) -> PiecewiseLinearLoad:
    """``levels``: from when on which load."""
    points = [levels[0]]
    for begin_s, load in levels[1:]:
        points += [(begin_s, points[-1][1]), (begin_s, load)]
    return PiecewiseLinearLoad(tuple(points))


def spiky_load(base: float, *found: tuple[float, float, float]) -> PiecewiseLinearLoad:
    """``found``: when, for how long, and up to which load."""
    levels = [(0.0, base)]
    for begin_s, length_s, load in found:
        levels += [(begin_s, load), (begin_s + length_s, base)]
    return step_load(*levels)


def daily_load(mean: float, day_s: float, begins_at: float = 0.0) -> PiecewiseLinearLoad:
    """A day in ``day_s``, twice, so that any excerpt of one day can begin at the hour ``begins_at``."""
    hours = [mean * len(_DAY) * load / sum(_DAY) for load in _DAY]
    hour_s = day_s / len(hours)
    return PiecewiseLinearLoad(
        tuple(((number - begins_at) * hour_s, load) for number, load in enumerate([*hours, *hours]))
    )


def arrival_times(shape: LoadCurve, per_engine: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Instants of a Poisson process whose rate follows the shape, by thinning (Lewis and Shedler, 1979).

    ``per_engine``: requests a second that one engine serves.
    """
    highest = shape.peak * per_engine
    at_s = 0.0
    for _ in itertools.count():
        at_s += rng.expovariate(highest)
        if at_s >= duration_s:
            return
        if rng.random() * highest < shape.load_at(at_s) * per_engine:
            yield at_s


class DataSplit(enum.StrEnum):
    """TUNING: for the choice of settings. HELD: for their evaluation."""

    TUNING = "tuning"
    HELD = "held"


class TokenLengths(msgspec.Struct, frozen=True):
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
    def mean_request(self) -> MeanRequestTokens:
        """Once an engine has seen the instructions."""
        return MeanRequestTokens(uncached=self.prompt, cached=self.shared, output=self.output)

    def draw(self, mean: int, rng: random.Random) -> int:
        """One length."""
        return max(1, min(self.longest, round(rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma))))


class LoadProfile(msgspec.Struct, frozen=True):
    """The load of a fleet. ``shapes``: by half, for generated requests. ``trace``: a file instead, whose first half of
    time is for tuning. ``copies``: requests of the lab for each one of the trace. ``mean``: the mean request of a
    trace. ``duration_s``: of a half; of a trace: at most. ``min_replicas``: 0 where policies may scale to zero.
    """

    name: str
    duration_s: float
    shapes: Mapping[DataSplit, LoadCurve] = {}
    lengths: TokenLengths = TokenLengths()
    trace: str = ""
    copies: float = 1.0
    trace_mean: MeanRequestTokens | None = None
    objective: LatencyObjective = LatencyObjective(ttft_s=3.0, tpot_s=0.075)
    variants: tuple[Variant, ...] = ONE
    min_replicas: int = 1

    @property
    def mean_request(self) -> MeanRequestTokens:
        """The mean request."""
        return self.lengths.mean_request if self.trace_mean is None else self.trace_mean

    def workload(self, half: DataSplit, seed: int, traces: Path) -> Workload:
        """``traces``: the directory with trace files. Raises TraceInvalid."""
        if self.trace:
            return self._replayed(half, seed, traces)
        rng = random.Random(f"{self.name}/{half}/{seed}")
        shape = self.shapes[half]
        per_engine = engine_capacity(
            self.variants[0].engine_profile(), self.mean_request, self.objective.tpot_s
        ).requests_per_s
        begins = arrival_times(shape, per_engine, self.duration_s, rng)
        key = f"{self.name}/{half}/{seed}"
        return Workload(key, tuple(self._session(key, number, at_s, rng) for number, at_s in enumerate(begins)))

    def _session(self, key: str, number: int, at_s: float, rng: random.Random) -> Session:
        lengths = self.lengths
        pieces = (
            TextPiece(f"instruction/{rng.randrange(lengths.groups)}", lengths.shared),
            TextPiece(f"{key}/{number}", lengths.draw(lengths.prompt, rng)),
        )
        return Session(at_s, (SessionTurn(pieces, lengths.draw(lengths.output, rng)),))

    def _replayed(self, half: DataSplit, seed: int, traces: Path) -> Workload:
        sessions = _read(traces / self.trace)
        middle_s = sessions[-1].begins_at_s / 2
        begin_s = 0.0 if half is DataSplit.TUNING else middle_s
        end_s = min(middle_s, self.duration_s)
        mine = [
            msgspec.structs.replace(one, begins_at_s=one.begins_at_s - begin_s)
            for one in sessions
            if begin_s <= one.begins_at_s < begin_s + end_s
        ]
        copied = replicate_sessions(mine, self.copies, random.Random(f"{self.name}/{seed}"))
        return Workload(f"{self.name}/{half}/{seed}", tuple(copied))


def replicate_sessions(
    sessions: Sequence[Session], count: float, rng: random.Random, *, apart_s: float = 5.0
) -> list[Session]:
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
    pieces = tuple(TextPiece(f"{piece.key}/{copy}", piece.tokens, piece.first) for piece in turn.pieces)
    return msgspec.structs.replace(turn, pieces=pieces)


def _read(file: Path) -> Sequence[Session]:
    if not file.exists():
        msg = f"{file}: is not there; give the directory of the traces with --traces, or other --loads"
        raise TraceInvalid(msg)
    return sorted(read_trace(file, Excerpt(0, 0)).sessions, key=lambda one: one.begins_at_s)


def _shaped(
    name: str, tuning: LoadCurve, held: LoadCurve, duration_s: float, variants: tuple[Variant, ...] = ONE
) -> LoadProfile:
    return LoadProfile(name, duration_s, {DataSplit.TUNING: tuning, DataSplit.HELD: held}, variants=variants)


_RAMP_TUNING: Final = PiecewiseLinearLoad(((0, 2), (120, 2), (600, 9), (720, 9), (960, 3)))
_RAMP_HELD: Final = PiecewiseLinearLoad(((0, 3), (90, 3), (330, 10), (540, 10), (1020, 2)))
_LOADS: Final = (
    _shaped(
        "steps", step_load((0, 2), (240, 7), (720, 3)), step_load((0, 3), (180, 9), (420, 5), (660, 8), (900, 2)), 1080
    ),
    _shaped("ramps", _RAMP_TUNING, _RAMP_HELD, 1140),
    _shaped(
        "spikes",
        spiky_load(3, (200, 75, 8), (560, 45, 9), (860, 90, 7)),
        spiky_load(2, (150, 60, 7), (420, 120, 6), (780, 40, 10)),
        1080,
    ),
    _shaped("sines", SineLoad(5, ((400, 3), (90, 0.7))), SineLoad(6, ((280, 2.5), (700, 2), (60, 0.5))), 1200),
    _shaped("days", daily_load(5, 1200), daily_load(6, 900, begins_at=5), 1200),
    _shaped("noise", SineLoad(5, ()), SineLoad(3.4, ()), 1200),
    msgspec.structs.replace(
        _shaped(
            "idle",
            step_load((0, 4), (180, 0.05), (480, 5), (660, 0), (960, 3)),
            step_load((0, 3), (240, 0), (540, 6), (660, 0.05), (900, 4)),
            1140,
        ),
        min_replicas=0,
    ),
    _shaped("kinds", _RAMP_TUNING, _RAMP_HELD, 1140, SEVERAL),
    LoadProfile(
        "azure-code", 720, trace="azure2023_code_a.csv.gz", copies=3, trace_mean=MeanRequestTokens(2048, 0, 28)
    ),
    LoadProfile(
        "azure-chat", 900, trace="azure2023_conv_a.csv.gz", copies=2.5, trace_mean=MeanRequestTokens(1155, 0, 211)
    ),
    LoadProfile(
        "mooncake",
        1000,
        trace="mooncake_conversation_a.jsonl.gz",
        copies=0.6,
        trace_mean=MeanRequestTokens(8000, 4000, 343),
        objective=LatencyObjective(ttft_s=8.0, tpot_s=0.1),
    ),
)
LOADS: Final[Mapping[str, LoadProfile]] = MappingProxyType({one.name: one for one in _LOADS})
# For a quick trial run; they are not evaluated.
_QUICK_SHAPE: Final = step_load((0, 1.5), (80, 5))
QUICK_LOADS: Final[Mapping[str, LoadProfile]] = MappingProxyType(
    {
        "quick": _shaped("quick", _QUICK_SHAPE, _QUICK_SHAPE, 180),
        "quick-kinds": _shaped("quick-kinds", _QUICK_SHAPE, _QUICK_SHAPE, 180, SEVERAL),
    }
)


def find_load_profile(name: str) -> LoadProfile:
    """Raises KeyError."""
    return LOADS[name] if name in LOADS else QUICK_LOADS[name]


def relative_capacities(load: LoadProfile) -> dict[str, float]:
    """What one replica of each variant carries, in replicas of the first."""
    rates = [
        engine_capacity(one.engine_profile(), load.mean_request, load.objective.tpot_s).requests_per_s
        for one in load.variants
    ]
    return {one.name: rate / rates[0] for one, rate in zip(load.variants, rates, strict=True)}


class VariantMixes(msgspec.Struct, frozen=True):
    """All mixes within the variants' bounds. ``counts``: replicas of each variant, a row a mix. ``units``: what a mix
    carries, in replicas of the first variant. ``costs``: of an hour.
    """

    variants: Sequence[Variant]
    counts: np.ndarray
    units: np.ndarray
    costs: np.ndarray

    def sufficient_mix_mask(self, units: float) -> np.ndarray:
        """Whether each mix carries so much; if none does, those that carry most."""
        return self.units >= min(units, float(self.units.max())) - _NOTHING

    def replicas_by_variant(self, row: int) -> dict[str, int]:
        """A mix as an order."""
        return {one.name: int(count) for one, count in zip(self.variants, self.counts[row], strict=True)}

    def cheapest_mix(self, units: float) -> dict[str, int]:
        """The mix with the least cost that carries so much; of equals the one with the fewest replicas."""
        rows = np.flatnonzero(self.sufficient_mix_mask(units))
        return self.replicas_by_variant(int(min(rows, key=lambda row: (self.costs[row], self.counts[row].sum()))))


def variant_mixes(load: LoadProfile, min_replicas: int) -> VariantMixes:
    """``min_replicas``: of the first variant."""
    variants, worth = load.variants, relative_capacities(load)
    bounds = [range(0 if number else min_replicas, one.max_replicas + 1) for number, one in enumerate(variants)]
    counts = np.array(list(itertools.product(*bounds)))
    return VariantMixes(
        variants,
        counts,
        counts @ np.array([worth[one.name] for one in variants]),
        counts @ np.array([one.cost for one in variants]),
    )


def cheapest_plan(
    mixes: VariantMixes, needs: Sequence[float], leads_s: Mapping[str, float], initial: Mapping[str, int]
) -> list[dict[str, int]]:
    """For each second the mix that serves, so that all seconds together cost least and every need is carried.

    A replica costs from its order on, so each start costs its lead time as well. Exact, by dynamic programming from the
    last second to the first. ``initial``: what serves before the first second.
    """
    prices = np.array([one.cost for one in mixes.variants])
    leads = np.array([leads_s[one.name] for one in mixes.variants])
    added = np.maximum(0, mixes.counts[None, :, :] - mixes.counts[:, None, :])
    starts = added @ (prices * leads)
    later = np.zeros(len(mixes.counts))
    choices = []
    for units in reversed(needs):
        value = np.where(mixes.sufficient_mix_mask(units), mixes.costs + later, np.inf)
        totals = starts + value[None, :]
        choices.append(totals.argmin(axis=1))
        later = totals.min(axis=1)
    row = int(np.flatnonzero((mixes.counts == [initial.get(one.name, 0) for one in mixes.variants]).all(axis=1))[0])
    plan = []
    for choice in reversed(choices):
        row = int(choice[row])
        plan.append(mixes.replicas_by_variant(row))
    return plan
