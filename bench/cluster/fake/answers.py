# SPDX-License-Identifier: Apache-2.0
"""The refusals of the API server, as its Status objects have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Refused(Exception):
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


def not_found(plural: str, name: str) -> Refused:
    """404 for an object."""
    return Refused(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def exists(plural: str, name: str) -> Refused:
    """409 for a name that is taken."""
    return Refused(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})


def conflict(
    plural: str, name: str, why: str = "the object has been modified; please apply your changes to it"
) -> Refused:
    """409 for a write that is based on an old version or meets another's field."""
    message = f'Operation cannot be fulfilled on {plural} "{name}": {why}'
    return Refused(409, "Conflict", message, {"name": name, "kind": plural})


def expired(asked: int, floor: int) -> Refused:
    """410 for a version that is forgotten."""
    return Refused(410, "Expired", f"too old resource version: {asked} ({floor})")


def invalid(kind: str, name: str, causes: list[str]) -> Refused:
    """422 for an object that breaks its schema."""
    listed = [{"reason": "FieldValueInvalid", "message": cause, "field": cause.partition(":")[0]} for cause in causes]
    said = ", ".join(causes)
    return Refused(
        422, "Invalid", f'{kind} "{name}" is invalid: {said}', {"name": name, "kind": kind, "causes": listed}
    )


def bad_request(message: str) -> Refused:
    """400."""
    return Refused(400, "BadRequest", message)
