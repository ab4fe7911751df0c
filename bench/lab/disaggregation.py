# SPDX-License-Identifier: Apache-2.0
"""``attache lab --pairs``: prefill and decode engines against as many whole ones, by goodput.

Six engines, each a 70B model on four H100s, on rows of the traces that nothing was tuned on. Loads are shares of what
six whole engines can do (see ``lab_command``). A network is what KV caches are transferred over. Every decider plays
with three ratios of prefill to decode engines, and its best one counts in each cell: choosing the ratio is a task of
its own, and none shall lose by a bad one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.export import pool_measures
from bench.lab.measures import LatencyObjective
from bench.lab.trial import Trial, TrialConditions
from bench.lab.trial_runner import run_trials
from bench.reporting.report_elements import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from bench.lab.trial import TrialReport

_WHOLE: Final = "attache"
_PAIRED: Final = ("pd-attache", "pd-attache-strict", "pd-dynamo", "pd-llm-d", "pd-always")
_RATIOS: Final = ((2, 4), (3, 3), (4, 2))
_NETWORKS: Final = ("nvlink", "100gb")
# Of the pace that six engines can keep: the lab's rates are those of eight.
_LOADS: Final[Mapping[str, float]] = MappingProxyType({"30%": 0.30, "56%": 0.56, "85%": 0.85})
_PACE_AT_CAPACITY: Final[Mapping[str, float]] = MappingProxyType(
    {"conversation": 1.72 * 6 / 8, "synthetic": 1.71 * 6 / 8}
)
# Rows of each trace that are played: a part of what the lab plays is enough for shares of requests.
_LIMITS: Final[Mapping[str, int]] = MappingProxyType({"conversation": 1200, "synthetic": 600})
_OBJECTIVES: Final[Mapping[str, LatencyObjective]] = MappingProxyType(
    {
        "5 s and 100 ms": LatencyObjective(5.0, 0.1),
        "5 s and 30 ms (strict)": LatencyObjective(5.0, 0.03),
        "5 s and 25 ms (strictest)": LatencyObjective(5.0, 0.025),
    }
)


class TraceInput(msgspec.Struct, frozen=True):
    """``name``: of the trace, as in ``lab_command``. ``skip``: rows that others were tuned on."""

    name: str
    file: str
    skip: int


class _Cell(msgspec.Struct, frozen=True):
    """A trace under a load, over a network."""

    trace: str
    load: str
    network: str


def run_pairs_lab(traces: Sequence[TraceInput], out: Path, console: Console, *, jobs: int) -> list[Table]:
    """A table for each objective. Raises TraceInvalid, ConfigInvalid or HardwareUnknown."""
    trials = list(dict.fromkeys(trial for _, trial in _trials(traces)))
    reports = dict(zip(map(_name, trials), run_trials(trials, out / "runs", console, jobs=jobs), strict=True))
    cells: dict[_Cell, dict[str, list[TrialReport]]] = {}
    for cell, trial in _trials(traces):
        cells.setdefault(cell, {}).setdefault(trial.policy, []).append(reports[_name(trial)])
    return [_table(words, objective, cells) for words, objective in _OBJECTIVES.items()]


def _trials(traces: Sequence[TraceInput]) -> Iterator[tuple[_Cell, Trial]]:
    for trace in traces:
        for load, share in _LOADS.items():
            alone = TrialConditions(
                trace.file,
                trace_format="mooncake",
                skip=trace.skip,
                limit=_LIMITS[trace.name],
                rate_scale=share * _PACE_AT_CAPACITY[trace.name],
                engines=6,
            )
            for network in _NETWORKS:
                cell = _Cell(trace.name, load, network)
                yield cell, Trial(_WHOLE, alone)
                for prefill, decode in _RATIOS:
                    paired = msgspec.structs.replace(alone, prefill=prefill, decode=decode, network=network)
                    for policy in _PAIRED:
                        yield cell, Trial(policy, paired)


def _name(trial: Trial) -> bytes:
    return msgspec.json.encode(trial)


def _table(words: str, objective: LatencyObjective, cells: Mapping[_Cell, Mapping[str, list[TrialReport]]]) -> Table:
    """Goodput of whole engines, and of each decider over that, with its best ratio of prefill to decode engines."""
    rows = []
    for cell, by_policy in cells.items():
        whole = pool_measures(by_policy[_WHOLE], objective).goodput
        found = [_best(by_policy[policy], objective) for policy in _PAIRED]
        values = [f"{goodput / whole:.2f} ({ratio})" if whole else f"{goodput:.2f}/s" for goodput, ratio in found]
        rows.append([f"{cell.trace}, {cell.load}, {cell.network}", f"{whole:.2f}", *values])
    title = f"Goodput with the first token within {words.replace(' and ', ' and each further one within ')}"
    return Table(title, ["trace, load, network", "whole, 1/s", *_PAIRED], rows)


def _best(reports: Sequence[TrialReport], objective: LatencyObjective) -> tuple[float, str]:
    goodputs = [
        (pool_measures([one], objective).goodput, f"{one.trial.conditions.prefill}:{one.trial.conditions.decode}")
        for one in reports
    ]
    return max(goodputs, key=lambda one: one[0])
