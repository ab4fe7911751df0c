# SPDX-License-Identifier: Apache-2.0
"""Who may take a Lease, by our own clock alone."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from controller.kube.leader_election import (
    LeaseTiming,
    ObservedLease,
    acquired_lease,
    can_acquire_lease,
    new_lease,
    observe_lease,
    released_lease,
)

TIMING = LeaseTiming()
WALL = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def versioned(version: str, holder: str = "other") -> dict[str, object]:
    lease = new_lease("l", "default", holder, TIMING, WALL)
    lease["metadata"]["resourceVersion"] = version
    return lease


def test_a_lease_runs_out_when_it_was_seen_unchanged_for_its_duration() -> None:
    sight = observe_lease(None, versioned("1"), 100.0)
    for now, may in ((100.0, False), (114.9, False), (115.0, True)):
        sight = observe_lease(sight, versioned("1"), now)
        assert can_acquire_lease(sight, "me", now) is may


def test_a_renewal_starts_the_time_anew() -> None:
    sight = observe_lease(observe_lease(None, versioned("1"), 100.0), versioned("2"), 110.0)
    assert sight.seen_at_s == 110.0
    assert not can_acquire_lease(sight, "me", 120.0)


def test_ones_own_lease_and_one_of_nobody_may_be_taken_at_once() -> None:
    assert can_acquire_lease(ObservedLease(versioned("1", "me"), 100.0), "me", 100.0)
    assert can_acquire_lease(ObservedLease(released_lease(versioned("1"), WALL), 100.0), "me", 100.0)
    assert can_acquire_lease(ObservedLease({"metadata": {}}, 100.0), "me", 100.0), "a Lease without a spec"


def test_a_transition_is_counted_when_the_holder_changes() -> None:
    first = new_lease("l", "default", "a", TIMING, WALL)
    assert first["spec"] == {
        "leaseTransitions": 0,
        "acquireTime": "2030-01-02T03:04:05.000678Z",
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "renewTime": "2030-01-02T03:04:05.000678Z",
    }
    later = WALL.replace(hour=4)
    renewed = acquired_lease(first, "a", TIMING, later)
    assert (renewed["spec"]["leaseTransitions"], renewed["spec"]["acquireTime"]) == (0, first["spec"]["acquireTime"])
    robbed = acquired_lease(renewed, "b", TIMING, later)
    assert (robbed["spec"]["leaseTransitions"], robbed["spec"]["acquireTime"][11:13]) == (1, "04")
    assert first["spec"]["holderIdentity"] == "a", "what was read is not changed"


@pytest.mark.parametrize("wrong", [(10, 10, 2), (15, 2, 2), (15, 10, 0)])
def test_times_that_would_let_two_lead_are_refused(wrong: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="duration_s > renew_deadline_s"):
        LeaseTiming(*wrong)
