# SPDX-License-Identifier: Apache-2.0
"""Metrics pages of one moment joined, and the picture of two."""

from __future__ import annotations

import contextlib
import http.server
import threading
from typing import TYPE_CHECKING

import pytest

from extproc.__main__ import main
from extproc.cli.top_view import UNBOUNDED, MetricsSnapshot, render

if TYPE_CHECKING:
    from collections.abc import Iterator

LLAMA_A = {"server": "llama", "endpoint": "a"}
LLAMA_B = {"server": "llama", "endpoint": "b"}
QWEN_A = {"server": "qwen", "endpoint": "a"}


def test_labels_that_are_not_named_may_have_any_value() -> None:
    now = MetricsSnapshot()
    for labels, value in ((LLAMA_A, 1), (LLAMA_B, 2), (QWEN_A, 4)):
        now.add("attache_prompt_tokens_total", labels, value)
    assert now.sum("attache_prompt_tokens_total") == 7
    assert now.sum("attache_prompt_tokens_total", server="llama") == 3
    assert now.sum("attache_prompt_tokens_total", endpoint="a", server="llama") == 1
    assert now.label_values("attache_prompt_tokens_total", "server", endpoint="a") == [("llama",), ("qwen",)]


def test_a_series_without_a_named_label_does_not_count() -> None:
    now = MetricsSnapshot()
    now.add("attache_picks_total", {}, 5)
    assert now.get("attache_picks_total", server="") is None
    assert now.get("attache_picks_total") == 5
    assert now.label_values("attache_picks_total", "server") == [("",)]


def test_what_is_added_after_a_question_counts_in_the_next() -> None:
    now = MetricsSnapshot()
    assert now.get("attache_picks_total", server="llama") is None
    now.add("attache_picks_total", {"server": "llama"}, 5)
    assert now.get("attache_picks_total", server="llama") == 5
    now.add("attache_picks_total", {"server": "llama"}, 2)
    assert now.get("attache_picks_total", server="llama") == 7


def test_an_engine_that_lists_other_models_is_named_with_what_to_write() -> None:
    now = MetricsSnapshot()
    where = {"server": "default/qwen", "endpoint": "10.0.0.1:8000"}
    for name in ("in_flight", "engine_report_age_seconds"):
        now.add(f"attache_{name}", where, 1)
    # two processes that know the same
    for _ in range(2):
        now.add("attache_engine_model_missing", {**where, "model": "qwen3-8b"}, 1)
    problem = "its engines list 'Qwen/Qwen3-8B' and not 'qwen3-8b'; write one of the engines' names as 'model'"
    now.wrong_models["default/qwen"] = problem
    lines = render(MetricsSnapshot(), now, seconds=1.0, tenants=0, width=UNBOUNDED).splitlines()
    assert lines[1] == "engines: 1 no model"
    assert "10.0.0.1:8000 of default/qwen lists other models than 'qwen3-8b', that of its ModelServer" in lines
    assert f"default/qwen: {problem}" in lines
    assert any("NO MODEL" in line for line in lines)


def test_roles_have_a_column_where_there_are_any() -> None:
    now = MetricsSnapshot()
    for endpoint in "ab":
        now.add("attache_in_flight", {"server": "llama", "endpoint": endpoint}, 1)
    (head, *_) = (line for line in picture(now) if line.startswith("SERVER"))
    assert "ROLE" not in head
    # two processes that know the same
    for _ in range(2):
        now.add("attache_endpoint_role", {**LLAMA_A, "role": "prefill"}, 1)
    rows = [line.split()[:4] for line in picture(now) if line.startswith(("SERVER  ENGINE", "llama "))]
    assert rows == [
        ["SERVER", "ENGINE", "ROLE", "STATE"],
        ["llama", "a", "prefill", "serving"],
        ["llama", "b", "-", "serving"],
    ]


def picture(now: MetricsSnapshot) -> list[str]:
    return render(MetricsSnapshot(), now, seconds=1.0, tenants=0, width=UNBOUNDED).splitlines()


