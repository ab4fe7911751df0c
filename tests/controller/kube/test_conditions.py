# SPDX-License-Identifier: Apache-2.0
"""Statuses are written only when they say something new, and conditions keep the time of their last transition."""

from __future__ import annotations

from typing import Any

from controller.kube.conditions import (
    WantedCondition,
    WantedListItem,
    WantedStatus,
    WantedStatusList,
    condition_false,
    condition_transitions,
    condition_true,
    merge_status,
)

EARLY, LATE = "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"


def wanted(*conditions: WantedCondition, generation: int = 1, **fields: int) -> WantedStatus:
    return WantedStatus(kind="ModelServer", key="a/b", generation=generation, conditions=conditions, fields=fields)


def written(status: WantedStatus, observed: dict[str, Any], now: str) -> dict[str, Any]:
    found = merge_status(status, observed, now)
    assert found is not None
    return found


def test_a_settled_status_is_not_written() -> None:
    status = written(wanted(condition_true("Accepted"), ready=1), {}, EARLY)
    assert status["ready"] == 1
    assert merge_status(wanted(condition_true("Accepted"), ready=1), status, LATE) is None


def test_the_time_of_a_condition_changes_with_its_status_alone() -> None:
    first = written(wanted(condition_false("Accepted", "Invalid", "x")), {}, EARLY)
    second = written(wanted(condition_false("Accepted", "Conflict", "y"), generation=2), first, LATE)
    assert second["conditions"][0]["lastTransitionTime"] == EARLY
    assert second["conditions"][0]["observedGeneration"] == 2
    third = written(wanted(condition_true("Accepted"), generation=2), second, LATE)
    assert third["conditions"][0]["lastTransitionTime"] == LATE


def test_transitions_are_what_changed_in_status_or_reason() -> None:
    first = written(wanted(condition_true("Accepted"), condition_false("Available", "NoPods", "x")), {}, EARLY)
    assert [one["type"] for one in condition_transitions(first, {})] == ["Accepted", "Available"]
    second = written(wanted(condition_true("Accepted"), condition_false("Available", "NoReadyPods", "x")), first, LATE)
    assert [one["type"] for one in condition_transitions(second, first)] == ["Available"]
    reworded = written(
        wanted(condition_true("Accepted"), condition_false("Available", "NoReadyPods", "y")), second, LATE
    )
    assert condition_transitions(reworded, second) == []


def test_messages_are_bounded() -> None:
    assert len(condition_false("Accepted", "Invalid", "x" * 100_000).message) == 4096


OURS, THEIRS = "attache.dev/gateway", "example.com/other"


def parent(gateway: str, *conditions: WantedCondition) -> WantedListItem:
    reference = {"kind": "Gateway", "name": gateway}
    return WantedListItem(identity={"parentRef": reference, "controllerName": OURS}, conditions=conditions)


def route(*entries: WantedListItem, gateway: str = "") -> WantedStatus:
    parents = WantedStatusList(name="parents", entries=entries, controller=OURS, gateway=gateway)
    return WantedStatus(kind="HTTPRoute", key="a/b", generation=1, conditions=(), lists=(parents,), is_plain=True)


def parents(status: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["parentRef"]["name"], one["controllerName"]) for one in status["parents"]]


def test_items_of_other_controllers_stay_and_stale_ones_of_ours_go() -> None:
    theirs = {"parentRef": {"name": "x"}, "controllerName": THEIRS, "conditions": []}
    stale = {"parentRef": {"name": "y"}, "controllerName": OURS, "conditions": []}
    status = written(route(parent("web", condition_true("Accepted"))), {"parents": [stale, theirs]}, EARLY)
    assert parents(status) == [("x", THEIRS), ("web", OURS)]
    assert "observedGeneration" not in status
    assert merge_status(route(parent("web", condition_true("Accepted"))), status, LATE) is None
    assert merge_status(route(), {"parents": [theirs]}, LATE) is None
    assert merge_status(route(), {}, LATE) is None


def test_a_role_of_one_gateway_leaves_what_other_roles_of_ours_say() -> None:
    other = {"parentRef": {"name": "other"}, "controllerName": OURS, "conditions": []}
    elsewhere = {"parentRef": {"name": "web", "namespace": "c"}, "controllerName": OURS, "conditions": []}
    status = written(
        route(parent("web", condition_true("Accepted")), gateway="a/web"), {"parents": [other, elsewhere]}, EARLY
    )
    assert parents(status) == [("other", OURS), ("web", OURS), ("web", OURS)]
    gone = written(route(gateway="a/web"), status, LATE)
    assert parents(gone) == [("other", OURS), ("web", OURS)]
    assert gone["parents"][1] == elsewhere


def test_conditions_of_items_keep_their_times_and_are_told_as_events() -> None:
    first = written(
        route(parent("web", condition_true("Accepted"), condition_false("ResolvedRefs", "BackendNotFound", "x"))),
        {},
        EARLY,
    )
    assert [one["type"] for one in condition_transitions(first, {})] == ["Accepted", "ResolvedRefs"]
    second = written(route(parent("web", condition_true("Accepted"), condition_true("ResolvedRefs"))), first, LATE)
    (found,) = second["parents"]
    assert [one["lastTransitionTime"] for one in found["conditions"]] == [EARLY, LATE]
    assert [one["type"] for one in condition_transitions(second, first)] == ["ResolvedRefs"]


def test_events_of_listeners_say_which_one() -> None:
    entries = tuple(
        WantedListItem(
            identity={"name": name},
            conditions=(condition_true("Accepted"), condition_false("ResolvedRefs", "X", "no Secret")),
        )
        for name in ("http", "https")
    )
    gateway = WantedStatus(
        kind="Gateway",
        key="a/web",
        generation=1,
        conditions=(condition_true("Accepted"),),
        lists=(WantedStatusList(name="listeners", entries=entries),),
    )
    assert [one["message"] for one in condition_transitions(written(gateway, {}, EARLY), {})] == [
        "",
        "listener http: Accepted is True",
        "listener http: no Secret",
        "listener https: Accepted is True",
        "listener https: no Secret",
    ]
