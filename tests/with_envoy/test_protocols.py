# SPDX-License-Identifier: Apache-2.0
"""The protocols of classical model servers, from a client through Envoy to an engine and back."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
import pytest_asyncio
import yaml

from bench.engine.tensor_api import JSON_LENGTH
from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, running_stack
from extproc.api.spec import API_VERSION
from tests.waiting import eventually
from tests.with_envoy import http_stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.stack.loopback_stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The engines serve it beside their own model: a second version, under another name.
SECOND: Final = "sql"
# Envoy takes % in metadata for the beginning of a command.
WRITTEN: Final = "/v2/models/%73ql/infer"
TENSOR: Final = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.5, 2.0]}
INFER: Final = {"id": "42", "inputs": [TENSOR]}


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def server(name: str, protocol: str, model: str, *engines: str, **more: object) -> dict[str, object]:
    listed = [{"address": one.removeprefix("http://")} for one in engines]
    return document("ModelServer", name, model=model, protocol=protocol, endpoints=listed, **more)


def route(model: str, **weights: int) -> dict[str, object]:
    targets = [{"modelServerName": name, "weight": weight} for name, weight in weights.items()]
    name = f"{'-'.join(weights)}-route"
    return document("ModelRoute", name, modelName=model, rules=[{"targetModels": targets}])


def models(engines: tuple[str, ...]) -> list[dict[str, object]]:
    return [
        server("v2", "V2", MODEL, *engines),
        server("second", "V2", SECOND, *engines),
        server("v1", "V1", MODEL, *engines),
        # where nobody listens
        server("away", "V2", MODEL, "http://127.0.0.1:1", trafficPolicy={"retry": {"attempts": 0}}),
        server("half", "V2", MODEL, "http://127.0.0.1:1", engines[1]),
        route("iris", v2=3, second=1),
        route("my iris", v1=1),
        route("away", away=1),
        route("half", half=1),
        http_stand.route(
            "team",
            http_stand.rule(
                "/team",
                http_stand.ref("v2", "ModelServer"),
                filters=[
                    {
                        "type": "URLRewrite",
                        "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}},
                    }
                ],
            ),
            http_stand.rule(
                "/written",
                http_stand.ref("second", "ModelServer"),
                filters=[
                    {
                        "type": "URLRewrite",
                        "urlRewrite": {"path": {"type": "ReplaceFullPath", "replaceFullPath": WRITTEN}},
                    }
                ],
            ),
        ),
    ]


@pytest_asyncio.fixture(params=["Close", "Open"], scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """Models of V1 and V2 beside one of OpenAI's API, on the same engines."""
    flags = EngineFlags(count=2, speed=20.0, stream_headers="first-token", adapters=(SECOND,))
    gateway = {"failureMode": request.param}
    async with running_stack(tmp_path_factory.mktemp("stack"), flags, watch=True, gateway=gateway) as stack:
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(f"{file.read_text()}\n---\n{yaml.safe_dump_all(models(stack.engines))}")
        new.replace(file)

        async def is_served() -> bool:
            async with httpx.AsyncClient(timeout=30) as http:
                return (await http.post(f"{stack.url}/v2/models/half/infer", json=INFER)).status_code == 200

        await eventually(is_served)
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        yield client


