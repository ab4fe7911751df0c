"""Two policies, or one before and after a change, on the same requests: differences with what may be believed of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from bench.lab.export import Results, TrialResult
from bench.lab.intervals import Interval, ratio_interval, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.lab.export import Requests

OURS: Final = "attache"


class NotComparable(Exception):
    """Two results without a common ground; the message says what is missing."""


class Difference(msgspec.Struct, frozen=True):
    """One measure: both means, and by what share the second is above the first."""

    name: str
    first: float
    second: float
    change: Interval


_MEASURES: Final[Mapping[str, Callable[[Requests], Sequence[float]]]] = {
    "TTFT, s": lambda requests: requests.ttft_s,
    "excess TTFT, s": lambda requests: [
        max(0.0, ttft - ideal) for ttft, ideal in zip(requests.ttft_s, requests.ideal_ttft_s, strict=True)
    ],
    "TPOT, s": lambda requests: requests.tpot_s,
    "E2E, s": lambda requests: requests.e2e_s,
    "cached tokens": lambda requests: requests.cached_tokens,
}


def read_side(name: str) -> list[TrialResult]:
    """``FILE`` or ``FILE:POLICY``; without a policy ours if it is there, else the only one. Raises NotComparable."""
    file, _, policy = name.partition(":") if not Path(name).exists() else (name, "", "")
    try:
        results = msgspec.json.decode(Path(file).read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{file}: cannot be read as the JSON of a replay: {error}"
        raise NotComparable(msg) from None
    if not policy:
        policy = OURS if OURS in results.policies else next(iter(results.policies), "")
    found = [trial for trial in results.trials if trial.policy == policy]
    if not found:
        msg = f"{file}: has no policy {policy or 'at all'}; it has {', '.join(results.policies)}"
        raise NotComparable(msg)
    return found


def compare(first: Sequence[TrialResult], second: Sequence[TrialResult]) -> list[Difference]:
    """Paired by conditions and by request; what only one side has, and requests with errors on either, are left out."""
    others = {msgspec.json.encode(trial.conditions): trial for trial in second}
    pairs = [(one, others[key]) for one in first if (key := msgspec.json.encode(one.conditions)) in others]
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
    one: TrialResult, other: TrialResult, column: Callable[[Requests], Sequence[float]]
) -> tuple[list[float], list[float]]:
    if len(one.requests.errors) != len(other.requests.errors):
        msg = (
            f"{one.policy} and {other.policy} have {len(one.requests.errors)} and {len(other.requests.errors)} requests"
        )
        raise NotComparable(msg)
    rows = zip(column(one.requests), column(other.requests), one.requests.errors, other.requests.errors, strict=True)
    both = [(left, right) for left, right, failed, other_failed in rows if not failed and not other_failed]
    return [left for left, _ in both], [right for _, right in both]


def table(first: Sequence[TrialResult], second: Sequence[TrialResult], differences: Sequence[Difference]) -> Table:
    """For the terminal."""
    made = Table(title="paired by request; intervals of 95% over windows of the traces and seeds")
    for heading in ("mean", first[0].policy, second[0].policy, "change", "95% interval"):
        made.add_column(heading, justify="left" if heading == "mean" else "right")
    for one in differences:
        change = one.change
        made.add_row(
            one.name,
            f"{one.first:,.4g}",
            f"{one.second:,.4g}",
            f"{change.value:+.1%}",
            f"{change.low:+.1%} to {change.high:+.1%}",
        )
    return made
