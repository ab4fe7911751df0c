# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.lab.fairness``: queues for tenants in virtual time, each with and without a policy."""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from rich.console import Console

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.reporting.report_elements import Table, figure, plot_cumulative, provenance, use_log_x_axis
from bench.reporting.request_results import cached_token_ratio, distribution, ttfts_s
from bench.stack.loopback_stack import documents
from bench.virtual.engines import addresses, roofline_engine
from bench.virtual.simulation import Simulation
from bench.workload.sessions import Session, SessionTurn, Workload, single_piece
from extproc.api import config_loader as configuration
from extproc.wire_names import DEADLINE_MS, OBJECTIVES, TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.reporting.report_elements import Provenance
    from bench.reporting.request_results import RequestResult
    from bench.virtual.observers import TokenObserver
    from bench.workload.sessions import TextPiece
    from extproc.core.effects import Decision

HARDWARE: Final = "h100-llama-3.1-8b"
# An engine is saturated when a new prompt would wait for 50 ms: so requests wait in the queue, and not in the engine.
TIGHT: Final[Mapping[str, object]] = {"queueDepth": None, "kvUsage": None, "maxWait": "50ms"}
# No request is refused: scenarios compare the order of dispatch.
PATIENT: Final[Mapping[str, object]] = {"timeout": "59m", "maxRequests": 1_000_000, "maxBytes": "64Gi"}
NO_QUEUE: Final = None
FCFS: Final[Mapping[str, object]] = {"fairness": "GlobalStrict"}
VTC: Final[Mapping[str, object]] = {"fairness": "VirtualTokenCounter"}
INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
# As by default: cached tokens cost the engine next to nothing.
CACHED_WEIGHT: Final = 0.1
Control = Mapping[str, object] | None
FLOODER: Final = "t0"
FLOOD_POLICIES: Final[Mapping[str, Control]] = {"no queue": NO_QUEUE, "FCFS": FCFS, "VTC": VTC}
ORDERS: Final[Mapping[str, Mapping[str, object]]] = {
    "FirstCome": {"order": "FirstCome"},
    "Deadline": {"order": "Deadline", "ageing": "1h"},
    "ShortestFirst, no ageing": {"order": "ShortestFirst", "ageing": "1h"},
    "ShortestFirst": {"order": "ShortestFirst", "ageing": "10s"},
}
BANDS: Final[Mapping[str, int]] = {"critical": 10, "high": 5, "standard": 0, "best-effort": -1}
QUANTUM: Final = 20_000
# With the default saturation limits: a shorter wait in the engine would cost locality more than it gives fairness.
LOCAL_POLICIES: Final[Mapping[str, Control]] = {
    "no queue": NO_QUEUE,
    "FCFS": {**FCFS, "saturation": {}},
    "VTC": {**VTC, "saturation": {}},
    "DLPM": {"fairness": "DeficitLocality", "quantum": QUANTUM, "saturation": {}},
}
# Both tenants wait for so long.
_SHOWN_S: Final = 20.0
# Of tenants, in the order of their names.
_STYLES: Final = ("-", "--", "-.", ":")


class LengthRanges(msgspec.Struct, frozen=True):
    """Tokens of prompts and answers: each length is uniform between two bounds."""

    prompt: tuple[int, int] = (2000, 8000)
    answer: tuple[int, int] = (20, 60)


class TenantLoad(msgspec.Struct, frozen=True):
    """A tenant's requests: a Poisson process of ``rate`` per second, from ``begins_at_s`` for ``duration_s``.

    ``objective``: the InferenceObjective of its requests. ``deadline_s``: deadlines are uniform from 1 s to this;
    None: none. ``shared``: each prompt begins with one of so many texts of the tenant, of so many tokens; None:
    prompts share nothing.
    """

    tenant: str
    rate: float
    duration_s: float
    begins_at_s: float = 0.0
    lengths: LengthRanges = LengthRanges()
    objective: str = ""
    deadline_s: float | None = None
    shared: tuple[int, int] | None = None


def tenant_workload(name: str, loads: Iterable[TenantLoad], *, seed: int) -> Workload:
    """The requests of all tenants.

    Equal arguments give equal workloads; a tenant's requests do not depend on the others.
    """
    sessions = [session for load in loads for session in _sessions(load, seed)]
    return Workload(name, tuple(sorted(sessions, key=lambda one: one.begins_at_s)))


