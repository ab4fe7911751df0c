# SPDX-License-Identifier: Apache-2.0
"""A Model becomes an endpoint: pods that fetch weights and run engines, behind Envoy, and stays what it says."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.cluster.node.pod_state_machine import NodeTiming
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.gateway.metrics import GatewayMetrics
from controller.gateway.runner import CONTROLLER, GatewayRunner, GatewaySettings
from controller.kube.api_resources import (
    GATEWAY_CONFIGS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    MODELS,
    NODES,
    PODS,
    SERVICES,
    SERVING_RUNTIMES,
)
from controller.kube.client import Client, connect
from controller.kube.leader_election import LeaderElection
from controller.models.model_infer import names
from controller.models.model_infer.reconcile import reconcile
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_kinds, managing
from tests.with_kube.test_gateway_role import IMPATIENT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from controller.kube.api_resources import ApiResource
    from tests.with_kube.kubes import Kube

pytestmark = REAL
QUICK = NodeTiming(restart_s=0.2, restart_max_s=0.4, pull_s=0.2, pull_max_s=0.4, heartbeat_s=1.0)
# 24 processes of Python start for two groups of four pods
PATIENCE_S = 240.0
FIVE_LINES = """
apiVersion: attache.dev/v1alpha1
kind: Model
metadata:
  name: llama
spec: {uri: "URI"}
"""
APART = """
apiVersion: attache.dev/v1alpha1
kind: Model
metadata:
  name: llama
spec:
  uri: file:///models/llama
  backends:
  - name: apart
    replicas: 2
    config: {drainTimeout: 2s, pod: {terminationGracePeriodSeconds: 5}}
    disaggregation: {prefill: 2, decode: 2}
"""

# The simulated engine as a server of V1, and a program in front of it and beside it.
SUMS = """
apiVersion: attache.dev/v1alpha1
kind: ServingRuntime
metadata: {name: sums}
spec:
  engine: Custom
  protocolVersions: [V1]
  supports: [{name: sums, autoSelect: true}]
  agent: {enabled: false}
  config: {image: attache/engine-sim}
  arguments: [{args: ["--port={port}", "--model={name}"]}]
  pod: {containers: [{name: engine, readinessProbe: {tcpSocket: {port: http}, periodSeconds: 1}}]}
"""
STEPPED = f"""
apiVersion: attache.dev/v1alpha1
kind: Model
metadata: {{name: llama}}
spec:
  uri: file:///models/llama
  format: {{name: sums}}
  transformer: &step
    image: python
    command: [{sys.executable}, {Path(__file__).parent / "step_server.py"}]
    args: [--host=0.0.0.0, --predictor_host=STEPS]
    replicas: 2
    drainTimeout: 2s
  explainer:
    <<: *step
    replicas: 1
"""
MANY = """
apiVersion: attache.dev/v1alpha1
kind: Model
metadata:
  name: llama
spec:
  format: {name: sklearn}
  models:
  - {name: iris, uri: "URI", memory: 1Mi, pinned: true}
  - {name: "wine.v1:2@x", uri: "URI", memory: 1Mi}
  - {name: spoilt, uri: "BROKEN", memory: 1Mi}
  backends:
  - name: default
    replicas: 2
    config: {drainTimeout: 2s, models: {memory: 2Mi}, pod: {terminationGracePeriodSeconds: 5}}
