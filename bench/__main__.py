# SPDX-License-Identifier: Apache-2.0
"""``python -m bench``: replay, compare, lab, autoscale, workload, validate.

Exit status: 0; 1 if a check failed; 2 if something cannot be read or makes no sense; 130 after Ctrl-C. Finished
trials are kept.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console

from bench.autoscale import command as autoscale_command
from bench.engine.hardware import GPUS, LINKS
from bench.lab import export, lab_command, replay_command, workload_stats_command
from bench.lab.engine_model_validation import unmeasured_hardware, validate
from bench.lab.hardware_spec_parser import HardwareUnknown, gpus_of, is_file
from bench.lab.lab_command import TRACES
from bench.lab.policies.policy_file import PolicyFailed
from bench.lab.trial_runner import TrialFailed
from bench.workload.traces import FORMATS, TraceInvalid
from extproc.api.config_errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.lab.trial import TrialConditions

# Errors that are printed as a message, without a traceback.
_SAID: Final = (
    TraceInvalid,
    ConfigInvalid,
    HardwareUnknown,
    PolicyFailed,
    TrialFailed,
    export.NotComparable,
    ValueError,
)


class BenchCommand(msgspec.Struct, frozen=True):
    """One command: its summary, its options, and what it does with them."""

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    call: Callable[[argparse.Namespace, Console], int]

    def parser(self, prog: str) -> argparse.ArgumentParser:
        """The options of the command by itself."""
        made = argparse.ArgumentParser(
            prog=prog,
            description=f"{self.summary}.",
            epilog="Exit status: 0; 1 if a check fails; 2 if something cannot be read; 130 after Ctrl-C, with finished "
            "trials kept.",
        )
        self.add_arguments(made)
        return made

    def main(self, words: list[str], prog: str) -> int:
        """The command by itself; returns its exit status."""
        return _run(self, self.parser(prog).parse_args(words), shlex.join([*prog.split(), *words]))


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for program in PROGRAMS.values():
        program.add_arguments(commands.add_parser(program.name, help=program.summary, description=program.summary))
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    return _run(PROGRAMS[options.command], options, shlex.join(["attache", *words]))


def _run(program: BenchCommand, options: argparse.Namespace, command_line: str) -> int:
    # reports have the command line that made them
    options.command_line = command_line
    # names of policies and files are no markup: rich would make a leaf of my.py:Leaves:
    console = Console(width=None if sys.stdout.isatty() else 160, emoji=False, markup=False)
    try:
        return program.call(options, console)
    except _SAID as error:
        # standard output may be a file for the table
        Console(stderr=True, emoji=False).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; finished trials are kept, and the same command continues from there")
        return 130


def _replay(options: argparse.Namespace, console: Console) -> int:
    status = replay_command.replay(options, console)
    if status == 0:
        _caution({trial.conditions for trial in replay_command.replay_trials(options)}, console)
    return status


def _caution(conditions: Iterable[TrialConditions], console: Console) -> None:
    """Prints for which engines the model was never compared with a measurement."""
    unknown = unmeasured_hardware()
    parts = {part for one in conditions for part in gpus_of(one.hardware)}
    gpus = {gpu for gpu, _ in parts if is_file(gpu) or gpu in unknown["GPUs"]}
    unlinked = [LINKS[one] for one in unknown["links"]]
    linked = {f"{gpu}x{count}" for gpu, count in parts if count > 1 and gpu in GPUS and GPUS[gpu].link in unlinked}
    models = {one.model for one in conditions if is_file(one.model) or one.model in unknown["models"]}
    named = [f"GPU {one}" for one in sorted(gpus)] + [f"links of {one}" for one in sorted(linked)]
    named += [f"model {one}" for one in sorted(models)]
    if named:
        console.print(
            f"never held against a measurement: {', '.join(named)}; attache validate says what was, and its errors",
            style="yellow",
            highlight=False,
        )


def _add_sides(parser: argparse.ArgumentParser) -> None:
    for side in ("first", "second"):
        parser.add_argument(side, metavar=side.upper(), help="FILE that replay --json wrote, or FILE:POLICY")


def _compare(options: argparse.Namespace, console: Console) -> int:
    first, second = export.read_policy_trials(options.first), export.read_policy_trials(options.second)
    for table in export.comparison_tables((options.first, options.second), first, second):
        console.print(table.as_rich_table())
    return 0


def _add_trace(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", required=True, help="a file, or a generator with its numbers")
    add("--format", choices=sorted(FORMATS), help="of the file (default: by its name)")
    add("--skip", type=int, default=0, metavar="N", help="rows or sessions to skip (default: 0)")
    add("--limit", type=int, default=0, metavar="N", help="rows or sessions to read (default: all)")
    add("--seed", type=int, default=0, help="of a generator (default: 0)")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help=f"directory with vllm_run_* and vllm_profile_* (default: {TRACES} if it is there)",
    )


def _validate(options: argparse.Namespace, console: Console) -> int:
    if options.traces is not None and not options.traces.is_dir():
        msg = f"{options.traces} is not a directory; --traces takes one with vllm_run_* and vllm_profile_*"
        raise ValueError(msg)
    return validate(options.traces or TRACES, console)


_PROGRAMS: Final = (
    BenchCommand(
        "replay",
        "Compare policies on a trace, in virtual time",
        replay_command.add_arguments,
        _replay,
    ),
    BenchCommand("compare", "Compare two replays, or two policies of one, request by request", _add_sides, _compare),
    BenchCommand(
        "workload",
        "Describe a trace or a generator: lengths, and how much of its prompts could be cached",
        _add_trace,
        workload_stats_command.describe_workload,
    ),
    BenchCommand("validate", "Compare the simulated engine with measurements of real ones", _add_runs, _validate),
    BenchCommand(
        "lab",
        "Compare many policies on two traces at three loads, in virtual time",
        lab_command.add_arguments,
        lab_command.lab,
    ),
    BenchCommand(
        "autoscale",
        "Compare autoscalers on the same loads, in virtual time",
        autoscale_command.add_arguments,
        autoscale_command.autoscale,
    ),
)
PROGRAMS: Final[Mapping[str, BenchCommand]] = MappingProxyType({one.name: one for one in _PROGRAMS})

if __name__ == "__main__":
    sys.exit(main())
