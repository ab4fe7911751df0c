"""The questions that a queue must answer, each played in virtual time, with and without the policy that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bench.fairness.scenes import FCFS, NO_QUEUE, VTC, Asking, Lengths, play, tenants, ttfts_of
from bench.fairness.service import Service
from bench.load.summary import distribution

if TYPE_CHECKING:
    from bench.load.client import Result

Control = Mapping[str, object] | None

FLOODER: Final = "t0"


class Flood(msgspec.Struct, frozen=True):
    """p90 TTFT, in seconds, of the tenants that did nothing: ``before`` one floods, and ``during``."""

    policy: str
    before: float
    during: float
    ttfts: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        """By how much it rose."""
        return self.during / self.before


FLOOD_POLICIES: Final[Mapping[str, Control]] = {"no queue": NO_QUEUE, "FCFS": FCFS, "VTC": VTC}


def flood(*, rate: float, seconds: float, engines: int, policies: Mapping[str, Control], seed: int = 0) -> list[Flood]:
    """Ten tenants of equal rates; then the first asks ten times as much."""
    calm = [Asking(f"t{number}", rate, seconds) for number in range(10)]
    flooded = [Asking(FLOODER, 10 * rate, seconds), *calm[1:]]
    outcomes = []
    for policy, control in policies.items():
        before, during = (
            ttfts_of(play(tenants("flood", one, seed=seed), control, engines=engines, seed=seed), without=FLOODER)
            for one in (calm, flooded)
        )
        outcomes.append(Flood(policy, distribution(before).p90, distribution(during).p90, tuple(during)))
    return outcomes


class Ordered(msgspec.Struct, frozen=True):
    """Under one order: the share of deadlines missed, the mean TTFT, and the longest."""

    order: str
    missed: float
    mean: float
    longest: float


ORDERS: Final[Mapping[str, Mapping[str, object]]] = {
    "FirstCome": {"order": "FirstCome"},
    "Deadline": {"order": "Deadline", "ageing": "1h"},
    "ShortestFirst, no ageing": {"order": "ShortestFirst", "ageing": "1h"},
    "ShortestFirst": {"order": "ShortestFirst", "ageing": "10s"},
}
AGEING_S: Final = 10.0


def orders(*, rate: float, seconds: float, engines: int, seed: int = 0) -> list[Ordered]:
    """One tenant that asks too much for a while; its requests want their first token within 1 to 20 s."""
    lengths = Lengths((500, 12_000), (20, 60))
    workload = tenants("orders", [Asking("t0", rate, seconds, lengths=lengths, deadline_s=20.0)], seed=seed)
    wants = {one.begins_s: float(one.headers["x-attache-deadline-ms"]) / 1000 for one in workload.sessions}
    outcomes = []
    for name, control in ORDERS.items():
        results = play(workload, control, engines=engines, seed=seed)
        missed = [one.first_token_s - one.due_s > wants[one.due_s] for one in results]
        ttfts = ttfts_of(results)
        outcomes.append(Ordered(name, sum(missed) / len(missed), sum(ttfts) / len(ttfts), max(ttfts)))
    return outcomes


BANDS: Final[Mapping[str, int]] = {"critical": 10, "high": 5, "standard": 0, "best-effort": -1}


class Shares(msgspec.Struct, frozen=True):
    """The bands' shares of all service while all of them waited."""

    by_band: Mapping[str, float]


def shares(*, rate: float, seconds: float, engines: int, seed: int = 0) -> Shares:
    """All bands ask for more than the engines can do. Counted from when all wait, to the end of the asking."""
    asking = [Asking(name, rate, seconds, objective=name, lengths=Lengths((500, 3000))) for name in BANDS]
    watch = Service(with_history=True)
    # what is shared is the engines: nobody is refused for the chance of it
    control = {**VTC, "shedFrom": 1.99}
    play(tenants("shares", asking, seed=seed), control, engines=engines, seed=seed, watch=watch, objectives=BANDS)
    begins_s, ends_s = 0.1 * seconds, seconds
    had = {name: watch.served_at(name, ends_s) - watch.served_at(name, begins_s) for name in BANDS}
    return Shares({name: value / sum(had.values()) for name, value in had.items()})


class Locality(msgspec.Struct, frozen=True):
    """Cached share of all prompt tokens, and how far two waiting tenants' service was ever apart."""

    policy: str
    cached_token_ratio: float
    apart: float
    mean_ttft: float
    light_p90: float


