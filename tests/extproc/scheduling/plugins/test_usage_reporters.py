# SPDX-License-Identifier: Apache-2.0
"""Numbers that follow from an answer's token usage."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.scheduling.plugins.usage_reporters import RequestAttributeReporter, compile_usage_expression

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 64},
}


def value(expression: str, condition: str = "") -> int:
    attribute = {"key": {"name": "cost"}, "expression": expression, "condition": condition}
    return msgspec.convert({"attributes": [attribute]}, RequestAttributeReporter).reporter().value(USAGE)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("usage.prompt_tokens + usage.completion_tokens\n", 107),
        ("usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens", 36),
        ("usage.prompt_tokens * 2 + usage.completion_tokens * 8.5", 259),
        ('usage["prompt_tokens"] / 3', 33),
        ("1 + 2 * 3 - 4 / 2 % 3", 5),
        ("-(1 + 2) + 10", 7),
        ("int(usage.prompt_tokens / 3.0) * 3", 99),
        ("double(usage.completion_tokens) * 1.5", 10),
        ("has(usage.prompt_tokens_details) ? usage.prompt_tokens_details.cached_tokens : usage.prompt_tokens", 64),
        ("has(usage.reasoning) ? usage.reasoning : usage.completion_tokens", 7),
        ("usage.prompt_tokens > 50 && !(usage.completion_tokens >= 8) || false ? 1 : 2", 1),
        ("usage.prompt_tokens == 100 ? (usage.completion_tokens != 7 ? 1 : 2) : 3", 2),
        # no value: nothing is told
        ("usage.reasoning_tokens", 0),
        ("usage.prompt_tokens.more", 0),
        ("usage", 0),
        ("usage.prompt_tokens / 0", 0),
        ("usage.prompt_tokens > 1", 0),
        ("'text'", 0),
        ("null", 0),
        ("1e300 * 1e300", 0),
        ("0.5", 0),
    ],
)
def test_expressions_are_reckoned_as_in_cel(expression: str, expected: int) -> None:
    assert value(expression) == expected


@pytest.mark.parametrize(
    ("condition", "is_told"),
    [
        ("has(usage.completion_tokens)", True),
        ("has(usage.other)", False),
        ("usage.total_tokens > 1000", False),
        ("usage.total_tokens", False),
        ("usage.other > 1", False),
        ("  ", True),
    ],
)
def test_a_condition_says_whether_there_is_a_value(condition: str, *, is_told: bool) -> None:
    assert bool(value("usage.total_tokens", condition)) is is_told


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"attributes": []}, "length >= 1"),
        ({"attributes": [{"key": {"name": ""}, "expression": "1"}]}, "length >= 1"),
        ({"attributes": [{"key": {"name": "a"}, "expression": ""}]}, "length >= 1"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "request.size"}]}, r"cannot be read at 'request' \(char"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "1 +"}]}, "ends too early"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "(1"}]}, r"lacks '\)'"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "1 2"}]}, "at '2' .character 3"),
        (
            {"attributes": [{"key": {"name": "a"}, "expression": "1", "condition": "$"}]},
            r"condition cannot be read at ch",
        ),
        ({"attributes": [{"key": {"name": "a"}, "expression": "usage.size()"}]}, r"cannot be read at '\('"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "(" * 5000}]}, "longer than 4096"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "!" * 200 + "true"}]}, "nested too deeply"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "(" * 200 + "1" + ")" * 200}]}, "nested too deeply"),
        ({"attributes": [{"key": {"name": "a"}, "expression": "1"}] * 2}, "length <= 1"),
    ],
)
def test_what_cannot_be_read_is_told(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(parameters, RequestAttributeReporter)


@given(st.text("usage.prompt_tokens()+-*/%<>=!&|?: 0123456789.\"'[]", max_size=60))
def test_any_text_is_an_expression_or_a_mistake_in_words(text: str) -> None:
    # of errors, only those that are told or mean that there is no value
    with suppress(ValueError, ArithmeticError, KeyError, TypeError):
        compile_usage_expression(text)(USAGE)


@pytest.mark.parametrize(
    "expression", ["int(1e999 - 1e999)", "int(0 * 1e999)", "int(1e999)", "1e999 - 1e999", "-1e999"]
)
def test_numbers_without_a_value_are_not_told(expression: str) -> None:
    assert value(expression) == 0


@pytest.mark.parametrize("chained", ["1" + "+1" * 2000, "usage" + ".a" * 2000, "true" + "&&true" * 600])
def test_expressions_that_no_stack_could_hold_are_refused(chained: str) -> None:
    # read without recursion, they would fail at every answer
    with pytest.raises(ValueError, match="write less"):
        compile_usage_expression(chained)


@pytest.mark.parametrize("longest", ["1" + "+1" * 255, "usage" + ".a" * 255, "true" + "&&true" * 255])
def test_the_longest_expressions_have_a_value(longest: str) -> None:
    with suppress(KeyError):
        assert compile_usage_expression(longest)(USAGE) in {256.0, True}
