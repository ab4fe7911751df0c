# SPDX-License-Identifier: Apache-2.0
"""Objectives of a ModelRoute: how fast which share of its requests is to be answered, by class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api.admission import Priority
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Name, Spec, list_map_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path

ObjectiveName = Literal["ttft", "tpot", "e2e"]
Unmeetable = Literal["Serve", "Refuse"]
OBJECTIVES: Final[tuple[ObjectiveName, ...]] = ("ttft", "tpot", "e2e")
# Attainment is kept by the hour, and so long.
SHORTEST_WINDOW_S: Final = 3600.0
LONGEST_WINDOW_S: Final = 90 * 86400.0
# The lowest of the priorities: no class is below.
LOWEST_PRIORITY: Final = -(2**31)
_NOTHING: Final = "promises nothing; write ttft, tpot or e2e"
_NOTHING_DUE: Final = "refuses requests whose first token would come too late; write ttft or e2e, too"


class Slo(Spec, frozen=True):
    """What is promised to requests of a priority and above, up to that of the next class.

    ``name``: of the class, in metrics. ``priority``: the lowest one of the class, as of a band; by default, the class
    has all requests below the others. ``ttft``: until the first content of a streamed answer. ``tpot``: for each
    further token of a streamed answer, on average. ``e2e``: until the end of the answer. ``share``: of the requests,
    for which each of these is to hold. ``window``: over which the share is computed, from 1h to 90d. ``unmeetable``:
    what becomes of a request whose predicted TTFT is longer than ``ttft`` or ``e2e``; with ``Refuse``, another
    ModelServer of its rule that is predicted to hold them gets it, else a fallback that is; if
    there is none, it is refused at once.
    """

    CEL: ClassVar = (
        CelRule("has(self.ttft) || has(self.tpot) || has(self.e2e)", _NOTHING),
        CelRule(
            "!has(self.unmeetable) || self.unmeetable != 'Refuse' || has(self.ttft) || has(self.e2e)", _NOTHING_DUE
        ),
    )

    name: Name
    priority: Priority = LOWEST_PRIORITY
    ttft: Duration | None = None
    tpot: Duration | None = None
    e2e: Duration | None = None
    # 1 would leave nothing that may go wrong
    share: Annotated[float, msgspec.Meta(ge=0.5, le=0.99999)] = 0.99
    window: Duration = Duration("30d")
    unmeetable: Unmeetable = "Serve"

    def targets(self) -> Iterator[tuple[ObjectiveName, float]]:
        """Each objective that there is, in seconds."""
        for name in OBJECTIVES:
            target = getattr(self, name)
            if target is not None:
                yield name, float(target)


Slos = Annotated[tuple[Slo, ...], msgspec.Meta(max_length=8, extra_json_schema=list_map_keys("name"))]


def check_slo(classes: Sequence[Slo]) -> Iterator[Finding]:
    """Classes differ in name and priority; each promises something that an answer can keep."""
    names: set[str] = set()
    priorities: set[int] = set()
    for index, one in enumerate(classes):
        path: Path = ("spec", "slo", index)
        if one.name in names:
            yield (*path, "name"), f"'{one.name}' is there already; give each class a name of its own"
        elif one.priority in priorities:
            yield (*path, "priority"), "another class has this priority; give each its own"
        names.add(one.name)
        priorities.add(one.priority)
        targets = dict(one.targets())
        if not targets:
            yield path, _NOTHING
        elif one.unmeetable == "Refuse" and not targets.keys() & {"ttft", "e2e"}:
            yield (*path, "unmeetable"), _NOTHING_DUE
        for name, target_s in targets.items():
            if not target_s:
                yield (*path, name), "is 0, which no answer can keep; write more"
        if one.ttft is not None and one.e2e is not None and one.ttft > one.e2e > 0:
            yield (*path, "ttft"), f"{one.ttft} is longer than e2e, {one.e2e}; an answer ends after its first token"
        if not SHORTEST_WINDOW_S <= one.window <= LONGEST_WINDOW_S:
            yield (*path, "window"), f"is {one.window}; write one from 1h to 90d"
