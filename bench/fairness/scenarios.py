# SPDX-License-Identifier: Apache-2.0
"""Scenarios for queues, each with and without the policy that it tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from bench.fairness.service_observer import ServiceObserver
from bench.fairness.tenant_workloads import (
    FCFS,
    NO_QUEUE,
    VTC,
    LengthRanges,
    TenantLoad,
    play,
    tenant_workload,
    ttfts_without,
)
from bench.reporting.distribution import distribution
from bench.reporting.summary import cached_token_ratio, ttfts_s
from bench.reporting.tables import Table
from extproc.protocol import DEADLINE_MS

Control = Mapping[str, object] | None

FLOODER: Final = "t0"


class FloodResult(msgspec.Struct, frozen=True):
    """p90 TTFT of the tenants that do not flood: before one floods, and during the flood.

    ``ttfts_s``: during the flood.
    """

    policy: str
    before_s: float
    during_s: float
    ttfts_s: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        """During the flood over before."""
        return self.during_s / self.before_s


FLOOD_POLICIES: Final[Mapping[str, Control]] = {"no queue": NO_QUEUE, "FCFS": FCFS, "VTC": VTC}


def flood(
    *, rate: float, duration_s: float, engines: int, policies: Mapping[str, Control], seed: int = 0
) -> list[FloodResult]:
    """Ten tenants of equal rates; then the first sends ten times as much. ``rate``: of each tenant, per second."""
    calm = [TenantLoad(f"t{number}", rate, duration_s) for number in range(10)]
    flooded = [TenantLoad(FLOODER, 10 * rate, duration_s), *calm[1:]]
    found = []
    for policy, control in policies.items():
        before_s, during_s = (
            ttfts_without(
                play(tenant_workload("flood", loads, seed=seed), control, engines=engines, seed=seed), FLOODER
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


class OrderResult(msgspec.Struct, frozen=True):
    """Under one order. ``missed``: the share of deadlines that were missed, 0 to 1."""

    order: str
    missed: float
    mean_ttft_s: float
    longest_ttft_s: float


ORDERS: Final[Mapping[str, Mapping[str, object]]] = {
    "FirstCome": {"order": "FirstCome"},
    "Deadline": {"order": "Deadline", "ageing": "1h"},
    "ShortestFirst, no ageing": {"order": "ShortestFirst", "ageing": "1h"},
    "ShortestFirst": {"order": "ShortestFirst", "ageing": "10s"},
}
AGEING_S: Final = 10.0


def orders(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> list[OrderResult]:
    """One tenant overloads the engines for a while; deadlines of first tokens are 1 to 20 s after arrival."""
    lengths = LengthRanges((500, 12_000), (20, 60))
    workload = tenant_workload(
        "orders", [TenantLoad("t0", rate, duration_s, lengths=lengths, deadline_s=20.0)], seed=seed
    )
    deadlines_s = {one.begins_at_s: float(one.headers[DEADLINE_MS]) / 1000 for one in workload.sessions}
    found = []
    for name, control in ORDERS.items():
        results = play(workload, control, engines=engines, seed=seed)
        missed = [one.ttft_s > deadlines_s[one.due_at_s] for one in results]
        ttfts = ttfts_s(results)
        found.append(
            OrderResult(
                order=name,
                missed=sum(missed) / len(missed),
                mean_ttft_s=sum(ttfts) / len(ttfts),
                longest_ttft_s=max(ttfts),
            )
        )
    return found


BANDS: Final[Mapping[str, int]] = {"critical": 10, "high": 5, "standard": 0, "best-effort": -1}


class SharesResult(msgspec.Struct, frozen=True):
    """The share of each band in all service while all bands waited, 0 to 1."""

    by_band: Mapping[str, float]


def shares(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> SharesResult:
    """All bands together overload the engines. Service counts from when all wait until arrivals end."""
    loads = [TenantLoad(name, rate, duration_s, objective=name, lengths=LengthRanges((500, 3000))) for name in BANDS]
    service = ServiceObserver(with_history=True)
    # no shedding: the shares must come from the order alone
    control = {**VTC, "shedFrom": 1.99}
    workload = tenant_workload("shares", loads, seed=seed)
    play(workload, control, engines=engines, seed=seed, token_observer=service, objectives=BANDS)
    begins_at_s, ends_at_s = 0.1 * duration_s, duration_s
    given = {name: service.served_at(name, ends_at_s) - service.served_at(name, begins_at_s) for name in BANDS}
    return SharesResult({name: value / sum(given.values()) for name, value in given.items()})


class LocalityResult(msgspec.Struct, frozen=True):
    """``widest_gap``: the largest gap between two waiting tenants' service, in weighted tokens.

    ``light_p90_ttft_s``: of all tenants but the one that sends most.
    """

    policy: str
    cached_token_ratio: float
    widest_gap: float
    mean_ttft_s: float
    light_p90_ttft_s: float


QUANTUM: Final = 20_000
# With the default saturation limits: a shorter wait in the engine would cost locality more than it gives fairness.
LOCAL_POLICIES: Final[Mapping[str, Control]] = {
    "no queue": NO_QUEUE,
    "FCFS": {**FCFS, "saturation": {}},
    "VTC": {**VTC, "saturation": {}},
    "DLPM": {"fairness": "DeficitLocality", "quantum": QUANTUM, "saturation": {}},
}


def locality(*, rate: float, duration_s: float, engines: int, seed: int = 0) -> list[LocalityResult]:
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
        results = play(workload, control, engines=engines, seed=seed, token_observer=service, kv_blocks=6000)
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


def service_gap(
    loads: Sequence[TenantLoad], *, policies: Mapping[str, Control], seed: int, kv_blocks: int = 1000
) -> list[ServiceGapResult]:
    """One engine with a small cache, as in the paper, and tenants that overload it."""
    workload = tenant_workload("apart", loads, seed=seed)
    found = []
    for policy, control in policies.items():
        service = ServiceObserver(with_history=True)
        play(workload, control, engines=1, seed=seed, token_observer=service, kv_blocks=kv_blocks)
        found.append(ServiceGapResult(policy, service.widest, service.bound, service.history))
    return found


class FairnessReport(msgspec.Struct, frozen=True):
    """All scenarios. ``busy`` and ``quiet``: floods of engines that were close to saturation before, or half idle."""

    busy: list[FloodResult]
    quiet: list[FloodResult]
    service_gap: list[ServiceGapResult]
    orders: list[OrderResult]
    shares: SharesResult
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
        [[one.policy, f"{one.before_s:.3f}", f"{one.during_s:.3f}", f"{one.factor:.2f}"] for one in floods],
    )
