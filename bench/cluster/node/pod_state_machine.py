# SPDX-License-Identifier: Apache-2.0
"""The life of a pod and its containers as state machines: probes, restarts, status. No network, no clock, no processes.

Callers report events (``started``, ``exited``, ``probed``, ``delete``); ``step`` returns what to do, and ``wake_at_s``
when to call it again. No network, no clock, no processes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bench.cluster.node.pod_spec import ProbeKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bench.cluster.node.pod_spec import ContainerSpec, PodSpec, ProbeSpec

State = Literal["waiting", "starting", "running", "stopping", "terminated"]
Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


class ProbeState:
    """One probe of a container that runs since ``began_at_s``. ``passed``: None until a threshold has been reached."""

    def __init__(self, spec: ProbeSpec, began_at_s: float) -> None:
        self.spec = spec
        self.passed: bool | None = None
        self.message = ""
        self._due_at_s = began_at_s + spec.delay_s
        self._is_running = False
        self._row = 0
        self._last: bool | None = None

    def start_if_due(self, now_s: float) -> bool:
        """Whether to run it now; it counts as running from then on."""
        if self._is_running or now_s < self._due_at_s:
            return False
        self._is_running = True
        self._due_at_s = now_s + self.spec.period_s
        return True

    @property
    def wake_at_s(self) -> float | None:
        """When it is due; None while it runs."""
        return None if self._is_running else self._due_at_s

    def record_result(self, *, ok: bool, message: str) -> None:
        """Count a result: enough of one kind in a row change ``passed``."""
        self._is_running = False
        self._row = self._row + 1 if ok == self._last else 1
        self._last = ok
        self.message = message
        if self._row >= (self.spec.successes if ok else self.spec.failures):
            self.passed = ok


class NodeTiming(msgspec.Struct, frozen=True):
    """How long a node waits, in seconds, with the kubelet's values."""

    restart_s: float = 10.0
    restart_max_s: float = 300.0
    forget_crashes_s: float = 600.0
    pull_s: float = 10.0
    pull_max_s: float = 300.0
    heartbeat_s: float = 10.0


class ContainerExit(msgspec.Struct, frozen=True):
    """One run that is over. ``code`` as a shell has it: 128 + N for one that was ended by signal N."""

    started_at_s: float
    finished_at_s: float
    code: int
    signal: int = 0
    reason: str = ""
    message: str = ""


class ContainerStateMachine:
    """The state of a container."""

    def __init__(self, spec: ContainerSpec, timing: NodeTiming) -> None:
        self.spec = spec
        self.state: State = "waiting"
        self.reason = "PodInitializing"
        self.message = ""
        self.restarts = 0
        self.started_at_s = 0.0
        self.ended: ContainerExit | None = None
        self.last: ContainerExit | None = None
        self.not_before_s = 0.0
        self.probes: dict[ProbeKind, ProbeState] = {}
        self._timing = timing
        self._crash_wait_s = 0.0
        self._pull_wait_s = 0.0

    @property
    def has_process(self) -> bool:
        """Whether there is a process."""
        return self.state in ("starting", "running", "stopping")

    @property
    def is_started(self) -> bool:
        """Whether it has started, by its startup probe if it has one."""
        startup = self.probes.get("startup")
        return self.state in ("running", "stopping") and (startup is None or startup.passed is True)

    @property
    def is_ready(self) -> bool:
        """Whether its readiness probe, if it has one, has passed; an init container is ready once it has succeeded."""
        if self.spec.is_init and not self.spec.stays:
            return self.state == "terminated" and self.ended is not None and self.ended.code == 0
        readiness = self.probes.get("readiness")
        return self.is_started and self.state == "running" and (readiness is None or readiness.passed is True)

    def on_starting(self) -> None:
        """Its start was requested."""
        self.state = "starting"

    def on_started(self, now_s: float) -> None:
        """Its process runs."""
        self.state, self.reason, self.message = "running", "", ""
        self.started_at_s = now_s
        self._pull_wait_s = 0.0
        self.probes = {kind: ProbeState(spec, now_s) for kind, spec in self.spec.probes.items()}

    def on_start_failed(self, reason: str, message: str, now_s: float) -> None:
        """No process: the image or a referenced object is missing. Images are pulled with a growing back-off."""
        self.state, self.reason, self.message = "waiting", reason, message
        if reason == "ErrImagePull":
            if self._pull_wait_s:
                self.reason, self.message = "ImagePullBackOff", f'Back-off pulling image "{self.spec.image}": {message}'
            self._pull_wait_s = min(self._timing.pull_max_s, self._pull_wait_s * 2 or self._timing.pull_s)
            self.not_before_s = now_s + self._pull_wait_s
        else:
            self.not_before_s = now_s + 1.0

    def on_stopping(self) -> None:
        """Its stop was requested."""
        self.state = "stopping"

    def on_exit(self, code: int, signal: int, message: str, now_s: float) -> None:
        """Its process has ended."""
        reason = "Completed" if code == 0 else "Error"
        self.ended = ContainerExit(self.started_at_s, now_s, code, signal, reason, message)
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


