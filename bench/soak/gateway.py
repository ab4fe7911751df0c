# SPDX-License-Identifier: Apache-2.0
"""What a soak runs: engines, extproc, a bundle that is followed, Envoy, and the directory that they read."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.soak import engines, model_changes
from bench.soak.hostile_engines import HOSTILE, MIXED, REPLAY_OFFSET, adapter_of, hostile_host
from bench.soak.model_changes import SoakModel, document, documents_text
from bench.stack.loopback_stack import FileReady, HttpReady, envoy_binary, envoy_command
from bench.stack.processes import Processes, free_ports, ports_in_a_row

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

# The processes for which memory and logs are checked.
JUDGED: Final = ("extproc", "bundle", "envoy")
KV: Final = "kv"
MIXED_NAME: Final = "mixed"
_MIXED_HOST: Final = "127.0.0.1"


class SoakGateway(msgspec.Struct, frozen=True):
    """Where everything is. ``ports``: of the honest engine processes."""

    processes: Processes
    directory: Path
    url: str
    admin: str
    extproc: str
    bundle: str
    ports: tuple[int, ...]
    hostile_port: int

    @property
    def config(self) -> Path:
        """The configuration directory."""
        return self.directory / "config"

    def write(self, file: str, text: str | None) -> None:
        """Replace a file at once, or remove it."""
        if text is None:
            (self.config / file).unlink()
            return
        # hidden files are not read
        new = self.config / f".{file}"
        new.write_text(text)
        new.replace(self.config / file)


@contextlib.asynccontextmanager
async def running_gateway(
    directory: Path, models: Mapping[int, SoakModel], *, size: int, engine_count: int, hostile: Sequence[str]
) -> AsyncIterator[SoakGateway]:
    """Start it all and wait until it serves; end it all on the way out. Raises StartFailed and EnvoyMissing.

    ``size``: models that have addresses. ``hostile``: names of hostile engines.
    """
    envoy_binary()
    listen, admin, extproc, extproc_page, bundle_page, hostile_port, *ports = free_ports(6 + engine_count)
    kv_ports = [ports_in_a_row(2 * engines.RANKS) for _ in ports[:2]]
    hostile_kv = ports_in_a_row(1 + REPLAY_OFFSET)
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir(parents=True)
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:
        gateway = SoakGateway(
            processes=processes,
            directory=directory,
            url=f"http://127.0.0.1:{listen}",
            admin=f"http://127.0.0.1:{admin}",
            extproc=f"http://127.0.0.1:{extproc_page}",
            bundle=f"http://127.0.0.1:{bundle_page}",
            ports=tuple(ports),
            hostile_port=hostile_port,
        )
        addresses = {name: f"127.0.0.1:{port}" for name, port in (("listen", listen), ("admin", admin))}
        listens = {**addresses, "extproc": f"127.0.0.1:{extproc}"}
        gateway.write("gateway.yaml", documents_text([document("GatewayConfig", "gateway", listens)]))
        gateway.write("kv.yaml", _model(KV, KV, _kv_spec(ports, kv_ports)))
        for model in models.values():
            gateway.write(model.file, model_changes.model_file_content(model, ports))
        for name in hostile:
            spec = _hostile_spec(name, hostile_port, hostile_kv)
            gateway.write(f"hostile-{name}.yaml", _model(name, name, spec, adapters=_adapters(name)))
        if MIXED in hostile:
            mixed = [f"{_MIXED_HOST}:{port}" for port in ports[:2]] + [f"{hostile_host(MIXED)}:{hostile_port}"]
            spec = {"endpoints": [{"address": one} for one in mixed]}
            gateway.write("mixed.yaml", _model(MIXED_NAME, MIXED_NAME, spec))

        async def start(name: str, module: str, *words: object) -> None:
            await processes.start(name, [sys.executable, "-m", *module.split(), *map(str, words)])

        for number, port in enumerate(ports):
            kv = ["--kv-port", kv_ports[number]] if number < len(kv_ports) else []
            await start(f"engine-{number}", "bench.soak.engines", "--port", port, "--models", size, *kv)
        if hostile:
            await start(
                "hostile", "bench.soak.hostile_engines", "--port", hostile_port, "--kv-port", hostile_kv, *hostile
            )
        watched = ("--config", config, "--out", bundle, "--watch", "--metrics", f"127.0.0.1:{bundle_page}")
        await start("bundle", "controller bundle", *watched)
        served = ("--listen", listens["extproc"], "--metrics", f"127.0.0.1:{extproc_page}")
        await start("extproc", "extproc", "--config", config, *served)

        for number, port in enumerate(ports):
            await processes.wait_ready(f"engine-{number}", HttpReady(http, f"http://127.0.0.1:{port}/health"))
        await processes.wait_ready("bundle", FileReady(bundle / "bootstrap.json"))
        await processes.start("envoy", envoy_command(bundle))
        await processes.wait_ready("extproc", HttpReady(http, f"{gateway.extproc}/readyz"))
        await processes.wait_ready("envoy", HttpReady(http, f"{gateway.admin}/ready"))
        await processes.wait_ready("envoy", HttpReady(http, f"{gateway.url}/v1/models/{KV}"))
        yield gateway


def _model(name: str, asked: str, spec: Mapping[str, object], adapters: Sequence[str] = ()) -> str:
    """A file with one ModelServer and its ModelRoute."""
    rules = [{"targetModels": [{"modelServerName": name}]}]
    route = {"modelName": asked, "loraAdapters": list(adapters), "rules": rules, "responseModel": "Served"}
    server = {"model": name, **spec}
    return documents_text([document("ModelServer", name, server), document("ModelRoute", name, route)])


def _kv_spec(ports: Sequence[int], kv_ports: Sequence[int]) -> dict[str, object]:
    """An engine process each, with ranks that publish."""
    endpoints = [
        {
            "address": f"{engines.KV_HOST}:{port}",
            "kvEvents": f"127.0.0.1:{first}",
            "kvReplay": f"127.0.0.1:{first + engines.RANKS}",
        }
        for port, first in zip(ports, kv_ports, strict=False)
    ]
    return {"endpoints": endpoints, "kvEvents": {"topic": "kv", "dataParallelSize": engines.RANKS}}


def _hostile_spec(name: str, port: int, kv_port: int) -> dict[str, object]:
    hostile = HOSTILE[name]
    endpoint: dict[str, object] = {"address": f"{hostile_host(name)}:{port}"}
    spec: dict[str, object] = {"endpoints": [endpoint], "scrapeInterval": "500ms"}
    if hostile.event is not None:
        # that also calls /tokenize
        endpoint["kvEvents"] = f"{hostile_host(name)}:{kv_port}"
        spec["kvEvents"] = {"topic": "kv"}
    if hostile.replay:
        endpoint["kvReplay"] = f"{hostile_host(name)}:{kv_port + REPLAY_OFFSET}"
    if hostile.loads_adapters:
        sources: Any = [{"name": adapter_of(name), "source": "/weights"}]
        spec["adapterLoading"] = {"adapters": sources, "timeout": "5s"}
    return spec


def _adapters(name: str) -> list[str]:
    return [adapter_of(name)] if HOSTILE[name].loads_adapters else []
