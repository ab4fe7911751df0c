# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.soak``: an hour of load and of changes, with hostile engines, and whether all stayed well.

A thousand models behind a real Envoy; the configuration changes every second; engines of their own models send what
no engine should. No request of an honest model may be lost, and memory must stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop
from rich.console import Console

from bench.reporting.report_elements import figure
from bench.soak.hostile_engines import GROUPS, HOSTILE
from bench.soak.soak_loops import SoakSettings, soak
from bench.soak.verdict import MIB, SoakLimits, SoakRecord, judge, passes
from bench.stack.loopback_stack import ROOT, EnvoyMissing
from bench.stack.processes import StartFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from bench.soak.verdict import Sample, SoakCheck

_MARKS = {True: "ok", False: "FAILED", None: "not judged"}
_OUT: Final = ROOT / "bench" / "out" / "soak"


def check_lines(checks: Sequence[SoakCheck]) -> str:
    """One line a check, with more lines for those that failed."""
    return "\n".join(f"{_MARKS[one.is_ok]:<10} {one.name}: {one.text}" for one in checks)


def write_results(record: SoakRecord, checks: Sequence[SoakCheck], out: Path) -> None:
    """``soak.json`` and ``soak.png`` in ``out``."""
    text = msgspec.json.format(msgspec.json.encode({"verdict": checks, "record": record}))
    (out / "soak.json").write_bytes(text)
    if not record.samples:
        return
    with figure(out / "soak.png", rows=5, columns=1, size_inches=(11, 17)) as axes:
        _memory(axes[0], record.samples)
        _cpu(axes[1], record.samples)
        _latency(axes[2], record.samples)
        _outcomes(axes[3], record.samples)
        _adoptions(axes[4], record)
        axes[-1].set_xlim(axes[0].get_xlim())
        axes[-1].set_xlabel("minutes")


def _minutes(samples: Sequence[Sample]) -> list[float]:
    return [one.at_s / 60 for one in samples]


def _names(samples: Sequence[Sample]) -> list[str]:
    return sorted(set.intersection(*(set(one.processes) for one in samples)))


def _memory(axes: Axes, samples: Sequence[Sample]) -> None:
    for name in _names(samples):
        axes.plot(_minutes(samples), [one.processes[name].rss_bytes / MIB for one in samples], label=name)
    axes.set_ylabel("resident memory, MiB")


def _cpu(axes: Axes, samples: Sequence[Sample]) -> None:
    pairs = list(itertools.pairwise(samples))
    for name in _names(samples):
        shares = [
            (after.processes[name].cpu_s - before.processes[name].cpu_s) / (after.at_s - before.at_s)
            for before, after in pairs
        ]
        axes.plot(_minutes(samples[1:]), shares, label=name)
    axes.set_ylabel("cores in use")


def _latency(axes: Axes, samples: Sequence[Sample]) -> None:
    for label in ("p50_s", "p99_s", "slowest_s"):
        axes.plot(_minutes(samples), [getattr(one.latency, label) for one in samples], label=label[:-2])
    axes.plot(_minutes(samples), [one.slowest_page_s for one in samples], label="extproc's slowest page")
    axes.set_ylabel("first byte, s")
    axes.set_yscale("log")


def _outcomes(axes: Axes, samples: Sequence[Sample]) -> None:
    kinds = sorted({(who, what) for one in samples for who, counts in one.outcomes.items() for what in counts})
    for who, what in kinds:
        counts = [one.outcomes.get(who, {}).get(what, 0) for one in samples]
        axes.plot(_minutes(samples), counts, label=f"{who}: {what}", linestyle="--" if what == "lost" else "-")
    axes.set_ylabel("requests in a sample")


def _adoptions(axes: Axes, record: SoakRecord) -> None:
    for side in ("extproc_s", "envoy_s", "client_s"):
        points = [(one.at_s / 60, value) for one in record.uptakes if (value := getattr(one, side)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), ".", markersize=3, label=f"change until used by {side[:-2]}")
    axes.set_ylabel("s")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 if something was not well; 2 if something did not start."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        hostile = choose_hostile_engines(options.hostile)
    except ValueError as error:
        made.error(str(error))
    # a short soak warms up in a third of its time, at a higher rate
    is_short = options.minutes * 60 < 3 * SoakLimits().warm_up_s
    bounds = SoakLimits(warm_up_s=options.minutes * 20) if is_short else SoakLimits()
    settings = SoakSettings(
        minutes=options.minutes,
        models=options.models,
        rate=options.rate,
        fill_rate=options.rate * (3 if is_short else 2),
        fill_s=bounds.warm_up_s,
        hostile=hostile,
        seed=options.seed,
    )
    console = Console(highlight=False)
    if options.out.exists() and any(options.out.iterdir()) and not (options.out / "run").is_dir():
        made.error(f"{options.out} holds something else than a soak; name an empty directory")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    try:
        record = uvloop.run(_until_stopped(settings, options.out))
    except (StartFailed, EnvoyMissing) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    checks = judge(record, bounds)
    write_results(record, checks, options.out)
    console.print(check_lines(checks), markup=False, soft_wrap=True)
    console.print(f"by audience: {record.totals}; more in {options.out}", markup=False, soft_wrap=True)
    return 0 if passes(checks) else 1


async def _until_stopped(settings: SoakSettings, out: Path) -> SoakRecord:
    """Ctrl-C ends a soak early; its records are evaluated all the same."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    return await soak(settings, out / "run", stop)


def choose_hostile_engines(words: str) -> tuple[str, ...]:
    """The names of hostile engines, of groups and names with commas between. Raises ValueError."""
    wanted = [word for word in words.split(",") if word and word != "none"]
    for word in wanted:
        if word not in {"all", *GROUPS, *HOSTILE}:
            msg = f"no hostile engine is called {word}; there are all, none, {', '.join((*GROUPS, *HOSTILE))}"
            raise ValueError(msg)
    return tuple(name for name, one in HOSTILE.items() if {"all", one.group, name} & set(wanted))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0; 1 if something was not well; 2 if something did not start; 130 if it was ended.",
    )
    add = made.add_argument
    add("--minutes", type=float, default=60.0, help="how long (default: %(default)g)")
    add("--models", type=int, default=1000, help="how many models (default: %(default)s)")
    rate = "requests a second to honest models, two to four times that in the warm-up (default: %(default)g)"
    add("--rate", type=float, default=15.0, help=rate)
    add(
        "--hostile", default="all", metavar="LIST", help=f"all, none, or some of {', '.join(GROUPS)} and of single ones"
    )
    add("--seed", type=int, default=0, help="of changes and requests (default: %(default)s)")
    add("--out", type=Path, default=_OUT, metavar="DIR", help="emptied first (default: bench/out/soak)")
    return made


if __name__ == "__main__":
    sys.exit(main())