class Counted(str):
    """A label's value that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return super().__eq__(other)


def looks_for(engines: int) -> int:
    now = MetricsSnapshot()
    for index in range(engines):
        labels = {"server": "default/llama", "endpoint": Counted(f"10.0.0.{index}:8000")}
        for name in ("in_flight", "engine_running", "engine_report_age_seconds", "prompt_tokens_total"):
            now.add(f"attache_{name}", labels, 1)
    Counted.looks = 0
    render(MetricsSnapshot(), now, seconds=1.0, tenants=0, width=UNBOUNDED)
    return Counted.looks


def test_each_engine_is_looked_at_as_often_however_many_there_are() -> None:
    assert looks_for(200) <= 2.2 * looks_for(100)


def reading(**samples: float) -> MetricsSnapshot:
    made = MetricsSnapshot()
    for text, value in samples.items():
        name, *pairs = text.split("__")
        labels = dict(pair.split("_is_") for pair in pairs)
        made.add(f"attache_{name}", labels, value)
    return made


def test_counters_are_rates_and_gauges_are_as_they_are() -> None:
    before = reading(picks_total__server_is_llama=100, open_streams=3)
    now = reading(picks_total__server_is_llama=150, open_streams=7)
    assert render(before, now, seconds=2.0, tenants=9).startswith("25.0 picks/s, 7 requests open, 0.0 rate-limited/s")


def test_what_every_process_sees_whole_is_not_added_up() -> None:
    now = MetricsSnapshot()
    for _ in range(2):
        now.add("attache_in_flight", {"server": "default/llama", "endpoint": "e"}, 5)
        now.add("attache_prompt_tokens_total", {"server": "default/llama", "endpoint": "e"}, 50)
    engine = next(
        line for line in render(MetricsSnapshot(), now, seconds=1.0, tenants=9).splitlines() if "llama" in line
    )
    assert engine.split() == ["default/llama", "e", "serving", "5", "-", "-", "-", "-", "0%", "100", "0%"]


def test_response_caches_show_their_share_of_hits() -> None:
    now = MetricsSnapshot()
    for route, result, reason, count in (
        ("default/chat", "hit", "", 6),
        ("default/chat", "miss", "", 2),
        ("default/chat", "bypass", "tools", 3),
        ("default/chat", "bypass", "size", 1),
        ("default/sql", "bypass", "temperature", 5),
    ):
        labels = {"route": route, "result": result, "reason": reason}
        now.add("attache_response_cache_lookups_total", labels, count)
    lines = render(MetricsSnapshot(), now, seconds=2.0, tenants=9).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("ROUTE"))
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["default/chat", "3.0", "1.0", "2.0", "75%"],
        ["default/sql", "0.0", "0.0", "2.5", "-"],
    ]


def test_queues_show_who_waits_and_how_long() -> None:
    before = reading(queue_waiting__server_is_llama__band_is_high=0)
    now = reading(
        queue_waiting__server_is_llama__band_is_high=12,
        queue_wait_seconds_count__server_is_llama__band_is_high=4,
        queue_wait_seconds_sum__server_is_llama__band_is_high=6,
        saturation__server_is_llama=1.0,
    )
    band = next(line for line in render(before, now, seconds=2.0, tenants=9).splitlines() if "high" in line)
    assert band.split() == ["llama", "high", "12", "2.0", "1.50s", "0.0", "0.0", "100%"]


def test_tenants_are_shown_by_their_share_and_the_largest_first() -> None:
    now = MetricsSnapshot()
    for tenant, service, refused in (("acme", 100.0, 0.0), ("bell", 300.0, 4.0), ("zero", 0.0, 0.0)):
        now.add("attache_tenant_requests_total", {"tenant": tenant, "outcome": "picked"}, 10)
        now.add("attache_tenant_requests_total", {"tenant": tenant, "outcome": "rate_limited"}, refused)
        now.add("attache_tenant_service_tokens_total", {"tenant": tenant, "server": "default/llama"}, service)
    lines = render(MetricsSnapshot(), now, seconds=2.0, tenants=2).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("TENANT"))
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["bell", "5.0", "150", "75%", "0.00", "2.0"],
        ["acme", "5.0", "50", "25%", "0.00", "0.0"],
    ]
    assert "zero" not in "\n".join(lines)


def engine(now: MetricsSnapshot, endpoint: str, **values: float) -> None:
    where = {"server": "default/llama", "endpoint": endpoint}
    now.add("attache_in_flight", where, 0)
    for name, value in values.items():
        now.add(f"attache_{name}", where, value)


def one_of_each(now: MetricsSnapshot) -> None:
    """An engine that serves, one that is dead, one that hangs, and one that answers with errors."""
    now.add("attache_engine_reports_total", {"server": "default/llama", "result": "read"}, 50)
    said = {"engine_running": 7, "engine_waiting": 3, "engine_kv_usage": 0.5, "endpoint_ttft_seconds": 0.05}
    engine(now, "10.0.0.1:8000", engine_report_age_seconds=0.1, **said)
    engine(now, "10.0.0.2:8000", engine_report_age_seconds=42, endpoint_failed_ratio=0.5, **said)
    engine(now, "10.0.0.3:8000")
    engine(now, "10.0.0.4:8000", engine_report_age_seconds=0.1, **said)
    for endpoint, reason in (("10.0.0.2:8000", "no_answer"), ("10.0.0.4:8000", "error")):
        where = {"server": "default/llama", "endpoint": endpoint}
        now.add("attache_endpoint_avoided", {**where, "reason": reason}, 1)
        now.add("attache_endpoint_avoided_since_timestamp_seconds", where, 1000)


def test_an_engine_that_does_not_serve_is_told_with_why_and_since_when() -> None:
    now = MetricsSnapshot()
    one_of_each(now)
    lines = render(MetricsSnapshot(), now, seconds=1.0, tenants=9, wall_now_s=1041.0).splitlines()
    assert lines[1] == "engines: 1 serving, 2 avoided, 1 silent"
    assert lines[3].startswith("10.0.0.2:8000 of default/llama is avoided since 00:16:40 UTC (41 s ago): it cannot be")
    assert lines[3].endswith("it last said how it is 42 s ago")
    assert lines[4].startswith("10.0.0.3:8000 of default/llama is silent: it has never said how it is; see that")
    assert "it answers with errors (408 or 5xx); read its log" in lines[5]
    assert "last said" not in lines[5]
    rows = {row[1]: row[2:9] for row in map(str.split, lines) if row[:1] == ["default/llama"]}
    assert rows == {
        "10.0.0.1:8000": ["serving", "0", "7", "3", "50%", "50", "ms"],
        # numbers of another time are not shown as those of now
        "10.0.0.2:8000": ["AVOIDED", "0", "-", "-", "-", "-", "50%"],
        "10.0.0.3:8000": ["SILENT", "0", "-", "-", "-", "-", "0%"],
        "10.0.0.4:8000": ["AVOIDED", "0", "7", "3", "50%", "50", "ms"],
    }


def test_breakers_are_told_of_engines_and_of_model_servers() -> None:
    now = MetricsSnapshot()
    one_of_each(now)
    # what two processes say: one of them has it half-open already
    for endpoint, *states in (("10.0.0.2:8000", 1), ("10.0.0.4:8000", 2, 1), ("", 2, 1)):
        for state in states:
            now.add("attache_breaker_state", {"server": "default/llama", "endpoint": endpoint}, state)
    lines = render(MetricsSnapshot(), now, seconds=1.0, tenants=9, wall_now_s=1041.0).splitlines()
    assert lines[3].startswith("the breaker of default/llama is open: most of its requests have failed, so they go to")
    assert lines[3].endswith("attache reset default/llama closes it")
    assert "; its breaker is half-open: one request at a time tries it; it last said" in lines[5]
    assert lines[7].endswith("; its breaker is open")
    closed = MetricsSnapshot()
    closed.add("attache_breaker_state", {"server": "default/llama", "endpoint": ""}, 0)
    assert "breaker" not in render(MetricsSnapshot(), closed, seconds=1.0, tenants=9)


def test_an_engine_that_is_back_and_was_not_tried_yet() -> None:
    now = MetricsSnapshot()
    one_of_each(now)
    now.add("attache_engine_report_age_seconds", {"server": "default/llama", "endpoint": "10.0.0.2:8000"}, 0.2)
    lines = render(MetricsSnapshot(), now, seconds=1.0, tenants=9, wall_now_s=1041.0).splitlines()
    assert lines[3].endswith("it reports again, and the next request for which it is the best choice tries it")


def test_a_report_from_before_the_failure_does_not_say_that_an_engine_is_back() -> None:
    now = MetricsSnapshot()
    one_of_each(now)
    now.add("attache_engine_report_age_seconds", {"server": "default/llama", "endpoint": "10.0.0.2:8000"}, 2.0)
    lines = render(MetricsSnapshot(), now, seconds=1.0, tenants=9, wall_now_s=1001.0).splitlines()
    assert "10.0.0.2:8000 of default/llama is avoided" in lines[3]
    assert "it reports again" not in lines[3]


def test_engines_that_nobody_reads_are_not_silent() -> None:
    now = MetricsSnapshot()
    engine(now, "10.0.0.1:8000")
    assert render(MetricsSnapshot(), now, seconds=1.0, tenants=9).splitlines()[1] == "engines: 1 serving"


def test_the_process_with_the_freshest_report_counts() -> None:
    now = MetricsSnapshot()
    for age_s in (30.0, 0.5):
        now.add("attache_engine_reports_total", {"server": "default/llama", "result": "read"}, 5)
        engine(now, "10.0.0.1:8000", engine_report_age_seconds=age_s, endpoint_ttft_seconds=0.2)
    text = render(MetricsSnapshot(), now, seconds=1.0, tenants=9)
    assert "engines: 1 serving" in text
    assert "200 ms" in text


def test_what_clients_get_by_server_with_fallbacks() -> None:
    now = reading(picks_total__server_is_llama=40)
    for status, first, count in (("2xx", "yes", 20), ("2xx", "no", 6), ("5xx", "yes", 2), ("none", "yes", 4)):
        labels = {"server": "llama", "status_class": status, "first_choice": first}
        now.add("attache_answers_total", labels, count)
    lines = render(MetricsSnapshot(), now, seconds=2.0, tenants=9).splitlines()
    start = next(index for index, line in enumerate(lines) if "FALLBACKS/S" in line)
    assert lines[start + 1].split() == ["llama", "20.0", "13.0", "0.0", "1.0", "2.0", "3.0"]


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    now = reading(queue_waiting__server_is_llama__band_is_high=12, picks_total__server_is_llama=150)
    one_of_each(now)
    now.add("attache_tenant_requests_total", {"tenant": "acme", "outcome": "picked"}, 10)
    text = render(MetricsSnapshot(), now, seconds=1.0, tenants=9, wall_now_s=1041.0, width=width)
    assert max(map(len, text.splitlines())) <= width
    for needed in ("STATE", "TTFT", "FAILED", "FALLBACKS/S", "SATURATION"):
        assert needed in text
    assert ("RUNNING" in text) == (width == 120)


def test_a_page_of_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"# TYPE envoy_requests counter\nenvoy_requests_total 5\n") as page:
        assert main(["top", "--once", "--interval", "100ms", page]) == 2
    assert f"the page at {page} is not of extproc" in capsys.readouterr().err


def test_the_pages_url_is_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"# TYPE attache_open_streams gauge\nattache_open_streams 5\n") as page:
        assert main(["top", "--once", "--interval", "100ms", f"http://{page}/metrics"]) == 0
    assert "5 requests open" in capsys.readouterr().out


def test_fewer_tenants_than_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--tenants", "-3"])
    assert "--tenants -3: write 0 or more" in capsys.readouterr().err


def test_a_host_name_is_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"# TYPE attache_open_streams gauge\nattache_open_streams 5\n") as page:
        assert main(["top", "--once", "--interval", "100ms", page.replace("127.0.0.1", "localhost")]) == 0
    assert "5 requests open" in capsys.readouterr().out


@contextlib.contextmanager
def serving(text: bytes) -> Iterator[str]:
    """The address of a page with this text."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "127.0.0.1:1"]) == 2
    assert "is extproc running there?" in capsys.readouterr().err


