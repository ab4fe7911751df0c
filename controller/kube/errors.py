# SPDX-License-Identifier: Apache-2.0
"""Failures of calls to the Kubernetes API as types, and the back-off after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random


class ClusterError(Exception):
    """Any failure of a call to the API server."""


class Unreachable(ClusterError):
    """No answer: the server is away, too slow, or the connection broke. The call may or may not have had an effect."""


class ClusterAccessInvalid(ClusterError):
    """A kubeconfig or service account that cannot be used; the message has the correction."""


class ApiError(ClusterError):
    """The server refused. ``reason`` is the machine-readable one of its Status object, empty if it sent none.

    ``retry_after_s``: from ``Retry-After``; None without one.
    """

    def __init__(
        self,
        status: int,
        reason: str = "",
        message: str = "",
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.details: Mapping[str, Any] = details or {}
        self.retry_after_s = retry_after_s


class BadRequest(ApiError):
    """400: the server cannot read the call."""


class Unauthorized(ApiError):
    """401: the credentials are unknown or have expired."""


class Forbidden(ApiError):
    """403: a role that allows this is missing."""


class NotFound(ApiError):
    """404: there is no such object, or no such kind."""


class Conflict(ApiError):
    """409: the object was written since it was read, or an applied field has another owner. Read and decide again."""


class AlreadyExists(Conflict):
    """409: an object of this name is there already."""


class ResourceVersionExpired(ApiError):
    """410: the requested version is older than the server's history. List again."""


class Invalid(ApiError):
    """422: the object breaks its schema or a rule; the message names the fields."""


class TooManyRequests(ApiError):
    """429: the server did not process the call; retry later."""


class ServerError(ApiError):
    """5xx: the server, or one that it calls, failed."""


class _Status(msgspec.Struct, frozen=True):
    """The fields of a ``v1 Status`` that we read."""

    reason: str = ""
    message: str = ""
    code: int = 0
    details: dict[str, Any] | None = None


_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: ResourceVersionExpired,
    422: Invalid,
    429: TooManyRequests,
}


def error_for(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """The error for an answer of the server, from its status code, body and ``Retry-After`` header."""
    try:
        said = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError:  # a proxy's page, or nothing
        said = _Status(message=body[:500].decode(errors="replace"))
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else ApiError)
    if said.reason == "AlreadyExists":
        kind = AlreadyExists
    delay = (said.details or {}).get("retryAfterSeconds")
    wait_s = _seconds(retry_after) if retry_after else float(delay) if isinstance(delay, int) and delay > 0 else None
    return kind(status, said.reason, said.message, details=said.details, retry_after_s=wait_s)


def error_in_watch(status_object: Mapping[str, Any]) -> ApiError:
    """The error for the object of an ERROR event."""
    code = status_object.get("code")
    return error_for(code if isinstance(code, int) else 500, msgspec.json.encode(status_object))


def _seconds(header: str) -> float | None:
    """Kubernetes sends seconds, never a date."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return None


class Backoff:
    """Doubles from ``first_s`` to ``most_s``; each wait is drawn between half and all of it, so that clients spread.

    The API server's ``Retry-After`` is a lower bound.
    """

    def __init__(self, first_s: float, most_s: float, rng: Random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng
        self._next_s = first_s

    def record_failure(self, error: BaseException | None = None) -> float:
        """Count a failure; how long to wait before the next attempt."""
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._most_s, self._next_s * 2)
        asked_s = error.retry_after_s if isinstance(error, ApiError) else None
        # all clients got the same delay: spread their retries
        return wait_s if asked_s is None else max(wait_s, asked_s + self._rng.uniform(0.0, self._first_s))

    def reset(self) -> None:
        """The next failure is the first of its row."""
        self._next_s = self._first_s
