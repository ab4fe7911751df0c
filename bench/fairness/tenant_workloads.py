# SPDX-License-Identifier: Apache-2.0
"""Workloads of tenants, played with a queue in front of simulated engines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import EngineLimits
from bench.reporting.summary import ttfts_s
from bench.stack import documents
from bench.virtual.engines import addresses, roofline_engine
from bench.virtual.simulation import Simulation
from bench.workload.sessions import Session, SessionTurn, Workload, one_piece
from extproc.api import load as configuration
from extproc.protocol import DEADLINE_MS, OBJECTIVES, TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.reporting.results import RequestResult
    from bench.virtual.observers import TokenObserver
    from bench.workload.text import Piece

HARDWARE: Final = "h100-llama-3.1-8b"
# An engine is saturated when a new prompt would wait for 50 ms: so requests wait in the queue, and not in the engine.
TIGHT: Final[Mapping[str, object]] = {"queueDepth": None, "kvUsage": None, "maxWait": "50ms"}
# No request is refused: scenarios compare who goes first.
PATIENT: Final[Mapping[str, object]] = {"timeout": "59m", "maxRequests": 1_000_000, "maxBytes": "64Gi"}

NO_QUEUE: Final = None
FCFS: Final[Mapping[str, object]] = {"fairness": "GlobalStrict"}
VTC: Final[Mapping[str, object]] = {"fairness": "VirtualTokenCounter"}


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
        system: tuple[Piece, ...] = ()
        if load.shared is not None:
            texts, tokens = load.shared
            system = one_piece(f"{seed}/{load.tenant}/{rng.randrange(texts)}", tokens)
        asked = one_piece(f"{seed}/{load.tenant}/{load.objective}/{number}", prompt)
        yield Session(now, (SessionTurn(asked, answer),), system=system, headers=headers, label=load.tenant)


def play(
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
        configuration.load(files), dict.fromkeys(addresses(engines), kind), seed=seed, token_observer=token_observer
    ).run(workload)


def ttfts_without(results: Iterable[RequestResult], tenant: str) -> list[float]:
    """Seconds to the first token of good answers, of all tenants but one."""
    return ttfts_s(one for one in results if one.label != tenant)
