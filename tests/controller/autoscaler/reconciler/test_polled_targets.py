# SPDX-License-Identifier: Apache-2.0
"""Targets of others' kinds, whose objects and names are chosen by whoever may write them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest

from controller.autoscaler.reconciler import polled_targets
from controller.autoscaler.reconciler.polled_targets import PolledTarget, PolledTargets
from controller.kube.errors import NotFound
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from controller.autoscaler.reconciler.bindings import ScalableRef
    from controller.kube.api_resources import ApiResource, Object
    from controller.kube.client import Client

SERVED = "example.com/v1"
SLOW = "slow.com/v1"


class FakeClient:
    """Serves Fleets with a scale. ``objects``: by name, all at ``version``; ``reads``: of them so far. ``asked``: of
    which versions the kinds were asked for. What is in the group ``slow.com`` is answered once ``gate`` is set;
    ``begun``: names that were asked for there.
    """

    def __init__(self, **objects: Object) -> None:
        self.objects = objects
        self.version = "1"
        self.reads = 0
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self.begun: list[str] = []

    async def served_resources(self, api_version: str) -> tuple[Object, ...]:
        self.asked.append(api_version)
        if api_version not in (SERVED, SLOW):
            raise NotFound(404, "NotFound", api_version)
        return ({"name": "fleets", "kind": "Fleet", "namespaced": True}, {"name": "fleets/scale", "kind": "Scale"})

    async def create(self, *_: object) -> Object:
        return {"status": {"allowed": True}}

    async def get(self, resource: ApiResource, name: str, namespace: str, subresource: str = "") -> Object:
        if resource.group == "slow.com":
            self.begun.append(name)
            await self.gate.wait()
        self.reads += 1
        if name not in self.objects:
            raise NotFound(404, "NotFound", name)
        metadata = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": self.version}
        if subresource == "scale":
            return {"metadata": metadata, "spec": {"replicas": 2}, "status": {"selector": "app=llama"}}
        return {"metadata": metadata, **self.objects[name]}


def place(name: str, group: str = "example.com") -> ScalableRef:
    return "default", group, "Fleet", name


@contextlib.asynccontextmanager
async def reading(
    client: FakeClient, wanted: Mapping[ScalableRef, str], *, each_s: float = 5.0, deadline_s: float = 10.0
) -> AsyncIterator[PolledTargets]:
    kinds = PolledTargets(cast("Client", client), lambda _: None, each_s=each_s, deadline_s=deadline_s)
    kinds.set_wanted("default/binding", wanted)
    task = asyncio.create_task(kinds.run())
    try:
        yield kinds
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def is_read(kinds: PolledTargets, target: ScalableRef) -> bool:
    """Whether it has been tried."""
    return kinds.last_read(target) != PolledTarget()


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
        await eventually(lambda: kinds.are_targets_read("default/binding"))
        found = kinds.last_read(place("good")).found
        assert found is not None
        assert found.replicas == 2
        bad = kinds.last_read(place("bad"))
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
        await eventually(lambda: kinds.are_targets_read("default/binding"))
        lacks = kinds.last_read(place("a")).lacks
    assert lacks is not None
    assert lacks.reason == "UnknownKind"
    assert "is no apiVersion" in lacks.message
    assert client.asked == []


@pytest.mark.parametrize("name", ["..", ".", "x/status", "../../secrets/x", "%2e%2e"])
async def test_a_name_leads_nowhere_else(name: str) -> None:
    client = FakeClient(**{name: {}})
    async with reading(client, {place(name): SERVED}) as kinds:
        await eventually(lambda: kinds.are_targets_read("default/binding"))
        lacks = kinds.last_read(place(name)).lacks
    assert lacks is not None
    assert lacks.reason == "TargetNotFound"


async def test_a_slow_server_of_one_group_holds_up_no_other_group() -> None:
    client = FakeClient(**{f"fleet-{number}": {} for number in range(30)})
    slow = {place(f"fleet-{number}", "slow.com"): SLOW for number in range(30)}
    quick = {place(f"fleet-{number}"): SERVED for number in range(3)}
    async with reading(client, {**slow, **quick}, each_s=0.05) as kinds:
        await eventually(lambda: all(is_read(kinds, one) for one in quick))
        # and again and again
        client.objects["fleet-0"] = {"spec": {"template": {"metadata": {"labels": {"app": "new"}}}}}
        kinds.read_soon(place("fleet-0"))
        await eventually(lambda: len(client.begun) == 8)
        assert not any(is_read(kinds, one) for one in slow)
        # half of the turns: one share is left for others
        assert len(set(client.begun)) == 8
        client.gate.set()
        await eventually(lambda: all(is_read(kinds, one) for one in slow))


async def test_what_is_not_answered_in_time_cannot_be_read_and_stays_as_it_was() -> None:
    client = FakeClient(a={}, b={})
    both = {place("a", "slow.com"): SLOW, place("b"): SERVED}
    async with reading(client, both, each_s=0.05, deadline_s=0.2) as kinds:
        await eventually(lambda: is_read(kinds, place("a", "slow.com")))
        lacks = kinds.last_read(place("a", "slow.com")).lacks
        assert lacks is not None
        assert "has not answered within 0.2 s" in lacks.message
        assert kinds.disconnected_s("default") is not None
        client.gate.set()
        await eventually(lambda: kinds.last_read(place("a", "slow.com")).found is not None)
        await eventually(lambda: kinds.disconnected_s("default") is None)
        client.gate.clear()
        await eventually(lambda: kinds.disconnected_s("default") is not None)
        # it is scaled by what was read last, and nothing is scaled in meanwhile: see Freshness.cut_off_s
        assert kinds.last_read(place("a", "slow.com")).found is not None


async def test_a_change_during_a_read_is_read_again() -> None:
    client = FakeClient(a={})
    slow = place("a", "slow.com")
    async with reading(client, {slow: SLOW}) as kinds:
        await eventually(lambda: client.begun == ["a"])
        kinds.read_soon(slow)
        client.gate.set()
        # two reads of scale and object, without waiting for the next time
        await eventually(lambda: len(client.begun) >= 3)


async def test_a_write_of_ours_is_known_at_once_and_a_read_from_before_it_changes_nothing() -> None:
    client, target = FakeClient(a={"spec": {}}), place("a")
    scale: Object = {"spec": {"replicas": 5}, "status": {"selector": "app=llama"}}
    metadata = {"name": "a", "namespace": "default", "uid": "a", "resourceVersion": "3"}
    async with reading(client, {target: SERVED}, each_s=0.1) as kinds:

        def replicas() -> int | None:
            found = kinds.last_read(target).found
            return None if found is None else found.replicas

        # what is unknown is left to the read
        kinds.on_write_answered(target, {"metadata": metadata}, scale)
        assert not kinds.has_been_tried(target)
        await eventually(lambda: replicas() == 2)
        kinds.on_write_answered(target, {"metadata": metadata}, scale)
        assert replicas() == 5
        at = client.reads
        await eventually(lambda: client.reads > at + 4)
        assert replicas() == 5
        client.version = "4"
        await eventually(lambda: replicas() == 2)


async def test_a_target_that_is_not_wanted_any_more_is_read_no_more() -> None:
    client = FakeClient(a={}, b={})
    slow = place("a", "slow.com")
    async with reading(client, {slow: SLOW}, each_s=0.02) as kinds:
        await eventually(lambda: client.begun == ["a"])
        kinds.set_wanted("default/binding", {place("b"): SERVED})
        client.gate.set()
        await eventually(lambda: is_read(kinds, place("b")))
        assert not is_read(kinds, slow)


@pytest.mark.parametrize("step_s", [0.005, 0.007])
async def test_a_target_that_is_due_when_the_loop_has_just_looked_is_read(
    monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """Each look at the clock is later than the one before: what was not due at one is due at the next."""
    looks = itertools.count()
    monkeypatch.setattr(polled_targets, "_loop_s", lambda: next(looks) * step_s)
    client = FakeClient(a={"spec": {}})
    async with reading(client, {place("a"): SERVED}, each_s=0.02):
        await eventually(lambda: client.reads > 20, timeout_s=30.0)
