# SPDX-License-Identifier: Apache-2.0
"""Custom resources as observed: each object of the API server, decoded and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from controller.kube.custom_resources import GATEWAY_KINDS
from extproc.api.config_errors import Mistake
from extproc.api.document_decoder import Object as Decoded
from extproc.api.document_decoder import decode
from extproc.api.spec import object_key
from extproc.api.yaml_documents import Document

# Kinds whose objects are documents of the directory, too.
SOURCE_KINDS: Final = (*(kind.name for kind in GATEWAY_KINDS), "InferenceObjective")


class SourceObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object. ``created``: RFC 3339, so that text sorts by time. ``decoded``: None if it has another shape.
    ``mistakes``: why it cannot be used; empty if it can.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    created: str
    generation: int
    api_version: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    decoded: Decoded | None
    mistakes: tuple[Mistake, ...]

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return object_key(self.namespace, self.name)

    @property
    def age_sort_key(self) -> tuple[str, str]:
        """Sorts by age; of two that were made in one second, the first by name counts as older."""
        return self.created, self.key

    def mistakes_text(self) -> str:
        """Every mistake, for a condition's message; empty if there is none."""
        return "; ".join(f"{one.path}: {one.message}" if one.path else one.message for one in self.mistakes)

    def document(
        self, spec: Mapping[str, Any] | None = None, annotations: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """The object as a document of the directory, with another ``spec`` if given. ``annotations``: its own are left
        out.
        """
        metadata: dict[str, Any] = {"name": self.name, "namespace": self.namespace}
        if self.labels:
            metadata["labels"] = dict(self.labels)
        if annotations:
            metadata["annotations"] = dict(annotations)
        content = {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata}
        return to_canonical_json({**content, "spec": self.spec if spec is None else spec})


def decode_source(thing: Mapping[str, Any]) -> SourceObject:
    """An object of one of the document kinds, as the API server has it."""
    metadata = thing["metadata"]
    kind, api_version = thing["kind"], thing["apiVersion"]
    identity = {"name": metadata["name"], "namespace": metadata.get("namespace", "default")}
    spec = thing.get("spec") or {}
    read = {"apiVersion": api_version, "kind": kind, "metadata": identity, "spec": spec}
    decoded, mistakes = decode(Document("", to_canonical_json(read).decode(), is_json=True), listeners_may_come=True)
    return SourceObject(
        kind=kind,
        namespace=identity["namespace"],
        name=identity["name"],
        uid=metadata.get("uid", ""),
        created=metadata.get("creationTimestamp") or "",
        generation=metadata.get("generation", 0),
        api_version=api_version,
        labels=metadata.get("labels") or {},
        # of another shape it is a mistake, and nobody reads it
        spec=spec if isinstance(spec, Mapping) else {},
        decoded=decoded,
        mistakes=tuple(mistakes),
    )


def to_canonical_json(content: object) -> bytes:
    """JSON, the same for equal content."""
    return msgspec.json.encode(content, order="deterministic")
