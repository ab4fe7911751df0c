# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.sizes``: what a gateway of 1,000 models costs, at a hundredth, a tenth and all of that size."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args

import httpx
import matplotlib as mpl
import msgspec
import uvloop
from rich.console import Console

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, api_key_of, configuration
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, cpu_seconds, free_ports, rss_bytes
from extproc.api.status_page_contents import REPORT_PATH, ConfigReport, content_digest
from extproc.wire_names import CHAT_PATH

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

mpl.use("Agg")
from matplotlib import pyplot as plt

Mode = Literal["Open", "Close"]

_OUT: Final = Path("bench/out/sizes")
_CHANGES: Final = 3
_SETTLING_S: Final = 15.0
# Of requests, and as long without any before.
_MEASURED_S: Final = 10.0
_READY_S: Final = 300.0
_PROBE_S: Final = 0.002
# Between two reads of a report: it takes a turn of extproc's event loop, too.
_POLL_S: Final = 0.1
# For a probe that is still on its way when the work is done.
_LAST_PROBE_S: Final = 0.1
# What a row of the table is called, in its order.
_ROWS: Final = {
    "check_s": "`attache check`, s",
    "first_bundle_s": "first bundle, s",
    "extproc_start_s": "extproc until it is ready, s",
    "envoy_start_s": "Envoy until it is ready, s",
    "bundle_mib": "memory of the bundle's writer, MiB",
    "extproc_mib": "memory of extproc, MiB",
    "envoy_mib": "memory of Envoy, MiB",
    "idle_core_share": "extproc without requests, share of a core",
    "route_change_s": "a route's change until both use it, s",
    "route_change_lag_ms": "extproc's longest turn during that, ms",
    "endpoint_change_s": "an endpoint's change until both use it, s",
    "pick_us": "a pick, mean, µs",
    "request_p50_ms": "a request, median, ms",
    "envoy_cpu_ms": "Envoy's CPU for a request, ms",
    "metrics_page_s": "a page of extproc's metrics, s",
    "metrics_page_lag_ms": "extproc's longest turn during a page of metrics, ms",
}


class Figures(msgspec.Struct, frozen=True):
    """Of one size in one mode; seconds, MiB, milliseconds as the names say. The requests come one at a time.

    ``idle_core_share``: of one core, without requests. ``*_lag_ms``: the longest that extproc's event loop stood still.
    """

    share: float
    mode: Mode
    check_s: float
    first_bundle_s: float
    extproc_start_s: float
    envoy_start_s: float
    bundle_mib: float
    extproc_mib: float
    envoy_mib: float
    idle_core_share: float
    route_change_s: float
    route_change_lag_ms: float
    endpoint_change_s: float
    pick_us: float
    request_p50_ms: float
    envoy_cpu_ms: float
    metrics_page_s: float
    metrics_page_lag_ms: float


