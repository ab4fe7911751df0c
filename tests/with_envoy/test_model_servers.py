# SPDX-License-Identifier: Apache-2.0
"""KServe's Hugging Face server, TensorFlow Serving and TorchServe, as Models have them, behind a real Envoy.

Doubles with the paths that these programs have and no others: python/kserve/kserve/protocol/rest of kserve/kserve, and
tensorflow_serving/model_servers/http_rest_api_handler.cc of tensorflow/serving.
"""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx
import openai
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.loopback_stack import EngineFlags, running_stack
from extproc.api.spec import API_VERSION
from tests.rendered_models import rendered_model
from tests.waiting import eventually
from tests.with_envoy import http_stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
# Models of the Hugging Face server by OpenAI's API.
GENERATING: Final = ("writer", "again", "falls", "catches")
USAGE: Final = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
INSTANCES: Final = {"instances": [[1.0, 2.0], [3.0, 4.0]]}
TENSOR: Final = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.0]}
_VERSION: Final = r"(?:/versions/(?P<version>\d+))?"
_MODEL: Final = r"(?P<model>[^/:]+)"
V1: Final = (
    rf"POST /v1/models/{_MODEL}:predict",
    rf"GET /v1/models/{_MODEL}",
)
V2: Final = (
    rf"POST /v2/models/{_MODEL}{_VERSION}/infer",
    rf"GET /v2/models/{_MODEL}{_VERSION}(?:/ready)?",
)
OPENAI: Final = (r"POST /openai/v1/(?:chat/completions|completions|embeddings|rerank)",)
AT_THE_ROOT: Final = (r"POST /v1/(?:chat/completions|completions)",)
_LABEL: Final = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/]+))?"
TENSORFLOW: Final = (
    rf"POST /v1/models/{_MODEL}{_LABEL}:(?:predict|classify|regress)",
    rf"GET /v1/models/{_MODEL}{_LABEL}(?:/metadata)?",
)


class Double:
    """Has the paths of ``forms`` and no others. ``models``: that it serves. ``seen``: method and path of each request.
    ``fails``: so many requests get 503 first.
    """

    def __init__(self, *forms: str, models: Sequence[str], error: Mapping[str, str]) -> None:
        self._forms = [re.compile(one) for one in forms]
        self._models = models
        self._error = error
        self.seen: list[str] = []
        self.fails = 0
        self.address = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        yield
        await runner.cleanup()

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        self.seen.append(f"{http.method} {http.raw_path}")
        asked = f"{http.method} {http.path}"
        found = next((match for one in self._forms if (match := one.fullmatch(asked))), None)
        if found is None:
            return web.json_response(self._error, status=404)
        if self.fails:
            self.fails -= 1
            return web.json_response({"error": "not now"}, status=503)
        body = await http.json() if http.method == "POST" else {}
        named = found.groupdict()
        model = named.get("model") or body.get("model")
        if model not in self._models:
            return web.json_response({"error": f"Servable not found for request: Latest({model})"}, status=404)
        if body.get("stream"):
            return await _stream(http, model)
        return web.json_response(_whole(model, body, named))


def _whole(model: str, body: Mapping[str, Any], named: Mapping[str, str]) -> dict[str, Any]:
    if "instances" in body:
        return {"predictions": [sum(one) for one in body["instances"]]}
    if "inputs" in body:
        return {"model_name": model, "id": body.get("id", "1"), "outputs": body["inputs"]}
    if not body:
        return {"model": model, "version": named.get("version")}
    message = {"role": "assistant", "content": "hello"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice], "usage": USAGE}


async def _stream(http: web.Request, model: str) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(http)
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": one}}]} for one in ("hel", "lo")]
    for chunk in (*chunks, {"choices": [], "usage": USAGE}):
        found = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": model, **chunk}
        await answer.write(f"data: {json.dumps(found)}\n\n".encode())
    await answer.write(b"data: [DONE]\n\n")
    return answer


def of_model(name: str, *engines: Double, **spec: object) -> list[dict[str, Any]]:
    """The ModelServer and the ModelRoute of a Model, with engines of this machine."""
    # what is ejected is for other tests
    policy = {"outlierDetection": {"consecutiveFailures": 1000}}
    return rendered_model(name, **spec).documents(*(one.address for one in engines), trafficPolicy=policy)


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


