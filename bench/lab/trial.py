# SPDX-License-Identifier: Apache-2.0
"""One trial: a policy on a workload in virtual time, its report, and the lower bound of its TTFT.

What a request takes beyond that, its excess, is what a picker can change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.engine.hardware import API_S
from bench.engine.kv_transfer import NETWORKS
from bench.engine.step_time import StepWork, prefill_s, step_batch
from bench.lab.hardware_spec_parser import engine_profiles
from bench.lab.policies.policy_file import PolicyFailed
from bench.lab.policies.registry import policy_named
from bench.lab.policies.trackers import EngineCalibration, PolicySetup
from bench.stack.loopback_stack import documents
from bench.virtual.engines import addresses
from bench.virtual.simulation import DisaggregationSettings, SimulatedDelays, Simulation
from bench.workload.generators import load_workload
from bench.workload.sessions import with_rate_scale
from bench.workload.traces import Excerpt
from extproc.api.config_loader import load_snapshot
from extproc.refusals import NoEndpoint

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.reporting.request_results import RequestResult
    from bench.virtual.engines import EngineProfile
    from bench.workload.sessions import Workload
    from extproc.api.config_snapshot import Snapshot
    from extproc.scheduling.picker import Pick, Picker, View

_CHUNK: Final = 8192


class TtftLowerBound:
    """A RequestObserver. ``kind``: the fastest engine of the trial."""

    def __init__(self, kind: EngineProfile) -> None:
        self._kind = kind
        self._seen: set[int] = set()
        self._seconds: dict[tuple[int, int], float] = {}

    def bound_s(self, position: tuple[int, int]) -> float:
        """The bound of the request at ``position``; 0 if it never arrived."""
        return self._seconds.get(position, 0.0)

    def on_begin(self, engines: Mapping[str, Scheduler]) -> None:
        """The state of the engines does not matter."""

    def on_arrival(self, request: Request, position: tuple[int, int], now: float) -> None:
        """Compute the bound and record the blocks of the prompt."""
        del now
        hashes = request.text.hashes
        known = next((index for index, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))
        self._seen.update(hashes)
        size = self._kind.limits.block_size
        cached = min(known, (request.prompt_tokens - 1) // size) * size
        budget = self._kind.limits.max_num_batched_tokens
        uncached = request.prompt_tokens - cached
        self._seconds[position] = API_S + prefill_s(self._kind.speed, uncached, cached, budget=budget)

    def on_sent(self, request: Request, address: str, now: float) -> None:
        """The pick does not matter."""

    def on_first_token(self, request: Request, now: float) -> None:
        """The real TTFT does not matter."""

    def on_ended(self, request: Request, now: float) -> None:
        """Record the blocks of the answer."""
        del now
        self._seen.update(request.text.hashes)


class TrialConditions(msgspec.Struct, frozen=True):
    """All of a trial but the policy.

    | field | unit | meaning |
    |---|---|---|
    | `trace` | | the file of a trace, or a generator as in `chat:sessions=30` |
    | `trace_format` | | None: by the file name |
    | `skip`, `limit` | rows or sessions | the excerpt of the trace; `limit` 0: to the end |
    | `rate_scale` | | how many times as many sessions begin per second |
    | `hardware` | | of each engine: `h100x4`, mixed: `h100*4+l40s*4`, or the file of a GPU: `rig.yamlx2` |
    | `model` | | a name, or the file of a model |
    | `block_size` | tokens | of a KV block |
    | `kv_blocks` | | of each engine; None: what its GPUs' memory holds |
    | `seed` | | of ties, answers and generators |
    | `scrape_s`, `log_s`, `events_s` | s | see `Delays` |
    | `prefill`, `decode` | engines | for policies with pairs, the first so many prefill, the next decode; 0: no roles |
    | `network` | | what KV caches are transferred over: a name of `NETWORKS` |
    | `pushes` | | KV caches are pushed in pieces while the prefill runs, in place of pulled after it |
    | `flow_control` | | the ModelServer's `flowControl` as JSON; empty: no queue in front of the engines |
    """

    trace: str
    trace_format: str | None = None
    skip: int = 0
    limit: int = 0
    rate_scale: float = 1.0
    engines: int = 8
    hardware: str = "h100x4"
    model: str = "70b"
    block_size: int = 64
    kv_blocks: int | None = None
    seed: int = 0
    scrape_s: float = 0.2
    log_s: float = 0.2
    events_s: float = 0.05
    flow_control: str = ""
    prefill: int = 0
    decode: int = 0
    network: str = "nvlink"
    pushes: bool = False

    def engines_text(self) -> str:
        """Its engines in words."""
        roles = f" ({self.prefill} prefill, {self.decode} decode over {self.network})" if self.prefill else ""
        return f"{self.engines} engines{roles} of {self.hardware}, {self.model}"

    def workload(self) -> Workload:
        """Raises TraceInvalid."""
        excerpt = Excerpt(self.skip, self.limit)
        workload = load_workload(self.trace, excerpt, trace_format=self.trace_format, seed=self.seed)
        return with_rate_scale(workload, self.rate_scale)


class Trial(msgspec.Struct, frozen=True):
    """A policy under conditions. ``policy``: a name, ``my.py:Mine``, or the path of an EndpointPickerConfig."""

    policy: str
    conditions: TrialConditions


class RequestRow(msgspec.Struct, frozen=True, array_like=True):
    """One request. ``position``: the number of its session in the workload, and of its turn in the session.

    ``due_at_s``: from the start of the trial. ``engine``: its number; -1 for a request that was not served.
    ``ideal_s``: the lower bound of its TTFT. ``prefill``: the number of the other engine that prefilled it, or -1.
    """

    position: tuple[int, int]
    due_at_s: float
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
    prefill: int = -1


class TrialReport(msgspec.Struct, frozen=True):
    """The results of a trial. ``busy``: for each engine, the share of the time in which it computed, 0 to 1.

    ``duration_s``: to the last token, in virtual time. ``wall_s``: how long the trial took to run.
    """

    trial: Trial
    workload: str
    rows: list[RequestRow]
    duration_s: float
    busy: list[float]
    wall_s: float


def run_trial(trial: Trial, clock: Callable[[], float]) -> TrialReport:
    """Raises TraceInvalid, ConfigInvalid, HardwareUnknown or PolicyFailed. ``clock``: seconds of the wall clock."""
    conditions = trial.conditions
    kinds = engine_profiles(
        conditions.hardware,
        conditions.model,
        count=conditions.engines,
        block_size=conditions.block_size,
        kv_blocks=conditions.kv_blocks,
    )
    engines = dict(zip(addresses(len(kinds)), kinds, strict=True))
    policy = policy_named(trial.policy)(calibrate_engine(kinds[0]))
    workload = conditions.workload()
    picks = _FirstFailure(trial.policy, policy.picker)
    lower_bound = TtftLowerBound(max(kinds, key=lambda kind: calibrate_engine(kind).prefill_tokens_per_s))
    simulation = Simulation(
        _snapshot(list(engines), conditions, policy, workload.adapters),
        engines,
        seed=conditions.seed,
        make_picker=lambda _spec, _files: picks,
        delays=SimulatedDelays(scrape_s=conditions.scrape_s, log_s=conditions.log_s, events_s=conditions.events_s),
        request_observers=[lower_bound] if policy.observer is None else [policy.observer, lower_bound],
        pairing=DisaggregationSettings(NETWORKS[conditions.network], conditions.pushes, policy.on_transfer),
    )
    began_at_s = clock()
    results = simulation.run(workload)
    if picks.error is not None:
        raise picks.error
    numbers = {address: number for number, address in enumerate(engines)}
    rows = [_row(one, numbers, lower_bound) for one in results]
    duration_s = max((one.last_token_at_s for one in results), default=0.0)
    busy = [engine.busy_s / duration_s if duration_s else 0.0 for engine in simulation.engines.values()]
    return TrialReport(
        trial=trial,
        workload=workload.name,
        rows=sorted(rows, key=lambda row: row.position),
        duration_s=duration_s,
        busy=busy,
        wall_s=clock() - began_at_s,
    )


def check_trials(trials: Sequence[Trial]) -> None:
    """Make every policy and engine once. Raises ConfigInvalid, PolicyFailed or HardwareUnknown."""
    for name in dict.fromkeys(trial.policy for trial in trials):
        made = policy_named(name)(EngineCalibration(prefill_tokens_per_s=1.0, decode_s_per_token=1.0, block_size=16))
        alone = any(trial.policy == name and not trial.conditions.prefill for trial in trials)
        if made.has_pairs and alone:
            raise PolicyFailed(f"{name}: is for engines in two roles; give --prefill N and --decode N")
    for hardware, model in dict.fromkeys((trial.conditions.hardware, trial.conditions.model) for trial in trials):
        engine_profiles(hardware, model, count=1, block_size=16)


class _FirstFailure:
    """A Picker that keeps its first error: the request path answers such a request with an error and goes on."""

    def __init__(self, name: str, picker: Picker) -> None:
        self._name = name
        self._picker = picker
        self.error: Exception | None = None

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The policy's pick."""
        try:
            pick = self._picker.pick(view, rng=rng)
            if view.failed:
                # serving goes on without the plugin; figures of another policy than the one named would be wrong
                failed = view.failed[0]
                raise PolicyFailed(f"{self._name}: the plugin '{failed.plugin}' fails: {failed}")
            return pick
        except NoEndpoint:
            raise
        except Exception as error:
            self.error = self.error or error
            raise


