"""extproc behind a real Envoy against the server that does nothing, alternating; Envoy answers instead of engines."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.micro.wire import WireLoad, requests
from bench.processes import Processes, free_ports
from bench.stack import MODEL, documents, envoy_command
from bench.usage import cpu_seconds
from controller.gateway.bundle import build
from controller.gateway.publish import Step, write
from extproc.config.load import load

if TYPE_CHECKING:
    from pathlib import Path

_ROUNDS: Final = 5
_SECONDS: Final = 2.0
_CONNECTIONS: Final = 24
_DIRECT: Final = {"status": 200, "body": {"inline_string": "ok"}}


class Case(msgspec.Struct, frozen=True):
    """``renamed``: the client asks by another name than the engines', so that the whole body is written anew.

    ``duplex``: bodies come and answers go in pieces, as the endpoint picker protocol has it.
    """

    prompt_bytes: int
    endpoints: int
    renamed: bool = False
    duplex: bool = False


CASES: Final = (
    Case(2_000, 8),
    Case(2_000, 100),
    Case(400_000, 8),
    Case(400_000, 100),
    Case(2_000, 8, renamed=True),
    Case(400_000, 8, renamed=True),
    Case(2_000, 100, duplex=True),
    Case(400_000, 100, duplex=True),
)


class Measured(msgspec.Struct, frozen=True):
    """Medians over the rounds. ``busy``: how much of one processor the server took; near 1 it is saturated."""

    requests_per_s: float
    cpu_us_per_request: float
    busy: float


class Overhead(msgspec.Struct, frozen=True):
    """One case: both servers, and extproc over the baseline, round by round, then the median."""

    case: Case
    noop: Measured
    extproc: Measured
    rate_ratio: float
    cpu_ratio: float


class _Server(msgspec.Struct, frozen=True):
    pid: int
    port: int


async def measure(case: Case, directory: Path) -> Overhead:
    """Start both servers, each with an Envoy of its own, and load them in turn. ``directory`` is there and empty."""
    async with Processes(directory) as processes:
        servers = [await _start(name, case, directory / name, processes) for name in ("noop", "extproc")]
        model = MODEL if not case.renamed else "llama"
        prepared = requests(case.prompt_bytes, count=64 if case.prompt_bytes < 100_000 else 16, model=model)
        for server in servers:  # the first second is not like the others
            await _load(server, prepared, 1.0)
        rounds = [[await _load(server, prepared, _SECONDS) for server in servers] for _ in range(_ROUNDS)]
    noop, ours = ([pair[side] for pair in rounds] for side in (0, 1))
    return Overhead(
        case,
        _median(noop),
        _median(ours),
        statistics.median(b.requests_per_s / a.requests_per_s for a, b in rounds),
        statistics.median(b.cpu_us_per_request / a.cpu_us_per_request for a, b in rounds),
    )


async def _load(server: _Server, prepared: list[bytes], seconds: float) -> Measured:
    load = WireLoad(prepared, connections=_CONNECTIONS)
    before, clock = cpu_seconds(server.pid), asyncio.get_running_loop().time
    began = clock()
    rate = await load.run("127.0.0.1", server.port, seconds=seconds)
    used = cpu_seconds(server.pid) - before
    return Measured(rate, used / load.answered * 1e6, used / (clock() - began))


def _median(rounds: list[Measured]) -> Measured:
    return Measured(*(statistics.median(getattr(one, name) for one in rounds) for name in Measured.__struct_fields__))


async def _start(name: str, case: Case, directory: Path, processes: Processes) -> _Server:
    listen, admin, grpc_port, metrics = free_ports(4)
    addresses = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{grpc_port}"}
    engines = [f"10.1.{number // 250}.{number % 250 + 1}:8000" for number in range(case.endpoints)]
    # Close: what Envoy does when extproc is silent is not what is measured
    gateway = {**addresses, "failureMode": "Close", "messageTimeout": "30s"}
    # there are no engines to ask how they are
    more = {"scrapeInterval": "0s"}
    text = documents(engines, gateway=gateway, alias="llama" if case.renamed else MODEL, more=more)
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir(parents=True)
    (config / "all.yaml").write_text(text)
    files = dict(build(load({"all.yaml": text.encode()}), str(bundle)))
    routes = json.loads(files["rds.json"])
    routes["resources"][0]["virtual_hosts"][0]["routes"] = [{"match": {"prefix": "/"}, "direct_response": _DIRECT}]
    files["rds.json"] = json.dumps(routes)
    if case.duplex:
        files["lds.json"] = _in_pieces(files["lds.json"])
    write(bundle, Step(0, files))

    ours = ["extproc", "--config", str(config), "--listen", addresses["extproc"], "--metrics", f"127.0.0.1:{metrics}"]
    nothing = ["bench.micro.noop", "--listen", addresses["extproc"]]
    pid = await processes.start(name, [sys.executable, "-m", *(ours if name == "extproc" else nothing)])
    await processes.wait_ready(name, lambda: _accepts(grpc_port))
    await processes.start(f"envoy-{name}", envoy_command(bundle))
    await processes.wait_ready(f"envoy-{name}", lambda: _serves(listen))
    return _Server(pid, listen)


def _in_pieces(listeners: str) -> str:
    """The same listener with bodies both ways in pieces through extproc."""
    read = json.loads(listeners)
    manager = read["resources"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    (ask,) = (one for one in manager["http_filters"] if one["name"] == "envoy.filters.http.ext_proc")
    ask["typed_config"]["processing_mode"] = {
        **{f"{side}_body_mode": "FULL_DUPLEX_STREAMED" for side in ("request", "response")},
        **{f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")},
    }
    return json.dumps(read)


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _serves(port: int) -> bool:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    try:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer,
        ):
            # 404: it is extproc that answers, and this case's name is another
            return answer.status in {200, 404}
    except aiohttp.ClientError:
        return False
