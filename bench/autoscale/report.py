# SPDX-License-Identifier: Apache-2.0
"""The lab's report: cost and attainment of each load, which policies dominate others, the cost of equal attainment.

Tables, a page in Markdown, and a plot of cost against attainment; the page names what has not been run.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from bench.autoscale.load_profiles import LOADS, DataSplit, find_load_profile
from bench.autoscale.policies import BOUNDS, OURS, OWN, POLICIES, policy_named, with_second_variant_policies
from bench.autoscale.trial import GOAL, TrialResult, TunedPolicy, tune_policies
from bench.reporting.report_elements import Table, figure
from bench.reporting.request_results import ConfidenceInterval, mean_interval, nearest_rank

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.autoscale.trial import Trial

_DRAWS: Final = 1000
# What we promise: so much less than the best baseline in the mean of the loads, and nowhere so much more.
LESS_IN_THE_MEAN: Final = 0.15
MORE_IN_A_CELL: Final = 0.03
_HEADINGS: Final = (
    "policy",
    "setting",
    "in target",
    "95%",
    "cost/h",
    "TTFT p99 s",
    "TPOT p99 ms",
    "orders/h",
    "turns/h",
    "to order s",
    "wasted GPU h",
)
_COLUMNS: Final = 3
# Colours that differ also for people who see few of them, then by lightness.
_COLOURS: Final = (
    "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#8c564b", "#7f7f7f", "#bcbd22", "#9467bd", "#17becf",
)  # fmt: skip
_OURS: Final = "#0033cc"
_SECOND: Final = "-second"
# Settings below this, and below those that are judged, are outside the panel, so that the others can be distinguished.
_FLOOR: Final = 60.0
_WIDTH: Final = 118
_UNKNOWN: Final = "unknown code"


class PolicyPoint(msgspec.Struct, frozen=True):
    """One policy at one setting on one load, over all seeds. ``attainment``: 0 to 1. ``cost``: an hour, in the mean.
    ``low`` and ``high``: of the 95% interval of the attainment.
    """

    policy: str
    load: str
    knob: float
    attainment: float
    low: float
    high: float
    cost: float


def policy_point(results: Sequence[TrialResult]) -> PolicyPoint:
    """``results``: of all seeds of a policy at one setting on one load."""
    trial = results[0].trial
    interval = attainment_interval(results)
    hours = sum(one.hours for one in results)
    cost = sum(one.bill.cost for one in results) / hours
    return PolicyPoint(trial.policy, trial.load, trial.knob, interval.value, interval.low, interval.high, cost)


def attainment_interval(results: Sequence[TrialResult]) -> ConfidenceInterval:
    """By bootstrap over the windows of all seeds."""
    blocks = [[1.0] * one.met + [0.0] * (one.due - one.met) for result in results for one in result.windows if one.due]
    return mean_interval(blocks)


def dominates(one: PolicyPoint, other: PolicyPoint) -> bool:
    """Whether it meets the targets more often and costs less."""
    return one.attainment > other.attainment and one.cost < other.cost


def cost_at(frontier: Sequence[PolicyPoint], attainment: float) -> float | None:
    """What a policy costs at an attainment, between the settings of its knob that were run; None where they do not
    reach.

    Only settings that no cheaper one of the same policy surpasses count, and between two of them the straight line. An
    attainment below all of them costs what the cheapest costs.
    """
    best = pareto_front(frontier)
    if not best or attainment > best[-1].attainment:
        return None
    if attainment <= best[0].attainment:
        return best[0].cost
    for low, high in itertools.pairwise(best):
        if attainment <= high.attainment:
            share = (attainment - low.attainment) / (high.attainment - low.attainment)
            return low.cost + share * (high.cost - low.cost)
    return None


def pareto_front(spots: Sequence[PolicyPoint]) -> list[PolicyPoint]:
    """Those that attain more than every cheaper one, by cost."""
    best: list[PolicyPoint] = []
    for one in sorted(spots, key=lambda one: (one.cost, -one.attainment)):
        if not best or one.attainment > best[-1].attainment:
            best.append(one)
    return best


def extra_cost(ours: PolicyPoint, frontier: Sequence[PolicyPoint]) -> float | None:
    """Our cost over the other policy's at our attainment, minus 1: -0.15 is fifteen percent less. None where the other
    never attains as much.
    """
    other = cost_at(frontier, ours.attainment)
    return None if other is None else ours.cost / other - 1


def extra_cost_interval(
    ours: Sequence[TrialResult], frontier: Sequence[Sequence[TrialResult]], *, seed: int = 0
) -> tuple[float, float]:
    """The 95% interval of ``extra_cost``, by bootstrap over windows of the runs.

    ``frontier``: the other policy's results, by setting. Attainments are drawn anew, with the same windows for both
    policies as far as they have as many; costs stay, because a run has one. Where the other policy does not attain as
    much in a draw, its cost is without bound, and the extra is minus infinity.
    """
    mine = _drawn_attainment(ours, seed)
    theirs = [(policy_point(each), _drawn_attainment(each, seed)) for each in frontier]
    cost = policy_point(ours).cost
    found = []
    for draw in range(_DRAWS):
        spots = [msgspec.structs.replace(one, attainment=float(drawn[draw])) for one, drawn in theirs]
        other = cost_at(spots, float(mine[draw]))
        found.append(-math.inf if other is None else cost / other - 1)
    found.sort()
    return found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS) - 1]


def _drawn_attainment(results: Sequence[TrialResult], seed: int) -> np.ndarray:
    windows = [one for result in sorted(results, key=lambda one: one.trial.seed) for one in result.windows]
    due, met = np.array([one.due for one in windows], float), np.array([one.met for one in windows], float)
    drawn = np.random.default_rng(seed).integers(0, len(windows), (_DRAWS, len(windows)))
    return np.asarray(met[drawn].sum(axis=1) / np.maximum(1.0, due[drawn].sum(axis=1)))


class PolicySettingResults(msgspec.Struct, frozen=True):
    """A policy at one setting on one load, over its seeds. ``is_hindsight``: nothing was tuned, and this setting is the
    best on the very load.
    """

    spot: PolicyPoint
    results: Sequence[TrialResult]
    is_hindsight: bool = False


class EqualAttainment(msgspec.Struct, frozen=True):
    """Our cost against a load's baselines at our attainment. ``extra``: by baseline, our cost over its, minus 1; None:
    it never attains as much. ``low`` and ``high``: the 95% interval of the extra over the best baseline; minus infinity
    where that baseline does not attain as much.
    """

    ours: PolicySettingResults
    extra: Mapping[str, float | None]
    low: float = 0.0
    high: float = 0.0

    @property
    def load(self) -> str:
        """Its name."""
        return self.ours.spot.load

    @property
    def best_baseline(self) -> tuple[str, float] | None:
        """The baseline that is cheapest at our attainment; None if no baseline attains as much."""
        reached = [(extra, baseline) for baseline, extra in self.extra.items() if extra is not None]
        if not reached:
            return None
        extra, baseline = max(reached)
        return baseline, extra


def results_by_load_and_policy(results: Iterable[TrialResult]) -> dict[str, dict[str, list[PolicySettingResults]]]:
    """By load and policy: a line for each setting."""
    grouped: dict[tuple[str, str, float], list[TrialResult]] = defaultdict(list)
    for one in results:
        grouped[one.trial.load, one.trial.policy, one.trial.knob].append(one)
    found: dict[str, dict[str, list[PolicySettingResults]]] = defaultdict(lambda: defaultdict(list))
    for (load, policy, _), each in sorted(grouped.items(), key=lambda one: one[0]):
        found[load][policy].append(PolicySettingResults(policy_point(each), each))
    return found


def tuned_results_by_policy(
    lines: Mapping[str, Sequence[PolicySettingResults]], settings: Mapping[str, TunedPolicy]
) -> dict[str, PolicySettingResults]:
    """Of each policy the line at the setting that tuning gave it; without tuning the best one, in hindsight.

    A policy whose tuned setting was not run on the load is left out.
    """
    found = {}
    for policy, each in lines.items():
        if policy not in settings:
            found[policy] = _best(each)
        elif mine := [one for one in each if one.spot.knob == settings[policy].knob]:
            found[policy] = mine[0]
    return found


def _best(lines: Sequence[PolicySettingResults]) -> PolicySettingResults:
    good = [one for one in lines if one.spot.attainment >= GOAL]
    best = (
        min(good, key=lambda one: one.spot.cost)
        if good
        else max(lines, key=lambda one: (one.spot.attainment, -one.spot.cost))
    )
    return msgspec.structs.replace(best, is_hindsight=True)


def table_for_load(load: str, lines: Mapping[str, PolicySettingResults]) -> Table:
    """The most in target first."""
    ordered = sorted(lines.items(), key=lambda one: -one[1].spot.attainment)
    styles = ["bold" if policy == OURS else "" for policy, _ in ordered]
    return Table(f"Load {load}", _HEADINGS, [_columns(policy, line) for policy, line in ordered], row_styles=styles)


def _columns(policy: str, line: PolicySettingResults) -> list[str]:
    found, results = line.spot, line.results
    hours = sum(one.hours for one in results)
    delays = sorted(delay for one in results for delay in one.to_order_s)
    return [
        f"**{policy}**" if policy == OURS else policy,
        f"{found.knob:g}" + ("*" if line.is_hindsight else ""),
        f"{found.attainment:.1%}",
        f"{100 * found.low:.1f} to {100 * found.high:.1f}",
        f"{found.cost:.2f}",
        f"{max(one.ttft_s.p99 for one in results):.1f}",
        f"{1000 * max(one.tpot_s.p99 for one in results):.0f}",
        f"{sum(one.orders for one in results) / hours:.0f}",
        f"{sum(one.reversals for one in results) / hours:.0f}",
        f"{nearest_rank(delays, 0.5):.0f}, {nearest_rank(delays, 0.99):.0f}" if delays else "none",
        f"{sum(one.bill.wasted_gpu_s for one in results) / len(results) / 3600:.2f}",
    ]


def describe_failed_requests(lines: Mapping[str, Mapping[str, Sequence[PolicySettingResults]]]) -> list[str]:
    """Policies that refused or lost requests, in sentences."""
    said = []
    for load, policies in lines.items():
        for policy, each in policies.items():
            refused = sum(one.refused for line in each for one in line.results)
            lost = sum(one.lost for line in each for one in line.results)
            if refused or lost:
                said.append(f"{policy} on {load}: {refused} refused, {lost} lost, over all settings.")
    return said


def dominating_baselines(lines: Mapping[str, PolicySettingResults]) -> list[str]:
    """Baselines that met the targets more often than we did, and cost less."""
    ours = lines.get(OURS)
    if ours is None:
        return []
    return [policy for policy, line in lines.items() if _is_baseline(policy) and dominates(line.spot, ours.spot)]


def _is_baseline(policy: str) -> bool:
    return policy not in BOUNDS and policy not in OWN


def compare_at_equal_attainment(
    ours: PolicySettingResults, lines: Mapping[str, Sequence[PolicySettingResults]]
) -> EqualAttainment:
    """``lines``: of all policies at all their settings on the held half, which is kinder to baselines than to us."""
    baselines = {policy: each for policy, each in lines.items() if _is_baseline(policy)}
    extra = {policy: extra_cost(ours.spot, [one.spot for one in each]) for policy, each in baselines.items()}
    found = EqualAttainment(ours, extra)
    if found.best_baseline is None:
        return found
    low, high = extra_cost_interval(ours.results, [one.results for one in baselines[found.best_baseline[0]]])
    return msgspec.structs.replace(found, low=low, high=high)


def summary_table(equals: Sequence[EqualAttainment], dominated: Mapping[str, Sequence[str]]) -> Table:
    """A row for each load."""
    rows = []
    for one in equals:
        best = ["none attains it", "", ""]
        if one.best_baseline is not None:
            best = [one.best_baseline[0], f"{one.best_baseline[1]:+.1%}", f"{_bound(one.low)} to {_bound(one.high)}"]
        spotted = one.ours.spot
        over = ", ".join(dominated.get(one.load, ())) or "nobody"
        rows.append([one.load, f"{spotted.attainment:.1%}", f"{spotted.cost:.2f}", *best, over])
    headings = ["load", "in target", "cost/h", "best baseline at that", "our cost against it", "95%", "dominated by"]
    return Table("Summary", headings, rows)


def _bound(value: float) -> str:
    return "out of its reach" if value == -math.inf else f"{value:+.0%}"


def cost_comparison_table(equals: Sequence[EqualAttainment]) -> Table:
    """Our cost against each baseline's: a row a baseline, a column a load."""
    baselines = sorted({baseline for one in equals for baseline in one.extra})
    rows = [
        [baseline, *(_extra(one.extra[baseline]) if baseline in one.extra else "" for one in equals)]
        for baseline in baselines
    ]
    return Table("Our cost at our attainment, against each baseline", ["baseline", *(one.load for one in equals)], rows)