class StartProcess(msgspec.Struct, frozen=True):
    """Start a container's process and call ``on_started`` or ``on_start_failed``, later ``on_exit``."""

    container: str


class StopContainer(msgspec.Struct, frozen=True):
    """Run a container's preStop hook and send SIGTERM, SIGKILL after ``grace_s`` in all; report ``exited`` then."""

    container: str
    grace_s: float


class RunProbe(msgspec.Struct, frozen=True):
    """Run a probe and report ``probed``."""

    container: str
    kind: ProbeKind


class DeletePod(msgspec.Struct, frozen=True):
    """All processes of a deleted pod have ended: delete the object without grace."""


Action = StartProcess | StopContainer | RunProbe | DeletePod


class PodStateMachine:
    """One pod on a node, from its arrival at ``now_s`` on."""

    def __init__(self, spec: PodSpec, timing: NodeTiming, now_s: float) -> None:
        self.spec = spec
        self.started_at_s = now_s
        self.reason = ""
        self.message = ""
        self.containers = {one.name: ContainerStateMachine(one, timing) for one in spec.containers}
        self._grace_s: float | None = None
        self._removed = False

    @property
    def init_containers(self) -> list[ContainerStateMachine]:
        """The init containers, sidecars included, in their order."""
        return [one for one in self.containers.values() if one.spec.is_init]

    @property
    def main_containers(self) -> list[ContainerStateMachine]:
        """The containers that are not for initialisation."""
        return [one for one in self.containers.values() if not one.spec.is_init]

    @property
    def is_deleted(self) -> bool:
        """Whether it is to end."""
        return self._grace_s is not None

    @property
    def grace_s(self) -> float | None:
        """What is granted to the processes of a deleted pod; None while it is not deleted."""
        return self._grace_s

    @property
    def is_initialized(self) -> bool:
        """Whether all init containers have succeeded, and all sidecars are up."""
        return all(_is_done(one) for one in self.init_containers)

    @property
    def phase(self) -> Phase:
        """As the kubelet derives it."""
        if self.reason:
            return "Failed"
        if self.spec.restart_policy == "Never" and any(
            _failed(one) for one in self.init_containers if not one.spec.stays
        ):
            return "Failed"
        main = self.main_containers
        if all(one.state == "terminated" for one in main):
            return "Failed" if any(_failed(one) for one in main) else "Succeeded"
        if not self.is_initialized and not any(one.has_process or one.last or one.ended for one in main):
            return "Pending"
        waiting = any(one.state in ("waiting", "starting") and one.last is None for one in main)
        return "Pending" if waiting else "Running"

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run again."""
        return self.phase in ("Succeeded", "Failed")

    def on_start_failed(self, container: str, reason: str, message: str, now_s: float) -> None:
        """A container has no process."""
        self.containers[container].on_start_failed(reason, message, now_s)

    def on_started(self, container: str, now_s: float) -> None:
        """A container's process runs."""
        self.containers[container].on_started(now_s)

    def on_exit(self, container: str, code: int, signal: int, message: str, now_s: float) -> None:
        """A container's process has ended."""
        machine = self.containers[container]
        machine.on_exit(code, signal, message, now_s)
        if self._restarts(machine):
            machine.restart_later()

    def on_probe_result(self, container: str, kind: ProbeKind, *, ok: bool, message: str = "") -> None:
        """A probe has a result; that of a run which is over counts no more."""
        state = self.containers[container].probes.get(kind)
        if state is not None:
            state.record_result(ok=ok, message=message)

    def delete(self, grace_s: float) -> None:
        """End it. A shorter grace than before counts."""
        self._grace_s = grace_s if self._grace_s is None else min(self._grace_s, grace_s)

    def retry_removal(self) -> None:
        """The removal did not work."""
        self._removed = False

    def fail(self, reason: str, message: str) -> None:
        """The node ends it for a reason of its own, as an eviction does."""
        self.reason, self.message = reason, message

    def step(self, now_s: float) -> list[Action]:
        """What to do now. Each action is returned once."""
        deadline_s = self.spec.active_deadline_s
        if deadline_s is not None and now_s >= self.started_at_s + deadline_s and not self.is_over:
            self.fail("DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
        if self.is_deleted or self.is_over:
            actions: list[Action] = [*self._stops()]
            if self.is_deleted and not any(one.has_process for one in self.containers.values()) and not self._removed:
                self._removed = True
                actions.append(DeletePod())
        else:
            actions = [*self._failed_probes(), *self._starts(now_s)]
        return [*actions, *self._probes(now_s)]

    def wake_at_s(self) -> float | None:
        """When something is due even if nothing happens; None if nothing is."""
        times: list[float] = []
        for one in self.containers.values():
            times += [at_s for kind in self._probed_kinds(one) if (at_s := one.probes[kind].wake_at_s) is not None]
            if one.state == "waiting" and not (self.is_deleted or self.is_over) and self._may_start(one):
                times.append(one.not_before_s)
        if self.spec.active_deadline_s is not None and not self.is_over:
            times.append(self.started_at_s + self.spec.active_deadline_s)
        return min(times, default=None)

    def _starts(self, now_s: float) -> Iterable[Action]:
        for one in self.containers.values():
            if one.state == "waiting" and now_s >= one.not_before_s and self._may_start(one):
                one.on_starting()
                yield StartProcess(one.spec.name)

    def _may_start(self, machine: ContainerStateMachine) -> bool:
        """Init containers one after the other, the rest together after them."""
        for one in self.init_containers:
            if one is machine:
                return True
            if not _is_done(one):
                return False
        return True

    def _stops(self) -> Iterable[Action]:
        """All main containers together, then the sidecars; a container that starts is stopped once it has started."""
        grace_s = self.spec.grace_s if self._grace_s is None else self._grace_s
        running = [one for one in self.main_containers if one.has_process] or [
            one for one in self.init_containers if one.has_process
        ]
        for one in running:
            if one.state == "running":
                one.on_stopping()
                yield StopContainer(one.spec.name, grace_s)

    def _failed_probes(self) -> Iterable[Action]:
        kinds: tuple[ProbeKind, ...] = ("startup", "liveness")
        for one in self.containers.values():
            failed = next(
                (one.probes[kind] for kind in kinds if kind in one.probes and one.probes[kind].passed is False), None
            )
            if one.state == "running" and failed is not None:
                one.on_stopping()
                yield StopContainer(
                    one.spec.name, self.spec.grace_s if failed.spec.grace_s is None else failed.spec.grace_s
                )

    def _probes(self, now_s: float) -> Iterable[Action]:
        for one in self.containers.values():
            for kind in self._probed_kinds(one):
                if one.probes[kind].start_if_due(now_s):
                    yield RunProbe(one.spec.name, kind)

    def _probed_kinds(self, machine: ContainerStateMachine) -> list[ProbeKind]:
        """Startup alone until it has passed, then the others; a terminating pod gets readiness probes only."""
        if machine.state != "running" or not machine.probes:
            return []
        if not machine.is_started:
            return [] if self.is_deleted else ["startup"]
        kinds: tuple[ProbeKind, ...] = ("readiness",) if self.is_deleted else ("liveness", "readiness")
        return [kind for kind in kinds if kind in machine.probes]

    def _restarts(self, machine: ContainerStateMachine) -> bool:
        if self.is_deleted or self.reason or machine.ended is None:
            return False
        if machine.spec.stays:
            return not self.is_over
        if machine.spec.is_init:
            return machine.ended.code != 0 and self.spec.restart_policy != "Never"
        return self.spec.restart_policy == "Always" or (
            self.spec.restart_policy == "OnFailure" and machine.ended.code != 0
        )


def _is_done(machine: ContainerStateMachine) -> bool:
    """Whether the next init container may start."""
    return machine.is_started if machine.spec.stays else machine.is_ready


def _failed(machine: ContainerStateMachine) -> bool:
    return machine.state == "terminated" and machine.ended is not None and machine.ended.code != 0


class PodStatusBuilder:
    """Builds one pod's status at each call; keeps the last transition time of each condition."""

    def __init__(self, *, host_ip: str, pod_ip: str) -> None:
        self._host_ip = host_ip
        self._pod_ip = pod_ip
        self._conditions: dict[str, tuple[str, str]] = {}

    def status(self, pod: Mapping[str, Any], machine: PodStateMachine, now_s: float) -> dict[str, Any]:
        """The status now. ``pod``: the object, whose readiness gates and generation count."""
        over = machine.is_over
        ip = {} if over else {"podIP": self._pod_ip, "podIPs": [{"ip": self._pod_ip}]}
        status: dict[str, Any] = {
            "phase": machine.phase,
            "hostIP": self._host_ip,
            "hostIPs": [{"ip": self._host_ip}],
            **ip,
            "startTime": _time(machine.started_at_s),
            "conditions": self._all_conditions(pod, machine, now_s),
            "containerStatuses": [_container(one) for one in machine.main_containers],
        }
        if machine.init_containers:
            status["initContainerStatuses"] = [_container(one) for one in machine.init_containers]
        if machine.reason:
            status.update(reason=machine.reason, message=machine.message)
        return status

    def _all_conditions(self, pod: Mapping[str, Any], machine: PodStateMachine, now_s: float) -> list[dict[str, Any]]:
        unready = [
            one.spec.name
            for one in (*machine.main_containers, *machine.init_containers)
            if not one.is_ready and (one.spec.stays or not one.spec.is_init)
        ]
        message = "" if not unready else f"containers with unready status: [{' '.join(unready)}]"
        completed = "PodCompleted" if machine.phase == "Succeeded" else "ContainersNotReady"
        gates = _missing_gates(pod, machine.spec.readiness_gates)
        ready = (
            not unready and not gates,
            "ReadinessGatesNotReady" if not unready else completed,
            message or ", ".join(gates),
        )
        begun = any(one.started_at_s for one in machine.containers.values())
        initialized = machine.is_initialized or machine.phase in ("Running", "Succeeded")
        values = {
            "PodReadyToStartContainers": (begun and not machine.is_over, "", ""),
            "Initialized": (initialized, "ContainersNotInitialized", "containers with incomplete status"),
            "Ready": ready,
            "ContainersReady": (not unready, completed, message),
            "PodScheduled": (True, "", ""),
        }
        return [self._condition(kind, *value, now_s) for kind, value in values.items()]

    def _condition(self, kind: str, holds: bool, reason: str, message: str, now_s: float) -> dict[str, Any]:
        value = "True" if holds else "False"
        known = self._conditions.get(kind)
        since = known[1] if known is not None and known[0] == value else _time(now_s)
        self._conditions[kind] = value, since
        condition = {"type": kind, "status": value, "lastTransitionTime": since}
        return condition if holds or not reason else {**condition, "reason": reason, "message": message}


def _missing_gates(pod: Mapping[str, Any], gates: Sequence[str]) -> list[str]:
    conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or ()}
    return [
        f'corresponding condition of pod readiness gate "{gate}" does not hold'
        for gate in gates
        if conditions.get(gate) != "True"
    ]


