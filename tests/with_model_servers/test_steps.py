# SPDX-License-Identifier: Apache-2.0
"""A transformer and an explainer of KServe's SDK, as its users write them, in front of a real scikit-learn server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import Stack
from bench.stack.processes import free_ports
from tests.waiting import eventually
from tests.with_model_servers.conftest import ModelServers, configure, document, gateway_to, server
from tests.with_model_servers.test_replicas import Load, until_idle, until_served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREDICT: Final = "/v1/models/iris:predict"
# A setosa and a virginica, in millimetres and in the predictor's centimetres.
MILLIMETRES: Final = {"instances": [[51, 35, 14, 2], [67, 30, 52, 23]]}
CENTIMETRES: Final = {"instances": [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]}


class Served(msgspec.Struct):
    stack: Stack
    servers: ModelServers
    http: httpx.AsyncClient
    steps: str
    predictors: list[str]
    transformers: list[str]
    explainer: str
    draining: str = ""

    def apply(self) -> None:
        """As a Model makes them; the route of explanations, as docs/protocols.md has it."""
        limits = {"timeout": "5s", "retry": {"attempts": 1}}
        transformer = server("transformer", "V1", "iris", *self.transformers, draining=self.draining)
        rules = [
            {
                "modelMatch": {"uri": {"regex": "/v1/models/.*:explain"}},
                "targetModels": [{"modelServerName": "explainer"}],
            },
            {"targetModels": [{"modelServerName": "transformer"}]},
        ]
        predictor = {"rules": [{"targetModels": [{"modelServerName": "predictor"}]}], "callers": "Steps"}
        configure(
            self.stack,
            server("predictor", "V1", "iris", *self.predictors, draining=self.draining),
            {**transformer, "spec": {**transformer["spec"], "trafficPolicy": limits}},  # type: ignore[dict-item]
            server("explainer", "V1", "iris", self.explainer),
            document("ModelRoute", "iris", {"modelName": "iris", "rules": rules}),
            document("ModelRoute", "iris-predictor", {"modelName": "iris", **predictor}),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(servers: ModelServers, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    (port,) = free_ports(1)
    steps = f"127.0.0.1:{port}"
    # the predictor knows its model by the same name: a step asks for its own
    (servers.models / "iris").symlink_to(servers.models / "tree")
    predictors = [await servers.start_kserve(f"predictor-{number}", "iris") for number in range(2)]
    transformers = [
        await servers.start_step(f"transformer-{number}", "transformer", "iris", steps) for number in range(2)
    ]
    explainer = await servers.start_step("explainer", "explainer", "iris", steps)
    async with (
        gateway_to(tmp_path_factory.mktemp("stack"), gateway={"steps": steps}) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
    ):
        found = Served(stack, servers, http, steps, predictors, transformers, explainer)
        found.apply()

        async def is_served() -> bool:
            return (await http.post(PREDICT, json=MILLIMETRES)).status_code == 200

        await eventually(is_served)
        yield found


async def test_a_transformer_changes_requests_before_and_answers_after(served: Served) -> None:
    answer = await served.http.post(PREDICT, json=MILLIMETRES)
    assert (answer.status_code, answer.json()) == (200, {"predictions": ["setosa", "virginica"]})
    inside = await served.http.post(f"http://{served.steps}{PREDICT}", json=CENTIMETRES)
    assert (inside.status_code, inside.json()) == (200, {"predictions": [0, 2]})


async def test_an_explainer_answers_and_asks_the_predictor(served: Served) -> None:
    answer = await served.http.post("/v1/models/iris:explain", json=CENTIMETRES)
    assert answer.status_code == 200, answer.text
    # without its petals' length a virginica is none
    assert answer.json() == {"explanations": [[], [2]]}


async def test_what_the_predictor_refuses_is_what_the_client_reads(served: Served) -> None:
    answer = await served.http.post(PREDICT, json={"instances": [[51, 35]]})
    assert answer.status_code == 500
    assert "X has 2 features, but DecisionTreeClassifier is expecting 4" in answer.json()["error"]


async def test_what_the_transformer_cannot_read_is_its_own_400(served: Served) -> None:
    answer = await served.http.post(PREDICT, content=b'{"inst', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "Unrecognized request format" in answer.json()["error"]


async def test_a_transformer_that_hangs_is_a_504_and_the_next_request_is_served(served: Served) -> None:
    answer = await served.http.post(PREDICT, json={"instances": "hang"})
    assert (answer.status_code, list(answer.json())) == (504, ["error"])
    assert (await served.http.post(PREDICT, json=MILLIMETRES)).status_code == 200


async def test_a_predictor_that_is_away_is_told_through_the_transformer(served: Served) -> None:
    known, served.predictors = served.predictors, []
    served.apply()

    async def is_away() -> bool:
        return (await served.http.post(PREDICT, json=MILLIMETRES)).status_code != 200

    await eventually(is_away)
    answer = await served.http.post(PREDICT, json=MILLIMETRES)
    assert answer.status_code == 500
    assert "503 Service Unavailable" in answer.json()["error"]
    served.predictors = known
    served.apply()

    async def is_back() -> bool:
        return (await served.http.post(PREDICT, json=MILLIMETRES)).status_code == 200

    await eventually(is_back)


def is_good(answer: object) -> bool:
    return answer == {"predictions": ["setosa", "virginica"]}


async def test_two_replicas_of_each_become_one_and_no_request_fails(served: Served) -> None:
    await until_answered(served)
    async with Load(served.stack.url, PREDICT, MILLIMETRES, is_good) as load:
        await until_served(served.stack, *served.transformers, *served.predictors)
        for addresses, name in ((served.transformers, "transformer-1"), (served.predictors, "predictor-1")):
            served.draining = addresses[-1]
            served.apply()
            await until_idle(served.stack, load, addresses[-1])
            await served.servers.processes.end(name)
            addresses.pop()
            served.draining = ""
            served.apply()
            await load.more(40)
    assert load.failed == []
    assert load.good > 100


async def test_a_transformer_that_ends_is_a_503_in_the_protocols_form(served: Served) -> None:
    await served.servers.processes.end("transformer-0")
    answer = await served.http.post(PREDICT, json=MILLIMETRES)
    assert (answer.status_code, list(answer.json())) == (503, ["error"])
    # the predictor and the explainer go on
    assert (await served.http.post("/v1/models/iris:explain", json=CENTIMETRES)).status_code == 200


async def until_answered(served: Served) -> None:
    async def is_served() -> bool:
        return (await served.http.post(PREDICT, json=MILLIMETRES)).status_code == 200

    await eventually(is_served)
