# SPDX-License-Identifier: Apache-2.0
"""An informer's copy is that of the server, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from typing import TYPE_CHECKING

import pytest

from controller.kube.api_resources import CONFIG_MAPS, ApiResource
from controller.kube.errors import NotFound, ServerError
from controller.kube.informer import Informer, InformerTiming, Selection
from controller.kube.shared_informers import InformerSet, SharedInformers
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE, REAL
from tests.with_kube.objects import config_map

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.client import Client
    from tests.fake_api.server import ApiCall, FakeServer
    from tests.with_kube.kubes import Kube

QUICK = InformerTiming(backoff_s=0.05, backoff_max_s=0.2, silence_s=1.0, resync_s=0)


@contextlib.asynccontextmanager
async def following(client: Client, namespace: str, timing: InformerTiming = QUICK) -> AsyncIterator[Informer]:
    """An informer of what the tests make that has its first list."""
    chosen = Selection(namespace=namespace, labels="!root")
    informer = Informer(client, CONFIG_MAPS, chosen, timing=timing, rng=Random(1))
    task = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(120):
            await informer.synced.wait()
        yield informer
    finally:
        task.cancel()
        await asyncio.wait([task])


def names(informer: Informer) -> set[str]:
    found = {key.split("/")[1] for key in informer.objects}
    return found - {"kube-root-ca.crt"}


def is_watch(call: ApiCall) -> bool:
    return call.verb == "watch"


async def test_it_has_what_was_there_and_follows_what_comes(client: Client, namespace: str) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, "before"))
    async with following(client, namespace) as informer:
        assert names(informer) == {"before"}
        changed: list[str] = []
        informer.subscribe(changed.append)
        await client.create(CONFIG_MAPS, config_map(namespace, "after"))
        await eventually(lambda: names(informer) == {"before", "after"})
        await client.merge_patch(CONFIG_MAPS, "after", namespace, {"data": {"colour": "blue"}})
        await eventually(lambda: (informer.get(f"{namespace}/after") or {})["data"] == {"colour": "blue"})
        await client.delete(CONFIG_MAPS, "before", namespace)
        await eventually(lambda: names(informer) == {"after"})
        mine = [key for key in changed if "kube-root" not in key]
        assert mine == [f"{namespace}/after", f"{namespace}/after", f"{namespace}/before"]
        assert informer.lists == 1


async def test_a_watch_that_the_server_ends_goes_on_where_it_was(client: Client, kube: Kube, namespace: str) -> None:
    timing = InformerTiming(backoff_s=0.05, backoff_max_s=0.2, watch_s=1, resync_s=0)
    async with following(client, namespace, timing) as informer:
        await asyncio.sleep(1.5)  # a real server ends watches by whole seconds
        await client.create(CONFIG_MAPS, config_map(namespace, "late"))
        await eventually(lambda: names(informer) == {"late"})
        assert informer.lists == 1
    if kube.fake is not None:
        watches = kube.fake.watches
        await eventually(lambda: len(watches) == 0)


@FAKE
async def test_a_deletion_without_a_watch_is_found_by_the_next_list(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, "ghost"))
    await client.create(CONFIG_MAPS, config_map(namespace, "stays"))
    async with following(client, namespace) as informer:
        changed: list[str] = []
        fake.faults.refuse(1000, 503, of=is_watch)
        fake.watches.drop()
        await client.delete(CONFIG_MAPS, "ghost", namespace)
        fake.expire()
        informer.subscribe(changed.append)
        fake.faults.heal()
        await eventually(lambda: names(informer) == {"stays"})
        assert changed == [f"{namespace}/ghost"], "what did not change is not told"
        assert informer.lists == 2


@FAKE
async def test_what_is_listed_once_is_not_watched_and_only_optional_kinds_may_be_missing(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, "one"))
    unknown = ApiResource("nobody.dev", "v1", "widgets", "Widget")
    cache = InformerSet(SharedInformers(client), namespace)
    informer, missing = cache.add(CONFIG_MAPS), cache.add(unknown, optional=True)
    fake.faults.refuse(1, 500, of=is_watch)
    await cache.list_once()
    assert "one" in names(informer)
    assert not cache.is_synced(missing)
    # the first watch of all
    with pytest.raises(ServerError):
        await anext(client.watch(CONFIG_MAPS, namespace, since="1"))
    cache.add(unknown)
    with pytest.raises(NotFound):
        await cache.list_once()


@FAKE
async def test_what_several_take_is_watched_once_until_the_last_gives_it_back(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    shared = SharedInformers(client, QUICK)
    one = shared.acquire(CONFIG_MAPS, Selection(namespace))
    task = asyncio.create_task(shared.run())
    try:
        elsewhere = shared.acquire(CONFIG_MAPS, Selection("elsewhere"))
        assert shared.acquire(CONFIG_MAPS, Selection(namespace)) is one
        await eventually(lambda: len(fake.watches) == 2)
        shared.release(elsewhere)
        shared.release(one)
        await eventually(lambda: len(fake.watches) == 1)
        await client.create(CONFIG_MAPS, config_map(namespace, "late"))
        await eventually(lambda: names(one) == {"late"})
        shared.release(one)
        await eventually(lambda: len(fake.watches) == 0)
        assert shared.acquire(CONFIG_MAPS, Selection(namespace)) is not one, "what has ended is not used again"
    finally:
        task.cancel()
        await asyncio.wait([task])


@FAKE
async def test_an_expired_watch_lists_anew(client: Client, fake: FakeServer, namespace: str) -> None:
    async with following(client, namespace) as informer:
        await eventually(lambda: len(fake.watches) == 1)
        fake.watches.expire()
        await eventually(lambda: informer.lists == 2)
        await client.create(CONFIG_MAPS, config_map(namespace, "one"))
        await eventually(lambda: names(informer) == {"one"})


@FAKE
async def test_a_frozen_watch_is_opened_anew(client: Client, fake: FakeServer, namespace: str) -> None:
    async with following(client, namespace) as informer:
        await eventually(lambda: len(fake.watches) == 1)
        (frozen,) = fake.watches.open
        fake.faults.freeze()
        await client.create(CONFIG_MAPS, config_map(namespace, "one"))
        # the old watch stays frozen; its successor gets what it missed
        await eventually(lambda: frozen not in fake.watches.open)
        assert names(informer) == set()
        fake.faults.heal()
        await eventually(lambda: names(informer) == {"one"})
        assert informer.lists == 1


@FAKE
async def test_a_refused_list_is_asked_for_again(client: Client, fake: FakeServer, namespace: str) -> None:
    fake.faults.refuse(2, 500)
    fake.faults.refuse(1, 429, reason="TooManyRequests", retry_after_s=1)
    async with following(client, namespace) as informer:
        assert informer.lists == 1


@FAKE
async def test_watches_that_end_at_once_are_not_asked_for_without_pause(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    timing = InformerTiming(backoff_s=0.3, backoff_max_s=5.0, resync_s=0)
    clock = asyncio.get_running_loop().time
    async with following(client, namespace, timing) as informer:
        before, began_s = fake.requests, clock()
        for _ in range(20):
            fake.watches.drop()
            await asyncio.sleep(0.02)
        # a pause of at least 0.15 s after each
        assert fake.requests - before <= 2 + (clock() - began_s) / 0.15
        await client.create(CONFIG_MAPS, config_map(namespace, "one"))
        await eventually(lambda: names(informer) == {"one"})


@FAKE
async def test_watches_that_end_after_each_event_are_not_asked_for_without_pause(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    """A proxy that cuts what it has sent, in front of a cluster in which much happens."""
    timing = InformerTiming(backoff_s=0.3, backoff_max_s=5.0, resync_s=0)
    async with following(client, namespace, timing) as informer:
        opened, took_s = await stormed(client, fake, namespace, fake.watches.drop)
        # a pause of at least 0.15 s after each
        assert opened <= 2 + took_s / 0.15
        await eventually(lambda: len(names(informer)) == 60)
        assert informer.lists == 1


@FAKE
async def test_lists_are_asked_for_ever_less_often_while_watches_expire(
    client: Client, fake: FakeServer, namespace: str
) -> None:
    """A server that forgets at once, in front of a cluster in which much happens: each time all objects are listed."""
    timing = InformerTiming(backoff_s=0.02, backoff_max_s=2.0, resync_s=0)
    async with following(client, namespace, timing) as informer:
        _, took_s = await stormed(client, fake, namespace, fake.watches.expire)
        # 0.01 to 0.02 s, then twice as long after each, up to 1 to 2 s
        assert informer.lists <= 10 + took_s
        await eventually(lambda: len(names(informer)) == 60)


async def stormed(client: Client, fake: FakeServer, namespace: str, ends: Callable[[], None]) -> tuple[int, float]:
    """Sixty objects are made, and after each all watches end. How many other calls there were, and how long it took."""
    clock = asyncio.get_running_loop().time
    before, began_s = fake.requests, clock()
    for number in range(60):
        await client.create(CONFIG_MAPS, config_map(namespace, f"made-{number}"))
        await asyncio.sleep(0.01)
        ends()
        await asyncio.sleep(0.01)
    return fake.requests - before - 60, clock() - began_s


async def test_a_resync_tells_all_keys(client: Client, namespace: str) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, "one"))
    timing = InformerTiming(resync_s=0.1)
    async with following(client, namespace, timing) as informer:
        told: list[str] = []
        informer.subscribe(told.append)
        await eventually(lambda: told.count(f"{namespace}/one") >= 2)


@REAL
async def test_it_survives_an_outage_of_the_server(client: Client, plane: ControlPlane, namespace: str) -> None:
    await client.create(CONFIG_MAPS, config_map(namespace, "before"))
    async with following(client, namespace) as informer:
        await plane.stop_api()
        await plane.restart_api()
        await client.create(CONFIG_MAPS, config_map(namespace, "after"))
        await eventually(lambda: names(informer) == {"before", "after"})


@REAL
async def test_it_survives_a_frozen_server(client: Client, plane: ControlPlane, namespace: str) -> None:
    async with following(client, namespace) as informer:
        heard = informer.since_last_event_s()
        assert heard is not None
        plane.freeze_api()
        try:
            await eventually(lambda: (informer.since_last_event_s() or 0.0) > heard + QUICK.silence_s + 0.5)
        finally:
            plane.thaw_api()
        await client.create(CONFIG_MAPS, config_map(namespace, "after"))
        await eventually(lambda: names(informer) == {"after"})