def test_words_that_are_no_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "localhost"])
    assert "is not an address" in capsys.readouterr().err


def test_a_plugin_that_fails_is_named_until_extproc_starts_anew() -> None:
    before, now = MetricsSnapshot(), MetricsSnapshot()
    for sample, count in ((before, 4), (now, 10)):
        sample.add("attache_plugin_failures_total", {"server": "default/llama", "plugin": "newest"}, count)
    text = render(before, now, seconds=2.0, tenants=9)
    assert "plugin newest of default/llama has failed 10 times (3.0/s): requests are decided without it" in text
    assert "has failed" not in render(MetricsSnapshot(), MetricsSnapshot(), seconds=2.0, tenants=9)


def test_a_directory_that_one_of_two_processes_refuses_is_told() -> None:
    before, now = MetricsSnapshot(), MetricsSnapshot()
    now.add("attache_config_valid", {}, 1)
    assert "mistake" not in render(before, now, seconds=1.0, tenants=9)
    now.add("attache_config_valid", {}, 0)
    text = render(before, now, seconds=1.0, tenants=9)
    assert "the configuration directory has a mistake, and the last valid state stays in use" in text


def test_budgets_show_who_has_used_most_and_processes_are_not_added_up() -> None:
    now = MetricsSnapshot()
    for caller, used in (("acme", 0.25), ("bell", 0.875), ("acme", 0.5)):
        labels = {"budget": "default/chat/team", "caller": caller, "unit": "cost_micros"}
        now.add("attache_budget_used_ratio", labels, used)
    text = render(MetricsSnapshot(), now, seconds=1.0, tenants=20)
    lines = [line.split() for line in text.splitlines() if "default/chat/team" in line]
    assert lines == [["default/chat/team", "bell", "money", "88%"], ["default/chat/team", "acme", "money", "50%"]]
