# SPDX-License-Identifier: Apache-2.0
"""KServe's SDK serves with the arguments that the presets of its servers give it, and behind the gateway with the
ModelServer of a Model.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest

from bench.stack.processes import free_ports
from controller.agents.runtime.metrics import parse_engine_metrics
from extproc.engines.dialects import DIALECTS
from tests.rendered_models import rendered_model
from tests.waiting import eventually
from tests.with_model_servers.conftest import gateway_to
from tests.with_model_servers.test_real_model_servers import CLASSES, FLOWERS, infer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.rendered_models import RenderedModel
    from tests.with_model_servers.conftest import ModelServers

pytestmark = pytest.mark.asyncio(loop_scope="module")

# By format, the directory with a model of it.
MODELS: Final = {"sklearn": "tree", "xgboost": "xgboost", "lightgbm": "lightgbm"}


def asked(name: str, format_: str, protocol: str) -> RenderedModel:
    """The engine that the SDK's server of the format runs."""
    return rendered_model(
        name, format={"name": format_}, protocol=protocol, backends=[{"name": "default", "engine": "KServe"}]
    )


@pytest.mark.parametrize("format_", MODELS)
async def test_the_arguments_and_paths_of_a_preset_are_those_of_the_server(servers: ModelServers, format_: str) -> None:
    name = f"given-{format_}"
    model = asked(name, format_, "V1")
    address = await servers.start_as_given(name, MODELS[format_], model.engine["args"])
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
        probes = [model.engine[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")]
        of_agent = [DIALECTS["KServe"].health, DIALECTS["KServe"].ready.replace("{name}", name)]
        assert [(await http.get(path)).status_code for path in (*probes, *of_agent)] == [200] * 4
        absent = await http.get(DIALECTS["KServe"].ready.replace("{name}", "none"))
        assert absent.status_code == 404
        answer = await http.post(f"/v1/models/{name}:predict", json={"instances": FLOWERS})
        assert [round(one) for one in answer.json()["predictions"]] == CLASSES
        page = parse_engine_metrics(
            (await http.get(DIALECTS["KServe"].metrics_path)).content, DIALECTS["KServe"], unix_s=0.0
        )
        assert page.histograms["request_duration_seconds"][name].count == 1.0


@pytest.mark.parametrize("format_", MODELS)
async def test_one_server_is_asked_by_v1_and_by_v2_as_its_model_says(
    servers: ModelServers, format_: str, tmp_path: Path
) -> None:
    name = f"routed-{format_}"
    address = await servers.start_as_given(name, MODELS[format_], asked(name, format_, "V1").engine["args"])
    body: dict[str, Any] = {"V1": {"instances": FLOWERS}, "V2": infer(FLOWERS)}
    for protocol, path in (("V1", f"/v1/models/{name}:predict"), ("V2", f"/v2/models/{name}/infer")):
        documents = asked(name, format_, protocol).documents(address)
        async with (
            gateway_to(tmp_path / protocol, *documents) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=60) as http,
        ):

            async def is_served(path: str = path, sent: Any = body[protocol]) -> bool:  # noqa: ANN401 - JSON
                return (await http.post(path, json=sent)).status_code == 200

            await eventually(is_served)
            answer = (await http.post(path, json=body[protocol])).json()
            found = answer["predictions"] if protocol == "V1" else answer["outputs"][0]["data"]
            assert [round(one) for one in found] == CLASSES
            other = f"/v2/models/{name}/infer" if protocol == "V1" else f"/v1/models/{name}:predict"
            assert (await http.post(other, json={})).status_code == 404


async def test_the_sidecar_of_a_preset_reports_the_server_ready_and_reads_its_metrics(servers: ModelServers) -> None:
    name = "beside"
    model = asked(name, "sklearn", "V1")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"

    def words(engine: str) -> list[str]:
        here = {"--listen": address, "--engine": f"http://{engine}"}
        return [f"{flag}={here.get(flag, value)}" if value else flag for flag, _, value in given]

    given = [one.partition("=") for one in model.sidecar["args"]]
    engine = await servers.start_as_given(name, MODELS["sklearn"], model.engine["args"])
    await servers.processes.start("agent", [sys.executable, "-m", "attache", *words(engine)])
    async with httpx.AsyncClient(timeout=60) as http:

        async def answers(path: str) -> bool:
            try:
                return (await http.get(f"http://{address}{path}")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(partial(answers, model.sidecar["readinessProbe"]["httpGet"]["path"]))
        await http.post(f"http://{engine}/v1/models/{name}:predict", json={"instances": FLOWERS})
        metric = f'attache_engine_request_duration_seconds_count{{model_name="{name}"}} 1'

        async def has_counted() -> bool:
            return metric in (await http.get(f"http://{address}/metrics")).text

        await eventually(has_counted)
        # the kubelet would restart it; until it answers again it gets no requests
        await servers.processes.end(name)

        async def is_away() -> bool:
            return not await answers("/ready")

        await eventually(is_away)
