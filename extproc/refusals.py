# SPDX-License-Identifier: Apache-2.0
"""Errors for clients: the HTTP status, and the error object of the client's API."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import msgspec

from extproc.wire_names import ANTHROPIC_TYPES, CACHE_HEADER, CACHE_HIT, GRPC_STATUSES, OVERLOADED

if TYPE_CHECKING:
    from collections.abc import Mapping


class Refusal(Exception):
    """A request that is refused.

    ``message``: what the client is to do. ``param``: the request parameter at fault, if any. ``retry_after_s``: for the
    retry-after header, None if a retry will not help. The class defines the rest: ``outcome`` is the value in metrics,
    ``headers`` are response headers beside retry-after, ``dropped_reason`` is llm-d's word for it, None if llm-d has
    none. ``is_overload``: the engines have no room; Anthropic's API has a status of its own for that.
    ``model``: the one that was asked for, as far as it was read; for the usage log. ``is_of_caller``: the caller alone
    is the reason, so no objective is missed.
    """

    status: int = 500
    error_type: str = "server_error"
    code: ClassVar[str | None] = None
    outcome: ClassVar[str] = "error"
    dropped_reason: ClassVar[str | None] = None
    is_overload: ClassVar[bool] = False
    is_of_caller: bool = False
    headers: Mapping[str, str] = MappingProxyType({})
    model: str = ""
    # of gRPC, where it does not follow from ``status``
    grpc_status: ClassVar[int | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(Refusal):
    """The body or one of its fields is invalid."""

    status = 400
    error_type = "invalid_request_error"
    outcome = "bad_request"
    is_of_caller = True


class CompressedMessage(BadRequest):
    """The message of a gRPC call is compressed, so that its model cannot be read."""

    grpc_status = 12
    headers = MappingProxyType({"grpc-accept-encoding": "identity"})


class ReservedFieldRefused(BadRequest):
    """A field of the body would steer engines, which is for gateways to do."""


class UnknownModel(Refusal):
    """No route has this model name."""

    status = 404
    error_type = "invalid_request_error"
    code = "model_not_found"
    outcome = "unknown_model"


class ModelNotAllowed(Refusal):
    """The caller's key or tenant may not use the model."""

    status = 403
    error_type = "permission_error"
    code = "model_not_allowed"
    outcome = "model_not_allowed"
    is_of_caller = True


class UnknownPath(Refusal):
    """The path is not part of the API."""

    status = 404
    error_type = "invalid_request_error"
    code = "unknown_url"
    outcome = "unknown_path"
    grpc_status = 12


class ModelRepositoryRefused(Refusal):
    """A client asks to load or unload models, or for a list of all of an engine's."""

    status = 403
    error_type = "permission_error"
    code = "repository_refused"
    outcome = "repository_refused"
    is_of_caller = True


class ModelNotReady(Refusal):
    """A client asks whether a model is ready, and none of its engines is."""

    status = 503
    error_type = "service_unavailable_error"
    code = "model_not_ready"
    outcome = "model_not_ready"


class MethodNotAllowed(Refusal):
    """The path does not support the HTTP method."""

    status = 405
    error_type = "invalid_request_error"
    code = "method_not_allowed"
    outcome = "method_not_allowed"


class NoEndpoint(Refusal):
    """No endpoint can serve the request now."""

    status = 503
    error_type = "service_unavailable_error"
    code = "no_endpoint"
    outcome = "no_endpoint"
    dropped_reason = "rejected-no-endpoints"


class ServerFailing(Refusal):
    """The breaker of the ModelServer is open: most of its requests have failed."""

    status = 503
    error_type = "service_unavailable_error"
    code = "server_failing"
    outcome = "server_failing"