class MeasuredStack:
    """One configuration, served by all three processes, before engines that answer at once."""

    def __init__(
        self, folder: Path, sizes: ObjectCounts, mode: Mode, processes: Processes, http: httpx.AsyncClient
    ) -> None:
        listen, admin, extproc, self._metrics, self._bundle, self._engines = free_ports(6)
        self._sizes, self._processes, self._http = sizes, processes, http
        self._url = f"http://127.0.0.1:{listen}{CHAT_PATH}"
        self._admin, self._extproc = f"http://127.0.0.1:{admin}", f"127.0.0.1:{extproc}"
        self._config, self._out = folder / "config", folder / "envoy"
        self._config.mkdir()
        gateway = GatewayPorts(f"127.0.0.1:{listen}", f"127.0.0.1:{admin}", self._extproc, self._engines)
        for name, content in configuration(sizes, gateway, mode).items():
            (self._config / name).write_bytes(content)
        self._headers = {"authorization": f"Bearer {api_key_of(sizes.keys - 1)}"} if mode == "Close" else {}

    async def start(self, name: str, words: Sequence[str], is_ready: Callable[[], Awaitable[bool]]) -> float:
        """Seconds until it is ready."""
        began_s = time.perf_counter()
        command = list(words) if name == "envoy" else [sys.executable, "-m", *words]
        await self._processes.start(name, command)
        while not await is_ready():
            if time.perf_counter() - began_s > _READY_S or not self._processes.is_running(name):
                sys.exit(f"{name} does not get ready; its log is beside the configuration")
            await asyncio.sleep(0.02)
        return time.perf_counter() - began_s

    async def start_and_measure(self, share: float, mode: Mode) -> Figures:
        """Start everything in order, and measure."""
        shared = ["--config", str(self._config)]
        began_s = time.perf_counter()
        checking = await asyncio.create_subprocess_exec(sys.executable, "-m", "attache", "check", str(self._config))
        if await checking.wait():
            sys.exit("the configuration is not valid")
        check_s = time.perf_counter() - began_s
        engines = ["bench.micro.instant_engine", "--ports", str(self._engines), "--everywhere"]
        await self.start("engines", engines, lambda: self._answers(f"http://127.0.0.1:{self._engines}/health"))
        metrics = ["--listen", self._extproc, "--metrics", f"127.0.0.1:{self._metrics}"]
        extproc_s = await self.start(
            "extproc",
            ["extproc", *shared, *metrics],
            lambda: self._answers(f"http://127.0.0.1:{self._metrics}/readyz"),
        )
        pages = ["--metrics", f"127.0.0.1:{self._bundle}"]
        bundle_s = await self.start(
            "bundle", ["controller", "bundle", *shared, "--out", str(self._out), "--watch", *pages], self._is_written
        )
        envoy_s = await self.start("envoy", envoy_command(self._out), self._takes_requests)
        await self._until_used()
        requests = await self._requests()
        routes = [await self._change("routes-0.json", self._rename, number) for number in range(_CHANGES)]
        endpoints = [await self._change("servers-0.json", self._add_endpoint, number) for number in range(_CHANGES)]
        metrics_page_s, metrics_page_lag_ms = await self._timed(_read(self._metrics, "/metrics"))
        return Figures(
            share=share,
            mode=mode,
            check_s=check_s,
            first_bundle_s=bundle_s,
            extproc_start_s=extproc_s,
            envoy_start_s=envoy_s,
            bundle_mib=self._mib("bundle"),
            extproc_mib=self._mib("extproc"),
            envoy_mib=self._mib("envoy"),
            idle_core_share=requests["idle"],
            route_change_s=statistics.median(seconds for seconds, _ in routes),
            route_change_lag_ms=max(lag_ms for _, lag_ms in routes),
            endpoint_change_s=statistics.median(seconds for seconds, _ in endpoints),
            pick_us=requests["pick"],
            request_p50_ms=requests["p50"],
            envoy_cpu_ms=requests["envoy"],
            metrics_page_s=metrics_page_s,
            metrics_page_lag_ms=metrics_page_lag_ms,
        )

    async def _requests(self) -> dict[str, float]:
        """Median time in ms, Envoy's CPU for a request in ms, extproc's share of a core when idle, and the mean time of
        a pick in µs. extproc's CPU is not told by request: it reads fewer engines' pages while requests come.
        """
        last = f"model-{self._sizes.model_routes - 1}"
        body = {"model": last, "messages": [{"role": "user", "content": "hello " * 300}]}

        async def ask() -> float:
            began_s = time.perf_counter()
            answer = await self._http.post(self._url, json=body, headers=self._headers)
            if answer.status_code != 200:
                sys.exit(f"a request was answered {answer.status_code}: {answer.text}")
            return (time.perf_counter() - began_s) * 1000

        for _ in range(20):
            await ask()
        # extproc reads all engines for the first time
        await asyncio.sleep(_SETTLING_S)
        idle_s, began_s = self._cpu_s("extproc"), time.perf_counter()
        await asyncio.sleep(_MEASURED_S)
        idle_share = (self._cpu_s("extproc") - idle_s) / (time.perf_counter() - began_s)
        picked, envoy_s, began_s = await self._picks(), self._cpu_s("envoy"), time.perf_counter()
        taken_ms: list[float] = []
        while time.perf_counter() - began_s < _MEASURED_S:
            taken_ms.append(await ask())
        envoy_s = self._cpu_s("envoy") - envoy_s
        seconds, count = (now - once for once, now in zip(picked, await self._picks(), strict=True))
        return {
            "pick": seconds / count * 1e6,
            "p50": statistics.median(taken_ms),
            "idle": idle_share,
            "envoy": envoy_s / len(taken_ms) * 1000,
        }

    async def _picks(self) -> tuple[float, float]:
        """The seconds that all picks took so far, and how many they were."""
        page = (await _read(self._metrics, "/metrics")).decode()
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("attache_pick_seconds_"))
        return float(values["attache_pick_seconds_sum"]), float(values["attache_pick_seconds_count"])

    async def _change(
        self, name: str, edit: Callable[[list[dict[str, object]], int], None], number: int
    ) -> tuple[float, float]:
        """Seconds until extproc and Envoy use the file as it is then, and extproc's longest turn meanwhile in ms."""
        documents = json.loads((self._config / name).read_bytes())
        edit(documents, number)
        draft = self._config / f".{name}"
        draft.write_text(json.dumps(documents))
        draft.replace(self._config / name)
        return await self._timed(self._until_used())

    async def _timed(self, work: Awaitable[object]) -> tuple[float, float]:
        """Seconds of ``work``, and extproc's longest turn meanwhile in ms: the slowest answer of /readyz, which needs
        nothing but a turn of its event loop.
        """
        longest_s = 0.0

        async def probe() -> None:
            nonlocal longest_s
            while True:
                began_s = time.perf_counter()
                await _read(self._metrics, "/readyz")
                longest_s = max(longest_s, time.perf_counter() - began_s)
                await asyncio.sleep(_PROBE_S)

        probing, began_s = asyncio.create_task(probe()), time.perf_counter()
        await work
        seconds = time.perf_counter() - began_s
        await asyncio.sleep(_LAST_PROBE_S)
        probing.cancel()
        return seconds, longest_s * 1000

    def _rename(self, documents: list[dict[str, object]], number: int) -> None:
        documents[0]["spec"] = {**_spec(documents[0]), "modelName": f"renamed-{number}"}

    def _add_endpoint(self, documents: list[dict[str, object]], number: int) -> None:
        spec = _spec(documents[0])
        more = {"address": f"127.250.0.{number + 1}:{self._engines}"}
        documents[0]["spec"] = {**spec, "endpoints": [*spec["endpoints"], more]}  # type: ignore[misc]  # plain data

    async def _until_used(self) -> None:
        wanted = {one.name: content_digest(one.read_bytes()) for one in self._config.glob("[!.]*")}
        for port in (self._metrics, self._bundle):
            while (await self._report(port)).files != wanted:  # noqa: ASYNC110 - another process's page
                await asyncio.sleep(_POLL_S)

    async def _report(self, port: int) -> ConfigReport:
        answer = await self._http.get(f"http://127.0.0.1:{port}{REPORT_PATH}")
        return msgspec.json.decode(answer.content, type=ConfigReport)

    async def _answers(self, url: str) -> bool:
        try:
            return (await self._http.get(url)).status_code == 200
        except httpx.TransportError:
            return False

    async def _is_written(self) -> bool:
        return (self._out / "bootstrap.json").is_file()

    async def _takes_requests(self) -> bool:
        return await self._answers(f"{self._admin}/ready")

    def _mib(self, name: str) -> float:
        return rss_bytes(self._processes.pid(name)) / 2**20

    def _cpu_s(self, name: str) -> float:
        return cpu_seconds(self._processes.pid(name))


