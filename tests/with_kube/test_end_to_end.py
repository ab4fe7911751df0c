# SPDX-License-Identifier: Apache-2.0
"""A cluster whose pods answer: objects are applied, and clients are served through Envoy while the cluster changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import openai
import pytest_asyncio
import yaml

from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    DEPLOYMENTS,
    GATEWAY_CONFIGS,
    GATEWAYS,
    HTTP_ROUTES,
    INFERENCE_POOLS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    NODES,
    ApiResource,
)
from controller.kube.client import Client, connect
from controller.kube.errors import AlreadyExists
from controller.kube.leader_election import LeaderElection
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.gateway_objects import gateway_class
from tests.kube_objects import Object, picker_config, resource, route, server
from tests.waiting import eventually
from tests.with_kube.kubes import REAL, Kube
from tests.with_kube.managing import define_kinds, define_others
from tests.with_kube.pods import remove_pods
from tests.with_kube.test_gateway_api import create as create_plainly
from tests.with_kube.test_gateway_api import said, status
from tests.with_kube.test_gateway_role import IMPATIENT, addresses, conditions, create

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from bench.cluster.kubernetes_binaries import ClusterBinaries


pytestmark = REAL
PATIENCE_S = 120.0
SAMPLES: Final = Path(__file__).parents[2] / "manifests" / "samples-gateway-api"
POOL_HOST: Final = "pool.example.com"
# How long the API server is away; set it to 30 for a longer trial.
OUTAGE_S = float(os.environ.get("ATTACHE_OUTAGE_S", "3"))
WRONG_PICKER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorr}]\n"
QUESTION = {"model": "llama", "max_tokens": 20, "messages": [{"role": "user", "content": "Who are you?"}]}


class Site(msgspec.Struct, frozen=True):
    """A gateway of a namespace: its directory, and where Envoy listens."""

    client: Client
    kube: Kube
    namespace: str
    config: Path
    url: str

    async def scale(self, replicas: int) -> None:
        """Make the engines so many, and wait until requests go to all of them and no others."""
        await self.client.merge_patch(DEPLOYMENTS, "llama", self.namespace, {"spec": {"replicas": replicas}})
        await eventually(lambda: len(addresses(self.config) or ()) == replicas)


class Load:
    """Five clients that ask one question after the other. ``failures``: what was no good answer. ``host``: that they
    ask for, with the engines' own name of the model; empty: that of ``url``.
    """

    def __init__(self, url: str, host: str = "") -> None:
        self._headers = {"host": host} if host else {}
        self._question = {**QUESTION, "model": "org/llama"} if host else QUESTION
        self.answers = 0
        self.failures: list[str] = []
        self._url = url

    async def ask(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=30, headers=self._headers) as http, asyncio.TaskGroup() as clients:
            for _ in range(5):
                clients.create_task(self._client(http))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while True:
            try:
                answer = await http.post(f"{self._url}/v1/chat/completions", json=self._question)
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            else:
                self.answers += answer.is_success
                if not answer.is_success:
                    self.failures.append(f"{answer.status_code}: {answer.text}")
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def load(url: str, host: str = "") -> AsyncIterator[Load]:
    asking = Load(url, host)
    task = asyncio.create_task(asking.ask())
    try:
        yield asking
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def engines(namespace: str) -> Object:
    """A Deployment of simulated engines, as manifests/samples has it."""
    container: dict[str, Any] = {
        "name": "engine",
        "image": "attache/engine-sim",
        "args": ["--model", "org/llama", "--port", "8000", "--speed", "20"],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "lifecycle": {"preStop": {"sleep": {"seconds": 3}}},
    }
    pods = {
        "metadata": {"labels": {"app": "llama"}},
        "spec": {"nodeSelector": {"test": namespace}, "containers": [container]},
    }
    spec = {"replicas": 2, "selector": {"matchLabels": {"app": "llama"}}, "template": pods}
    metadata = {"name": "llama", "namespace": namespace}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


@pytest_asyncio.fixture(loop_scope="session")
async def site(client: Client, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A node with two engines, and the gateway's parts as processes of this machine, serving them."""
    await define_kinds(client)
    async with serving(client, kube, namespace, tmp_path, (f"127.0.0.1:{port}" for port in free_ports(5))) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="session")
async def gateway_site(
    client: Client, kube: Kube, namespace: str, tmp_path: Path, assets: ClusterBinaries
) -> AsyncIterator[Site]:
    """The same behind the Gateway and the HTTPRoute of manifests/samples-gateway-api."""
    await define_kinds(client)
    await define_others(client, assets.crd_directory)
    with contextlib.suppress(AlreadyExists):
        await create_plainly(client, "", gateway_class())
    for file in ("gateway.yaml", "inference-pool.yaml", "http-route.yaml"):
        await create_plainly(client, namespace, *yaml.safe_load_all((SAMPLES / file).read_text()))
    listen, *others = free_ports(5)
    addresses = (f"127.0.0.1:{port}" for port in (listen, *others))
    gateways = GatewayApiSettings(bind=("127.0.0.1",), port_offset=listen - 80)
    async with serving(client, kube, namespace, tmp_path, addresses, gateways) as found:
        yield found


