# SPDX-License-Identifier: Apache-2.0
"""Results of a replay as JSON and CSV."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from bench.lab.inputs import code_digest, condition_files, digests
from bench.lab.measures import LatencyObjective, Measures, measure
from bench.lab.trial import Conditions, RequestRow, TrialReport
from bench.policies.own_file import policy_file
from bench.reporting.distribution import Distribution
from bench.reporting.intervals import windows
from bench.reporting.origin import MadeBy, made_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class RequestColumns(msgspec.Struct, frozen=True):
    """Every request's numbers as columns, in the order of sessions and turns; 0 for an error."""

    ttft_s: list[float]
    tpot_s: list[float]
    e2e_s: list[float]
    ideal_ttft_s: list[float]
    cached_tokens: list[int]
    prompt_tokens: list[int]
    errors: list[str]


class TrialResult(msgspec.Struct, frozen=True):
    """One trial. ``wall_s``: how long it took to run. ``files``: the digests of its trace, hardware and model."""

    policy: str
    workload: str
    conditions: Conditions
    measures: Measures
    requests: RequestColumns
    wall_s: float
    files: dict[str, str] = {}


class Group(msgspec.Struct, frozen=True):
    """The policies under one set of conditions, all seeds together. ``conditions``: in words."""

    conditions: str
    policies: dict[str, Measures]


class Results(msgspec.Struct, frozen=True):
    """What a replay writes. ``groups``: one for each set of conditions, as its tables."""

    objective: LatencyObjective
    trials: list[TrialResult]
    groups: list[Group] = []
    made_by: MadeBy | None = None


def results_of(reports: Sequence[TrialReport], objective: LatencyObjective, command: str) -> Results:
    """All reports of a replay as one value. ``command``: which made them."""
    return Results(
        objective=objective,
        trials=[_trial(report, objective) for report in reports],
        groups=[
            Group(words, {policy: pooled(some, objective) for policy, some in by_policy(found).items()})
            for words, found in by_conditions(reports).items()
        ],
        made_by=made_by(
            command,
            versions={"code": code_digest()},
            files=digests(str(policy_file(policy) or policy) for policy in by_policy(reports)),
        ),
    )


def by_conditions(reports: Sequence[TrialReport]) -> dict[str, list[TrialReport]]:
    """Reports that differ in their policies and seeds alone, under words that say what the others do not share."""
    grouped: dict[Conditions, list[TrialReport]] = defaultdict(list)
    for report in reports:
        grouped[msgspec.structs.replace(report.trial.conditions, seed=0)].append(report)
    counts = Counter(_words(found) for found in grouped.values())
    # such as traces of one name in two directories, or two parts of what a generator makes
    return {
        words if counts[words := _words(found)] == 1 else f"{conditions.trace} after {conditions.skip}: {words}": found
        for conditions, found in grouped.items()
    }


def _words(reports: Sequence[TrialReport]) -> str:
    one = reports[0].trial.conditions
    workloads = ", ".join(dict.fromkeys(report.workload for report in reports))
    seeds = sorted({report.trial.conditions.seed for report in reports})
    seeded = f", {len(seeds)} seeds together" if len(seeds) > 1 else ""
    return f"{workloads}; rate x{one.rate_scale:g}, {one.engines} engines of {one.hardware}, {one.model}{seeded}"


def ttft_blocks(reports: Sequence[TrialReport]) -> list[Sequence[float]]:
    """The TTFTs of good answers in windows, from which intervals are drawn."""
    return [window for report in reports for window in windows([row.ttft_s for row in report.rows if not row.error])]


def by_policy(reports: Sequence[TrialReport]) -> dict[str, list[TrialReport]]:
    """The reports of each policy."""
    grouped: dict[str, list[TrialReport]] = defaultdict(list)
    for report in reports:
        grouped[report.trial.policy].append(report)
    return grouped


def pooled(reports: Sequence[TrialReport], objective: LatencyObjective) -> Measures:
    """The measures of several trials of one policy together."""
    rows = [row for report in reports for row in report.rows]
    engines = max((len(report.busy) for report in reports), default=0)
    return measure(rows, sum(report.duration_s for report in reports), objective, engines=engines)


def _trial(report: TrialReport, objective: LatencyObjective) -> TrialResult:
    return TrialResult(
        policy=report.trial.policy,
        workload=report.workload,
        conditions=report.trial.conditions,
        measures=measure(report.rows, report.duration_s, objective, engines=len(report.busy)),
        requests=_columns(report.rows),
        wall_s=round(report.wall_s, 3),
        files=condition_files(report.trial.conditions),
    )


def _columns(rows: Sequence[RequestRow]) -> RequestColumns:
    return RequestColumns(
        ttft_s=[round(row.ttft_s, 5) for row in rows],
        tpot_s=[round(row.tpot_s, 6) for row in rows],
        e2e_s=[round(row.e2e_s, 4) for row in rows],
        ideal_ttft_s=[round(row.ideal_s, 5) for row in rows],
        cached_tokens=[row.cached_tokens for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
        errors=[row.error for row in rows],
    )


def write_json(results: Results, file: Path) -> None:
    """Write all results to ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(results))


def write_csv(results: Results, file: Path) -> None:
    """Write a line for each trial to ``file``."""

    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [_line(trial) for trial in results.trials]
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _line(trial: TrialResult) -> Mapping[str, object]:
    line: dict[str, object] = {"policy": trial.policy, **msgspec.structs.asdict(trial.conditions)}
    for name, value in msgspec.structs.asdict(trial.measures).items():
        if isinstance(value, Distribution):
            line.update({f"{name}_{part}": number for part, number in msgspec.structs.asdict(value).items()})
        else:
            line[name] = value
    return line
