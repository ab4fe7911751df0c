# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.soak``: an hour of load and of changes, with hostile engines, and whether all stayed well.

A thousand models behind a real Envoy; the configuration changes every second; engines of their own models send what
no engine should. No request of an honest model may be lost, and memory must stay flat.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console

from bench.soak import report
from bench.soak.hostile import GROUPS, HOSTILE
from bench.soak.run import Settings, soak
from bench.soak.verdict import Bounds, Record, is_well, verdict
from bench.stack.processes import StartFailed
from bench.stack.stack import ROOT, EnvoyMissing

_OUT: Final = ROOT / "bench" / "out" / "soak"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 if something was not well; 2 if something did not start."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        hostile = chosen(options.hostile)
    except ValueError as error:
        made.error(str(error))
    settings = Settings(
        minutes=options.minutes, models=options.models, rate=options.rate, hostile=hostile, seed=options.seed
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
    checks = verdict(record, Bounds())
    report.write(record, checks, options.out)
    console.print(report.lines(checks), markup=False, soft_wrap=True)
    console.print(f"by audience: {record.totals}; more in {options.out}", markup=False, soft_wrap=True)
    return 0 if is_well(checks) else 1


async def _until_stopped(settings: Settings, out: Path) -> Record:
    """Ctrl-C ends a soak early: what it has recorded is judged all the same."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    return await soak(settings, out / "run", stop)


def chosen(words: str) -> tuple[str, ...]:
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
    add("--rate", type=float, default=15.0, help="requests a second to honest models (default: %(default)g)")
    add(
        "--hostile", default="all", metavar="LIST", help=f"all, none, or some of {', '.join(GROUPS)} and of single ones"
    )
    add("--seed", type=int, default=0, help="of changes and requests (default: %(default)s)")
    add("--out", type=Path, default=_OUT, metavar="DIR", help="emptied first (default: bench/out/soak)")
    return made


if __name__ == "__main__":
    sys.exit(main())
