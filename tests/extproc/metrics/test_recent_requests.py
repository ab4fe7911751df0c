# SPDX-License-Identifier: Apache-2.0
"""Recent requests: kept only while somebody looks, bounded, with where their time went."""

from __future__ import annotations

import msgspec
import pytest

from extproc.core.request_record import RequestHead
from extproc.core.request_states import RequestState
from extproc.metrics.recent_requests import OPEN_S, RecentRequests
from extproc.refusals import UnknownModel
from tools.console_pictures import Gateway, snapshot_of

LIMITED = [{"per": "Tenant", "unit": "hour", "requests": 2}]
ONE = {"saturation": {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1}}


def gateway(*, limits: list[dict[str, object]] | None = None, flow_control: dict[str, object] | None = None) -> Gateway:
    server: dict[str, object] = {"model": "m", "endpoints": [{"address": "10.0.0.1:1"}, {"address": "10.0.0.2:1"}]}
    if flow_control:
        server["flowControl"], server["endpoints"] = flow_control, [{"address": "10.0.0.1:1"}]
    rules = [{"targetModels": [{"modelServerName": "s"}]}]
    return Gateway(snapshot_of({"s": server}, {"r": {"modelName": "m", "rules": rules, "rateLimits": limits or []}}))


def test_nothing_is_kept_while_nobody_looks() -> None:
    one = gateway()
    one.end(one.send("a", "m"))
    assert len(one.metrics.recent) == 0
    one.metrics.recent.on_viewed(one.now)
    one.end(one.send("a", "m"))
    assert len(one.metrics.recent) == 1
    one.now += OPEN_S + 1
    one.end(one.send("a", "m"))
    assert len(one.metrics.recent) == 0
    assert not one.metrics.recent.is_open


def test_the_time_of_a_request_is_split_into_its_parts() -> None:
    one = gateway(flow_control=ONE)
    one.metrics.recent.on_viewed(one.now)
    first, second = one.send("a", "m"), one.send("b", "m", most=9)
    one.now += 2
    for _ in range(2):
        waiting, running = one.metrics.recent.newest(one.now, most=10)
    assert (waiting.phase, waiting.waits_s, waiting.age_s, waiting.held_s) == ("queue", {"queue": 2}, 2, None)
    assert (running.phase, running.held_s, running.chosen) == ("running", 0, "10.0.0.1:1")
    one.now += 1
    one.end(first)
    one.tick()
    one.now += 4
    one.end(second, ttft_s=3.5, seconds=7.0)
    done = one.metrics.recent.newest(one.now, most=1)[0]
    assert (done.tenant, done.model, done.server, done.api) == ("b", "m", "default/s", "chat")
    assert (done.phase, done.status, done.served, done.output_tokens) == ("answered", 200, "10.0.0.1:1", 120)
    assert (done.waits_s["queue"], done.held_s, done.ttft_s, done.writing_s, done.duration_s) == (3, 3, 0.5, 3.5, 7)
    assert done.waits_s["queue"] + done.ttft_s + done.writing_s == done.duration_s


def test_refusals_say_why() -> None:
    one = gateway(limits=LIMITED)
    recent = one.metrics.recent
    recent.on_viewed(one.now)
    for _ in range(3):
        one.send("a", "m")
    head = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
    recent.on_early_refusal(head, UnknownModel("The model 'x' does not exist"), one.now)
    unknown, limited, *_ = recent.newest(one.now, most=10)
    assert (unknown.phase, unknown.status, unknown.refusal) == ("refused", 404, "The model 'x' does not exist")
    assert (limited.phase, limited.status) == ("refused", 429)
    assert "Rate limit reached for requests" in limited.refusal


def test_a_client_that_leaves_the_queue_is_seen_to_have_left() -> None:
    one = gateway(flow_control=ONE)
    one.metrics.recent.on_viewed(one.now)
    one.send("a", "m")
    held = one.send("b", "m")
    one.now += 2
    held.on_stream_closed()
    left = one.metrics.recent.newest(one.now, most=1)[0]
    assert (left.phase, left.waits_s, left.duration_s) == ("left", {"queue": 2}, 2)
    assert one.core.count_requests(RequestState.QUEUED) == 0


def test_few_requests_are_explained_and_fewer_where_there_are_many_engines() -> None:
    recent = RecentRequests()
    assert [recent.wants_reasons(10, 0.1 * tenth) for tenth in range(11)].count(True) == 3
    assert [recent.wants_reasons(1_000, 100 + 0.1 * tenth) for tenth in range(21)].count(True) == 3
    assert not recent.wants_reasons(1_001, 200)


def test_the_explanation_names_the_engine_and_its_rivals() -> None:
    one = gateway()
    one.metrics.recent.on_viewed(one.now)
    one.send("a", "m")
    one.send("a", "m")
    second, first = one.metrics.recent.newest(one.now, most=2)
    assert second.why is None
    assert first.why is not None
    assert first.chosen in first.why.sentence
    assert first.why.best[0].address == first.chosen
    assert {each.address for each in first.why.best} == {"10.0.0.1:1", "10.0.0.2:1"}


def test_prompts_are_not_kept_and_rows_are_bounded() -> None:
    one = gateway()
    one.metrics.recent = RecentRequests(most=5)
    one.metrics.recent.on_viewed(one.now)
    for _ in range(9):
        one.send("a", "m", "a secret " * 50)
    rows = one.metrics.recent.newest(one.now, most=100)
    assert [row.number for row in rows] == [9, 8, 7, 6, 5]
    assert b"secret" not in msgspec.json.encode(rows)
    assert len(one.metrics.recent._running) == 5


@pytest.mark.parametrize(("find", "count"), [("", 3), ("ACME", 2), ("10.0.0.", 3), ("nobody", 0)])
def test_requests_are_found_by_any_of_their_names(find: str, count: int) -> None:
    one = gateway()
    one.metrics.recent.on_viewed(one.now)
    for tenant in ("acme", "acme", "other"):
        one.send(tenant, "m")
    assert len(one.metrics.recent.newest(one.now, most=10, find=find)) == count
