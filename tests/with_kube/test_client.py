# SPDX-License-Identifier: Apache-2.0
"""The client's calls mean the same with the fake server and with a real one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from bench.stack.processes import free_ports
from controller.kube.api_resources import CONFIG_MAPS, DEPLOYMENTS, PODS, ApiResource
from controller.kube.client import Client, connect, decode_watch_events
from controller.kube.cluster_access import ClusterAccess
from controller.kube.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ResourceVersionExpired,
    Unauthorized,
    Unreachable,
)
from controller.kube.manager_metrics import observe_api_calls
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.objects import WIDGETS, config_map, define_widgets, widget

if TYPE_CHECKING:
    from controller.kube.client import WatchEvent
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube


async def test_an_object_is_created_read_and_deleted(client: Client, namespace: str) -> None:
    made = await client.create(CONFIG_MAPS, config_map(namespace))
    assert await client.get(CONFIG_MAPS, "one", namespace) == made
    assert made["metadata"]["uid"]
    assert await client.delete(CONFIG_MAPS, "one", namespace)
    assert await client.get_or_none(CONFIG_MAPS, "one", namespace) is None
    assert not await client.delete(CONFIG_MAPS, "one", namespace)


async def test_refusals_are_types(client: Client, kube: Kube, namespace: str) -> None:
    with pytest.raises(NotFound):
        await client.get(CONFIG_MAPS, "none", namespace)
    await client.create(CONFIG_MAPS, config_map(namespace))
    with pytest.raises(AlreadyExists):
        await client.create(CONFIG_MAPS, config_map(namespace))
    with pytest.raises(NotFound):
        await client.create(CONFIG_MAPS, config_map("no-such-namespace"))
    async with connect(kube.nobody, manager="nobody") as nobody:
        with pytest.raises(Forbidden) as refused:
            await nobody.list(CONFIG_MAPS, namespace)
    assert "configmaps" in refused.value.message
    wrong = {"token": "wrong"}
    async with connect(msgspec.structs.replace(kube.admin, **wrong), manager="wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.list(CONFIG_MAPS, namespace)


async def test_a_server_that_is_away_is_unreachable() -> None:
    (port,) = free_ports(1)
    async with connect(ClusterAccess(f"http://127.0.0.1:{port}"), manager="test") as client:
        with pytest.raises(Unreachable):
            await client.list(CONFIG_MAPS)
        assert not await client.is_ready()


async def test_calls_are_measured_by_verb_resource_and_class_of_status(kube: Kube, namespace: str) -> None:
    registry = CollectorRegistry()
    observed = observe_api_calls(registry)

    def counts() -> dict[tuple[str, str, str], float]:
        (family,) = registry.collect()
        names = ("verb", "resource", "code_class")
        found = [one for one in family.samples if one.name.endswith("_count")]
        return {tuple(one.labels[name] for name in names): one.value for one in found}  # type: ignore[misc]

    async with connect(kube.admin, manager="test", observed=observed) as client:
        made = await client.create(CONFIG_MAPS, config_map(namespace))
        same = client.as_manager("other")
        await same.merge_patch(CONFIG_MAPS, "one", namespace, {"data": {"colour": "blue"}})
        await client.get_or_none(CONFIG_MAPS, "one", namespace)
        await client.get_or_none(CONFIG_MAPS, "none", namespace)
        since = (await client.list(CONFIG_MAPS, namespace)).resource_version
        watch = client.watch(CONFIG_MAPS, namespace, since=made["metadata"]["resourceVersion"])
        await anext(watch)
        # it has begun, and goes on
        assert counts()["watch", "configmaps", "2xx"] == 1
        await watch.aclose()
        assert since
        assert await client.serves(DEPLOYMENTS)
        await client.delete(CONFIG_MAPS, "one", namespace)
    assert counts() == {
        ("create", "configmaps", "2xx"): 1,
        ("patch", "configmaps", "2xx"): 1,
        ("get", "configmaps", "2xx"): 1,
        ("get", "configmaps", "4xx"): 1,
        ("list", "configmaps", "2xx"): 1,
        ("watch", "configmaps", "2xx"): 1,
        ("get", "", "2xx"): 1,
        ("delete", "configmaps", "2xx"): 1,
    }
    (port,) = free_ports(1)
    async with connect(ClusterAccess(f"http://127.0.0.1:{port}"), manager="test", observed=observed) as away:
        with pytest.raises(Unreachable):
            await away.get(PODS, "one", namespace)
    assert counts()["get", "pods", "none"] == 1


async def test_a_write_based_on_an_old_version_is_a_conflict(client: Client, namespace: str) -> None:
    made = await client.create(CONFIG_MAPS, config_map(namespace))
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"data": {"colour": "blue"}})
    with pytest.raises(Conflict) as refused:
        await client.replace(CONFIG_MAPS, {**made, "data": {"colour": "green"}})
    assert not isinstance(refused.value, AlreadyExists)
    assert (await client.get(CONFIG_MAPS, "one", namespace))["data"] == {"colour": "blue"}


async def test_a_merge_patch_removes_what_is_null(client: Client, namespace: str) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, a="1", b="2"))
    left = await client.merge_patch(CONFIG_MAPS, "one", namespace, {"data": {"a": None, "c": "3"}})
    assert left["data"] == {"b": "2", "c": "3"}


async def test_a_write_that_changes_nothing_makes_no_version(client: Client, namespace: str) -> None:
    made = await client.apply(CONFIG_MAPS, config_map(namespace))
    again = await client.apply(CONFIG_MAPS, config_map(namespace))
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


async def test_a_long_list_comes_page_by_page(client: Client, namespace: str) -> None:
    for number in range(7):
        await client.create(CONFIG_MAPS, config_map(namespace, f"c-{number}"))
    listed = await client.list(CONFIG_MAPS, namespace, page=3)
    names = {item["metadata"]["name"] for item in listed.items}
    assert {f"c-{number}" for number in range(7)} <= names
    assert all((item["kind"], item["apiVersion"]) == ("ConfigMap", "v1") for item in listed.items)


async def test_labels_and_fields_select(client: Client, namespace: str) -> None:
    for name, colour in (("a", "red"), ("b", "blue"), ("c", "green")):
        thing = config_map(namespace, name)
        thing["metadata"]["labels"] = {"colour": colour, "test": "yes"}
        await client.create(CONFIG_MAPS, thing)

    async def named(labels: str, fields: str = "") -> set[str]:
        found = await client.list(CONFIG_MAPS, namespace, labels=labels, fields=fields)
        return {item["metadata"]["name"] for item in found.items}

    assert await named("colour=red") == {"a"}
    assert await named("test,colour!=red") == {"b", "c"}
    assert await named("colour in (red,blue)") == {"a", "b"}
    assert await named("test=yes,colour notin (red)") == {"b", "c"}
    assert await named("", "metadata.name=c") == {"c"}
    with pytest.raises(BadRequest):
        await named("!!")


async def test_a_watch_tells_changes_since_a_version(client: Client, namespace: str) -> None:
    since = (await client.list(CONFIG_MAPS, namespace)).resource_version
    await client.create(CONFIG_MAPS, config_map(namespace))
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"data": {"colour": "blue"}})
    await client.delete(CONFIG_MAPS, "one", namespace)
    seen: list[WatchEvent] = []
    async with asyncio.timeout(120):
        async for event in client.watch(CONFIG_MAPS, namespace, since=since, fields="metadata.name=one"):
            seen.append(event)
            if len(seen) == 3:
                break
    assert [event.type for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert seen[1].object["data"] == {"colour": "blue"}
    assert len({event.resource_version for event in seen}) == 3


async def test_what_stops_to_match_is_deleted_for_a_watch(client: Client, namespace: str) -> None:
    thing = config_map(namespace)
    thing["metadata"]["labels"] = {"colour": "red"}
    since = (await client.list(CONFIG_MAPS, namespace)).resource_version
    await client.create(CONFIG_MAPS, thing)
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"metadata": {"labels": {"colour": "blue"}}})
    kinds: list[str] = []
    async with asyncio.timeout(120):
        async for event in client.watch(CONFIG_MAPS, namespace, since=since, labels="colour=red"):
            kinds.append(event.type)
            if len(kinds) == 2:
                break
    assert kinds == ["ADDED", "DELETED"]


@FAKE
async def test_a_watch_from_a_forgotten_version_is_expired(client: Client, fake: FakeServer, namespace: str) -> None:
    since = (await client.list(CONFIG_MAPS, namespace)).resource_version
    fake.expire()
    with pytest.raises(ResourceVersionExpired):
        await anext(client.watch(CONFIG_MAPS, namespace, since=since))


@FAKE
async def test_a_list_whose_pages_expire_is_read_anew(client: Client, fake: FakeServer, namespace: str) -> None:
    for number in range(5):
        await client.create(CONFIG_MAPS, config_map(namespace, f"c-{number}"))
    fake.faults.refuse(1, 410, reason="ResourceVersionExpired", of=lambda call: call.verb == "list")
    assert len((await client.list(CONFIG_MAPS, namespace, page=2)).items) == 5


async def test_applying_merges_the_fields_of_managers(client: Client, namespace: str) -> None:
    await client.apply(CONFIG_MAPS, config_map(namespace, a="1"), manager="first")
    both = await client.apply(CONFIG_MAPS, config_map(namespace, b="2"), manager="second")
    assert both["data"] == {"a": "1", "b": "2"}
    with pytest.raises(Conflict) as refused:
        await client.apply(CONFIG_MAPS, config_map(namespace, a="9"), manager="second")
    assert "first" in refused.value.message
    forced = await client.apply(CONFIG_MAPS, config_map(namespace, a="9"), manager="second", force=True)
    assert forced["data"] == {"a": "9"}, "what it no longer applies is gone, what it forced is its own"


async def test_a_plain_write_owns_what_it_changed(client: Client, namespace: str) -> None:
    await client.apply(CONFIG_MAPS, config_map(namespace, a="1"), manager="first")
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"data": {"a": "2"}})
    with pytest.raises(Conflict):
        await client.apply(CONFIG_MAPS, config_map(namespace, a="1"), manager="first")


async def test_a_dry_run_changes_nothing(client: Client, namespace: str) -> None:
    await client.apply(CONFIG_MAPS, config_map(namespace), dry_run=True)
    assert await client.get_or_none(CONFIG_MAPS, "one", namespace) is None


async def test_custom_resources_are_checked_and_completed(client: Client, namespace: str) -> None:
    await define_widgets(client)
    made = await client.create(WIDGETS, widget(namespace, size=3))
    assert made["spec"] == {"size": 3, "colour": "red"}
    with pytest.raises(Invalid) as refused:
        await client.create(WIDGETS, widget(namespace, "two", size=99, colour="pink"))
    assert "spec.size" in refused.value.message
    assert "spec.colour" in refused.value.message
    with pytest.raises(Invalid):
        await client.create(WIDGETS, widget(namespace, "three"))
    with pytest.raises(BadRequest, match="unknown field"):
        await client.create(WIDGETS, widget(namespace, "four", size=1, sise=2))


async def test_the_status_is_written_apart(client: Client, namespace: str) -> None:
    await define_widgets(client)
    made = await client.create(WIDGETS, {**widget(namespace, size=3), "status": {"seen": 1}})
    assert "status" not in made
    assert made["metadata"]["generation"] == 1
    patch = {"spec": {"size": 4}, "status": {"seen": 2}}
    after_status = await client.merge_patch(WIDGETS, "one", namespace, patch, subresource="status")
    assert (after_status["spec"]["size"], after_status["status"]) == (3, {"seen": 2})
    assert after_status["metadata"]["generation"] == 1
    after_main = await client.merge_patch(WIDGETS, "one", namespace, {"spec": {"size": 5}, "status": {"seen": 9}})
    assert (after_main["spec"]["size"], after_main["status"]) == (5, {"seen": 2})
    assert after_main["metadata"]["generation"] == 2


async def test_conditions_of_two_managers_are_merged(client: Client, namespace: str) -> None:
    await define_widgets(client)
    await client.create(WIDGETS, widget(namespace, size=3))

    async def say(manager: str, kind: str) -> dict[str, Any]:
        thing = {**widget(namespace), "status": {"conditions": [{"type": kind, "status": "True"}]}}
        thing.pop("spec")
        return await client.apply(WIDGETS, thing, subresource="status", manager=manager)

    await say("first", "Ready")
    both = await say("second", "Seen")
    assert {one["type"] for one in both["status"]["conditions"]} == {"Ready", "Seen"}
    changed = await say("first", "Live")
    assert {one["type"] for one in changed["status"]["conditions"]} == {"Live", "Seen"}


async def test_a_finalizer_keeps_what_is_deleted(client: Client, namespace: str) -> None:
    thing = config_map(namespace)
    thing["metadata"]["finalizers"] = ["test.attache.dev/hold"]
    await client.create(CONFIG_MAPS, thing)
    await client.delete(CONFIG_MAPS, "one", namespace)
    held = await client.get(CONFIG_MAPS, "one", namespace)
    assert held["metadata"]["deletionTimestamp"]
    await client.merge_patch(CONFIG_MAPS, "one", namespace, {"metadata": {"finalizers": None}})
    assert await client.get_or_none(CONFIG_MAPS, "one", namespace) is None


async def test_what_is_owned_goes_with_its_owner(client: Client, namespace: str) -> None:
    owner = await client.create(CONFIG_MAPS, config_map(namespace, "owner"))
    owned = config_map(namespace, "owned")
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    owned["metadata"]["ownerReferences"] = [reference]
    await client.create(CONFIG_MAPS, owned)
    await client.delete(CONFIG_MAPS, "owner", namespace)

    async def gone() -> bool:
        return await client.get_or_none(CONFIG_MAPS, "owned", namespace) is None

    await eventually(gone)


async def test_a_deletion_can_name_the_object_it_means(client: Client, namespace: str) -> None:
    made = await client.create(CONFIG_MAPS, config_map(namespace))
    with pytest.raises(Conflict):
        await client.delete(CONFIG_MAPS, "one", namespace, uid="another")
    assert await client.delete(CONFIG_MAPS, "one", namespace, uid=made["metadata"]["uid"])


async def test_a_pod_without_a_node_goes_at_once(client: Client, namespace: str) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one", "namespace": namespace},
        "spec": {
            "containers": [{"name": "c", "image": "none"}],
            "schedulerName": "nobody",
            "automountServiceAccountToken": False,
        },
    }

    async def accepted() -> bool:
        try:
            await client.create(PODS, pod)
        except Forbidden:  # the namespace's service account is not there yet
            return False
        return True

    await eventually(accepted)
    assert (await client.get(PODS, "one", namespace))["status"]["phase"] == "Pending"
    await client.delete(PODS, "one", namespace)
    assert await client.get_or_none(PODS, "one", namespace) is None


async def test_an_unknown_kind_is_not_found(client: Client, namespace: str) -> None:
    with pytest.raises(NotFound):
        await client.list(ApiResource("nothing.attache.dev", "v1", "nothings", "Nothing"), namespace)
    assert (await client.list(DEPLOYMENTS, namespace)).items == []


async def test_a_watch_can_begin_with_what_is_there(kube: Kube, client: Client, namespace: str) -> None:
    """Other clients than ours list in this way."""
    await client.create(CONFIG_MAPS, config_map(namespace))
    query = {
        "watch": "true",
        "sendInitialEvents": "true",
        "allowWatchBookmarks": "true",
        "resourceVersionMatch": "NotOlderThan",
        "fieldSelector": "metadata.name=one",
        "timeoutSeconds": "5",
    }
    url = f"{kube.admin.server}{CONFIG_MAPS.path(namespace)}"
    seen: list[tuple[str, bool]] = []
    async with (
        aiohttp.ClientSession(headers=kube.admin.headers()) as http,
        http.get(url, params=query, ssl=kube.admin.tls() or False) as answer,
    ):
        async for event in decode_watch_events(answer.content.iter_any()):
            seen.append((event.type, "annotations" in event.object["metadata"]))
            if len(seen) == 2:
                break
    assert seen == [("ADDED", False), ("BOOKMARK", True)]
