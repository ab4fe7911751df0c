# SPDX-License-Identifier: Apache-2.0
"""Real servers of scikit-learn models behind a real Envoy: MLServer and KServe's SDK. ``make test-model-servers``
installs them, each into an environment of its own, and names their Pythons.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import msgspec
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import EngineFlags, EnvoyMissing, envoy_binary, running_stack
from bench.stack.processes import Processes, free_ports
from controller.models.runtimes.engine_settings import MODEL_PATH
from extproc.api.spec import API_VERSION
from tests.programs import not_tested

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import pytest

    from bench.stack.loopback_stack import Stack

_SERVER: Final = Path(__file__).parent / "kserve_server.py"
_STEPS: Final = Path(__file__).parent / "kserve_steps.py"
_TRAIN: Final = Path(__file__).parent / "train.py"
_TRAIN_TREES: Final = Path(__file__).parent / "train_trees.py"


class ModelServers(msgspec.Struct, frozen=True):
    """Starts real servers. ``models``: the directory of the trained models, by name. ``by_grpc``: the addresses for
    gRPC by the name of the server.
    """

    processes: Processes
    models: Path
    by_grpc: dict[str, str]

    async def start_mlserver(self, name: str, model: str, environment: Mapping[str, str] | None = None) -> str:
        """The address of an MLServer with one model, once that answers. ``environment``: over what is set here."""
        http, grpc, metrics = free_ports(3)
        directory = str(self.models / model)
        variables = {
            "MLSERVER_MODEL_NAME": model,
            "MLSERVER_MODEL_URI": directory,
            "MLSERVER_MODEL_IMPLEMENTATION": "mlserver_sklearn.SKLearnModel",
            **(environment or {}),
            "MLSERVER_HOST": "127.0.0.1",
            "MLSERVER_HTTP_PORT": str(http),
            "MLSERVER_GRPC_PORT": str(grpc),
            "MLSERVER_METRICS_PORT": str(metrics),
            # else in the working directory
            "MLSERVER_METRICS_DIR": str(self.models / f"{name}-metrics"),
            "MLSERVER_ENVIRONMENTS_DIR": str(self.models / f"{name}-environments"),
        }
        program = Path(required("MLSERVER")).with_name("mlserver")
        words = ["env", *(f"{key}={value}" for key, value in variables.items()), str(program), "start", directory]
        await self.processes.start(name, words)
        self.by_grpc[name] = f"127.0.0.1:{grpc}"
        return await self._once_ready(name, http, variables["MLSERVER_MODEL_NAME"])

    async def start_kserve(self, name: str, model: str) -> str:
        """Likewise, a server of KServe's SDK."""
        http, grpc = free_ports(2)
        words = ["--model_name", model, "--model_dir", str(self.models / model)]
        words += ["--http_port", str(http), "--grpc_port", str(grpc)]
        await self.processes.start(name, [required("KSERVE"), str(_SERVER), *words])
        self.by_grpc[name] = f"127.0.0.1:{grpc}"
        return await self._once_ready(name, http, model)

    async def start_as_given(self, name: str, model: str, words: Sequence[str]) -> str:
        """Likewise, with the arguments of a container. The weights are those of ``model``, the ports free ones."""
        http, grpc = free_ports(2)
        ports = {"--http_port": http, "--grpc_port": grpc}
        here = [one.replace(MODEL_PATH, str(self.models / model)) for one in words]
        here = [f"{flag}={ports[flag]}" if (flag := one.partition("=")[0]) in ports else one for one in here]
        assert here != [*words]
        await self.processes.start(name, [required("KSERVE"), str(_SERVER), *here])
        return await self._once_ready(name, http, name)

    async def start_step(self, name: str, step: str, model: str, predictor: str) -> str:
        """Likewise, a transformer or an explainer, with the arguments that a Model gives it."""
        http, grpc = free_ports(2)
        words = [required("KSERVE"), str(_STEPS), "--step", step, f"--model_name={model}", f"--http_port={http}"]
        words += [f"--predictor_host={predictor}", "--predictor_protocol=v1", "--predictor_use_ssl=false"]
        words += ["--predictor_request_timeout_seconds=20", f"--grpc_port={grpc}"]
        await self.processes.start(name, words)
        return await self._once_ready(name, http, model)

    async def _once_ready(self, name: str, port: int, model: str) -> str:
        async with httpx.AsyncClient(timeout=60) as http:

            async def is_ready() -> bool:
                try:
                    return (await http.get(f"http://127.0.0.1:{port}/v2/models/{model}/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await self.processes.wait_ready(name, is_ready)
        return f"127.0.0.1:{port}"


def required(server: str) -> str:
    """The Python that has it."""
    python = os.environ.get(f"ATTACHE_{server}", "")
    if not python:
        how = f"run `make test-model-servers`, which installs it, or set ATTACHE_{server} to its Python"
        not_tested(server, how)
    return python


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ModelServers]:
    """Servers can be started; those of a module end with it."""
    python = required("MLSERVER")
    directory = tmp_path_factory.mktemp("servers")
    for words in ((python, str(_TRAIN)), (required("KSERVE"), str(_TRAIN_TREES))):
        training = await asyncio.create_subprocess_exec(*words, str(directory))
        assert await training.wait() == 0
    async with Processes(directory) as processes:
        yield ModelServers(processes, directory, {})


@asynccontextmanager
async def gateway_to(
    directory: Path, *documents: Mapping[str, object], gateway: Mapping[str, object] | None = None
) -> AsyncIterator[Stack]:
    """Envoy and extproc, which follow ``configure``. Beside the models of a test they serve a simulated engine.
    ``gateway``: fields of the GatewayConfig.
    """
    try:
        envoy_binary()
    except EnvoyMissing as error:
        not_tested("ENVOY", str(error))
    async with running_stack(directory, EngineFlags(count=1), watch=True, gateway=gateway) as stack:
        configure(stack, *documents)
        yield stack


def configure(stack: Stack, *documents: Mapping[str, object]) -> None:
    """Put the objects of a test into the directory, in place of those before."""
    file = stack.config / "models.yaml"
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump_all(documents))
    new.replace(file)


def server(name: str, protocol: str, model: str, *endpoints: str, draining: str = "") -> dict[str, object]:
    """A ModelServer. ``draining``: which of the addresses is."""
    listed = [{"address": one, **({"draining": True} if one == draining else {})} for one in endpoints]
    return document("ModelServer", name, {"model": model, "protocol": protocol, "endpoints": listed})


def route(model: str, **weights: int) -> dict[str, object]:
    """A ModelRoute to ModelServers by weight."""
    targets = [{"modelServerName": name, "weight": weight} for name, weight in weights.items()]
    return document("ModelRoute", f"{model}-route", {"modelName": model, "rules": [{"targetModels": targets}]})


def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    """Any object."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