def calibrate_engine(kind: EngineProfile) -> EngineCalibration:
    """What an operator would measure on an idle engine: a prefill of 8,192 tokens (llm-d's recipe), and 32 decodes."""
    prefill_s = kind.speed.seconds(step_batch([StepWork(_CHUNK, 0)]))
    decode_s = kind.speed.seconds(step_batch([StepWork(1, 1000)] * 32)) / 32
    return EngineCalibration(
        prefill_tokens_per_s=_CHUNK / prefill_s, decode_s_per_token=decode_s, block_size=kind.limits.block_size
    )


def _snapshot(
    engines: list[str], conditions: TrialConditions, policy: PolicySetup, adapters: tuple[str, ...]
) -> Snapshot:
    more = dict(policy.server)
    if policy.has_pairs:
        roles = ["prefill"] * conditions.prefill + ["decode"] * conditions.decode
        more["endpoints"] = [
            {"address": one, "labels": {"role": role}} for one, role in zip(engines, roles, strict=True)
        ]
    if conditions.flow_control:
        more["flowControl"] = msgspec.json.decode(conditions.flow_control)
    text = documents(engines, gateway={}, more=more, adapters=adapters)
    return load_snapshot({"lab.yaml": text.encode()})


def _row(result: RequestResult, numbers: Mapping[str, int], lower_bound: TtftLowerBound) -> RequestRow:
    return RequestRow(
        position=result.position,
        due_at_s=result.due_at_s,
        ttft_s=result.ttft_s,
        tpot_s=result.tpot_s,
        e2e_s=result.e2e_s,
        prompt_tokens=result.prompt_tokens,
        cached_tokens=result.cached_tokens,
        output_tokens=result.output_tokens,
        engine=numbers.get(result.engine, -1),
        ideal_s=lower_bound.bound_s(result.position),
        label=result.label,
        error=result.error,
        prefill=numbers.get(result.prefilled_by, -1),
    )
