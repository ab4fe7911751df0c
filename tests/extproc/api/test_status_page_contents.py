# SPDX-License-Identifier: Apache-2.0
"""Lines that name changed servers alone say what whole ones say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.status_page_contents import ProcessDemand, ServerDemand, apply_demand_delta, demand_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

SERVERS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3)
PAGES = st.lists(st.tuples(st.sampled_from(["x", "x", "y"]), SERVERS), min_size=1, max_size=8)


def pages_of(said: Sequence[tuple[str, dict[str, int]]]) -> list[ProcessDemand]:
    """A server that says the same as before is the same object."""
    known: dict[tuple[str, int], ServerDemand] = {}
    found = []
    for sequence, (instance, servers) in enumerate(said, start=1):
        one = {
            name: known.setdefault((name, queued), ServerDemand(model=name, queued=queued))
            for name, queued in servers.items()
        }
        found.append(ProcessDemand(instance, sequence, float(sequence), one, slot="s"))
    return found


@given(PAGES, st.data())
def test_each_page_is_known_from_what_is_told_of_it(
    said: list[tuple[str, dict[str, int]]], data: st.DataObject
) -> None:
    told: ProcessDemand | None = None
    known: ProcessDemand | None = None
    for page in pages_of(said):
        if told is not None and data.draw(st.booleans(), label="is not told"):
            continue
        line = page if told is None else demand_delta(page, told)
        known = apply_demand_delta(msgspec.json.decode(msgspec.json.encode(line), type=ProcessDemand), known)
        told = page
        assert known == page


def test_what_does_not_go_on_from_what_is_known_is_not_taken() -> None:
    first, second, third = pages_of([("x", {"a": 1, "b": 1}), ("x", {"a": 2, "b": 1}), ("x", {"a": 2, "b": 2})])
    assert list(demand_delta(third, second).servers) == ["b"]
    assert apply_demand_delta(demand_delta(third, second), first) is None
    assert apply_demand_delta(demand_delta(third, second), None) is None
    assert apply_demand_delta(ProcessDemand("x", 2, 2.0, {"c": ServerDemand()}, since=1), first) is None
    # another process has numbers of its own
    assert apply_demand_delta(ProcessDemand("y", 2, 2.0, since=1), first) is None
