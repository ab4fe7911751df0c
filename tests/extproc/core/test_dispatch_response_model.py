# SPDX-License-Identifier: Apache-2.0
"""Whether Envoy writes the name that a client asked for into the answer: decided with the request."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Final

import pytest

from extproc.core.core import Core
from extproc.core.effects import Decision
from extproc.core.request_record import BUNDLE, GatewayProperties, RequestHead
from tests.extproc.scenes import CHAT, configuration, endpoints, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.request_record import Arrival

NAME: Final = 'a "name" \\ é漢'
QUIET: Final = "scrapeInterval: 0s\n"
OWN: Final = endpoints("10.0.0.1:8000") + QUIET
SAME, OTHER = f"{OWN}model: {json.dumps(NAME)}\n", f"{OWN}model: other\n"


def core_of(own: str, *, fallback: str = "", **route: object) -> Core:
    rule: dict[str, object] = {"targetModels": [{"modelServerName": "own"}]}
    servers = {"own": own}
    if fallback:
        servers["next"] = fallback.replace("10.0.0.1", "10.0.0.2")
        rule["fallback"] = [{"modelServerName": "next"}]
    spec = {"modelName": NAME, "loraAdapters": ["sql"], "rules": [rule], **route}
    snapshot = configuration(servers=servers, routes={"chat": json.dumps(spec)})
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def named(core: Core, arrival: Arrival, attachment: GatewayProperties = BUNDLE) -> str:
    own, _ = core.arrive(arrival, 0.0, attachment)
    assert isinstance(own, Decision)
    return own.response_model


@pytest.mark.parametrize(
    ("own", "fallback", "is_named"),
    [
        (SAME, "", False),
        (OTHER, "", True),
        (SAME, SAME, False),
        (SAME, OTHER, True),
        (OTHER, SAME, True),
    ],
)
def test_it_is_written_where_an_engine_that_may_answer_has_another(own: str, fallback: str, *, is_named: bool) -> None:
    core = core_of(own, fallback=fallback)
    assert named(core, request(core, model=NAME)) == (json.dumps(NAME, ensure_ascii=False) if is_named else "")


def test_a_fallback_that_is_taken_at_once_has_it_too() -> None:
    core = core_of(f"endpoints: []\nmodel: {json.dumps(NAME)}\n", fallback=OTHER)
    assert json.loads(named(core, request(core, model=NAME))) == NAME


def test_not_where_the_route_shows_what_engines_write() -> None:
    core = core_of(OTHER, responseModel="Served")
    assert named(core, request(core, model=NAME)) == ""


def test_an_adapter_has_one_name() -> None:
    core = core_of(OTHER)
    assert named(core, request(core, model="sql")) == ""


def test_gateways_of_others_pass_answers_on_as_they_are() -> None:
    core = core_of(OTHER)
    assert named(core, request(core, model=NAME), GatewayProperties(is_bundle=False)) == ""


def to_server(core: Core) -> Arrival:
    body = json.dumps({"model": NAME, "messages": []}).encode()
    return core.builder.build_for_server("default/own", RequestHead("POST", CHAT, {}, has_body=True), body)


def by_path(core: Core) -> Arrival:
    return core.builder.build_by_model(RequestHead("GET", "/v2/models/short/ready", {}, has_body=False), b"")


@pytest.mark.parametrize(
    ("own", "route", "arrive"), [(OTHER, {}, to_server), (f"{OTHER}protocol: V2\n", {"modelName": "short"}, by_path)]
)
def test_nor_where_no_model_route_chooses_or_the_path_names_the_model(
    own: str, route: dict[str, object], arrive: Callable[[Core], Arrival]
) -> None:
    core = core_of(own, **{"loraAdapters": [], **route})
    assert named(core, arrive(core)) == ""
