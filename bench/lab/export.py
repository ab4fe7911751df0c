"""Reports as JSON and CSV."""

from __future__ import annotations

import csv
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from bench.lab.measures import Measures, Objective, Spread, measure
from bench.lab.trial import Conditions, Report, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class Requests(msgspec.Struct, frozen=True):
    """Every request's numbers, as columns in the order of sessions and turns; of an error all 0."""

    ttft_s: list[float]
    tpot_s: list[float]
    e2e_s: list[float]
    ideal_ttft_s: list[float]
    cached_tokens: list[int]
    prompt_tokens: list[int]
    errors: list[str]


class TrialResult(msgspec.Struct, frozen=True):
    """One trial. ``wall_s``: what it took here."""

    policy: str
    workload: str
    conditions: Conditions
    measures: Measures
    requests: Requests
    wall_s: float


class Results(msgspec.Struct, frozen=True):
    """What a replay writes. ``policies``: over all of a policy's trials together."""

    objective: Objective
    policies: dict[str, Measures]
    trials: list[TrialResult]


def results_of(reports: Sequence[Report], objective: Objective) -> Results:
    """All of it as one value."""
    by_policy: dict[str, list[Report]] = defaultdict(list)
    for report in reports:
        by_policy[report.trial.policy].append(report)
    return Results(
        objective=objective,
        policies={name: pooled(found, objective) for name, found in by_policy.items()},
        trials=[_trial(report, objective) for report in reports],
    )


def pooled(reports: Sequence[Report], objective: Objective) -> Measures:
    """Several trials of one policy as one."""
    rows = [row for report in reports for row in report.rows]
    return measure(rows, sum(report.duration_s for report in reports), objective)


def _trial(report: Report, objective: Objective) -> TrialResult:
    return TrialResult(
        policy=report.trial.policy,
        workload=report.workload,
        conditions=report.trial.conditions,
        measures=measure(report.rows, report.duration_s, objective),
        requests=_columns(report.rows),
        wall_s=round(report.wall_s, 3),
    )


def _columns(rows: Sequence[Row]) -> Requests:
    return Requests(
        ttft_s=[round(row.ttft_s, 5) for row in rows],
        tpot_s=[round(row.tpot_s, 6) for row in rows],
        e2e_s=[round(row.e2e_s, 4) for row in rows],
        ideal_ttft_s=[round(row.ideal_s, 5) for row in rows],
        cached_tokens=[row.cached_tokens for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
        errors=[row.error for row in rows],
    )


def write_json(results: Results, file: Path) -> None:
    """For programs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(results))


def write_csv(results: Results, file: Path) -> None:
    """A line for each trial, for spreadsheets."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [_line(trial) for trial in results.trials]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _line(trial: TrialResult) -> Mapping[str, object]:
    line: dict[str, object] = {"policy": trial.policy, **msgspec.structs.asdict(trial.conditions)}
    for name, value in msgspec.structs.asdict(trial.measures).items():
        if isinstance(value, Spread):
            line.update({f"{name}_{part}": number for part, number in msgspec.structs.asdict(value).items()})
        else:
            line[name] = value
    return line
