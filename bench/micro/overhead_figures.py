# SPDX-License-Identifier: Apache-2.0
"""From rounds to figures: medians, ratios to the no-op server with their range, and the tables of them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import uvloop
from rich.table import Table

from bench.micro.overhead import ALONE, BUSY, WHOLE
from bench.stack.loopback_stack import EnvoyMissing
from bench.stack.processes import StartFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from bench.micro.overhead import CaseResult, OverheadResult, PhaseMeasurement

_Report = TypeVar("_Report", bound=msgspec.Struct)

BASELINE = "no-op"
EXTPROC = "extproc"
ENGINE = "engine"
_ANSWERING: Final = "answering"
_GATEWAY: Final = "SGLang's gateway"
_HEAD: Final = """\
| | added latency, ms | | | | requests/s, of the no-op's | | CPU of a request, µs | | |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
| prompt, endpoints | no-op | answering | extproc | SGLang's gateway | answering | extproc | no-op | answering | extproc |
"""  # noqa: E501 - a line of a table


class Spread(msgspec.Struct, frozen=True):
    """A comparison over the rounds.

    ``best``: of each one's best round, which other work on the machine disturbed least.
    """

    median: float
    best: float
    low: float
    high: float


class PhaseFigures(msgspec.Struct, frozen=True):
    """One server in one phase.

    Times are of one request; ``ratio``: to the no-op server of the same round.
    """

    requests_per_s: float
    p50_ms: float
    p90_ms: float
    cpu_us: float
    envoy_cpu_us: float | None
    threads_us: dict[str, float]
    rate_ratio: Spread
    cpu_ratio: Spread


class ServerFigures(msgspec.Struct, frozen=True):
    """One server of one case.

    ``added``: latency of one request at a time, above the engine alone and above the no-op server.
    """

    case: str
    server: str
    start_s: float
    peak_rss_bytes: int
    added_p50_ms: Spread
    added_p90_ms: Spread
    added_to_noop_p50_ms: Spread
    added_to_noop_p90_ms: Spread
    phases: dict[str, PhaseFigures]


def server_figures(found: CaseResult) -> list[ServerFigures]:
    """Every server that stands in front of the engines."""
    return [_of_server(found, name) for name in found.servers if name != ENGINE]


def _of_server(found: CaseResult, name: str) -> ServerFigures:
    one, base, engine = (found.servers[key] for key in (name, BASELINE, ENGINE))
    return ServerFigures(
        found.case.name,
        name,
        one.start_s,
        one.peak_rss_bytes,
        added_p50_ms=_added(one, engine, lambda load: load.p50_ms),
        added_p90_ms=_added(one, engine, lambda load: load.p90_ms),
        added_to_noop_p50_ms=_added(one, base, lambda load: load.p50_ms),
        added_to_noop_p90_ms=_added(one, base, lambda load: load.p90_ms),
        phases={phase: _of_phase(phase, one, base) for phase in one.loads},
    )


def _of_phase(phase: str, one: OverheadResult, base: OverheadResult) -> PhaseFigures:
    loads = one.loads[phase]
    names = {name for load in loads for name in load.threads_us}
    return PhaseFigures(
        requests_per_s=statistics.median(load.requests_per_s for load in loads),
        p50_ms=statistics.median(load.p50_ms for load in loads),
        p90_ms=statistics.median(load.p90_ms for load in loads),
        cpu_us=statistics.median(load.cpu_us for load in loads),
        envoy_cpu_us=_median(load.envoy_cpu_us for load in loads),
        threads_us={
            name: statistics.median(load.threads_us.get(name, 0.0) for load in loads) for name in sorted(names)
        },
        rate_ratio=_ratio(loads, base.loads[phase], lambda load: load.requests_per_s, best=max),
        cpu_ratio=_ratio(loads, base.loads[phase], lambda load: load.cpu_us, best=min),
    )


def _added(one: OverheadResult, base: OverheadResult, value: Callable[[PhaseMeasurement], float]) -> Spread:
    """Differences, one request at a time."""
    ones, bases = ([value(load) for load in side.loads[ALONE.name]] for side in (one, base))
    added = [a - b for a, b in zip(ones, bases, strict=True)]
    return Spread(statistics.median(added), min(ones) - min(bases), min(added), max(added))


def _ratio(
    ones: Sequence[PhaseMeasurement],
    bases: Sequence[PhaseMeasurement],
    value: Callable[[PhaseMeasurement], float],
    *,
    best: Callable[[list[float]], float],
) -> Spread:
    of_ones, of_bases = ([value(load) for load in side] for side in (ones, bases))
    ratios = [a / b for a, b in zip(of_ones, of_bases, strict=True)]
    return Spread(statistics.median(ratios), best(of_ones) / best(of_bases), min(ratios), max(ratios))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def table(found: Sequence[ServerFigures]) -> Table:
    """For the terminal: a line for each server of each case."""
    made = Table(
        title=(
            "what stands between client and engines, alternating: ratios to the no-op server, median of rounds · best"
            " rounds (min..max)"
        ),
        caption=(
            f"added: latency above the engine alone, {ALONE.name}; {BUSY.name}: Envoy answers instead of engines, CPU"
            f" of the server and of its Envoy for a request; {WHOLE.name}: engines answer"
        ),
    )
    made.add_column("prompt, endpoints")
    made.add_column("server")
    for column in (
        "added ms, p50",
        "p90",
        "above no-op, p50",
        "24: req/s",
        "ratio",
        "CPU µs",
        "ratio",
        "Envoy µs",
        "p50 ms",
        "p90",
    ):
        made.add_column(column, justify="right", overflow="fold")
    for column in ("32: req/s", "ratio", "CPU µs", "MiB", "start s"):
        made.add_column(column, justify="right", overflow="fold")
    case = ""
    for one in found:
        if case and one.case != case:
            made.add_section()
        made.add_row("" if one.case == case else one.case, *_cells(one))
        case = one.case
    return made


def _cells(one: ServerFigures) -> list[str]:
    busy, whole = one.phases.get(BUSY.name), one.phases[WHOLE.name]
    under_load = [""] * 7
    if busy is not None:
        under_load = [
            f"{busy.requests_per_s:,.0f}",
            _spread(busy.rate_ratio),
            f"{busy.cpu_us:,.0f}",
            _spread(busy.cpu_ratio),
            f"{busy.envoy_cpu_us or 0:,.0f}",
            f"{busy.p50_ms:.1f}",
            f"{busy.p90_ms:.1f}",
        ]
    return [
        one.server,
        _spread(one.added_p50_ms),
        f"{one.added_p90_ms.median:.2f}",
        "" if one.server == BASELINE else _spread(one.added_to_noop_p50_ms),
        *under_load,
        f"{whole.requests_per_s:,.0f}",
        _spread(whole.rate_ratio),
        f"{whole.cpu_us:,.0f}",
        f"{one.peak_rss_bytes / 2**20:.0f}",
        f"{one.start_s:.2f}",
    ]


def _spread(one: Spread) -> str:
    return f"{one.median:.2f} · {one.best:.2f}\n({one.low:.2f}..{one.high:.2f})"


def thread_cpu_lines(found: Sequence[ServerFigures]) -> list[str]:
    """For each case, CPU of extproc's threads for a request under load."""
    lines = []
    for one in found:
        busy = one.phases.get(BUSY.name)
        if one.server != EXTPROC or busy is None:
            continue
        parts = [f"{name} {us:.0f}" for name, us in busy.threads_us.items() if us >= 1]
        lines.append(f"{one.case}: extproc's threads, µs for a request, {BUSY.name}: {', '.join(parts)}")
    return lines


