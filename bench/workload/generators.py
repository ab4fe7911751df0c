"""Generators by name, with their numbers: ``shared-prefix:groups=256,prefix=4096``."""

from __future__ import annotations

from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from bench.workload.formats.rows import Part, TraceInvalid
from bench.workload.generate import Conversations
from bench.workload.sessions import Session, Workload
from bench.workload.shapes import Agents, Bursts, HeavyTail, LoraMix, Retrieval, SharedPrefix, Tenants

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Shape(Protocol):
    """A kind of traffic: a struct of numbers."""

    def play(self, seed: int) -> Iterator[Session]:
        """In the order of their beginning; equal seeds give equal sessions."""
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


def generate(described: str, seed: int, part: Part) -> Workload:
    """Sessions of a generator, ``part`` of them if its limit is not 0. Raises TraceInvalid."""
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
    stop = part.skip + part.limit if part.limit else None
    sessions = tuple(islice(shape.play(seed), part.skip, stop))
    if not sessions:
        msg = f"{described}: makes no sessions after the first {part.skip}; skip fewer"
        raise TraceInvalid(msg)
    return Workload(f"{described}, seed {seed}, {len(sessions)} sessions", sessions)


def _fields(name: str) -> list[str]:
    return list(GENERATORS[name].__annotations__)
