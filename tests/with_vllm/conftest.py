# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on the CPU behind a real Envoy. ``make test-vllm`` installs what they need and names their
Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from extproc.api.spec import API_VERSION
from tests.decision_log import LoggedOutcome, read_outcomes
from tests.programs import not_tested
from tests.waiting import eventually
from tests.with_vllm.model import NAME, adapter_script, write_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

BLOCK = 32
_UP_S = 240


class Engines(msgspec.Struct, frozen=True):
    """Two engines: their addresses, where they publish and replay KV events, and the model's directory."""

    addresses: tuple[str, str]
    events: tuple[int, ...]
    replays: tuple[int, ...]
    model: Path
    adapter: Path


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python that has vLLM."""
    python = os.environ.get("ATTACHE_VLLM", "")
    if not python:
        not_tested("VLLM", "run `make test-vllm`, which installs it (3 to 6 GB), or set ATTACHE_VLLM to its Python")
    return python


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    """One after the other: two that start at once take twice as long on two cores."""
    directory = tmp_path_factory.mktemp("vllm")
    model, adapter = directory / "model", directory / "adapter"
    write_model(model)
    adapter.mkdir()
    writing = await asyncio.create_subprocess_exec(vllm_python, *adapter_script(adapter))
    assert await writing.wait() == 0
    ports, events, replays = (tuple(free_ports(2)) for _ in range(3))
    async with Processes(directory) as processes:
        for number, port in enumerate(ports):
            published = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events[number]}",
                "replay_endpoint": f"tcp://*:{replays[number]}",
                "topic": f"kv@127.0.0.1:{port}@{NAME}",
            }
            flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--kv-events-config", json.dumps(published)]
            flags += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "8"]
            flags += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", "2048"]
            command = engine_command(vllm_python, model, port, flags, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
            await processes.start(f"vllm-{number}", command)
            await until_up(processes, f"vllm-{number}", port)
        addresses = (f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
        yield Engines(addresses, events, replays, model, adapter)


def engine_command(python: str, model: Path, port: int, flags: Sequence[str], **environment: str) -> list[str]:
    """An engine for ``model``. ``flags`` and ``environment``: beside those of every engine here."""
    of_all = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words = ["env", *(f"{name}={value}" for name, value in {**of_all, **environment}.items())]
    words += [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192", "--max-num-seqs", "64"]
    words += ["--kv-cache-memory-bytes", "268435456", "--max-num-batched-tokens", "2048"]
    return [*words, "--enforce-eager", "--enable-prompt-tokens-details", *flags]


async def until_up(processes: Processes, name: str, port: int) -> None:
    """Until the engine answers."""
    async with httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{port}/health"
        await processes.wait_ready(name, lambda: _is_there(http, url), timeout_s=_UP_S)


async def _is_there(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.TransportError:
        return False


class Gateway(msgspec.Struct, frozen=True):
    """Envoy and extproc in front of the engines."""

    url: str
    metrics: str
    log: Path

    async def outcomes(self, count: int) -> Sequence[LoggedOutcome]:
        """What came of the first ``count`` requests."""

        async def are_there() -> bool:
            return self.log.exists() and len(read_outcomes(self.log)) >= count

        await eventually(are_there)
        return read_outcomes(self.log)

    async def metric(self, name: str) -> float:
        """The sum of a family's series."""
        async with httpx.AsyncClient(timeout=60) as http:
            page = (await http.get(f"{self.metrics}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


@asynccontextmanager
async def gateway(directory: Path, engines: Engines, *, precise: bool) -> AsyncIterator[Gateway]:
    """``precise``: by KV events and the model's own tokenizer."""
    endpoints = [{"address": address} for address in engines.addresses]
    server: dict[str, object] = {"endpoints": endpoints}
    if precise:
        server.update({"kvEvents": {}, "tokenizer": {"path": str(engines.model), "timeout": "2s"}})
        for endpoint, events, replay in zip(endpoints, engines.events, engines.replays, strict=True):
            endpoint.update({"kvEvents": f"127.0.0.1:{events}", "kvReplay": f"127.0.0.1:{replay}"})
    async with gateway_of(directory, server) as made:
        await asyncio.sleep(1.0)  # for replays of KV events
        yield made


@asynccontextmanager
async def gateway_of(directory: Path, server: Mapping[str, object]) -> AsyncIterator[Gateway]:
    """``server``: the specification of the ModelServer, beside the model. Until two engines have reported twice."""
    listen, admin, grpc, metrics = free_ports(4)
    at = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{grpc}"}
    rule = {"targetModels": [{"modelServerName": "tiny"}]}
    documents = [
        _document("ModelServer", "tiny", {"model": NAME, "scrapeInterval": "200ms", **server}),
        _document("ModelRoute", "tiny", {"modelName": "chat", "loraAdapters": ["sql"], "rules": [rule]}),
        _document("GatewayConfig", "gateway", dict(at)),
    ]
    config, bundle, log = directory / "config", directory / "envoy", directory / "decisions.jsonl"
    config.mkdir(parents=True)
    (config / "all.yaml").write_text(yaml.safe_dump_all(documents))
    python = [sys.executable, "-m"]
    flags = ["--metrics", f"127.0.0.1:{metrics}", "--decision-log", str(log), "--decision-sample", "1"]
    async with Processes(directory) as processes, httpx.AsyncClient(timeout=60) as http:
        await processes.start(
            "extproc", [*python, "extproc", "--config", str(config), "--listen", at["extproc"], *flags]
        )
        await eventually(lambda: _is_there(http, f"http://127.0.0.1:{metrics}/readyz"))
        writer = [*python, "controller", "bundle", "--config", str(config), "--out", str(bundle)]
        await processes.start("bundle", writer)
        await eventually((bundle / "bootstrap.json").is_file)
        await processes.start("envoy", envoy_command(bundle))
        await eventually(lambda: _is_there(http, f"http://{at['listen']}/v1/models/chat"))
        made = Gateway(f"http://{at['listen']}", f"http://127.0.0.1:{metrics}", log)

        async def have_reported() -> bool:
            return await made.metric("attache_engine_reports_total") >= 4

        await eventually(have_reported)
        yield made


def _document(kind: str, name: str, spec: dict[str, object]) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