"""


class Site(msgspec.Struct, frozen=True):
    """A cluster with a gateway, the manager and a node. ``url``: of Envoy. ``steps``: where transformers call.
    ``weights``: a URI, and how often it was asked.
    """

    client: Client
    namespace: str
    url: str
    steps: str
    weights: str
    downloads: list[str]

    async def create(self, text: str) -> None:
        made = yaml.safe_load(
            text.replace("URI", self.weights)
            .replace("BROKEN", self.weights.replace("llama", "broken"))
            .replace("STEPS", self.steps)
        )
        made["metadata"]["namespace"] = self.namespace
        await self.client.create(MODELS if made["kind"] == "Model" else SERVING_RUNTIMES, made)

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get(MODELS, "llama", self.namespace)).get("status") or {}
        return found

    async def is_ready(self) -> bool:
        """As `kubectl wait` has it: by a condition about the newest generation."""
        thing = await self.client.get(MODELS, "llama", self.namespace)
        conditions = (thing.get("status") or {}).get("conditions") or ()
        ready = next((one for one in conditions if one["type"] == "Ready"), None)
        newest = thing["metadata"]["generation"]
        return ready is not None and ready["status"] == "True" and ready["observedGeneration"] == newest

    async def until_ready(self) -> None:
        try:
            await eventually(self.is_ready, timeout_s=PATIENCE_S, pause_s=0.3)
        except TimeoutError:
            pods = (await self.client.list(PODS, self.namespace)).items
            pytest.fail(f"{await self.status()}; {[(one['metadata']['name'], one['status']) for one in pods]}")

    async def count(self, resource: ApiResource) -> int:
        return len((await self.client.list(resource, self.namespace)).items)

    async def ask(self, prompt: str = "Who are you?", model: str = "llama") -> httpx.Response:
        question = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.post(f"{self.url}/v1/chat/completions", json=question)

    async def infer(self, model: str) -> int:
        """The status of a request for one of many models."""
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
        async with httpx.AsyncClient(timeout=90) as http:
            try:
                return (await http.post(f"{self.url}/v2/models/{quote(model, safe='')}/infer", json=body)).status_code
            except httpx.TransportError:
                return 0

    async def hosted(self) -> dict[str, tuple[str, int]]:
        """The state of each of many models, and how many servers have it."""
        return {one["name"]: (one["state"], one["servers"]) for one in (await self.status()).get("models") or ()}

    async def tokens(self, role: str, source: str) -> float:
        """Of the prompts of all engines of a role, those from a source, as the engines count them."""
        pods = (await self.client.list(PODS, self.namespace, labels=f"{names.ROLE}={role}")).items
        async with httpx.AsyncClient(timeout=30) as http:
            pages = [(await http.get(f"http://{one['status']['podIP']}:8000/metrics")).text for one in pods]
        counted = [line for page in pages for line in page.splitlines() if f'source="{source}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in counted)

    async def answers(self) -> bool:
        try:
            return (await self.ask()).is_success
        except httpx.HTTPError:
            return False


def archive_of(*names: str) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"{}"))
    return content.getvalue()


@contextlib.asynccontextmanager
async def weights_server() -> AsyncIterator[tuple[str, list[str]]]:
    """A web server with an archive of weights, also by other names, and the requests for its bytes. That with the name
    ``broken`` has a file of that name.
    """
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        more = ["broken"] if request.match_info["name"] == "broken" else []
        return web.Response(body=archive_of("config.json", "model.safetensors", *more), headers={"etag": '"1"'})

    app = web.Application()
    app.router.add_get("/{name}.tar", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}/llama.tar", asked
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def gateway(client: Client, kube: Kube, namespace: str, folder: Path) -> AsyncIterator[tuple[str, str]]:
    """The gateway role, extproc and Envoy for a namespace; the URL of Envoy, and its address for steps."""
    listen, admin, grpc, metrics, reports, steps = (f"127.0.0.1:{port}" for port in free_ports(6))
    spec = {"listen": listen, "admin": admin, "extproc": grpc, "steps": steps}
    metadata = {"name": "main", "namespace": namespace}
    await client.create(
        GATEWAY_CONFIGS,
        {"apiVersion": GATEWAY_CONFIGS.api_version, "kind": "GatewayConfig", "metadata": metadata, "spec": spec},
    )
    config, bundle = folder / "config", folder / "bundle"
    settings = GatewaySettings(
        config=config,
        namespace=namespace,
        gateway_config=f"{namespace}/main",
        consumers={"extproc": metrics, "Envoy": reports},
    )
    async with connect(kube.admin, manager=CONTROLLER) as own, Processes(folder) as processes:
        election = LeaderElection(own, namespace=namespace, name="gateway", identity="a")
        role = GatewayRunner(
            own, settings, GatewayMetrics(), election=election, timing=IMPATIENT, check_picker=InstalledPluginChecker()
        )
        task = asyncio.create_task(role.run())
        try:
            await asyncio.wait_for(role.ready.wait(), PATIENCE_S)
            python = [sys.executable, "-m", "attache"]
            words = ["extproc", "--config", str(config), "--listen", grpc, "--metrics", metrics]
            await processes.start("extproc", [*python, *words])
            words = ["bundle", "--config", str(config), "--out", str(bundle), "--watch", "--metrics", reports]
            await processes.start("bundle", [*python, *words])
            await eventually((bundle / "bootstrap.json").exists, timeout_s=PATIENCE_S)
            await processes.start("envoy", envoy_command(bundle))
            yield f"http://{listen}", steps
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest_asyncio.fixture(loop_scope="session")
async def site(client: Client, kube: Kube, namespace: str, tmp_path: Path) -> AsyncIterator[Site]:
    await define_kinds(client)
    # a Model of five lines chooses no node: those of other tests are away
    for node in (await client.list(NODES)).items:
        await client.delete(NODES, node["metadata"]["name"])
    labels = {"app.kubernetes.io/name": "attache-gateway"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "gateway", "namespace": namespace, "labels": labels},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": 8080}]},
    }
    await client.create(SERVICES, service)
    node = gpu_node(f"node-{namespace}", 16)
    async with (
        weights_server() as (uri, asked),
        running_nodes(client, [node], tmp_path / "pods", timing=QUICK),
        gateway(client, kube, namespace, tmp_path) as (url, steps),
        managing(kube.admin, namespace, decide=reconcile),
    ):
        yield Site(client, namespace, url, steps, uri, asked)
        for model in (await client.list(MODELS, namespace)).items:
            await client.delete(MODELS, model["metadata"]["name"], namespace)
        for infer in (await client.list(MODEL_INFERS, namespace)).items:
            await client.delete(MODEL_INFERS, infer["metadata"]["name"], namespace)
        for pod in (await client.list(PODS, namespace)).items:
            await client.delete(PODS, pod["metadata"]["name"], namespace, grace_s=0)
        await client.delete(NODES, node.name)


async def test_a_model_of_five_lines_becomes_an_endpoint_stays_one_and_goes_as_a_whole(site: Site) -> None:
    await site.create(FIVE_LINES)
    await site.until_ready()
    answer = await site.ask()
    assert answer.is_success, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    assert site.downloads, "the weights were fetched"
    said = await site.status()
    assert said["phase"] == "Loaded", said
    assert said["url"] == f"http://gateway.{site.namespace}.svc:8080/v1"
    (backend,) = said["backends"]
    assert backend["runtime"] == "built-in runtime vllm"
    assert backend["start"]["loadSeconds"] >= 0
    assert {"schedulingSeconds", "downloadSeconds"} <= set(backend["start"])
    await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"aliases": ["chat"]}})
    await site.until_ready()
    assert (answer := await site.ask(model="chat")).is_success, answer.text

    # drift of what nobody else may own is repaired, and nothing is cut meanwhile
    patch = {"spec": {"rules": [{"targetModels": [{"modelServerName": "elsewhere"}]}]}}
    await site.client.merge_patch(MODEL_ROUTES, "llama", site.namespace, patch)
    await site.client.delete(MODEL_SERVERS, "llama-default", site.namespace)

    async def is_repaired() -> bool:
        route = await site.client.get(MODEL_ROUTES, "llama", site.namespace)
        targets = route["spec"]["rules"][0]["targetModels"]
        return targets[0]["modelServerName"] == "llama-default" and await site.count(MODEL_SERVERS) == 1

    await eventually(is_repaired, timeout_s=PATIENCE_S)
    await eventually(site.answers, timeout_s=PATIENCE_S, pause_s=0.2)

    await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"stop": True}})

    async def is_stopped() -> bool:
        said = await site.status()
        return said["phase"] == "Standby" and await site.count(PODS) == 0 and await site.count(MODEL_SERVERS) == 1

    await eventually(is_stopped, timeout_s=PATIENCE_S, pause_s=0.3)

    await site.client.delete(MODELS, "llama", site.namespace)

    async def is_gone() -> bool:
        return not any([await site.count(one) for one in (MODEL_INFERS, MODEL_SERVERS, MODEL_ROUTES, PODS)])

    await eventually(is_gone, timeout_s=PATIENCE_S, pause_s=0.3)


async def test_prefill_and_decode_in_two_groups_of_four_pods_answer(site: Site) -> None:
    await site.create(APART)
    await site.until_ready()

    async def are_all_ready() -> bool:
        return (await site.status())["transitionStatus"] == "UpToDate"

    assert (answer := await site.ask()).is_success, answer.text
    await eventually(are_all_ready, timeout_s=PATIENCE_S, pause_s=0.5)
    pods = {one["metadata"]["name"] for one in (await site.client.list(PODS, site.namespace)).items}
    assert pods == {
        f"llama-apart-{group}-{role}-{replica}-0"
        for group in range(2)
        for role in ("prefill", "decode")
        for replica in range(2)
    }
    said = await site.status()
    assert said["backends"][0]["readyReplicas"] == 2

    answer = await site.ask("a long prompt " * 8_000)
    assert answer.is_success, answer.text
    # all but the last token, which a decode engine computes itself
    whole = answer.json()["usage"]["prompt_tokens"] - 1

    async def is_transferred() -> bool:
        return await site.tokens("decode", "external_kv_transfer") >= whole

    await eventually(is_transferred, timeout_s=PATIENCE_S, pause_s=0.2)


async def test_a_transformer_and_an_explainer_in_pods_of_their_own_serve_and_scale_in_without_a_failure(
    site: Site,
) -> None:
    await site.create(SUMS)
    await site.create(STEPPED)
    await site.until_ready()
    assert {one["type"]: one["status"] for one in (await site.status())["conditions"]}["TransformerReady"] == "True"
    async with httpx.AsyncClient(base_url=site.url, timeout=60) as http:

        async def ask(verb: str) -> tuple[int, dict[str, Any]]:
            answer = await http.post(f"/v1/models/llama:{verb}", json={"instances": [[1, 2], [4]]})
            return answer.status_code, answer.json()

        async def is_served() -> bool:
            # at once: steps that failed before Envoy knew the predictor's route are probed with one request at a time
            answers = await asyncio.gather(*(ask(one) for one in ("predict", "explain") * 4))
            return all(status == 200 for status, _ in answers)

        await eventually(is_served, timeout_s=PATIENCE_S, pause_s=0.2)
        assert await ask("predict") == (200, {"predictions": [4.0, 5.0]})
        assert await ask("explain") == (200, {"explanations": ["sum 3.0", "sum 4.0"]})

        # one transformer less, under load
        failed, is_over = list[object](), asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                if (got := await ask("predict"))[0] != 200:
                    failed.append(got)

        clients = [asyncio.create_task(load()) for _ in range(3)]
        await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"transformer": {"replicas": 1}}})

        async def is_one() -> bool:
            pods = (await site.client.list(PODS, site.namespace, labels="attache.dev/backend=transformer")).items
            return len(pods) == 1

        await eventually(is_one, timeout_s=PATIENCE_S, pause_s=0.2)
        is_over.set()
        await asyncio.gather(*clients)
        assert failed == []

        # without the transformer the engines answer, and nothing of it stays
        patch = {"spec": {"transformer": None, "explainer": None}}
        await site.client.merge_patch(MODELS, "llama", site.namespace, patch)

        async def is_gone() -> bool:
            counts = [await site.count(one) for one in (MODEL_INFERS, MODEL_SERVERS, MODEL_ROUTES)]
            return counts == [1, 1, 1] and await ask("predict") == (200, {"predictions": [3.0, 4.0]})

        await eventually(is_gone, timeout_s=PATIENCE_S, pause_s=0.2)


async def test_many_models_on_two_servers_are_loaded_when_they_are_asked_for(site: Site) -> None:
    await site.create(MANY)
    await site.until_ready()

    async def answers(model: str = "iris") -> bool:
        return await site.infer(model) == 200

    assert await answers()
    assert await site.infer("spoilt") == 502
    assert await site.infer("wine.v1:2@x") == 200
    assert await site.infer("nobody") == 404
    # whatever becomes of one, the others are served
    assert await site.is_ready()

    async def is_told() -> bool:
        found = await site.hosted()
        return found == {"iris": ("Loaded", 2), "wine.v1:2@x": ("Loaded", 1), "spoilt": ("Failed", 0)}

    await eventually(is_told, timeout_s=PATIENCE_S, pause_s=0.5)
    said = await site.status()
    (condition,) = (one for one in said["conditions"] if one["type"] == "ModelsLoadable")
    assert (condition["status"], condition["reason"]) == ("False", "ModelLoadFailed")
    assert "the engine does not load spoilt" in condition["message"]

    # another model, and other weights of a broken one: no pod is made anew
    pods = {one["metadata"]["uid"] for one in (await site.client.list(PODS, site.namespace)).items}
    models = yaml.safe_load(MANY.replace("BROKEN", site.weights).replace("URI", site.weights))["spec"]["models"]
    models.append({**models[1], "name": "digits"})
    await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"models": models}})
    for name in ("digits", "spoilt"):
        await eventually(lambda name=name: answers(name), timeout_s=PATIENCE_S, pause_s=0.5)
    assert pods == {one["metadata"]["uid"] for one in (await site.client.list(PODS, site.namespace)).items}

    # what fits on no server is refused, and what runs goes on
    wrong = [{**models[0], "memory": "3Mi"}, *models[1:]]
    await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"models": wrong}})

    async def is_refused() -> bool:
        failure = (await site.status()).get("failure") or {}
        return "'iris' needs 3Mi of memory, more than the 2Mi of config.models.memory" in failure.get("message", "")

    await eventually(is_refused, timeout_s=PATIENCE_S, pause_s=0.2)
    assert await answers()
    await site.client.merge_patch(MODELS, "llama", site.namespace, {"spec": {"models": models}})

    # a server that is gone comes back with what is pinned
    first = min(one["metadata"]["name"] for one in (await site.client.list(PODS, site.namespace)).items)
    await site.client.delete(PODS, first, site.namespace, grace_s=0)
    await eventually(answers, timeout_s=PATIENCE_S, pause_s=0.2)

    async def has_pinned() -> bool:
        return (await site.hosted())["iris"] == ("Loaded", 2) and "failure" not in await site.status()

    await eventually(has_pinned, timeout_s=PATIENCE_S, pause_s=0.5)
    for name in ("iris", "wine.v1:2@x", "digits", "spoilt"):
        assert await site.infer(name) == 200
