# SPDX-License-Identifier: Apache-2.0
"""Memory while rows cannot be kept: ``python -m bench.micro.dead_store``.

`attache serve` with rows, budgets and objectives runs three times, side by side: as usual, with a database that accepts
connections and never answers, and with a log to which nothing can be written (``/dev/full``). All get as many requests
a second. Each minute the memory of each process is noted.
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

from bench.micro.observability import TOKEN, Variant, start
from bench.micro.wire import WireLoad, questions
from bench.stack.processes import Processes, free_ports, rss_bytes

if TYPE_CHECKING:
    from bench.micro.observability import Served

_MINUTE_S: Final = 60.0
# Requests come so many times a second, some at once each time.
_BURSTS: Final = 4
# Caches and pools of memory fill first.
_WARM_MINUTES: Final = 5
_EVERYTHING: Final = Variant("as usual", has_rows=True, has_budgets=True, has_objectives=True)

# By gateway and role: MiB after each minute.
Memory = dict[tuple[str, str], list[float]]


async def run(minutes: int, rate: int) -> Memory:
    """Load all three for so long."""
    requests = [one.on_wire(f"authorization: Bearer {TOKEN}\r\n") for one in questions(2_000, count=64)]
    engine, collector = free_ports(2)
    database = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = database.sockets[0].getsockname()[1]
    variants = (
        _EVERYTHING,
        msgspec.structs.replace(
            _EVERYTHING, name="no answer of the store", store=f"postgresql://nobody@127.0.0.1:{port}/usage"
        ),
        msgspec.structs.replace(_EVERYTHING, name="no space for the log", log="/dev/full"),
    )
    found: Memory = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        async with database, Processes(directory) as processes:
            words = ("-m", "bench.micro.instant_engine", "--ports", str(engine))
            await processes.start("engine", (sys.executable, *words))
            gateways = [
                await start(one, engine, collector, processes, directory / f"serve-{number}")
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


async def _load(one: Served, requests: list[bytes], at_once: int, until_s: float) -> None:
    clock = asyncio.get_running_loop().time
    next_s = clock()
    while next_s < until_s:
        await asyncio.sleep(next_s - clock())
        # a busy machine may refuse some, or answer late
        with contextlib.suppress(RuntimeError, TimeoutError):
            await WireLoad(requests, connections=at_once).run("127.0.0.1", one.port, seconds=0.0)
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
    parser = argparse.ArgumentParser(prog="bench.micro.dead_store", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--rate", type=int, default=40, help="requests a second to each gateway")
    options = parser.parse_args()
    print(table(asyncio.run(run(options.minutes, options.rate)), options.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
