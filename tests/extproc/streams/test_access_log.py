# SPDX-License-Identifier: Apache-2.0
"""Access log entries: what engines report is not believed blindly, and one bad entry loses no other."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.core.effects import Decision
from extproc.core.request_record import Outcome, RequestHead
from extproc.metrics.request_metrics import Metrics
from extproc.streams.access_log import read_outcome, receive_entries
from extproc.streams.messages import HttpAccessLogEntry, StreamAccessLogsMessage
from extproc.task_supervisor import FailureLog
from tests.extproc.conftest import decide, shell
from tests.extproc.core.test_limit_accounting_budgets import Process

if TYPE_CHECKING:
    from extproc.core.core import Core

HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
BODY = b'{"model": "chat", "messages": [{"role": "user", "content": "hello"}]}'


def write(entry: HttpAccessLogEntry, ticket: str, **usage: float | str) -> HttpAccessLogEntry:
    entry.response.response_code.value = 200
    metadata = entry.common_properties.metadata.filter_metadata
    metadata["attache"].fields["ticket"].string_value = ticket
    for name, value in usage.items():
        if isinstance(value, str):
            metadata["attache.usage"].fields[name].string_value = value
        else:
            metadata["attache.usage"].fields[name].number_value = value
    return entry


@pytest.mark.parametrize("value", [-1.0, 1e300, math.inf, -math.inf, math.nan, "12", 1_000_000_001.0])
def test_usage_that_is_no_count_is_ignored(value: float | str) -> None:
    entry = write(HttpAccessLogEntry(), "t", prompt_tokens=value, completion_tokens=7.0, cached_tokens=value)
    found = read_outcome(entry)
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (None, 7, None)


def test_parts_of_the_input_and_the_output_are_read() -> None:
    counts = {"prompt_tokens": 9.0, "created_tokens": 4.0, "completion_tokens": 7.0, "reasoning_tokens": 5.0}
    found = read_outcome(write(HttpAccessLogEntry(), "t", **counts))
    assert (found.prompt_tokens, found.created_tokens) == (9, 4)
    assert (found.completion_tokens, found.reasoning_tokens) == (7, 5)


@pytest.mark.parametrize(("text", "seconds"), [("1500", 0.0015), ("²", None), ("9" * 5000, None), ("-", None)])
def test_a_time_that_is_no_number_is_unknown(text: str, seconds: float | None) -> None:
    entry = write(HttpAccessLogEntry(), "t")
    entry.common_properties.custom_tags["ttft_us"] = text
    assert read_outcome(entry).ttfb_s == pytest.approx(seconds)


def test_one_bad_entry_loses_no_other_and_is_logged_once(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tickets = [decide(core, HEAD, BODY).ticket for _ in range(4)]
    message = StreamAccessLogsMessage()
    for ticket in tickets:
        write(message.http_logs.log_entry.add(), ticket, prompt_tokens=3.0)
    settle, settled = core.on_outcome, list[str]()

    def sometimes(outcome: object, now: float) -> object:
        ticket: str = outcome.ticket  # type: ignore[attr-defined]  # an Outcome
        if ticket in tickets[:2]:
            raise ZeroDivisionError(ticket)
        settled.append(ticket)
        return settle(outcome, now)  # type: ignore[arg-type]  # an Outcome

    monkeypatch.setattr(core, "on_outcome", sometimes)
    context = shell(core, Metrics(core.pools.values, lambda: 1000.0, lambda: 0.0))
    with caplog.at_level(logging.ERROR):
        receive_entries(message, context, 1.0, FailureLog(logging.getLogger("test")))
    assert settled == tickets[2:]
    assert len(caplog.records) == 1


def test_an_entry_of_a_process_that_is_gone_is_charged_to_budgets() -> None:
    before, after = (Process("{name: b, window: Month, max: {tokens: 1000}}", name=name) for name in "xy")
    before.core.logs_usage = before.core._dispatcher.logs_usage = True
    decision = before.ask(0.0)
    assert isinstance(decision, Decision)
    message = StreamAccessLogsMessage()
    entry = write(message.http_logs.log_entry.add(), decision.ticket, prompt_tokens=10.0, completion_tokens=30.0)
    entry.common_properties.start_time.seconds = int(after.began_s)
    metadata = entry.common_properties.metadata.filter_metadata
    metadata["attache"].fields["usage"].string_value = msgspec.json.encode(decision.usage).decode()
    context = shell(after.core, Metrics(after.core.pools.values, lambda: 1000.0, lambda: 0.0))
    receive_entries(message, context, 1.0, FailureLog(logging.getLogger("test")))
    assert after.left(1.0) == 960.0


def raised(kind: type[Exception]) -> Exception:
    try:
        raise kind("told by a client")
    except Exception as error:  # noqa: BLE001 - it is what the test is about
        return error


def test_each_kind_of_failure_is_logged_once_then_by_powers_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"))
    with caplog.at_level(logging.ERROR):
        for _ in range(150):
            failures.record("no decision", raised(ValueError))
        failures.record("no decision", raised(KeyError))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False, True]
    assert "10 times so far by ValueError" in caplog.messages[1]
    assert "100 times so far" in caplog.messages[2]


def test_kinds_of_failures_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(logging.getLogger("test"))
    with caplog.at_level(logging.ERROR):
        for number in range(400):
            failures.record("no decision", raised(type(f"Odd{number}", (Exception,), {})))
    assert len(failures._counts) == 257


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


@pytest.mark.parametrize(
    ("who", "seconds"),
    [("via_upstream", 7.0), ("upstream_reset_before_response_started{connection_termination}", None), ("", None)],
)
def test_a_pause_is_what_the_engine_asks_for_and_not_what_envoy_answers(who: str, seconds: float | None) -> None:
    made = entry(status=503)
    made.response.response_headers["retry-after"] = "7"
    made.response.response_code_details = who
    assert read_outcome(made).retry_after_s == seconds


@pytest.mark.parametrize("flag", ["upstream_request_timeout", "stream_idle_timeout", "duration_timeout"])
def test_an_entry_says_that_the_gateways_time_was_over(flag: str) -> None:
    assert read_outcome(entry(flag, status=504)).has_timed_out
    assert not read_outcome(entry(status=504)).has_timed_out, "the engine's own"


@pytest.mark.parametrize(
    ("value", "is_encoded"), [("gzip", True), ("GZIP, br", True), ("Identity", False), ("", False)]
)
def test_an_entry_says_that_the_answer_was_encoded(value: str, *, is_encoded: bool) -> None:
    made = entry()
    assert not read_outcome(made).is_encoded
    made.response.response_headers["content-encoding"] = value
    assert read_outcome(made).is_encoded is is_encoded


def test_a_whole_answer_was_ended_by_nobody() -> None:
    outcome = read_outcome(entry())
    assert (outcome.status, outcome.has_left, outcome.was_cut) == (200, False, False)


def translated(*flags: str, status: int = 200, **seen: str | float | bool) -> Outcome:
    """``seen``: of the engines, by Envoy's second listener; nothing of it where nothing came back."""
    made = entry(*flags, status=status)
    made.common_properties.upstream_cluster = "attache-translator"
    metadata = made.common_properties.metadata.filter_metadata
    metadata["envoy.lb"].fields["x-gateway-destination-endpoint"].string_value = "10.0.0.1:8000,10.0.0.2:8000"
    metadata["attache.usage"].fields["prompt_tokens"].number_value = 0.0
    made.response.response_code_details = "via_upstream"
    made.response.response_headers["retry-after"] = "7"
    for name, value in seen.items():
        if isinstance(value, float) and name == "completion_tokens":
            metadata["attache.usage"].fields[name].number_value = value
        elif isinstance(value, str):
            metadata["attache.translated"].fields[name].string_value = value
        elif isinstance(value, bool):
            metadata["attache.translated"].fields[name].bool_value = value
        else:
            metadata["attache.translated"].fields[name].number_value = value
    return read_outcome(made)


