# SPDX-License-Identifier: Apache-2.0
"""What we read of PodSpecs that people write, by type: a schema leaves them open.

The API server checks a whole PodSpec when a pod is made; before that we merge it, count what it asks for, and add to
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_Maps = list[dict[str, Any]] | None


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


def wrong_shapes(spec: object, where: str) -> Iterator[str]:
    """The first thing of a PodSpec, whole or in part, that has another type than Kubernetes gives it. ``where``: its
    field.
    """
    yield from _wrong(spec, _PodSpec, where)


def wrong_resources(resources: object, where: str) -> Iterator[str]:
    """The same of a container's resources."""
    yield from _wrong(resources, _Resources | None, where)


def _wrong(value: object, type_: Any, where: str) -> Iterator[str]:  # noqa: ANN401 - a type, or a union of types
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        yield f"{where} is no part of a PodSpec: {error}"