def _extra(value: float | None) -> str:
    return "never" if value is None else f"{value:+.0%}"


def tuning_table(settings: Mapping[str, TunedPolicy]) -> Table:
    """What each policy was set to."""
    rows = [
        (
            one.policy,
            policy_named(one.policy).knob,
            f"{one.knob:g}",
            str(one.tried),
            f"{one.attainment:.1%}",
            f"{one.cost:.2f}",
        )
        for one in settings.values()
    ]
    return Table("Tuning", ["policy", "what is set", "to", "of settings", "in target", "cost/h"], rows)


def verdict(equals: Sequence[EqualAttainment], dominated: Mapping[str, Sequence[str]]) -> list[str]:
    """Whether our promises hold, in sentences, with each failure."""
    said = []
    for load, baselines in dominated.items():
        if baselines:
            said.append(
                f"FAILS on {load}: {', '.join(baselines)} met the targets more often than {OURS} and cost less."
            )
    if not said:
        said.append(f"No baseline met the targets more often than {OURS} and cost less, on any load.")
    best = {one.load: one.best_baseline[1] for one in equals if one.best_baseline is not None}
    if len(best) < len(equals):
        said.append(f"On {len(equals) - len(best)} of {len(equals)} loads no baseline attains as much at any setting.")
    if best:
        mean = sum(best.values()) / len(best)
        word = "holds" if mean <= -LESS_IN_THE_MEAN else "FAILS"
        said.append(
            f"15% less than the best baseline at equal attainment, in the mean of the loads: {word} ({mean:+.1%})."
        )
        worse = {load: extra for load, extra in best.items() if extra > MORE_IN_A_CELL}
        message = ", ".join(f"{load} {extra:+.1%}" for load, extra in worse.items())
        said.append(f"At most 3% more on any load: {'FAILS: ' + message if worse else 'holds'}.")
    return said


