# SPDX-License-Identifier: Apache-2.0
"""Results of a replay as JSON and CSV, and their comparison, paired by request, with intervals."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.measures import LatencyObjective, Measures, compute_measures
from bench.lab.policies.policy_file import policy_file
from bench.lab.trial import TrialConditions
from bench.lab.trial_runner import code_digest, condition_files, file_digests
from bench.reporting.report_elements import Provenance, Table, provenance
from bench.reporting.request_results import ConfidenceInterval, Distribution, ratio_interval, split_into_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bench.lab.trial import RequestRow, TrialReport

OURS: Final = "attache"
_MEASURES: Final[Mapping[str, Callable[[RequestColumns], Sequence[float]]]] = {
    "TTFT, s": lambda requests: requests.ttft_s,
    "excess TTFT, s": lambda requests: [
        max(0.0, ttft - ideal) for ttft, ideal in zip(requests.ttft_s, requests.ideal_ttft_s, strict=True)
    ],
    "TPOT, s": lambda requests: requests.tpot_s,
    "E2E, s": lambda requests: requests.e2e_s,
    "cached tokens": lambda requests: requests.cached_tokens,
}


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
    conditions: TrialConditions
    measures: Measures
    requests: RequestColumns
    wall_s: float
    files: dict[str, str] = {}


class ConditionGroup(msgspec.Struct, frozen=True):
    """The policies under one set of conditions, all seeds together. ``conditions``: in words."""

    conditions: str
    policies: dict[str, Measures]


class ReplayResults(msgspec.Struct, frozen=True):
    """What a replay writes. ``groups``: one for each set of conditions, as its tables."""

    objective: LatencyObjective
    trials: list[TrialResult]
    groups: list[ConditionGroup] = []
    made_by: Provenance | None = None


def build_replay_results(reports: Sequence[TrialReport], objective: LatencyObjective, command: str) -> ReplayResults:
    """All reports of a replay as one value. ``command``: which made them."""
    return ReplayResults(
        objective=objective,
        trials=[_trial(report, objective) for report in reports],
        groups=[
            ConditionGroup(
                words, {policy: pool_measures(some, objective) for policy, some in group_by_policy(found).items()}
            )
            for words, found in group_by_conditions(reports).items()
        ],
        made_by=provenance(
            command,
            versions={"code": code_digest()},
            files=file_digests(str(policy_file(policy) or policy) for policy in group_by_policy(reports)),
        ),
    )


def group_by_conditions(reports: Sequence[TrialReport]) -> dict[str, list[TrialReport]]:
    """Reports that differ in their policies and seeds alone, by a text with the conditions that differ between the
    groups.
    """
    grouped: dict[TrialConditions, list[TrialReport]] = defaultdict(list)
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
    return f"{workloads}; rate x{one.rate_scale:g}, {one.engines_text()}{seeded}"


def ttft_windows(reports: Sequence[TrialReport]) -> list[Sequence[float]]:
    """The TTFTs of good answers in windows, from which intervals are drawn."""
    return [
        window
        for report in reports
        for window in split_into_windows([row.ttft_s for row in report.rows if not row.error])
    ]


def group_by_policy(reports: Sequence[TrialReport]) -> dict[str, list[TrialReport]]:
    """The reports of each policy."""
    grouped: dict[str, list[TrialReport]] = defaultdict(list)
    for report in reports:
        grouped[report.trial.policy].append(report)
    return grouped


def pool_measures(reports: Sequence[TrialReport], objective: LatencyObjective) -> Measures:
    """The measures of several trials of one policy together."""
    rows = [row for report in reports for row in report.rows]
    engines = max((len(report.busy) for report in reports), default=0)
    return compute_measures(rows, sum(report.duration_s for report in reports), objective, engines=engines)


def _trial(report: TrialReport, objective: LatencyObjective) -> TrialResult:
    return TrialResult(
        policy=report.trial.policy,
        workload=report.workload,
        conditions=report.trial.conditions,
        measures=compute_measures(report.rows, report.duration_s, objective, engines=len(report.busy)),
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


def write_json(results: ReplayResults, file: Path) -> None:
    """Write all results to ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(results))


def write_csv(results: ReplayResults, file: Path) -> None:
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


class NotComparable(Exception):
    """Two results that cannot be compared; the message has what is missing."""


class MeasureDifference(msgspec.Struct, frozen=True):
    """One measure: both means. ``change``: the second mean over the first, minus 1."""

    name: str
    first: float
    second: float
    change: ConfidenceInterval


