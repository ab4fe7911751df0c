# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.lab.gpu_tiers``: a load on two kinds of GPU at two prices, with and without tiers.

Time is virtual.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from bench.engine.hardware import PRESETS
from bench.lab.fairness import LengthRanges, TenantLoad, tenant_workload
from bench.virtual.engines import roofline_engine
from bench.virtual.simulation import Simulation
from extproc.api.config_loader import load_snapshot
from extproc.api.pricing import TokenCounts, compile_prices, cost_micros
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bench.reporting.request_results import RequestResult
    from bench.workload.sessions import Workload
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.pricing import Price

_MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
_MICRO: Final = 1_000_000


class GpuTier(msgspec.Struct, frozen=True):
    """A ModelServer. ``price``: of a million tokens of input, and of output."""

    hardware: str
    engines: tuple[str, ...]
    price: tuple[str, str]


# As much dearer as an hour of the GPU is in public price lists.
TIERS: Final[Mapping[str, GpuTier]] = MappingProxyType(
    {
        "h100": GpuTier("h100-llama-3.1-8b", ("10.0.1.1:8000", "10.0.1.2:8000"), ("0.15", "0.60")),
        "l40s": GpuTier("l40s-llama-3.1-8b", ("10.0.0.1:8000", "10.0.0.2:8000"), ("0.05", "0.20")),
    }
)


class LatencyObjective(msgspec.Struct, frozen=True):
    """In seconds."""

    ttft_s: float
    tpot_s: float

    def is_met(self, one: RequestResult) -> bool:
        """Errors never meet it."""
        return not one.error and one.ttft_s <= self.ttft_s and one.tpot_s <= self.tpot_s


OBJECTIVES: Final[Mapping[str, LatencyObjective]] = MappingProxyType(
    {"chat": LatencyObjective(1.0, 0.06), "premium": LatencyObjective(0.5, 0.025), "batch": LatencyObjective(60.0, 1.0)}
)
_CLASSES: Final = [
    {"tenants": [name], "ttft": f"{one.ttft_s}s", "tpot": f"{one.tpot_s}s"} for name, one in OBJECTIVES.items()
]
# What the rule has in place of, or beside, the usual weights.
POLICIES: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType(
    {
        "dear tier alone": {"weights": {"h100": 1, "l40s": 0}},
        "cheap tier alone": {"weights": {"h100": 0, "l40s": 1}},
        "weights, half and half": {},
        "tiers": {"tiers": {"classes": _CLASSES}},
    }
)


class TierRunResult(msgspec.Struct, frozen=True):
    """``cost_micros``: of all answers. ``attainment``: the share of requests that met the objective, by tenant and of
    all (""). ``cheap``: the share of requests that the cheap tier served.
    """

    cost_micros: int
    attainment: Mapping[str, float]
    cheap: float


def tier_snapshot(policy: Mapping[str, object]) -> Snapshot:
    """Both ModelServers, and one route to them."""
    weights = policy.get("weights", dict.fromkeys(TIERS, 1))
    assert isinstance(weights, Mapping)
    objects = [
        _object(
            "ModelServer",
            name,
            {
                "model": _MODEL,
                "endpoints": [{"address": address} for address in tier.engines],
                "pricing": [{"perMillion": {"input": tier.price[0], "output": tier.price[1]}}],
            },
        )
        for name, tier in TIERS.items()
    ]
    rule: dict[str, object] = {
        "targetModels": [{"modelServerName": name, "weight": weight} for name, weight in weights.items()]
    }
    if "tiers" in policy:
        rule["tiers"] = policy["tiers"]
    objects.append(_object("ModelRoute", "llama", {"modelName": "llama", "rules": [rule]}))
    return load_snapshot({"all.yaml": yaml.safe_dump_all(objects).encode()})


def _object(kind: str, name: str, spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def afternoon_workload(scale: float = 1.0, *, phase_s: float = 120.0, seed: int = 0) -> Workload:
    """Three tenants: chats, of which many come in the middle third; premium chats; a batch. ``scale``: of all rates."""
    chat, long = LengthRanges((500, 3000), (50, 300)), LengthRanges((2000, 8000), (100, 400))
    loads = [TenantLoad("chat", scale * 3.0, 3 * phase_s, lengths=chat)]
    loads.append(TenantLoad("chat", scale * 12.0, phase_s, begins_at_s=phase_s, lengths=chat, objective="peak"))
    loads.append(TenantLoad("premium", scale * 1.0, 3 * phase_s, lengths=chat))
    loads.append(TenantLoad("batch", scale * 0.5, 3 * phase_s, lengths=long))
    return tenant_workload("afternoon", loads, seed=seed)


def run_policy(policy: Mapping[str, object], workload: Workload, *, seed: int = 0) -> TierRunResult:
    """Under one policy."""
    snapshot = tier_snapshot(policy)
    kinds = {address: roofline_engine(PRESETS[tier.hardware]) for tier in TIERS.values() for address in tier.engines}
    results = Simulation(snapshot, kinds, seed=seed).run(workload)
    prices: dict[str, Price] = {}
    for server in snapshot.servers:
        found = compile_prices(server.spec.pricing).price_at(0.0)
        assert found is not None
        assert not hasattr(found, "micros")
        prices.update(dict.fromkeys([one.address for one in server.spec.endpoints], found))
    return tier_result(results, prices)


def tier_result(results: Sequence[RequestResult], prices: Mapping[str, Price]) -> TierRunResult:
    """``prices``: by engine."""
    cheap = set(TIERS["l40s"].engines)
    served = [one for one in results if not one.error]
    cost = sum(
        cost_micros(prices[one.engine], TokenCounts(one.prompt_tokens, one.cached_tokens, output=one.output_tokens))
        for one in served
    )
    share = {name: _attainment(one for one in results if one.label == name) for name in OBJECTIVES}
    return TierRunResult(
        cost, {"": _attainment(results), **share}, sum(one.engine in cheap for one in served) / len(served)
    )


def _attainment(results: Iterable[RequestResult]) -> float:
    met = [OBJECTIVES[one.label].is_met(one) for one in results]
    return sum(met) / len(met) if met else 1.0


def main() -> None:
    """Print a table."""
    made = argparse.ArgumentParser(prog="python -m bench.lab.gpu_tiers", description=__doc__)
    made.add_argument("--seed", type=int, default=0, help="of the load (default: 0)")
    made.add_argument("--scale", type=float, default=1.0, help="of all rates (default: 1)")
    options = made.parse_args()
    workload = afternoon_workload(options.scale, seed=options.seed)
    table = Table("policy", "cost, USD", *(f"{name or 'all'}, met" for name in ("", *OBJECTIVES)), "on the cheap tier")
    for name, policy in POLICIES.items():
        one = run_policy(policy, workload, seed=options.seed)
        shares = [f"{share:.1%}" for share in (*one.attainment.values(), one.cheap)]
        table.add_row(name, f"{one.cost_micros / _MICRO:.3f}", *shares)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
