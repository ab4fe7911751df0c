# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an answer."""

from __future__ import annotations

import pytest

from bench.soak.clients import Audience, RequestOutcome, SoakRequest, classify_outcome, response_error

ASKED = SoakRequest("honest", "m1.0", 1, echoes=frozenset({"a.0"}), hosts=frozenset({"127.1.0.1"}))
WHOLE = b'data: {"model":"a.0","choices":[]}\n\ndata: [DONE]\n\n'


def test_a_whole_answer_of_the_right_engine_has_no_flaw() -> None:
    assert response_error(ASKED, 200, "127.1.0.1", WHOLE) == ""


@pytest.mark.parametrize(
    ("status", "served", "raw", "said"),
    [
        (503, "", b'{"error":{}}\n', '503 {"error":{}}'),
        (200, "127.1.0.1", WHOLE[:40], "ended early"),
        (200, "127.1.0.1", WHOLE.replace(b"a.0", b"b.0"), "asked for b.0, not for a.0"),
        (200, "127.1.0.1", b"data: [DONE]\n\n", "no model"),
        (200, "127.1.0.2", WHOLE, "127.1.0.2 answered"),
    ],
)
def test_a_flaw_is_told(status: int, served: str, raw: bytes, said: str) -> None:
    assert said in response_error(ASKED, status, served, raw)


@pytest.mark.parametrize(
    ("audience", "status", "is_gone", "result"),
    [
        ("honest", 200, False, "ok"),
        ("honest", 404, False, "lost"),
        ("honest", 404, True, "ok"),
        ("honest", 503, True, "lost"),
        ("known", 404, True, "ok"),
        ("known", 503, True, "lost"),
        ("hostile", 404, True, "lost"),
    ],
)
def test_a_request_whose_name_goes_on_its_way_may_be_unknown(
    audience: Audience, status: int, *, is_gone: bool, result: str
) -> None:
    outcome = RequestOutcome(1.0, 0.1, status, "" if status == 200 else "refused")

    assert classify_outcome(SoakRequest(audience, "m7.0", 1), outcome, is_gone=is_gone) == result
