# SPDX-License-Identifier: Apache-2.0
"""What a translation costs a request: ``python -m bench.micro.translation``.

One `attache serve` has two models of an engine that answers at once: one gets its clients' chats as they are, the other
gets messages that are translated to chats. Both are loaded in turn, round by round, so that what disturbs the machine
disturbs both. Ratios are those of each round; the table has their medians. Processor time is that of Envoy, extproc and
the translator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec
import yaml

from bench.micro.http_load import RequestLoad, WireRequest, chat_requests
from bench.micro.instant_engine import EVENTS
from bench.reporting.request_results import nearest_rank
from bench.stack.loopback_stack import MODEL
from bench.stack.processes import Processes, cpu_seconds, free_ports, rss_bytes, workers_of

_READY: Final = "ready: clients connect to"
_ROLES: Final = ("extproc", "translate")
_MODELS: Final = ("plain", "translated")


class Case(msgspec.Struct, frozen=True):
    """``events``: of each answer, 5 ms apart; 0: it is whole."""

    name: str
    at_once: int
    events: int = 0


CASES: Final = (
    Case("2 KB, whole, one at a time", 1),
    Case("2 KB, whole, 8 at once", 8),
    Case("2 KB, 80 events, 8 at once", 8, events=80),
)


class Round(msgspec.Struct, frozen=True):
    """``p50_s``: from a request to its whole answer. ``rate``: answers a second. ``cpu_us``: of a request, by
    process.
    """

    p50_s: float
    rate: float
    cpu_us: dict[str, float]

    @property
    def total_cpu_us(self) -> float:
        """Of all processes."""
        return sum(self.cpu_us.values())


def _directory(engine: int, listen: int, admin: int, extproc: int) -> str:
    spec: dict[str, object] = {
        "model": MODEL,
        "endpoints": [{"address": f"127.0.0.1:{engine}"}],
        "scrapeInterval": "0s",
    }
    specs = {"plain": spec, "translated": {**spec, "apis": ["ChatCompletions"], "translation": "Lenient"}}
    gateway = {
        "listen": f"127.0.0.1:{listen}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
    }
    made: list[tuple[str, str, dict[str, object]]] = [("GatewayConfig", "gateway", {**gateway})]
    for name, one in specs.items():
        rule = {"targetModels": [{"modelServerName": name}]}
        made += [("ModelServer", name, one), ("ModelRoute", name, {"modelName": name, "rules": [rule]})]
    head = {"apiVersion": "attache.dev/v1alpha1"}
    return yaml.safe_dump_all(
        [{**head, "kind": kind, "metadata": {"name": name}, "spec": one} for kind, name, one in made]
    )


def _requests(model: str, case: Case) -> list[bytes]:
    """Chats, or the same as messages."""
    headers = f"{EVENTS}: {case.events}\r\n" if case.events else ""
    more: dict[str, object] = {"stream": True} if case.events else {}
    if model == "plain":
        chats = [json.loads(one.body) for one in chat_requests(2_000, count=64, model=model)]
        return [WireRequest(json.dumps({**one, **more}).encode()).wire_bytes(headers) for one in chats]
    made = []
    for one in chat_requests(2_000, count=64, model=model):
        chat = json.loads(one.body)
        system, user = chat["messages"]
        body = {"model": model, "max_tokens": 9, "system": system["content"], "messages": [user], **more}
        made.append(WireRequest(json.dumps(body).encode(), "/v1/messages").wire_bytes(headers))
    return made


def _pids(serve: int) -> dict[str, int]:
    found = {}
    for child in Path(f"/proc/{serve}/task/{serve}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        role = next((one for one in _ROLES if one in words), "envoy" if "--base-id" in words or "-c" in words else "")
        if role:
            found[role] = int(child)
    (found["extproc"],) = workers_of(found["extproc"])
    return found


async def measure(pids: dict[str, int], port: int, requests: list[bytes], at_once: int, seconds: float) -> Round:
    """One round of a gateway whose processes these are."""
    before = {role: cpu_seconds(pid) for role, pid in pids.items()}
    load = RequestLoad(requests, connections=at_once)
    rate = await load.run("127.0.0.1", port, seconds=seconds)
    count = len(load.taken_s)
    used = {role: (cpu_seconds(pid) - before[role]) / count * 1e6 for role, pid in pids.items()}
    return Round(nearest_rank(sorted(load.taken_s), 0.5), rate, used)


async def measure_and_build_table(rounds: int, seconds: float) -> str:
    """The table, and the translator's memory."""
    engine, listen, admin, extproc, metrics = free_ports(5)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config").mkdir()
        (directory / "config" / "attache.yaml").write_text(_directory(engine, listen, admin, extproc))
        async with Processes(directory) as processes:
            await processes.start(
                "engine", (sys.executable, "-m", "bench.micro.instant_engine", "--ports", str(engine))
            )
            command = (sys.executable, "-m", "attache", "serve", "--config", str(directory / "config"))
            await processes.start("serve", (*command, "--metrics", f"127.0.0.1:{metrics}"))

            async def is_ready() -> bool:
                return _READY in (directory / "serve.log").read_text()

            await processes.wait_ready("serve", is_ready)
            pids = _pids(processes.pid("serve"))
            lines = [
                "| | p50, ms | translated | | CPU, us | translated | | Envoy | extproc | translator |",
                "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            ]
            for case in CASES:
                found: dict[str, list[Round]] = {model: [] for model in _MODELS}
                for number in range(rounds + 1):
                    for model in _MODELS[:: -1 if number % 2 else 1]:
                        one = await measure(pids, listen, _requests(model, case), case.at_once, seconds)
                        if number:
                            found[model].append(one)
                lines.append(_line(case, found["plain"], found["translated"]))
            memory = rss_bytes(pids["translate"]) / 1e6
    return "\n".join([*lines, "", f"Medians of {rounds} rounds of {seconds:g} s. The translator has {memory:.0f} MB."])


def _line(case: Case, plain: list[Round], translated: list[Round]) -> str:
    median = statistics.median
    p50 = [median(one.p50_s for one in each) * 1e3 for each in (plain, translated)]
    cpu = [median(one.total_cpu_us for one in each) for each in (plain, translated)]
    slower = median(b.p50_s / a.p50_s for a, b in zip(plain, translated, strict=True))
    dearer = median(b.total_cpu_us / a.total_cpu_us for a, b in zip(plain, translated, strict=True))
    roles = [f"{median(one.cpu_us[role] for one in translated):.0f}" for role in ("envoy", "extproc", "translate")]
    return (
        f"| {case.name} | {p50[0]:.2f} | {p50[1]:.2f} | {slower:.2f} | {cpu[0]:.0f} | {cpu[1]:.0f} | {dearer:.2f} |"
        f" {' | '.join(roles)} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.micro.translation", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a round of one model")
    options = parser.parse_args()
    print(asyncio.run(measure_and_build_table(options.rounds, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