def test_of_a_translated_request_the_second_listener_has_seen_the_engine() -> None:
    found = translated(host="10.0.0.2:8000", attempts=2.0, details="via_upstream")
    assert (found.served, found.attempts, found.retry_after_s) == ("10.0.0.2:8000", 2, 7.0)
    assert not found.is_of_gateway
    assert found.prompt_tokens is None, "a stream of messages begins with a number"
    own = translated(status=503, attempts=1.0, details="no_healthy_upstream")
    assert (own.served, own.attempts, own.retry_after_s, own.is_of_gateway) == ("", 1, None, False)
    late = translated(status=504, attempts=1.0, host="10.0.0.1:8000", details="response_timeout")
    assert late.has_timed_out


def test_a_translated_stream_that_a_time_limit_ended_was_cut_by_nobody() -> None:
    seen: dict[str, str | float] = {"host": "10.0.0.2:8000", "attempts": 1.0, "details": "response_timeout"}
    found = translated("upstream_connection_termination", **seen, cut=True)
    assert (found.has_timed_out, found.was_cut, found.is_of_gateway) == (True, False, False)
    assert (found.served, found.is_cut) == ("10.0.0.2:8000", True)


@pytest.mark.parametrize(("flag", "is_own"), [("duration_timeout", True), ("upstream_request_timeout", False)])
def test_an_entry_says_whose_time_limit_was_over(flag: str, *, is_own: bool) -> None:
    assert read_outcome(entry(flag, status=504)).is_own_limit is is_own


@pytest.mark.parametrize(
    "flag", ["upstream_connection_termination", "upstream_remote_reset", "upstream_protocol_error"]
)
def test_a_stream_is_cut_by_the_engine_only_if_the_translator_says_so(flag: str) -> None:
    seen: dict[str, str | float] = {"host": "10.0.0.2:8000", "attempts": 1.0, "details": "via_upstream"}
    found = translated(flag, **seen, cut=True)
    assert (found.was_cut, found.is_of_gateway, found.served) == (True, False, "10.0.0.2:8000")
    lost = translated(flag, **seen)
    assert (lost.was_cut, lost.is_of_gateway, lost.served) == (True, True, "10.0.0.2:8000")
    assert not translated(**seen).is_of_gateway


@pytest.mark.parametrize(("reported", "known"), [(0.0, None), (4.0, 4)])
def test_an_engine_that_reports_no_usage_has_not_written_nothing(reported: float, known: int | None) -> None:
    """The translated answer has zeros in that case."""
    assert translated(details="via_upstream", completion_tokens=reported).completion_tokens == known


@pytest.mark.parametrize("attempts", [math.nan, -1.0, 1e300])
def test_a_number_of_attempts_that_is_none_is_none(attempts: float) -> None:
    assert translated(attempts=attempts, details="via_upstream").attempts == 0


def test_where_nothing_came_back_the_gateway_has_failed_unless_the_client_left() -> None:
    assert translated("upstream_connection_termination", status=503).is_of_gateway
    assert translated(status=400).is_of_gateway
    left = translated("downstream_connection_termination", status=0)
    assert (left.is_of_gateway, left.served, left.attempts) == (False, "10.0.0.1:8000", 1)
