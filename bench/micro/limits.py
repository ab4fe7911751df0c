# SPDX-License-Identifier: Apache-2.0
"""What rate limits cost a request: in memory and in Redis, against none, alternating.

Redis is a real one on loopback. Requests are sent over gRPC as Envoy sends them, one after the other: the times are
latencies.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
import msgspec
import yaml

from bench.processes import Processes, free_ports
from bench.stack import documents
from extproc.streams.messages import ProcessingRequest, ProcessingResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
_ROUNDS: Final = 2000
_METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_LIMIT: Final = {"per": "Route", "unit": "second", "requests": 1_000_000, "totalTokens": 1_000_000_000}
# By the name of the model that is asked for.
ROUTES: Final[Mapping[str, list[dict[str, object]]]] = {
    "no limits": [],
    "in memory": [_LIMIT],
    "in Redis": [{**_LIMIT, "scope": "Global"}],
}


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds from a body to its decision."""

    limits: str
    p50_ms: float
    p99_ms: float


async def measure(directory: Path) -> list[Latency]:
    """Start extproc and Redis and measure; returns an empty list if there is no redis-server."""
    binary = shutil.which("redis-server")
    if binary is None:
        return []
    redis_port, port, metrics_port = free_ports(3)
    config = directory / "config"
    config.mkdir()
    (config / "all.yaml").write_text(_documents())
    async with Processes(directory) as processes:
        save = ["--save", "", "--dir", str(directory)]
        await processes.start("redis", [binary, "--port", str(redis_port), "--bind", "127.0.0.1", *save])
        words = ["--listen", f"127.0.0.1:{port}", "--metrics", f"127.0.0.1:{metrics_port}"]
        redis = ["--redis", f"redis://127.0.0.1:{redis_port}"]
        await processes.start("extproc", [sys.executable, "-m", "extproc", "--config", str(config), *words, *redis])
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            async with asyncio.timeout(30):
                await channel.channel_ready()
            return await _alternate(channel)


def _documents() -> str:
    """One model under three names, each with its limits."""
    server, _, gateway = yaml.safe_load_all(documents(["127.0.0.1:1"], gateway={}, more={"scrapeInterval": "0s"}))
    routes = [
        {
            "apiVersion": server["apiVersion"],
            "kind": "ModelRoute",
            "metadata": {"name": name.replace(" ", "-").lower()},
            "spec": {
                "modelName": name,
                "rules": [{"targetModels": [{"modelServerName": "llama"}]}],
                "rateLimits": limits,
            },
        }
        for name, limits in ROUTES.items()
    ]
    return yaml.safe_dump_all([server, *routes, gateway])


async def _alternate(channel: grpc.aio.Channel) -> list[Latency]:
    times: dict[str, list[float]] = {name: [] for name in ROUTES}
    for number in range(_ROUNDS):
        for name, taken in times.items():
            taken.append(await _ask(channel, name, number))
    found = []
    for name, taken in times.items():
        # the first ones open connections
        cuts = statistics.quantiles(taken[50:], n=100)
        found.append(Latency(name, 1000 * cuts[49], 1000 * cuts[98]))
    return found


async def _ask(channel: grpc.aio.Channel, model: str, number: int) -> float:
    call = channel.stream_stream(
        _METHOD,
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )()
    head = ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/chat/completions")):
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    await call.write(head)
    await call.read()
    body = ProcessingRequest()
    text = f"question {number} " * 100
    body.request_body.body = json.dumps({"model": model, "messages": [{"role": "user", "content": text}]}).encode()
    body.request_body.end_of_stream = True
    began = _CLOCK()
    await call.write(body)
    answer = await call.read()
    taken = _CLOCK() - began
    assert isinstance(answer, ProcessingResponse)
    assert answer.WhichOneof("response") == "request_body", answer
    await call.done_writing()
    return taken


def describe(found: list[Latency]) -> str:
    """The result as one line of text."""
    if not found:
        return "NOT MEASURED: what limits in Redis cost; install Debian's package redis-server"
    base = found[0].p50_ms
    parts = [f"{one.limits} p50 {one.p50_ms:.3f} ms (+{one.p50_ms - base:.3f}), p99 {one.p99_ms:.3f}" for one in found]
    return f"from a body to its decision: {'; '.join(parts)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="attache-bench-") as folder:
        print(describe(asyncio.run(measure(Path(folder)))))
