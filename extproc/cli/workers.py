# SPDX-License-Identifier: Apache-2.0
"""``--workers N``: N processes behind one Envoy, and a spare process that takes the place of one that ends.

Each worker has an address of its own; Envoy balances over them. This process holds their listening sockets: while no
worker takes connections, they wait. It loads nothing that serves, so that it stays small.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from extproc.api.addresses import worker_addresses
from extproc.cli.supervisor import Program, SpareProcess, SupervisedProgram, restart_one_by_one
from extproc.listen_sockets import ListenFailed, listen
from extproc.runtime.worker_settings import WorkerSettings
from extproc.sd_notify import READY, notify

if TYPE_CHECKING:
    import argparse
    import socket
    from collections.abc import Sequence

# In place of a Worker: it comes as a line on standard input.
AWAITED = "-"


def supervise(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run ``python -m extproc`` with ``words``, ``options.workers`` times, until a signal. SIGUSR1 replaces them one by
    one. Returns their exit status if all gave up, and 2 for an address that cannot be listened on.
    """
    addresses = [None if one in {None, "off"} else one for one in (options.listen, options.metrics, options.health)]
    try:
        sockets = [_listening(one, options.workers) for one in addresses]
    except ListenFailed as error:
        print(error, file=sys.stderr)
        return 2
    return asyncio.run(_supervise(words, options.workers, sockets))


def _listening(address: str | None, count: int) -> list[socket.socket]:
    return [] if address is None else [listen(one) for one in worker_addresses(address, count)]


async def _supervise(words: Sequence[str], count: int, sockets: Sequence[Sequence[socket.socket]]) -> int:
    loop = asyncio.get_running_loop()
    descriptors = tuple(one.fileno() for of_option in sockets for one in of_option)
    command = (sys.executable, "-m", "extproc", *words, "--worker")
    with tempfile.TemporaryDirectory(prefix="attache-") as directory:
        folder, children = Path(directory), list[SupervisedProgram]()
        # as an orphan, too, it may be a worker by then
        spare = SpareProcess(Program("spare", (*command, AWAITED), descriptors, orphaned=signal.SIGUSR1), folder)
        for number in range(count):
            listening, metrics, health = own = [one[number].fileno() if one else None for one in sockets]
            others = tuple(one for one in descriptors if one not in own)
            worker = WorkerSettings(number, count, directory, listening, metrics, health, others)
            encoded = msgspec.json.encode(worker).decode()
            # an orphan leaves everything to the next supervisor's workers at once
            program = Program(
                f"worker-{number}", (*command, encoded), descriptors, encoded, signal.SIGUSR1, is_watched=True
            )
            children.append(SupervisedProgram(program, folder, spare=spare))

        def stop(number: signal.Signals) -> None:
            spare.stop()
            for child in children:
                child.stop(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        restarts = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, restarts.set)
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(child.run()) for child in children]
            beside = [
                tasks.create_task(_keep_spare(children, spare, tasks)),
                tasks.create_task(_restart(children, spare, restarts)),
            ]
            statuses = await asyncio.gather(*runs)
            spare.stop()
            for task in beside:
                task.cancel()
    return max(statuses)


async def _keep_spare(children: Sequence[SupervisedProgram], spare: SpareProcess, tasks: asyncio.TaskGroup) -> None:
    """Once all serve, report that, and have a spare process: it need not delay them."""
    for child in children:
        await child.ready.wait()
    notify(READY, os.environ)
    tasks.create_task(spare.run())


async def _restart(children: Sequence[SupervisedProgram], spare: SpareProcess, wanted: asyncio.Event) -> None:
    """Replace the processes whenever ``wanted`` is set, until cancelled."""
    while True:
        await wanted.wait()
        wanted.clear()
        spare.replace()
        await restart_one_by_one(children)