class RateLimited(Refusal):
    """The caller has exceeded a rate limit, or all callers one that they share. ``kind``: requests or tokens."""

    status = 429
    is_of_caller = True
    code = "rate_limit_exceeded"
    outcome = "rate_limited"

    def __init__(self, message: str, *, kind: str, headers: Mapping[str, str], retry_after_s: int | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.error_type = kind
        self.headers = headers


class BudgetSpent(Refusal):
    """A budget of the caller has no room for the request before its window ends. ``budget``: its key."""

    status = 429
    is_of_caller = True
    error_type = "insufficient_quota"
    code = "insufficient_quota"
    outcome = "budget_spent"

    def __init__(self, message: str, *, budget: str, headers: Mapping[str, str], retry_after_s: int) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.budget = budget
        # clients of OpenAI and Anthropic retry 429 by themselves, within seconds
        self.headers = {**headers, "x-should-retry": "false"}


class LimitsUnavailable(Refusal):
    """Redis does not answer, and the limit must not be granted without it."""

    status = 503
    error_type = "service_unavailable_error"
    code = "limits_unavailable"
    outcome = "limits_unavailable"


class GuardRefused(Refusal):
    """The guard of the route refuses the request, in its own words."""

    error_type = "invalid_request_error"
    code = "guard_refused"
    outcome = "guard"
    is_of_caller = True
    # it would be refused again, and clients retry 408, 409 and 429 by themselves
    headers = MappingProxyType({"x-should-retry": "false"})

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class GuardUnavailable(Refusal):
    """The guard of the route does not answer, and no request may go without it."""

    status = 503
    error_type = "service_unavailable_error"
    code = "guard_unavailable"
    outcome = "guard_unavailable"


class PrefillRefused(Refusal):
    """The prefill engine refuses the request, in its own words."""

    outcome = "prefill_refused"
    is_of_caller = True

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = "invalid_request_error"


class PrefillFailed(Refusal):
    """The prefill engine does not answer, and the ModelServer wants no other one to compute the prompt."""

    status = 503
    error_type = "service_unavailable_error"
    code = "prefill_failed"
    outcome = "prefill_failed"


class UntranslatableAnswer(Refusal):
    """The engine's answer does not have the form of its API, so the client's API has none for it."""

    status = 502
    code = "answer_untranslatable"
    outcome = "answer_untranslatable"


class OutOfTime(Refusal):
    """The time limit of the request ended its engine's answer."""

    status = 504
    error_type = "timeout_error"
    code = "timeout"
    outcome = "timeout"

    def __init__(self) -> None:
        super().__init__("The engine did not finish in the time allowed; ask for a shorter answer or a higher timeout.")


class StoredAnswer(Refusal):
    """No refusal: the request needs no engine, as an equal one was answered before. ``body``: that answer."""

    status = 200
    outcome = CACHE_HIT
    is_of_caller = True

    def __init__(self, body: bytes, *, age_s: int, is_stream: bool) -> None:
        super().__init__("The answer to an equal request is sent again.")
        self.body = body
        kind = "text/event-stream; charset=utf-8" if is_stream else "application/json"
        self.headers = MappingProxyType({"content-type": kind, CACHE_HEADER: "hit", "age": str(age_s)})


class NotCached(Refusal):
    """The client wants a stored answer or none."""

    status = 504
    error_type = "invalid_request_error"
    code = "not_cached"
    outcome = "not_cached"
    is_of_caller = True


class QueueFull(Refusal):
    """The queue is full, or a request of higher priority evicted this one from it."""

    status = 429
    error_type = "requests"
    code = "queue_full"
    outcome = "queue_full"
    dropped_reason = "rejected-saturated"
    is_overload = True


class Shed(Refusal):
    """The engines are nearly full, and the request's priority is negative."""

    status = 429
    error_type = "requests"
    code = "shed"
    outcome = "shed"
    dropped_reason = "rejected-saturated"
    is_overload = True


class QueueTimeout(Refusal):
    """The request has waited too long in the queue."""

    status = 503
    error_type = "service_unavailable_error"
    code = "queue_timeout"
    outcome = "queue_timeout"
    dropped_reason = "rejected-ttl-expired"
    is_overload = True


class ObjectiveUnmeetable(Refusal):
    """The first token is predicted to come later than the request's class is promised, and the class refuses such
    requests. Without ``retry_after_s``, idle engines would be too slow, too.
    """

    status = 503
    error_type = "service_unavailable_error"
    code = "objective_unmeetable"
    outcome = "objective_unmeetable"
    dropped_reason = "rejected-saturated"
    is_overload = True

    def __init__(self, message: str, *, retry_after_s: int | None, is_of_caller: bool = False) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_of_caller = is_of_caller
        if retry_after_s is None:
            # clients of OpenAI and Anthropic retry 503 by themselves
            self.headers = {"x-should-retry": "false"}


class EngineStarting(Refusal):
    """No engine of the model was ready before the request's time was over; one may be starting."""

    status = 503
    error_type = "service_unavailable_error"
    code = "engine_starting"
    outcome = "engine_starting"
    dropped_reason = "rejected-no-endpoints"


class AdapterUnavailable(Refusal):
    """The adapter is not loaded, and no engine could load it in time: all slots are in use, or none answers."""

    status = 503
    error_type = "service_unavailable_error"
    code = "adapter_unavailable"
    outcome = "adapter_unavailable"


class AdapterBroken(Refusal):
    """Engines were asked to load the adapter, and cannot."""

    status = 502
    code = "adapter_not_loadable"
    outcome = "adapter_not_loadable"


class InternalError(Refusal):
    """Our own code or a plugin failed. ``cause``: the exception, for the log of the shell."""

    code = "internal_error"
    outcome = "internal_error"
    dropped_reason = "rejected-internal"

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__("The gateway failed to decide this request; try again, and tell its operator.")
        self.__cause__ = cause


class _ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _ErrorDetail


def to_openai_body(refusal: Refusal) -> bytes:
    """The body that OpenAI's clients expect: ``{"error": {"message", "type", "param", "code"}}``."""
    detail = _ErrorDetail(refusal.message, refusal.error_type, refusal.param, refusal.code)
    return msgspec.json.encode(_ErrorBody(detail))


def to_plain_error_body(refusal: Refusal) -> bytes:
    """The body that clients of V1, V2 and TensorFlow Serving expect: ``{"error": "..."}``."""
    return msgspec.json.encode({"error": refusal.message})


class ErrorForm(enum.Enum):
    """The API whose form error objects have."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    TEXT = "text"
    GRPC = "grpc"


def grpc_status(refusal: Refusal) -> int:
    """The status of gRPC that a refusal has."""
    if refusal.grpc_status is not None:
        return refusal.grpc_status
    return GRPC_STATUSES.get(refusal.status, 3 if refusal.status < 500 else 13)


class _AnthropicDetails(msgspec.Struct, frozen=True):
    error_code: str


class _AnthropicDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: _AnthropicDetails | None = None


class _AnthropicBody(msgspec.Struct, frozen=True):
    error: _AnthropicDetail
    type: str = "error"


def anthropic_status(refusal: Refusal) -> int:
    """429 means there that a caller has exceeded its limit, so full engines have another status."""
    return OVERLOADED if refusal.is_overload else refusal.status


def to_anthropic_body(refusal: Refusal) -> bytes:
    """The body that Anthropic's clients expect: ``{"type": "error", "error": {"type", "message", "details"}}``."""
    details = None if refusal.code is None else _AnthropicDetails(refusal.code)
    status = anthropic_status(refusal)
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(_AnthropicBody(_AnthropicDetail(kind, refusal.message, details)))
