# SPDX-License-Identifier: Apache-2.0
"""Spans on their way to a collector: as they are encoded, and what happens where nobody takes them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans

from bench.stack.processes import free_ports
from extproc.api.tracing import Tracing, parse_otlp
from extproc.core.trace import Trace, TraceParent, TraceStep
from extproc.feeds import trace_exporter
from extproc.feeds.trace_exporter import MOST_TRACES, TraceExporter, write_spans
from tests.otlp import collector
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

PARENT = TraceParent("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
ABOUT = {"attache.pick.endpoint": "10.0.0.1:8000", "attache.pick.cached_tokens": 7, "cost": 0.5, "best": ("a 1", "b 2")}


def trace(error: str = "") -> Trace:
    steps = [TraceStep("parse", 10.0, 10.25), TraceStep("pick", 10.25, 11.0, ABOUT)]
    return Trace(PARENT, 10.0, ticket="t-1", error=error, ended_s=11.0, steps=steps)


def test_a_decision_is_a_span_with_its_steps_below_it() -> None:
    scope = ScopeSpans()
    write_spans(scope, trace(), 1_700_000_000.0)
    decide, parse, pick = scope.spans
    assert [one.name for one in scope.spans] == ["attache.decide", "parse", "pick"]
    assert {one.trace_id.hex() for one in scope.spans} == {PARENT.trace_id}
    assert decide.parent_span_id.hex() == PARENT.span_id
    assert parse.parent_span_id == pick.parent_span_id == decide.span_id
    assert len({one.span_id for one in scope.spans}) == 3
    assert (decide.start_time_unix_nano, decide.end_time_unix_nano) == (1_700_000_010 * 10**9, 1_700_000_011 * 10**9)
    assert pick.start_time_unix_nano == parse.end_time_unix_nano == 1_700_000_010_250_000_000
    values = {one.key: one.value for one in pick.attributes}
    assert values["attache.pick.endpoint"].string_value == "10.0.0.1:8000"
    assert values["attache.pick.cached_tokens"].int_value == 7
    assert values["cost"].double_value == 0.5
    assert [one.string_value for one in values["best"].array_value.values] == ["a 1", "b 2"]
    assert decide.status.code == decide.status.STATUS_CODE_UNSET


def test_a_refusal_is_an_error_with_its_code() -> None:
    scope = ScopeSpans()
    write_spans(scope, trace("rate_limited"), 0.0)
    assert scope.spans[0].status.code == scope.spans[0].status.STATUS_CODE_ERROR
    assert {one.key: one.value.string_value for one in scope.spans[0].attributes}["error.type"] == "rate_limited"


class Exporter:
    """A TraceExporter whose collector may change."""

    def __init__(self, directory: Path) -> None:
        self.tracing: Tracing | None = None
        self.counts = Counter[str]()
        self.exporter = TraceExporter(
            lambda: self.tracing,
            lambda result, count: self.counts.update({result: count}),
            clock=lambda: 0.0,
            wall_clock=lambda: 0.0,
            process="p1",
            files=directory,
        )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_spans_arrive_by_either_protocol(tmp_path: Path, protocol: str) -> None:
    made = Exporter(tmp_path)
    async with collector() as collecting:
        made.tracing = parse_otlp(f"{protocol}://{getattr(collecting, protocol)}")
        running = asyncio.create_task(made.exporter.run())
        await eventually(lambda: made.exporter.is_enabled)
        for _ in range(1100):
            made.exporter.add(trace())
        await eventually(lambda: made.counts["sent"] == 1100)
        assert len(collecting.spans) == 3300
        running.cancel()
        made.exporter.add(trace())
        await made.exporter.close()
        assert len(collecting.spans) == 3303
    assert made.counts == {"sent": 1101}
    resource = collecting.spans[0].resource
    assert resource == {"service.name": "attache-extproc", "service.instance.id": "p1"}


async def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path: Path) -> None:
    made = Exporter(tmp_path)
    for _ in range(MOST_TRACES + 5):
        made.exporter.add(trace())
    assert made.counts == {"dropped": 5}


async def test_a_collector_that_is_away_gets_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = Exporter(tmp_path)
    made.tracing = Tracing(endpoint=f"127.0.0.1:{free_ports(1)[0]}")
    running = asyncio.create_task(made.exporter.run())
    await eventually(lambda: made.exporter.is_enabled)
    for failed in (1, 2):
        made.exporter.add(trace())

        def has_failed(times: int = failed) -> bool:
            return made.counts["failed"] == times

        await eventually(has_failed)
    async with collector() as collecting:
        made.tracing = Tracing(endpoint=collecting.grpc)
        made.exporter.add(trace())
        await collecting.until(lambda: collecting.spans)
    running.cancel()
    await made.exporter.close()
    lines = [one.getMessage() for one in caplog.records if one.name == "extproc.feeds.trace_exporter"]
    assert len(lines) == 1, lines
    assert "does not take spans" in lines[0]


async def test_a_collector_that_is_configured_during_a_call_of_another_one_is_named_if_it_is_away_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_exporter, "_TIMEOUT_S", 0.5)
    made, is_called = Exporter(tmp_path), asyncio.Event()

    class Silent(asyncio.Protocol):
        def data_received(self, _: bytes) -> None:
            is_called.set()

    silent = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
    made.tracing = parse_otlp(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    running = asyncio.create_task(made.exporter.run())
    await eventually(lambda: made.exporter.is_enabled)
    made.exporter.add(trace())
    await is_called.wait()
    made.tracing = parse_otlp(f"http://127.0.0.1:{free_ports(1)[0]}")
    made.exporter.add(trace())
    await eventually(lambda: made.counts["failed"] == 2)
    running.cancel()
    await made.exporter.close()
    silent.close()
    lines = [one.getMessage() for one in caplog.records if one.name == "extproc.feeds.trace_exporter"]
    assert ["does not take spans" in one for one in lines] == [True, True]
    assert made.tracing.endpoint in lines[1]


async def test_without_a_collector_nothing_is_kept(tmp_path: Path) -> None:
    made = Exporter(tmp_path)
    assert not made.exporter.is_enabled
    made.exporter.add(trace())
    await made.exporter.close()
    assert not made.counts


@pytest.mark.parametrize(
    ("url", "protocol", "ca_file"),
    [
        ("http://otel:4318", "http", None),
        ("https://otel:4318/", "http", "/ca.pem"),
        ("grpc://otel:4317", "grpc", None),
        ("grpcs://otel:4317", "grpc", "/ca.pem"),
    ],
)
def test_opentelemetrys_variables_complete_a_url(url: str, protocol: str, ca_file: str | None) -> None:
    variables = {
        "OTEL_SERVICE_NAME": "llm-d-router/epp",
        "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=epp-1, team=a%2Cb,broken,=x,service.name=other",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
    }
    found = parse_otlp(url, variables)
    assert (found.protocol, found.tls and found.tls.ca_file) == (protocol, ca_file)
    assert found.resource == {"k8s.pod.name": "epp-1", "team": "a,b", "service.name": "llm-d-router/epp"}
    assert parse_otlp(url).resource == {}


async def test_a_service_name_of_opentelemetrys_variables_is_sent_as_it_is(tmp_path: Path) -> None:
    made = Exporter(tmp_path)
    async with collector() as collecting:
        made.tracing = parse_otlp(f"grpc://{collecting.grpc}", {"OTEL_SERVICE_NAME": "llm-d-router/epp"})
        running = asyncio.create_task(made.exporter.run())
        await eventually(lambda: made.exporter.is_enabled)
        made.exporter.add(trace())
        await collecting.until(lambda: collecting.spans)
        running.cancel()
        await made.exporter.close()
    assert collecting.spans[0].resource["service.name"] == "llm-d-router/epp"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4318", "ftp://127.0.0.1:1", "http://127.0.0.1", "http://127.0.0.1:4318/v1/traces", "grpc://:1"]
)
def test_a_url_that_is_no_collectors_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"write"):
        parse_otlp(url)
