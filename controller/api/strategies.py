# SPDX-License-Identifier: Apache-2.0
"""Scaling strategies by name: ours, and other packages'.

A strategy is a module that has its parameters, what it does, and a ``StrategyType``. CRDs, reference pages and the
decision are made from that. A name of ours is a line below; a package that brings strategies lists them as entry points
of the group ``attache.strategies``, each a name and a ``StrategyType``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from extproc.api.spec import Spec

log = logging.getLogger(__name__)

ENTRY_POINTS: Final = "attache.strategies"
_OURS: Final = "controller.autoscaler.decision.strategies"
_BUILT_IN: Final = {
    "Work": "work:WORK",
    "Target": "target:TARGET",
    "Concurrency": "concurrency:CONCURRENCY",
    "Saturation": "saturation:SATURATION",
    "SpareCapacity": "spare_capacity:SPARE_CAPACITY",
    "Tokens": "tokens:TOKENS",
    "Slo": "slo:SLO",
    "Predictive": "predictive:PREDICTIVE",
    "Step": "step:STEP",
}


class LearnedState(msgspec.Struct, frozen=True):
    """The part of a strategy's memory that is slow to learn and survives a restart. ``kind``: its struct. ``keep``:
    extracts it from the memory; None if it is still empty. ``restore``: makes a memory from it and the time; None for
    implausible values, as any user who may write a binding may write them.
    """

    kind: type
    keep: Callable[[Any], Any]
    restore: Callable[[Any, float], Any]


class StrategyType(msgspec.Struct, frozen=True, kw_only=True):
    """``summary``: its input and rule, for the reference. ``make``: the strategy, from its parameters and the policy.
    ``defaults``: its parameters; None if it has none. ``needs``: a field of the policy that it requires.
    ``by_metrics``: it uses the policy's metrics alone, as an HPA does; so HPA's defaults of the behaviour block apply,
    and gateways need not report. ``is_lower_bound``: it never scales in; without a recommendation from it, the other
    strategies decide. ``kept``: the part of its memory that survives a restart.
    """

    summary: str
    make: Callable[[Any, Any], Any]
    defaults: Spec | None = None
    needs: Literal["", "metrics", "objective"] = ""
    by_metrics: bool = False
    is_lower_bound: bool = False
    kept: LearnedState | None = None


def installed_strategies() -> Mapping[str, StrategyType]:
    """All that a policy may name. A package cannot take a name of ours; one that cannot be loaded is left out."""
    ours = [EntryPoint(name, f"{_OURS}.{where}", ENTRY_POINTS) for name, where in _BUILT_IN.items()]
    found = {one.name: one.load() for one in ours}
    for one in entry_points(group=ENTRY_POINTS):
        if one.name in found:
            continue
        try:
            loaded = one.load()
        except (Exception, SystemExit):
            log.exception("the strategy %s of %s cannot be loaded", one.name, one.value)
            continue
        if isinstance(loaded, StrategyType):
            found[one.name] = loaded
        else:
            log.error("the strategy %s of %s is no StrategyType", one.name, one.value)
    return MappingProxyType(found)