async def _read(port: int, path: str) -> bytes:
    """A page, without parsing it: that would delay the probes of this process."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()


def _spec(document: dict[str, object]) -> dict[str, object]:
    return document["spec"]  # type: ignore[return-value]  # plain data


async def measure(share: float, mode: Mode) -> Figures:
    """One size, in processes of its own."""
    sizes = ObjectCounts().scaled(share)
    with tempfile.TemporaryDirectory() as folder:
        async with Processes(Path(folder)) as processes, httpx.AsyncClient(timeout=120) as http:
            return await MeasuredStack(Path(folder), sizes, mode, processes, http).start_and_measure(share, mode)


def table(all_figures: Sequence[Figures]) -> str:
    """A table in Markdown, a column for each size and mode."""
    heads = [f"{100 * one.share:g}%, {one.mode}" for one in all_figures]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for name, said in _ROWS.items():
        lines.append(f"| {said} | {' | '.join(f'{getattr(one, name):.3g}' for one in all_figures)} |")
    return "\n".join(lines) + "\n"


def draw(all_figures: Sequence[Figures], file: Path) -> None:
    """How each figure grows with the size, both axes logarithmic."""
    figure, places = plt.subplots(3, 6, figsize=(27, 12), layout="constrained")
    for place, (name, said) in zip(places.flat, _ROWS.items(), strict=False):
        for mode in get_args(Mode):
            own = [one for one in all_figures if one.mode == mode]
            place.loglog([one.share for one in own], [getattr(one, name) for one in own], "o-", label=mode)
        place.set_title(said.replace("`", ""), fontsize=10)
        place.set_xlabel("share of 1,000 models")
        place.legend()
    for place in list(places.flat)[len(_ROWS) :]:
        place.set_axis_off()
    figure.savefig(file)
    plt.close(figure)


def main() -> int:
    """Exit status 0; 1 if something does not serve."""
    parser = argparse.ArgumentParser(prog="bench.sizes", description=__doc__)
    parser.add_argument("--shares", default="0.01,0.1,1", help="of 1,000 models (default: %(default)s)")
    parser.add_argument("--modes", default="Close,Open", help="failure modes (default: %(default)s)")
    options = parser.parse_args()
    console = Console()
    found = []
    for share in map(float, options.shares.split(",")):
        for mode in get_args(Mode):
            if mode in options.modes.split(","):
                found.append(uvloop.run(measure(share, mode)))
                console.print(msgspec.structs.asdict(found[-1]))
    _OUT.mkdir(parents=True, exist_ok=True)
    (_OUT / "sizes.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    (_OUT / "sizes.md").write_text(table(found))
    draw(found, _OUT / "sizes.png")
    console.print(table(found), f"written to {_OUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
