# SPDX-License-Identifier: Apache-2.0
"""One pod on a virtual node: its containers' processes are events, its status is a kubelet's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, Protocol

from bench.cluster.node.pod_spec import pod_spec
from bench.cluster.node.pod_state_machine import (
    DeletePod,
    NodeTiming,
    PodStateMachine,
    PodStatusBuilder,
    StartProcess,
    StopContainer,
)
from controller.kube.api_resources import PODS, Object, key_of
from tests.fake_api.answers import ApiError

if TYPE_CHECKING:
    from bench.cluster.node.pod_state_machine import ContainerStateMachine
    from tests.virtual_cluster.clock import Clock
    from tests.virtual_cluster.server import VirtualApiServer

GOOD: Final = "engine:good"
CRASHES: Final = "engine:crashes"
NEVER_READY: Final = "engine:never-ready"
MISSING: Final = "engine:missing"
"""Images, by what becomes of their containers; all others are good. The part behind a dash may differ:
``engine:good-2``.
"""
_TIMING: Final = NodeTiming()
_POLL_S: Final = 1.0
Why = Literal["crashed", "stopped", "killed", "node lost"]


class PodEnvironment(Protocol):
    """The interface of a pod to its node and to other engines."""

    def is_up(self, node: str) -> bool:
        """Whether the node runs and reaches the API server."""
        ...

    def partners_run(self, pod: Object) -> bool:
        """Whether the other pods of its replica run."""
        ...

    def ended(self, pod: Object, why: Why) -> None:
        """A process of the pod has ended; whatever the engine did is lost."""
        ...

    def is_busy(self, pod: Object) -> bool:
        """Whether the engine answers requests."""
        ...

    def start_s(self) -> float:
        """How long a container takes to start."""
        ...

    def load_s(self) -> float:
        """How long an engine takes from its start to its readiness."""
        ...

    def crash_s(self) -> float:
        """How long an engine that crashes lives."""
        ...


class EnginePod:
    """``pod``: the object as it was bound. ``hangs``: it runs and does not answer."""

    def __init__(self, pod: Object, server: VirtualApiServer, clock: Clock, around: PodEnvironment) -> None:
        self.pod = pod
        self.key = key_of(pod)
        self.uid: str = pod["metadata"]["uid"]
        self.node: str = pod["spec"]["nodeName"]
        self.hangs = False
        self.is_gone = False
        self._server, self._clock, self._around = server, clock, around
        self.machine = PodStateMachine(pod_spec(pod), _TIMING, clock.now_s)
        self._writer = PodStatusBuilder(
            host_ip="10.0.0.1", pod_ip=f"10.1.{int(self.uid[-6:]) // 250}.{int(self.uid[-6:]) % 250}"
        )
        self._wakes_at_s = 0.0

    @property
    def runs(self) -> bool:
        """Whether all its main containers have a process."""
        return not self.is_gone and all(one.state == "running" for one in self.machine.main_containers)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.runs and all(one.is_ready for one in self.machine.main_containers)

    def go_on(self) -> None:
        """Perform due actions and write the status."""
        if self.is_gone or not self._around.is_up(self.node):
            return
        for action in self.machine.step(self._clock.now_s):
            if isinstance(action, StartProcess):
                self._start(self.machine.containers[action.container])
            elif isinstance(action, StopContainer):
                self._stop(self.machine.containers[action.container], action.grace_s)
            elif isinstance(action, DeletePod):
                self.is_gone = True
                self._remove()
                return
        self._write_status()
        waiting = [one.not_before_s for one in self.machine.containers.values() if one.state == "waiting"]
        at_s = min(waiting, default=0.0)
        if at_s > self._clock.now_s and at_s != self._wakes_at_s:
            self._wakes_at_s = at_s
            self._clock.after(at_s - self._clock.now_s, self.go_on)

    def on_update(self, pod: Object) -> None:
        """The object has changed; a deleted one ends."""
        self.pod = pod
        grace_s = pod["metadata"].get("deletionGracePeriodSeconds")
        if grace_s is not None and (self.machine.grace_s is None or grace_s < self.machine.grace_s):
            self.machine.delete(float(grace_s))
            self._clock.after(0.01, self.go_on)

    def vanish(self, why: Why = "killed") -> None:
        """The object is gone, or the machine: no process is left."""
        if not self.is_gone:
            self.is_gone = True
            self._around.ended(self.pod, why)

    def crash(self, why: Why = "crashed", code: int = 1) -> None:
        """All running processes end; the kubelet starts them again, later and later."""
        for one in self.machine.main_containers:
            if one.state == "running":
                self._exit(one, code, why)
        self.go_on()

    def hang(self) -> None:
        """It is not ready until it is restarted."""
        self.hangs = True
        self._set_ready(ready=False)

    def revive(self) -> None:
        """It answers again."""
        if self.hangs:
            self.hangs = False
            self._set_ready(ready=True)

    def evict(self) -> None:
        """The node ends it for good."""
        if not self.machine.is_over:
            self.machine.fail("Evicted", "The node was low on resource: memory.")
            self._around.ended(self.pod, "crashed")
            for one in self.machine.main_containers:
                if one.state == "running":
                    one.on_exit(137, 9, "", self._clock.now_s)
            self.go_on()

    def _start(self, container: ContainerStateMachine) -> None:
        self._clock.after(self._around.start_s(), lambda: self._started(container))

    def _started(self, container: ContainerStateMachine) -> None:
        if self.is_gone or container.state != "starting":
            return
        image, now_s = container.spec.image, self._clock.now_s
        if image.startswith(MISSING):
            self.machine.on_start_failed(container.spec.name, "ErrImagePull", f'image "{image}" not found', now_s)
        else:
            self.machine.on_started(container.spec.name, now_s)
            self.hangs = False
            run = container.restarts
            if container.spec.is_init:
                self._later(1.0, container, run, lambda: self._exit(container, 0, "stopped", tell=False))
            elif image.startswith(CRASHES):
                self._later(self._around.crash_s(), container, run, lambda: self._exit(container, 1, "crashed"))
            elif not image.startswith(NEVER_READY):
                self._later(self._around.load_s(), container, run, lambda: self._loaded(container, run))
        self.go_on()

    def _loaded(self, container: ContainerStateMachine, run: int) -> None:
        if not self._around.partners_run(self.pod):
            self._later(5 * _POLL_S, container, run, lambda: self._loaded(container, run))
        elif not self.hangs:
            self._set_ready(ready=True)

    def _later(self, delay_s: float, container: ContainerStateMachine, run: int, act: object) -> None:
        """Do it then if the container is still in the same run."""
        assert callable(act)

        def check() -> None:
            if not self.is_gone and container.state == "running" and container.restarts == run:
                act()
                self.go_on()

        self._clock.after(delay_s, check)

    def _stop(self, container: ContainerStateMachine, grace_s: float) -> None:
        """Its preStop hook waits until nothing runs, or the grace ends."""
        deadline_s = self._clock.now_s + grace_s
        run = container.restarts

        def poll() -> None:
            if self.is_gone or container.state != "stopping" or container.restarts != run:
                return
            if not self._around.is_up(self.node):
                self._clock.after(5 * _POLL_S, poll)
                return
            if self._around.is_busy(self.pod) and self._clock.now_s < deadline_s:
                self._clock.after(_POLL_S, poll)
                return
            self._exit(container, 0, "stopped")
            self.go_on()

        self._clock.after(0.2, poll)

    def _exit(self, container: ContainerStateMachine, code: int, why: Why, *, tell: bool = True) -> None:
        self.machine.on_exit(container.spec.name, code, 0, "" if code == 0 else "CUDA error", self._clock.now_s)
        if tell:
            self._around.ended(self.pod, why)

    def _set_ready(self, *, ready: bool) -> None:
        for one in self.machine.main_containers:
            probe = one.probes.get("readiness")
            if probe is not None and one.state == "running":
                for _ in range(max(probe.spec.successes, probe.spec.failures)):
                    probe.record_result(ok=ready, message="")
        self.go_on()

    def _write_status(self) -> None:
        status = self._writer.status(self.pod, self.machine, self._clock.now_s)
        if any(one.state == "stopping" for one in self.machine.main_containers):
            # probes go on while a preStop hook runs
            status["conditions"] = (self.pod.get("status") or {}).get("conditions") or status["conditions"]
        if status != self.pod.get("status"):
            self._server.set_status(PODS, self.pod, status)

    def _remove(self) -> None:
        try:
            self._server.delete(PODS, self.key, uid=self.uid, grace_s=0)
        except ApiError:
            return  # another writer was first
