# SPDX-License-Identifier: Apache-2.0
"""The life of a pod: what to do next, from its spec, what happened to its processes, and the time.

Tell it what happened (``started``, ``exited``, ``probed``, ``delete``), then ask ``step`` what to do and ``wake_at_s``
when to ask again. No network, no clock, no processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from bench.cluster.node.container_machine import ContainerMachine, NodeTiming
from bench.cluster.node.pod_spec import ProbeKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.cluster.node.pod_spec import PodSpec

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


class Start(msgspec.Struct, frozen=True):
    """Start a container's process and say ``started`` or ``cannot_start``, later ``exited``."""

    container: str


class Stop(msgspec.Struct, frozen=True):
    """Run a container's preStop hook and send SIGTERM, SIGKILL after ``grace_s`` in all; say ``exited`` then."""

    container: str
    grace_s: float


class RunProbe(msgspec.Struct, frozen=True):
    """Run a probe and say ``probed``."""

    container: str
    kind: ProbeKind


class Remove(msgspec.Struct, frozen=True):
    """All processes of a deleted pod have ended: delete the object without grace."""


Action = Start | Stop | RunProbe | Remove


class PodMachine:
    """One pod on a node, from its arrival at ``now_s`` on."""

    def __init__(self, spec: PodSpec, timing: NodeTiming, now_s: float) -> None:
        self.spec = spec
        self.started_at_s = now_s
        self.reason = ""
        self.message = ""
        self.containers = {one.name: ContainerMachine(one, timing) for one in spec.containers}
        self._grace_s: float | None = None
        self._removed = False

    @property
    def init(self) -> list[ContainerMachine]:
        """The init containers, sidecars included, in their order."""
        return [one for one in self.containers.values() if one.spec.is_init]

    @property
    def main(self) -> list[ContainerMachine]:
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
        return all(_is_done(one) for one in self.init)

    @property
    def phase(self) -> Phase:
        """As the kubelet derives it."""
        if self.reason:
            return "Failed"
        if self.spec.restart_policy == "Never" and any(_failed(one) for one in self.init if not one.spec.stays):
            return "Failed"
        main = self.main
        if all(one.state == "terminated" for one in main):
            return "Failed" if any(_failed(one) for one in main) else "Succeeded"
        if not self.is_initialized and not any(one.runs or one.last or one.ended for one in main):
            return "Pending"
        waiting = any(one.state in ("waiting", "starting") and one.last is None for one in main)
        return "Pending" if waiting else "Running"

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run again."""
        return self.phase in ("Succeeded", "Failed")

    def cannot_start(self, container: str, reason: str, message: str, now_s: float) -> None:
        """A container has no process."""
        self.containers[container].cannot_start(reason, message, now_s)

    def started(self, container: str, now_s: float) -> None:
        """A container's process runs."""
        self.containers[container].started_at(now_s)

    def exited(self, container: str, code: int, signal: int, message: str, now_s: float) -> None:
        """A container's process has ended."""
        machine = self.containers[container]
        machine.exited(code, signal, message, now_s)
        if self._restarts(machine):
            machine.restart_later()

    def probed(self, container: str, kind: ProbeKind, *, ok: bool, message: str = "") -> None:
        """A probe has a result; that of a run which is over counts no more."""
        state = self.containers[container].probes.get(kind)
        if state is not None:
            state.result(ok=ok, message=message)

    def delete(self, grace_s: float) -> None:
        """End it. A shorter grace than before counts."""
        self._grace_s = grace_s if self._grace_s is None else min(self._grace_s, grace_s)

    def remove_again(self) -> None:
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
            if self.is_deleted and not any(one.runs for one in self.containers.values()) and not self._removed:
                self._removed = True
                actions.append(Remove())
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
                one.starting()
                yield Start(one.spec.name)

    def _may_start(self, machine: ContainerMachine) -> bool:
        """Init containers one after the other, the rest together after them."""
        for one in self.init:
            if one is machine:
                return True
            if not _is_done(one):
                return False
        return True

    def _stops(self) -> Iterable[Action]:
        """All main containers together, then the sidecars; a container that starts is stopped once it has started."""
        grace_s = self.spec.grace_s if self._grace_s is None else self._grace_s
        running = [one for one in self.main if one.runs] or [one for one in self.init if one.runs]
        for one in running:
            if one.state == "running":
                one.stopping()
                yield Stop(one.spec.name, grace_s)

    def _failed_probes(self) -> Iterable[Action]:
        kinds: tuple[ProbeKind, ...] = ("startup", "liveness")
        for one in self.containers.values():
            failed = next(
                (one.probes[kind] for kind in kinds if kind in one.probes and one.probes[kind].passed is False), None
            )
            if one.state == "running" and failed is not None:
                one.stopping()
                yield Stop(one.spec.name, self.spec.grace_s if failed.spec.grace_s is None else failed.spec.grace_s)

    def _probes(self, now_s: float) -> Iterable[Action]:
        for one in self.containers.values():
            for kind in self._probed_kinds(one):
                if one.probes[kind].due(now_s):
                    yield RunProbe(one.spec.name, kind)

    def _probed_kinds(self, machine: ContainerMachine) -> list[ProbeKind]:
        """Startup alone until it has passed, then the others; a pod that ends is asked for its readiness only."""
        if machine.state != "running" or not machine.probes:
            return []
        if not machine.started:
            return [] if self.is_deleted else ["startup"]
        kinds: tuple[ProbeKind, ...] = ("readiness",) if self.is_deleted else ("liveness", "readiness")
        return [kind for kind in kinds if kind in machine.probes]

    def _restarts(self, machine: ContainerMachine) -> bool:
        if self.is_deleted or self.reason or machine.ended is None:
            return False
        if machine.spec.stays:
            return not self.is_over
        if machine.spec.is_init:
            return machine.ended.code != 0 and self.spec.restart_policy != "Never"
        return self.spec.restart_policy == "Always" or (
            self.spec.restart_policy == "OnFailure" and machine.ended.code != 0
        )


def _is_done(machine: ContainerMachine) -> bool:
    """Whether the next init container may start."""
    return machine.started if machine.spec.stays else machine.ready


def _failed(machine: ContainerMachine) -> bool:
    return machine.state == "terminated" and machine.ended is not None and machine.ended.code != 0