class Served:
    """``doubles``: by name, two of the Hugging Face server. ``http``: a client of the gateway."""

    def __init__(self, stack: Stack, doubles: Mapping[str, Double], http: httpx.AsyncClient) -> None:
        self.stack = stack
        self.doubles = doubles
        self.http = http

    def forget(self) -> None:
        for one in self.doubles.values():
            one.seen.clear()
            one.fails = 0

    async def chat(self, model: str, path: str = CHAT) -> httpx.Response:
        return await self.http.post(path, json={"model": model, "messages": [{"role": "user", "content": "hi"}]})

    @property
    def seen(self) -> list[str]:
        return [path for one in self.doubles.values() for path in one.seen]


def models(doubles: Mapping[str, Double]) -> list[dict[str, Any]]:
    hf, second, plain, tf, torch = (doubles[one] for one in ("hf", "hf-two", "vllm", "tf", "torch"))
    runtime: dict[str, Any] = {"backends": [{"name": "default", "runtime": "huggingfaceserver"}]}
    tensorflow: dict[str, Any] = {"format": {"name": "tensorflow"}}
    pytorch: dict[str, Any] = {"format": {"name": "pytorch"}}
    # one for each test in which it fails: breakers remember
    at_the_root = [
        document("ModelServer", name, model="plain", endpoints=[{"address": plain.address}], scrapeInterval="0s")
        for name in ("caught", "fallen")
    ]
    team = {"urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}, "type": "URLRewrite"}
    chains = {"down": ("falls-default", "caught"), "up": ("fallen", "catches-default")}
    return [
        *(one for name in GENERATING for one in of_model(name, hf, second, protocol="OpenAI", **runtime)),
        *of_model("sentiment", hf, protocol="V2"),
        *of_model("topic", hf, protocol="V1"),
        *of_model("half-plus-two", tf, **tensorflow),
        *of_model("plus", tf, protocol="V1", **tensorflow),
        *of_model("mnist", torch, **pytorch),
        *of_model("digits", torch, protocol="V2", **pytorch),
        *at_the_root,
        *(
            document(
                "ModelRoute",
                name,
                modelName=name,
                rules=[{"targetModels": [{"modelServerName": one}], "fallback": [{"modelServerName": other}]}],
            )
            for name, (one, other) in chains.items()
        ),
        http_stand.route(
            "team", http_stand.rule("/team", http_stand.ref("writer-default", "ModelServer"), filters=[team])
        ),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A directory with what the manager makes of Models."""
    absent, malformed = {"detail": "Not Found"}, {"error": "Malformed request"}
    doubles = {
        "hf": Double(*OPENAI, *V1, *V2, models=(*GENERATING, "sentiment", "topic"), error=absent),
        "hf-two": Double(*OPENAI, *V1, *V2, models=GENERATING, error=absent),
        "vllm": Double(*AT_THE_ROOT, models=("plain",), error=absent),
        "tf": Double(*TENSORFLOW, models=("half-plus-two", "plus"), error=malformed),
        "torch": Double(*V1, *V2, models=("mnist", "digits"), error=absent),
    }
    async with AsyncExitStack() as exits:
        for one in doubles.values():
            await exits.enter_async_context(one.running())
        folder = tmp_path_factory.mktemp("stack")
        running = running_stack(folder, EngineFlags(count=1), watch=True, gateway={"failureMode": "Open"})
        stack = await exits.enter_async_context(running)
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(f"{file.read_text()}\n---\n{yaml.safe_dump_all(models(doubles))}")
        new.replace(file)
        http = await exits.enter_async_context(httpx.AsyncClient(base_url=stack.url, timeout=60))
        found = Served(stack, doubles, http)

        async def is_served() -> bool:
            return (await http.post("/v1/models/mnist:predict", json=INSTANCES)).status_code == 200

        await eventually(is_served)
        yield found


@pytest.fixture
def gateway(served: Served) -> Served:
    served.forget()
    return served


async def test_openais_api_is_asked_under_the_prefix_of_the_server(gateway: Served) -> None:
    answer = await gateway.chat("writer", f"{CHAT}?trace=1")
    assert (answer.status_code, answer.json()["model"]) == (200, "writer")
    assert gateway.seen == [f"POST /openai{CHAT}?trace=1"]


async def test_a_client_of_openai_reads_whole_answers_and_streams(gateway: Served) -> None:
    asked: Any = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=f"{gateway.stack.url}/v1", api_key="any", max_retries=0) as client:
        whole = await client.chat.completions.create(model="writer", messages=asked)
        assert whole.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(model="writer", messages=asked, stream=True)
        assert "".join([one.choices[0].delta.content or "" async for one in stream if one.choices]) == "hello"
    assert gateway.seen == [f"POST /openai{CHAT}"] * 2


async def test_the_same_server_is_asked_by_v1_and_v2_without_the_prefix(gateway: Served) -> None:
    infer = await gateway.http.post("/v2/models/sentiment/infer", json={"inputs": [TENSOR]})
    assert (infer.status_code, infer.json()["outputs"]) == (200, [TENSOR])
    predict = await gateway.http.post("/v1/models/topic:predict", json=INSTANCES)
    assert (predict.status_code, predict.json()) == (200, {"predictions": [3.0, 7.0]})
    assert gateway.seen == ["POST /v2/models/sentiment/infer", "POST /v1/models/topic:predict"]


async def test_a_model_of_another_protocol_is_not_asked_by_openais(gateway: Served) -> None:
    answer = await gateway.chat("sentiment")
    assert (answer.status_code, gateway.seen) == (404, [])
    assert "is not of the protocol of 'sentiment', V2" in answer.json()["error"]["message"]


async def test_the_next_endpoint_gets_the_prefix_once(gateway: Served) -> None:
    for one in ("hf", "hf-two"):
        gateway.doubles[one].fails = 1
    answer = await gateway.chat("again")
    assert answer.status_code == 200, answer.text
    assert gateway.seen == [f"POST /openai{CHAT}"] * 3


@pytest.mark.parametrize("name", ["down", "up"])
async def test_a_fallback_has_the_path_of_its_own_server(gateway: Served, name: str) -> None:
    first = ("hf", "hf-two") if name == "down" else ("vllm",)
    for one in first:
        gateway.doubles[one].fails = 1000
    answer = await gateway.chat(name)
    assert answer.status_code == 200, answer.text
    roots = {f"POST {CHAT}"} if name == "up" else {f"POST /openai{CHAT}"}
    others = {f"POST {CHAT}"} if name == "down" else {f"POST /openai{CHAT}"}
    assert {path for one in first for path in gateway.doubles[one].seen} == roots
    assert {path for key, one in gateway.doubles.items() if key not in first for path in one.seen} == others


async def test_the_prefix_stands_before_what_an_http_route_writes(gateway: Served) -> None:
    answer = await gateway.chat("writer", f"/team{CHAT}")
    assert answer.status_code == 200, answer.text
    assert gateway.seen == [f"POST /openai{CHAT}"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models/half-plus-two:predict"),
        ("POST", "/v1/models/half-plus-two:classify"),
        ("POST", "/v1/models/half-plus-two:regress"),
        ("POST", "/v1/models/half-plus-two/versions/7:predict"),
        ("POST", "/v1/models/half-plus-two/labels/stable:predict"),
        ("GET", "/v1/models/half-plus-two"),
        ("GET", "/v1/models/half-plus-two/versions/7"),
        ("GET", "/v1/models/half-plus-two/metadata"),
        ("GET", "/v1/models/half-plus-two/labels/stable/metadata"),
    ],
)
async def test_tensorflow_serving_gets_its_own_paths(gateway: Served, method: str, path: str) -> None:
    answer = await gateway.http.request(method, path, json=INSTANCES if method == "POST" else None)
    assert answer.status_code == 200, answer.text
    assert gateway.seen == [f"{method} {path}"]


async def test_v1_of_tensorflow_serving_is_asked_for_predictions_alone(gateway: Served) -> None:
    answer = await gateway.http.post("/v1/models/plus:predict", json=INSTANCES)
    assert (answer.status_code, answer.json()) == (200, {"predictions": [3.0, 7.0]})
    # readiness, as of any model of V1
    assert (await gateway.http.get("/v1/models/plus")).status_code == 200
    assert (await gateway.http.post("/v1/models/plus:classify", json=INSTANCES)).status_code == 404
    assert gateway.seen == ["POST /v1/models/plus:predict"]


async def test_torchserve_is_asked_by_v1_and_v2(gateway: Served) -> None:
    predict = await gateway.http.post("/v1/models/mnist:predict", json=INSTANCES)
    assert predict.json() == {"predictions": [3.0, 7.0]}
    infer = await gateway.http.post("/v2/models/digits/infer", json={"inputs": [TENSOR]})
    assert infer.json()["outputs"] == [TENSOR]
    assert (await gateway.http.get("/v2/models/digits/ready")).status_code == 200
    assert gateway.seen == ["POST /v1/models/mnist:predict", "POST /v2/models/digits/infer"]


async def test_without_extproc_envoy_writes_the_prefix_by_itself(gateway: Served) -> None:
    await gateway.stack.processes.end("extproc")

    async def is_answered() -> bool:
        gateway.forget()
        return (await gateway.chat("writer")).status_code == 200

    await eventually(is_answered)
    assert gateway.seen == [f"POST /openai{CHAT}"]
