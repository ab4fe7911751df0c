# SPDX-License-Identifier: Apache-2.0
"""Run trials in several processes, keep finished ones by what they depend on, and continue after a stop.

Known before a trial runs: the code of bench and extproc, the trace, hardware and model files, a policy's file with all
that it imports, and installed plugins. Known after it: files that the policy opened itself.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import multiprocessing
import os
import platform
import sys
import sysconfig
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.lab.hardware_spec_parser import HardwareUnknown, hardware_files
from bench.lab.policies.policy_file import PolicyFailed, policy_file
from bench.lab.policies.registry import POLICIES
from bench.lab.trial import TrialReport, run_trial
from bench.workload.traces import TraceInvalid
from extproc.api.config_errors import ConfigInvalid
from extproc.scheduling.registry import ENTRY_POINTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from importlib.machinery import ModuleSpec

    from rich.console import Console

    from bench.lab.trial import Trial, TrialConditions

_ROOT: Final = Path(__file__).resolve().parents[2]
_OURS: Final = frozenset({"attache", "bench", "controller", "extproc"})
_CHUNK: Final = 1 << 20
# The libraries whose numbers a simulation takes over.
_LIBRARIES: Final = ("numpy", "msgspec", "xxhash")
# What the user can mend; the message is enough.
_SAID: Final = (ConfigInvalid, HardwareUnknown, PolicyFailed, TraceInvalid)


@contextlib.contextmanager
def worker_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``count`` processes. If the block raises, as by Ctrl-C, what they are doing is given up.

    A pool by itself would first finish that, and what it had handed out beyond it.
    """
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            for one in set(multiprocessing.active_children()) - before:
                # not SIGTERM: under coverage that is handled in Python, which may wait for ever in a child just forked
                one.kill()
            pool.shutdown(cancel_futures=True)
            raise


def trial_cache_key(trial: Trial) -> str:
    """The same for the same trial, code and contents of files."""
    names = {**_policy_parts(trial.policy), **condition_files(trial.conditions), "code": code_digest()}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode([trial, sorted(names.items())]))


def condition_files(conditions: TrialConditions) -> dict[str, str]:
    """The files of a trial's conditions with their digests: its trace, and hardware and models from files."""
    return file_digests([conditions.trace, *hardware_files(conditions.hardware, conditions.model)])


def file_digests(files: Iterable[str]) -> dict[str, str]:
    """The digest of the contents of each of ``files`` that is there."""
    found = {file: file_digest(Path(file)) for file in files}
    return {file: one for file, one in found.items() if one}


def file_digest(file: Path) -> str:
    """Of the contents; empty if the file cannot be read; its reader reports that."""
    made = xxhash.xxh3_64()
    try:
        with file.open("rb") as source:
            while part := source.read(_CHUNK):
                made.update(part)
    except OSError:
        return ""
    return made.hexdigest()


@cache
def code_digest() -> str:
    """Of the code of bench and extproc, and of the versions of what computes with it."""
    made = xxhash.xxh3_64(" ".join([platform.python_version(), *(version(one) for one in _LIBRARIES)]).encode())
    for file in sorted(path for package in ("bench", "extproc") for path in (_ROOT / package).rglob("*")):
        if file.suffix in {".py", ".yaml"}:
            made.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return made.hexdigest()


def _policy_parts(policy: str) -> dict[str, str]:
    """Empty for a policy of ours, which is part of the code. Others may use installed plugins."""
    if policy in POLICIES:
        return {}
    file = policy_file(policy)
    own = file_digests([policy]) if file is None else _python_parts([file], beside=file.parent)
    return {**own, **_plugin_parts()}


def _plugin_parts() -> dict[str, str]:
    """Every package with plugins: its version, its files, and what its modules are made of."""
    found: dict[str, str] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        found[f"plugin {entry.name}"] = entry.value
        if entry.dist is not None:
            found[f"package {entry.dist.name}"] = entry.dist.version
            found.update(file_digests(str(one.locate()) for one in entry.dist.files or () if one.suffix != ".pyc"))
        # an editable installation lists no modules among its files
        found.update(_modules(_spec(entry.module.partition(".")[0], [])))
    return found


def _python_parts(files: Iterable[Path], beside: Path) -> dict[str, str]:
    """The contents of ``files`` and of the modules that they import, and versions of installed packages."""
    found: dict[str, str] = {}
    left = [str(file) for file in files]
    while left:
        file = left.pop()
        if file in found:
            continue
        found[file] = file_digest(Path(file))
        for name in _imported(Path(file)) - sys.stdlib_module_names - _OURS:
            spec = _spec(name, [str(beside.resolve())])
            if spec is not None and _is_installed(spec):
                found[f"package {name}"] = _version(name)
            else:
                left += _modules(spec)
    return found


