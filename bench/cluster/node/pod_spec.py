# SPDX-License-Identifier: Apache-2.0
"""What a pod's spec asks of a node, as types. No network, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from controller.kube.resources import key_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ProbeKind = Literal["startup", "liveness", "readiness"]
RestartPolicy = Literal["Always", "OnFailure", "Never"]


class Handler(msgspec.Struct, frozen=True):
    """What a probe or a preStop hook does. ``command`` and ``port`` as the spec has them: a port may be a name."""

    kind: Literal["http", "tcp", "exec", "grpc", "sleep"]
    port: int | str = 0
    path: str = "/"
    host: str = ""
    scheme: str = "HTTP"
    headers: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    service: str = ""
    sleep_s: float = 0.0


class ProbeSpec(msgspec.Struct, frozen=True):
    """A probe and when it counts."""

    handler: Handler
    delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    successes: int = 1
    failures: int = 3
    grace_s: float | None = None


class ContainerSpec(msgspec.Struct, frozen=True):
    """A container. ``stays``: an init container that runs beside the others (a sidecar, ``restartPolicy: Always``)."""

    name: str
    image: str
    raw: dict[str, Any]
    is_init: bool = False
    stays: bool = False
    pull_policy: str = "IfNotPresent"
    probes: dict[ProbeKind, ProbeSpec] = {}
    pre_stop: Handler | None = None
    ports: dict[str, int] = {}


class PodSpec(msgspec.Struct, frozen=True):
    """A pod. ``containers``: the init containers in their order, then the others."""

    key: str
    uid: str
    restart_policy: RestartPolicy
    grace_s: float
    containers: tuple[ContainerSpec, ...]
    readiness_gates: tuple[str, ...] = ()
    active_deadline_s: float | None = None
    host_network: bool = False


def pod_spec(pod: Mapping[str, Any]) -> PodSpec:
    """Read a pod's spec, which an API server has checked."""
    spec = pod["spec"]
    init = [_container(one, is_init=True) for one in spec.get("initContainers") or ()]
    main = [_container(one, is_init=False) for one in spec["containers"]]
    return PodSpec(
        key=key_of(pod),
        uid=pod["metadata"]["uid"],
        restart_policy=spec.get("restartPolicy", "Always"),
        grace_s=float(spec.get("terminationGracePeriodSeconds", 30)),
        containers=(*init, *main),
        readiness_gates=tuple(one["conditionType"] for one in spec.get("readinessGates") or ()),
        active_deadline_s=spec.get("activeDeadlineSeconds"),
        host_network=bool(spec.get("hostNetwork")),
    )


def _container(raw: dict[str, Any], *, is_init: bool) -> ContainerSpec:
    probes: dict[ProbeKind, ProbeSpec] = {}
    kinds: tuple[ProbeKind, ...] = ("startup", "liveness", "readiness")
    for kind in kinds:
        if given := raw.get(f"{kind}Probe"):
            probes[kind] = _probe(given)
    hook = (raw.get("lifecycle") or {}).get("preStop")
    return ContainerSpec(
        name=raw["name"],
        image=raw.get("image", ""),
        raw=raw,
        is_init=is_init,
        stays=is_init and raw.get("restartPolicy") == "Always",
        pull_policy=raw.get("imagePullPolicy", "IfNotPresent"),
        probes=probes,
        pre_stop=_handler(hook) if hook else None,
        ports={one["name"]: int(one["containerPort"]) for one in raw.get("ports") or () if one.get("name")},
    )


def _probe(given: Mapping[str, Any]) -> ProbeSpec:
    return ProbeSpec(
        handler=_handler(given),
        delay_s=float(given.get("initialDelaySeconds") or 0),
        period_s=float(given.get("periodSeconds") or 10),
        timeout_s=float(given.get("timeoutSeconds") or 1),
        successes=int(given.get("successThreshold") or 1),
        failures=int(given.get("failureThreshold") or 3),
        grace_s=given.get("terminationGracePeriodSeconds"),
    )


def _handler(given: Mapping[str, Any]) -> Handler:
    if http := given.get("httpGet"):
        headers = tuple((one["name"], one["value"]) for one in http.get("httpHeaders") or ())
        return Handler(
            "http",
            port=http["port"],
            path=http.get("path") or "/",
            host=http.get("host") or "",
            scheme=http.get("scheme") or "HTTP",
            headers=headers,
        )
    if tcp := given.get("tcpSocket"):
        return Handler("tcp", port=tcp["port"], host=tcp.get("host") or "")
    if grpc := given.get("grpc"):
        return Handler("grpc", port=grpc["port"], service=grpc.get("service") or "")
    if "sleep" in given:
        return Handler("sleep", sleep_s=float((given["sleep"] or {}).get("seconds", 0)))
    return Handler("exec", command=tuple((given.get("exec") or {}).get("command") or ()))
