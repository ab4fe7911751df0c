# SPDX-License-Identifier: Apache-2.0
"""Histories from their beginning to their end, with everything that must hold on the way."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from controller.models.model_infer import reconcile
from controller.models.model_infer.model_infer_state import GangSchedulingApis
from tests.controller.models.model_infer.chaos import ending, events, specs
from tests.controller.models.model_infer.chaos.history import History, Start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def starts(*, most_groups: int = 4) -> st.SearchStrategy[Start]:
    """Too little room for all in some of them."""
    gangs = [
        GangSchedulingApis(),
        GangSchedulingApis(),
        GangSchedulingApis(volcano=True),
        GangSchedulingApis(scheduler_plugins=True),
    ]
    return st.builds(
        Start,
        spec=specs.specs(most_groups=most_groups),
        seed=st.integers(0, 2**32),
        nodes=st.integers(3, 12),
        gang=st.sampled_from(gangs),
        has_capacity=st.sampled_from([True, True, False]),
        request_each_s=st.sampled_from([3.0, 20.0]),
        noise=st.sampled_from([0.0, 0.0, 0.02]),
    )


def ends_well(start: Start, happenings: Sequence[events.Event], *, calm: bool = False) -> History:
    """Whatever happens, the object is in the end what the user wants, and stays so."""
    history = History(start, reconcile.reconcile, calm=calm)
    with _telling(history):
        history.play(happenings)
        history.make_peace()
        history.settle()
        ending.has_what_it_should(history)
        ending.stays_as_it_is(history)
        ending.a_new_manager_changes_nothing(history)
    return history


def fails_safely(start: Start, image: str, roles: frozenset[int], troubles: Sequence[events.Event]) -> History:
    """A revision that cannot serve takes no more than the budget, is told, and can be taken back."""
    history = History(start, reconcile.reconcile)
    with _telling(history):
        history.make_peace()
        history.settle()
        old = history.spec
        history.play([events.NewImage(image, roles), *troubles])
        history.make_peace(good=False)
        history.cluster.run_for(5400.0)
        ending.old_revision_serves(history, old)
        ending.leaves_what_serves(history, old)
        history.play([events.GoBack()])
        history.settle()
        ending.has_what_it_should(history)
    return history


def leaves_nothing(start: Start, happenings: Sequence[events.Event], *, foreground: bool) -> History:
    """The user deletes the object in the midst of it all."""
    history = History(start, reconcile.reconcile)
    with _telling(history):
        history.play(happenings)
        history.delete(foreground=foreground)
        history.cluster.run_for(4000.0)
        ending.no_orphans(history)
        assert not history.cluster.server.pods()
    return history


@contextmanager
def _telling(history: History) -> Iterator[None]:
    """What failed tells what happened before."""
    try:
        yield
    except BaseException as error:
        error.add_note("\n".join(history.oracle.log))
        raise
