# SPDX-License-Identifier: Apache-2.0
"""Runs one pod: carries out the actions of its state machine, reports events to it, and writes its status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.cluster.node.container_processes import ContainerProcess, run_handler
from bench.cluster.node.pod_spec import ImageMissing, ReferenceMissing
from bench.cluster.node.pod_state_machine import (
    DeletePod,
    NodeTiming,
    PodStateMachine,
    PodStatusBuilder,
    RunProbe,
    StartProcess,
    StopContainer,
)
from bench.stack.orphan_reaper import ProcessGuard
from controller.kube.api_resources import PODS
from controller.kube.client import Client
from controller.kube.errors import ClusterError, Conflict, NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from bench.cluster.node.pod_files import PodFiles
    from bench.cluster.node.pod_spec import PodSpec, ProbeKind
    from bench.cluster.node.pod_state_machine import Action
    from controller.kube.api_resources import Object

log = logging.getLogger(__name__)

MANAGER: Final = "node"
_KILL_MARGIN_S: Final = 2.0


class WorkerDependencies(msgspec.Struct, frozen=True):
    """What all workers of a node share. ``wall``: seconds since 1970."""

    client: Client
    http: aiohttp.ClientSession
    guard: ProcessGuard
    wall: Callable[[], float]
    timing: NodeTiming


class PodWorker:
    """One pod, from its arrival on the node to its removal. ``run`` does the work; the other methods report events to
    it.
    """

    def __init__(self, pod: Object, spec: PodSpec, files: PodFiles, tools: WorkerDependencies, *, host_ip: str) -> None:
        self.pod = pod
        self.pod_ip = files.pod_ip
        self.machine = PodStateMachine(spec, tools.timing, tools.wall())
        self._files = files
        self._tools = tools
        self._writer = PodStatusBuilder(host_ip=host_ip, pod_ip=files.pod_ip)
        self._written: dict[str, Any] | None = None
        self._processes: dict[str, ContainerProcess] = {}
        self._wake = asyncio.Event()
        self._stepped = asyncio.Event()
        self._writing = asyncio.Lock()
        self._removed = False
        self._lost = False

    async def run(self) -> None:
        """Until the pod is removed. Its processes end with this task, whatever ends it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_written())
                while not self._removed:
                    await self._round(tasks)
                # what is left are probes of processes that have ended, and the writer
                raise _Over
        except* _Over:
            log.debug("pod %s is gone", self.machine.spec.key)
        finally:
            for process in self._processes.values():
                process.send_signal(signal.SIGKILL)
            self._files.remove_volumes()

    def update(self, pod: Object) -> None:
        """The object has changed: perhaps it is to be deleted."""
        self.pod = pod
        metadata = pod["metadata"]
        if "deletionTimestamp" in metadata:
            self.machine.delete(float(metadata.get("deletionGracePeriodSeconds") or 0))
        self._wake.set()

    def on_deleted(self) -> None:
        """The object is no more: end at once and write nothing."""
        self._lost = True
        self.machine.delete(0.0)
        self._wake.set()

    def kill(self, container: str | None = None) -> None:
        """Kill the process of a container, or of all: a crash."""
        for name, process in self._processes.items():
            if container in (None, name):
                process.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals, container: str | None = None) -> None:
        """Signal the main process of a container, or of all."""
        for name, process in self._processes.items():
            if container in (None, name):
                process.send_signal(number)

    def pid(self, container: str) -> int:
        """The process id of a running container."""
        return self._processes[container].pid

    def log_of(self, container: str) -> Path:
        """The log file of a container."""
        return self._files.log_of(container)

    async def refresh(self) -> None:
        """Bring the files of ConfigMaps and Secrets up to date; raises Missing and ClusterError."""
        if self._processes:
            await self._files.refresh(self.pod)

    async def _round(self, tasks: asyncio.TaskGroup) -> None:
        self._wake.clear()
        for action in self.machine.step(self._tools.wall()):
            if isinstance(action, DeletePod):
                await self._remove()
            else:
                tasks.create_task(self._perform(action))
        if self._removed:
            return
        self._stepped.set()
        due_s = self.machine.wake_at_s()
        wait_s = None if due_s is None else max(0.0, due_s - self._tools.wall())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._wake.wait()

    async def _perform(self, action: Action) -> None:
        if isinstance(action, StartProcess):
            await self._start(action.container)
        elif isinstance(action, StopContainer):
            await self._stop(action.container, action.grace_s)
        elif isinstance(action, RunProbe):
            await self._probe(action.container, action.kind)
        self._wake.set()

    async def _start(self, container: str) -> None:
        """Start a container and wait for its end."""
        machine, wall = self.machine, self._tools.wall
        spec = machine.containers[container].spec
        try:
            # the object may refer to what has come since the last attempt
            launch = await self._files.container_launch(self.pod, spec)
            process = await ContainerProcess.start(launch, self._tools.guard)
        except ImageMissing as missing:
            reason = "ErrImageNeverPull" if spec.pull_policy == "Never" else "ErrImagePull"
            return machine.on_start_failed(container, reason, str(missing), wall())
        except (ReferenceMissing, ClusterError) as missing:
            return machine.on_start_failed(container, "CreateContainerConfigError", str(missing), wall())
        except OSError as error:
            machine.on_started(container, wall())
            return machine.on_exit(container, 128, 0, f"failed to start: {error}", wall())
        self._processes[container] = process
        machine.on_started(container, wall())
        self._wake.set()
        try:
            code, number = await process.wait()
        except asyncio.CancelledError:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            raise
        message = (
            process.output_tail()
            if code and spec.raw.get("terminationMessagePolicy") == "FallbackToLogsOnError"
            else ""
        )
        del self._processes[container]
        return machine.on_exit(container, code, number, message, wall())

    async def _stop(self, container: str, grace_s: float) -> None:
        """preStop, SIGTERM, SIGKILL. The end itself is noticed by ``_start``. A shorter grace that comes later
        counts.
        """
        process = self._processes.get(container)
        if process is None:
            return
        spec = self.machine.containers[container].spec
        clock = asyncio.get_running_loop().time
        kill_at_s = clock() + grace_s
        if spec.pre_stop is not None and grace_s > 0:
            where = self._files.handler_context(spec.name)
            ok, why = await run_handler(spec.pre_stop, spec, where, self._tools.http, grace_s)
            if not ok:
                log.warning("preStop of %s/%s: %s", self.machine.spec.key, container, why)
        process.send_signal(signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
        # after a hook that took all of the grace there are two seconds more
        left_s = max(kill_at_s - clock(), _KILL_MARGIN_S if spec.pre_stop and grace_s > 0 else 0.0)
        began_s = clock()
        while self._processes.get(container) is process and clock() < began_s + left_s:
            await asyncio.sleep(0.02)
            if self._lost or self.machine.grace_s == 0:
                break
        if self._processes.get(container) is process:
            process.send_signal(signal.SIGKILL)

    async def _probe(self, container: str, kind: ProbeKind) -> None:
        state = self.machine.containers[container].probes.get(kind)
        if state is None:
            return
        spec = self.machine.containers[container].spec
        where = self._files.handler_context(container)
        ok, why = await run_handler(state.spec.handler, spec, where, self._tools.http, state.spec.timeout_s)
        self.machine.on_probe_result(container, kind, ok=ok, message=why)

    async def _keep_written(self) -> None:
        """Write the status after steps. Apart from them: an API server that does not answer holds no process up."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            while not await self._write():  # noqa: ASYNC110  only an answer shows that the API server is back
                await asyncio.sleep(1.0)

    async def _write(self) -> bool:
        """Write the status if it has changed; whether nothing is left to write."""
        async with self._writing:
            status = self._writer.status(self.pod, self.machine, self._tools.wall())
            if self._lost or status == self._written:
                return True
            metadata = self.pod["metadata"]
            names = {name: metadata[name] for name in ("name", "namespace", "uid")}
            thing: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": names, "status": status}
            try:
                await self._tools.client.apply(PODS, thing, subresource="status", manager=MANAGER, force=True)
            except (NotFound, Conflict):
                return True  # it was deleted, or replaced by another of its name: an informer event follows
            except ClusterError as error:
                log.warning("cannot write the status of %s: %s", self.machine.spec.key, error)
                return False
            self._written = status
            return True

    async def _remove(self) -> None:
        """The last word on a deleted pod: its final status, then no object."""
        await self._write()
        metadata = self.pod["metadata"]
        try:
            if not self._lost:
                await self._tools.client.delete(
                    PODS, metadata["name"], metadata["namespace"], grace_s=0, uid=metadata["uid"]
                )
        except Conflict:
            log.debug("another pod has the name of %s", self.machine.spec.key)
        except ClusterError as error:
            log.warning("cannot remove %s: %s; again in a second", self.machine.spec.key, error)
            self.machine.retry_removal()
            await asyncio.sleep(1.0)
            self._wake.set()
            return
        self._removed = True


class _Over(Exception):
    """Ends the tasks of a pod that is no more."""
