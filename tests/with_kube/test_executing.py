# SPDX-License-Identifier: Apache-2.0
"""Each action of a plan against a server: only on the object that was meant, and never over others' fields."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from controller.kube.api_resources import CONFIG_MAPS, MODEL_INFERS
from controller.kube.plan_executor import Executor, Expectations, NameStillTaken, ObjectRefused
from controller.kube.reconcile_plan import Action, Annotate, Apply, Create, Delete, SetStatus
from controller.kube.shared_informers import InformerSet, SharedInformers
from tests.with_kube.managing import define_kinds, model_infer
from tests.with_kube.objects import config_map

if TYPE_CHECKING:
    from controller.kube.api_resources import Object
    from controller.kube.client import Client


class Doing:
    """Executes without any copies of objects."""

    def __init__(self, client: Client) -> None:
        self.written: list[tuple[str, str]] = []
        self.expectations = Expectations(InformerSet(SharedInformers(client)))
        clock = asyncio.get_running_loop().time
        self._executor = Executor(
            client, self.expectations, lambda *_: None, clock=clock, counted=lambda *one: self.written.append(one)
        )

    async def __call__(self, *actions: Action) -> None:
        await self._executor.execute("work", actions)


@pytest_asyncio.fixture(loop_scope="session")
async def do(client: Client) -> Doing:
    await define_kinds(client)
    return Doing(client)


def owned(owner: Object, **data: str) -> Object:
    """A ConfigMap that another one owns."""
    metadata = owner["metadata"]
    made = config_map(metadata["namespace"], **data)
    reference: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    reference["controller"] = True
    made["metadata"]["ownerReferences"] = [reference]
    return made


async def test_what_is_there_already_is_taken_if_it_is_ours(client: Client, do: Doing, namespace: str) -> None:
    # a garbage collector deletes what belongs to nobody
    me, other = [await client.create(CONFIG_MAPS, config_map(namespace, name)) for name in ("me", "other")]
    await do(Create(CONFIG_MAPS, owned(me, a="1")))
    await do(Create(CONFIG_MAPS, owned(me, a="2")))
    assert (await client.get(CONFIG_MAPS, "one", namespace))["data"] == {"a": "1"}
    for action in (Create, Apply):
        with pytest.raises(ObjectRefused, match="does not own") as caught:
            await do(action(CONFIG_MAPS, owned(other, a="3")))
        assert caught.value.reason == "NameTaken"
    assert (await client.get(CONFIG_MAPS, "one", namespace))["data"] == {"a": "1"}
    assert do.written == [("ConfigMap", "create")] * 2


async def test_what_has_the_name_and_is_being_deleted_is_waited_for_and_nobody_is_told_to_delete_it(
    client: Client, do: Doing, namespace: str
) -> None:
    me = await client.create(CONFIG_MAPS, config_map(namespace, name="me"))
    theirs = config_map(namespace)
    theirs["metadata"]["finalizers"] = ["attache.dev/test"]
    await client.create(CONFIG_MAPS, theirs)
    await client.delete(CONFIG_MAPS, "one", namespace)
    for action in (Create, Apply):
        with pytest.raises(NameStillTaken, match=f"waits for the ConfigMap {namespace}/one of an earlier owner"):
            await do(action(CONFIG_MAPS, owned(me, a="1")))
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"metadata": {"finalizers": None}})
    await do(Create(CONFIG_MAPS, owned(me, a="1")))


async def test_what_is_yielded_is_left_to_others_and_all_else_is_taken(
    client: Client, do: Doing, namespace: str
) -> None:
    replicas = ("spec", "replicas")
    thing = model_infer(namespace, replicas=2)
    await do(Apply(MODEL_INFERS, thing, yields=(replicas,)))
    asked = {"spec": {"replicas": 5, "schedulerName": "theirs"}}
    identity = {name: thing[name] for name in ("apiVersion", "kind", "metadata")}
    await client.apply(MODEL_INFERS, {**identity, **asked}, manager="autoscaler", force=True)
    thing["spec"]["schedulerName"] = "ours"
    await do(Apply(MODEL_INFERS, thing, yields=(replicas,)))
    spec = (await client.get(MODEL_INFERS, "llama", namespace))["spec"]
    assert (spec["replicas"], spec["schedulerName"]) == (5, "ours")
    await do(Apply(MODEL_INFERS, thing))
    assert (await client.get(MODEL_INFERS, "llama", namespace))["spec"]["replicas"] == 2


async def test_another_object_of_the_same_name_is_left_alone(client: Client, do: Doing, namespace: str) -> None:
    first = await client.create(CONFIG_MAPS, config_map(namespace))
    await client.delete(CONFIG_MAPS, "one", namespace)
    second = await client.create(CONFIG_MAPS, config_map(namespace))
    key, gone = f"{namespace}/one", first["metadata"]["uid"]
    await do(Annotate(CONFIG_MAPS, key, gone, annotations={"a": "1"}), Delete(CONFIG_MAPS, key, gone))
    found = await client.get(CONFIG_MAPS, "one", namespace)
    assert found["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    uid = second["metadata"]["uid"]
    await do(Annotate(CONFIG_MAPS, key, uid, annotations={"a": "1"}, labels={"b": "2"}))
    await do(Annotate(CONFIG_MAPS, key, uid, annotations={"a": None}))
    metadata = (await client.get(CONFIG_MAPS, "one", namespace))["metadata"]
    assert (metadata.get("annotations") or {}, metadata["labels"]) == ({}, {"b": "2"})
    await do(Delete(CONFIG_MAPS, key, uid), Delete(CONFIG_MAPS, key, uid), Annotate(CONFIG_MAPS, key, uid))
    assert await client.get_or_none(CONFIG_MAPS, "one", namespace) is None


async def test_a_status_is_said_field_by_field(client: Client, do: Doing, namespace: str) -> None:
    made = await client.create(MODEL_INFERS, model_infer(namespace))
    key, uid = f"{namespace}/llama", made["metadata"]["uid"]
    await do(
        SetStatus(MODEL_INFERS, key, uid, {"replicas": 3}), SetStatus(MODEL_INFERS, key, uid, {"readyReplicas": 1})
    )
    found = await client.get(MODEL_INFERS, "llama", namespace)
    assert (found["status"]["replicas"], found["status"]["readyReplicas"]) == (3, 1)
    assert found["spec"] == made["spec"]


async def test_the_first_failure_ends_a_plan(client: Client, do: Doing, namespace: str) -> None:
    wrong: dict[str, Any] = config_map(namespace, "wrong")
    wrong["metadata"]["nonsense"] = "x"
    wrong["kind"] = "Secret"
    with pytest.raises(ObjectRefused) as caught:
        await do(Create(CONFIG_MAPS, wrong), Create(CONFIG_MAPS, config_map(namespace, "later")))
    assert caught.value.reason == "InvalidObject"
    assert await client.get_or_none(CONFIG_MAPS, "later", namespace) is None
