# SPDX-License-Identifier: Apache-2.0
"""A container's environment variables, from its spec, ConfigMaps, Secrets and fields of the pod. No network."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from bench.cluster.node.quantities import quantity

_VARIABLE: Final = re.compile(r"\$(\$|\(([^)]*)\))")
_FIELD_KEY: Final = re.compile(r"^metadata\.(labels|annotations)\['(.+)'\]$")


class Missing(Exception):
    """Something that the pod refers to is not there: the container cannot be made, and is tried again."""


class Sources(msgspec.Struct, frozen=True):
    """What a pod's references lead to: the ConfigMaps and Secrets of its namespace by name, its addresses, its
    token.
    """

    config_maps: Mapping[str, Mapping[str, Any]]
    secrets: Mapping[str, Mapping[str, Any]]
    pod_ip: str = ""
    host_ip: str = ""
    token: bytes = b""


def references(pod: Mapping[str, Any]) -> tuple[set[str], set[str]]:
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


def environment(pod: Mapping[str, Any], container: Mapping[str, Any], sources: Sources) -> dict[str, str]:
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
            result[one["name"]] = expanded(str(one.get("value") or ""), result)
    return result


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced; ``$$`` is a dollar sign, and what is unknown stays."""
    return _VARIABLE.sub(lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text)


def plain_data(thing: Mapping[str, Any]) -> dict[str, bytes]:
    """What a ConfigMap or Secret holds."""
    if thing.get("kind") == "Secret":
        return {name: base64.b64decode(value) for name, value in (thing.get("data") or {}).items()}
    texts = {name: value.encode() for name, value in (thing.get("data") or {}).items()}
    return texts | {name: base64.b64decode(value) for name, value in (thing.get("binaryData") or {}).items()}


def field(path: str, pod: Mapping[str, Any], sources: Sources) -> str:
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
    raise Missing(f"fieldRef {path} is not supported")


def _name(reference: Mapping[str, Any] | None) -> Iterable[str]:
    return (reference["name"],) if reference and reference.get("name") else ()


def _data(reference: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], what: str) -> dict[str, str]:
    thing = known.get(reference["name"])
    if thing is None:
        if reference.get("optional"):
            return {}
        raise Missing(f'{"configmap" if "onfig" in what else "secret"} "{reference["name"]}" not found')
    return {name: value.decode(errors="replace") for name, value in plain_data(thing).items()}


def _value(
    given: Mapping[str, Any], pod: Mapping[str, Any], container: Mapping[str, Any], sources: Sources
) -> str | None:
    if "fieldRef" in given:
        return field(given["fieldRef"]["fieldPath"], pod, sources)
    if "resourceFieldRef" in given:
        return _resource(given["resourceFieldRef"], container)
    for reference, known in (("configMapKeyRef", sources.config_maps), ("secretKeyRef", sources.secrets)):
        if reference in given:
            one = given[reference]
            data = _data(one, known, reference)
            if one["key"] not in data and not one.get("optional"):
                raise Missing(f"couldn't find key {one['key']} in {one['name']}")
            return data.get(one["key"])
    raise Missing(f"valueFrom {', '.join(given)} is not supported")


def _resource(reference: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    kind, _, name = reference["resource"].partition(".")
    found = ((container.get("resources") or {}).get(kind) or {}).get(name, "0")
    divisor = quantity(reference.get("divisor") or "1") or 1.0
    number = quantity(found) / divisor
    return str(int(-(-number // 1)))  # rounded up, as the kubelet does
