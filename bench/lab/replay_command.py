# SPDX-License-Identifier: Apache-2.0
"""``python -m bench replay``: policies side by side on a trace, in virtual time."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.engine.kv_transfer import NETWORKS
from bench.lab.export import (
    build_replay_results,
    group_by_conditions,
    group_by_policy,
    pool_measures,
    ttft_windows,
    write_csv,
    write_json,
)
from bench.lab.figures import sweeps_of, write_figures, write_latex
from bench.lab.html_report import write_html
from bench.lab.measures import NARROW, LatencyObjective, policy_table
from bench.lab.policies.registry import POLICIES
from bench.lab.trial import Trial, TrialConditions, check_trials
from bench.lab.trial_runner import run_trials
from bench.reporting.request_results import mean_interval
from bench.workload.generators import GENERATORS
from bench.workload.traces import FORMATS
from extproc.api.quantities import Duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from bench.lab.trial import TrialReport
    from bench.reporting.report_elements import Table

KEPT = Path("bench/out/lab")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that may be repeated make a grid."""
    add = parser.add_argument
    add(
        "--trace",
        required=True,
        action="append",
        metavar="TRACE",
        help=(
            "a file, or a generator with its numbers as in shared-prefix:groups=256; generators:"
            f" {', '.join(GENERATORS)}"
        ),
    )
    add("--format", choices=sorted(FORMATS), help="of the file (default: by its name)")
    add(
        "--policies",
        default="attache,llm-d-token-load,round-robin",
        help=(
            "a list of names, of Python files as in my.py:Mine, or of files with an EndpointPickerConfig; names:"
            f" {', '.join(POLICIES)} (default: %(default)s)"
        ),
    )
    add(
        "--rate-scale", type=_positive, action="append", metavar="X", help="start sessions X times as fast (default: 1)"
    )
    add("--seed", type=int, action="append", help="of ties, answers and generators (default: 0)")
    add("--skip", type=_at_least(0), action="append", metavar="N", help="rows or sessions to skip (default: 0)")
    add("--limit", type=_at_least(0), default=0, metavar="N", help="rows or sessions to play (default: all)")
    add("--jobs", type=_at_least(0), default=0, metavar="N", help="processes (default: one for each processor)")
    add("--fresh", action="store_true", help="also run again what earlier commands have finished")
    _add_engines(parser)
    add = parser.add_argument_group("results").add_argument
    add("--slo-ttft", default="5s", metavar="DURATION", help="longest TTFT that goodput counts (default: %(default)s)")
    add("--slo-tpot", default="100ms", metavar="DURATION", help="longest TPOT that it counts (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every request's numbers")
    add("--csv", type=Path, metavar="FILE", help="write a line for each trial")
    add("--html", type=Path, metavar="FILE", help="write a report with plots")
    add(
        "--figures",
        type=Path,
        metavar="DIR",
        help="write figures as PDF and SVG: TTFTs, and with several --rate-scale the mean TTFT against the rate",
    )
    add("--latex", type=Path, metavar="FILE", help="write the tables for LaTeX, with booktabs")


def _add_engines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engines, and what is known of them").add_argument
    add("--engines", type=_at_least(1), action="append", metavar="N", help="how many (default: 8)")
    add(
        "--hardware",
        action="append",
        help="GPUs of each: h100x4; mixed: h100*4+l40s*4; a GPU's file: rig.yamlx2 (default: h100x4)",
    )
    add("--model", action="append", help="what they serve: a name, or a model's YAML file (default: 70b)")
    add(
        "--prefill",
        type=_at_least(1),
        metavar="N",
        help="engines that prefill for policies with pairs (pd-...), with --decode; other policies have as many whole",
    )
    add("--decode", type=_at_least(1), metavar="N", help="engines that decode for them")
    add(
        "--network",
        choices=sorted(NETWORKS),
        default="nvlink",
        help="what KV caches are transferred over (default: %(default)s)",
    )
    add("--push", action="store_true", help="KV caches are pushed in pieces, as by SGLang, not pulled as by NIXL")
    add("--block-size", type=_at_least(1), default=64, metavar="N", help="tokens in a KV block (default: %(default)s)")
    add("--kv-blocks", type=_at_least(1), metavar="N", help="of each engine (default: what its GPUs' memory holds)")
    add(
        "--scrape",
        default="200ms",
        metavar="DURATION",
        help="between two readings of an engine's metrics (default: %(default)s)",
    )
    add("--log-delay", default="200ms", metavar="DURATION", help="of access logs (default: %(default)s)")
    add("--event-delay", default="50ms", metavar="DURATION", help="of KV events (default: %(default)s)")
    add(
        "--flow-control",
        default="",
        metavar="JSON",
        help="queue requests before the engines: a ModelServer's flowControl; {} takes its defaults",
    )