def read_policy_trials(name: str) -> list[TrialResult]:
    """The trials of one policy in a replay's JSON. Raises NotComparable.

    ``name``: ``FILE:POLICY``, or ``FILE`` for Attaché's policy if the file has it, else for its first.
    """
    file, _, policy = name.partition(":") if not Path(name).exists() else (name, "", "")
    try:
        results = msgspec.json.decode(Path(file).read_bytes(), type=ReplayResults)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{file}: cannot be read as the JSON of a replay: {error}"
        raise NotComparable(msg) from None
    policies = list(dict.fromkeys(trial.policy for trial in results.trials))
    if not policy:
        policy = OURS if OURS in policies else next(iter(policies), "")
    found = [trial for trial in results.trials if trial.policy == policy]
    if not found:
        msg = f"{file}: has no policy {policy or 'at all'}; it has {', '.join(policies)}"
        raise NotComparable(msg)
    return found


def compare_trials(first: Sequence[TrialResult], second: Sequence[TrialResult]) -> list[MeasureDifference]:
    """Differences between trials under the same conditions, request by request. Raises NotComparable.

    Trials that only one side has are left out, and so are requests that failed on either side.
    """

    others = {msgspec.json.encode(trial.conditions): trial for trial in second}
    pairs = [(one, others[key]) for one in first if (key := msgspec.json.encode(one.conditions)) in others]
    for one, other in pairs:
        changed = [file for file, digest in one.files.items() if other.files.get(file, digest) != digest]
        if changed:
            raise NotComparable(f"{', '.join(changed)} was another file for the second; replay both with the same")
    if not pairs:
        raise NotComparable("the two have no trial under the same conditions; replay both with the same flags")
    found = []
    for name, column in _MEASURES.items():
        ours: list[Sequence[float]] = []
        theirs: list[Sequence[float]] = []
        for one, other in pairs:
            left, right = _paired(one, other, column)
            ours += split_into_windows(left)
            theirs += split_into_windows(right)
        count = sum(map(len, ours)) or 1
        means = sum(map(sum, ours)) / count, sum(map(sum, theirs)) / count
        found.append(MeasureDifference(name, *means, ratio_interval(theirs, ours)))
    return found


def _paired(
    one: TrialResult, other: TrialResult, column: Callable[[RequestColumns], Sequence[float]]
) -> tuple[list[float], list[float]]:
    if len(one.requests.errors) != len(other.requests.errors):
        msg = (
            f"{one.policy} and {other.policy} have {len(one.requests.errors)} and {len(other.requests.errors)} requests"
        )
        raise NotComparable(msg)
    rows = zip(column(one.requests), column(other.requests), one.requests.errors, other.requests.errors, strict=True)
    both = [(left, right) for left, right, failed, other_failed in rows if not failed and not other_failed]
    return [left for left, _ in both], [right for _, right in both]


def comparison_tables(
    names: tuple[str, str], first: Sequence[TrialResult], second: Sequence[TrialResult]
) -> list[Table]:
    """One for each set of conditions, and one of all together, with that in its title. Raises NotComparable.

    ``names``: what the two sides are called in headings, as ``read_policy_trials`` takes them.
    """
    conditions = {one.conditions for one in second}
    both: dict[TrialConditions, list[TrialResult]] = defaultdict(list)
    for one in first:
        if one.conditions in conditions:
            both[msgspec.structs.replace(one.conditions, seed=0)].append(one)
    headings = ["mean", *_distinct_names(names, first[0].policy, second[0].policy), "change", "95% interval"]
    paired = "paired by request; intervals of 95% over windows of the traces and seeds"
    made = [
        Table(
            f"{_difference_words(key, found)}; {paired}",
            headings,
            [_cells(row) for row in compare_trials(found, second)],
        )
        for key, found in both.items()
        if len(both) > 1
    ]
    together = f"{len(both)} sets of conditions together, {_rates(both)}; " if len(both) > 1 else ""
    return [*made, Table(f"{together}{paired}", headings, [_cells(row) for row in compare_trials(first, second)])]


def _difference_words(key: TrialConditions, trials: Sequence[TrialResult]) -> str:
    workloads = ", ".join(dict.fromkeys(one.workload for one in trials))
    return f"{workloads}; rate x{key.rate_scale:g}, {key.engines_text()}"


def _rates(conditions: Iterable[TrialConditions]) -> str:
    return "rates " + ", ".join(f"x{rate:g}" for rate in sorted({one.rate_scale for one in conditions}))


def _distinct_names(names: tuple[str, str], first: str, second: str) -> tuple[str, str]:
    """The policies' names; those of one name by their files, too."""
    if first != second or names[0] == names[1]:
        return first, second
    one, other = (name if name.endswith(f":{first}") else f"{name}:{first}" for name in names)
    return one, other


def _cells(one: MeasureDifference) -> list[str]:
    low, high = f"{one.change.low:+.1%}", f"{one.change.high:+.1%}"
    return [one.name, f"{one.first:,.4g}", f"{one.second:,.4g}", f"{one.change.value:+.1%}", f"{low} to {high}"]
