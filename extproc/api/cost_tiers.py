# SPDX-License-Identifier: Apache-2.0
"""Tiers: the ModelServers of a rule from the cheapest to the dearest, and which of them a request takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api.admission import CallerNames, Priority
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path

Spill = Literal["Up", "Down", "UpOrDown", "Never"]
_FOR_NONE: Final = "is for nobody in particular; write tenants or minPriority, or put its fields into tiers"
NO_CHOICE: Final = "tiers choose among two ModelServers or more; add a target with a positive weight"


class TierOverrides(Spec, frozen=True):
    """What differs for some requests; fields that are left out are those of ``tiers``.

    ``tenants``: of these, by verified names. ``min_priority``: of this priority and above; both must match where both
    are given. ``ttft``, ``tpot``, ``wait``, ``spill``: as in ``tiers``.
    """

    CEL: ClassVar = (CelRule("has(self.tenants) || has(self.minPriority)", _FOR_NONE),)

    tenants: CallerNames = ()
    min_priority: Priority | None = None
    ttft: Duration | None = None
    tpot: Duration | None = None
    wait: Duration | None = None
    spill: Spill | None = None


class CostTierRouting(Spec, frozen=True):
    """A request takes the cheapest of the rule's ModelServers that is predicted to hold its objective, instead of one
    by weight.

    Its home is the cheapest one that could hold the objective if it were idle. If the home is predicted to miss it now,
    the request waits for it, or spills.

    ``ttft``: objective of the time to the first token; without it, the rule's ``ttftTarget``. ``tpot``: of the time for
    each further token. ``wait``: how long a request may wait in its home's queue (``flowControl``) before it spills; it
    spills earlier where it would miss the objective otherwise. ``spill``: to dearer ModelServers, to cheaper ones, to
    both or not at all; of those, the cheapest that holds the objective is taken, or else the one that misses it least.
    ``classes``: what differs for some requests; the first that matches counts.
    """

    ttft: Duration | None = None
    tpot: Duration | None = None
    wait: Duration = Duration("0s")
    spill: Spill = "Up"
    classes: Annotated[tuple[TierOverrides, ...], msgspec.Meta(max_length=16)] = ()


def check_tiers(tiers: CostTierRouting, path: Path, targets: int) -> Iterator[Finding]:
    """There are tiers to choose from, and every class is for someone. ``targets``: those of positive weight."""
    if targets < 2:
        yield path, NO_CHOICE
    classes = [((*path, "classes", number), one) for number, one in enumerate(tiers.classes)]
    for at, one in classes:
        if not one.tenants and one.min_priority is None:
            yield at, _FOR_NONE
    every: list[tuple[Path, CostTierRouting | TierOverrides]] = [(path, tiers), *classes]
    for at, each in every:
        for field, objective in (("ttft", each.ttft), ("tpot", each.tpot)):
            if objective is not None and float(objective) == 0:
                yield (*at, field), "is 0, which no engine can hold; write a time such as 500ms, or leave it out"
