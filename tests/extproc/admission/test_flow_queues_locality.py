# SPDX-License-Identifier: Apache-2.0
"""Who waits with the longest match in a cache, and that nothing is kept of those that have gone."""

from __future__ import annotations

import numpy as np

from extproc.admission.flow_queues import CachedPromptHeaps, FlowKey, QueuedRequest

BOTH = np.array([True, True])


class WaitingRequests:
    """Two engines; those that wait are named by their tickets."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()
        self.locality = CachedPromptHeaps(self.waiting.__contains__)

    def add(self, ticket: str, *holders: tuple[int, float]) -> None:
        self.waiting.add(ticket)
        self.locality.add(QueuedRequest(ticket, FlowKey("acme"), 0.0, expires_at_s=60.0, holders=holders))

    def nearest(self, rows: np.ndarray[tuple[int], np.dtype[np.bool_]] = BOTH) -> str | None:
        found = self.locality.longest_match(rows, lambda _: True)
        return None if found is None else found.ticket


def test_the_longest_match_at_an_engine_with_room_is_nearest() -> None:
    scene = WaitingRequests()
    scene.add("short", (0, 10.0))
    scene.add("long", (1, 500.0))
    assert scene.nearest() == "long"
    assert scene.nearest(np.array([True, False])) == "short"
    scene.waiting.discard("long")
    assert scene.nearest() == "short"


def test_one_that_may_not_go_is_passed_over() -> None:
    scene = WaitingRequests()
    scene.add("short", (0, 10.0))
    scene.add("long", (0, 500.0))
    found = scene.locality.longest_match(BOTH, lambda queued: queued.ticket != "long")
    assert found is not None
    assert found.ticket == "short"


def test_those_that_have_gone_are_swept_out_when_they_are_the_most() -> None:
    scene = WaitingRequests()
    for number in range(200):
        scene.add(f"t{number}", (number % 2, float(number)))
    scene.waiting.intersection_update({"t3", "t10"})
    assert scene.locality.entry_count == 200
    scene.locality.drop_stale_entries(waiting=2)
    assert scene.locality.entry_count == 2
    assert scene.nearest() == "t10"
    scene.locality.drop_stale_entries(waiting=2)
    assert scene.locality.entry_count == 2