@contextlib.asynccontextmanager
async def serving(
    client: Client,
    kube: Kube,
    namespace: str,
    tmp_path: Path,
    addresses_: Iterable[str],
    gateways: GatewayApiSettings = GatewayApiSettings(),  # noqa: B008 - frozen
) -> AsyncIterator[Site]:
    """``addresses_``: of Envoy, its administration, extproc, its metrics, and the bundle's writer."""
    listen, admin, grpc, metrics, reports = addresses_
    gateway = resource(
        "GatewayConfig", "main", {"listen": listen, "admin": admin, "extproc": grpc}, namespace=namespace
    )
    for field in ("creationTimestamp", "generation"):
        del gateway["metadata"][field]
    await client.create(GATEWAY_CONFIGS, gateway)
    await client.create(DEPLOYMENTS, engines(namespace))
    await create(client, server(namespace=namespace), route(namespace=namespace))
    config, bundle = tmp_path / "config", tmp_path / "bundle"
    settings = GatewaySettings(
        config=config,
        namespace=namespace,
        gateway_config=f"{namespace}/main",
        consumers={"extproc": metrics, "Envoy": reports},
        gateway_api=gateways,
    )
    node = gpu_node(f"node-{namespace}", 8, {"test": namespace})
    async with (
        running_nodes(client, [node], tmp_path / "pods"),
        connect(kube.admin, manager=CONTROLLER) as own,
        Processes(tmp_path) as processes,
    ):
        election = LeaderElection(own, namespace=namespace, name="gateway", identity="a")
        role = GatewayRunner(
            own, settings, GatewayMetrics(), election=election, timing=IMPATIENT, check_picker=InstalledPluginChecker()
        )
        task = asyncio.create_task(role.run())
        try:
            await asyncio.wait_for(role.ready.wait(), PATIENCE_S)
            await eventually(lambda: len(addresses(config) or ()) == 2)
            python = [sys.executable, "-m", "attache"]
            await processes.start(
                "extproc", [*python, "extproc", "--config", str(config), "--listen", grpc, "--metrics", metrics]
            )
            await processes.start(
                "bundle",
                [*python, "bundle", "--config", str(config), "--out", str(bundle), "--watch", "--metrics", reports],
            )
            await eventually((bundle / "bootstrap.json").exists)
            await processes.start("envoy", envoy_command(bundle))
            found = Site(client, kube, namespace, config, f"http://{listen}")
            await eventually(lambda: is_served(found.url))
            yield found
            await remove_pods(client, namespace)
            await client.delete(NODES, node.name)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def is_served(url: str, key: str = "") -> bool:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"} if key else {}, timeout=60) as http:
        try:
            return (await http.post(f"{url}/v1/chat/completions", json=QUESTION)).is_success
        except httpx.HTTPError:
            return False


async def test_no_request_fails_while_engines_come_and_go_and_the_api_server_is_away(site: Site) -> None:
    assert site.kube.plane is not None
    async with load(site.url) as asking:
        await site.scale(4)
        await site.scale(1)
        before = asking.answers
        await site.kube.plane.stop_api()
        await asyncio.sleep(OUTAGE_S)
        assert asking.answers > before, "requests go on without the API server"
        await site.kube.plane.restart_api()
        await site.scale(3)
    assert asking.failures == []
    assert asking.answers > 50


async def test_openais_client_is_answered_and_a_deleted_server_is_told(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        assert [one.id async for one in client.models.list()] == ["llama"]
        stream = await client.chat.completions.create(
            model="llama", max_tokens=5, stream=True, messages=[{"role": "user", "content": "Hello"}]
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        await site.client.delete(MODEL_SERVERS, "llama", site.namespace)

        async def is_refused() -> bool:
            try:
                await client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "Hello"}])
            except openai.APIStatusError as error:
                return (error.status_code, error.code) == (503, "no_endpoint")
            return False

        await eventually(is_refused)

    async def is_told() -> bool:
        found = await conditions(site.client, MODEL_ROUTES, "llama", site.namespace)
        return found["ResolvedRefs"] == ("False", "BackendNotFound")

    await eventually(is_told)


async def test_a_gateway_and_a_route_to_a_pool_answer_while_engines_come_and_go(gateway_site: Site) -> None:
    site = gateway_site
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        assert [one.id async for one in client.models.list()] == ["llama"]
        hello: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        assert (await client.chat.completions.create(model="llama", **hello)).choices[0].message.content
        pool = client.with_options(default_headers={"host": POOL_HOST})
        await eventually(lambda: answers(pool, hello))

    found = await status(site.client, GATEWAYS, "web", site.namespace)
    assert found["listeners"][0]["attachedRoutes"] == 2, "the HTTPRoute and the ModelRoute"

    async def is_in_use() -> bool:
        gateway = await status(site.client, GATEWAYS, "web", site.namespace)
        route = await status(site.client, HTTP_ROUTES, "pool", site.namespace)
        told = [gateway, gateway["listeners"][0], route["parents"][0]]
        messages = {one["message"] for thing in told for one in thing["conditions"] if one["type"] == "Programmed"}
        return messages == {"in use by extproc and Envoy"}

    await eventually(is_in_use)
    async with load(site.url) as by_model, load(site.url, POOL_HOST) as by_pool:
        await site.scale(4)
        await site.scale(1)
        # on a busy machine the engines have come and gone before that many answers
        await eventually(lambda: min(by_model.answers, by_pool.answers) > 20)
    assert by_model.failures == by_pool.failures == []


