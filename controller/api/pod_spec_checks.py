# SPDX-License-Identifier: Apache-2.0
"""Types of the fields that we read from users' PodSpecs: the CRD schema leaves PodSpecs open.

The API server validates a PodSpec only when a pod is created. Before that we merge it, count its resource requests and
extend it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_Maps = list[dict[str, Any]] | None
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?", re.ASCII)
_FACTORS: Final = {
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    **{letter: 1000.0**power for power, letter in enumerate("MGTPE", start=2)},
    **{f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)},
}


class _Camel(msgspec.Struct, rename="camel"):
    """Fields that are not named here pass through; null takes a lower layer's away."""


class _Named(_Camel):
    name: str | None = None


class _Port(_Camel):
    container_port: int | str | None = None


class _Mount(_Camel):
    mount_path: str | None = None


class _Device(_Camel):
    device_path: str | None = None


class _Alias(_Camel):
    ip: str | None = None


class _Spread(_Camel):
    topology_key: str | None = None


class _Resources(_Camel):
    limits: dict[str, str | int | float | None] | None = None
    requests: dict[str, str | int | float | None] | None = None


class _Container(_Camel):
    name: str | None = None
    image: str | None = None
    env: list[_Named] | None = None
    ports: list[_Port] | None = None
    volume_mounts: list[_Mount] | None = None
    volume_devices: list[_Device] | None = None
    resources: _Resources | None = None


class _Expression(_Camel):
    key: str | None = None
    operator: str | None = None
    values: list[str] | None = None


class _Term(_Camel):
    match_expressions: list[_Expression] | None = None


class _Required(_Camel):
    node_selector_terms: list[_Term] | None = None


class _NodeAffinity(_Camel):
    required_during_scheduling_ignored_during_execution: _Required | None = None


class _Affinity(_Camel):
    node_affinity: _NodeAffinity | None = None


class _PodSpec(_Camel):
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    ephemeral_containers: list[_Container] | None = None
    volumes: list[_Named] | None = None
    image_pull_secrets: list[_Named] | None = None
    host_aliases: list[_Alias] | None = None
    topology_spread_constraints: list[_Spread] | None = None
    scheduling_gates: list[_Named] | None = None
    resource_claims: list[_Named] | None = None
    node_selector: dict[str, str | None] | None = None
    tolerations: _Maps = None
    affinity: _Affinity | None = None
    overhead: dict[str, str | int | float | None] | None = None


def pod_spec_type_errors(spec: object, where: str) -> Iterator[str]:
    """The first thing of a PodSpec, whole or in part, that has another type than Kubernetes gives it. ``where``: its
    field.
    """
    yield from _wrong(spec, _PodSpec, where)


def resources_type_errors(resources: object, where: str) -> Iterator[str]:
    """The same of a container's resources."""
    yield from _wrong(resources, _Resources | None, where)


def _wrong(value: object, type_: Any, where: str) -> Iterator[str]:  # noqa: ANN401 - a type, or a union of types
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        yield f"{where} is no part of a PodSpec: {error}"


def parse_quantity(value: object) -> float:
    """A quantity in base units; 0 of what is none, which the API server refuses when the pod is made."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        return 0.0
    number, unit, exponent = match.groups()
    found = float(number) * _FACTORS[unit] if unit else float(f"{number}e{exponent or 0}")
    return found if math.isfinite(found) else 0.0


def resource_requests(spec: Mapping[str, Any]) -> dict[str, float]:
    """The resources that a pod requests, as the scheduler counts: containers and sidecars together, or an init
    container and the sidecars before it where these are more; and the overhead.
    """
    sidecars: dict[str, float] = {}
    starting: dict[str, float] = {}
    for one in spec.get("initContainers") or ():
        requested = _sum(sidecars, _requests(one))
        if one.get("restartPolicy") == "Always":
            sidecars = requested
        starting = _largest(starting, requested)
    serving = _sum(sidecars, *map(_requests, spec.get("containers") or ()))
    overhead = {name: parse_quantity(amount) for name, amount in (spec.get("overhead") or {}).items()}
    return _sum(_largest(serving, starting), overhead)


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    """A limit without a request is one."""
    resources = container.get("resources") or {}
    given = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_quantity(value) for name, value in given.items()}


def _sum(*parts: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            found[name] = found.get(name, 0.0) + amount
    return found


def _largest(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {**one, **other}}
