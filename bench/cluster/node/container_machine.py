# SPDX-License-Identifier: Apache-2.0
"""The life of one container: waiting, running, ended, waiting to be started again. No network, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from bench.cluster.node.probe_state import ProbeState

if TYPE_CHECKING:
    from bench.cluster.node.pod_spec import ContainerSpec, ProbeKind

State = Literal["waiting", "starting", "running", "stopping", "terminated"]


class NodeTiming(msgspec.Struct, frozen=True):
    """How long a node waits, in seconds, with the kubelet's values."""

    restart_s: float = 10.0
    restart_max_s: float = 300.0
    forget_crashes_s: float = 600.0
    pull_s: float = 10.0
    pull_max_s: float = 300.0
    heartbeat_s: float = 10.0


class Ended(msgspec.Struct, frozen=True):
    """One run that is over. ``code`` as a shell has it: 128 + N for one that was ended by signal N."""

    started_at_s: float
    finished_at_s: float
    code: int
    signal: int = 0
    reason: str = ""
    message: str = ""


class ContainerMachine:
    """What is known of a container."""

    def __init__(self, spec: ContainerSpec, timing: NodeTiming) -> None:
        self.spec = spec
        self.state: State = "waiting"
        self.reason = "PodInitializing"
        self.message = ""
        self.restarts = 0
        self.started_at_s = 0.0
        self.ended: Ended | None = None
        self.last: Ended | None = None
        self.not_before_s = 0.0
        self.probes: dict[ProbeKind, ProbeState] = {}
        self._timing = timing
        self._crash_wait_s = 0.0
        self._pull_wait_s = 0.0

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return self.state in ("starting", "running", "stopping")

    @property
    def started(self) -> bool:
        """Whether it is up as far as a startup probe says."""
        startup = self.probes.get("startup")
        return self.state in ("running", "stopping") and (startup is None or startup.passed is True)

    @property
    def ready(self) -> bool:
        """Whether its readiness probe, if it has one, has passed; an init container is ready once it has succeeded."""
        if self.spec.is_init and not self.spec.stays:
            return self.state == "terminated" and self.ended is not None and self.ended.code == 0
        readiness = self.probes.get("readiness")
        return self.started and self.state == "running" and (readiness is None or readiness.passed is True)

    def starting(self) -> None:
        """It is told to start."""
        self.state = "starting"

    def started_at(self, now_s: float) -> None:
        """Its process runs."""
        self.state, self.reason, self.message = "running", "", ""
        self.started_at_s = now_s
        self._pull_wait_s = 0.0
        self.probes = {kind: ProbeState(spec, now_s) for kind, spec in self.spec.probes.items()}

    def cannot_start(self, reason: str, message: str, now_s: float) -> None:
        """There is no process: its image or what it refers to is missing. Images are asked for less and less often."""
        self.state, self.reason, self.message = "waiting", reason, message
        if reason == "ErrImagePull":
            if self._pull_wait_s:
                self.reason, self.message = "ImagePullBackOff", f'Back-off pulling image "{self.spec.image}": {message}'
            self._pull_wait_s = min(self._timing.pull_max_s, self._pull_wait_s * 2 or self._timing.pull_s)
            self.not_before_s = now_s + self._pull_wait_s
        else:
            self.not_before_s = now_s + 1.0

    def stopping(self) -> None:
        """It is told to stop."""
        self.state = "stopping"

    def exited(self, code: int, signal: int, message: str, now_s: float) -> None:
        """Its process has ended."""
        reason = "Completed" if code == 0 else "Error"
        self.ended = Ended(self.started_at_s, now_s, code, signal, reason, message)
        self.state, self.reason, self.message = "terminated", reason, message
        self.probes = {}

    def restart_later(self) -> None:
        """It will be started again: at once after the first failure, then after waits that double."""
        ended = self.ended
        assert ended is not None
        if ended.finished_at_s - ended.started_at_s > self._timing.forget_crashes_s:
            self._crash_wait_s = 0.0
        self.not_before_s = ended.finished_at_s + self._crash_wait_s
        waits = self._crash_wait_s
        self._crash_wait_s = min(self._timing.restart_max_s, waits * 2 or self._timing.restart_s)
        self.last, self.ended = ended, None
        self.restarts += 1
        self.state = "waiting"
        self.reason = "CrashLoopBackOff" if waits else "ContainerCreating"
        self.message = f"back-off {waits:g}s restarting failed container={self.spec.name}" if waits else ""
