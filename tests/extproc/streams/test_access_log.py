# SPDX-License-Identifier: Apache-2.0
"""Entries of Envoy's access log."""

from __future__ import annotations

import pytest

from extproc.streams.access_log import read_outcome
from extproc.streams.messages import HttpAccessLogEntry


def entry(*flags: str, status: int = 200, body_bytes: int = 0) -> HttpAccessLogEntry:
    made = HttpAccessLogEntry()
    made.response.response_code.value = status
    made.response.response_body_bytes = body_bytes
    for flag in flags:
        setattr(made.common_properties.response_flags, flag, True)
    return made


@pytest.mark.parametrize(
    ("flag", "has_left", "was_cut"),
    [
        ("downstream_connection_termination", True, False),
        ("upstream_connection_termination", False, True),
        ("upstream_remote_reset", False, True),
        ("upstream_request_timeout", False, False),
    ],
)
def test_an_entry_says_who_ended_the_answer(flag: str, *, has_left: bool, was_cut: bool) -> None:
    outcome = read_outcome(entry(flag, body_bytes=7))
    assert (outcome.has_left, outcome.was_cut, outcome.answer_bytes) == (has_left, was_cut, 7)


def test_a_whole_answer_was_ended_by_nobody() -> None:
    outcome = read_outcome(entry())
    assert (outcome.status, outcome.has_left, outcome.was_cut) == (200, False, False)