def _sessions(load: TenantLoad, seed: int) -> Iterable[Session]:
    rng = random.Random(f"{seed}/{load.tenant}/{load.objective}")
    now, number = load.begins_at_s, 0
    while (now := now + rng.expovariate(load.rate)) < load.begins_at_s + load.duration_s:
        number += 1
        headers = {TENANT: load.tenant}
        if load.objective:
            headers[OBJECTIVES[0]] = load.objective
        if load.deadline_s is not None:
            headers[DEADLINE_MS] = str(1000 * rng.uniform(1.0, load.deadline_s))
        prompt, answer = rng.randint(*load.lengths.prompt), rng.randint(*load.lengths.answer)
        system: tuple[TextPiece, ...] = ()
        if load.shared is not None:
            texts, tokens = load.shared
            system = single_piece(f"{seed}/{load.tenant}/{rng.randrange(texts)}", tokens)
        asked = single_piece(f"{seed}/{load.tenant}/{load.objective}/{number}", prompt)
        yield Session(now, (SessionTurn(asked, answer),), system=system, headers=headers, label=load.tenant)


def run_workload(
    workload: Workload,
    control: Mapping[str, object] | None,
    *,
    engines: int,
    seed: int = 0,
    token_observer: TokenObserver | None = None,
    kv_blocks: int = 20_000,
    objectives: Mapping[str, int] | None = None,
) -> Sequence[RequestResult]:
    """Play a workload on ``engines`` engines and return the results.

    ``control``: the ModelServer's ``flowControl``; None: no queue. ``kv_blocks``: of each engine. ``objectives``:
    priorities of InferenceObjectives by name.
    """

    more = {} if control is None else {"flowControl": {"saturation": TIGHT, **PATIENT, **control}}
    files = {"all.yaml": documents(addresses(engines), gateway={}, more=more).encode()}
    for name, priority in (objectives or {}).items():
        document = {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": {"name": name},
            "spec": {"priority": priority},
        }
        files[f"{name}.yaml"] = yaml.safe_dump(document).encode()
    limits = EngineLimits(num_gpu_blocks=kv_blocks)
    kind = roofline_engine(PRESETS[HARDWARE], limits)
    return Simulation(
        configuration.load_snapshot(files),
        dict.fromkeys(addresses(engines), kind),
        seed=seed,
        token_observer=token_observer,
    ).run(workload)


def ttfts_without(results: Iterable[RequestResult], tenant: str) -> list[float]:
    """Seconds to the first token of good answers, of all tenants but one."""
    return ttfts_s(one for one in results if one.label != tenant)


class _Pair(msgspec.Struct):
    """The least and the most difference between two tenants' service while both wait."""

    least: float = 0.0
    most: float = 0.0
    is_open: bool = False


class ServiceObserver:
    """A TokenObserver. Service is counted when it is given: input when the request is sent, output token by token.

    ``served``: weighted tokens by tenant. ``widest``: the largest change of the difference between two tenants while
    both waited. ``history``: of each tenant, instants and totals, if it is kept.
    """

    def __init__(self, *, with_history: bool = False) -> None:
        self.served: dict[str, float] = {}
        self.history: dict[str, list[tuple[float, float]]] = {}
        self.longest_input = 0
        self.most_tokens_running = 0
        self.widest = 0.0
        self._with_history = with_history
        self._waiting: dict[str, set[str]] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._running = 0

    @property
    def service_gap_bound(self) -> float:
        """Theorem 4.4 of VTC: ``2 max(w_p L_input, w_q M)``, of the run's largest input and batch."""
        return 2 * max(INPUT_WEIGHT * self.longest_input, OUTPUT_WEIGHT * self.most_tokens_running)

    def service_until(self, label: str, at_s: float) -> float:
        """The service given to a tenant until ``at_s``; needs ``with_history``."""
        history = self.history.get(label, [])
        index = bisect_right(history, at_s, key=lambda one: one[0])
        return history[index - 1][1] if index else 0.0

    def on_held(self, label: str, ticket: str, now: float) -> None:
        """The tenant waits."""
        self._waiting.setdefault(label, set()).add(ticket)
        self._update_gaps(label)

    def on_sent(self, label: str, decision: Decision, input_tokens: int, now: float) -> None:
        """The input is served."""
        self.longest_input = max(self.longest_input, input_tokens)
        self._running += input_tokens
        cached = min(input_tokens, decision.assignment.cached_tokens)
        self._serve(label, INPUT_WEIGHT * (input_tokens - cached) + CACHED_WEIGHT * cached, now)
        self._waiting.get(label, set()).discard(decision.ticket)
        self._update_gaps(label)

    def on_token(self, label: str, now: float) -> None:
        """A token of output is served."""
        self._running += 1
        self.most_tokens_running = max(self.most_tokens_running, self._running)
        self._serve(label, OUTPUT_WEIGHT, now)
        self._update_gaps(label)

    def on_ended(self, label: str, tokens: int, now: float) -> None:
        """A request has left its engine."""
        self._running -= tokens

    def _serve(self, label: str, service: float, now: float) -> None:
        self.served[label] = self.served.get(label, 0.0) + service
        if self._with_history:
            self.history.setdefault(label, []).append((now, self.served[label]))

    def _update_gaps(self, label: str) -> None:
        for other in self._waiting:
            if other != label:
                self._compare(*sorted((label, other)))

    def _compare(self, one: str, other: str) -> None:
        pair = self._pairs.setdefault((one, other), _Pair())
        service_gap = self.served.get(one, 0.0) - self.served.get(other, 0.0)
        if not (self._waiting.get(one) and self._waiting.get(other)):
            pair.is_open = False
            return
        if not pair.is_open:
            pair.least = pair.most = service_gap
            pair.is_open = True
        pair.least, pair.most = min(pair.least, service_gap), max(pair.most, service_gap)
        self.widest = max(self.widest, pair.most - pair.least)


