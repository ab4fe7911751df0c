# SPDX-License-Identifier: Apache-2.0
"""Whose failure an answer is, by the fuzzer over engines and Redis."""

from __future__ import annotations

import random

from extproc.refusals import InternalError, to_openai_body
from tests.fuzz.feeds import own_failure
from tests.fuzz.readers import broken_json


def test_a_failure_of_the_gateway_is_told_with_its_message() -> None:
    fault = own_failure(500, to_openai_body(InternalError()).decode())
    assert "The gateway failed to decide this request" in fault


def test_a_500_of_an_engine_is_no_failure_of_the_gateway_whatever_its_page_holds() -> None:
    rng = random.Random(0)
    pages = [broken_json(rng).decode(errors="replace") for _ in range(1_000)]
    assert any("internal" in page for page in pages)
    assert [page for page in pages if own_failure(500, page)] == []
