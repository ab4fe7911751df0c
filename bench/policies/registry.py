"""Policies by name: how each picks, and what it has to be told or shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from bench.policies.aibrix import LeastKvCache, PrefixCache
from bench.policies.dynamo import KvRouter
from bench.policies.in_flight import InFlightTracker
from bench.policies.kthena import KthenaDefault, KthenaMeasured
from bench.policies.llm_d import AffinityWithTokenLoad
from bench.policies.lmetric import LMetric
from bench.policies.oracle import Oracle
from bench.policies.preble import ExploitExplore
from bench.policies.prefix_memory import Index, Remembering
from bench.policies.ray_serve import PrefixAffinity
from bench.policies.sglang import CacheAware
from bench.policies.simple import ByChance, LeastRequest, PowerOfTwo
from bench.virtual.observer import Onlooker
from extproc.config.errors import ConfigInvalid, Mistake
from extproc.scheduling.picker import Picker
from extproc.scheduling.picker_config import picker_from_text
from extproc.scheduling.prefix_aware import PrefixAware, PrefixAwareParameters
from extproc.scheduling.registry import installed
from extproc.scheduling.round_robin import RoundRobin

_CONFIGS: Final = Path(__file__).parent / "configs"


class Calibration(msgspec.Struct, frozen=True):
    """What operators of some peers measure of an engine before: prefill in tokens a second, seconds a token of decode."""

    prefill: float
    decode_s: float
    block_size: int


class Policy(msgspec.Struct, frozen=True):
    """Ready for one run. ``server``: what its ModelServer must say beside."""

    picker: Picker
    onlooker: Onlooker | None = None
    server: Mapping[str, Any] = {}


_KV_EVENTS: Final = {"kvEvents": {"port": 5557}}


def _plain(make: Callable[[], Picker]) -> Callable[[Calibration], Policy]:
    def build(_: Calibration) -> Policy:
        return Policy(make())

    return build


def _watching(
    make: Callable[[InFlightTracker, Calibration], Picker], index: Index | None = None
) -> Callable[[Calibration], Policy]:
    """A policy that sees answers pass, with an index of its own."""

    def build(known: Calibration) -> Policy:
        books = InFlightTracker()
        picker = make(books, known)
        if index is not None:
            picker = Remembering(picker, books, index, known.block_size)
        return Policy(picker, books)

    return build


def _llm_d(file: str) -> Callable[[InFlightTracker, Calibration], Picker]:
    path = _CONFIGS / file
    return lambda _books, _known: picker_from_text(str(path), path.read_text(), installed()).picker


def _configured(file: Path, server: Mapping[str, Any] = MappingProxyType({})) -> Callable[[Calibration], Policy]:
    def build(_: Calibration) -> Policy:
        try:
            picker = picker_from_text(str(file), file.read_text(), installed()).picker
        except OSError as error:
            msg = f"cannot be read: {error.strerror}; name a file, or one of {', '.join(POLICIES)}"
            raise ConfigInvalid([Mistake(str(file), 0, "", msg)]) from None
        return Policy(picker, server=server)

    return build


def _ours() -> Picker:
    return PrefixAware(PrefixAwareParameters())


def _preble(books: InFlightTracker, known: Calibration) -> Picker:
    return ExploitExplore(books, prefill=known.prefill, decode_s=known.decode_s, block_size=known.block_size)


# What each router's index is like; see its module.
_SENT: Final = Index()
_UNBOUNDED: Final = Index(is_bounded=False)
_ENDED: Final = Index(by="ended", is_bounded=False)

POLICIES: Final[Mapping[str, Callable[[Calibration], Policy]]] = MappingProxyType(
    {
        "attache": _plain(_ours),
        "attache-precise": lambda _: Policy(_ours(), server=_KV_EVENTS),
        "round-robin": _plain(RoundRobin),
        "random": _plain(ByChance),
        "least-request": _plain(LeastRequest),
        "power-of-two": _plain(PowerOfTwo),
        "llm-d-blend": _watching(_llm_d("llm-d-default.yaml"), _SENT),
        "llm-d-token-load": _watching(lambda books, known: AffinityWithTokenLoad(books, known.prefill), _SENT),
        "llm-d-precise": _configured(_CONFIGS / "llm-d-precise.yaml", _KV_EVENTS),
        "kthena": _watching(lambda _books, _known: KthenaDefault(), _ENDED),
        "kthena-2025-least-request": _plain(KthenaMeasured),
        "kthena-2025-prefix": _watching(lambda _books, _known: KthenaMeasured(prefix="seen"), _ENDED),
        "kthena-2025-kvcache": _watching(lambda _books, _known: KthenaMeasured(prefix="whole"), Index(by="events")),
        "sglang": _watching(lambda _books, _known: CacheAware(), _UNBOUNDED),
        "dynamo": _watching(lambda books, known: KvRouter(books, known.block_size), Index(by="events")),
        "preble": _watching(_preble, _SENT),
        "aibrix-prefix-cache": _watching(lambda _books, _known: PrefixCache(), _UNBOUNDED),
        "aibrix-least-kv-cache": _plain(LeastKvCache),
        "ray": _watching(lambda _books, _known: PrefixAffinity(), _UNBOUNDED),
        "lmetric": _watching(lambda books, _: LMetric(books), _SENT),
        "oracle": _watching(lambda books, _: Oracle(books)),
    }
)


def policy_named(name: str) -> Callable[[Calibration], Policy]:
    """By name, or by the path of an EndpointPickerConfig; raises ConfigInvalid."""
    return POLICIES[name] if name in POLICIES else _configured(Path(name))
