# SPDX-License-Identifier: Apache-2.0
"""The status of a pod as a kubelet writes it. No network, no clock."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.cluster.node.container_machine import ContainerMachine, Ended
    from bench.cluster.node.pod_machine import PodMachine


class StatusWriter:
    """Builds one pod's status again and again; remembers since when each condition is as it is."""

    def __init__(self, *, host_ip: str, pod_ip: str) -> None:
        self._host_ip = host_ip
        self._pod_ip = pod_ip
        self._conditions: dict[str, tuple[str, str]] = {}

    def status(self, pod: Mapping[str, Any], machine: PodMachine, now_s: float) -> dict[str, Any]:
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
            "containerStatuses": [_container(one) for one in machine.main],
        }
        if machine.init:
            status["initContainerStatuses"] = [_container(one) for one in machine.init]
        if machine.reason:
            status.update(reason=machine.reason, message=machine.message)
        return status

    def _all_conditions(self, pod: Mapping[str, Any], machine: PodMachine, now_s: float) -> list[dict[str, Any]]:
        unready = [
            one.spec.name
            for one in (*machine.main, *machine.init)
            if not one.ready and (one.spec.stays or not one.spec.is_init)
        ]
        said = "" if not unready else f"containers with unready status: [{' '.join(unready)}]"
        completed = "PodCompleted" if machine.phase == "Succeeded" else "ContainersNotReady"
        gates = _missing_gates(pod, machine.spec.readiness_gates)
        ready = (
            not unready and not gates,
            "ReadinessGatesNotReady" if not unready else completed,
            said or ", ".join(gates),
        )
        begun = any(one.started_at_s for one in machine.containers.values())
        initialized = machine.is_initialized or machine.phase in ("Running", "Succeeded")
        values = {
            "PodReadyToStartContainers": (begun and not machine.is_over, "", ""),
            "Initialized": (initialized, "ContainersNotInitialized", "containers with incomplete status"),
            "Ready": ready,
            "ContainersReady": (not unready, completed, said),
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


def _container(machine: ContainerMachine) -> dict[str, Any]:
    image = machine.spec.image
    status: dict[str, Any] = {
        "name": machine.spec.name,
        "image": image,
        "imageID": f"process://{image}" if machine.started_at_s else "",
        "ready": machine.ready,
        "started": machine.started,
        "restartCount": machine.restarts,
        "state": _state(machine),
        "lastState": {} if machine.last is None else {"terminated": _ended(machine.last)},
    }
    if machine.started_at_s:
        status["containerID"] = f"process://{machine.spec.name}-{machine.restarts}"
    return status


def _state(machine: ContainerMachine) -> dict[str, Any]:
    if machine.state in ("running", "stopping"):
        return {"running": {"startedAt": _time(machine.started_at_s)}}
    if machine.state == "terminated" and machine.ended is not None:
        return {"terminated": _ended(machine.ended)}
    reason = "ContainerCreating" if machine.state == "starting" and not machine.reason else machine.reason
    waiting = {"reason": reason or "ContainerCreating"}
    return {"waiting": {**waiting, "message": machine.message} if machine.message else waiting}


def _ended(run: Ended) -> dict[str, Any]:
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
