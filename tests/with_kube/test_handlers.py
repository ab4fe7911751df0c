# SPDX-License-Identifier: Apache-2.0
"""kopf in a thread of its own: events of custom resources ring, nothing is written, and it never ends in silence."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

import pytest

from controller.kube.informer import Informer, InformerTiming
from controller.kube.kopf_thread import KopfEnded, KopfOperator
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.objects import WIDGETS, define_widgets, widget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.client import Client
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube


class Bell:
    """What has rung, and in which thread."""

    def __init__(self) -> None:
        self.rung: list[tuple[str, str]] = []
        self.threads: set[int] = set()

    def __call__(self, kind: str, key: str) -> None:
        self.rung.append((kind, key))
        self.threads.add(threading.get_ident())


@contextlib.asynccontextmanager
async def following(kube: Kube, bell: Bell, namespace: str) -> AsyncIterator[KopfOperator]:
    handlers = KopfOperator(kube.admin, [WIDGETS], bell, namespace=namespace)
    task = asyncio.create_task(handlers.run())
    try:
        await eventually(handlers.ready.is_set)
        yield handlers
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_each_event_rings_in_our_thread_and_nothing_is_written(
    client: Client, kube: Kube, namespace: str
) -> None:
    await define_widgets(client)
    before = await client.create(WIDGETS, widget(namespace, "old", size=1))
    bell = Bell()
    async with following(kube, bell, namespace):
        await eventually(lambda: bell.rung == [("Widget", f"{namespace}/old")])
        await client.create(WIDGETS, widget(namespace, "new", size=1))
        await eventually(lambda: bell.rung[1:] == [("Widget", f"{namespace}/new")])
        await client.merge_patch(WIDGETS, "new", namespace, {"spec": {"size": 2}})
        await eventually(lambda: len(bell.rung) == 3)
        await client.delete(WIDGETS, "new", namespace)
        await eventually(lambda: len(bell.rung) == 4)
    assert bell.threads == {threading.get_ident()}
    after = await client.get(WIDGETS, "old", namespace)
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


async def test_a_thread_that_ends_by_itself_is_an_error(kube: Kube) -> None:
    handlers = KopfOperator(kube.admin, [WIDGETS], Bell())

    async def operate(_: object) -> None:
        raise RuntimeError("nobody expects this")

    handlers.run_in_kopf_thread = operate  # type: ignore[method-assign]
    with pytest.raises(KopfEnded) as caught:
        await handlers.run()
    assert "nobody expects this" in str(caught.value.__cause__)


@FAKE
async def test_an_api_server_that_refuses_is_asked_again(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await define_widgets(client)
    fake.faults.refuse(12, 500, of=lambda call: call.target.kind.resource == WIDGETS)
    bell = Bell()
    async with following(kube, bell, namespace):
        fake.watches.drop()
        fake.faults.heal()
        await client.create(WIDGETS, widget(namespace, size=1))
        await eventually(lambda: ("Widget", f"{namespace}/one") in bell.rung)


@FAKE
async def test_kopf_does_not_tell_of_a_deletion_that_nobody_watched_and_the_informer_does(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    """Why kopf rings and informers know: docs/decisions/0020."""
    await define_widgets(client)
    for name in ("gone", "kept"):
        await client.create(WIDGETS, widget(namespace, name, size=1))
    bell = Bell()
    informer = Informer(client, WIDGETS, timing=InformerTiming(backoff_s=0.01, backoff_max_s=0.05))
    followed = asyncio.create_task(informer.run())
    try:
        async with following(kube, bell, namespace):
            await eventually(lambda: len(bell.rung) == 2 and len(informer.objects) == 2)
            # no watch can be opened for a moment, and what happened meanwhile is forgotten
            fake.faults.refuse(10_000, 500, of=lambda call: call.verb == "watch")
            fake.watches.drop()
            await client.delete(WIDGETS, "gone", namespace)
            fake.expire()
            fake.faults.heal()
            await eventually(lambda: list(informer.objects) == [f"{namespace}/kept"])
            # kopf has listed anew by the time at which it tells of the next change
            await client.merge_patch(WIDGETS, "kept", namespace, {"spec": {"size": 2}})
            told = ("Widget", f"{namespace}/kept")
            await eventually(lambda: told in bell.rung[2:])
            assert ("Widget", f"{namespace}/gone") not in bell.rung[2:]
    finally:
        followed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await followed