def write_plot(
    loads: Mapping[str, Mapping[str, Sequence[PolicySettingResults]]],
    tuned: Mapping[str, Mapping[str, PolicySettingResults]],
    file: Path,
) -> None:
    """As PNG. ``tuned``: the setting of each policy that tuning chose, which gets a larger mark."""
    columns = min(_COLUMNS, len(loads))
    rows = math.ceil(len(loads) / columns)
    with figure(file, rows=rows, columns=columns, size_inches=(max(9, 5 * columns), 4 * rows + 1.2)) as panels:
        for axes, (load, policies) in zip(panels, loads.items(), strict=False):
            for policy, lines in policies.items():
                _draw(axes, policy, lines, tuned[load].get(policy))
            axes.set_title(load)
            axes.set_xlabel("cost an hour, in the first kind's replicas")
            axes.set_ylabel("requests in target, %")
            judged = [100 * one.spot.attainment - 2 for one in tuned[load].values()]
            axes.set_ylim(max(0.0, min([_FLOOR, *judged])), 100.8)
        for axes in panels[len(loads) :]:
            axes.set_axis_off()
        _add_legend(panels[0], {policy for policies in loads.values() for policy in policies})


def _draw(axes: Axes, policy: str, lines: Sequence[PolicySettingResults], chosen: PolicySettingResults | None) -> None:
    """Every setting as a dot; a line along those that no cheaper one surpasses."""
    look = _line_style(policy)
    spots = [one.spot for one in lines]
    axes.plot([one.cost for one in spots], [100 * one.attainment for one in spots], ".", color=look["color"], alpha=0.6)
    best = pareto_front(spots)
    axes.plot([one.cost for one in best], [100 * one.attainment for one in best], **look)
    if chosen is not None:
        size = 11 if policy == OURS else 8
        axes.plot(
            [chosen.spot.cost], [100 * chosen.spot.attainment], "o", color=look["color"], markersize=size, zorder=4
        )


