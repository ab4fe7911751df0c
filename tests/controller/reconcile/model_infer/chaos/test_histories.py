# SPDX-License-Identifier: Apache-2.0
"""Random histories of a ModelInfer on a virtual cluster: every step is allowed, and every history ends well.

``ATTACHE_CHAOS_HISTORIES=2000`` runs so many of each sort, chosen anew each time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.cluster.virtual.engine_pod import CRASHES, MISSING, NEVER_READY
from controller.reconcile.model_infer.observed import PodGroups
from controller.reconcile.model_infer.reconcile import reconcile
from tests.controller.reconcile.model_infer.chaos import ending, events, specs
from tests.controller.reconcile.model_infer.chaos.history import History, Scene
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.reconcile.model_infer.observed import Observed
    from controller.reconcile.plan import Plan

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


def scenes(*, most_groups: int = 4) -> st.SearchStrategy[Scene]:
    gangs = [PodGroups(), PodGroups(), PodGroups(volcano=True), PodGroups(scheduler_plugins=True)]
    return st.builds(
        Scene,
        spec=specs.specs(most_groups=most_groups),
        seed=st.integers(0, 2**32),
        nodes=st.integers(3, 12),
        gang=st.sampled_from(gangs),
        has_room=st.sampled_from([True, True, False]),
        request_each_s=st.sampled_from([3.0, 20.0]),
        noise=st.sampled_from([0.0, 0.0, 0.02]),
    )


def lived(history: History, happenings: Sequence[events.Event]) -> None:
    """The whole of it; what failed tells what happened before."""
    try:
        history.play(happenings)
        history.make_peace()
        history.settle()
        ending.has_what_it_should(history)
        ending.stays_as_it_is(history)
        ending.a_new_manager_changes_nothing(history)
    except BaseException as error:
        error.add_note("\n".join(history.oracle.log))
        raise


def play_wild(decide: Callable[[Observed, float], Plan], scene: Scene, happenings: Sequence[events.Event]) -> None:
    lived(History(scene, decide), happenings)


@histories(in_ci=40)
@given(scenes(), st.lists(events.wild_events, max_size=14))
def test_whatever_happens_each_step_is_allowed_and_the_end_is_as_wanted(
    scene: Scene, happenings: list[events.Event]
) -> None:
    play_wild(reconcile, scene, happenings)


@histories(in_ci=30)
@given(scenes(), st.lists(events.calm_events, max_size=14))
def test_while_no_engine_fails_groups_that_serve_go_on_serving(scene: Scene, happenings: list[events.Event]) -> None:
    lived(History(scene, reconcile, calm=True), happenings)


@histories(in_ci=20)
@given(
    scenes(),
    st.sampled_from([CRASHES, NEVER_READY, MISSING]),
    events.roles,
    st.lists(events.of_the_manager, max_size=4),
)
def test_a_revision_that_cannot_serve_stops_and_the_old_one_serves(
    scene: Scene, image: str, roles: frozenset[int], troubles: list[events.Event]
) -> None:
    history = History(scene, reconcile)
    try:
        history.make_peace()
        history.settle()
        old = history.spec
        history.play([events.NewImage(image, roles), *troubles])
        history.make_peace(good=False)
        history.settle()
        ending.old_revision_serves(history, old)
        ending.stays_as_it_is(history)
        history.play([events.GoBack()])
        history.settle()
        ending.has_what_it_should(history)
    except BaseException as error:
        error.add_note("\n".join(history.oracle.log))
        raise


@histories(in_ci=10)
@given(scenes(), st.lists(events.wild_events, max_size=8), st.sampled_from(["background", "foreground"]))
def test_a_deleted_object_leaves_nothing(scene: Scene, happenings: list[events.Event], how: str) -> None:
    history = History(scene, reconcile)
    history.play(happenings)
    history.delete(foreground=how == "foreground")
    history.cluster.run_for(4000.0)
    ending.no_orphans(history)
    assert not history.cluster.server.pods()


@pytest.mark.parametrize("seed", range(2))
def test_a_history_can_be_told_again(seed: int) -> None:
    scene = Scene(spec=specs.simple(), seed=seed)
    logs = []
    for _ in range(2):
        history = History(scene, reconcile)
        history.play([events.Wait(200.0), events.NewImage("engine:good-2", frozenset()), events.Wait(600.0)])
        logs.append(list(history.oracle.log))
    assert logs[0] == logs[1]
