"""The whole system on loopback: engines, extproc, the bundle, a real Envoy."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import yaml

from bench.processes import Processes, free_ports, ports_in_a_row
from extproc.config.types import API_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
ALIAS: Final = "llama"
_ENVOY_BINARY: Final = "one with `attache envoy --fetch` (`make envoy-binary` in a clone), or set ENVOY to its path"


class EngineFlags(msgspec.Struct, frozen=True):
    """What ``python -m bench.engine`` takes."""

    count: int = 4
    hardware: str = "h100-llama-3.1-8b"
    speed: float = 1.0
    kv_blocks: int | None = None
    stream_headers: str = "immediate"
    adapters: tuple[str, ...] = ()
    publishes_events: bool = False

    def arguments(self, port: int, seed: int, events: tuple[int, int] | None = None) -> list[str]:
        """Of the engine on ``port``; ``events``: where it publishes and replays KV events."""
        published = () if events is None else ("--kv-events-port", events[0], "--kv-replay-port", events[1])
        blocks = [] if self.kv_blocks is None else ["--num-gpu-blocks-override", str(self.kv_blocks)]
        return [
            *("--port", str(port), "--model", MODEL, "--hardware", self.hardware, "--speed", str(self.speed)),
            *("--stream-headers", self.stream_headers, "--seed", str(seed)),
            *blocks,
            *map(str, published),
            *(word for name in self.adapters for word in ("--lora", name)),
        ]


class Stack(msgspec.Struct, frozen=True):
    """Where everything is. ``config`` may be edited: extproc follows it, and the bundle writer if it was asked to."""

    processes: Processes
    directory: Path
    url: str
    admin: str
    metrics: str
    engines: tuple[str, ...]
    pids: dict[str, int]
    gateway: Mapping[str, object]

    @property
    def config(self) -> Path:
        """The configuration directory."""
        return self.directory / "config"


class EnvoyMissing(Exception):
    """There is no Envoy binary."""


def envoy_binary() -> str:
    """The path of Envoy: the ENVOY variable, or where make puts it. Raises EnvoyMissing."""
    given = os.environ.get("ENVOY", "")
    found = [Path(given)] if given else sorted(ROOT.glob(".tools/envoy-*/envoy/_bin/envoy"))
    if not found or not found[-1].is_file():
        raise EnvoyMissing(f"no Envoy binary{' at ' + given if given else ''}: fetch {_ENVOY_BINARY}")
    return str(found[-1].resolve())


def envoy_command(bundle: Path) -> list[str]:
    """One worker thread on a bundle; raises EnvoyMissing."""
    options = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn"]
    return [envoy_binary(), "-c", str(bundle / "bootstrap.json"), *options]


def documents(
    engines: Sequence[str],
    *,
    picker: str = "PrefixAware",
    gateway: Mapping[str, object],
    adapters: Sequence[str] = (),
    server: str = "llama",
    alias: str = ALIAS,
    more: Mapping[str, object] | None = None,
    route: Mapping[str, object] | None = None,
) -> str:
    """A configuration directory's only file: one model under a short name, on all engines.

    ``more`` and ``route``: fields of the ModelServer and of the ModelRoute that are not to be as they come.
    """

    def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}

    spec: dict[str, object] = {"model": MODEL, "picker": picker}
    spec.update({"endpoints": [{"address": address} for address in engines], **(more or {})})
    rule = {"targetModels": [{"modelServerName": server}]}
    named = {"modelName": alias, "loraAdapters": list(adapters)}
    return yaml.safe_dump_all(
        [
            document("ModelServer", server, spec),
            document("ModelRoute", "llama", {**named, "rules": [rule], **(route or {})}),
            document("GatewayConfig", "gateway", dict(gateway)),
        ],
        sort_keys=False,
    )


@contextlib.asynccontextmanager
async def running_stack(  # noqa: PLR0913 - what tests want to be different
    directory: Path,
    flags: EngineFlags,
    *,
    picker: str | Path = "PrefixAware",
    watch: bool = False,
    gateway: Mapping[str, object] | None = None,
    more: Mapping[str, object] | None = None,
    route: Mapping[str, object] | None = None,
    extproc_flags: Sequence[str] = (),
    workers: int = 1,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Stack]:
    """Start it all in ``directory`` and wait until it serves; end it all on the way out. Raises StartFailed.

    ``picker``: a name, or the file of an EndpointPickerConfig. ``gateway``, ``more`` and ``route``: of the fields of
    GatewayConfig, ModelServer and ModelRoute, those that are not to be as they come.
    ``headers``: that clients must send.
    """
    ports = free_ports(3 * flags.count + 4)
    envoy_port, admin_port, extproc_port, metrics_port, *rest = ports
    engine_ports, event_ports = rest[: flags.count], list(zip(*[iter(rest[flags.count :])] * 2, strict=True))
    engines = [f"127.0.0.1:{port}" for port in engine_ports]
    if isinstance(picker, Path):
        more = {"pickerConfig": picker.name, **(more or {})}
    if flags.publishes_events:
        more = {**_kv_events(engines, event_ports), **(more or {})}
    if workers > 1:
        # of a row of ports, others may hold some
        metrics_port = ports_in_a_row(workers)
        gateway = {"extproc": f"unix:{directory}/extproc", "extprocWorkers": workers, **(gateway or {})}
        extproc_flags = (*extproc_flags, "--workers", str(workers))
    gateway = {
        "listen": f"127.0.0.1:{envoy_port}",
        "admin": f"127.0.0.1:{admin_port}",
        "extproc": f"127.0.0.1:{extproc_port}",
        **(gateway or {}),
    }
    envoy_binary()  # without one there is no need to start the rest
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir(parents=True)
    if isinstance(picker, Path):
        shutil.copy(picker, config)
    named = "PrefixAware" if isinstance(picker, Path) else picker
    text = documents(engines, picker=named, gateway=gateway, adapters=flags.adapters, more=more, route=route)
    (config / "attache.yaml").write_text(text)
    python = [sys.executable, "-m"]
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:

        def answers(address: str, path: str) -> _Answers:
            return _Answers(http, f"http://{address}{path}", headers or {})

        pids: dict[str, int] = {}
        for index, port in enumerate(engine_ports):
            name = f"engine-{index}"
            arguments = flags.arguments(port, index, event_ports[index] if flags.publishes_events else None)
            pids[name] = await processes.start(name, [*python, "bench.engine", *arguments])
        metrics = f"127.0.0.1:{metrics_port}"
        pids["extproc"] = await processes.start(
            "extproc",
            [
                *(*python, "extproc", "--config", str(config), "--listen", str(gateway["extproc"])),
                *("--metrics", metrics),
                *extproc_flags,
            ],
        )
        writer = [*python, "controller", "bundle", "--config", str(config), "--out", str(bundle)]
        pids["bundle"] = await processes.start("bundle", [*writer, "--watch"] if watch else writer)
        await processes.wait_ready("bundle", _IsThere(bundle / "bootstrap.json"))
        pids["envoy"] = await processes.start("envoy", envoy_command(bundle))
        for index, address in enumerate(engines):
            await processes.wait_ready(f"engine-{index}", answers(address, "/health"))
        for number in range(workers):
            await processes.wait_ready("extproc", answers(f"127.0.0.1:{metrics_port + number}", "/readyz"))
        await processes.wait_ready("envoy", answers(str(gateway["admin"]), "/ready"))
        await processes.wait_ready("envoy", answers(str(gateway["listen"]), f"/v1/models/{ALIAS}"))
        yield Stack(
            processes=processes,
            directory=directory,
            url=f"http://{gateway['listen']}",
            admin=f"http://{gateway['admin']}",
            metrics=f"http://{metrics}",
            engines=tuple(f"http://{address}" for address in engines),
            pids=pids,
            gateway=gateway,
        )


def _kv_events(engines: Sequence[str], ports: Sequence[tuple[int, int]]) -> dict[str, object]:
    """Fields of a ModelServer whose engines publish KV events, each on ports of its own: they share an address."""
    endpoints = [
        {"address": address, "kvEvents": f"127.0.0.1:{events}", "kvReplay": f"127.0.0.1:{replay}"}
        for address, (events, replay) in zip(engines, ports, strict=True)
    ]
    return {"endpoints": endpoints, "kvEvents": {}}


class _Answers:
    """Whether a page answers 200."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._http = http
        self._url = url
        self._headers = headers

    async def __call__(self) -> bool:
        try:
            async with self._http.get(self._url, headers=self._headers) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False


class _IsThere:
    """Whether a file has been written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(self) -> bool:
        return self._file.is_file()
