# SPDX-License-Identifier: Apache-2.0
"""Events of objects, as ``kubectl describe`` shows them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from controller.kube.resources import Object

_LONGEST = 1024


def event_of(
    thing: Object, type_: Literal["Normal", "Warning"], *, reason: str, message: str, component: str
) -> Object:
    """An Event of ``thing``, to be created."""
    metadata, written = thing["metadata"], now()
    namespace = metadata.get("namespace", "")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # the API asks for this namespace where the object has none
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace or "default"},
        "involvedObject": {
            "apiVersion": thing["apiVersion"],
            "kind": thing["kind"],
            "name": metadata["name"],
            "namespace": namespace,
            "uid": metadata.get("uid", ""),
        },
        "type": type_,
        "reason": reason,
        "message": message[:_LONGEST],
        "source": {"component": component},
        "firstTimestamp": written,
        "lastTimestamp": written,
        "count": 1,
    }


def now() -> str:
    """The time as objects have it, RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
