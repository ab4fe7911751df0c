# SPDX-License-Identifier: Apache-2.0
"""The gateway role against API servers: what objects say is in the directory at once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from attache.__main__ import main
from bench.cluster.local_control_plane import write_kubeconfig
from controller.gateway.compile.compiler import Compiler
from controller.gateway.directory_writer import DirectoryWriter
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    CONFIG_MAPS,
    EVENTS,
    GATEWAY_CONFIGS,
    MODEL_ACCESS_POLICIES,
    MODEL_ROUTES,
    MODEL_SERVERS,
    PODS,
    ApiResource,
)
from controller.kube.client import connect
from controller.kube.errors import ClusterError
from controller.kube.informer import InformerTiming
from controller.kube.leader_election import LeaderElection
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_directory
from extproc.api.status_page_contents import REPORT_PATH, ConfigReport
from tests.kube_objects import Object, picker_config, route, server
from tests.waiting import eventually
from tests.with_kube.managing import define_kinds
from tests.with_kube.pods import make_pod, set_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from pathlib import Path

    from controller.gateway.directory_writer import WrittenFiles
    from controller.kube.client import Client
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_server import ModelServer
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube

IMPATIENT = InformerTiming(backoff_s=0.05, backoff_max_s=0.2, silence_s=1.0)


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    """A client of a server that has our kinds."""
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        yield one


@contextlib.asynccontextmanager
async def serving(
    client: Client,
    namespace: str,
    folder: Path,
    identity: str = "a",
    *,
    extproc: str | None = None,
    config: str | None = None,
) -> AsyncIterator[GatewayRunner]:
    """A role that has written its directory once. ``extproc``: where to ask what is in use. ``config``: the
    GatewayConfig to serve, as ``namespace/name``.
    """
    async with connect(client.access, manager=CONTROLLER) as own:
        election = LeaderElection(own, namespace=namespace, name="gateway", identity=identity)
        settings = GatewaySettings(
            config=folder,
            namespace=namespace,
            gateway_config=config,
            consumers={} if extproc is None else {"extproc": extproc},
            grace_s=0.3,
        )
        role = GatewayRunner(own, settings, GatewayMetrics(), election=election, timing=IMPATIENT)
        task = asyncio.create_task(role.run())
        try:
            async with asyncio.timeout(120):
                await role.ready.wait()
            yield role
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def read(folder: Path) -> Snapshot | None:
    """What extproc makes of the directory; None while files of two states lie side by side."""
    try:
        return load_directory(folder)
    except ConfigInvalid:
        return None


def served(folder: Path, name: str = "llama") -> ModelServer | None:
    snapshot = read(folder)
    return next((one for one in snapshot.servers if one.metadata.name == name), None) if snapshot else None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def addresses(folder: Path, name: str = "llama") -> list[str] | None:
    found = served(folder, name)
    return None if found is None else [one.address for one in found.spec.endpoints]


async def conditions(client: Client, resource: ApiResource, name: str, namespace: str) -> dict[str, tuple[str, str]]:
    thing = await client.get(resource, name, namespace)
    found: list[Any] = (thing.get("status") or {}).get("conditions") or []
    return {one["type"]: (one["status"], one["reason"]) for one in found}


async def create(client: Client, *things: Object) -> None:
    kinds = (MODEL_SERVERS, MODEL_ROUTES, MODEL_ACCESS_POLICIES, GATEWAY_CONFIGS, PODS, CONFIG_MAPS)
    resources = {one.kind: one for one in kinds}
    for thing in things:
        sent = {**thing, "metadata": {**thing["metadata"]}}
        for field in ("creationTimestamp", "generation"):
            sent["metadata"].pop(field, None)
        await client.create(resources[thing["kind"]], sent)


async def test_objects_become_a_directory_and_say_so(client: Client, namespace: str, tmp_path: Path) -> None:
    await create(client, server(namespace=namespace), route(namespace=namespace))
    async with serving(client, namespace, tmp_path) as role:
        assert addresses(tmp_path) == []
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
        await make_pod(client, namespace, "b", "127.0.1.2", ready=False)
        await make_pod(client, namespace, "other", "127.0.1.3", app="other")
        await set_ready(client, namespace, "b")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000", "127.0.1.2:8000"])

        async def are_told() -> bool:
            thing = await client.get(MODEL_SERVERS, "llama", namespace)
            found = await conditions(client, MODEL_SERVERS, "llama", namespace)
            # the status that tells of the first pod alone may come before that of both
            return found.get("Available") == ("True", "Available") and thing["status"]["ready"] == 2

        await eventually(are_told)
        assert (await conditions(client, MODEL_ROUTES, "llama", namespace))["Programmed"][0] == "True"
        events = await client.list(EVENTS, namespace)
        assert {one["involvedObject"]["name"] for one in events.items if one["source"].get("component")} >= {"llama"}
        writes = role.status_write_count
        await client.merge_patch(MODEL_SERVERS, "llama", namespace, {"metadata": {"labels": {"team": "blue"}}})
        await asyncio.sleep(0.5)
        assert role.status_write_count == writes, "a settled object causes no write"


async def test_a_deleted_server_in_use_is_503_and_the_route_says_why(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    await create(client, server(namespace=namespace), route(namespace=namespace))
    async with serving(client, namespace, tmp_path):
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
        await client.delete(MODEL_SERVERS, "llama", namespace)
        await eventually(lambda: addresses(tmp_path) == [])

        async def says_why() -> bool:
            found = await conditions(client, MODEL_ROUTES, "llama", namespace)
            return found.get("ResolvedRefs") == ("False", "BackendNotFound")

        await eventually(says_why)


async def test_a_server_that_the_schema_takes_and_we_do_not_is_told(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    bad = server("bad", namespace=namespace, flowControl={"saturation": {"maxWait": "0s"}})
    await create(client, bad, server(namespace=namespace))
    async with serving(client, namespace, tmp_path):
        assert addresses(tmp_path, "bad") is None
        assert addresses(tmp_path) == []

        async def is_refused() -> bool:
            found = await conditions(client, MODEL_SERVERS, "bad", namespace)
            return found.get("Accepted") == ("False", "Invalid")

        await eventually(is_refused)


class Reporting:
    """Somebody who follows the directory ``folder`` and says what it uses of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.refused = ""
        self.warming = frozenset[str]()
        self.is_stuck = False
        self._used: dict[str, str] = {}

    async def _report(self, _: web.Request) -> web.Response:
        if not self.refused and not self.is_stuck and (snapshot := read(self._folder)) is not None:
            self._used = dict(snapshot.digests)
        report = ConfigReport(files=self._used, refused=self.refused, warming=self.warming)
        return web.Response(body=msgspec.json.encode(report))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get(REPORT_PATH, self._report)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield "{}:{}".format(*runner.addresses[0])
        await runner.cleanup()


