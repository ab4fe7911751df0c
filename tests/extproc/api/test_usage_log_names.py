# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.api.usage_log import OTHERS, UNROUTED, escape_name, unescape_name


@given(name=st.text(alphabet="()ab", max_size=6) | st.sampled_from([OTHERS, UNROUTED]))
def test_no_name_of_a_caller_is_stored_as_one_that_stands_for_many(name: str) -> None:
    assert escape_name(name) not in {OTHERS, UNROUTED}
    assert unescape_name(escape_name(name)) == name


def test_names_that_stand_for_many_stay_what_they_are() -> None:
    assert (unescape_name(OTHERS), unescape_name(UNROUTED)) == (OTHERS, UNROUTED)
