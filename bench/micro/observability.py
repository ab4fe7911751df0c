# SPDX-License-Identifier: Apache-2.0
"""What usage rows, budgets, objectives and traces cost a request: ``python -m bench.micro.observability``.

`attache serve` runs once for each variant; all run side by side, with an engine that answers at once, and are loaded in
turn, round by round, so that what disturbs the machine disturbs all of them. Ratios are those of each round to the
first variant in the same round; the table has their medians. All variants have API keys: rows and budgets are of
callers, whom a gateway without keys does not even look at. All keep histograms and count by tenant, which cannot be
turned off. ``--against DIR`` measures the same variants of another checkout, too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
import msgspec

from bench.micro.http_load import RequestLoad, chat_requests
from bench.stack.loopback_stack import ROOT, documents
from bench.stack.processes import Processes, cpu_seconds, free_ports, workers_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

TOKEN: Final = "sk-of-the-benchmark"  # noqa: S105 - opens nothing else
_KEYS: Final = {
    "apiKeys": [{"name": "web", "tenant": "acme", "key": TOKEN}],
}
_PRICES: Final = {"pricing": [{"perMillion": {"input": "2.5", "output": "10"}}]}
_BUDGETS: Final = {
    "budgets": [
        {"name": one.lower(), "per": "Route", "window": one, "max": {"money": "1000000"}} for one in ("Day", "Month")
    ]
}
_READY: Final = "ready: clients connect to"
_ROLES: Final = ("extproc", "usage", "bundle")
_SHOWN: Final = ("envoy", "extproc", "usage")
# Envoy writes its lines every second at the latest, and the usage process looks for them four times a second.
_FLUSHED_S: Final = 1.5
_TRACES: Final = "opentelemetry.proto.collector.trace.v1.TraceService"


_OBJECTIVES: Final = {"slo": [{"name": "usual", "ttft": "3s", "tpot": "50ms", "e2e": "2m"}]}


class GatewayVariant(msgspec.Struct, frozen=True):
    """Added to a plain gateway. ``tracing``: percent of requests, None for no tracing at all; ``collector``: where
    spans go, in place of the usual one. ``log``: where the usage log leads. ``store``: in place of the
    usual one. ``sink``: URL that gets all requests and answers. ``guard``: URL that is asked about each request; what
    it does not answer goes on. ``checkout``: whose code runs.
    """

    name: str
    has_rows: bool = False
    has_budgets: bool = False
    has_objectives: bool = False
    tracing: float | None = None
    log: str = ""
    store: str = ""
    collector: str = ""
    sink: str = ""
    guard: str = ""
    has_cache: bool = False
    checkout: Path = ROOT


VARIANTS: Final = (
    GatewayVariant("nothing"),
    GatewayVariant("objectives", has_objectives=True),
    GatewayVariant("rows and prices", has_rows=True),
    GatewayVariant("rows, prices, two budgets", has_rows=True, has_budgets=True),
    GatewayVariant("rows, prices, two budgets, objectives", has_rows=True, has_budgets=True, has_objectives=True),
    GatewayVariant("traces of 1 %", tracing=1.0),
    GatewayVariant("all of it", has_rows=True, has_budgets=True, has_objectives=True, tracing=1.0),
    GatewayVariant("traces of 100 %", tracing=100.0),
)


class RunningGateway(msgspec.Struct):
    """A gateway that runs. ``pids``: of its processes, by role. ``rates``: answers a second, by round; ``cpu_us``: of
    each role by request.
    """

    variant: GatewayVariant
    port: int
    pids: dict[str, int]
    rates: list[float] = msgspec.field(default_factory=list)
    cpu_us: dict[str, list[float]] = msgspec.field(default_factory=dict)


async def start_variant(
    variant: GatewayVariant, engine: int, collector: int, processes: Processes, own: Path
) -> RunningGateway:
    """``attache serve`` with this variant, in the directory ``own``; ``collector``: the port where spans go."""
    name = own.name
    (own / "config").mkdir(parents=True)
    (own / "usage").mkdir()
    listen, admin, extproc, metrics, writer, reports = free_ports(6)
    gateway: dict[str, Any] = {
        "listen": f"127.0.0.1:{listen}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
        "authentication": _KEYS,
    }
    if variant.has_rows:
        log = own / "usage" / "usage.log"
        gateway["usageLog"] = {"path": str(log)}
        if variant.log:
            log.symlink_to(variant.log)
    if variant.tracing is not None:
        endpoint = variant.collector or f"127.0.0.1:{collector}"
        gateway["tracing"] = {"endpoint": endpoint, "samplingPercent": variant.tracing}
    if variant.sink:
        gateway["payloadLog"] = {"url": variant.sink}
    if variant.guard:
        gateway["guards"] = [{"name": "asked", "url": variant.guard}]
    text = documents(
        [f"127.0.0.1:{engine}"],
        gateway=gateway,
        more={"scrapeInterval": "0s", **(_PRICES if variant.has_rows else {})},
        route={
            **(_BUDGETS if variant.has_budgets else {}),
            **(_OBJECTIVES if variant.has_objectives else {}),
            **({"payloadLog": {"mode": "All"}} if variant.sink else {}),
            **({"cache": {"ttl": "1h", "scope": "Tenant"}} if variant.has_cache else {}),
            **({"guard": {"name": "asked", "failureMode": "Open"}} if variant.guard else {}),
        },
    )
    (own / "config" / "attache.yaml").write_text(text)
    command = (
        *("env", "-C", str(variant.checkout)),
        *(sys.executable, "-m", "attache", "serve", "--config", str(own / "config")),
        *("--metrics", f"127.0.0.1:{metrics}", "--bundle-metrics", f"127.0.0.1:{writer}"),
        *("--usage-admin", f"127.0.0.1:{reports}", "--usage-metrics", "off"),
        *(("--usage-store", variant.store) if variant.store else ()),
    )
    await processes.start(name, command)
    printed = own.parent / f"{name}.log"

    async def is_ready() -> bool:
        return _READY in printed.read_text()

    await processes.wait_ready(name, is_ready)
    return RunningGateway(variant, listen, _roles_of(processes.pid(name)))


def _roles_of(pid: int) -> dict[str, int]:
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        role = next((one for one in _ROLES if one in words), "envoy")
        found[role] = int(child)
    # what serves, and not its supervisor
    (found["extproc"],) = workers_of(found["extproc"])
    return found


@asynccontextmanager
async def serve_span_collector(port: int) -> AsyncIterator[list[int]]:
    """Takes spans of Envoy and extproc by gRPC. Gives the sizes of the requests that it got."""
    sizes: list[int] = []

    async def export(body: bytes, _: object) -> bytes:
        sizes.append(len(body))
        return b""

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_TRACES, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield sizes
    finally:
        await server.stop(0)


async def measure(one: RunningGateway, requests: list[bytes], at_once: int, seconds: float) -> None:
    """One round of one gateway, and until its rows are kept."""
    before = {role: cpu_seconds(pid) for role, pid in one.pids.items()}
    load = RequestLoad(requests, connections=at_once)
    one.rates.append(await load.run("127.0.0.1", one.port, seconds=seconds))
    await asyncio.sleep(_FLUSHED_S)
    for role, pid in one.pids.items():
        used = cpu_seconds(pid) - before[role]
        one.cpu_us.setdefault(role, []).append(used / len(load.taken_s) * 1e6)


async def run(variants: Sequence[GatewayVariant], rounds: int, seconds: float, at_once: int) -> list[RunningGateway]:
    """All variants, ``rounds`` times each after one that does not count, forwards and backwards in turn."""
    requests = [one.wire_bytes(f"authorization: Bearer {TOKEN}\r\n") for one in chat_requests(2_000, count=64)]
    engine, collector = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        async with serve_span_collector(collector) as sizes, Processes(directory) as processes:
            await processes.start(
                "engine", (sys.executable, "-m", "bench.micro.instant_engine", "--ports", str(engine))
            )
            gateways = [
                await start_variant(one, engine, collector, processes, directory / f"serve-{number}")
                for number, one in enumerate(variants)
            ]
            for number in range(rounds + 1):
                for one in gateways[:: -1 if number % 2 else 1]:
                    await measure(one, requests, at_once, seconds)
                    if not number:
                        one.rates.clear()
                        one.cpu_us.clear()
            if any(one.tracing for one in variants) and not sizes:
                raise RuntimeError("no span has come to the collector")
            return gateways


def table(gateways: list[RunningGateway]) -> str:
    """One line a variant; rates as shares of the first one's, processor time as what is added to the first one's."""
    first = gateways[0]
    lines = ["| | rate | Envoy, us | extproc, us | usage, us | all, us |", "|---|---:|---:|---:|---:|---:|"]
    for one in gateways:
        shares = [rate / base for rate, base in zip(one.rates, first.rates, strict=True)]
        added = [_more(one.cpu_us.get(role, []), first.cpu_us.get(role, [])) for role in _SHOWN]
        every = _more(_sums(one), _sums(first))
        lines.append(f"| {one.variant.name} | {statistics.median(shares):.1%} | {' | '.join(added)} | {every} |")
    base, used = statistics.median(first.rates), statistics.median(_sums(first))
    own = ", ".join(f"{role} {statistics.median(first.cpu_us[role]):.0f}" for role in _SHOWN if role in first.cpu_us)
    rounds = len(first.rates)
    return "\n".join(
        [*lines, "", f"100% are {base:.0f} answers a second, {used:.0f} us each ({own}); medians of {rounds} rounds."]
    )


def _sums(one: RunningGateway) -> list[float]:
    return [sum(each) for each in zip(*one.cpu_us.values(), strict=True)]


def _more(values: list[float], bases: list[float]) -> str:
    bases = bases or [0.0] * len(values)
    return f"{statistics.median(a - b for a, b in zip(values, bases, strict=True)):.0f}" if values else ""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.micro.observability", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a round of one variant")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--only", default="", help="of the variants but the first, those whose names contain it")
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout that is measured, too")
    options = parser.parse_args()
    variants = [one for one in VARIANTS if one is VARIANTS[0] or options.only in one.name]
    if options.against is not None:
        directory = options.against.resolve()
        others = [msgspec.structs.replace(one, name=f"{one.name}, before", checkout=directory) for one in variants]
        variants = [each for pair in zip(variants, others, strict=True) for each in pair]
    print(table(asyncio.run(run(variants, options.rounds, options.seconds, options.at_once))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
