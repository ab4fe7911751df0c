# SPDX-License-Identifier: Apache-2.0
"""Tries inputs in turn for a while, each with a seed of its own, and reports what was wrong with which."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from bench.stack.processes import rss_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Attempt = Callable[[random.Random], bool]
"""Tries the input that a generator makes; whether it was used, rather than refused. It raises what nobody foresees."""
Attempts = Mapping[str, Callable[[], Attempt]]
"""By name what makes the attempts of an input; they share what the reader keeps between two inputs."""

_MIB: Final = 1024 * 1024
_MINUTE_S: Final = 60.0
# Of one input: far more than the slowest takes on a slow machine, and less than clients wait.
_LONGEST_S: Final = 5.0
# After which memory must not grow: caches are full by then.
_WARM_UP: Final = 0.2
_MOST_SHOWN: Final = 20
# Of the memory after the warm-up. Fragments of large inputs come and go.
_MOST_GROWTH: Final = 1.25
_SPARE_MIB: Final = 48


class InputFault(msgspec.Struct, frozen=True):
    """What an input did, and the seed by which it is made again."""

    name: str
    seed: int
    message: str


class InputReport(msgspec.Struct):
    """``used`` and ``refused``: attempts by input. ``memory_mib``: of this process, at times of even distance."""

    used: Counter[str] = msgspec.field(default_factory=Counter)
    refused: Counter[str] = msgspec.field(default_factory=Counter)
    faults: list[InputFault] = msgspec.field(default_factory=list)
    longest_s: dict[str, float] = msgspec.field(default_factory=dict)
    memory_mib: list[int] = msgspec.field(default_factory=list)

    @property
    def growth(self) -> str:
        """How memory has grown since the warm-up, if that is too much; else empty."""
        return growth_of(self.memory_mib)


def growth_of(sizes: Sequence[int]) -> str:
    """What is wrong with memory that had these sizes in MiB at times of even distance; empty if nothing is."""
    warm = sizes[int(_WARM_UP * len(sizes)) :]
    if len(warm) < 2 or warm[-1] <= _MOST_GROWTH * warm[0] + _SPARE_MIB:
        return ""
    return f"memory has grown from {warm[0]} to {warm[-1]} MiB"


def try_inputs(inputs: Attempts, seeds: Iterator[int], *, is_over: Callable[[], bool] = lambda: False) -> InputReport:
    """Try each input in turn, a seed each, until the seeds end or it ``is_over``."""
    report = InputReport()
    attempts = {name: make() for name, make in inputs.items()}
    names = list(attempts)
    for seed in seeds:
        if is_over():
            break
        name = names[seed % len(names)]
        began_s = time.process_time()
        try:
            used = attempts[name](random.Random(seed))
        except Exception as error:  # noqa: BLE001 - this looks for what nobody foresees
            at = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error}"[:500]
            report.faults.append(InputFault(name, seed, f"{message} ({at.filename}:{at.lineno})"))
            # what it kept may be broken now
            attempts[name] = inputs[name]()
            continue
        (report.used if used else report.refused)[name] += 1
        taken_s = time.process_time() - began_s
        report.longest_s[name] = max(report.longest_s.get(name, 0.0), taken_s)
        if taken_s > _LONGEST_S:
            report.faults.append(InputFault(name, seed, f"took {taken_s:.1f} s of processor time"))
    return report


def report_text(report: InputReport) -> str:
    """The report as lines."""
    lines = []
    for name in report.longest_s:
        used, refused = report.used[name], report.refused[name]
        lines.append(f"{name}: {used} used, {refused} refused, the longest {1000 * report.longest_s[name]:.0f} ms")
    lines.append(f"resident memory in MiB: {', '.join(map(str, _thinned(report.memory_mib)))}")
    kinds = Counter((one.name, one.message) for one in report.faults)
    first = {(one.name, one.message): one.seed for one in reversed(report.faults)}
    for kind, count in kinds.most_common(_MOST_SHOWN):
        lines.append(f"WRONG, {count} times: {kind[0]}, first by seed {first[kind]}: {kind[1]}")
    if report.growth:
        lines.append(f"WRONG: {report.growth}")
    return "\n".join(lines)


def _thinned(sizes: Sequence[int], most: int = 20) -> list[int]:
    step = max(1, -(-len(sizes) // most))
    return [*sizes[::step], *sizes[-1:]]


def run_inputs(prog: str, description: str, inputs: Attempts, words: Sequence[str] | None) -> int:
    """The command line over ``inputs``. Exit status: 0, or 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first input; the next has the next (%(default)s)")
    parser.add_argument("--cases", type=int, metavar="N", help="stop after N inputs")
    options = parser.parse_args(words)
    clock = time.perf_counter
    began_at_s, sizes = clock(), list[int]()
    step_s = min(5.0, _MINUTE_S * options.minutes / 20)

    ends_s: float = _MINUTE_S * options.minutes

    def is_over() -> bool:
        passed_s = clock() - began_at_s
        if passed_s >= len(sizes) * step_s:
            sizes.append(rss_bytes(os.getpid()) // _MIB)
        return passed_s >= ends_s

    last = None if options.cases is None else options.seed + options.cases
    seeds = itertools.takewhile(lambda seed: seed != last, itertools.count(options.seed))
    report = try_inputs(inputs, seeds, is_over=is_over)
    report.memory_mib = [*sizes, rss_bytes(os.getpid()) // _MIB]
    print(report_text(report))
    return 1 if report.faults or report.growth else 0
