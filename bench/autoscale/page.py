# SPDX-License-Identifier: Apache-2.0
"""The report as a page in Markdown and a plot of cost against attainment; it names what has not been run."""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.autoscale.cell import GOAL, Tuned, tuned
from bench.autoscale.loads import LOADS, Half, load_named
from bench.autoscale.policies import BOUNDS, OURS, OWN, POLICIES, policies_for, policy_named
from bench.autoscale.report import (
    Equal,
    Line,
    chosen,
    dominators,
    equal_attainment,
    equal_table,
    lines_of,
    load_table,
    summary_table,
    tuning_table,
    unanswered,
    unsurpassed,
    verdict,
)
from bench.reporting.pages import Table, figure

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.autoscale.cell import Cell, CellResult

_COLUMNS: Final = 3
# Colours that differ also for people who see few of them, then by lightness.
_COLOURS: Final = (
    "#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#8c564b", "#7f7f7f", "#bcbd22", "#9467bd", "#17becf",
)  # fmt: skip
_OURS: Final = "#0033cc"
_SECOND: Final = "-second"
# Settings below this, and below those that are judged, are outside the panel, so that the rest can be told apart.
_FLOOR: Final = 60.0


def write_plot(
    loads: Mapping[str, Mapping[str, Sequence[Line]]], tuned: Mapping[str, Mapping[str, Line]], file: Path
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


def _draw(axes: Axes, policy: str, lines: Sequence[Line], chosen: Line | None) -> None:
    """Every setting as a dot; a line along those that no cheaper one surpasses."""
    look = _look(policy)
    spots = [one.spot for one in lines]
    axes.plot([one.cost for one in spots], [100 * one.attainment for one in spots], ".", color=look["color"], alpha=0.6)
    best = unsurpassed(spots)
    axes.plot([one.cost for one in best], [100 * one.attainment for one in best], **look)
    if chosen is not None:
        size = 11 if policy == OURS else 8
        axes.plot(
            [chosen.spot.cost], [100 * chosen.spot.attainment], "o", color=look["color"], markersize=size, zorder=4
        )


def _look(policy: str) -> dict[str, Any]:
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
    from matplotlib.lines import Line2D  # noqa: PLC0415 - as bench.reporting.pages does, which says why

    present = set(policies)
    order = [one for name in POLICIES for one in (name, name + _SECOND) if one in present]
    handles = [Line2D([], [], label=one, **_look(one)) for one in order]
    handles.append(
        Line2D([], [], color="grey", marker="o", linestyle="", markersize=8, label="the setting that is judged")
    )
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)


_WIDTH: Final = 118
_UNKNOWN: Final = "unknown code"


class NothingToReport(ValueError):
    """There is no cell of a held-back half; so there is nothing to tell."""


class Report(msgspec.Struct, frozen=True):
    """``page``: Markdown. ``tables``: those of it, for a terminal. ``said``: what holds, in sentences. ``settings``:
    what tuning chose. ``loads``: lines by load and policy, a line for each setting; ``judged``: the one that is judged.
    """

    page: str
    tables: Sequence[Table]
    said: Sequence[str]
    settings: Mapping[str, Tuned]
    loads: Mapping[str, Mapping[str, Sequence[Line]]]
    judged: Mapping[str, Mapping[str, Line]]


def write_report(results: Iterable[CellResult], out: Path) -> Report:
    """Raises NothingToReport. Writes ``autoscale.md``, ``autoscale.png`` and ``tuned.json`` into ``out``."""
    report = report_of(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "autoscale.md").write_text(report.page)
    (out / "tuned.json").write_bytes(msgspec.json.format(msgspec.json.encode(report.settings)))
    write_plot(report.loads, report.judged, out / "autoscale.png")
    return report


