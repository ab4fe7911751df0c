# SPDX-License-Identifier: Apache-2.0
"""Patches of objects: server-side apply, merge patches (RFC 7396) and JSON patches (RFC 6902).

Ownership is kept by leaf: a path of names and of list items' keys. Lists whose items have keys (``type`` of conditions,
``name`` of containers, or the keys of a CRD's schema) are merged item by item; all other lists are one leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.fake_api.answers import ApiError, bad_request

Path = tuple[str, ...]
Owners = dict[str, set[Path]]
"""The leaves that each field manager owns."""
Keys = Mapping[str, tuple[str, ...]]
"""The fields that are lists with keys, by name, and the names of the keys."""
BUILT_IN_KEYS: Final[Keys] = {
    "conditions": ("type",),
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
}
_UNOWNED: Final = frozenset({("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")})
_SYSTEM: Final = frozenset(
    {"uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp"}
)


def keys_in(schema: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The lists with keys in the schema of a custom resource. Lists of the same name are taken to be alike."""
    found: dict[str, tuple[str, ...]] = {"ownerReferences": ("uid",)}
    for name, below in (schema.get("properties") or {}).items():
        if below.get("x-kubernetes-list-map-keys"):
            found[name] = tuple(below["x-kubernetes-list-map-keys"])
        found |= keys_in(below)
        found |= keys_in(below.get("items") or {})
        more = below.get("additionalProperties")
        found |= keys_in(more) if isinstance(more, Mapping) else {}
    return found


class FieldOwnership:
    """Server-side apply for one kind. Nothing that it gets is changed."""

    def __init__(self, keys: Keys = BUILT_IN_KEYS) -> None:
        self._keys = keys

    def conflicts(
        self, live: Mapping[str, Any], applied: Mapping[str, Any], owners: Owners, manager: str
    ) -> dict[Path, str]:
        """Leaves of ``applied`` that another manager owns with another value, and that manager."""
        current = self._leaves(live)
        return {
            path: other
            for path, value in self._leaves(applied).items()
            for other, owned in owners.items()
            if other != manager and path in owned and current.get(path) != value
        }

    def apply(
        self, live: Mapping[str, Any], applied: Mapping[str, Any], owners: Owners, manager: str
    ) -> tuple[dict[str, Any], Owners]:
        """The object after ``manager`` applied ``applied``, and the field owners. Managers with another value lose the
        field.
        """
        wanted, current = self._leaves(applied), self._leaves(live)
        shared = {path for other, owned in owners.items() if other != manager for path in owned}
        dropped = owners.get(manager, set()) - wanted.keys() - shared
        result = copy.deepcopy(dict(live))
        # keys last, because the other fields of an item are found by them
        for path in sorted(dropped, key=lambda one: (self._is_key(one), one)):
            self._drop(result, path)
        for path, value in wanted.items():
            self._put(result, path, copy.deepcopy(value))
        taken = {path for path, value in wanted.items() if current.get(path) != value}
        new = {other: owned - taken for other, owned in owners.items() if other != manager}
        new[manager] = set(wanted)
        return result, {other: owned for other, owned in new.items() if owned}

    def written(self, before: Mapping[str, Any], after: Mapping[str, Any], owners: Owners, manager: str) -> Owners:
        """The field owners after ``manager`` created, updated or patched the object to ``after``: it owns changed
        fields.
        """
        old, new = self._leaves(before), self._leaves(after)
        changed = {path for path, value in new.items() if path not in old or old[path] != value}
        kept = {other: (owned - changed) & new.keys() for other, owned in owners.items()}
        kept[manager] = kept.get(manager, set()) | changed
        return {other: owned for other, owned in kept.items() if owned}

    def _leaves(self, thing: object, path: Path = ()) -> dict[Path, Any]:
        """Every leaf with its value. An empty object is a leaf."""
        found: dict[Path, Any] = {}
        if isinstance(thing, Mapping) and thing:
            for name, value in thing.items():
                found |= self._leaves(value, (*path, str(name)))
            return {one: value for one, value in found.items() if not _is_systems(one)}
        field = path[-1] if path else ""
        if isinstance(thing, list) and thing and all(self._identity(item, field) for item in thing):
            for item in thing:
                found |= self._leaves(item, (*path, self._identity(item, field)))
            return found
        return {path: thing} if path else {}

    def _identity(self, item: object, field: str) -> str:
        """The step of a path that leads to an item of the list ``field``; empty if the list has no keys, or the item
        none.
        """
        keys = self._keys.get(field, ())
        # the first key must be there; others have defaults, as a port's protocol has
        if not keys or not isinstance(item, Mapping) or keys[0] not in item:
            return ""
        return "[" + "|".join(str(item.get(key, "")) for key in keys) + "]"

    def _is_key(self, path: Path) -> bool:
        return len(path) > 2 and path[-2].startswith("[") and path[-1] in self._keys.get(path[-3], ())

    def _step(self, holder: Any, name: str, field: str) -> Any:  # noqa: ANN401 - JSON
        """One step down, None if it is not there: a name of an object, or an item of the list ``field``."""
        if isinstance(holder, list):
            return next((item for item in holder if self._identity(item, field) == name), None)
        return holder.get(name)

    def _put(self, holder: Any, path: Path, value: object, field: str = "") -> None:  # noqa: ANN401 - JSON
        """Set a leaf, making what is missing above it."""
        name, rest = path[0], path[1:]
        if not rest:
            # an empty object is owned as such, not its other fields
            if value != {} or not isinstance(holder.get(name), dict):
                holder[name] = value
            return
        below = self._step(holder, name, field)
        if isinstance(holder, list):
            if below is None:
                # found by its keys from now on; the keys' own leaves have the same values, with their types
                below = {key: one for key, one in zip(self._keys[field], name[1:-1].split("|"), strict=True) if one}
                holder.append(below)
        elif not isinstance(below, dict | list) or isinstance(below, list) != rest[0].startswith("["):
            below = holder[name] = [] if rest[0].startswith("[") else {}
        self._put(below, rest, value, name)

    def _drop(self, holder: Any, path: Path, field: str = "") -> None:  # noqa: ANN401 - JSON
        """Remove a leaf, and what it leaves empty above it."""
        name, rest = path[0], path[1:]
        if not rest:
            holder.pop(name, None)
            return
        below = self._step(holder, name, field)
        if below is None:
            return
        self._drop(below, rest, name)
        if not below:
            if isinstance(holder, list):
                holder.remove(below)
            else:
                del holder[name]


