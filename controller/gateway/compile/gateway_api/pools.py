# SPDX-License-Identifier: Apache-2.0
"""An InferencePool and its pods to a ModelServer document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.gateway_api.objects import Identity, identity_of
from controller.gateway.compile.pods import pod_endpoints
from controller.gateway.compile.sources import to_bytes
from extproc.config.spec import API_VERSION, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.gateway.compile.pods import Pod

# Names of ModelServers that begin so are kept for pools.
PREFIX: Final = "inferencepool."
_LONGEST_NAME: Final = 253


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """An InferencePool. ``labels``: its pods have all of them. ``ports``: each is an endpoint of each pod. ``picker``:
    the Service of its own endpoint picker, as ``namespace/name``; empty if it names something else. ``fails_open``: it is
    used without its picker, too. ``problem``: why it cannot be used.
    """

    identity: Identity
    labels: Mapping[str, str]
    ports: tuple[int, ...]
    picker: str = ""
    fails_open: bool = False
    problem: str = ""

    @property
    def server(self) -> str:
        """The key of its ModelServer document."""
        return server_of(self.identity.key)


def server_of(key: str) -> str:
    """The key of the ModelServer document of the pool ``key``."""
    namespace, _, name = key.partition("/")
    return object_key(namespace, PREFIX + name)


def pool_of(thing: Mapping[str, Any]) -> Pool:
    """An InferencePool as the API server has it."""
    identity = identity_of(thing)
    spec = thing.get("spec") or {}
    picker = spec.get("endpointPickerRef") or {}
    is_service = not picker.get("group") and picker.get("kind", "Service") == "Service" and picker.get("name")
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = tuple(one["number"] for one in spec.get("targetPorts") or ())
    problem = "" if labels and ports else "it has no selector or no targetPorts"
    if len(PREFIX) + len(identity.name) > _LONGEST_NAME:
        problem = f"its name is longer than {_LONGEST_NAME - len(PREFIX)} characters"
    return Pool(
        identity=identity,
        labels=labels,
        ports=ports,
        picker=object_key(identity.namespace, picker["name"]) if is_service else "",
        fails_open=picker.get("failureMode") == "FailOpen",
        problem=problem,
    )


def pool_document(pool: Pool, pods: Iterable[Pod]) -> bytes:
    """The ModelServer of ``pool``. Requests keep the model that they name: a pool has none of its own."""
    identity = pool.identity
    metadata = {"name": PREFIX + identity.name, "namespace": identity.namespace}
    spec = {"model": identity.name, "endpoints": pod_endpoints(pool.ports, pods)}
    return to_bytes({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": metadata, "spec": spec})