def replay(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid, ConfigInvalid, PolicyFailed or HardwareUnknown before anything runs."""
    trials = replay_trials(options)
    check_trials(trials)
    # read each trace once before anything runs, so that one that cannot be read is reported at once
    for conditions in {trial.conditions.trace: trial.conditions for trial in trials}.values():
        conditions.workload()
    objective = LatencyObjective(float(Duration(options.slo_ttft)), float(Duration(options.slo_tpot)))
    reports = run_trials(trials, KEPT, console, jobs=options.jobs, fresh=options.fresh)
    results = build_replay_results(reports, objective, options.command_line)
    shown = [*tables(reports, objective), *(sweep.table() for sweep in sweeps_of(reports))]
    for one in shown:
        console.print(one.as_rich_table())
    if options.json:
        write_json(results, options.json)
    if options.csv:
        write_csv(results, options.csv)
    if options.html:
        write_html(reports, results, options.html)
    if options.latex:
        write_latex(shown, options.latex, results.made_by)
    figures = write_figures(reports, options.figures) if options.figures else []
    for file in filter(None, (options.json, options.csv, options.html, options.latex, *figures)):
        console.print(f"written: {file}", highlight=False)
    return 0


def replay_trials(options: argparse.Namespace) -> list[Trial]:
    """The grid. Policies vary fastest, so that those to be compared run together. Raises ValueError."""
    if (options.prefill is None) is not (options.decode is None):
        msg = "--prefill and --decode: give both, or none"
        raise ValueError(msg)
    roles = options.prefill + options.decode if options.prefill else 0
    if roles and options.engines:
        msg = f"--engines: --prefill and --decode are {roles} engines; remove it"
        raise ValueError(msg)
    grid = itertools.product(
        options.trace,
        options.skip or [0],
        options.engines or [roles or 8],
        options.hardware or ["h100x4"],
        options.model or ["70b"],
        options.rate_scale or [1.0],
        options.seed or [0],
    )
    try:
        msgspec.json.decode(options.flow_control or "{}", type=dict[str, object])
    except msgspec.DecodeError as error:
        msg = f"--flow-control: {error}; write JSON as in " + '{"fairness": "VirtualTokenCounter"}'
        raise ValueError(msg) from None
    return [
        Trial(
            policy,
            TrialConditions(
                trace=trace,
                trace_format=options.format,
                skip=skip,
                limit=options.limit,
                rate_scale=rate_scale,
                engines=engines,
                hardware=hardware,
                model=model,
                block_size=options.block_size,
                kv_blocks=options.kv_blocks,
                seed=seed,
                scrape_s=float(Duration(options.scrape)),
                log_s=float(Duration(options.log_delay)),
                events_s=float(Duration(options.event_delay)),
                flow_control=options.flow_control,
                prefill=options.prefill or 0,
                decode=options.decode or 0,
                network=options.network,
                pushes=options.push,
            ),
        )
        for trace, skip, engines, hardware, model, rate_scale, seed in grid
        for policy in options.policies.split(",")
    ]


def tables(reports: Sequence[TrialReport], objective: LatencyObjective) -> list[Table]:
    """One for each set of conditions, all seeds together; the lowest mean TTFT first."""
    found = []
    for words, group in group_by_conditions(reports).items():
        policies = group_by_policy(group)
        measures = {name: pool_measures(some, objective) for name, some in policies.items()}
        ordered = dict(sorted(measures.items(), key=lambda item: item[1].ttft_s.mean))
        intervals = {name: mean_interval(ttft_windows(some)) for name, some in policies.items()}
        title = f"{words}; virtual time, seconds, unless a heading has a unit"
        found.append(policy_table(title, ordered, intervals, columns=NARROW))
    return found


def _at_least(least_cost: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least_cost:
            raise argparse.ArgumentTypeError(f"{text} is less than {least_cost}")
        return value

    return number


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
