# SPDX-License-Identifier: Apache-2.0
"""A pod's spec as types: its containers' images, environment variables and quantities. No network, no clock."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.api.pod_spec_checks import parse_quantity
from controller.kube.api_resources import key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PYTHON: Final = (sys.executable, "-m")
IMAGES: Final[Mapping[str, tuple[str, ...]]] = {
    # ours
    "attache/engine-sim": (*_PYTHON, "bench.engine", "--host", "0.0.0.0"),  # noqa: S104 - becomes the pod's address
    "attache": (*_PYTHON, "attache"),
    "attache/extproc": (*_PYTHON, "extproc"),
    "attache/controller": (*_PYTHON, "controller"),
    # the simulator, with vLLM's flags as far as they matter
    "vllm/vllm-openai": (*_PYTHON, "bench.engine.vllm_command_line"),
    # models that compute nothing, loaded as MLServer does
    "seldonio/mlserver": (*_PYTHON, "bench.engine.mlserver"),
    # the image's Redis is built without protected mode
    "redis": ("sh", "-c", 'exec "$@" --protected-mode no', "sh"),
    # without an entry point: the container's command is run as it stands
    "attache/host": (),
    "busybox": (),
    "python": (),
}
"""The entry points by repository, without registry and tag."""
ProbeKind = Literal["startup", "liveness", "readiness"]
RestartPolicy = Literal["Always", "OnFailure", "Never"]
_VARIABLE: Final = re.compile(r"\$(\$|\(([^)]*)\))")
_FIELD_KEY: Final = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class ImageMissing(Exception):
    """No program of this machine stands for the image."""


def image_repository(image: str) -> str:
    """``registry:5000/attache/engine-sim:v1@sha256:...`` is ``attache/engine-sim``."""
    name = image.partition("@")[0]
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        name = rest
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def container_command(
    container: Mapping[str, Any], images: Mapping[str, Sequence[str]]
) -> tuple[Sequence[str], Sequence[str]]:
    """The words to run: those of the image's entry point, which ``command`` replaces, and those of the container.

    Raises ImageMissing.
    """
    image = container.get("image", "")
    name = image_repository(image).removeprefix("library/")
    if name not in images:
        raise ImageMissing(f'failed to pull image "{image}": this node has none called {name}')
    given, args = container.get("command") or (), container.get("args") or ()
    return () if given else images[name], (*given, *args)


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


class ReferenceMissing(Exception):
    """Something that the pod refers to is not there: the container cannot be made, and is tried again."""


class ReferencedSources(msgspec.Struct, frozen=True):
    """What a pod's references lead to: the ConfigMaps and Secrets of its namespace by name, its addresses, its
    token.
    """

    config_maps: Mapping[str, Mapping[str, Any]]
    secrets: Mapping[str, Mapping[str, Any]]
    pod_ip: str = ""
    host_ip: str = ""
    token: bytes = b""


def referenced_names(pod: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """The names of the ConfigMaps and of the Secrets that a pod's variables and volumes refer to."""
    config_maps: set[str] = set()
    secrets: set[str] = set()
    spec = pod["spec"]
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        for one in container.get("envFrom") or ():
            config_maps.update(_name(one.get("configMapRef")))
            secrets.update(_name(one.get("secretRef")))
        for one in container.get("env") or ():
            given = one.get("valueFrom") or {}
            config_maps.update(_name(given.get("configMapKeyRef")))
            secrets.update(_name(given.get("secretKeyRef")))
    for volume in spec.get("volumes") or ():
        for source in (volume, *((volume.get("projected") or {}).get("sources") or ())):
            config_maps.update(_name(source.get("configMap")))
            secret = source.get("secret") or {}
            secrets.update(name for name in (secret.get("secretName") or secret.get("name"),) if name)
    return config_maps, secrets


def environment(pod: Mapping[str, Any], container: Mapping[str, Any], sources: ReferencedSources) -> dict[str, str]:
    """The variables of a container; raises Missing."""
    result: dict[str, str] = {}
    for one in container.get("envFrom") or ():
        for reference, known in (("configMapRef", sources.config_maps), ("secretRef", sources.secrets)):
            if reference in one:
                data = _data(one[reference], known, reference)
                result |= {one.get("prefix", "") + name: value for name, value in data.items()}
    for one in container.get("env") or ():
        if "valueFrom" in one:
            value = _value(one["valueFrom"], pod, container, sources)
            if value is not None:
                result[one["name"]] = value
        else:
            result[one["name"]] = expand_variables(str(one.get("value") or ""), result)
    return result


def expand_variables(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced; ``$$`` is a dollar sign, and what is unknown stays."""
    return _VARIABLE.sub(lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text)


def config_data(thing: Mapping[str, Any]) -> dict[str, bytes]:
    """What a ConfigMap or Secret holds."""
    if thing.get("kind") == "Secret":
        return {name: base64.b64decode(value) for name, value in (thing.get("data") or {}).items()}
    texts = {name: value.encode() for name, value in (thing.get("data") or {}).items()}
    return texts | {name: base64.b64decode(value) for name, value in (thing.get("binaryData") or {}).items()}


def pod_field(path: str, pod: Mapping[str, Any], sources: ReferencedSources) -> str:
    """A field of the pod as ``fieldRef`` names it; raises Missing."""
    metadata, spec = pod["metadata"], pod["spec"]
    if found := _FIELD_KEY.match(path):
        return str((metadata.get(found[1]) or {}).get(found[2], ""))
    known = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", ""),
        "metadata.uid": metadata.get("uid", ""),
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": sources.pod_ip,
        "status.podIPs": sources.pod_ip,
        "status.hostIP": sources.host_ip,
        "status.hostIPs": sources.host_ip,
    }
    if path in known:
        return str(known[path])
    if path in ("metadata.labels", "metadata.annotations"):
        return "\n".join(f'{name}="{value}"' for name, value in (metadata.get(path[9:]) or {}).items())
    raise ReferenceMissing(f"fieldRef {path} is not supported")


def _name(reference: Mapping[str, Any] | None) -> Iterable[str]:
    return (reference["name"],) if reference and reference.get("name") else ()


def _data(reference: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, str]:
    thing = known.get(reference["name"])
    if thing is None:
        if reference.get("optional"):
            return {}
        raise ReferenceMissing(f'{"configmap" if "onfig" in what else "secret"} "{reference["name"]}" not found')
    return {name: value.decode(errors="replace") for name, value in config_data(thing).items()}


def _value(
    given: Mapping[str, Any], pod: Mapping[str, Any], container: Mapping[str, Any], sources: ReferencedSources
) -> str | None:
    if "fieldRef" in given:
        return pod_field(given["fieldRef"]["fieldPath"], pod, sources)
    if "resourceFieldRef" in given:
        return _resource(given["resourceFieldRef"], container)
    for reference, known in (("configMapKeyRef", sources.config_maps), ("secretKeyRef", sources.secrets)):
        if reference in given:
            one = given[reference]
            data = _data(one, known, reference)
            if one["key"] not in data and not one.get("optional"):
                raise ReferenceMissing(f"couldn't find key {one['key']} in {one['name']}")
            return data.get(one["key"])
    raise ReferenceMissing(f"valueFrom {', '.join(given)} is not supported")


def _resource(reference: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    kind, _, name = reference["resource"].partition(".")
    found = ((container.get("resources") or {}).get(kind) or {}).get(name, "0")
    divisor = parse_quantity(reference.get("divisor") or "1") or 1.0
    number = parse_quantity(found) / divisor
    return str(int(-(-number // 1)))  # rounded up, as the kubelet does
