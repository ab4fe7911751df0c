# SPDX-License-Identifier: Apache-2.0
"""Statuses are written only when they say something new, and conditions keep the time of their last transition."""

from __future__ import annotations

from typing import Any

from controller.gateway.compile.conditions import Wanted, WantedStatus, fails, holds, merged, transitions

EARLY, LATE = "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"


def wanted(*conditions: Wanted, generation: int = 1, **fields: int) -> WantedStatus:
    return WantedStatus(kind="ModelServer", key="a/b", generation=generation, conditions=conditions, fields=fields)


def written(status: WantedStatus, observed: dict[str, Any], now: str) -> dict[str, Any]:
    found = merged(status, observed, now)
    assert found is not None
    return found


def test_a_settled_status_is_not_written() -> None:
    status = written(wanted(holds("Accepted"), ready=1), {}, EARLY)
    assert status["ready"] == 1
    assert merged(wanted(holds("Accepted"), ready=1), status, LATE) is None


def test_the_time_of_a_condition_changes_with_its_status_alone() -> None:
    first = written(wanted(fails("Accepted", "Invalid", "x")), {}, EARLY)
    second = written(wanted(fails("Accepted", "Conflict", "y"), generation=2), first, LATE)
    assert second["conditions"][0]["lastTransitionTime"] == EARLY
    assert second["conditions"][0]["observedGeneration"] == 2
    third = written(wanted(holds("Accepted"), generation=2), second, LATE)
    assert third["conditions"][0]["lastTransitionTime"] == LATE


def test_transitions_are_what_changed_in_status_or_reason() -> None:
    first = written(wanted(holds("Accepted"), fails("Available", "NoPods", "x")), {}, EARLY)
    assert [one["type"] for one in transitions(first, {})] == ["Accepted", "Available"]
    second = written(wanted(holds("Accepted"), fails("Available", "NoReadyPods", "x")), first, LATE)
    assert [one["type"] for one in transitions(second, first)] == ["Available"]
    reworded = written(wanted(holds("Accepted"), fails("Available", "NoReadyPods", "y")), second, LATE)
    assert transitions(reworded, second) == []


def test_messages_are_bounded() -> None:
    assert len(fails("Accepted", "Invalid", "x" * 100_000).message) == 4096
