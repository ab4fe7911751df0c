# SPDX-License-Identifier: Apache-2.0
"""What a case compares, started side by side: baselines, extproc, SGLang's gateway.

Baselines and extproc each have an Envoy of their own with the same bundle; all share the engines.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.micro.baseline_servers import SERVER
from bench.micro.http_load import (
    CHAT_PATH,
    RequestLoad,
    chat_requests,
    grpc_tensor_requests,
    infer_path,
    tensor_requests,
)
from bench.stack.loopback_stack import ALIAS, MODEL, ROOT, documents, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.envoy.bundle import build_bundle
from controller.bundle.sync import PublishStep, write_step
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from bench.micro.http_load import WireRequest

GATEWAY_PYTHON: Final = ROOT / ".tools/sglang-router/bin/python"
GATEWAY_MISSING: Final = "NOT MEASURED: SGLang's gateway; `make sglang-gateway` installs it"
_GATEWAY: Final = "SGLang's gateway"
_POLL_S: Final = 0.005
# Requests with this header are answered by Envoy itself, once extproc has chosen their destination.
ANSWER_BY_ENVOY: Final = "x-bench-answer"
_DIRECT: Final = {
    "match": {"prefix": "/", "headers": [{"name": ANSWER_BY_ENVOY, "present_match": True}]},
    "direct_response": {"status": 200, "body": {"inline_string": "ok"}},
}


class BenchmarkCase(msgspec.Struct, frozen=True):
    """One configuration and one size of prompts.

    ``renamed``: requests have a short model name, as in the README, so the body is rewritten with the engines' name.
    ``in_pieces``: bodies and answers pass in pieces (FULL_DUPLEX_STREAMED), as in the endpoint picker protocol.
    ``by_path``: the path names the model (V2), and extproc gets no body. ``by_call``: the same over gRPC, whose message
    names the model.
    """

    prompt_bytes: int
    endpoints: int
    renamed: bool = True
    in_pieces: bool = False
    by_path: bool = False
    by_call: bool = False

    @property
    def name(self) -> str:
        """As it stands in tables, such as ``2 KB, 8``."""
        words = {", own name": not self.renamed, ", in pieces": self.in_pieces}
        words |= {", V2": self.by_path, ", V2-gRPC": self.by_call}
        more = "".join(word for word, holds in words.items() if holds)
        return f"{self.prompt_bytes // 1000} KB, {self.endpoints}{more}"

    @property
    def model(self) -> str:
        """The model name in requests."""
        return ALIAS if self.renamed else MODEL

    def requests(self, count: int) -> list[WireRequest]:
        """``count`` different ones."""
        make = grpc_tensor_requests if self.by_call else tensor_requests if self.by_path else chat_requests
        return make(self.prompt_bytes, count=count, model=self.model)


class MeasuredServer(msgspec.Struct, frozen=True):
    """One that is measured.

    ``pid``: what decides, or the engines themselves; ``envoy_pid``: what is in front of it.
    """

    name: str
    pid: int
    port: int
    start_s: float
    envoy_pid: int | None = None


class ComparedServers:
    """Starts what a case compares, in ``directory``; ``processes`` ends it."""

    def __init__(
        self,
        case: BenchmarkCase,
        directory: Path,
        processes: Processes,
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """``others``: further extprocs by name, as words after ``python -m`` that take extproc's arguments."""
        self._case = case
        self._extprocs: dict[str, Sequence[str]] = {"extproc": ["extproc"], **(others or {})}
        self._directory = directory
        self._processes = processes

    async def start(self, *, with_gateway: bool) -> list[MeasuredServer]:
        """Engines first, then what stands in front of them. Raises StartFailed."""
        ports = free_ports(self._case.endpoints)
        engines = [f"127.0.0.1:{port}" for port in ports]
        command = [sys.executable, "-m", "bench.micro.instant_engine", "--ports", ",".join(map(str, ports))]
        command += ["--calls"] if self._case.by_call else []
        pid, start_s = await self._start("engine", command, PortProbe(ports[-1]))
        servers = [MeasuredServer("engine", pid, ports[0], start_s)]
        has_body = not (self._case.in_pieces or self._case.by_path or self._case.by_call)
        names = ["no-op", *(["answering"] if has_body else []), *self._extprocs]
        servers.extend([await self._start_behind_envoy(name, engines) for name in names])
        if with_gateway and GATEWAY_PYTHON.is_file():
            servers.append(await self._start_gateway(engines))
        return servers

    async def _start(self, name: str, command: list[str], is_ready: Callable[[], Awaitable[bool]]) -> tuple[int, float]:
        """Process id, and seconds until it was ready."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        pid = await self._processes.start(name, command)
        await self._processes.wait_ready(name, is_ready)
        return pid, clock() - began_s

    async def _start_behind_envoy(self, name: str, engines: list[str]) -> MeasuredServer:
        listen, admin, grpc, metrics = free_ports(4)
        address = f"127.0.0.1:{grpc}"
        gateway = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": address}
        # the cost of scraping engines is measured separately
        more = {"scrapeInterval": "0s"}
        if self._case.by_path or self._case.by_call:
            more |= {"protocol": "V2-gRPC" if self._case.by_call else "V2", "model": "llama-2"}
        # what Envoy does without an answer is not measured; where bodies come in pieces it can do nothing
        patient = {**gateway, "messageTimeout": "30s", "failureMode": "Close" if self._case.in_pieces else "Open"}
        text = documents(engines, gateway=patient, alias=self._case.model, more=more)
        config, bundle = self._directory / name / "config", self._directory / name / "envoy"
        config.mkdir(parents=True)
        (config / "attache.yaml").write_text(text)
        write_step(bundle, PublishStep(0, bundle_files(text, bundle, in_pieces=self._case.in_pieces)))
        words = ["--config", str(config), "--listen", address, "--metrics", f"127.0.0.1:{metrics}"]
        arguments = {
            "no-op": ["bench.micro.baseline_servers", "--listen", address],
            "answering": ["bench.micro.baseline_servers", "--listen", address, "--engines", ",".join(engines)],
            **{name: [*module, *words] for name, module in self._extprocs.items()},
        }[name]
        pid, start_s = await self._start(name, [sys.executable, "-m", *arguments], PortProbe(grpc))
        path = infer_path(self._case.model) if self._case.by_path else CHAT_PATH
        is_served = GrpcProbe(listen, self._case) if self._case.by_call else HttpProbe(listen, self._case.model, path)
        envoy_pid, _ = await self._start(f"envoy-{name}", envoy_command(bundle), is_served)
        return MeasuredServer(name, pid, listen, start_s, envoy_pid)

    async def _start_gateway(self, engines: list[str]) -> MeasuredServer:
        """SGLang's, with its default policy ``cache_aware``."""
        port, metrics = free_ports(2)
        command = [
            *(str(GATEWAY_PYTHON), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--log-level", "error"),
            *("--worker-urls", *(f"http://{engine}" for engine in engines)),
        ]
        pid, start_s = await self._start(_GATEWAY, command, HttpProbe(port, self._case.model))
        return MeasuredServer(_GATEWAY, pid, port, start_s)


def bundle_files(text: str, bundle: Path, *, in_pieces: bool, asks: bool = True) -> dict[str, str]:
    """The bundle as the controller writes it, and a route by which Envoy answers in the engines' place. ``asks``:
    whether Envoy, with bodies in pieces, asks a picker.
    """
    files = dict(build_bundle(load_snapshot({"all.yaml": text.encode()}), str(bundle)))
    configuration = json.loads(files["rds.json"])
    (host,) = (one for one in configuration["resources"][0]["virtual_hosts"] if one["domains"] == ["*"])
    if in_pieces:
        files["lds.json"] = _in_pieces(files["lds.json"], asks=asks)
        files["cds.json"] = _without_health_checks(files["cds.json"])
        # gateways of this kind have routes of their own; extproc names no ModelServer to them
        (decided,) = (one for one in host["routes"] if "cluster_header" in one.get("route", {}))
        route = {
            "cluster": SERVER,
            **{key: value for key, value in decided["route"].items() if key != "cluster_header"},
        }
        host["routes"] = [{"match": {"prefix": "/"}, "route": route}]
    # what extproc gets depends on the route
    by_protocol = [one for one in host["routes"] if one.get("name", "").startswith(("by-path", "by-call"))]
    configs = {"typed_per_filter_config": by_protocol[0]["typed_per_filter_config"]} if by_protocol else {}
    host["routes"].insert(0, {**_DIRECT, **configs})
    files["rds.json"] = json.dumps(configuration)
    return files


def _in_pieces(listeners: str, *, asks: bool) -> str:
    """The same listener as a gateway has it that we do not configure: bodies both ways in pieces through extproc, no
    other filter of ours, and no access log. Outcomes come with the pieces.
    """
    read = json.loads(listeners)
    manager = read["resources"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager.pop("access_log", None)
    filters = {one["name"]: one for one in manager["http_filters"]}
    manager["http_filters"] = [filters[f"envoy.filters.http.{name}"] for name in ("ext_proc", "router")[not asks :]]
    ask = filters["envoy.filters.http.ext_proc"]["typed_config"]
    ask["processing_mode"] = {
        **{f"{side}_body_mode": "FULL_DUPLEX_STREAMED" for side in ("request", "response")},
        **{f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")},
    }
    # llm-d's picker writes pseudo-headers as they were, which is no error to Envoy by default
    ask.pop("mutation_rules", None)
    return json.dumps(read)


def _without_health_checks(clusters: str) -> str:
    """The same clusters: llm-d's picker has its health service on another port."""
    read = json.loads(clusters)
    for cluster in read["resources"]:
        cluster.pop("health_checks", None)
    return json.dumps(read)


class PortProbe:
    """Whether a port accepts connections. It polls often for a while, because start-up times are measured with it."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __call__(self) -> bool:
        """Whether it does now."""
        for _ in range(20):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except ConnectionRefusedError:
                await asyncio.sleep(_POLL_S)
                continue
            writer.close()
            await writer.wait_closed()
            return True
        return False


class GrpcProbe:
    """Whether a call of gRPC is answered well."""

    def __init__(self, port: int, case: BenchmarkCase) -> None:
        self._port, self._case = port, case

    async def __call__(self) -> bool:
        """Whether it is now."""
        (request,) = self._case.requests(1)
        try:
            await RequestLoad([request.wire_bytes()], connections=1, calls=True).run(
                "127.0.0.1", self._port, seconds=0.0
            )
        except (RuntimeError, OSError, TimeoutError):
            return False
        return True


class HttpProbe:
    """Whether a chat, or what else ``path`` takes, is answered with 200."""

    def __init__(self, port: int, model: str, path: str = CHAT_PATH) -> None:
        self._url = f"http://127.0.0.1:{port}{path}"
        self._body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}

    async def __call__(self) -> bool:
        """Whether it is now."""
        try:
            async with aiohttp.ClientSession() as http, http.post(self._url, json=self._body) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False
