# SPDX-License-Identifier: Apache-2.0
"""A run of a container as a process group of this machine, and its probes and preStop hooks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2

from bench.stack import processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.cluster.node.pod_spec import ContainerSpec, Handler
    from bench.stack.orphan_reaper import ProcessGuard
    from bench.stack.processes import Process

_TAIL_BYTES: Final = 2_000


class ContainerLaunch(msgspec.Struct, frozen=True):
    """What to run and where its output goes."""

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    log: Path


class ContainerProcess:
    """A process in a group of its own. When it ends, what it has left in its group ends too, as in a container."""

    def __init__(self, process: Process, launch: ContainerLaunch, guard: ProcessGuard) -> None:
        self._process = process
        self._launch = launch
        self._guard = guard

    @classmethod
    async def start(cls, launch: ContainerLaunch, guard: ProcessGuard) -> ContainerProcess:
        """Start it; raises OSError if there is no such program."""
        process = await processes.spawn(
            launch.command, launch.log, environment=launch.environment, directory=launch.directory
        )
        guard.add(process.pid)
        return cls(process, launch, guard)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> tuple[int, int]:
        """Wait for its end; the exit code as a shell has it, and the signal that ended it or 0."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._guard.remove(self._process.pid)
        return (code, 0) if code >= 0 else (128 - code, -code)

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL goes to its whole group."""
        if self._process.returncode is not None:
            return
        if number == signal.SIGKILL:
            self._signal_group(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def output_tail(self) -> str:
        """The end of its output."""
        try:
            with self._launch.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, number)


class HandlerEnvironment:
    """Where a container's handlers run: its address, its environment, and how its words become those of this
    machine.
    """

    def __init__(
        self,
        *,
        pod_ip: str,
        environment: Mapping[str, str],
        directory: str,
        rewrite: Callable[[str], str],
        enter: Sequence[str] = (),
    ) -> None:
        self.pod_ip = pod_ip
        self.enter = enter
        self.rewrite = rewrite
        self.environment = environment
        self.directory = directory


async def run_handler(
    handler: Handler,
    container: ContainerSpec,
    where: HandlerEnvironment,
    http: aiohttp.ClientSession,
    timeout_s: float,
) -> tuple[bool, str]:
    """Whether it succeeded within ``timeout_s``, and a message if it did not."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _run(handler, container, where, http)
    except TimeoutError:
        return False, f"timed out after {timeout_s:g}s"
    except (OSError, aiohttp.ClientError, grpc.aio.AioRpcError) as error:
        return False, str(error)


async def _run(
    handler: Handler, container: ContainerSpec, where: HandlerEnvironment, http: aiohttp.ClientSession
) -> tuple[bool, str]:
    if handler.kind == "sleep":
        await asyncio.sleep(handler.sleep_s)
        return True, ""
    if handler.kind == "exec":
        return await _exec([where.rewrite(word) for word in handler.command], where)
    host = where.pod_ip if handler.host in ("", "0.0.0.0") else handler.host  # noqa: S104 - compared
    port = _port(handler.port, container)
    if handler.kind == "tcp":
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True, ""
    if handler.kind == "grpc":
        return await _grpc(f"{host}:{port}", handler.service)
    url = f"{handler.scheme.lower()}://{host}:{port}/{handler.path.removeprefix('/')}"
    async with http.get(url, headers=dict(handler.headers), ssl=False, allow_redirects=False) as answer:
        ok = 200 <= answer.status < 400
        return ok, "" if ok else f"HTTP probe failed with statuscode: {answer.status}"


async def _exec(command: Sequence[str], where: HandlerEnvironment) -> tuple[bool, str]:
    process = await asyncio.create_subprocess_exec(
        *where.enter,
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(where.environment),
        cwd=where.directory,
        start_new_session=True,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
    return process.returncode == 0, said.decode(errors="replace")[-1000:]


async def _grpc(target: str, service: str) -> tuple[bool, str]:
    async with grpc.aio.insecure_channel(target) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service))
        ok = answer.status == health_pb2.HealthCheckResponse.SERVING
        return ok, "" if ok else "service unhealthy"


def _port(port: int | str, container: ContainerSpec) -> int:
    if isinstance(port, int):
        return port
    return container.ports.get(port) or int(port)
