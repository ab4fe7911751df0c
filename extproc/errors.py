"""What a client is told when it cannot be served: one short family, each knowing its HTTP status and OpenAI error object."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Refusal(Exception):
    """A request that ends here. ``message`` says what to do about it; the class says status, type and code."""

    status: ClassVar[int] = 500
    error_type: str = "server_error"
    code: ClassVar[str | None] = None
    outcome: ClassVar[str] = "error"
    # beside retry-after
    headers: Mapping[str, str] = MappingProxyType({})

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(Refusal):
    """The body or its fields are not what the API takes."""

    status = 400
    error_type = "invalid_request_error"
    outcome = "bad_request"


class UnknownModel(Refusal):
    """No route serves this model name."""

    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"
    outcome = "unknown_model"


class UnknownPath(Refusal):
    """Not an endpoint of the API."""

    status = 404
    error_type = "invalid_request_error"
    code = "unknown_url"
    outcome = "unknown_path"


class MethodNotAllowed(Refusal):
    """The endpoint exists, the HTTP method does not."""

    status = 405
    error_type = "invalid_request_error"
    code = "method_not_allowed"
    outcome = "method_not_allowed"


class NoEndpoint(Refusal):
    """The route is known but no engine can take the request now."""

    status = 503
    error_type = "service_unavailable_error"
    code = "no_endpoint"
    outcome = "no_endpoint"


class RateLimited(Refusal):
    """The caller has used up what a ModelRoute grants. ``kind``: of what, requests or tokens."""

    status = 429
    code = "rate_limit_exceeded"
    outcome = "rate_limited"

    def __init__(self, message: str, *, kind: str, headers: Mapping[str, str], retry_after_s: int | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.error_type = kind
        self.headers = headers


class LimitsUnavailable(Refusal):
    """Redis cannot be asked, and the limit is not to be granted without it."""

    status = 503
    error_type = "service_unavailable_error"
    code = "limits_unavailable"
    outcome = "limits_unavailable"


class QueueFull(Refusal):
    """No place to wait, or it had to be given up to a request of higher priority."""

    status = 429
    error_type = "requests"
    code = "queue_full"
    outcome = "queue_full"


class Shed(Refusal):
    """Engines are nearly full, and the request's priority says that it can go."""

    status = 429
    error_type = "requests"
    code = "shed"
    outcome = "shed"


class QueueTimeout(Refusal):
    """It has waited as long as it may."""

    status = 503
    error_type = "service_unavailable_error"
    code = "queue_timeout"
    outcome = "queue_timeout"


class InternalError(Refusal):
    """Our own code failed."""

    code = "internal_error"
    outcome = "internal_error"


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorDetail


def to_openai_body(refusal: Refusal) -> bytes:
    """The error object that OpenAI's clients parse: ``{"error": {message, type, param, code}}``."""
    detail = _ErrorDetail(refusal.message, refusal.error_type, refusal.param, refusal.code)
    return msgspec.json.encode(_ErrorBody(detail))