async def test_a_pool_that_is_deleted_is_told_by_its_route(gateway_site: Site) -> None:
    site = gateway_site
    async with openai.AsyncOpenAI(
        base_url=f"{site.url}/v1", api_key="any", max_retries=0, default_headers={"host": POOL_HOST}
    ) as pool:
        hello: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
        await eventually(lambda: answers(pool, hello))
        await site.client.delete(INFERENCE_POOLS, "llama", site.namespace)

        async def is_refused() -> bool:
            try:
                await pool.chat.completions.create(model="org/llama", **hello)
            except openai.APIStatusError as error:
                # what the Gateway API asks of a reference to nothing
                return error.status_code == 500 and isinstance(error.body, dict) and bool(error.body.get("message"))
            return False

        await eventually(is_refused)

    async def is_told() -> bool:
        (parent,) = (await status(site.client, HTTP_ROUTES, "pool", site.namespace))["parents"]
        return said(parent["conditions"])["ResolvedRefs"] == ("False", "BackendNotFound")

    await eventually(is_told)
    assert await is_served(site.url), "the ModelRoute's engines are still there"


async def answers(client: openai.AsyncOpenAI, question: dict[str, Any]) -> bool:
    try:
        answer = await client.chat.completions.create(model="org/llama", **question)
    except openai.APIStatusError:
        return False
    return bool(answer.choices[0].message.content)


async def test_programmed_is_what_extproc_and_envoy_use(site: Site, tmp_path: Path) -> None:
    async def message(resource: ApiResource, name: str, type_: str) -> tuple[str, str, str]:
        thing = await site.client.get(resource, name, site.namespace)
        found: list[dict[str, str]] = (thing.get("status") or {}).get("conditions") or []
        return next(
            ((one["status"], one["reason"], one["message"]) for one in found if one["type"] == type_), ("",) * 3
        )

    async def says(resource: ApiResource, name: str, type_: str, expected: tuple[str, str], text: str = "") -> None:
        said: list[tuple[str, str, str]] = []

        async def is_said() -> bool:
            said.append(await message(resource, name, type_))
            return said[-1][:2] == expected and text in said[-1][2]

        try:
            await eventually(is_said)
        except TimeoutError:
            raise AssertionError(said[-1]) from None

    for resource_, name in ((MODEL_SERVERS, "llama"), (MODEL_ROUTES, "llama"), (GATEWAY_CONFIGS, "main")):
        await says(resource_, name, "Programmed", ("True", "Programmed"), "in use by extproc and Envoy")

    # an EndpointPickerConfig with a mistake: extproc goes on, and so does its server
    await create(site.client, picker_config("epp", WRONG_PICKER, namespace=site.namespace))
    await site.client.merge_patch(MODEL_SERVERS, "llama", site.namespace, {"spec": {"pickerConfig": "epp"}})
    await says(MODEL_SERVERS, "llama", "ResolvedRefs", ("False", "PickerConfigInvalid"), "queue-scorr")
    await says(MODEL_SERVERS, "llama", "Programmed", ("True", "Programmed"))
    assert await is_served(site.url)

    # a key that is not there yet
    key = tmp_path / "key"
    keys = [
        {"name": "here", "tenant": "a", "key": "sk-0123456789"},
        {"name": "late", "tenant": "a", "keyFile": str(key)},
    ]
    patch = {"spec": {"authentication": {"apiKeys": keys}}}
    await site.client.merge_patch(GATEWAY_CONFIGS, "main", site.namespace, patch)
    await says(GATEWAY_CONFIGS, "main", "ResolvedRefs", ("False", "KeyNotFound"), str(key))
    await says(GATEWAY_CONFIGS, "main", "Programmed", ("True", "Programmed"))
    await eventually(lambda: is_served(site.url, "sk-0123456789"))
    assert not await is_served(site.url, "sk-9876543210")
    key.write_text("sk-9876543210")
    await says(GATEWAY_CONFIGS, "main", "ResolvedRefs", ("True", "ResolvedRefs"))
    await eventually(lambda: is_served(site.url, "sk-9876543210"))

    # an address that Envoy cannot listen on
    taken = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    address = "{}:{}".format(*taken.sockets[0].getsockname())
    async with taken:
        await site.client.merge_patch(GATEWAY_CONFIGS, "main", site.namespace, {"spec": {"listen": address}})
        await says(GATEWAY_CONFIGS, "main", "Programmed", ("False", "Refused"), "Envoy refused lds.json")
