# SPDX-License-Identifier: Apache-2.0
"""Transformers and explainers in front of a predictor: what clients reach, what steps reach, and who is charged."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import quote

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import ClientSession, web

from bench.stack.loopback_stack import MODEL, EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports
from extproc.api.spec import API_VERSION
from tests.docs_examples import EXAMPLES
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREDICT: Final = "/v1/models/iris:predict"
EXPLAIN: Final = "/v1/models/iris:explain"
KEYS: Final = {"acme": "sk-acme-0123", "small": "sk-small-0123", "nobody": "sk-nobody-0123"}
BODY: Final = {"instances": [[1, 2], [3]]}
# What the simulated predictor answers to it, and what the transformer makes of that.
SUMS: Final = [3.0, 3.0]
DOUBLE: Final = [6.0, 6.0]


class Step:
    """A transformer and an explainer that call ``steps`` as KServe's SDK does, with none of the client's headers."""

    def __init__(self, steps: str) -> None:
        self.mode: Literal["good", "hang", "garbage", "cut"] = "good"
        self.asked = 0
        self.address = ""
        self._steps = steps

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/models/{name}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        self._http = ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.mode == "hang":
            await asyncio.sleep(3600)
        if self.mode == "garbage":
            return web.Response(body=b"\x00\xff{", content_type="application/json")
        if self.mode == "cut":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        name, _, verb = request.match_info["name"].partition(":")
        url = f"http://{self._steps}/v1/models/{name}:predict"
        async with self._http.post(url, data=await request.read()) as predicted:
            if predicted.status != 200:
                return web.Response(body=await predicted.read(), status=predicted.status, headers=predicted.headers)
            sums = (await predicted.json())["predictions"]
        if verb == "explain":
            return web.json_response({"explanations": [f"it is the sum, {one}" for one in sums]})
        return web.json_response({"predictions": [2 * one for one in sums]})


class Served(msgspec.Struct, frozen=True):
    stack: Stack
    step: Step
    steps: str
    http: httpx.AsyncClient
    log: Any

    async def ask(
        self, path: str = PREDICT, key: str = KEYS["acme"], body: object = BODY, method: str = "POST"
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.request(method, path, json=body, headers=headers)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    async def counted(self, name: str, **labels: str) -> float:
        text = (await self.http.get(f"{self.stack.metrics}/metrics")).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [one for one in text.splitlines() if one.startswith(name) and all(each in one for each in wanted)]
        return sum(float(one.rpartition(" ")[2]) for one in lines)


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def documents(step: Step, engines: tuple[str, ...]) -> list[dict[str, Any]]:
    """Those of docs/protocols.md, at addresses of this machine, with limits; and a model that has no steps."""
    (example,) = [one for one in EXAMPLES if one.page == "protocols.md" and "callers: Steps" in one.text]
    found = [one for one in yaml.safe_load_all(example.text) if one["kind"] != "GatewayConfig"]
    specs = {f"{one['kind']} {one['metadata']['name']}": one["spec"] for one in found}
    listed = [{"address": one.removeprefix("http://")} for one in engines]
    # the simulated engines know the model by another name than clients and steps
    specs["ModelServer predictor"] |= {"endpoints": listed, "model": MODEL}
    for name in ("transformer", "explainer"):
        specs[f"ModelServer {name}"]["endpoints"] = [{"address": step.address}]
    specs["ModelServer transformer"]["trafficPolicy"]["timeout"] = "2s"
    specs["ModelRoute iris"]["rateLimits"] = [{"tenants": ["small"], "unit": "month", "requests": 2}]
    # nobody else, and so not whoever calls without credentials
    policy = {"rules": [{"from": [{"tenants": ["acme", "small"]}]}]}
    bare = [{"targetModels": [{"modelServerName": "v2"}]}]
    return [
        *found,
        document("ModelServer", "v2", model=MODEL, protocol="V2", endpoints=listed),
        document("ModelRoute", "bare", modelName="bare", rules=bare),
        document("ModelAccessPolicy", "all", **policy),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    directory = tmp_path_factory.mktemp("stack")
    (port,) = free_ports(1)
    steps = f"127.0.0.1:{port}"
    gateway: Mapping[str, object] = {
        "steps": steps,
        "usageLog": {"path": str(directory / "usage.log")},
        "authentication": {"apiKeys": [{"name": one, "key": key, "tenant": one} for one, key in KEYS.items()]},
    }
    headers = {"authorization": f"Bearer {KEYS['acme']}"}
    flags = EngineFlags(count=2, speed=20.0)
    async with (
        Step(steps) as step,
        running_stack(directory / "stack", flags, watch=True, gateway=gateway, headers=headers) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        file = stack.config / "more.yaml"
        file.with_suffix(".new").write_text(yaml.safe_dump_all(documents(step, stack.engines)))
        file.with_suffix(".new").replace(file)
        found = Served(stack, step, steps, http, directory / "usage.log")

        async def is_served() -> bool:
            return (await found.ask()).status_code == 200

        await eventually(is_served)
        yield found


@pytest.fixture(autouse=True)
def good(served: Served) -> None:
    served.step.mode = "good"


async def test_a_request_passes_the_transformer_and_comes_to_the_predictor(served: Served) -> None:
    answer = await served.ask()
    assert (answer.status_code, answer.json()) == (200, {"predictions": DOUBLE})


async def test_explain_goes_to_the_explainer_alone(served: Served) -> None:
    answer = await served.ask(EXPLAIN)
    assert (answer.status_code, answer.json()["explanations"][0]) == (200, "it is the sum, 3.0")


async def test_each_step_is_counted_and_timed_apart(served: Served) -> None:
    name = "attache_request_duration_seconds_count"
    before = [await served.counted(name, server=f"default/{one}") for one in ("transformer", "predictor", "explainer")]
    await served.ask()
    await served.ask(EXPLAIN)

    async def are_counted() -> bool:
        now = [await served.counted(name, server=f"default/{one}") for one in ("transformer", "predictor", "explainer")]
        return all(new - old >= least for new, old, least in zip(now, before, (1, 2, 1), strict=True))

    await eventually(are_counted)


async def test_a_client_is_charged_and_logged_once(served: Served) -> None:
    answers = [(await served.ask(key=KEYS["small"])).status_code for _ in range(3)]
    assert answers == [200, 200, 429]
    # rows of requests before it, all of another client, may still come
    await eventually(lambda: [one["client"] for one in served.lines() if one["client"] != "acme"] == ["small"] * 3)


async def test_clients_do_not_reach_the_predictor_and_steps_reach_nothing_else(served: Served) -> None:
    asked = served.step.asked
    # whatever a client calls itself
    headers = {"authorization": f"Bearer {KEYS['acme']}", "host": served.steps, "x-attache-listener": "Steps"}
    answer = await served.http.post(PREDICT, json=BODY, headers=headers)
    assert (answer.json(), served.step.asked) == ({"predictions": DOUBLE}, asked + 1)
    assert (await served.ask(key="sk-wrong")).status_code == 401
    assert (await served.ask(key=KEYS["nobody"])).status_code == 403
    inside = f"http://{served.steps}"
    assert (await served.http.post(f"{inside}{PREDICT}", json=BODY)).json() == {"predictions": SUMS}
    assert (await served.http.post(f"{inside}{EXPLAIN}", json=BODY)).status_code != 200
    listed = (await served.http.get(f"{inside}/v1/models")).json()
    assert [one["id"] for one in listed["data"]] == ["iris"]
    chat = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
    assert (await served.http.post(f"{inside}/v1/chat/completions", json=chat)).status_code == 404


async def test_errors_of_the_predictor_come_through(served: Served) -> None:
    answer = await served.ask(body={"instances": "none"})
    own = f"{served.stack.engines[0]}/v1/models/{quote(MODEL, safe='')}:predict"
    direct = await served.http.post(own, json={"instances": "none"})
    assert direct.status_code >= 400
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())


@pytest.mark.parametrize(("mode", "status"), [("hang", 504), ("cut", 503)])
async def test_a_transformer_that_fails_is_a_clear_error(
    served: Served, mode: Literal["hang", "cut"], status: int
) -> None:
    served.step.mode = mode
    answer = await served.ask()
    assert answer.status_code == status, answer.text
    assert isinstance(answer.json()["error"], str)
    served.step.mode = "good"

    async def is_well() -> bool:
        return (await served.ask()).status_code == 200

    await eventually(is_well)


async def test_garbage_of_a_transformer_reaches_the_client_as_it_is(served: Served) -> None:
    served.step.mode = "garbage"
    answer = await served.ask()
    assert (answer.status_code, answer.content) == (200, b"\x00\xff{")


@pytest.mark.parametrize("name", ["..%2firis", "iris%2f..", "a%00b", "%ff", ".", "iris/../x", "x" * 5000, "ir%0ais"])
async def test_hostile_names_are_refused_everywhere(served: Served, name: str) -> None:
    asked = served.step.asked
    for verb in (":predict", ":explain"):
        for url in (served.stack.url, f"http://{served.steps}"):
            answer = await served.http.post(
                f"{url}/v1/models/{name}{verb}", json=BODY, headers={"authorization": f"Bearer {KEYS['acme']}"}
            )
            assert answer.status_code in {400, 404, 431}, answer.text
    assert served.step.asked == asked


async def test_explain_of_a_model_without_an_explainer_says_so(served: Served) -> None:
    answer = await served.ask("/v1/models/bare:explain")
    assert answer.status_code == 404
    assert "'bare' has no explainer" in answer.json()["error"]


async def test_without_extproc_requests_pass_the_same_steps(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    steps = f"127.0.0.1:{port}"
    gateway = {"steps": steps, "failureMode": "Open"}
    async with (
        Step(steps) as step,
        running_stack(tmp_path, EngineFlags(count=1, speed=20.0), watch=True, gateway=gateway) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        # the rest is what extproc alone enforces
        wanted = [one for one in documents(step, stack.engines) if one["kind"] != "ModelAccessPolicy"]
        for one in wanted:
            one["spec"].pop("rateLimits", None)
        file = stack.config / "more.yaml"
        file.with_suffix(".new").write_text(yaml.safe_dump_all(wanted))
        file.with_suffix(".new").replace(file)

        async def are_served() -> bool:
            answers = [await http.post(one, json=BODY) for one in (PREDICT, EXPLAIN)]
            return [one.status_code for one in answers] == [200, 200]

        await eventually(are_served)
        await stack.processes.end("extproc")
        answer = await http.post(PREDICT, json=BODY)
        assert (answer.status_code, answer.json()) == (200, {"predictions": DOUBLE})
        assert (await http.post(EXPLAIN, json=BODY)).json()["explanations"]
        assert (await http.post(f"http://{steps}{PREDICT}", json=BODY)).json() == {"predictions": SUMS}
        chat = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post(f"http://{steps}/v1/chat/completions", json=chat)).status_code == 404