def _is_systems(path: Path) -> bool:
    return path in _UNOWNED or (len(path) >= 2 and path[0] == "metadata" and path[1] in _SYSTEM)


def apply_merge_patch(target: object, patch: object) -> Any:  # noqa: ANN401 - JSON
    """``target`` after a merge patch; neither is changed."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = apply_merge_patch(result.get(name), value)
    return result


def apply_json_patch(target: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``target`` after a JSON patch; raises Refused (422) if a test fails or a path leads nowhere."""
    root: dict[str, Any] = {"": copy.deepcopy(dict(target))}
    for operation in operations:
        _operate(root, operation)
    result = root[""]
    if not isinstance(result, dict):
        raise bad_request("the patch replaces the object by something else")
    return result


def _operate(root: dict[str, Any], operation: Mapping[str, Any]) -> None:
    kind, path = operation.get("op"), str(operation.get("path", ""))
    if kind == "test":
        if _get(root, path) != operation.get("value"):
            raise ApiError(422, "Invalid", f"the server rejected our request: testing value {path} failed")
    elif kind == "remove":
        _remove(root, path)
    elif kind in ("add", "replace"):
        if kind == "replace":
            _get(root, path)
        _set(root, path, copy.deepcopy(operation.get("value")), insert=kind == "add")
    elif kind in ("move", "copy"):
        value = copy.deepcopy(_get(root, str(operation["from"])))
        if kind == "move":
            _remove(root, str(operation["from"]))
        _set(root, path, value, insert=True)
    else:
        raise bad_request(f"unknown operation {kind!r}")


def _parent(root: dict[str, Any], path: str) -> tuple[Any, str]:
    *before, last = [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")]
    holder: Any = root
    for part in before:
        holder = _child(holder, part, path)
    return holder, last


def _child(holder: object, part: str, path: str) -> Any:  # noqa: ANN401 - JSON
    try:
        if isinstance(holder, list):
            return holder[int(part)]
        if isinstance(holder, dict):
            return holder[part]
    except (KeyError, IndexError, ValueError):
        pass  # reported below
    raise ApiError(422, "Invalid", f"the server rejected our request: the path {path} does not exist")


def _get(root: dict[str, Any], path: str) -> Any:  # noqa: ANN401 - JSON
    return _child(*_parent(root, path), path)


def _remove(root: dict[str, Any], path: str) -> None:
    holder, last = _parent(root, path)
    _child(holder, last, path)
    del holder[int(last) if isinstance(holder, list) else last]


def _set(root: dict[str, Any], path: str, value: object, *, insert: bool) -> None:
    holder, last = _parent(root, path)
    if isinstance(holder, list):
        if last == "-":
            holder.append(value)
        elif insert:
            holder.insert(int(last), value)
        else:
            holder[int(last)] = value
    elif isinstance(holder, dict):
        holder[last] = value
    else:
        raise ApiError(422, "Invalid", f"the server rejected our request: the path {path} does not exist")