class FloodResult(msgspec.Struct, frozen=True):
    """p90 TTFT of the tenants that do not flood: before one floods, and during the flood.

    ``ttfts_s``: during the flood.
    """

    policy: str
    before_s: float
    during_s: float
    ttfts_s: tuple[float, ...] = ()

    @property
    def slowdown(self) -> float:
        """During the flood over before."""
        return self.during_s / self.before_s


def measure_flood(
    *, rate: float, duration_s: float, engines: int, policies: Mapping[str, Control], seed: int = 0
) -> list[FloodResult]:
    """Ten tenants of equal rates; then the first sends ten times as much. ``rate``: of each tenant, per second."""
    calm = [TenantLoad(f"t{number}", rate, duration_s) for number in range(10)]
    flooded = [TenantLoad(FLOODER, 10 * rate, duration_s), *calm[1:]]
    found = []
    for policy, control in policies.items():
        before_s, during_s = (
            ttfts_without(
                run_workload(tenant_workload("flood", loads, seed=seed), control, engines=engines, seed=seed), FLOODER
            )
            for loads in (calm, flooded)
        )
        found.append(
            FloodResult(
                policy=policy,
                before_s=distribution(before_s).p90,
                during_s=distribution(during_s).p90,
                ttfts_s=tuple(during_s),
            )
        )
    return found


class QueueOrderResult(msgspec.Struct, frozen=True):
    """Under one order. ``missed``: the share of deadlines that were missed, 0 to 1."""

    order: str
    missed: float
    mean_ttft_s: float
    longest_ttft_s: float


