# SPDX-License-Identifier: Apache-2.0
"""A ModelServer whose ``model`` is an alias, and engines that list another name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.core.effects import Decision, EngineModelsListed, RequestRefused
from extproc.core.peer_events import EngineReported
from extproc.core.request_record import Outcome
from extproc.engines.metrics import EngineReport
from extproc.scheduling.model_check import model_problems, quoted_names
from tests.extproc.scenes import CHAT, configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from extproc.core.core import Core

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
SERVER = "default/llama"


@pytest.fixture
def core() -> Core:
    """One route, of m to a ModelServer of m with two engines."""
    return core_of(servers={"llama": endpoints(A, B)})


def lists(core: Core, address: str, *base: str, adapters: tuple[str, ...] = ()) -> list[EngineModelsListed]:
    """An engine lists its models."""
    names = frozenset(base)
    event = EngineReported(SERVER, address, EngineReport(), models=names | set(adapters), base_models=names)
    return [one for one in core.on_engine_report(event, 1.0) if isinstance(one, EngineModelsListed)]


def asks(core: Core, status: int, now: float, *, by: str = "", path: str = CHAT, **fields: object) -> str:
    """Send a request, which an engine (``by``: another than the first choice) answers with ``status``; why it was
    refused, empty if it was not.
    """
    own, _ = core.arrive(request(core, path=path, **fields), now)
    if isinstance(own, RequestRefused):
        assert own.refusal.status == 404
        assert own.refusal.code == "model_not_found"
        return own.refusal.message
    assert isinstance(own, Decision)
    served = by or own.assignment.addresses[0]
    core.on_stream_closed(own.ticket, now)
    core.on_outcome(Outcome(own.ticket, status, served, 0.1, 0.1, None, None, None), now)
    return ""


def test_the_first_engine_without_the_model_is_reported_and_the_last_that_has_it_again(core: Core) -> None:
    assert lists(core, A, "meta/llama") == [EngineModelsListed(SERVER, A, "m", frozenset({"meta/llama"}))]
    assert lists(core, A, "meta/llama") == []
    assert lists(core, B, "meta/llama") == []
    assert lists(core, A, "m") == []
    assert lists(core, B, "m", "other") == [EngineModelsListed(SERVER, B, "", frozenset({"m", "other"}))]


def test_the_problem_is_the_servers_where_no_engine_that_lists_its_models_has_it(core: Core) -> None:
    assert model_problems(core.pools.values()) == {}
    lists(core, A, "meta/llama", adapters=("sql",))
    text = "its engines list 'meta/llama' and not 'm'; write one of the engines' names as 'model'"
    assert model_problems(core.pools.values()) == {SERVER: text}
    lists(core, B, "m")
    assert model_problems(core.pools.values()) == {}


def test_a_request_is_refused_with_the_reason_once_an_engine_has_answered_404(core: Core) -> None:
    lists(core, A, "meta/llama")
    lists(core, B, "meta/llama")
    # some engines take any name
    assert asks(core, 200, 2.0) == ""
    assert asks(core, 404, 3.0) == ""
    why = asks(core, 404, 4.0)
    assert why == (
        "The ModelServer default/llama is configured with a wrong model: its engines list 'meta/llama' and not 'm'; "
        "write one of the engines' names as 'model'."
    )
    assert [asks(core, 404, 5.0 + second) for second in range(10)] == [why] * 10
    lists(core, A, "m")
    assert asks(core, 404, 15.0) == ""


def test_no_request_is_refused_once_the_lists_are_old(core: Core) -> None:
    lists(core, A, "meta/llama")
    assert asks(core, 404, 2.0, by=A) == ""
    assert asks(core, 404, 15.9) != ""
    assert asks(core, 200, 16.1) == ""


def test_an_engine_that_serves_what_it_does_not_list_keeps_its_requests(core: Core) -> None:
    """The other one refuses that name."""
    lists(core, A, "meta/llama")
    lists(core, B, "meta/llama")
    for second in range(5):
        assert asks(core, 200, 2.0 + second, by=A) == ""
        assert asks(core, 404, 2.5 + second, by=B) == ""
    # until it refuses the name, too
    assert asks(core, 404, 8.0, by=A) == ""
    assert asks(core, 404, 8.1) != ""


def test_a_404_of_an_api_that_the_engine_lacks_refuses_no_other_api(core: Core) -> None:
    lists(core, A, "meta/llama")
    assert asks(core, 404, 2.0, by=A, path="/v1/embeddings", input="hi") == ""
    assert asks(core, 404, 2.1, path="/v1/embeddings", input="hi") != ""
    assert asks(core, 200, 2.2, by=A) == ""
    assert asks(core, 404, 2.3, by=B, path="/v1/embeddings", input="hi") == ""


def test_an_engine_that_restarted_is_tried_again(core: Core) -> None:
    lists(core, A, "meta/llama")
    assert asks(core, 404, 2.0, by=A) == ""
    assert asks(core, 404, 2.1) != ""
    core.on_engine_report(EngineReported(SERVER, A, EngineReport(), has_restarted=True), 2.2)
    assert asks(core, 200, 2.3) == ""


def test_another_model_in_the_configuration_is_tried(core: Core) -> None:
    lists(core, A, "meta/llama")
    assert asks(core, 404, 2.0, by=A) == ""
    core.apply(configuration(servers={"llama": f"{endpoints(A, B)}model: other\n"}), 2.1)
    lists(core, A, "meta/llama")
    assert asks(core, 404, 2.2, by=A) == ""
    assert "not 'other'" in asks(core, 404, 2.3)


def test_a_404_of_engines_that_list_the_model_refuses_nobody(core: Core) -> None:
    lists(core, A, "m")
    lists(core, B, "m")
    assert asks(core, 404, 2.0) == ""
    assert asks(core, 404, 2.1) == ""


def test_another_model_in_the_configuration_is_compared_anew(core: Core) -> None:
    lists(core, A, "meta/llama")
    core.apply(configuration(servers={"llama": f"{endpoints(A, B)}model: meta/llama\n"}), 2.0)
    assert model_problems(core.pools.values()) == {}
    assert lists(core, A, "meta/llama") == [EngineModelsListed(SERVER, A, "", frozenset({"meta/llama"}))]


def test_a_server_that_no_route_asks_for_its_model_may_have_any_name_there() -> None:
    core = core_of(servers={"llama": endpoints(A)}, routes={"chat": "{modelName: null, loraAdapters: [sql]}"})
    assert lists(core, A, "meta/llama", adapters=("sql",)) == []
    assert model_problems(core.pools.values()) == {}


def test_names_of_engines_may_be_any_text() -> None:
    assert quoted_names([]) == "no model"
    assert quoted_names(["b", "a\n\x1b[2J"]) == "'a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}[2J', 'b'"
    assert quoted_names(["d", "c", "b", "a"]) == "'a', 'b', 'c' and 1 more"
    assert len(quoted_names(["x" * 1024])) < 210