def markdown(found: Iterable[ServerFigures]) -> str:
    """One line for each case."""
    cases: dict[str, dict[str, ServerFigures]] = {}
    for one in found:
        cases.setdefault(one.case, {})[one.server] = one
    return _HEAD + "".join(f"| {case} | {' | '.join(_markdown_cells(servers))} |\n" for case, servers in cases.items())


def _markdown_cells(servers: Mapping[str, ServerFigures]) -> Iterator[str]:
    for name in (BASELINE, _ANSWERING, EXTPROC, _GATEWAY):
        yield f"{servers[name].added_p50_ms.median:.2f}" if name in servers else ""
    for name in (_ANSWERING, EXTPROC):
        yield f"{servers[name].phases[BUSY.name].rate_ratio.median:.2f}" if name in servers else ""
    for name in (BASELINE, _ANSWERING, EXTPROC):
        yield f"{servers[name].phases[BUSY.name].cpu_us:,.0f}" if name in servers else ""


def run_and_report(
    measured: Coroutine[Any, Any, _Report], markdown: Callable[[_Report], str], file: Path, console: Console
) -> int:
    """Write what is measured as ``file`` with the suffixes .json and .md, and print it. Exit status: 0, 2 if something
    could not be started.
    """
    try:
        report = uvloop.run(measured)
    except (StartFailed, EnvoyMissing) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    file.with_suffix(".md").write_text(markdown(report))
    console.print(markdown(report), markup=False)
    return 0
