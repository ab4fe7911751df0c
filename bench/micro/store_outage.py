# SPDX-License-Identifier: Apache-2.0
"""Memory while what a gateway writes to is dead: ``python -m bench.micro.store_outage``.

`attache serve` runs several times, side by side, and all get as many requests a second. Each minute the memory of each
process is noted. With ``--of rows`` they keep rows, budgets and objectives: as usual, with a database that accepts
connections and never answers, and with a log to which nothing can be written (``/dev/full``). With ``--of sinks`` they
have objectives and one more: spans of all requests to a collector that is away or never answers, requests and answers
to a payload sink that never answers, and a guard that never answers, without which requests go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from bench.micro.http_load import RequestLoad, chat_requests
from bench.micro.observability import TOKEN, GatewayVariant, start_variant
from bench.stack.processes import Processes, free_ports, rss_bytes

if TYPE_CHECKING:
    from bench.micro.observability import RunningGateway

_MINUTE_S: Final = 60.0
# Requests come so many times a second, some at once each time.
_BURSTS: Final = 4
# Caches and pools of memory fill first.
_WARM_MINUTES: Final = 5
_EVERYTHING: Final = GatewayVariant("as usual", has_rows=True, has_budgets=True, has_objectives=True)
_PLAIN: Final = GatewayVariant("as usual", has_objectives=True)

# By gateway and role: MiB after each minute.
Memory = dict[tuple[str, str], list[float]]


def outage_variants(what: str, dead: str) -> tuple[GatewayVariant, ...]:
    """``what``: rows or sinks. ``dead``: an address that takes connections and never answers."""
    replace = msgspec.structs.replace
    if what == "rows":
        return (
            _EVERYTHING,
            replace(_EVERYTHING, name="no answer of the store", store=f"postgresql://nobody@{dead}/usage"),
            replace(_EVERYTHING, name="no space for the log", log="/dev/full"),
        )
    return (
        _PLAIN,
        replace(_PLAIN, name="no trace collector", tracing=100.0),
        replace(_PLAIN, name="no answer of the collector", tracing=100.0, collector=dead),
        replace(_PLAIN, name="no answer of the payload sink", sink=f"http://{dead}/"),
        replace(_PLAIN, name="no answer of the guard", guard=f"http://{dead}/"),
    )


async def run(minutes: int, rate: int, what: str, only: str = "") -> Memory:
    """Load all variants for so long; ``only``: of those but the first, the ones whose names contain it."""
    requests = [one.wire_bytes(f"authorization: Bearer {TOKEN}\r\n") for one in chat_requests(2_000, count=64)]
    engine, collector = free_ports(2)
    dead = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    first, *others = outage_variants(what, f"127.0.0.1:{dead.sockets[0].getsockname()[1]}")
    variants = (first, *(one for one in others if only in one.name))
    found: Memory = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        async with dead, Processes(directory) as processes:
            words = ("-m", "bench.micro.instant_engine", "--ports", str(engine))
            await processes.start("engine", (sys.executable, *words))
            gateways = [
                await start_variant(one, engine, collector, processes, directory / f"serve-{number}")
                for number, one in enumerate(variants)
            ]
            for minute in range(minutes):
                until_s = asyncio.get_running_loop().time() + _MINUTE_S
                await asyncio.gather(*(_load(one, requests, rate // _BURSTS, until_s) for one in gateways))
                for one in gateways:
                    for role, pid in one.pids.items():
                        found.setdefault((one.variant.name, role), []).append(rss_bytes(pid) / 2**20)
                print(f"minute {minute + 1}", *(f"{values[-1]:.1f}" for values in found.values()), flush=True)
    return found


async def _load(one: RunningGateway, requests: list[bytes], at_once: int, until_s: float) -> None:
    clock = asyncio.get_running_loop().time
    next_s = clock()
    while next_s < until_s:
        await asyncio.sleep(next_s - clock())
        # a busy machine may refuse some, or answer late
        with contextlib.suppress(RuntimeError, TimeoutError):
            await RequestLoad(requests, connections=at_once).run("127.0.0.1", one.port, seconds=0.0)
        next_s += 1.0 / _BURSTS


def table(found: Memory, rate: int) -> str:
    """One line a process: MiB, and how much of it came after the first minutes."""
    minutes = len(next(iter(found.values())))
    shown = sorted({1, min(_WARM_MINUTES, minutes), (minutes + 1) // 2, minutes})
    heads = "".join(f" minute {one} |" for one in shown)
    lines = [f"| gateway | process |{heads} growth since minute {shown[1]} |", f"|---|---|{'---:|' * (len(shown) + 1)}"]
    for (name, role), values in found.items():
        cells = "".join(f" {values[one - 1]:.1f} |" for one in shown)
        lines.append(f"| {name} | {role} |{cells} {values[-1] - values[shown[1] - 1]:+.1f} |")
    return "\n".join([*lines, "", f"MiB, at {rate} requests a second to each gateway."])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="bench.micro.store_outage", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--of", choices=("rows", "sinks"), default="rows", help="what is dead")
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--rate", type=int, default=40, help="requests a second to each gateway")
    parser.add_argument("--only", default="", help="of the variants but the first, those whose names contain it")
    options = parser.parse_args()
    print(table(asyncio.run(run(options.minutes, options.rate, options.of, options.only)), options.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
