"""One run: a policy, a workload, engines; what it is to be, as data, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.engine.step_time import Batch, Work, batch_of
from bench.lab.hardware import kinds_of
from bench.lab.lower_bound import LowerBound
from bench.lab.workloads import load_workload
from bench.policies.registry import Calibration, policy_named
from bench.stack import documents
from bench.virtual.observer import Delays
from bench.virtual.simulation import Simulation
from bench.workload.sessions import faster
from extproc.config.load import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.load.client import Result
    from bench.virtual.engines import Kind
    from extproc.config.types import Snapshot

_CHUNK: Final = 8192


class Conditions(msgspec.Struct, frozen=True):
    """All but the policy. ``trace``: a file or a generator's name; ``hardware``: as in ``h100x4`` or ``h100*4+l40s*4``."""

    trace: str
    trace_format: str | None = None
    skip: int = 0
    limit: int = 0
    rate_scale: float = 1.0
    engines: int = 8
    hardware: str = "h100x4"
    model: str = "70b"
    block_size: int = 64
    seed: int = 0
    scrape_s: float = 0.2
    log_s: float = 0.2
    events_s: float = 0.05
    # of the ModelServer: a queue in front of the engines, as JSON
    flow_control: str = ""


class Trial(msgspec.Struct, frozen=True):
    """What to run."""

    policy: str
    conditions: Conditions


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request. ``place``: its session's number and its turn's; times in seconds; ``ideal_s``: to the first token on an idle
    engine that holds all that anybody has sent before."""

    place: tuple[int, int]
    due_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    engine: int
    ideal_s: float
    label: str = ""
    error: str = ""


class Report(msgspec.Struct, frozen=True):
    """What came of a trial. ``busy``: by engine, the share of the time in which it computed."""

    trial: Trial
    workload: str
    rows: list[Row]
    duration_s: float
    busy: list[float]
    wall_s: float


def run(trial: Trial, clock: Callable[[], float]) -> Report:
    """Raises TraceInvalid, ConfigInvalid or HardwareUnknown."""
    conditions = trial.conditions
    kinds = kinds_of(conditions.hardware, conditions.model, conditions.engines, conditions.block_size)
    addresses = [f"10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(len(kinds))]
    engines = dict(zip(addresses, kinds, strict=True))
    policy = policy_named(trial.policy)(calibration(kinds[0]))
    workload = faster(load_workload(conditions), conditions.rate_scale)
    ideal = LowerBound(max(kinds, key=_prefill_rate))
    simulation = Simulation(
        _snapshot(addresses, conditions, policy.server, workload.adapters),
        engines,
        seed=conditions.seed,
        make_picker=lambda _spec, _files: policy.picker,
        delays=Delays(conditions.scrape_s, conditions.log_s, conditions.events_s),
        onlookers=[ideal] if policy.onlooker is None else [policy.onlooker, ideal],
    )
    began = clock()
    results = simulation.run(workload)
    numbers = {address: number for number, address in enumerate(addresses)}
    rows = [_row(one, numbers, ideal) for one in results]
    duration_s = max((one.last_token_s for one in results), default=0.0)
    busy = [machine.busy_s / duration_s if duration_s else 0.0 for machine in simulation.machines.values()]
    return Report(trial, workload.name, sorted(rows, key=lambda row: row.place), duration_s, busy, clock() - began)


def calibration(kind: Kind) -> Calibration:
    """What an operator would measure of an idle engine: llm-d's recipe is a prompt of 8,192 tokens."""
    prefill_s = kind.speed.seconds(batch_of([Work(_CHUNK, 0)]))
    decode_s = kind.speed.seconds(batch_of([Work(1, 1000)] * 32)) / 32
    return Calibration(_CHUNK / prefill_s, decode_s, kind.limits.block_size)


def _prefill_rate(kind: Kind) -> float:
    return 1 / kind.speed.seconds(Batch(1, _CHUNK, _CHUNK * _CHUNK / 2, 0, 0))


def _snapshot(
    addresses: list[str], conditions: Conditions, server: Mapping[str, Any], adapters: tuple[str, ...]
) -> Snapshot:
    more = dict(server)
    if conditions.flow_control:
        more["flowControl"] = msgspec.json.decode(conditions.flow_control)
    text = documents(addresses, gateway={}, more=more, adapters=adapters)
    return load({"lab.yaml": text.encode()})


def _row(result: Result, numbers: Mapping[str, int], ideal: LowerBound) -> Row:
    written = result.output_tokens - 1
    return Row(
        place=result.place,
        due_s=result.due_s,
        ttft_s=result.first_token_s - result.due_s,
        tpot_s=(result.last_token_s - result.first_token_s) / written if written > 0 else 0.0,
        e2e_s=result.last_token_s - result.due_s,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
        engine=numbers.get(result.engine, -1),
        ideal_s=ideal.seconds(result.place),
        label=result.label,
        error=result.error,
    )


def source_files() -> list[Path]:
    """Whatever a result may depend on: all code of the lab, the engines and the request path."""
    root = Path(__file__).resolve().parents[2]
    return sorted(path for package in ("bench", "extproc") for path in (root / package).rglob("*") if path.is_file())
