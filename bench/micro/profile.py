# SPDX-License-Identifier: Apache-2.0
"""Where extproc's processor time goes, in place: behind Envoy, 24 requests at once.

``python -m bench.micro.profile`` prints microseconds of a request by thread, by library (with ``perf``, if there is
one) and by extproc's functions, and leaves ``bench/out/stacks.txt`` for flame graphs. Shares come from samples of
processor time; they are scaled by what a request costs without samples, measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from bench.micro.checkout_runner import BEGIN
from bench.micro.compared_servers import ANSWER_BY_ENVOY, BenchmarkCase, ComparedServers
from bench.micro.http_load import RequestLoad, chat_requests
from bench.micro.overhead import BUSY
from bench.stack.loopback_stack import EnvoyMissing
from bench.stack.processes import Processes, StartFailed, thread_cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.micro.compared_servers import MeasuredServer

_PLAIN, _SAMPLED = "extproc", "sampled"
_HERTZ: Final = 499
_NO_PERF: Final = "NOT MEASURED: time by library; install `perf`"


class StackSamples(msgspec.Struct, frozen=True):
    """Samples by stack: ``module:function`` from the outermost inwards."""

    counts: dict[tuple[str, ...], int]

    @property
    def total(self) -> int:
        """All samples."""
        return sum(self.counts.values())

    def exclusive_samples(self) -> Counter[str]:
        """Samples in which a function is the innermost one of extproc: what it calls outside of extproc is its own."""
        found: Counter[str] = Counter()
        for stack, count in self.counts.items():
            found[next((one for one in reversed(stack) if one.startswith("extproc.")), "outside")] += count
        return found

    def inclusive_samples(self) -> Counter[str]:
        """Samples with a function of extproc anywhere in the stack."""
        found: Counter[str] = Counter()
        for stack, count in self.counts.items():
            found.update({one: count for one in set(stack) if one.startswith("extproc.")})
        return found


def read_stacks(text: str) -> StackSamples:
    """From lines of a stack, a space, and a count."""
    pairs = (line.rpartition(" ") for line in text.splitlines())
    return StackSamples({tuple(stack.split(";")): int(count) for stack, _, count in pairs})


class CpuProfile(msgspec.Struct, frozen=True):
    """What was found about one configuration.

    ``threads_us``: processor time of a request by thread, measured without samples. ``libraries``: shares of processor
    time. ``samples``: lines of a stack and a count.
    """

    threads_us: dict[str, float]
    libraries: dict[str, float]
    samples: str


async def profile(root: Path, case: BenchmarkCase, seconds: float) -> CpuProfile:
    """Load a plain extproc and a sampled one, each behind an Envoy of its own."""
    with tempfile.TemporaryDirectory(prefix="attache-profile-") as directory:
        samples = Path(directory) / "stacks.txt"
        command = ["bench.micro.checkout_runner", str(root)]
        others = {_PLAIN: command, _SAMPLED: [*command, "--samples", str(samples)]}
        async with Processes(Path(directory)) as processes:
            started = await ComparedServers(case, Path(directory), processes, others).start(with_gateway=False)
            servers = {server.name: server for server in started}
            asked = chat_requests(case.prompt_bytes, count=64 if case.prompt_bytes < 100_000 else 16, model=case.model)
            prepared = [one.wire_bytes(f"{ANSWER_BY_ENVOY}: 1\r\n") for one in asked]
            await _load(servers[_PLAIN], prepared, 1.0)
            threads = await _load(servers[_PLAIN], prepared, seconds)
            loading = asyncio.create_task(_load(servers[_PLAIN], prepared, seconds + 1))
            libraries = await _libraries(servers[_PLAIN].pid, seconds, Path(directory) / "perf.data")
            await loading
            await _load(servers[_SAMPLED], prepared, 1.0)
            os.kill(servers[_SAMPLED].pid, BEGIN)
            await _load(servers[_SAMPLED], prepared, seconds)
            await processes.end(_SAMPLED, signal.SIGTERM)  # it writes its samples when it ends
        return CpuProfile(threads, libraries, samples.read_text())


async def _load(server: MeasuredServer, prepared: Sequence[bytes], seconds: float) -> dict[str, float]:
    """Microseconds of a request by thread."""
    before, load = thread_cpu_seconds(server.pid), RequestLoad(prepared, connections=BUSY.at_once)
    await load.run("127.0.0.1", server.port, seconds=seconds)
    after = thread_cpu_seconds(server.pid).items()
    return {name: (used_s - before.get(name, 0.0)) / len(load.taken_s) * 1e6 for name, used_s in after}


async def _libraries(pid: int, seconds: float, file: Path) -> dict[str, float]:
    """Shares of processor time by thread and library; empty without ``perf``."""
    if shutil.which("perf") is None:
        return {}
    record = ["record", "-q", "-e", "cpu-clock", "-F", str(_HERTZ), "-o", str(file), "-p", str(pid)]
    await _run(*record, "--", "sleep", f"{seconds:g}")
    report = ["report", "-i", str(file), "--sort", "comm,dso", "--stdio", "--field-separator", ";"]
    return read_libraries(await _run(*report))


async def _run(*words: str) -> str:
    process = await asyncio.create_subprocess_exec("perf", *words, stdout=-1, stderr=-3)
    said, _ = await process.communicate()
    return said.decode()


def read_libraries(report: str) -> dict[str, float]:
    """From ``perf report`` with fields share, thread and library; shares from 0 to 1."""
    found = {}
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(";")]
        if len(fields) == 3 and fields[0].rstrip("%").replace(".", "", 1).isdigit():
            found[f"{fields[1]}, {fields[2].partition('.cpython')[0]}"] = float(fields[0].rstrip("%")) / 100
    return found


def describe(found: CpuProfile, most: int) -> Iterator[str]:
    """Lines for the terminal."""
    total, main_us = sum(found.threads_us.values()), found.threads_us["main"]
    yield f"extproc, µs of a request: {total:.0f}"
    yield from _lines("by thread", found.threads_us, 1.0)
    yield from _lines("by thread and library", found.libraries, total) if found.libraries else [_NO_PERF]
    stacks = read_stacks(found.samples)
    each = main_us / stacks.total
    own, within = stacks.exclusive_samples(), stacks.inclusive_samples()
    modules: Counter[str] = Counter()
    for name, count in own.items():
        modules[name.partition(":")[0]] += count
    yield (
        f"main thread, {stacks.total} samples; the event loop and gRPC count for what runs them or runs next, such as"
        " cli.serve:run:"
    )
    yield from _lines("by module, with what it calls outside of extproc", dict(modules.most_common(most)), each)
    yield "by function: its own µs (with what it calls outside of extproc), µs with all that it calls"
    for name, count in own.most_common(most):
        yield f"  {count * each:6.1f} {within[name] * each:6.1f}  {name.removeprefix('extproc.')}"


def _lines(title: str, values: dict[str, float] | dict[str, int], each: float) -> Iterator[str]:
    yield f"{title}:"
    for name, value in sorted(values.items(), key=lambda pair: -pair[1]):
        if value * each >= 1:
            yield f"  {value * each:6.1f}  {name.removeprefix('extproc.')}"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 if something could not be started."""
    parser = argparse.ArgumentParser(
        prog="bench.micro.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout; default: this directory")
    parser.add_argument("--prompt-bytes", type=int, default=2000)
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each of three parts; default: %(default)s")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="functions to list; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    options = parser.parse_args(arguments)
    case = BenchmarkCase(options.prompt_bytes, options.endpoints)
    try:
        found = uvloop.run(profile(options.root, case, options.seconds))
    except (StartFailed, EnvoyMissing) as error:
        print(error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stacks.txt").write_text(found.samples)
    for line in describe(found, options.most):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
