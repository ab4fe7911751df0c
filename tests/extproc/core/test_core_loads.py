# SPDX-License-Identifier: Apache-2.0
"""What each engine does for a process, as the page /loads tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.status_page_contents import EndpointLoad, total_loads
from extproc.core.core import Core
from extproc.endpoints.engine_reports import apply_report
from extproc.engines.metrics import EngineReport
from tests.extproc.scenes import configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.core import Core

ONE, OTHER = ({"llama": endpoints(f"10.0.0.{number}:8000")} for number in (1, 2))


def send(core: Core, text: str = "word " * 400) -> str:
    own, _ = core.arrive(request(core, text), 0.0)
    return own.ticket


def test_a_request_counts_at_its_engine_until_its_stream_is_closed() -> None:
    core = core_of(servers=ONE)
    assert core.engine_loads() == {"10.0.0.1:8000": EndpointLoad(0, 0)}
    ticket = send(core)
    # 2,000 characters are a little under 500 tokens at the initial 4 bytes a token, kept in whole blocks
    there = core.engine_loads()["10.0.0.1:8000"]
    assert there.in_flight == 1
    assert 300 < there.cached_tokens <= 520
    core.on_stream_closed(ticket, 1.0)
    assert core.engine_loads()["10.0.0.1:8000"].in_flight == 0


def test_an_engine_that_has_left_the_configuration_counts_while_it_answers() -> None:
    core = core_of(servers=ONE)
    ticket = send(core)
    core.apply(configuration(servers=OTHER), 1.0)
    assert core.engine_loads() == {"10.0.0.1:8000": EndpointLoad(1, 0), "10.0.0.2:8000": EndpointLoad(0, 0)}
    core.on_stream_closed(ticket, 2.0)
    assert core.engine_loads() == {"10.0.0.2:8000": EndpointLoad(0, 0)}


def test_what_an_engine_reports_counts_where_it_is_more_than_was_sent() -> None:
    core = core_of(servers=ONE)
    table = core.pools["default/llama"].table
    apply_report(table, table.row_of("10.0.0.1:8000"), EngineReport(waiting=1, running=2), 0.5)
    told = core.engine_loads()["10.0.0.1:8000"]
    assert (told.in_flight, told.reported, told.requests_at_engine) == (0, 3, 3)
    for _ in range(4):
        send(core)
    assert core.engine_loads()["10.0.0.1:8000"].requests_at_engine == 4


def test_requests_of_several_processes_add_up_and_caches_are_the_same_ones() -> None:
    pages = [{"a": EndpointLoad(1, 500, 5), "b": EndpointLoad(2, 0)}, {"a": EndpointLoad(3, 800, 4)}]
    assert total_loads(pages) == {"a": EndpointLoad(4, 800, 5), "b": EndpointLoad(2, 0)}
