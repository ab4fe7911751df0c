# SPDX-License-Identifier: Apache-2.0
"""The whole system on loopback: engines, extproc, the bundle, a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec

import aiohttp
import msgspec
import yaml

from bench.stack.processes import Processes, StartFailed, free_ports, ports_in_a_row
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

ROOT: Final = Path(__file__).resolve().parents[2]
MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
ALIAS: Final = "llama"
_ENVOY_BINARY: Final = "one with `attache envoy --fetch` (`make envoy-binary` in a clone), or set ENVOY to its path"
_P = ParamSpec("_P")


class EngineFlags(msgspec.Struct, frozen=True):
    """What ``python -m bench.engine`` takes.

    ``apart``: each engine in a process of its own, called ``engine-N``: it can be killed alone, and uses a core of its
    own. Otherwise one process, called ``engines``, is all of them: it starts faster. ``more``: further words of the
    command line.
    """

    count: int = 4
    hardware: str = "h100-llama-3.1-8b"
    speed: float = 1.0
    kv_blocks: int | None = None
    stream_headers: str = "immediate"
    adapters: tuple[str, ...] = ()
    publishes_events: bool = False
    apart: bool = False
    more: tuple[str, ...] = ()

    def arguments(self, ports: Sequence[EnginePorts], first: int = 0) -> list[str]:
        """The command line of a process with the engines on ``ports``, the first of which has the seed ``first``."""
        events = [f"--kv-events-port={one.events}" for one in ports] if self.publishes_events else []
        replays = [f"--kv-replay-port={one.replay}" for one in ports] if self.publishes_events else []
        blocks = [] if self.kv_blocks is None else ["--num-gpu-blocks-override", str(self.kv_blocks)]
        return [
            *("--model", MODEL, "--hardware", self.hardware, "--speed", str(self.speed)),
            *("--stream-headers", self.stream_headers, "--seed", str(first)),
            *blocks,
            *(f"--port={one.http}" for one in ports),
            *events,
            *replays,
            *(f"--lora={name}" for name in self.adapters),
            *self.more,
        ]

    def commands(self, ports: Sequence[EnginePorts]) -> dict[str, list[str]]:
        """The command line of each process, by the process's name."""
        if not self.apart:
            return {"engines": self.arguments(ports)}
        return {f"engine-{number}": self.arguments([one], number) for number, one in enumerate(ports)}


class EnginePorts(msgspec.Struct, frozen=True):
    """Where one engine serves HTTP, publishes KV events and replays them, if it publishes any."""

    http: int
    events: int
    replay: int


class Stack(msgspec.Struct, frozen=True):
    """Where everything is. ``config`` may be edited: extproc follows it, and so does the bundle in a stack that
    watches.
    """

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


def envoy_command(bundle: Path, *more: str) -> list[str]:
    """One worker thread on a bundle. ``more``: further options. Raises EnvoyMissing."""
    options = ["--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn"]
    # Envoy's default is 10 s
    options += ["--file-flush-interval-msec", "100"]
    return [envoy_binary(), "-c", str(bundle / "bootstrap.json"), *options, *more]


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

    ``more`` and ``route``: overrides of the default fields of the ModelServer and of the ModelRoute.
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


def is_port_taken(error: StartFailed) -> bool:
    """Whether a program could not listen on its port. Envoy and Python write the reason in their own cases."""
    return "address already in use" in str(error).lower()


def retry_on_other_ports(
    run: Callable[Concatenate[Path, _P], AbstractAsyncContextManager[Stack]],
) -> Callable[Concatenate[Path, _P], AbstractAsyncContextManager[Stack]]:
    """Run it anew, once, if another program took one of its ports between the check and its use."""

    @functools.wraps(run)
    @contextlib.asynccontextmanager
    async def running(directory: Path, /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncIterator[Stack]:
        async with contextlib.AsyncExitStack() as started:
            try:
                stack = await started.enter_async_context(run(directory, *args, **kwargs))
            except StartFailed as error:
                if not is_port_taken(error):
                    raise
                # they name the ports; the logs stay, and are appended to
                for written in ("config", "envoy"):
                    shutil.rmtree(directory / written, ignore_errors=True)
                stack = await started.enter_async_context(run(directory, *args, **kwargs))
            yield stack

    return running


@retry_on_other_ports
@contextlib.asynccontextmanager
async def running_stack(  # noqa: PLR0913 - the settings that tests vary
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
    """Start it all in ``directory`` and wait until it serves; end it all on the way out.

    Raises StartFailed, EnvoyMissing, and ConfigInvalid if what is overridden makes no configuration.

    ``picker``: a name, or the file of an EndpointPickerConfig. ``watch``: the bundle follows changes of the
    configuration. ``gateway``, ``more`` and ``route``: overrides of the default GatewayConfig, ModelServer and
    ModelRoute.
    ``headers``: those without which clients are refused.
    """
    envoy_port, admin_port, extproc_port, metrics_port, *rest = free_ports(3 * flags.count + 4)
    ports = [EnginePorts(*three) for three in zip(*[iter(rest)] * 3, strict=True)]
    engines = [f"127.0.0.1:{one.http}" for one in ports]
    if isinstance(picker, Path):
        more = {"pickerConfig": picker.name, **(more or {})}
    if flags.publishes_events:
        more = {**_kv_events(ports), **(more or {})}
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
    metrics = f"127.0.0.1:{metrics_port}"
    commands = {name: [*python, "bench.engine", *words] for name, words in flags.commands(ports).items()}
    commands["extproc"] = [
        *(*python, "extproc", "--config", str(config), "--listen", str(gateway["extproc"]), "--metrics", metrics),
        # all end together: nobody takes over
        *("--grace", "0s"),
        *extproc_flags,
    ]
    if watch:
        written = ["--config", str(config), "--out", str(bundle), "--watch"]
        commands["bundle"] = [*python, "controller", "bundle", *written]
    else:  # in this process: it need not outlive the writing
        write_bundle_once(load_directory(config), bundle, str(bundle.resolve()), config)
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:

        def answers(address: str, path: str) -> HttpReady:
            return HttpReady(http, f"http://{address}{path}", headers)

        pids = {name: await processes.start(name, command) for name, command in commands.items()}
        if watch:
            await processes.wait_ready("bundle", FileReady(bundle / "bootstrap.json"))
        pids["envoy"] = await processes.start("envoy", envoy_command(bundle))
        for number, address in enumerate(engines):
            name = f"engine-{number}" if flags.apart else "engines"
            await processes.wait_ready(name, answers(address, "/health"))
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


def _kv_events(engines: Sequence[EnginePorts]) -> dict[str, object]:
    """Fields of a ModelServer whose engines publish KV events on ports of their own, as they share an address."""
    endpoints = [
        {
            "address": f"127.0.0.1:{one.http}",
            "kvEvents": f"127.0.0.1:{one.events}",
            "kvReplay": f"127.0.0.1:{one.replay}",
        }
        for one in engines
    ]
    return {"endpoints": endpoints, "kvEvents": {}}


class HttpReady:
    """Whether a page answers 200."""

    def __init__(self, http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._http = http
        self._url = url
        self._headers = headers

    async def __call__(self) -> bool:
        """Probe now."""
        try:
            async with self._http.get(self._url, headers=self._headers) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False


class FileReady:
    """Whether a file has been written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(self) -> bool:
        """Check now."""
        return await asyncio.to_thread(self._file.is_file)
