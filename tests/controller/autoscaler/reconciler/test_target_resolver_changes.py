# SPDX-License-Identifier: Apache-2.0
"""Which changes of objects make targets be resolved anew, and which ModelServers select their pods."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from controller.autoscaler.reconciler.informers import ScalingInformers
from controller.autoscaler.reconciler.target_resolver import selecting_servers
from controller.kube.api_resources import MODEL_SERVERS, ApiResource, Object
from controller.kube.client import Client, ObjectList, WatchEvent
from controller.kube.shared_informers import InformerSet, SharedInformers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def server(name: str, selector: dict[str, str], version: int, port: int = 8000, **status: str) -> Object:
    metadata = {"name": name, "namespace": "default", "uid": name, "resourceVersion": f"{version}"}
    spec = {"model": "m", "workloadSelector": {"matchLabels": selector}, "workloadPort": {"port": port}}
    return {"metadata": metadata, "spec": spec, "status": status}


class FakeClient:
    """Lists ModelServers and tells their changes; there is nothing else."""

    def __init__(self, servers: list[Object]) -> None:
        self.servers = servers
        self.events = asyncio.Queue[WatchEvent]()

    async def list(self, resource: ApiResource, *_: object, **__: object) -> ObjectList:
        return ObjectList(self.servers if resource == MODEL_SERVERS else [], "1")

    async def watch(self, resource: ApiResource, *_: object, **__: object) -> AsyncIterator[WatchEvent]:
        assert resource == MODEL_SERVERS
        while True:
            yield await self.events.get()
            self.events.task_done()


@contextlib.asynccontextmanager
async def following(client: FakeClient) -> AsyncIterator[ScalingInformers]:
    kube = cast("Client", client)
    found = ScalingInformers(kube, InformerSet(SharedInformers(kube)), lambda _: None)
    task = asyncio.create_task(found._servers.run())
    await found._servers.synced.wait()
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def told(client: FakeClient, kind: str, thing: Object) -> None:
    client.events.put_nowait(WatchEvent(kind, thing))
    await client.events.join()


async def test_a_status_of_a_model_server_resolves_no_target_anew() -> None:
    client = FakeClient([server("a", {"app": "x"}, 1)])
    async with following(client) as followed:
        version = followed.servers_version
        await told(client, "MODIFIED", server("a", {"app": "x"}, 2, phase="Ready"))
        assert followed.servers_version == version
        await told(client, "MODIFIED", server("a", {"app": "y"}, 3))
        assert followed.servers_version == version + 1
        await told(client, "DELETED", server("a", {"app": "y"}, 4))
        assert followed.servers_version == version + 2


async def test_servers_are_found_by_the_labels_of_pods() -> None:
    both = {"app": "x", "role": "p"}
    client = FakeClient([server("a", {"app": "x"}, 1), server("b", both, 2), server("c", {"app": "y"}, 3)])
    async with following(client) as followed:
        assert followed.servers_selecting("default", both) == [("default/a", {"app": "x"}), ("default/b", both)]
        assert followed.servers_selecting("default", {"app": "x"}) == [("default/a", {"app": "x"})]
        assert not followed.servers_selecting("other", both)
        await told(client, "MODIFIED", server("a", {"app": "y"}, 4))
        assert followed.servers_selecting("default", {"app": "x"}) == []
        assert len(followed.servers_selecting("default", {"app": "y"})) == 2


async def test_a_target_has_the_demand_of_all_ports_of_its_pods() -> None:
    pods = {"app": "x", "role": "p"}
    listed = [
        server("iris", pods, 1),
        server("iris.grpc", pods, 2, port=8001),
        # of other pods, too; and the same engines once more
        server("all", {"app": "x"}, 3, port=8001),
        server("other", pods, 4),
        server("elsewhere", {"app": "y"}, 5, port=8001),
    ]
    async with following(FakeClient(listed)) as followed:
        assert selecting_servers(followed, "default", [pods]) == ("default/iris", "default/iris.grpc")
        assert selecting_servers(followed, "default", [{"app": "x"}]) == ("default/all",)
        assert selecting_servers(followed, "default", [{"app": "z"}]) == ()
