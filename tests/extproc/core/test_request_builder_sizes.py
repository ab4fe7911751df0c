# SPDX-License-Identifier: Apache-2.0
"""What a request and a change cost does not grow with the configuration: by counts of operations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, configuration, model_route
from extproc.api.config_loader import SnapshotLoader
from extproc.core import request_builder as builder
from extproc.core.core import Core
from extproc.core.request_builder import CallerAccess
from extproc.core.request_record import RequestHead
from extproc.routing import routing_table
from extproc.wire_names import CLIENT

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = ObjectCounts(models=50, routes=100, hosts=10, adapters=100, endpoints=100, keys=40, tenants=20)
GATEWAY = GatewayPorts("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", 80)


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[object]:
    """One entry for each call from now on."""
    calls: list[object] = []
    whole: Callable[..., object] = getattr(owner, name)

    def call(*given: object, **named: object) -> object:
        calls.append(given)
        return whole(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.fixture
def files() -> dict[str, bytes]:
    return configuration(SIZES, GATEWAY, "Close")


def core_of(loader: SnapshotLoader, files: dict[str, bytes]) -> Core:
    return Core(loader.load(files), rng=random.Random(0), ticket_prefix="t")


def test_a_change_of_one_route_compiles_that_one(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SnapshotLoader()
    core = core_of(loader, files)
    compiled = counted(monkeypatch, routing_table, "_compile_all")
    documents = msgspec.json.decode(files["routes-0.json"])
    documents[3] = model_route(SIZES, 3, limited=True, name="renamed")
    core.apply(loader.load({**files, "routes-0.json": msgspec.json.encode(documents)}), 1.0)
    assert len(compiled) == 1
    head = RequestHead("GET", "/v1/models", {CLIENT: "key-0"}, has_body=False, is_trusted=True)
    names = {one.name for one in core.builder.models}
    assert "renamed" in names
    assert "model-3" not in names
    assert core.builder.model_for(head, "model-4") is not None


def test_another_model_of_a_server_compiles_its_routes(files: dict[str, bytes]) -> None:
    loader = SnapshotLoader()
    core = core_of(loader, files)
    servers = files["servers-0.json"].replace(b'"org/model-3"', b'"org/other"')
    core.apply(loader.load({**files, "servers-0.json": servers}), 1.0)
    route = core.builder.models_for(
        RequestHead("GET", "/v1/models", {CLIENT: "key-0"}, has_body=False, is_trusted=True)
    )
    assert len(route) == SIZES.model_routes + SIZES.adapters
    found = routing_table.RoutingTable(core.snapshot).destinations("model-3")
    assert [one.model for one in found] == ["org/other"]
    assert [one.model for one in core._routing.destinations("model-3")] == ["org/other"]


def test_the_list_of_models_is_judged_once_for_a_caller_and_one_model_by_itself(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_of(SnapshotLoader(), files)
    judged = counted(monkeypatch, CallerAccess, "may_list")
    heads = [
        RequestHead("GET", "/v1/models", {CLIENT: f"key-{number}"}, has_body=False, is_trusted=True)
        for number in range(2)
    ]
    first = core.builder.models_for(heads[0])
    assert len(judged) == len(first) == SIZES.model_routes + SIZES.adapters
    assert core.builder.models_for(heads[0]) == first
    assert len(judged) == len(first)
    core.builder.models_for(heads[1])
    assert len(judged) == 2 * len(first)
    judged.clear()
    model = core.builder.model_for(heads[0], "model-3")
    assert model is not None
    assert model.name == "model-3"
    assert core.builder.model_for(heads[0], "absent") is None
    assert len(judged) == 1


def test_lists_of_many_callers_are_bounded(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "_MOST_LISTS", 3)
    core = core_of(SnapshotLoader(), files)
    for number in range(10):
        core.builder.models_for(
            RequestHead("GET", "/v1/models", {CLIENT: f"key-{number}"}, has_body=False, is_trusted=True)
        )
    assert len(core.builder._lists) == 3


def test_a_caller_whose_list_is_not_kept_takes_nobodys_kept_list_away(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_MOST_LISTS", 1)
    core = core_of(SnapshotLoader(), files)
    kept = RequestHead("GET", "/v1/models", {CLIENT: "key-0"}, has_body=False, is_trusted=True)
    first = core.builder.models_for(kept)
    with_claims = msgspec.structs.replace(kept, claims={"team": ["a"]})
    assert core.builder.models_for(with_claims) == first
    judged = counted(monkeypatch, CallerAccess, "may_list")
    assert core.builder.models_for(kept) == first
    assert judged == []