async def test_programmed_is_what_extproc_uses(client: Client, namespace: str, tmp_path: Path) -> None:
    extproc = Reporting(tmp_path)

    async def said(name: str) -> tuple[str, str] | None:
        return (await conditions(client, MODEL_SERVERS, name, namespace)).get("Programmed")

    async with (
        extproc.serving() as address,
        serving(client, namespace, tmp_path, extproc=address),
    ):
        await create(client, server(namespace=namespace))
        await until_said(said, "llama", ("True", "Programmed"))
        extproc.refused = "modelserver.x.json: a mistake"
        await create(client, server("qwen", namespace=namespace))
        await until_said(said, "qwen", ("False", "Refused"))
        assert await said("llama") == ("True", "Programmed")
        extproc.refused = ""
        await until_said(said, "qwen", ("True", "Programmed"))
        events = await client.list(EVENTS, namespace)
        found = [one["message"] for one in events.items if one["involvedObject"]["name"] == "qwen"]
        assert "extproc does not use it: modelserver.x.json: a mistake" in found


async def test_a_server_is_available_once_extproc_uses_its_first_engine(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    extproc = Reporting(tmp_path)

    async def said(name: str) -> tuple[str, str] | None:
        return (await conditions(client, MODEL_SERVERS, name, namespace)).get("Available")

    async with extproc.serving() as address, serving(client, namespace, tmp_path, extproc=address):
        await create(client, server(namespace=namespace))
        await until_said(said, "llama", ("False", "NoPods"))
        extproc.warming = frozenset({f"{namespace}/llama"})
        await make_pod(client, namespace, "a", "127.0.1.1")
        await until_said(said, "llama", ("Unknown", "Pending"))
        extproc.warming = frozenset()
        await until_said(said, "llama", ("True", "Available"))
        # another one warms up nothing
        extproc.refused = "modelserver.x.json: a mistake"
        await make_pod(client, namespace, "b", "127.0.1.2")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000", "127.0.1.2:8000"])
        assert await said("llama") == ("True", "Available")


async def test_a_file_that_cannot_be_written_holds_others_up_no_longer_than_its_object_is_there(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, bad, failures = DirectoryWriter.write, f"modelserver.{namespace}.bad.json", list[str]()

    def write_unless_bad(self: DirectoryWriter, files: Mapping[str, bytes]) -> WrittenFiles:
        if bad in files:
            failures.append(bad)
            raise OSError(errno.ENAMETOOLONG, "File name too long", bad)
        return write(self, files)

    monkeypatch.setattr(DirectoryWriter, "write", write_unless_bad)
    async with serving(client, namespace, tmp_path):
        await create(client, server("bad", namespace=namespace), server("good", namespace=namespace))
        await eventually(lambda: bool(failures))
        await client.delete(MODEL_SERVERS, "bad", namespace)
        await eventually(lambda: served(tmp_path, "good") is not None)


async def test_render_shows_what_the_role_writes(
    client: Client, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", client.access)))
    await create(client, server(namespace=namespace), route(namespace=namespace))
    await make_pod(client, namespace, "a", "127.0.1.1")
    async with serving(client, namespace, tmp_path / "role"):
        await eventually(lambda: addresses(tmp_path / "role") == ["127.0.1.1:8000"])
        words = ["render", "--cluster", "--namespace", namespace, "--out", str(tmp_path / "out")]
        status = await asyncio.to_thread(main, words)
        assert contents(tmp_path / "out" / "config") == contents(tmp_path / "role")
    assert status == 0


async def until_said(
    said: Callable[[str], Awaitable[tuple[str, str] | None]], name: str, expected: tuple[str, str]
) -> None:
    async def is_said() -> bool:
        return await said(name) == expected

    await eventually(is_said)


async def test_only_the_leader_writes_statuses_and_all_write_their_directories(
    client: Client, namespace: str, tmp_path: Path
) -> None:
    async with (
        serving(client, namespace, tmp_path / "one", "one") as one,
        serving(client, namespace, tmp_path / "two", "two") as two,
    ):
        await create(client, server(namespace=namespace))
        await eventually(lambda: addresses(tmp_path / "one") == [] and addresses(tmp_path / "two") == [])
        await eventually(lambda: one.status_write_count + two.status_write_count >= 1)
        assert 0 in (one.status_write_count, two.status_write_count)


async def test_what_happened_while_it_was_away_is_made_up_for(client: Client, namespace: str, tmp_path: Path) -> None:
    await create(client, server(namespace=namespace), server("gone", namespace=namespace))
    async with serving(client, namespace, tmp_path):
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
    await client.delete(MODEL_SERVERS, "gone", namespace)
    await make_pod(client, namespace, "b", "127.0.1.2")
    assert addresses(tmp_path) == ["127.0.1.1:8000"], "the directory outlives the role"
    async with serving(client, namespace, tmp_path):
        assert addresses(tmp_path) == ["127.0.1.1:8000", "127.0.1.2:8000"]
        assert addresses(tmp_path, "gone") is None


async def test_while_the_api_server_is_away_the_directory_stays(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    await create(client, server(namespace=namespace))
    async with serving(client, namespace, tmp_path):
        await make_pod(client, namespace, "a", "127.0.1.1")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000"])
        if kube.plane is not None:
            await kube.plane.stop_api()
            await asyncio.sleep(1)
            assert addresses(tmp_path) == ["127.0.1.1:8000"]
            await kube.plane.restart_api()
        else:
            fake = only_fake(kube)
            fake.faults.refuse(10, 500)
            fake.watches.drop()
            await asyncio.sleep(0.3)
            assert addresses(tmp_path) == ["127.0.1.1:8000"]
            fake.faults.heal()
        await make_pod(client, namespace, "b", "127.0.1.2")
        await eventually(lambda: addresses(tmp_path) == ["127.0.1.1:8000", "127.0.1.2:8000"])


@pytest.mark.parametrize("kube", ["fake"], indirect=True)
@pytest.mark.parametrize("seed", range(4))
async def test_churn_with_faults_ends_as_a_fresh_compilation_does(
    client: Client, kube: Kube, namespace: str, tmp_path: Path, seed: int
) -> None:
    """Lost and frozen watches, 410, errors, and the role killed and started again, in any order."""
    fake, rng = only_fake(kube), random.Random(seed)
    for _ in range(10):
        async with serving(client, namespace, tmp_path, f"role-{rng.random()}"):
            for _ in range(rng.randrange(5, 25)):
                await change(client, namespace, rng)
                disturb(fake, rng)
                if rng.random() < 0.3:
                    await asyncio.sleep(0.02)
            fake.faults.heal()
        await change(client, namespace, rng)
    async with serving(client, namespace, tmp_path):
        pass
    compiler = Compiler()
    for kind in (MODEL_SERVERS, MODEL_ROUTES, PODS, CONFIG_MAPS):
        for thing in (await client.list(kind, namespace)).items:
            compiler.update_object(kind.kind, f"{namespace}/{thing['metadata']['name']}", thing)
    assert contents(tmp_path) == compiler.compile().files


async def change(client: Client, namespace: str, rng: random.Random) -> None:
    """Something is made, changed or deleted."""
    name = rng.choice("abc")
    kind = rng.choice(["server", "route", "pod", "pod", "picker", "delete"])
    with contextlib.suppress(ClusterError):
        if kind == "server":
            await create(client, server(name, namespace=namespace, app=rng.choice("xy")))
        elif kind == "route":
            await create(client, route(name, rng.choice("abc"), namespace=namespace, model=rng.choice("mn")))
        elif kind == "pod":
            await make_pod(client, namespace, name, f"127.0.2.{rng.randrange(1, 9)}", app=rng.choice("xy"))
        elif kind == "picker":
            await create(client, picker_config(name, "nonsense", namespace=namespace))
        else:
            gone = rng.choice([MODEL_SERVERS, MODEL_ROUTES, PODS, CONFIG_MAPS])
            await client.delete(gone, name, namespace, grace_s=0)


def disturb(fake: FakeServer, rng: random.Random) -> None:
    match rng.randrange(8):
        case 0:
            fake.watches.drop()
        case 1:
            fake.expire()
            fake.watches.drop()
        case 2:
            fake.watches.expire()
        case 3:
            fake.faults.freeze()
        case 4:
            fake.faults.heal()
        case 5:
            fake.faults.refuse(2, 500)


def only_fake(kube: Kube) -> FakeServer:
    assert kube.fake is not None
    return kube.fake
