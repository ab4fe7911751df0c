# SPDX-License-Identifier: Apache-2.0
"""Answers that Envoy gives by itself, as errors that clients of each API parse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLogFilter, ExtensionFilter
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.config.route.v3 import DirectResponseAction
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)
from envoy_data_plane.google.protobuf import NullValue, Struct, Value

from controller.bundle.envoy.envoy_json import PackedMessage
from extproc.wire_names import (
    ANTHROPIC_PATHS,
    ANTHROPIC_TYPES,
    ANTHROPIC_VERSION,
    DETAILS_PREFIX,
    GRPC_STATUS,
    GRPC_STATUSES,
    TEXT_ERROR_PATHS,
)

if TYPE_CHECKING:
    from extproc.api.authentication import Authentication
    from extproc.api.gateway_config import GatewayConfigSpec

# The client's API, by the same rule as ``error_form`` of extproc.
_HAS_ANTHROPIC_PATH: Final = " || ".join(f"request.path.contains('{path}')" for path in ANTHROPIC_PATHS)
_ASKS_ANTHROPIC: Final = f"('{ANTHROPIC_VERSION}' in request.headers || {_HAS_ANTHROPIC_PATH})"
_HAS_TEXT_PATH: Final = " || ".join(f"request.path.contains('{path}')" for path in TEXT_ERROR_PATHS)
_IS_CALL: Final = "'content-type' in request.headers && request.headers['content-type'].startsWith('application/grpc')"
_IS_DIRECT: Final = "response.code_details == 'direct_response'"
_NO_ENGINE: Final = "No engine could take the request; try again soon."
_OTHER: Final = "The gateway refuses the request. %LOCAL_REPLY_BODY%"
_INVALID: Final = "invalid_request_error"
# ``Retry-After`` while extproc or the last engine is unavailable. Envoy cannot estimate how long that lasts, and holds
# no request for a cluster without endpoints. Once extproc answers again, it holds requests and sends better values.
_RETRY_AFTER_S: Final = 5
# What load balancers get at the path of health.
_HEALTH: Final = {"ok": "ok\n", "failed": "Envoy drains, or needs extproc, which is away\n"}
_NO_KEY: Final = "The request has no API key, or none that is known; send one as 'authorization: Bearer KEY'."
_NO_JWT: Final = (
    "The request has no token, or one that is expired or not of this gateway's issuers; "
    "send a valid one as 'authorization: Bearer TOKEN'."
)
_NO_CERTIFICATE: Final = "The connection has no client certificate, by which this gateway knows callers; show one."
_NO_NAME: Final = "The token does not say as text whose it is; ask its issuer for one with the claims of this gateway."
_NO_TENANT: Final = "The client certificate has no name by which this gateway knows tenants; ask for one that has."


class _Error(msgspec.Struct, frozen=True):
    """Of Envoy's own. ``condition``: in CEL. ``kind`` and ``code``: of OpenAI's object. ``status``: what it has, or
    gets if it ``changes_status``.
    """

    condition: str
    message: str
    kind: str
    code: str
    status: int
    changes_status: bool = False
    retry_after_s: int | None = None


def _about_callers(authentication: Authentication | None) -> tuple[str, str]:
    """Replies to callers without a key, and to identified callers without rights."""
    if authentication is None or authentication.api_keys or authentication.virtual_keys is not None:
        return _NO_KEY, _NO_NAME
    if authentication.client_certificates:
        return _NO_CERTIFICATE, _NO_TENANT
    return _NO_JWT if authentication.jwt else _NO_KEY, _NO_NAME


# What routes answer to calls by themselves, and the status of gRPC where it is not that of the HTTP status: 12 is
# UNIMPLEMENTED.
_DIRECT_TO_CALLS: Final = (
    (_Error(f"{_IS_DIRECT} && response.code == 404", "No such service and method is served here.", "", "", 404), 12),
    (_Error(f"{_IS_DIRECT} && response.code == 503", "%LOCAL_REPLY_BODY%", "", "", 503), None),
)


def local_replies(gateway: GatewayConfigSpec, *, model_paths: bool = False, calls: bool = False) -> LocalReplyConfig:
    """The first condition that holds decides. Answers of extproc and of the bundle itself are sent unchanged.
    ``model_paths``: some paths name the model; errors under them are texts. ``calls``: some requests are calls of gRPC.
    """
    errors = _errors(gateway)
    return LocalReplyConfig(
        mappers=[
            *(_plain(f"response.code_details.startsWith('health_check_{one}')", text) for one, text in _HEALTH.items()),
            ResponseMapper(
                filter=log_filter_when(
                    f"response.code_details.startsWith('{DETAILS_PREFIX}') || "
                    # the script that checks keys refuses without a body
                    "(response.code_details == 'lua_response' && response.code != 401)"
                ),
                body_format_override=SubstitutionFormatString(
                    text_format_source=DataSource(inline_string="%LOCAL_REPLY_BODY%"), content_type="application/json"
                ),
            ),
            *(_of_call(error, status) for error, status in _DIRECT_TO_CALLS if calls),
            *map(_of_call, errors if calls else ()),
            *map(_text, errors if model_paths else ()),
            # a route's own answer has a whole error object as its body
            _anthropic(_Error(f"{_IS_DIRECT} && response.code >= 500", _NO_ENGINE, "", "", 500)),
            *map(_anthropic, errors),
            # The parameter changes nothing; the Gateway API's conformance suite needs it: where the type is
            # application/json alone, it parses the body even of the answer to a HEAD, which has none.
            ResponseMapper(
                filter=log_filter_when(_IS_DIRECT),
                body_format_override=SubstitutionFormatString(
                    text_format_source=DataSource(inline_string="%LOCAL_REPLY_BODY%"),
                    content_type="application/json; charset=utf-8",
                ),
            ),
            *map(_openai, errors),
            _anthropic(_Error(f"!({_IS_DIRECT}) && response.code >= 400", _OTHER, "", "", 400)),
        ],
        # some have no body
        body_format=_error_object(_OTHER, _INVALID, "%RESPONSE_CODE_DETAILS%"),
    )


def _errors(gateway: GatewayConfigSpec) -> tuple[_Error, ...]:
    """Of Envoy itself."""
    too_large = (
        f"The request body is larger than the gateway takes ({gateway.max_body_size}); "
        "send a shorter prompt or ask for a higher maxBodySize."
    )
    no_key, no_name = _about_callers(gateway.authentication)
    no_path = "The path has an escaped slash or backslash, or cannot be normalized; write it plainly."
    no_route = "No model, or none that is served, was asked for; GET /v1/models lists those that are."
    no_upgrade = "No connection is upgraded here; send the request without the header 'upgrade'."
    no_picker = "The gateway cannot choose an engine at the moment; try again soon."
    too_late = "The engine did not finish in the time allowed; ask for a shorter answer or a higher timeout."
    return (
        _Error(
            "response.code_details == 'path_normalization_failed'", no_path, _INVALID, "path_normalization_failed", 400
        ),
        _Error("response.code == 401", no_key, _INVALID, "invalid_api_key", 401),
        _Error(
            "response.code_details.startsWith('rbac_access_denied')",
            no_name,
            "permission_error",
            "unnamed_caller",
            403,
        ),
        _Error(
            "response.code_details == 'upgrade_failed'", no_upgrade, _INVALID, "unknown_url", 404, changes_status=True
        ),
        _Error("response.code == 413", too_large, _INVALID, "request_too_large", 413),
        _Error("response.code == 404", no_route, _INVALID, "model_not_found", 404),
        # also where extproc did not answer in time
        _Error(
            "response.code_details.startsWith('ext_proc')",
            no_picker,
            "service_unavailable_error",
            "no_picker",
            503,
            changes_status=True,
            retry_after_s=_RETRY_AFTER_S,
        ),
        _Error(
            "response.code == 503",
            _NO_ENGINE,
            "service_unavailable_error",
            "no_engine",
            503,
            retry_after_s=_RETRY_AFTER_S,
        ),
        _Error("response.code == 504", too_late, "timeout_error", "timeout", 504),
        _Error("response.code >= 500", "%LOCAL_REPLY_BODY%", "server_error", "%RESPONSE_CODE_DETAILS%", 500),
    )


def _plain(condition: str, text: str) -> ResponseMapper:
    body = SubstitutionFormatString(text_format_source=DataSource(inline_string=text), content_type="text/plain")
    return ResponseMapper(filter=log_filter_when(condition), body_format_override=body)


def _openai(error: _Error) -> ResponseMapper:
    return ResponseMapper(
        filter=log_filter_when(error.condition),
        body_format_override=_error_object(error.message, error.kind, error.code),
        status_code=error.status if error.changes_status else None,
        headers_to_add=_headers(error),
    )


def _anthropic(error: _Error) -> ResponseMapper:
    """The same for clients of Anthropic's API."""
    told = Struct(
        fields={
            "type": Value(string_value=ANTHROPIC_TYPES[error.status]),
            "message": Value(string_value=error.message),
        }
    )
    body = Struct(fields={"type": Value(string_value="error"), "error": Value(struct_value=told)})
    return ResponseMapper(
        filter=log_filter_when(f"({error.condition}) && {_ASKS_ANTHROPIC}"),
        body_format_override=SubstitutionFormatString(json_format=body),
        status_code=error.status if error.changes_status else None,
        headers_to_add=_headers(error),
    )