async def counted(stack: Stack, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        text = (await http.get(f"{stack.metrics}/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
    return sum(float(value) for _, _, value in lines)


async def faults(stack: Stack, engine: int, **plan: object) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        (await http.post(f"{stack.engines[engine]}/faults", json=plan)).raise_for_status()


async def test_v2_goes_by_the_name_in_the_path_and_versions_share_by_weight(http: httpx.AsyncClient) -> None:
    answers = [await http.post("/v2/models/iris/infer?x=1", json=INFER) for _ in range(40)]
    assert {one.status_code for one in answers} == {200}
    assert all(one.json()["outputs"] == [TENSOR] and one.json()["id"] == "42" for one in answers)
    # as the engines call them
    by_name = Counter(one.json()["model_name"] for one in answers)
    assert by_name.keys() == {MODEL, SECOND}
    assert by_name[MODEL] > by_name[SECOND]


async def test_a_version_and_metadata_reach_the_engine(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v2/models/iris/versions/7/infer", json=INFER)
    assert answer.json()["model_version"] == "7"
    assert (await http.get("/v2/models/iris")).json()["platform"] == "simulated"
    assert (await http.get("/v2/models/iris/versions/7")).json()["platform"] == "simulated"


async def test_v1_is_asked_by_a_name_that_the_path_encodes(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/models/my%20iris:predict", json={"instances": [[1, 2], [3.5]]})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [3.0, 3.5]})


@pytest.mark.parametrize("size", [0, 5_000_000])
async def test_binary_tensors_pass_byte_for_byte(http: httpx.AsyncClient, served: Stack, size: int) -> None:
    tensor = {"name": "x", "shape": [size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
    head, raw = json.dumps({"inputs": [tensor]}).encode(), os.urandom(size)
    seen = await counted(served, "attache_prompt_tokens_total")
    answer = await http.post(
        "/v2/models/iris/infer",
        content=head + raw,
        headers={JSON_LENGTH: str(len(head)), "content-type": "application/octet-stream"},
    )
    assert answer.status_code == 200, answer.text
    assert answer.content[int(answer.headers[JSON_LENGTH]) :] == raw
    # no filter takes random bytes for usage
    assert await counted(served, "attache_prompt_tokens_total") == seen


async def test_an_engine_that_fails_is_passed_over(http: httpx.AsyncClient, served: Stack) -> None:
    await faults(served, 0, fault="unavailable", times=4)
    answers = [await http.post("/v2/models/iris/infer", json=INFER) for _ in range(12)]
    assert {one.status_code for one in answers} == {200}

    async def is_well() -> bool:
        return (await http.post(f"{served.engines[0]}/v2/models/{SECOND}/infer", json=INFER)).status_code == 200

    # it was avoided: some of its failures are left
    await eventually(is_well)
    # one address of two has no listener
    answers = [await http.post("/v2/models/half/infer", json=INFER) for _ in range(6)]
    assert {one.status_code for one in answers} == {200}


@pytest.mark.parametrize("path", ["/v2/models/iris/infer", f"/team/v2/models/{SECOND}/infer"])
async def test_the_engine_is_chosen_before_the_body_is_here(http: httpx.AsyncClient, served: Stack, path: str) -> None:
    picked, body = 'attache_requests_total{outcome="picked"}', json.dumps(INFER).encode()
    before = await counted(served, picked)

    async def is_picked() -> bool:
        return await counted(served, picked) == before + 1

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:5]
        await eventually(is_picked)
        yield body[5:]

    assert (await http.post(path, content=slowly())).status_code == 200


async def test_an_http_route_keeps_the_path_that_it_writes(http: httpx.AsyncClient) -> None:
    assert (await http.post(f"/team/v2/models/{SECOND}/infer", json=INFER)).json()["model_name"] == SECOND
    # extproc does not know it: the engine says so
    unknown = await http.post(f"/team/v2/models/{SECOND}/other", json=INFER)
    assert (unknown.status_code, unknown.text) == (404, "404: Not Found")
    assert (await http.post("/team/v2/repository/index", json={})).status_code == 403


async def test_an_http_route_may_write_any_path(http: httpx.AsyncClient) -> None:
    answer = await http.post("/written", json=INFER)
    assert (answer.status_code, answer.json()["model_name"]) == (200, SECOND)


async def test_health_is_answered_from_readiness(http: httpx.AsyncClient) -> None:
    for path, body in {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/iris/ready": {"name": "iris", "ready": True},
        "/v1/models/my%20iris": {"name": "my iris", "ready": True},
    }.items():
        answer = await http.get(path)
        assert (answer.status_code, answer.json()) == (200, body)
    assert (await http.get("/v2")).json()["name"] == "attache"
    assert (await http.get("/v2/models/none/ready")).status_code == 404

    async def is_known() -> bool:
        await http.post("/v2/models/away/infer", json=INFER)
        return (await http.get("/v2/models/away/ready")).status_code == 503

    await eventually(is_known)


async def test_repository_verbs_reach_no_engine(http: httpx.AsyncClient) -> None:
    for path in (
        "/v2/repository/index",
        f"/v2/repository/models/{MODEL}/unload",
        "/v2//repository/index",
        "/v2/%72epository/index",
        "/v2/models/../repository/index",
    ):
        answer = await http.post(path, json={})
        assert (answer.status_code, list(answer.json())) == (403, ["error"]), path


async def test_errors_have_the_form_of_the_protocol(http: httpx.AsyncClient) -> None:
    refused = {
        "unknown": await http.post("/v2/models/none/infer", json=INFER),
        "of another protocol": await http.post("/v1/models/iris:predict", json={"instances": [1]}),
        "method": await http.get("/v2/models/iris/infer"),
        "verb": await http.post("/v2/models/iris/unload", json={}),
        "no body": await http.post("/v1/models/my%20iris:predict"),
        "no engine": await http.post("/v2/models/away/infer", json=INFER),
    }
    statuses = {name: one.status_code for name, one in refused.items()}
    assert statuses == {
        "unknown": 404,
        "of another protocol": 404,
        "method": 405,
        "verb": 404,
        "no body": 400,
        "no engine": 503,
    }
    for name, one in refused.items():
        assert isinstance(one.json()["error"], str), name
    chat = await http.post("/v1/chat/completions", json={"model": "iris", "messages": []})
    assert chat.status_code == 404
    assert "/v2/models/iris/infer" in chat.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "%2e%2e",
        "a%2Fb",
        "%2e%2e%2f%2e%2e",
        "a%00",
        "a%0d%0ax:%20y",
        "%ff",
        "caf%C3%A9",
        "a" * 10_000,
        "%41" * 3_000,
        "iris%20",
        "%69ris%2Finfer",
        ";x",
        "{iris}",
    ],
)
async def test_a_hostile_name_gets_a_clear_error(served: Stack, name: str) -> None:
    picked = await counted(served, 'attache_requests_total{outcome="picked"}')
    for path in (f"/v2/models/{name}/infer", f"/v1/models/{name}:predict"):
        answer = await raw_post(served, path)
        assert answer.status_code in {400, 403, 404, 405}, (path, answer.status_code)
        assert answer.json()["error"]
    assert await counted(served, 'attache_requests_total{outcome="picked"}') == picked


async def raw_post(stack: Stack, path: str) -> httpx.Response:
    """The path as it is: httpx would write it in its own way."""
    url = httpx.URL(stack.url, raw_path=path.encode())
    async with httpx.AsyncClient(timeout=60) as http:
        return await http.send(http.build_request("POST", url, json=INFER))


async def test_openais_clients_are_served_as_before(http: httpx.AsyncClient) -> None:
    listed: dict[str, Any] = (await http.get("/v1/models")).json()
    assert {one["id"] for one in listed["data"]} >= {ALIAS, "iris", "my iris"}
    assert (await http.get(f"/v1/models/{ALIAS}")).json()["object"] == "model"
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_without_extproc_the_path_still_leads_to_the_model(http: httpx.AsyncClient, served: Stack) -> None:
    """It is the last test: extproc does not come back."""
    await served.processes.end("extproc")
    answers = [await http.post("/v2/models/iris/infer?x=1", json=INFER) for _ in range(20)]
    if served.gateway["failureMode"] == "Close":
        assert {one.status_code for one in answers} == {503}
        assert all(isinstance(one.json()["error"], str) for one in answers)
        return
    assert {one.status_code for one in answers} == {200}
    assert {one.json()["model_name"] for one in answers} == {MODEL}
    predicted = await http.post("/v1/models/my%20iris:predict", json={"instances": [1]})
    assert predicted.json() == {"predictions": [1.0]}
    for hostile in ("/v2/models/none/infer", "/v2/repository/index", "/v2/models/iris/unload"):
        assert (await http.post(hostile, json={})).status_code == 404
