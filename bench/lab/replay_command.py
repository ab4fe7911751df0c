"""``python -m bench replay``: policies side by side on a trace, in virtual time."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.lab.columns import NARROW, policy_table
from bench.lab.export import results_of, write_csv, write_json
from bench.lab.html import write_html
from bench.lab.measures import LatencyObjective
from bench.lab.runner import run_all
from bench.lab.trial import Conditions, Trial
from bench.policies.registry import POLICIES, EngineCalibration, policy_named
from bench.workload.generators import GENERATORS
from bench.workload.traces import FORMATS
from extproc.config.quantities import Duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from bench.lab.export import Results
    from bench.reporting.tables import Table

KEPT = Path("bench/out/lab")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that are given more than once make a grid."""
    parser.add_argument(
        "--trace", required=True, action="append", help=f"a file, or {', '.join(GENERATORS)} with NAME=NUMBER,..."
    )
    parser.add_argument("--format", choices=sorted(FORMATS), help="of the trace (default: by its name)")
    parser.add_argument(
        "--policies",
        default="attache,llm-d-token-load,round-robin",
        help=f"of {', '.join(POLICIES)}, or EndpointPickerConfig files",
    )
    parser.add_argument("--engines", type=_at_least(1), action="append", help="(8)")
    parser.add_argument("--hardware", action="append", help="of each engine: h100x4, or mixed: h100*4+l40s*4 (h100x4)")
    parser.add_argument("--model", action="append", help="(70b)")
    parser.add_argument("--rate-scale", type=_positive, action="append", help="times as many sessions per second (1)")
    parser.add_argument("--seed", type=int, action="append", help="of ties, answers and generators (0)")
    parser.add_argument("--skip", type=_at_least(0), action="append", help="rows or sessions to skip (0)")
    parser.add_argument("--limit", type=_at_least(0), default=0, help="rows or sessions to play (all)")
    parser.add_argument("--block-size", type=_at_least(1), default=64, help="tokens of a KV block (64)")
    parser.add_argument("--kv-blocks", type=_at_least(1), help="of each engine (what its GPUs' memory holds)")
    parser.add_argument("--scrape", default="200ms", help="interval of reading an engine's metrics (200ms)")
    parser.add_argument("--log-delay", default="200ms", help="of access logs (200ms)")
    parser.add_argument("--event-delay", default="50ms", help="of KV events (50ms)")
    parser.add_argument(
        "--flow-control",
        default="",
        help="a queue in front of the engines: a ModelServer's flowControl as JSON; {} for its defaults",
    )
    parser.add_argument("--slo-ttft", default="5s", help="goodput: the first token within this time (5s)")
    parser.add_argument("--slo-tpot", default="100ms", help="goodput: the mean time per further token (100ms)")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--csv", type=Path, help="file with a line for each trial")
    parser.add_argument("--html", type=Path, help="file for a report with plots")
    parser.add_argument("--jobs", type=_at_least(0), default=0, help="processes (one for each processor)")
    parser.add_argument("--fresh", action="store_true", help="run trials again although their reports are kept")


def replay(options: argparse.Namespace, console: Console) -> int:
    """Raises TraceInvalid, ConfigInvalid or HardwareUnknown before anything runs."""
    trials = trials_of(options)
    for name in {trial.policy for trial in trials}:
        policy_named(name)(
            EngineCalibration(prefill_tokens_per_s=1.0, decode_s_per_token=1.0, block_size=options.block_size)
        )
    # read each trace once before anything runs, so that one that cannot be read is reported at once
    for conditions in {trial.conditions.trace: trial.conditions for trial in trials}.values():
        conditions.workload()
    objective = LatencyObjective(float(Duration(options.slo_ttft)), float(Duration(options.slo_tpot)))
    reports = run_all(trials, KEPT, console, jobs=options.jobs, fresh=options.fresh)
    results = results_of(reports, objective)
    console.print(table(results).on_terminal())
    if options.json:
        write_json(results, options.json)
    if options.csv:
        write_csv(results, options.csv)
    if options.html:
        write_html(reports, objective, options.html)
    for file in filter(None, (options.json, options.csv, options.html)):
        console.print(f"written: {file}", highlight=False)
    return 0


def trials_of(options: argparse.Namespace) -> list[Trial]:
    """The grid. Policies vary fastest, so that those to be compared run together. Raises ValueError."""
    grid = itertools.product(
        options.trace,
        options.skip or [0],
        options.engines or [8],
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
            Conditions(
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
            ),
        )
        for trace, skip, engines, hardware, model, rate_scale, seed in grid
        for policy in options.policies.split(",")
    ]


def table(results: Results) -> Table:
    """All trials of each policy together; the lowest mean TTFT first."""
    title = f"{len(results.trials)} trials in virtual time; seconds, unless a heading has a unit"
    policies = dict(sorted(results.policies.items(), key=lambda item: item[1].ttft_s.mean))
    return policy_table(title, policies, columns=NARROW)


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
