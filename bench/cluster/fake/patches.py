# SPDX-License-Identifier: Apache-2.0
"""Merge patches (RFC 7396) and JSON patches (RFC 6902)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cluster.fake.answers import Refused, bad_request


def merged(target: object, patch: object) -> Any:  # noqa: ANN401 - JSON
    """``target`` after a merge patch; neither is changed."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def patched(target: Mapping[str, Any], operations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
            raise Refused(422, "Invalid", f"the server rejected our request: testing value {path} failed")
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
        pass  # said below
    raise Refused(422, "Invalid", f"the server rejected our request: the path {path} does not exist")


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
        raise Refused(422, "Invalid", f"the server rejected our request: the path {path} does not exist")
