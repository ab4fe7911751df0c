# SPDX-License-Identifier: Apache-2.0
"""What all documents share: how fields are spelled and how objects are named."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, Final

import msgspec

from extproc.api import patterns
from extproc.api.cel import Rule

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