def _text(error: _Error) -> ResponseMapper:
    """The same for clients of V1, V2 and TensorFlow Serving."""
    return ResponseMapper(
        filter=log_filter_when(f"({error.condition}) && ({_HAS_TEXT_PATH})"),
        body_format_override=SubstitutionFormatString(
            json_format=Struct(fields={"error": Value(string_value=error.message)})
        ),
        status_code=error.status if error.changes_status else None,
        headers_to_add=_headers(error),
    )


def _of_call(error: _Error, status: int | None = None) -> ResponseMapper:
    """The same for gRPC's clients: Envoy writes the text as grpc-message, and no body. ``status``: of gRPC, where it is
    not that of the HTTP status.
    """
    written = HeaderValue(key=GRPC_STATUS, value=str(GRPC_STATUSES[error.status] if status is None else status))
    return ResponseMapper(
        filter=log_filter_when(f"({error.condition}) && {_IS_CALL}"),
        body_format_override=SubstitutionFormatString(
            text_format_source=DataSource(inline_string=error.message), content_type="text/plain"
        ),
        status_code=error.status if error.changes_status else None,
        headers_to_add=[*_headers(error), _only(written)],
    )


def _headers(error: _Error) -> list[HeaderValueOption]:
    if error.retry_after_s is None:
        return []
    return [_only(HeaderValue(key="retry-after", value=str(error.retry_after_s)))]


