# SPDX-License-Identifier: Apache-2.0
"""What the kinds share: spelling of fields, names of objects, CEL rules for their CRDs, selectors and parents."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, NamedTuple

import msgspec

from extproc.api import patterns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class Rule(NamedTuple):
    """One rule of a struct: ``self`` in ``rule`` is an object of it, and ``message`` says what to write instead.

    Only the CEL standard's own functions, so that rules can be tried without an API server.
    """

    rule: str
    message: str


def exactly_one(*fields: str) -> Rule:
    """Exactly one of the optional fields is there."""
    present = " + ".join(f"(has(self.{field}) ? 1 : 0)" for field in fields)
    return Rule(f"{present} == 1", f"write exactly one of {', '.join(fields)}")


def together(first: str, second: str) -> Rule:
    """Both optional fields are there, or neither is."""
    return Rule(f"has(self.{first}) == has(self.{second})", f"write both {first} and {second}, or neither")


Name = Annotated[str, msgspec.Meta(pattern=patterns.NAME, max_length=253)]
Namespace = Annotated[str, msgspec.Meta(pattern=patterns.NAMESPACE, max_length=63)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1, max_length=512, pattern=patterns.NO_CONTROL)]
API_VERSION: Final = "attache.dev/v1alpha1"
DEFAULT_NAMESPACE: Final = "default"


class Spec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """camelCase, unknown fields refused. ``CEL``: what a CRD's schema must check beyond the fields' own types."""

    CEL: ClassVar[tuple[Rule, ...]] = ()


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes object metadata. ``creation_timestamp``: between equal routes the older decides."""

    name: Name
    namespace: Namespace = DEFAULT_NAMESPACE
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    creation_timestamp: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(
        default=None, name="creationTimestamp"
    )

    @property
    def key(self) -> str:
        """``namespace/name``: the one spelling in memory, metrics, headers and Envoy's configuration."""
        return object_key(self.namespace, self.name)


def keyed_by(*fields: str) -> dict[str, object]:
    """Schema extensions of a list whose items differ in ``fields``: Kubernetes refuses two alike, and merges by
    them.
    """
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(fields)}


def object_key(namespace: str, name: str) -> str:
    """``namespace/name``."""
    return f"{namespace}/{name}"


def namespace_of(key: str) -> str:
    """The namespace in ``namespace/name``."""
    return key.partition("/")[0]


def full_key(text: str) -> str:
    """``text`` as ``namespace/name``; a name alone is in the default namespace."""
    return text if "/" in text else object_key(DEFAULT_NAMESPACE, text)


Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LabelValue = Annotated[str, msgspec.Meta(max_length=63, pattern=r"^([0-9A-Za-z]([-0-9A-Za-z_.]*[0-9A-Za-z])?)?$")]


class WorkloadSelector(Spec, frozen=True):
    """Pods of a ModelServer's namespace. ``match_labels``: a pod has all of these labels."""

    match_labels: Annotated[dict[str, LabelValue], msgspec.Meta(min_length=1, max_length=64)]


class WorkloadPort(Spec, frozen=True):
    """Where the engines in selected pods listen. ``port``: the engine's, or that of its first data-parallel rank.
    ``rank_ports``: those of further ranks; each rank is an endpoint of its own.
    """

    port: Port
    rank_ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=7)] = ()

    @property
    def ports(self) -> tuple[int, ...]:
        """All of them, by rank."""
        return (self.port, *self.rank_ports)


class ParentReference(Spec, frozen=True):
    """A gateway that a route is attached to, as in the Gateway API. ``name``: the gateway's. ``namespace``: the route's
    own, if left out. ``section_name``: one of its listeners; ``port``: listeners on this port. ``group`` and
    ``kind``: of the gateway.
    """

    name: Name
    namespace: Namespace | None = None
    section_name: NonEmpty | None = None
    port: Port | None = None
    group: str = "gateway.networking.k8s.io"
    kind: str = "Gateway"


def requirement_holds(key: str, operator: str, values: Collection[str], labels: Mapping[str, str]) -> bool:
    """Whether ``labels`` satisfy it. As in Kubernetes, a missing ``key`` satisfies NotIn; an unknown operator never
    holds.
    """
    match operator:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    return False


def is_attached(parent_refs: Iterable[ParentReference], listener: str) -> bool:
    """Whether a route with these references is served by the listener of that name.

    In a directory ``sectionName`` alone counts, as there are no gateways. A route that names no listener is served by
    all.
    """
    refs = tuple(parent_refs)
    return not refs or any(ref.section_name in (None, listener) for ref in refs)
