# SPDX-License-Identifier: Apache-2.0
"""Server-side apply: who owns which field, conflicts, and what a manager drops by no longer naming it.

Ownership is kept by leaf: a path of names and of list items' keys. Lists of objects whose items have one of the usual
keys (``type`` of conditions, ``name`` of containers) are merged item by item, all other lists are one leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

Path = tuple[str, ...]
Owners = dict[str, set[Path]]
"""The leaves that each field manager owns."""

_KEYS: Final[Mapping[str, str]] = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ownerReferences": "uid",
}
_UNOWNED: Final = frozenset({("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")})
_SYSTEM: Final = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp"}
)


def leaves(thing: object, path: Path = ()) -> dict[Path, Any]:
    """Every leaf with its value. An empty object is a leaf."""
    if isinstance(thing, Mapping) and thing:
        found: dict[Path, Any] = {}
        for name, value in thing.items():
            found |= leaves(value, (*path, str(name)))
        return {one: value for one, value in found.items() if not _is_systems(one)}
    key = _KEYS.get(path[-1]) if path else None
    if key and isinstance(thing, list) and thing and all(isinstance(item, Mapping) and key in item for item in thing):
        found = {}
        for item in thing:
            found |= leaves(item, (*path, f"[{item[key]}]"))
        return found
    return {path: thing} if path else {}


def conflicts(live: Mapping[str, Any], applied: Mapping[str, Any], owners: Owners, manager: str) -> dict[Path, str]:
    """Leaves of ``applied`` that another manager owns with another value, and that manager."""
    current = leaves(live)
    return {
        path: other
        for path, value in leaves(applied).items()
        for other, owned in owners.items()
        if other != manager and path in owned and current.get(path) != value
    }


def apply(
    live: Mapping[str, Any], applied: Mapping[str, Any], owners: Owners, manager: str
) -> tuple[dict[str, Any], Owners]:
    """The object after ``manager`` applied ``applied``, and who owns what then. Whoever disagreed loses the field."""
    wanted = leaves(applied)
    current = leaves(live)
    shared = {path for other, owned in owners.items() if other != manager for path in owned}
    result = copy.deepcopy(dict(live))
    for path in sorted(owners.get(manager, set()) - wanted.keys() - shared, key=lambda one: (_is_key(one), one)):
        _drop(result, path)
    for path, value in wanted.items():
        _put(result, path, copy.deepcopy(value))
    taken = {path for path, value in wanted.items() if current.get(path) != value}
    new = {other: owned - taken for other, owned in owners.items() if other != manager}
    new[manager] = set(wanted)
    return result, {other: owned for other, owned in new.items() if owned}


def written(before: Mapping[str, Any], after: Mapping[str, Any], owners: Owners, manager: str) -> Owners:
    """Who owns what after ``manager`` wrote ``after`` by a create, update or patch: what it changed is its own."""
    old, new = leaves(before), leaves(after)
    changed = {path for path, value in new.items() if path not in old or old[path] != value}
    kept = {other: (owned - changed) & new.keys() for other, owned in owners.items()}
    kept[manager] = kept.get(manager, set()) | changed
    return {other: owned for other, owned in kept.items() if owned}


def _is_systems(path: Path) -> bool:
    return path in _UNOWNED or (len(path) >= 2 and path[0] == "metadata" and path[1] in _SYSTEM)


def _step(holder: Any, name: str, field: str) -> Any:  # noqa: ANN401 - JSON
    """One step down, None if it is not there: a name of an object, or ``[KEY]`` of the list called ``field``."""
    if isinstance(holder, list):
        return next((item for item in holder if f"[{item.get(_KEYS[field])}]" == name), None)
    return holder.get(name)


def _put(holder: Any, path: Path, value: object, field: str = "") -> None:  # noqa: ANN401 - JSON
    """Set a leaf, making what is missing above it."""
    name, rest = path[0], path[1:]
    if not rest:
        holder[name] = value
        return
    below = _step(holder, name, field)
    if isinstance(holder, list):
        if below is None:
            below = {}
            holder.append(below)
            # found by its key from now on; the key's own leaf says the same
            below[_KEYS[field]] = name[1:-1]
    elif not isinstance(below, dict | list) or isinstance(below, list) != rest[0].startswith("["):
        below = holder[name] = [] if rest[0].startswith("[") else {}
    _put(below, rest, value, name)


def _drop(holder: Any, path: Path, field: str = "") -> None:  # noqa: ANN401 - JSON
    """Remove a leaf, and what it leaves empty above it."""
    name, rest = path[0], path[1:]
    if not rest:
        holder.pop(name, None)
        return
    below = _step(holder, name, field)
    if below is None:
        return
    _drop(below, rest, name)
    if not below:
        if isinstance(holder, list):
            holder.remove(below)
        else:
            del holder[name]


def _is_key(path: Path) -> bool:
    """Whether this leaf is the key of a list's item: dropped last, because the others are found by it."""
    return len(path) > 2 and path[-2].startswith("[") and _KEYS.get(path[-3]) == path[-1]