QUANTUM: Final = 20_000
# With the limits that are the default: a shorter wait in the engine would take more from locality than it gives to fairness.
LOCAL_POLICIES: Final[Mapping[str, Control]] = {
    "no queue": NO_QUEUE,
    "FCFS": {**FCFS, "saturation": {}},
    "VTC": {**VTC, "saturation": {}},
    "DLPM": {"fairness": "DeficitLocality", "quantum": QUANTUM, "saturation": {}},
}


def locality(*, rate: float, seconds: float, engines: int, seed: int = 0) -> list[Locality]:
    """Tenants whose prompts begin with texts of their own, more than the caches hold; one of them asks for most."""
    lengths = Lengths((100, 600), (20, 60))
    asking = [
        Asking(f"t{number}", rate * (5 if number == 0 else 1), seconds, lengths=lengths, shared=(12, 4000))
        for number in range(6)
    ]
    outcomes = []
    for policy, control in LOCAL_POLICIES.items():
        watch = Service()
        results = play(
            tenants("locality", asking, seed=seed), control, engines=engines, seed=seed, watch=watch, kv_blocks=6000
        )
        ttfts = ttfts_of(results)
        outcomes.append(
            Locality(
                policy,
                cached_token_ratio(results),
                watch.widest,
                sum(ttfts) / len(ttfts),
                distribution(ttfts_of(results, without=FLOODER)).p90,
            )
        )
    return outcomes


def cached_token_ratio(results: Sequence[Result]) -> float:
    """Of all prompt tokens."""
    return sum(one.cached_tokens for one in results) / sum(one.prompt_tokens for one in results)


class Apart(msgspec.Struct, frozen=True):
    """How far two waiting tenants' service ever was apart, and what VTC's theorem allows; in weighted tokens."""

    policy: str
    widest: float
    bound: float
    history: Mapping[str, Sequence[tuple[float, float]]] = {}


def apart(
    asking: Sequence[Asking], *, policies: Mapping[str, Control], seed: int, kv_blocks: int = 1000
) -> list[Apart]:
    """One engine with a small cache, as in the paper, and tenants that want more than it can do."""
    outcomes = []
    for policy, control in policies.items():
        watch = Service(with_history=True)
        play(tenants("apart", asking, seed=seed), control, engines=1, seed=seed, watch=watch, kv_blocks=kv_blocks)
        outcomes.append(Apart(policy, watch.widest, watch.bound, watch.history))
    return outcomes


class Report(msgspec.Struct, frozen=True):
    """All scenarios. Floods: ``busy`` engines have more to do than they can before, ``quiet`` ones have a good half."""

    busy: list[Flood]
    quiet: list[Flood]
    apart: list[Apart]
    orders: list[Ordered]
    shares: Shares
    locality: list[Locality]

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, heads and rows."""
        heads = ["", "p90 TTFT of others before, s", "while one floods, s", "factor"]
        floods = [
            (f"one of ten tenants asks ten times as much; {name}", heads, [_flood_row(one) for one in rows])
            for name, rows in (("engines busy before", self.busy), ("engines quiet before", self.quiet))
        ]
        return [
            *floods,
            (
                "two tenants that both wait: their service apart, weighted tokens",
                ["", "widest", "VTC's bound"],
                [[one.policy, f"{one.widest:,.0f}", f"{one.bound:,.0f}"] for one in self.apart],
            ),
            (
                "orders inside a tenant",
                ["", "deadlines missed", "mean TTFT, s", "longest, s"],
                [[one.order, f"{one.missed:.1%}", f"{one.mean:.2f}", f"{one.longest:.1f}"] for one in self.orders],
            ),
            (
                "bands that all wait: shares of service",
                list(self.shares.by_band),
                [[f"{share:.1%}" for share in self.shares.by_band.values()]],
            ),
            (
                "locality",
                ["", "cached-token ratio", "service apart", "mean TTFT, s", "p90 TTFT of the light, s"],
                [
                    [
                        one.policy,
                        f"{one.cached_token_ratio:.1%}",
                        f"{one.apart:,.0f}",
                        f"{one.mean_ttft:.2f}",
                        f"{one.light_p90:.2f}",
                    ]
                    for one in self.locality
                ],
            ),
        ]


def _flood_row(one: Flood) -> list[str]:
    return [one.policy, f"{one.before:.3f}", f"{one.during:.3f}", f"{one.factor:.2f}"]
