"""``python -m bench``: replay, compare, lab, workload, validate.

Exit status: 0; 1 if a check failed; 2 if something cannot be read or makes no sense; 130 after Ctrl-C. Finished
trials are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.lab import compare, lab_command, replay_command, workload_command
from bench.lab.engine_kinds import HardwareUnknown
from bench.lab.lab_command import TRACES
from bench.validation.check import validate
from bench.workload.traces import FORMATS, TraceInvalid
from extproc.config.errors import ConfigInvalid


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    replay_command.add_arguments(
        commands.add_parser("replay", help="policies side by side on a trace, in virtual time")
    )
    comparing = commands.add_parser("compare", help="two replays, or two policies of one, paired by request")
    comparing.add_argument("first", help="FILE of a replay's --json, or FILE:POLICY")
    comparing.add_argument("second", help="the same")
    describing = commands.add_parser("workload", help="what a trace or a generator is like: lengths, reusable prefixes")
    describing.add_argument("--trace", required=True)
    describing.add_argument("--format", choices=sorted(FORMATS))
    for flag in ("--skip", "--limit", "--seed"):
        describing.add_argument(flag, type=int, default=0)
    validating = commands.add_parser("validate", help="the engine model against real engines")
    validating.add_argument("--traces", type=Path, default=TRACES, help="where vllm_run_* and vllm_profile_* are")
    table = commands.add_parser("lab", help="the table of policies, traces and loads")
    lab_command.add_arguments(table)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if options.command == "compare":
            first, second = compare.read_side(options.first), compare.read_side(options.second)
            console.print(compare.table(first, second, compare.compare(first, second)).on_terminal())
            return 0
        return _COMMANDS[options.command](options, console)
    except (TraceInvalid, ConfigInvalid, HardwareUnknown, compare.NotComparable, ValueError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; finished trials are kept, and the same command continues from there")
        return 130


_COMMANDS: Final = {
    "replay": replay_command.replay,
    "workload": workload_command.describe,
    "validate": lambda options, console: validate(options.traces, console),
    "lab": lab_command.lab,
}

if __name__ == "__main__":
    sys.exit(main())