def _line_style(policy: str) -> dict[str, Any]:
    """The same for a policy in every panel."""
    name = policy.removesuffix(_SECOND)
    if name in OWN:
        return {
            "color": _OURS,
            "linewidth": 3.0 if name == OURS else 1.5,
            "linestyle": "-" if name == OURS else "--",
            "zorder": 3,
        }
    if name in BOUNDS:
        return {"color": "black", "linewidth": 1.5, "linestyle": ":"}
    others = [one for one in POLICIES if one not in OWN and one not in BOUNDS]
    style = "--" if policy.endswith(_SECOND) else "-"
    return {"color": _COLOURS[others.index(name) % len(_COLOURS)], "linewidth": 1.2, "linestyle": style}


def _add_legend(axes: Axes, policies: Iterable[str]) -> None:
    """Below all panels, so that it covers nothing."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - as bench.reporting.report_elements does, which says why

    present = set(policies)
    order = [one for name in POLICIES for one in (name, name + _SECOND) if one in present]
    handles = [Line2D([], [], label=one, **_line_style(one)) for one in order]
    handles.append(
        Line2D([], [], color="grey", marker="o", linestyle="", markersize=8, label="the setting that is judged")
    )
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)


class NothingToReport(ValueError):
    """There is no trial of a held-back half, so there is nothing to report."""


class Report(msgspec.Struct, frozen=True):
    """``page``: Markdown. ``tables``: those of it, for a terminal. ``said``: the verdict, in sentences. ``settings``:
    chosen by tuning. ``loads``: lines by load and policy, a line for each setting; ``judged``: the one that is judged.
    """

    page: str
    tables: Sequence[Table]
    said: Sequence[str]
    settings: Mapping[str, TunedPolicy]
    loads: Mapping[str, Mapping[str, Sequence[PolicySettingResults]]]
    judged: Mapping[str, Mapping[str, PolicySettingResults]]


def write_report(results: Iterable[TrialResult], out: Path) -> Report:
    """Raises NothingToReport. Writes ``autoscale.md``, ``autoscale.png`` and ``tuned.json`` into ``out``."""
    report = build_report(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "autoscale.md").write_text(report.page)
    (out / "tuned.json").write_bytes(msgspec.json.format(msgspec.json.encode(report.settings)))
    write_plot(report.loads, report.judged, out / "autoscale.png")
    return report


def build_report(results: Iterable[TrialResult]) -> Report:
    """Raises NothingToReport. ``results``: of one period and one start time."""
    each = sorted(results, key=lambda one: list(LOADS).index(one.trial.load) if one.trial.load in LOADS else -1)
    held = [one for one in each if one.trial.half is DataSplit.HELD]
    if not held:
        msg = "there is nothing to report: no trial of a held-back half is among those that were asked for"
        raise NothingToReport(msg)
    settings = tune_policies(one for one in each if one.trial.half is DataSplit.TUNING)
    found = results_by_load_and_policy(held)
    loads = {load: found[load] for load in dict.fromkeys(one.trial.load for one in held)}
    mine = {load: tuned_results_by_policy(policies, settings) for load, policies in loads.items()}
    equals = [compare_at_equal_attainment(lines[OURS], loads[load]) for load, lines in mine.items() if OURS in lines]
    dominated = {load: dominating_baselines(lines) for load, lines in mine.items() if OURS in lines}
    missing = _missing(each)
    said = [*_judgement(each, equals, dominated, is_whole=not missing), *describe_failed_requests(loads), *_mixed(each)]
    tables = [summary_table(equals, dominated), cost_comparison_table(equals)] if equals else []
    tables += [table_for_load(load, lines) for load, lines in mine.items()]
    if settings:
        tables.append(tuning_table(settings))
    wrapped = (line for one in said for line in _bullet(one))
    page = ["# Autoscalers in the lab", "", *_preface(each), "", "![Cost against attainment](autoscale.png)", ""]
    page += ["## What holds", "", *wrapped, ""]
    for table in tables:
        page += [f"## {table.title}", "", *table.as_markdown(), ""]
    page += ["## What was not run", "", *(missing or ["Everything was run."]), ""]
    return Report("\n".join(page), tables, said, settings, loads, mine)


def _judgement(
    results: Sequence[TrialResult],
    equals: Sequence[EqualAttainment],
    dominated: Mapping[str, Sequence[str]],
    *,
    is_whole: bool,
) -> list[str]:
    duration_s = results[0].trial.duration_s
    if duration_s:
        return [f"Nothing can be said: excerpts of {duration_s:g} s show that everything runs, and compare nothing."]
    if not equals:
        return [f"Nothing can be said: no trial of {OURS} has been run."]
    caution = [] if is_whole else ["CAUTION: not everything was run; what is missing is told below."]
    return [*verdict(equals, dominated), *caution]


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _preface(results: Sequence[TrialResult]) -> list[str]:
    trial = results[0].trial
    period = f"each {trial.period_s:g} s" if trial.period_s else "as often as its own program does"
    seeds = len({one.trial.seed for one in results if one.trial.half is DataSplit.HELD})
    tuning = list(dict.fromkeys(one.trial.load for one in results if one.trial.half is DataSplit.TUNING))
    told = [
        f"Every policy decides {period}. {seeds} {'seed' if seeds == 1 else 'seeds'} of the held-back halves.",
        f"Each policy has one setting for all loads: the cheapest on the tuning halves with {GOAL:.0%} of requests in",
        "target, or the one that attained most. A setting with a star was not tuned: it is the best one on that load.",
        "",
        *textwrap.wrap(f"Tuned on: {', '.join(tuning) or 'nothing'}.", _WIDTH),
        "",
        "- in target: requests that met both targets; refused and lost ones did not. 95%: by bootstrap over windows of",
        "  the runs and seeds. The first minute, in which nobody is obeyed, does not count.",
        "- cost/h: what the replicas cost, from their order to their end, in replicas of the first kind of engine.",
        "- our cost against a baseline: at our attainment, on the straight line between its settings on that load.",
        "- orders/h, turns/h: orders, and orders in the direction against the one before.",
        "- to order: seconds from more need than replicas ordered to the next larger order; median and p99.",
        "- wasted GPU h: of replicas that were starting or draining, of one run.",
        "- oracle: knows the future, and is no baseline. fixed: a fleet of one size, known beforehand.",
    ]
    if any(len(find_load_profile(one.trial.load).variants) > 1 for one in results):
        told += [
            (
                "- names with -second: baselines that know one kind of engine scale a fleet of the first kind;"
                " under such a name,"
            ),
            "  one of the second kind. wva-v1, wva-v2 and kthena choose among kinds by their own rules.",
        ]
    return told


def _mixed(results: Sequence[TrialResult]) -> list[str]:
    """That trials come from several states of the code, if they do."""
    codes = Counter(one.code or _UNKNOWN for one in results)
    if len(codes) == 1 and _UNKNOWN not in codes:
        return []
    message = ", ".join(f"{count} by {code}" for code, count in codes.most_common())
    word = "differ in the code that made them" if len(codes) > 1 else "do not say which code made them"
    return [f"CAUTION: trials {word}: {message}."]


def _missing(results: Sequence[TrialResult]) -> list[str]:
    """What would be there if all had been run, by load."""
    there: Mapping[tuple[str, DataSplit], set[Trial]] = defaultdict(set)
    for one in results:
        there[one.trial.load, one.trial.half].add(one.trial)
    seeds = {half: {one.trial.seed for one in results if one.trial.half is half} for half in DataSplit}
    absent = [one for one in LOADS if not there[one, DataSplit.HELD]]
    told = _bullet(f"no held-back half of: {', '.join(absent)}.") if absent else []
    for (load, half), trials in there.items():
        if not trials:
            continue
        parts = []
        for policy in with_second_variant_policies(POLICIES, len(find_load_profile(load).variants)):
            if policy in BOUNDS and half is DataSplit.TUNING:
                continue
            run = {(one.knob, one.seed) for one in trials if one.policy == policy}
            lacking = sorted({(knob, seed) for knob in policy_named(policy).grid for seed in seeds[half]} - run)
            if not run:
                parts.append(policy)
            elif lacking:
                parts.append(f"{len(lacking)} of {policy}'s {len(lacking) + len(run)}")
        if parts:
            told += _bullet(f"{load}, {half} half: {', '.join(parts)}.")
    return told
