# SPDX-License-Identifier: Apache-2.0
"""The one rule of how many members there are, and which go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.models.model_infer.groups import RemovalCandidate, RolloutBounds, group_changes


def members(text: str) -> list[RemovalCandidate]:
    """One a word, by ordinal. ``r``: ready, ``o``: outdated, ``d``: draining, ``g``: going, ``p``: protected."""
    return [
        RemovalCandidate(
            ordinal=ordinal,
            is_ready="r" in word,
            is_outdated="o" in word,
            is_draining="d" in word,
            is_going="g" in word,
            is_protected="p" in word,
        )
        for ordinal, word in enumerate(text.split())
        if word != "."
    ]


def test_new_ones_take_the_lowest_free_ordinals() -> None:
    assert group_changes(members(". r . r"), RolloutBounds(wanted=4)).new == (0, 2)


def test_who_is_going_keeps_its_ordinal_until_it_is_gone() -> None:
    assert group_changes(members("r g"), RolloutBounds(wanted=2)).new == ()


def test_who_goes_first() -> None:
    """Going, draining, not ready, then the outdated, then the highest."""
    for count, expected in enumerate([{4}, {4, 3}, {4, 3, 1}, {4, 3, 1, 2}], start=1):
        assert (
            group_changes(members("r x ro d g r"), RolloutBounds(wanted=6 - count, is_moving=False)).leave == expected
        )


def test_a_protected_one_goes_after_its_likes() -> None:
    assert group_changes(members("r rp"), RolloutBounds(wanted=1)).leave == {0}
    assert group_changes(members("r p"), RolloutBounds(wanted=1)).leave == {1}


def test_one_is_replaced_at_a_time() -> None:
    made = group_changes(members("ro ro ro"), RolloutBounds(wanted=3, max_unavailable=1))
    assert made.replaced == made.leave == {2}


def test_while_a_new_one_is_not_ready_no_other_is_replaced() -> None:
    assert group_changes(members("ro ro x"), RolloutBounds(wanted=3, max_unavailable=1)).replaced == set()


def test_a_surplus_is_made_before_anything_goes() -> None:
    made = group_changes(members("ro ro"), RolloutBounds(wanted=2, max_unavailable=0, max_surge=1))
    assert (made.new, made.leave) == ((2,), frozenset())


def test_the_last_old_one_goes_without_being_made_again() -> None:
    size = RolloutBounds(wanted=2, max_unavailable=0, max_surge=1)
    assert group_changes(members("ro r r"), size).replaced == {0}
    gone = group_changes(members("od r r"), size)
    assert (gone.leave, gone.replaced, gone.new) == ({0}, set(), ())


def test_beside_old_ones_no_more_new_ones_are_made_than_may_be_under_way() -> None:
    """Of 4, one old one is left and another is being replaced: the two that were lost come back as they were."""
    made = group_changes(members("ro"), RolloutBounds(wanted=4, max_unavailable=1))
    assert (made.new, made.new_as_old) == ((1,), (2, 3))


def test_what_does_not_move_comes_back_as_it_was() -> None:
    made = group_changes(members("ro . r"), RolloutBounds(wanted=3, is_moving=False))
    assert (made.new, made.new_as_old, made.replaced) == ((), (1,), frozenset())


def test_below_the_partition_new_ones_are_old() -> None:
    made = group_changes([], RolloutBounds(wanted=3, keeps_old_below=2))
    assert (made.new, made.new_as_old) == ((2,), (0, 1))


def test_a_surplus_is_never_an_old_one() -> None:
    """Ordinal 1 is free, but below the partition."""
    made = group_changes(members("rp . ro"), RolloutBounds(wanted=2, max_unavailable=0, max_surge=1, keeps_old_below=2))
    assert (made.new, made.new_as_old) == ((3,), ())


def test_the_load_is_asked_for_only_where_it_decides() -> None:
    assert group_changes(members("r r r"), RolloutBounds(wanted=2)).chosen == {0, 1, 2}
    assert group_changes(members("r r x"), RolloutBounds(wanted=2)).chosen == set()
    assert group_changes(members("r r"), RolloutBounds(wanted=0)).chosen == set()


@given(
    st.lists(st.tuples(*[st.booleans()] * 5), max_size=8),
    st.integers(0, 8),
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
)
def test_bounds_hold_for_any_members(
    states: list[tuple[bool, ...]], wanted: int, unavailable: int, surge: int, is_moving: bool
) -> None:
    found = [
        RemovalCandidate(
            ordinal=ordinal,
            is_ready=ready and not draining and not going,
            is_outdated=outdated,
            is_draining=draining,
            is_going=going,
            is_protected=protected,
        )
        for ordinal, (ready, outdated, draining, going, protected) in enumerate(states)
    ]
    size = RolloutBounds(wanted=wanted, max_unavailable=unavailable, max_surge=surge, is_moving=is_moving)
    made = group_changes(found, size)
    new = {*made.new, *made.new_as_old}
    assert new.isdisjoint(one.ordinal for one in found)
    assert not new or len(found) + len(new) <= wanted + surge
    ready = [one for one in found if one.is_ready]
    staying = [one for one in ready if one.ordinal not in made.leave]
    assert len(staying) >= min(len(ready), wanted - size.effective_max_unavailable)
    assert made.replaced <= made.leave
    if not made.leave and not new:
        assert len(found) >= wanted
