"""Plugins by the names under which they are configured: llm-d's, Kthena's and ours, and those that other packages bring."""

from __future__ import annotations

from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from extproc.scheduling.plugins.affinity import LoraAffinity, SessionAffinity, SessionAffinityFilter
from extproc.scheduling.plugins.cache_scorers import KvCacheUtilization, NoHitLru, PrefixCache
from extproc.scheduling.plugins.choices import MaxScore, PowerOfTwo, Random, Softmax, WeightedRandom
from extproc.scheduling.plugins.filters import (
    Concurrency,
    Healthy,
    LeastRequestFilter,
    LoraLoaded,
    PrefixCacheAffinity,
    Saturation,
    SubsetHint,
)
from extproc.scheduling.plugins.load_scorers import (
    ActiveRequests,
    LeastRequest,
    LoadAware,
    Queue,
    RunningRequests,
    TokenLoad,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["filter", "scorer", "picker", "profile handler"]

# A package that brings plugins lists them in this group: each a name and a PluginType.
ENTRY_POINTS: Final = "attache.scheduling"


class PluginType(msgspec.Struct, frozen=True):
    """A plugin is the struct of its parameters: ``cls`` is both."""

    kind: Kind
    cls: type


class SingleProfile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``single-profile-handler``: the one profile there is."""


BUILT_IN: Final[Mapping[str, PluginType]] = MappingProxyType(
    {
        # llm-d's
        "queue-scorer": PluginType("scorer", Queue),
        "running-requests-size-scorer": PluginType("scorer", RunningRequests),
        "active-request-scorer": PluginType("scorer", ActiveRequests),
        "load-aware-scorer": PluginType("scorer", LoadAware),
        "token-load-scorer": PluginType("scorer", TokenLoad),
        "kv-cache-utilization-scorer": PluginType("scorer", KvCacheUtilization),
        "prefix-cache-scorer": PluginType("scorer", PrefixCache),
        "no-hit-lru-scorer": PluginType("scorer", NoHitLru),
        "lora-affinity-scorer": PluginType("scorer", LoraAffinity),
        "session-affinity-scorer": PluginType("scorer", SessionAffinity),
        "session-affinity-filter": PluginType("filter", SessionAffinityFilter),
        "prefix-cache-affinity-filter": PluginType("filter", PrefixCacheAffinity),
        "utilization-detector": PluginType("filter", Saturation),
        "concurrency-detector": PluginType("filter", Concurrency),
        "max-score-picker": PluginType("picker", MaxScore),
        "random-picker": PluginType("picker", Random),
        "weighted-random-picker": PluginType("picker", WeightedRandom),
        "single-profile-handler": PluginType("profile handler", SingleProfile),
        # Kthena's, and ours
        "least-request-scorer": PluginType("scorer", LeastRequest),
        "least-request-filter": PluginType("filter", LeastRequestFilter),
        "lora-loaded-filter": PluginType("filter", LoraLoaded),
        "healthy-filter": PluginType("filter", Healthy),
        "subset-hint-filter": PluginType("filter", SubsetHint),
        "power-of-two-picker": PluginType("picker", PowerOfTwo),
        "softmax-picker": PluginType("picker", Softmax),
    }
)


def installed() -> Mapping[str, PluginType]:
    """All that can be configured here. A package cannot take a name that is ours."""
    theirs = {entry.name: entry.load() for entry in entry_points(group=ENTRY_POINTS)}
    return MappingProxyType({**theirs, **BUILT_IN})
