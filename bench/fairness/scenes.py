"""Workloads of tenants, and a queue in front of simulated engines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

from bench.engine.hardware import PRESETS
from bench.engine.scheduler import Limits
from bench.stack import documents
from bench.virtual.engines import kind_of
from bench.virtual.simulation import Simulation
from bench.workload.sessions import Session, Turn, Workload, says
from extproc.config.load import load
from extproc.protocol import DEADLINE_MS, OBJECTIVES, TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.load.client import Result
    from bench.virtual.observer import Watch
    from bench.workload.text import Piece

HARDWARE: Final = "h100-llama-3.1-8b"
# An engine is full when a new prompt would wait for so long: the queue decides, and not the engine.
TIGHT: Final[Mapping[str, object]] = {"queueDepth": None, "kvUsage": None, "maxWait": "50ms"}
# In scenarios nobody is refused: what is compared is who goes first.
PATIENT: Final[Mapping[str, object]] = {"timeout": "1h", "maxRequests": 1_000_000, "maxBytes": "64Gi"}

NO_QUEUE: Final = None
FCFS: Final[Mapping[str, object]] = {"fairness": "GlobalStrict"}
VTC: Final[Mapping[str, object]] = {"fairness": "VirtualTokenCounter"}


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of prompts and answers, each evenly spread between two bounds."""

    prompt: tuple[int, int] = (2000, 8000)
    answer: tuple[int, int] = (20, 60)


class Asking(msgspec.Struct, frozen=True):
    """A tenant's requests: a Poisson process of ``rate`` a second, from ``begins_s`` for ``seconds``."""

    tenant: str
    rate: float
    seconds: float
    begins_s: float = 0.0
    lengths: Lengths = Lengths()
    objective: str = ""
    # from 1 s on, evenly up to this many
    deadline_s: float | None = None
    # what all its prompts begin with: one of so many texts of so many tokens
    shared: tuple[int, int] | None = None


def tenants(name: str, asking: Iterable[Asking], *, seed: int) -> Workload:
    """All of them together; equal arguments give equal workloads, and one tenant's do not depend on the others'."""
    sessions = [session for one in asking for session in _sessions(one, seed)]
    return Workload(name, tuple(sorted(sessions, key=lambda one: one.begins_s)))


def _sessions(asking: Asking, seed: int) -> Iterable[Session]:
    rng = random.Random(f"{seed}/{asking.tenant}/{asking.objective}")
    now, number = asking.begins_s, 0
    while (now := now + rng.expovariate(asking.rate)) < asking.begins_s + asking.seconds:
        number += 1
        headers = {TENANT: asking.tenant}
        if asking.objective:
            headers[OBJECTIVES[0]] = asking.objective
        if asking.deadline_s is not None:
            headers[DEADLINE_MS] = str(1000 * rng.uniform(1.0, asking.deadline_s))
        prompt, answer = rng.randint(*asking.lengths.prompt), rng.randint(*asking.lengths.answer)
        system: tuple[Piece, ...] = ()
        if asking.shared is not None:
            texts, tokens = asking.shared
            system = says(f"{seed}/{asking.tenant}/{rng.randrange(texts)}", tokens)
        asked = says(f"{seed}/{asking.tenant}/{asking.objective}/{number}", prompt)
        yield Session(now, (Turn(asked, answer),), system=system, headers=headers, label=asking.tenant)


def play(
    workload: Workload,
    control: Mapping[str, object] | None,
    *,
    engines: int,
    seed: int = 0,
    watch: Watch | None = None,
    kv_blocks: int = 20_000,
    objectives: Mapping[str, int] | None = None,
) -> Sequence[Result]:
    """Results under a ``flowControl``, or without a queue."""
    more = {} if control is None else {"flowControl": {"saturation": TIGHT, **PATIENT, **control}}
    addresses = [f"10.0.0.{number + 1}:8000" for number in range(engines)]
    files = {"all.yaml": documents(addresses, gateway={}, more=more).encode()}
    for name, priority in (objectives or {}).items():
        document = {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": {"name": name},
            "spec": {"priority": priority},
        }
        files[f"{name}.yaml"] = yaml.safe_dump(document).encode()
    limits = Limits(num_gpu_blocks=kv_blocks)
    kind = kind_of(PRESETS[HARDWARE], limits)
    return Simulation(load(files), dict.fromkeys(addresses, kind), seed=seed, watch=watch).run(workload)


def ttfts_of(results: Iterable[Result], *, without: str = "") -> list[float]:
    """Seconds to the first token, of all tenants but one."""
    return [one.first_token_s - one.due_s for one in results if not one.error and one.label != without]
