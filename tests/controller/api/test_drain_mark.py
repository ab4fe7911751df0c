# SPDX-License-Identifier: Apache-2.0
"""When pods that go together may go: once gateways know, and nothing runs on any of them, or it has taken too long."""

from __future__ import annotations

import pytest

from controller.api.drain_mark import HEARD_S, drain_recheck_at

NOW_S = 1_000.0


@pytest.mark.parametrize(
    ("marked_s", "is_idle", "again_s"),
    [
        # nobody serves: there is nothing to wait for
        ([], False, None),
        # the mark is written now, whatever was marked before
        ([None], True, NOW_S + HEARD_S),
        ([NOW_S - 50, None], True, NOW_S + HEARD_S),
        # a gateway that has not seen the mark may still send
        ([NOW_S - 2], True, NOW_S + 2),
        ([NOW_S - 50, NOW_S - 2], True, NOW_S + 2),
        ([NOW_S - 3], True, None),
        ([NOW_S - 50, NOW_S - 3], True, None),
        ([NOW_S - 50], False, NOW_S + 2),
        # not later than the deadline of the last one
        ([NOW_S - 59], False, NOW_S + 1),
        ([NOW_S - 60], False, None),
        ([NOW_S - 70, NOW_S - 59], False, NOW_S + 1),
    ],
)
def test_pods_go_once_the_last_of_them_may(marked_s: list[float | None], is_idle: bool, again_s: float | None) -> None:
    assert drain_recheck_at(marked_s, is_idle=is_idle, now_s=NOW_S, drain_s=60.0, each_s=2.0) == again_s


def test_nothing_is_marked_or_awaited_without_a_time_to_drain() -> None:
    assert drain_recheck_at([None], is_idle=False, now_s=NOW_S, drain_s=0.0, each_s=2.0) is None