def report_of(results: Iterable[CellResult]) -> Report:
    """Raises NothingToReport. ``results``: of one period and one start time."""
    each = sorted(results, key=lambda one: list(LOADS).index(one.cell.load) if one.cell.load in LOADS else -1)
    held = [one for one in each if one.cell.half is Half.HELD]
    if not held:
        msg = "there is nothing to report: no cell of a held-back half is among those that were asked for"
        raise NothingToReport(msg)
    settings = tuned(one for one in each if one.cell.half is Half.TUNING)
    found = lines_of(held)
    loads = {load: found[load] for load in dict.fromkeys(one.cell.load for one in held)}
    mine = {load: chosen(policies, settings) for load, policies in loads.items()}
    equals = [equal_attainment(lines[OURS], loads[load]) for load, lines in mine.items() if OURS in lines]
    dominated = {load: dominators(lines) for load, lines in mine.items() if OURS in lines}
    missing = _missing(each)
    said = [*_judgement(each, equals, dominated, is_whole=not missing), *unanswered(loads), *_mixed(each)]
    tables = [summary_table(equals, dominated), equal_table(equals)] if equals else []
    tables += [load_table(load, lines) for load, lines in mine.items()]
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
    results: Sequence[CellResult], equals: Sequence[Equal], dominated: Mapping[str, Sequence[str]], *, is_whole: bool
) -> list[str]:
    duration_s = results[0].cell.duration_s
    if duration_s:
        return [f"Nothing can be said: excerpts of {duration_s:g} s show that everything runs, and compare nothing."]
    if not equals:
        return [f"Nothing can be said: no cell of {OURS} has been run."]
    caution = [] if is_whole else ["CAUTION: not everything was run; what is missing is told below."]
    return [*verdict(equals, dominated), *caution]


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ")


def _preface(results: Sequence[CellResult]) -> list[str]:
    cell = results[0].cell
    period = f"each {cell.period_s:g} s" if cell.period_s else "as often as its own program does"
    seeds = len({one.cell.seed for one in results if one.cell.half is Half.HELD})
    tuning = list(dict.fromkeys(one.cell.load for one in results if one.cell.half is Half.TUNING))
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
        "- our cost against a peer: at our attainment, on the straight line between the peer's settings on that load.",
        "- orders/h, turns/h: orders, and orders in the direction against the one before.",
        "- to order: seconds from more need than replicas ordered to the next larger order; median and p99.",
        "- wasted GPU h: of replicas that were starting or draining, of one run.",
        "- oracle: knows the future, and is no peer. fixed: a fleet of one size, known beforehand.",
    ]
    if any(len(load_named(one.cell.load).variants) > 1 for one in results):
        told += [
            (
                "- names with -second: peers that know one kind of engine scale a fleet of the first kind; under such a"
                " name,"
            ),
            "  one of the second kind. wva-v1, wva-v2 and kthena choose among kinds by their own rules.",
        ]
    return told


def _mixed(results: Sequence[CellResult]) -> list[str]:
    """That cells come from several states of the code, if they do."""
    codes = Counter(one.code or _UNKNOWN for one in results)
    if len(codes) == 1 and _UNKNOWN not in codes:
        return []
    told = ", ".join(f"{count} by {code}" for code, count in codes.most_common())
    word = "differ in the code that made them" if len(codes) > 1 else "do not say which code made them"
    return [f"CAUTION: cells {word}: {told}."]


def _missing(results: Sequence[CellResult]) -> list[str]:
    """What would be there if all had been run, by load."""
    there: Mapping[tuple[str, Half], set[Cell]] = defaultdict(set)
    for one in results:
        there[one.cell.load, one.cell.half].add(one.cell)
    seeds = {half: {one.cell.seed for one in results if one.cell.half is half} for half in Half}
    absent = [one for one in LOADS if not there[one, Half.HELD]]
    told = _bullet(f"no held-back half of: {', '.join(absent)}.") if absent else []
    for (load, half), cells in there.items():
        if not cells:
            continue
        parts = []
        for policy in policies_for(POLICIES, len(load_named(load).variants)):
            if policy in BOUNDS and half is Half.TUNING:
                continue
            run = {(one.knob, one.seed) for one in cells if one.policy == policy}
            lacking = sorted({(knob, seed) for knob in policy_named(policy).grid for seed in seeds[half]} - run)
            if not run:
                parts.append(policy)
            elif lacking:
                parts.append(f"{len(lacking)} of {policy}'s {len(lacking) + len(run)}")
        if parts:
            told += _bullet(f"{load}, {half} half: {', '.join(parts)}.")
    return told
