# SPDX-License-Identifier: Apache-2.0
"""Generators by name, with their parameters: ``shared-prefix:groups=256,prefix=4096``."""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.workload.formats.rows import Excerpt, TraceInvalid
from bench.workload.sessions import Session, Workload
from bench.workload.shapes import Agents, Bursts, Conversations, HeavyTail, LoraMix, Retrieval, SharedPrefix, Tenants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Shape(Protocol):
    """A kind of traffic: a struct of parameters."""

    def play(self, seed: int) -> Iterator[Session]:
        """Sessions in the order of their beginning. Equal seeds give equal sessions."""
        ...


GENERATORS: Final[Mapping[str, type[Shape]]] = MappingProxyType(
    {
        "chat": Conversations,
        "shared-prefix": SharedPrefix,
        "agents": Agents,
        "retrieval": Retrieval,
        "bursts": Bursts,
        "heavy-tail": HeavyTail,
        "tenants": Tenants,
        "lora": LoraMix,
    }
)


def conversations(shape: Conversations, seed: int = 0) -> Workload:
    """The workload of ``shape``, under a name that says what it is."""
    name = f"{shape.sessions} generated conversations of {shape.turns} turns over {shape.system_prompts} system prompts"
    return Workload(name, tuple(shape.play(seed)))


def generate(described: str, seed: int, excerpt: Excerpt) -> Workload:
    """The sessions of a generator. Raises TraceInvalid.

    ``described``: its name and parameters, as in ``chat:sessions=30,turns=2``. ``excerpt``: which sessions; without a
    limit all that the generator makes.
    """

    name, _, numbers = described.partition(":")
    pairs = [one.partition("=") for one in numbers.split(",") if one]
    try:
        shape = msgspec.convert({key: value for key, _, value in pairs}, GENERATORS[name], strict=False)
    except msgspec.ValidationError as error:
        msg = f"{described}: {error}; {name} takes {', '.join(_fields(name))}"
        raise TraceInvalid(msg) from None
    unknown = [key for key, _, _ in pairs if key not in _fields(name)]
    if unknown:
        msg = f"{described}: {name} has no {', '.join(unknown)}; it takes {', '.join(_fields(name))}"
        raise TraceInvalid(msg)
    stop = excerpt.skip + excerpt.limit if excerpt.limit else None
    sessions = tuple(islice(shape.play(seed), excerpt.skip, stop))
    if not sessions:
        msg = f"{described}: makes no sessions after the first {excerpt.skip}; skip fewer"
        raise TraceInvalid(msg)
    return Workload(f"{described}, seed {seed}, {len(sessions)} sessions", sessions)


def _fields(name: str) -> list[str]:
    return list(GENERATORS[name].__annotations__)