def measure_queue_orders(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> list[QueueOrderResult]:
    """One tenant overloads the engines for a while; deadlines of first tokens are 1 to 20 s after arrival."""
    lengths = LengthRanges((500, 12_000), (20, 60))
    workload = tenant_workload(
        "orders", [TenantLoad("t0", rate, duration_s, lengths=lengths, deadline_s=20.0)], seed=seed
    )
    deadlines_s = {one.begins_at_s: float(one.headers[DEADLINE_MS]) / 1000 for one in workload.sessions}
    found = []
    for name, control in ORDERS.items():
        results = run_workload(workload, control, engines=engines, seed=seed)
        missed = [one.ttft_s > deadlines_s[one.due_at_s] for one in results]
        ttfts = ttfts_s(results)
        found.append(
            QueueOrderResult(
                order=name,
                missed=sum(missed) / len(missed),
                mean_ttft_s=sum(ttfts) / len(ttfts),
                longest_ttft_s=max(ttfts),
            )
        )
    return found


class BandSharesResult(msgspec.Struct, frozen=True):
    """The share of each band in all service while all bands waited, 0 to 1."""

    by_band: Mapping[str, float]


def measure_band_shares(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> BandSharesResult:
    """All bands together overload the engines. Service counts from when all wait until arrivals end."""
    loads = [TenantLoad(name, rate, duration_s, objective=name, lengths=LengthRanges((500, 3000))) for name in BANDS]
    service = ServiceObserver(with_history=True)
    # no shedding: the shares must come from the order alone
    control = {**VTC, "shedFrom": 1.99}
    workload = tenant_workload("shares", loads, seed=seed)
    run_workload(workload, control, engines=engines, seed=seed, token_observer=service, objectives=BANDS)
    begins_at_s, ends_at_s = 0.1 * duration_s, duration_s
    given = {name: service.service_until(name, ends_at_s) - service.service_until(name, begins_at_s) for name in BANDS}
    return BandSharesResult({name: value / sum(given.values()) for name, value in given.items()})


class LocalityResult(msgspec.Struct, frozen=True):
    """``widest_gap``: the largest gap between two waiting tenants' service, in weighted tokens.

    ``light_p90_ttft_s``: of all tenants but the one that sends most.
    """

    policy: str
    cached_token_ratio: float
    widest_gap: float
    mean_ttft_s: float
    light_p90_ttft_s: float


def measure_locality(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> list[LocalityResult]:
    """Tenants with shared prefixes of their own, more than the caches hold; one tenant sends most."""
    lengths = LengthRanges((100, 600), (20, 60))
    loads = [
        TenantLoad(f"t{number}", rate * (5 if number == 0 else 1), duration_s, lengths=lengths, shared=(12, 4000))
        for number in range(6)
    ]
    workload = tenant_workload("locality", loads, seed=seed)
    found = []
    for policy, control in LOCAL_POLICIES.items():
        service = ServiceObserver()
        results = run_workload(workload, control, engines=engines, seed=seed, token_observer=service, kv_blocks=6000)
        ttfts = ttfts_s(results)
        light = distribution(ttfts_without(results, FLOODER))
        mean_s = sum(ttfts) / len(ttfts)
        found.append(
            LocalityResult(
                policy=policy,
                cached_token_ratio=cached_token_ratio(results),
                widest_gap=service.widest,
                mean_ttft_s=mean_s,
                light_p90_ttft_s=light.p90,
            )
        )
    return found


class ServiceGapResult(msgspec.Struct, frozen=True):
    """The largest gap between two waiting tenants' service, and what VTC's theorem allows, in weighted tokens.

    ``history``: the service of each tenant, as instants and totals.
    """

    policy: str
    widest: float
    bound: float
    history: Mapping[str, Sequence[tuple[float, float]]] = {}


def measure_service_gap(
    loads: Sequence[TenantLoad], *, policies: Mapping[str, Control], seed: int, kv_blocks: int = 1000
) -> list[ServiceGapResult]:
    """One engine with a small cache, as in the paper, and tenants that overload it."""
    workload = tenant_workload("apart", loads, seed=seed)
    found = []
    for policy, control in policies.items():
        service = ServiceObserver(with_history=True)
        run_workload(workload, control, engines=1, seed=seed, token_observer=service, kv_blocks=kv_blocks)
        found.append(ServiceGapResult(policy, service.widest, service.service_gap_bound, service.history))
    return found


class FairnessReport(msgspec.Struct, frozen=True):
    """All scenarios. ``busy`` and ``quiet``: floods of engines that were close to saturation before, or half idle."""

    busy: list[FloodResult]
    quiet: list[FloodResult]
    service_gap: list[ServiceGapResult]
    orders: list[QueueOrderResult]
    shares: BandSharesResult
    locality: list[LocalityResult]

    def tables(self) -> list[Table]:
        """A table for each scenario."""
        return [
            *(_flood_table(name, floods) for name, floods in (("busy", self.busy), ("quiet", self.quiet))),
            Table(
                "two tenants that both wait: the largest gap between their service, weighted tokens",
                ["", "largest gap", "VTC's bound"],
                [[one.policy, f"{one.widest:,.0f}", f"{one.bound:,.0f}"] for one in self.service_gap],
            ),
            Table(
                "order inside a tenant",
                ["", "deadlines missed", "mean TTFT, s", "longest, s"],
                [
                    [one.order, f"{one.missed:.1%}", f"{one.mean_ttft_s:.2f}", f"{one.longest_ttft_s:.1f}"]
                    for one in self.orders
                ],
            ),
            Table(
                "bands that all wait: shares of service",
                list(self.shares.by_band),
                [[f"{share:.1%}" for share in self.shares.by_band.values()]],
            ),
            Table(
                "locality",
                ["", "cached-token ratio", "largest gap", "mean TTFT, s", "p90 TTFT of light tenants, s"],
                [
                    [
                        one.policy,
                        f"{one.cached_token_ratio:.1%}",
                        f"{one.widest_gap:,.0f}",
                        f"{one.mean_ttft_s:.2f}",
                        f"{one.light_p90_ttft_s:.2f}",
                    ]
                    for one in self.locality
                ],
            ),
        ]


def _flood_table(name: str, floods: Sequence[FloodResult]) -> Table:
    return Table(
        f"one of ten tenants sends ten times as much; engines {name} before",
        ["", "p90 TTFT of others before, s", "while one floods, s", "factor"],
        [[one.policy, f"{one.before_s:.3f}", f"{one.during_s:.3f}", f"{one.slowdown:.2f}"] for one in floods],
    )


def write_report(report: FairnessReport, directory: Path, made_by: Provenance) -> Path:
    """Write ``report.md`` with its plot, and ``results.json`` with every number; returns the path of the page."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    _plot(report, directory / "fairness.png")
    lines = ["# Fairness", "", "Simulated H100s with an 8B model, in virtual time, under extproc's own decisions.", ""]
    for table in report.tables():
        lines += [f"## {table.title}", "", *table.as_markdown(), ""]
    lines += ["![TTFT of tenants that do not flood; service of two that wait](fairness.png)", ""]
    lines += [f"Made by `{made_by.command}`; {made_by.versions_line}.", ""]
    page = directory / "report.md"
    page.write_text("\n".join(lines))
    return page


def _plot(report: FairnessReport, file: Path) -> None:
    with figure(file, columns=3, size_inches=(16, 5.2)) as (busy, quiet, service):
        for axes, floods, name in ((busy, report.busy, "busy"), (quiet, report.quiet, "quiet")):
            for one in floods:
                plot_cumulative(axes, f"{one.policy}, flooded", one.ttfts_s, color=_color(one.policy))
                axes.axvline(
                    one.before_s, linestyle=":", color=_color(one.policy), label=f"{one.policy}, p90 before the flood"
                )
            axes.set(title=f"tenants that do not flood, {name}: answers within a TTFT")
            axes.set(xlabel="time to first token, s", ylabel="share of answers")
            use_log_x_axis(axes)
        for run in report.service_gap:
            for (name, history), style in zip(sorted(run.history.items()), _STYLES, strict=False):
                instants_s, served = zip(*(one for one in history if one[0] <= _SHOWN_S), strict=True)
                label = f"{run.policy}, tenant {name}"
                service.plot(instants_s, served, label=label, color=_color(run.policy), linestyle=style)
        service.set(title="service given to two tenants that wait", xlim=(0, _SHOWN_S))
        service.set(xlabel="time since the start, s", ylabel="weighted tokens since the start")


def _color(policy: str) -> str:
    """One for each policy, the same in all plots."""
    return f"C{list(FLOOD_POLICIES).index(policy)}"


def measure(seed: int) -> FairnessReport:
    """Play all scenarios; takes about two minutes."""
    small, short = LengthRanges((100, 2000), (10, 400)), LengthRanges((100, 2000), (10, 100))
    backlogged = [TenantLoad("many", 30, 20, lengths=small), TenantLoad("few", 3, 20, lengths=short)]
    return FairnessReport(
        busy=measure_flood(rate=3.2, duration_s=40, engines=4, policies=FLOOD_POLICIES, seed=seed),
        quiet=measure_flood(rate=2.9, duration_s=40, engines=8, policies=FLOOD_POLICIES, seed=seed),
        service_gap=measure_service_gap(backlogged, policies={"FCFS": FCFS, "VTC": VTC}, seed=seed),
        orders=measure_queue_orders(rate=13, duration_s=40, engines=2, seed=seed),
        shares=measure_band_shares(rate=45, duration_s=20, engines=2, seed=seed),
        locality=measure_locality(rate=3, duration_s=30, engines=2, seed=seed),
    )


def main() -> None:
    """Print the tables; write the report and its numbers to the directory ``--out``."""

    parser = argparse.ArgumentParser(prog="python -m bench.lab.fairness", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/out/fairness"))
    options = parser.parse_args()
    report = measure(options.seed)
    console = Console()
    for table in report.tables():
        console.print(table.as_rich_table())
    command = shlex.join(["python", "-m", "bench.lab.fairness", *sys.argv[1:]])
    page = write_report(report, options.out, provenance(command))
    console.print(f"report: {page}")


if __name__ == "__main__":
    main()
