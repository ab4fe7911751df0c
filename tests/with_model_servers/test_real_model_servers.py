# SPDX-License-Identifier: Apache-2.0
"""What MLServer and KServe's SDK answer through the gateway is what they answer directly."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from typing import TYPE_CHECKING, Final

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.engine.tensor_api import JSON_LENGTH
from tests.rendered_models import rendered_model
from tests.waiting import eventually
from tests.with_model_servers.conftest import gateway_to, route, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.with_model_servers.conftest import ModelServers

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A setosa and a virginica.
FLOWERS: Final = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]
CLASSES: Final = [0, 2]


def infer(rows: list[list[float]]) -> dict[str, object]:
    tensor = {
        "name": "x",
        "shape": [len(rows), len(rows[0])],
        "datatype": "FP64",
        "data": [one for row in rows for one in row],
    }
    return {"id": "42", "inputs": [tensor]}


class Served(msgspec.Struct, frozen=True):
    """``http``: a client of the gateway. ``direct``: the URLs of the servers by the name of the model at the gateway,
    with the model's own name.
    """

    http: httpx.AsyncClient
    direct: dict[str, tuple[str, str]]

    async def both(
        self, path: str, name: str, *, json: object = None, content: bytes | None = None, **headers: str
    ) -> tuple[httpx.Response, httpx.Response]:
        """The answers through the gateway and of the server itself. ``path``: with NAME for the model's name."""
        url, own = self.direct[name]
        method = "GET" if json is None and content is None else "POST"
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        through, direct = [
            await self.http.request(method, one, json=json, content=content, headers=named)
            for one in (path.replace("NAME", name), url + path.replace("NAME", own))
        ]
        return through, direct


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(servers: ModelServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Two versions at MLServers behind one route, and models of KServe's SDK by V1 and V2."""
    tree = await servers.start_mlserver("mlserver-tree", "tree")
    logistic = await servers.start_mlserver("mlserver-logistic", "logistic")
    kserve = await servers.start_kserve("kserve-tree", "tree")
    identity = await servers.start_kserve("kserve-identity", "identity")
    documents = [
        server("ml", "V2", "tree", tree),
        server("ml-two", "V2", "logistic", logistic),
        server("ks-one", "V1", "tree", kserve),
        server("ks-two", "V2", "tree", kserve),
        server("same", "V2", "identity", identity),
        route("mlserver", ml=1),
        route("versions", **{"ml": 3, "ml-two": 1}),
        route("kserve", **{"ks-one": 1, "ks-two": 1}),
        route("same", same=1),
    ]
    direct = {
        "mlserver": (f"http://{tree}", "tree"),
        "kserve": (f"http://{kserve}", "tree"),
        "same": (f"http://{identity}", "identity"),
    }
    async with (
        gateway_to(tmp_path_factory.mktemp("stack"), *documents) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):

        async def is_served() -> bool:
            return (await http.post("/v2/models/same/infer", json=infer(FLOWERS))).status_code == 200

        await eventually(is_served)
        yield Served(http, direct)


def assert_same(through: httpx.Response, direct: httpx.Response) -> None:
    assert through.status_code == direct.status_code
    assert through.content == direct.content
    for header in ("content-type", JSON_LENGTH):
        assert through.headers.get(header) == direct.headers.get(header)


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
async def test_v2_answers_as_the_server_itself(served: Served, name: str) -> None:
    through, direct = await served.both("/v2/models/NAME/infer", name, json=infer(FLOWERS))
    assert_same(through, direct)
    assert through.status_code == 200, through.text
    answer = through.json()
    assert (answer["model_name"], answer["id"], answer["outputs"][0]["data"]) == ("tree", "42", CLASSES)


async def test_v1_answers_as_the_server_itself(served: Served) -> None:
    through, direct = await served.both("/v1/models/NAME:predict", "kserve", json={"instances": FLOWERS})
    assert_same(through, direct)
    assert (through.status_code, through.json()) == (200, {"predictions": CLASSES})


@pytest.mark.parametrize("rows", [1, 25_000])
async def test_binary_tensors_come_back_byte_for_byte(served: Served, rows: int) -> None:
    chance = random.Random(7)
    raw = struct.pack(f"<{4 * rows}d", *(chance.uniform(-1e9, 1e9) for _ in range(4 * rows)))
    tensor = {"name": "x", "shape": [rows, 4], "datatype": "FP64", "parameters": {"binary_data_size": len(raw)}}
    asked = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    head = json.dumps(asked).encode()
    through, direct = await served.both(
        "/v2/models/NAME/infer",
        "same",
        content=head + raw,
        content_type="application/octet-stream",
        **{JSON_LENGTH: str(len(head))},
    )
    assert through.status_code == 200, through.text
    # each answer has an id of its own in its JSON
    parts = [(int(one.headers[JSON_LENGTH]), one) for one in (through, direct)]
    (through_json, through_raw), (direct_json, direct_raw) = (
        (json.loads(one.content[:size]), one.content[size:]) for size, one in parts
    )
    assert through_raw == direct_raw == raw
    assert {**through_json, "id": ""} == {**direct_json, "id": ""}
    # KServe names no type of such an answer
    assert through.headers.get("content-type") == direct.headers.get("content-type")


async def test_mlserver_takes_no_binary_tensors(served: Served) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP64", "parameters": {"binary_data_size": 32}}
    head = json.dumps({"inputs": [tensor]}).encode()
    through, direct = await served.both(
        "/v2/models/NAME/infer",
        "mlserver",
        content=head + bytes(32),
        content_type="application/octet-stream",
        **{JSON_LENGTH: str(len(head))},
    )
    assert_same(through, direct)
    assert through.status_code == 422


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
@pytest.mark.parametrize("path", ["/v2/models/NAME", "/v2/models/NAME/versions/7", "/v2/models/NAME/versions/7/ready"])
async def test_metadata_and_versions_are_those_of_the_server(served: Served, name: str, path: str) -> None:
    through, direct = await served.both(path, name)
    assert_same(through, direct)
    # MLServer has no such version; KServe's SDK has no versions
    expected = 200 if path.endswith("NAME") else {"mlserver": 404, "kserve": 501}[name]
    assert through.status_code == expected


@pytest.mark.parametrize("name", ["mlserver", "kserve"])
async def test_readiness_is_200_as_at_the_server(served: Served, name: str) -> None:
    through, direct = await served.both("/v2/models/NAME/ready", name)
    assert (through.status_code, direct.status_code) == (200, 200)
    # MLServer answers without a body; the gateway answers as KServe's SDK
    assert through.json() == {"name": name, "ready": True}


_NARROW: Final = infer([[5.1, 3.5, 1.4]])


@pytest.mark.parametrize(
    ("name", "path", "body", "status"),
    [
        ("mlserver", "/v2/models/NAME/infer", msgspec.json.encode(_NARROW), 500),
        ("mlserver", "/v2/models/NAME/infer", b'{"inputs": []}', 400),
        ("mlserver", "/v2/models/NAME/infer", b'{"inputs":', 422),
        ("mlserver", "/v2/models/NAME/versions/7/infer", msgspec.json.encode(infer(FLOWERS)), 404),
        ("kserve", "/v2/models/NAME/infer", msgspec.json.encode(_NARROW), 500),
        ("kserve", "/v2/models/NAME/infer", b'{"inputs":', 422),
        ("kserve", "/v2/models/NAME/versions/7/infer", msgspec.json.encode(infer(FLOWERS)), 501),
        ("kserve", "/v1/models/NAME:predict", b'{"instances": [[5.1, 3.5, 1.4]]}', 500),
        ("kserve", "/v1/models/NAME:predict", b'{"inst', 400),
    ],
)
async def test_the_servers_own_error_reaches_the_client(
    served: Served, name: str, path: str, body: bytes, status: int
) -> None:
    through, direct = await served.both(path, name, content=body, content_type="application/json")
    assert_same(through, direct)
    assert through.status_code == status


@pytest.mark.parametrize(("name", "status"), [("mlserver", 422), ("kserve", 400)])
async def test_json_under_the_type_that_curl_sets_is_refused(served: Served, name: str, status: int) -> None:
    body = msgspec.json.encode(infer(FLOWERS))
    through, direct = await served.both(
        "/v2/models/NAME/infer", name, content=body, content_type="application/x-www-form-urlencoded"
    )
    assert_same(through, direct)
    assert through.status_code == status


async def test_two_versions_share_by_weight(served: Served) -> None:
    answers = [await served.http.post("/v2/models/versions/infer", json=infer(FLOWERS)) for _ in range(120)]
    assert {one.status_code for one in answers} == {200}
    counts = Counter(one.json()["model_name"] for one in answers)
    assert counts.keys() == {"tree", "logistic"}
    # 30 of 120 expected, with a standard deviation of 4.7: 5 of them
    assert 7 <= counts["logistic"] <= 53


async def test_mlserver_serves_with_the_environment_that_a_model_gives_it(servers: ModelServers) -> None:
    engine = rendered_model("iris", format={"name": "sklearn"}).engine
    given = {one["name"]: one["value"] for one in engine["env"]}
    assert engine["args"] == []
    # the weights are elsewhere here; the ports are free ones of this machine
    weights = str(servers.models / "tree")
    here = {name: value.replace("/mnt/models", weights) for name, value in given.items()}
    assert {"MLSERVER_HTTP_PORT", "MLSERVER_GRPC_PORT", "MLSERVER_METRICS_PORT", "MODELS_DIR"} <= here.keys()
    address = await servers.start_mlserver(
        "as-a-pod",
        "tree",
        {**here, "MLSERVER_MODEL_NAME": given["MLSERVER_MODEL_NAME"]},
    )
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
        probes = [engine[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")]
        assert [(await http.get(path)).status_code for path in probes] == [200, 200]
        answer = await http.post("/v2/models/iris/infer", json=infer(FLOWERS))
    assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, CLASSES)
