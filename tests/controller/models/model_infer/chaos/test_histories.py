# SPDX-License-Identifier: Apache-2.0
"""Random histories of a ModelInfer on a virtual cluster: every step is allowed, and every history ends well.

``ATTACHE_CHAOS_HISTORIES=2000`` runs so many of each sort, chosen anew each time.
"""

from __future__ import annotations

import os
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from controller.models.model_infer.reconcile import reconcile
from tests.controller.models.model_infer.chaos import events, specs
from tests.controller.models.model_infer.chaos.history import History, Start
from tests.controller.models.model_infer.chaos.stories import ends_well, fails_safely, leaves_nothing, starts
from tests.examples import examples
from tests.virtual_cluster.engine_pod import CRASHES, MISSING, NEVER_READY

LONG: Final = int(os.environ.get("ATTACHE_CHAOS_HISTORIES", "0"))
# without shrinking, which takes minutes here: the log of a failing history tells what happened
PHASES: Final = [Phase.explicit, Phase.reuse, Phase.generate]


def histories(in_ci: int) -> settings:
    """How many, and how they are chosen."""
    if LONG:
        return settings(
            max_examples=LONG, phases=PHASES, derandomize=False, database=None, suppress_health_check=list(HealthCheck)
        )
    return settings(max_examples=examples(in_ci), phases=PHASES, suppress_health_check=list(HealthCheck))


@histories(in_ci=60)
@given(starts(), st.lists(events.wild_events, max_size=14))
def test_whatever_happens_each_step_is_allowed_and_the_end_is_as_wanted(
    start: Start, happenings: list[events.Event]
) -> None:
    ends_well(start, happenings)


@histories(in_ci=30)
@given(starts(), st.lists(events.calm_events, max_size=14))
def test_while_no_engine_fails_groups_that_serve_go_on_serving(start: Start, happenings: list[events.Event]) -> None:
    ends_well(start, happenings, calm=True)


@pytest.mark.slow
@histories(in_ci=8)
@given(
    starts(),
    st.sampled_from([CRASHES, NEVER_READY, MISSING]),
    events.roles,
    st.lists(events.of_the_manager, max_size=4),
)
def test_a_revision_that_cannot_serve_stops_and_the_old_one_serves(
    start: Start, image: str, roles: frozenset[int], troubles: list[events.Event]
) -> None:
    fails_safely(start, image, roles, troubles)


@histories(in_ci=10)
@given(starts(), st.lists(events.wild_events, max_size=8), st.booleans())
def test_a_deleted_object_leaves_nothing(start: Start, happenings: list[events.Event], foreground: bool) -> None:
    leaves_nothing(start, happenings, foreground=foreground)


@pytest.mark.parametrize("seed", range(2))
def test_a_history_can_be_told_again(seed: int) -> None:
    start = Start(spec=specs.simple(), seed=seed)
    logs = []
    for _ in range(2):
        history = History(start, reconcile)
        history.play([events.Wait(200.0), events.NewImage("engine:good-2", frozenset()), events.Wait(600.0)])
        logs.append(list(history.oracle.log))
    assert logs[0] == logs[1]
