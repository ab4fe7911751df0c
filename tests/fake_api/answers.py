# SPDX-License-Identifier: Apache-2.0
"""Refusals of the fake API server as Status objects, and label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

Matches = Callable[[Mapping[str, Any]], bool]
_SET: Final = re.compile(r"^(?P<key>[\w./-]+)\s+(?P<op>in|notin)\s*\((?P<values>[^)]*)\)$")
_EQUAL: Final = re.compile(r"^(?P<key>[\w./-]+)\s*(?P<op>==|=|!=)\s*(?P<value>[\w.-]*)$")
_THERE: Final = re.compile(r"^(?P<no>!?)\s*(?P<key>[\w./-]+)$")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = dict(details or {})

    def status(self) -> dict[str, Any]:
        """The ``v1 Status`` to answer with."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def not_found(plural: str, name: str) -> ApiError:
    """404 for an object."""
    return ApiError(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def exists(plural: str, name: str) -> ApiError:
    """409 for a name that is taken."""
    return ApiError(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})


def conflict(
    plural: str, name: str, why: str = "the object has been modified; please apply your changes to it"
) -> ApiError:
    """409 for a write that is based on an old version or meets another's field."""
    message = f'Operation cannot be fulfilled on {plural} "{name}": {why}'
    return ApiError(409, "Conflict", message, {"name": name, "kind": plural})


def version_expired(asked: int, floor: int) -> ApiError:
    """410 for a version that was compacted."""
    return ApiError(410, "Expired", f"too old resource version: {asked} ({floor})")


def invalid(kind: str, name: str, causes: list[str]) -> ApiError:
    """422 for an object that breaks its schema."""
    listed = [{"reason": "FieldValueInvalid", "message": cause, "field": cause.partition(":")[0]} for cause in causes]
    message = ", ".join(causes)
    return ApiError(
        422, "Invalid", f'{kind} "{name}" is invalid: {message}', {"name": name, "kind": kind, "causes": listed}
    )


def bad_request(message: str) -> ApiError:
    """400."""
    return ApiError(400, "BadRequest", message)


def selector(labels: str, fields: str) -> Matches:
    """Whether an object is selected; both may be empty. Raises Refused (400) for what cannot be read."""
    by_label = [_requirement(part) for part in _parts(labels)]
    by_field = [_field(part) for part in _parts(fields)]

    def matches(thing: Mapping[str, Any]) -> bool:
        found = thing["metadata"].get("labels") or {}
        return all(one(found) for one in by_label) and all(one(thing) for one in by_field)

    return matches


def _parts(text: str) -> list[str]:
    """Commas inside of parentheses do not separate."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _requirement(part: str) -> Matches:
    if found := _SET.match(part):
        values = {value.strip() for value in found["values"].split(",")}
        key, wanted = found["key"], found["op"] == "in"
        return lambda labels: (labels.get(key) in values) == wanted if key in labels else not wanted
    if found := _EQUAL.match(part):
        key, value, equal = found["key"], found["value"], found["op"] != "!="
        return lambda labels: (labels.get(key) == value) == equal
    if found := _THERE.match(part):
        key, wanted = found["key"], not found["no"]
        return lambda labels: (key in labels) == wanted
    raise bad_request(f"unable to parse requirement: {part}")


def _field(part: str) -> Matches:
    path, operator, value = re.split(r"(==|!=|=)", part, maxsplit=1) if "=" in part else (part, "", "")
    if not operator:
        raise bad_request(f"invalid selector: {part!r}; can't understand it")
    names = path.strip().split(".")
    return lambda thing: (str(_at(thing, names)) == value.strip()) == (operator != "!=")


def _at(thing: Mapping[str, Any], names: list[str]) -> object:
    found: object = thing
    for name in names:
        found = found.get(name, "") if isinstance(found, Mapping) else ""
    return found
