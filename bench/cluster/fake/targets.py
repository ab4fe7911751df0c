# SPDX-License-Identifier: Apache-2.0
"""What a path on the server names: a kind, perhaps one object and a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.cluster.fake.kinds import Kind

if TYPE_CHECKING:
    from bench.cluster.fake.kinds import Kinds


class Target(msgspec.Struct, frozen=True):
    """A collection without ``name``; of all namespaces without ``namespace``, if its kind has any."""

    kind: Kind
    namespace: str | None = None
    name: str = ""
    subresource: str = ""


def target_of(path: str, kinds: Kinds) -> Target | None:
    """What ``path`` names; None if the server has nothing there."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) >= 3 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    kind = kinds.find(group, version, rest[0])
    if kind is None or len(rest) > 3 or (namespace is not None) > kind.resource.namespaced:
        return None
    plural, name, subresource = [*rest, "", ""][:3]
    return Target(kind, namespace, name, subresource) if plural else None