def _imported(file: Path) -> set[str]:
    """The first parts of the names that a Python file imports; empty if it has a mistake."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return set()
    plain = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    others = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    return {name.partition(".")[0] for name in plain | others} - {""}


def _spec(name: str, first: list[str]) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [*first, *sys.path])


def _modules(spec: ModuleSpec | None) -> dict[str, str]:
    """Every Python file of a module or package, with its digest."""
    if spec is None:
        return {}
    folders = spec.submodule_search_locations
    if folders is None:
        return file_digests([spec.origin or ""])
    return file_digests(str(file) for folder in folders for file in sorted(Path(folder).rglob("*.py")))


def _is_installed(spec: ModuleSpec) -> bool:
    origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return any(origin.startswith(sysconfig.get_path(one) + os.sep) for one in ("purelib", "platlib"))


@cache
def _version(package: str) -> str:
    try:
        return ", ".join(f"{one} {version(one)}" for one in sorted(set(packages_distributions().get(package, []))))
    except PackageNotFoundError:
        return ""


class OpenedFileRecorder:
    """The files that a trial opens for reading, from an audit hook, which stays for the life of the process."""

    def __init__(self) -> None:
        self._opened: set[str] | None = None
        sys.addaudithook(self._audit_hook)

    def _audit_hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and self._opened is not None and isinstance(arguments[0], str):
            self._opened.add(arguments[0])

    @contextmanager
    def record(self) -> Iterator[dict[str, str]]:
        """Yields a dictionary that holds the digests of the opened files after the block."""
        found: dict[str, str] = {}
        self._opened = set()
        try:
            yield found
        finally:
            heard, self._opened = self._opened, None
            found.update(file_digests(sorted(one for one in map(os.path.abspath, heard) if _is_users(one))))


def _is_users(file: str) -> bool:
    """Not of Python, of its packages or of the system; bytecode stands for a source that is known already."""
    system = (sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev", str(_ROOT / "bench"), str(_ROOT / "extproc"))
    return not file.endswith(".pyc") and not any(file.startswith(one + os.sep) for one in system)


class TrialFailed(Exception):
    """A trial that ended with a mistake of the lab's own, or with its process; the message has the traceback."""


class _FinishedTrial(msgspec.Struct, frozen=True):
    """A finished trial. ``opened``: digests of the files that it read by itself, which make it stale if they change."""

    report: TrialReport
    opened: dict[str, str]


def run_trials(
    trials: Sequence[Trial], kept: Path, console: Console, *, jobs: int = 0, fresh: bool = False
) -> list[TrialReport]:
    """The reports, in the order of ``trials``. Raises the exception of the first trial that fails.

    ``kept``: the directory of finished reports; a trial that was made of the same things (``bench.lab.trial_runner``)
    is read from there, unless ``fresh``. ``jobs``: processes; 0: one for each processor.
    """
    kept.mkdir(parents=True, exist_ok=True)
    files = [kept / f"{trial_cache_key(trial)}.json.gz" for trial in trials]
    reports = [None if fresh else _read(file) for file in files]
    missing = [number for number, report in enumerate(reports) if report is None]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if missing and not console.is_terminal:  # where the bar is drawn at the end alone
        console.print(f"{len(missing)} trials to run, {len(trials) - len(missing)} kept from before", highlight=False)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("trials", total=len(trials), completed=len(trials) - len(missing))
        workers = min(jobs or os.cpu_count() or 1, max(1, len(missing)))
        with worker_pool(workers) as pool:
            pending = {pool.submit(_run_and_keep, trials[number], files[number]): number for number in missing}
            try:
                for one in as_completed(pending):
                    number = pending[one]
                    reports[number] = one.result()
                    progress.update(bar, advance=1, description=_title(trials[number]))
            except BrokenProcessPool:
                msg = "a process of the lab ended: for want of memory, or by a policy; try again with --jobs 1"
                raise TrialFailed(msg) from None
            progress.update(bar, description="trials")
    return [report for report in reports if report is not None]


def _title(trial: Trial) -> str:
    return f"{trial.policy}, rate x{trial.conditions.rate_scale:g}"


def _run_and_keep(trial: Trial, file: Path) -> TrialReport:
    try:
        with _opened_files().record() as opened:
            report = run_trial(trial, time.perf_counter)
    except _SAID:
        raise
    except Exception as error:  # noqa: BLE001 - not all exceptions can be sent to another process
        msg = f"{_title(trial)}: a mistake of the lab:\n{''.join(traceback.format_exception(error))}"
        raise TrialFailed(msg.rstrip()) from None
    beside = file.with_suffix(f".{os.getpid()}")
    beside.write_bytes(gzip.compress(msgspec.json.encode(_FinishedTrial(report, opened)), compresslevel=1))
    beside.replace(file)
    return report


@cache
def _opened_files() -> OpenedFileRecorder:
    """One for each process: its hook cannot be taken away."""
    return OpenedFileRecorder()


def _read(file: Path) -> TrialReport | None:
    """None if it is not there, or if a file that it was made of has changed."""
    if not file.exists():
        return None
    found = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=_FinishedTrial)
    return found.report if file_digests(found.opened) == found.opened else None
