# SPDX-License-Identifier: Apache-2.0
"""Targets of others' kinds, whose objects and names are chosen by whoever may write them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, cast

import pytest

from controller.cluster.errors import NotFound
from controller.roles.scaling.other_kinds import OtherKinds
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from controller.cluster.client import Client
    from controller.cluster.resources import Object, Resource
    from controller.roles.scaling.owning import Place

SERVED = "example.com/v1"


class FakeClient:
    """Serves Fleets with a scale. ``objects``: by name. ``asked``: of which versions the kinds were asked for."""

    def __init__(self, **objects: Object) -> None:
        self.objects = objects
        self.asked: list[str] = []

    async def served(self, api_version: str) -> tuple[Object, ...]:
        self.asked.append(api_version)
        if api_version != SERVED:
            raise NotFound(404, "NotFound", api_version)
        return ({"name": "fleets", "kind": "Fleet", "namespaced": True}, {"name": "fleets/scale", "kind": "Scale"})

    async def create(self, *_: object) -> Object:
        return {"status": {"allowed": True}}

    async def get(self, _: Resource, name: str, namespace: str, subresource: str = "") -> Object:
        if name not in self.objects:
            raise NotFound(404, "NotFound", name)
        metadata = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1"}
        if subresource == "scale":
            return {"metadata": metadata, "spec": {"replicas": 2}, "status": {"selector": "app=llama"}}
        return {"metadata": metadata, **self.objects[name]}


def place(name: str) -> Place:
    return "default", "example.com", "Fleet", name


@contextlib.asynccontextmanager
async def reading(client: FakeClient, wanted: Mapping[Place, str]) -> AsyncIterator[OtherKinds]:
    kinds = OtherKinds(cast("Client", client), lambda _: None)
    kinds.want("default/binding", wanted)
    task = asyncio.create_task(kinds.run())
    try:
        yield kinds
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "spec",
    [
        {"template": "x"},
        {"template": {"metadata": "x"}},
        {"template": {"metadata": {"labels": ["a", "b"]}}},
        {"template": {"metadata": {"labels": {"a": {"b": 1}}}}},
        "x",
        ["a"],
        7,
    ],
)
async def test_an_object_of_any_shape_harms_no_other(spec: Any) -> None:  # noqa: ANN401 - JSON
    client = FakeClient(bad={"spec": spec}, good={"spec": {"template": {"metadata": {"labels": {"app": "llama"}}}}})
    async with reading(client, {place("bad"): SERVED, place("good"): SERVED}) as kinds:
        await eventually(lambda: kinds.are_read("default/binding"))
        found = kinds.of(place("good")).found
        assert found is not None
        assert found.replicas == 2
        bad = kinds.of(place("bad"))
        assert (bad.found is None) == (bad.lacks is not None)


@pytest.mark.parametrize(
    "version",
    [
        "../../api/v1/namespaces/kube-system/secrets/admin",
        "v1/namespaces/kube-system/secrets/admin",
        "../metrics",
        "..",
        "",
        "apps/v1/",
        "example.com/v1?watch=true",
        "example.com/v1#x",
        "example.com/%2e%2e",
    ],
)
async def test_what_is_no_version_is_not_asked_for(version: str) -> None:
    client = FakeClient()
    async with reading(client, {place("a"): version}) as kinds:
        await eventually(lambda: kinds.are_read("default/binding"))
        lacks = kinds.of(place("a")).lacks
    assert lacks is not None
    assert lacks.reason == "UnknownKind"
    assert "is no apiVersion" in lacks.message
    assert client.asked == []


@pytest.mark.parametrize("name", ["..", ".", "x/status", "../../secrets/x", "%2e%2e"])
async def test_a_name_leads_nowhere_else(name: str) -> None:
    client = FakeClient(**{name: {}})
    async with reading(client, {place(name): SERVED}) as kinds:
        await eventually(lambda: kinds.are_read("default/binding"))
        lacks = kinds.of(place(name)).lacks
    assert lacks is not None
    assert lacks.reason == "TargetNotFound"