def _container(machine: ContainerStateMachine) -> dict[str, Any]:
    image = machine.spec.image
    status: dict[str, Any] = {
        "name": machine.spec.name,
        "image": image,
        "imageID": f"process://{image}" if machine.started_at_s else "",
        "ready": machine.is_ready,
        "started": machine.is_started,
        "restartCount": machine.restarts,
        "state": _state(machine),
        "lastState": {} if machine.last is None else {"terminated": _ended(machine.last)},
    }
    if machine.started_at_s:
        status["containerID"] = f"process://{machine.spec.name}-{machine.restarts}"
    return status


def _state(machine: ContainerStateMachine) -> dict[str, Any]:
    if machine.state in ("running", "stopping"):
        return {"running": {"startedAt": _time(machine.started_at_s)}}
    if machine.state == "terminated" and machine.ended is not None:
        return {"terminated": _ended(machine.ended)}
    reason = "ContainerCreating" if machine.state == "starting" and not machine.reason else machine.reason
    waiting = {"reason": reason or "ContainerCreating"}
    return {"waiting": {**waiting, "message": machine.message} if machine.message else waiting}


def _ended(run: ContainerExit) -> dict[str, Any]:
    ended: dict[str, Any] = {
        "exitCode": run.code,
        "reason": run.reason,
        "startedAt": _time(run.started_at_s or run.finished_at_s),
        "finishedAt": _time(run.finished_at_s),
    }
    if run.signal:
        ended["signal"] = run.signal
    return {**ended, "message": run.message} if run.message else ended


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
