# SPDX-License-Identifier: Apache-2.0
"""Many models on two MLServers, with the runtime agent beside each, behind a real Envoy: loaded by the calls of V2's
repository when a request names them, within the memory of each server.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
import pytest_asyncio

from bench.stack.processes import free_ports
from tests.waiting import eventually
from tests.with_model_servers.conftest import ModelServers, configure, document, gateway_to, required

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Of two servers of two places each. Names are as odd as they may be; each is one of the trained models.
MODELS = {
    "tree": "tree",
    "logistic": "logistic",
    "Tree.v1:2@x+y-z": "tree",
    "_0": "logistic",
    "models.load": "tree",
    "index": "logistic",
}
PINNED = "pinned"
# Settings of the artefact that give it the name of another model.
THIEF = "thief"
BROKEN = "broken"
NO_FORMAT = "no-format"
HOSTS = ("127.0.0.2", "127.0.0.3")
PLACE = 1000
FLOWERS = {"tree": [0, 1, 2], "logistic": [0, 1, 2]}
INPUTS = {
    "inputs": [
        {
            "name": "x",
            "shape": [3, 4],
            "datatype": "FP32",
            "data": [5.1, 3.5, 1.4, 0.2, 7.0, 3.2, 4.7, 1.4, 6.3, 3.3, 6.0, 2.5],
        }
    ]
}


class Pair(NamedTuple):
    """A server and its agent."""

    host: str
    address: str
    agent: str


class Servers:
    """Two MLServers with their agents, and the gateway to them."""

    def __init__(
        self, servers: ModelServers, stack: Stack, http: httpx.AsyncClient, hosts: tuple[str, ...] = HOSTS
    ) -> None:
        self.servers, self.stack, self.http, self.hosts = servers, stack, http, hosts
        self.pairs: list[Pair] = []
        self.port, self.agent_port, self.metrics_port, self.grpc_port = free_ports(4)

    async def start(self, *, idle_unload_s: float = 0.0) -> None:
        file = self.servers.models / "declared.json"
        file.write_text(json.dumps(self.declared()))
        for host in self.hosts:
            await self.start_server(host)
            words = [sys.executable, "-m", "attache", "agent", "--dialect=MLServer"]
            words += [
                f"--engine=http://{host}:{self.port}",
                f"--engine-metrics=http://{host}:{self.metrics_port}/metrics",
            ]
            words += [f"--listen={host}:{self.agent_port}", f"--adapters={file}", f"--link-dir={self.repository(host)}"]
            words += [f"--weights-cache={self.servers.models / host / 'cache'}", f"--allow-path={self.servers.models}"]
            words += [f"--max-memory={3 * PLACE}", "--declared-only", "--settle=0", "--keep-adapter=0"]
            words += ["--probe-interval=0.2", f"--idle-unload={idle_unload_s}"]
            await self.servers.processes.start(f"agent-{host}", words)
            pair = Pair(host, f"{host}:{self.port}", f"http://{host}:{self.agent_port}")
            self.pairs.append(pair)
            await eventually(lambda pair=pair: self.is_ready(pair), timeout_s=120)
        configure(self.stack, *self.objects())

    async def start_server(self, host: str) -> None:
        directory = self.servers.models / host
        self.repository(host).mkdir(parents=True, exist_ok=True)
        environment = {
            "MLSERVER_HOST": host,
            "MLSERVER_HTTP_PORT": self.port,
            "MLSERVER_GRPC_PORT": self.grpc_port,
            "MLSERVER_METRICS_PORT": self.metrics_port,
            "MLSERVER_METRICS_DIR": directory / "metrics",
            "MLSERVER_ENVIRONMENTS_DIR": directory / "environments",
            "MLSERVER_LOAD_MODELS_AT_STARTUP": "false",
        }
        program = os.path.join(os.path.dirname(required("MLSERVER")), "mlserver")  # noqa: PTH118, PTH120 - beside the link
        words = ["env", *(f"{key}={value}" for key, value in environment.items()), program]
        await self.servers.processes.start(f"mlserver-{host}", [*words, "start", str(self.repository(host))])

    def repository(self, host: str) -> Path:
        return self.servers.models / host / "repository"

    def declared(self) -> dict[str, dict[str, Any]]:
        models = self.servers.models
        found = {name: {"uri": f"file://{models / of}", "format": "sklearn"} for name, of in MODELS.items()}
        found[PINNED] = {"uri": f"file://{models / 'tree'}", "format": "sklearn", "pinned": True}
        (models / BROKEN).mkdir(exist_ok=True)
        (models / BROKEN / "model.joblib").write_bytes(b"no pickle")
        found[BROKEN] = {"uri": f"file://{models / BROKEN}", "format": "sklearn"}
        (models / THIEF).mkdir(exist_ok=True)
        (models / THIEF / "model.joblib").write_bytes((models / "logistic" / "model.joblib").read_bytes())
        settings = {
            "name": "tree",
            "implementation": "mlserver_sklearn.SKLearnModel",
            "parameters": {"uri": "/etc/passwd"},
        }
        (models / THIEF / "model-settings.json").write_text(json.dumps(settings))
        found[THIEF] = {"uri": f"file://{models / THIEF}"}
        found[NO_FORMAT] = {"uri": f"file://{models / 'tree'}"}
        return {name: {"memory": PLACE, **one} for name, one in found.items()}

    def objects(self) -> list[dict[str, object]]:
        adapters = [
            {"name": name, "source": one["uri"], "memory": PLACE, "pinned": one.get("pinned", False)}
            for name, one in self.declared().items()
        ]
        server = {
            "model": "many/*",
            "protocol": "V2",
            "endpoints": [{"address": one.address} for one in self.pairs],
            "adapterLoading": {"port": self.agent_port, "memory": 3 * PLACE, "adapters": adapters},
        }
        route = {"loraAdapters": list(self.declared()), "rules": [{"targetModels": [{"modelServerName": "many"}]}]}
        return [document("ModelServer", "many", server), document("ModelRoute", "many", route)]

    async def is_ready(self, pair: Pair) -> bool:
        try:
            return (await self.http.get(f"{pair.agent}/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def infer(self, name: str) -> httpx.Response:
        return await self.http.post(f"{self.stack.url}/v2/models/{quote(name, safe='')}/infer", json=INPUTS)

    async def held(self, pair: Pair) -> set[str]:
        listed = (await self.http.get(f"{pair.agent}/v1/adapters")).json()
        return {one["id"] for one in listed.get("data", ()) if one["state"] == "loaded"}

    async def is_served(self) -> bool:
        return (await self.http.get(f"{self.stack.url}/v2/models/{PINNED}/ready")).status_code == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def many(servers: ModelServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    async with (
        gateway_to(tmp_path_factory.mktemp("many") / "stack") as stack,
        httpx.AsyncClient(timeout=90) as http,
    ):
        found = Servers(servers, stack, http)
        await found.start()
        await eventually(found.is_served, timeout_s=60)
        yield found


async def test_each_model_answers_by_its_name_alone_and_no_server_has_more_than_fit(many: Servers) -> None:
    for name in (*MODELS, *MODELS, PINNED):
        answer = await many.infer(name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model_name"] == name
        assert answer.json()["outputs"][0]["data"] == [0, 1, 2]
        for pair in many.pairs:
            held = await many.held(pair)
            assert PINNED in held
            assert len(held) <= 3


async def test_readiness_and_metadata_are_those_of_the_servers(many: Servers) -> None:
    await many.infer("tree")
    url = f"{many.stack.url}/v2/models"
    ready = {name: (await many.http.get(f"{url}/{quote(name, safe='')}/ready")).status_code for name in MODELS}
    held = set[str]().union(*[await many.held(pair) for pair in many.pairs])
    assert ready == {name: 200 if name in held else 503 for name in MODELS}
    assert {*ready.values()} == {200, 503}
    away = next(name for name in MODELS if name not in held)
    text = (await many.http.get(f"{url}/{quote(away, safe='')}/ready")).json()["error"]
    assert "A request for it has an engine load it" in text
    # metadata have it loaded
    metadata = await many.http.get(f"{url}/{quote(away, safe='')}")
    assert (metadata.status_code, metadata.json()["name"]) == (200, away)
    assert (await many.http.get(f"{url}/{quote(away, safe='')}/ready")).status_code == 200
    assert (await many.http.get(f"{url}/nobody/ready")).status_code == 404
    assert (await many.http.post(f"{many.stack.url}/v2/repository/models/tree/unload")).status_code == 403


async def test_a_broken_artefact_costs_no_other_model(many: Servers) -> None:
    async def others() -> set[int]:
        return {(await many.infer(name)).status_code for name in (PINNED, "tree") for _ in range(10)}

    broken, without, good = await asyncio.gather(many.infer(BROKEN), many.infer(NO_FORMAT), others())
    assert good == {200}
    assert (broken.status_code, without.status_code) == (502, 502)
    assert "could not be loaded" in broken.json()["error"]
    messages = {}
    for pair in many.pairs:
        listed = (await many.http.get(f"{pair.agent}/v1/adapters")).json()["data"]
        messages |= {one["id"]: one["message"] for one in listed if one["state"] == "failed"}
    assert "the engine does not load broken" in messages[BROKEN]
    assert "its format is missing; write one of huggingface" in messages[NO_FORMAT]


async def test_an_artefact_cannot_take_the_name_of_another_model(many: Servers) -> None:
    answer = await many.infer(THIEF)
    assert (answer.status_code, answer.json()["model_name"]) == (200, THIEF)
    assert (await many.infer("tree")).json()["model_name"] == "tree"


async def test_a_server_that_is_killed_and_started_again_has_its_models_loaded_again(many: Servers) -> None:
    for name in ("tree", "logistic", "_0", "index"):
        await many.infer(name)
    first = many.pairs[0]
    await many.servers.processes.end(f"mlserver-{first.host}", signal.SIGKILL)

    async def all_answer() -> bool:
        return {(await many.infer(name)).status_code for name in (*MODELS, PINNED)} == {200}

    # the other one loads what is asked for
    await eventually(all_answer, timeout_s=60)
    await many.servers.processes.start_again(f"mlserver-{first.host}")

    async def has_pinned() -> bool:
        return PINNED in await many.held(first)

    await eventually(has_pinned, timeout_s=60)
    for name in MODELS:
        assert (await many.infer(name)).status_code == 200
    await eventually(all_answer, timeout_s=30)


async def test_an_unused_model_is_unloaded_one_in_use_and_a_pinned_one_stay(
    servers: ModelServers, tmp_path: Path
) -> None:
    async with gateway_to(tmp_path / "stack") as stack, httpx.AsyncClient(timeout=90) as http:
        one = Servers(servers, stack, http, ("127.0.0.4",))
        await one.start(idle_unload_s=3.0)
        await eventually(one.is_served, timeout_s=60)
        (pair,) = one.pairs
        assert {(await one.infer(name)).status_code for name in ("tree", "logistic")} == {200}
        assert await one.held(pair) == {"tree", "logistic", PINNED}
        statuses = set[int]()

        async def is_gone() -> bool:
            statuses.add((await one.infer("tree")).status_code)
            return "logistic" not in {
                model["id"] for model in (await http.get(f"{pair.agent}/v1/adapters")).json()["data"] if model["path"]
            }

        await eventually(is_gone, timeout_s=60, pause_s=0.1)
        assert statuses == {200}
        assert await one.held(pair) == {"tree", PINNED}
        # a request has it loaded again
        assert (await one.infer("logistic")).status_code == 200
