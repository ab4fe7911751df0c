# SPDX-License-Identifier: Apache-2.0
"""Two policies, or one before and after a change, paired by request; with intervals."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.export import Results, TrialResult
from bench.reporting.intervals import Interval, ratio_interval, windows
from bench.reporting.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bench.lab.export import RequestColumns
    from bench.lab.trial import Conditions

OURS: Final = "attache"


class NotComparable(Exception):
    """Two results that cannot be compared; the message says what is missing."""


class Difference(msgspec.Struct, frozen=True):
    """One measure: both means. ``change``: the second mean over the first, minus 1."""

    name: str
    first: float
    second: float
    change: Interval


_MEASURES: Final[Mapping[str, Callable[[RequestColumns], Sequence[float]]]] = {
    "TTFT, s": lambda requests: requests.ttft_s,
    "excess TTFT, s": lambda requests: [
        max(0.0, ttft - ideal) for ttft, ideal in zip(requests.ttft_s, requests.ideal_ttft_s, strict=True)
    ],
    "TPOT, s": lambda requests: requests.tpot_s,
    "E2E, s": lambda requests: requests.e2e_s,
    "cached tokens": lambda requests: requests.cached_tokens,
}


def read_side(name: str) -> list[TrialResult]:
    """The trials of one policy in a replay's JSON. Raises NotComparable.

    ``name``: ``FILE:POLICY``, or ``FILE`` for Attaché's policy if the file has it, else for its first.
    """
    file, _, policy = name.partition(":") if not Path(name).exists() else (name, "", "")
    try:
        results = msgspec.json.decode(Path(file).read_bytes(), type=Results)
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


def compare(first: Sequence[TrialResult], second: Sequence[TrialResult]) -> list[Difference]:
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
            ours += windows(left)
            theirs += windows(right)
        count = sum(map(len, ours)) or 1
        means = sum(map(sum, ours)) / count, sum(map(sum, theirs)) / count
        found.append(Difference(name, *means, ratio_interval(theirs, ours)))
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


def tables(names: tuple[str, str], first: Sequence[TrialResult], second: Sequence[TrialResult]) -> list[Table]:
    """One for each set of conditions, and one of all together, which says so. Raises NotComparable.

    ``names``: what the two sides are called in headings, as ``read_side`` takes them.
    """
    conditions = {one.conditions for one in second}
    both: dict[Conditions, list[TrialResult]] = defaultdict(list)
    for one in first:
        if one.conditions in conditions:
            both[msgspec.structs.replace(one.conditions, seed=0)].append(one)
    headings = ["mean", *_told_apart(names, first[0].policy, second[0].policy), "change", "95% interval"]
    paired = "paired by request; intervals of 95% over windows of the traces and seeds"
    made = [
        Table(f"{_words(key, found)}; {paired}", headings, [_cells(row) for row in compare(found, second)])
        for key, found in both.items()
        if len(both) > 1
    ]
    together = f"{len(both)} sets of conditions together, {_rates(both)}; " if len(both) > 1 else ""
    return [*made, Table(f"{together}{paired}", headings, [_cells(row) for row in compare(first, second)])]


def _words(key: Conditions, trials: Sequence[TrialResult]) -> str:
    workloads = ", ".join(dict.fromkeys(one.workload for one in trials))
    return f"{workloads}; rate x{key.rate_scale:g}, {key.engines} engines of {key.hardware}, {key.model}"


def _rates(conditions: Iterable[Conditions]) -> str:
    return "rates " + ", ".join(f"x{rate:g}" for rate in sorted({one.rate_scale for one in conditions}))


def _told_apart(names: tuple[str, str], first: str, second: str) -> tuple[str, str]:
    """The policies' names; those of one name by their files, too."""
    if first != second or names[0] == names[1]:
        return first, second
    one, other = (name if name.endswith(f":{first}") else f"{name}:{first}" for name in names)
    return one, other


def _cells(one: Difference) -> list[str]:
    low, high = f"{one.change.low:+.1%}", f"{one.change.high:+.1%}"
    return [one.name, f"{one.first:,.4g}", f"{one.second:,.4g}", f"{one.change.value:+.1%}", f"{low} to {high}"]