def _only(header: HeaderValue) -> HeaderValueOption:
    return HeaderValueOption(header=header, append_action=HeaderValueOptionHeaderAppendAction.ADD_IF_ABSENT)


def log_filter_when(condition: str) -> AccessLogFilter:
    """Where the condition holds, which is written in CEL."""
    return AccessLogFilter(
        extension_filter=ExtensionFilter(
            name="envoy.access_loggers.extension_filters.cel",
            typed_config=PackedMessage(ExpressionFilter(expression=condition)),
        )
    )


def _error_object(message: str, kind: str, code: str) -> SubstitutionFormatString:
    error = Struct(
        fields={
            "message": Value(string_value=message),
            "type": Value(string_value=kind),
            "param": Value(null_value=NullValue.NULL_VALUE),
            "code": Value(string_value=code),
        }
    )
    return SubstitutionFormatString(json_format=Struct(fields={"error": Value(struct_value=error)}))


def error_answer(status: int, message: str, kind: str, code: str) -> DirectResponseAction:
    """An error of OpenAI's form; the listener's local replies set its content type to JSON."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return DirectResponseAction(status=status, body=DataSource(inline_string=json.dumps({"error": error})))


def anthropic_error_answer(status: int, message: str) -> DirectResponseAction:
    """An error of Anthropic's form."""
    error = {"type": ANTHROPIC_TYPES[status], "message": message}
    body = json.dumps({"type": "error", "error": error})
    return DirectResponseAction(status=status, body=DataSource(inline_string=body))
