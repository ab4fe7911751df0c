# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an answer, if anything"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.fuzz.mutants import Case
    from bench.fuzz.senders import Answer


def fault_of(case: Case, answer: Answer) -> str:
    """In words; empty if the answer is one that a client of OpenAI's API can read, and the request's own doing."""
    if not answer.status:
        return "no answer"
    if answer.status >= 500:
        return f"{answer.status}: the gateway or an engine has failed"
    if not answer.is_whole:
        return f"{answer.status}: the answer is cut"
    if case.method == "HEAD":
        return ""
    if answer.status >= 400:
        return _fault_of_refusal(answer)
    return "" if answer.status == 200 else f"{answer.status}: neither an answer nor a refusal"


def _fault_of_refusal(answer: Answer) -> str:
    if not answer.content_type.startswith("application/json"):
        return f"{answer.status}: the content type of the refusal is {answer.content_type!r}"
    try:
        error = json.loads(answer.body)["error"]
        is_readable = bool(error["message"]) and isinstance(error["message"], str) and isinstance(error["type"], str)
    except (ValueError, KeyError, TypeError):
        is_readable = False
    return "" if is_readable else f"{answer.status}: the refusal is no error object"
