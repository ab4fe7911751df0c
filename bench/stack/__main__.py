# SPDX-License-Identifier: Apache-2.0
"""``make up``: the whole system on loopback, left running until Ctrl-C, with a line to try."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console

from bench.stack.loopback_stack import ALIAS, EngineFlags, EnvoyMissing, Stack, running_stack
from bench.stack.processes import StartFailed


def parser(prog: str = "bench.stack") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Start Envoy, extproc and simulated engines on this machine, and print a request to try. Ctrl-C ends all."
        ),
        epilog="Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start.",
    )
    add = made.add_argument
    add("--engines", type=int, default=4, metavar="N", help="how many engines (default: %(default)s)")
    add("--hardware", default="h100-llama-3.1-8b", help="of the engines (default: %(default)s)")
    add("--listen", default="127.0.0.1:8080", metavar="IP:PORT", help="where Envoy listens (default: %(default)s)")
    add("--picker", choices=["PrefixAware", "RoundRobin"], default="PrefixAware", help="default: %(default)s")
    return made


def main(arguments: list[str] | None = None, prog: str = "bench.stack") -> int:
    """Exit status: 0 after Ctrl-C or SIGTERM, 2 if something did not start."""
    options = parser(prog).parse_args(arguments)
    flags = EngineFlags(count=options.engines, hardware=options.hardware)
    console = Console(highlight=False)
    try:
        uvloop.run(_stay(flags, options.picker, options.listen, console))
    except (StartFailed, EnvoyMissing) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _stay(flags: EngineFlags, picker: str, listen: str, console: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    with tempfile.TemporaryDirectory(prefix="attache-up-") as directory, contextlib.suppress(asyncio.CancelledError):
        async with running_stack(
            Path(directory), flags, picker=picker, watch=True, gateway={"listen": listen}
        ) as stack:
            console.print(_welcome(stack), markup=False, soft_wrap=True)
            await asyncio.Event().wait()
    console.print("all processes are ended")


def _welcome(stack: Stack) -> str:
    question = f'{{"model": "{ALIAS}", "stream": true, "messages": [{{"role": "user", "content": "Who are you?"}}]}}'
    return f"""\
{len(stack.engines)} engines ({", ".join(stack.engines)}), extproc and Envoy are up. Try

  curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json' -d '{question}'

configuration  {stack.config}  (edit it: it is followed)
console        {stack.metrics}/console
metrics        {stack.metrics}/metrics of extproc, /metrics of every engine, {stack.admin} of Envoy
logs           {stack.directory}
faults         curl {stack.engines[0]}/faults -d '{{"fault": "stall", "for_s": 5}}'  (also refuse, cut, unavailable)

Ctrl-C ends it all."""


if __name__ == "__main__":
    sys.exit(main())
