# SPDX-License-Identifier: Apache-2.0
"""Headers and metadata of ext_proc messages, and of gRPC streams, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar, overload
from urllib.parse import unquote

import msgspec

from extproc.core.request_record import RequestHead
from extproc.refusals import ErrorForm
from extproc.wire_names import (
    ANTHROPIC_PATHS,
    ANTHROPIC_VERSION,
    BUNDLE_MARK,
    CALL_ROOTS,
    DESTINATION,
    HTTP_ROUTE_KEY,
    LB_NAMESPACE,
    LISTENER_KEY,
    MIRROR_KEY,
    PATH_KEY,
    PATH_PREFIX_KEY,
    SERVED,
    SERVER_KEY,
    SUBSET,
    SUBSET_NAMESPACE,
    TEXT_ERROR_PATHS,
    TOKENS_NAMESPACE,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from extproc.streams.messages import HeaderValue, HttpHeaders, Metadata, ProcessingRequest
    from extproc.streams.messages import Struct as _Struct
    from extproc.streams.messages import Value as _Value

T = TypeVar("T")
# Claims whose text is a list of words.
# Of a number in a header.
_MOST_DIGITS: Final = 15
_WORDS: Final = frozenset({"scope", "scp"})
_ORIGIN_KEYS: Final = (LISTENER_KEY, HTTP_ROUTE_KEY, SERVER_KEY, PATH_KEY, PATH_PREFIX_KEY, MIRROR_KEY)


class StreamOrigin(msgspec.Struct, frozen=True):
    """An unknown value is empty. ``listener``: the name of the listener that received the request. ``http_route`` and
    ``server``: the HTTPRoute that took the request, and the ModelServer that it has chosen, ``namespace/name``.
    ``path``: what Envoy will write in place of the request's path, or of its beginning ``path_prefix``.
    ``mirror``: not empty for the listener that has copies of requests alone.
    """

    listener: str = ""
    http_route: str = ""
    server: str = ""
    path: str = ""
    path_prefix: str = ""
    mirror: str = ""

    def engine_path(self, path: str) -> str:
        """The path that the engine will read."""
        return self.path + path[len(self.path_prefix) :] if self.path_prefix else self.path or path


UNKNOWN = StreamOrigin()


def read_head(message: HttpHeaders, *, is_trusted: bool = False, origin: StreamOrigin = UNKNOWN) -> RequestHead:
    """A request's method, path as its engine will read it, and headers. ``is_trusted``: a gateway wrote those that
    identify the caller.
    """
    method = path = ""
    for header in message.headers.headers:
        key = header.key
        if key == ":path":
            path, _, _ = _value(header).partition("?")
        elif key == ":method":
            method = _value(header)
        else:
            continue
        # both are among the first, and reading a header costs as much as reading a field of the body
        if method and path:
            break
    return RequestHead(
        method,
        origin.engine_path(path),
        _Headers(message),
        not message.end_of_stream,
        is_trusted,
        listener=origin.listener,
        http_route=origin.http_route,
    )


def error_form(head: RequestHead | None) -> ErrorForm:
    """By the path, by the type that gRPC's clients send, or by the header that Anthropic's clients send wherever they
    ask for something else.
    """
    if head is None:
        return ErrorForm.OPENAI
    is_call = any(root in head.path for root in CALL_ROOTS)
    if is_call or head.headers.get("content-type", "").startswith("application/grpc"):
        return ErrorForm.GRPC
    is_anthropic = any(path in head.path for path in ANTHROPIC_PATHS) or ANTHROPIC_VERSION in head.headers
    if is_anthropic:
        return ErrorForm.ANTHROPIC
    return ErrorForm.TEXT if any(path in head.path for path in TEXT_ERROR_PATHS) else ErrorForm.OPENAI


def read_status(message: HttpHeaders) -> int:
    """The HTTP status of an answer; 0 if it has none."""
    for header in message.headers.headers:
        if header.key == ":status":
            text = _value(header)
            return int(text) if len(text) == 3 and text.isascii() and text.isdigit() else 0
    return 0


def read_header(message: HttpHeaders, name: str) -> str:
    """The first value of a header; empty if there is none."""
    return next((_value(one) for one in message.headers.headers if one.key == name), "")


def is_encoded(encoding: str) -> bool:
    """Whether a body with this ``content-encoding`` is compressed, or the like."""
    return encoding.lower() not in {"", "identity"}


def read_retry_after(text: str) -> float | None:
    """The seconds of a ``retry-after``, of which an engine may write anything; None: there are none.

    A date is not read: engines write seconds, and clocks differ.
    """
    return float(text) if len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else None


def read_endpoint_subset(message: ProcessingRequest) -> list[str] | None:
    """The endpoints that the gateway allows, which it writes as a list or as one string; None: it does not restrict
    them.
    """
    value = metadata_value(message.metadata_context, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values if one.string_value]
    return [part.strip() for part in value.string_value.split(",") if part.strip()]


def read_served_endpoint(message: ProcessingRequest) -> str:
    """The endpoint that answered, or an empty string if the gateway does not report it."""
    value = metadata_value(message.metadata_context, LB_NAMESPACE, SERVED)
    return value.string_value if value is not None else ""


def read_other_picker_endpoints(message: ProcessingRequest) -> str:
    """The endpoints that another picker has chosen, or an empty string if the gateway does not report it."""
    value = metadata_value(message.metadata_context, LB_NAMESPACE, DESTINATION)
    return value.string_value if value is not None else ""


def metadata_value(metadata: Metadata, namespace: str, key: str) -> _Value | None:
    """One value of dynamic metadata, or None if there is none."""
    # reading a missing key of a protobuf map adds it
    if namespace not in metadata.filter_metadata:
        return None
    return metadata.filter_metadata[namespace].fields.get(key)


def read_claims(message: ProcessingRequest, names: Collection[str]) -> dict[str, frozenset[str]]:
    """The claims called ``names`` of the caller's verified token, each with its values; claims of other types have
    none.

    Envoy writes the token where no client can, and its size is bounded by that of a request's headers.
    """
    metadata = message.metadata_context
    if TOKENS_NAMESPACE not in metadata.filter_metadata:
        return {}
    found: dict[str, set[str]] = {}
    for token in metadata.filter_metadata[TOKENS_NAMESPACE].fields.values():
        for name in names:
            value = _claim(token.struct_value, name)
            if value is not None:
                found.setdefault(name, set()).update(_texts(name, value))
    return {name: frozenset(values) for name, values in found.items()}


def _claim(token: _Struct, name: str) -> _Value | None:
    """By its whole name, as issuers use URLs with dots, or else step by step into objects."""
    if name in token.fields:
        return token.fields[name]
    *steps, last = name.split(".")
    for step in steps:
        if step not in token.fields:
            return None
        token = token.fields[step].struct_value
    return token.fields.get(last)


def _texts(name: str, value: _Value) -> Iterator[str]:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        yield from (one.string_value for one in value.list_value.values if one.WhichOneof("kind") == "string_value")
    elif kind == "string_value":
        # RFC 8693, section 4.2: scopes are words
        yield from value.string_value.split(" ") if name in _WORDS else (value.string_value,)
    elif kind == "bool_value":
        yield "true" if value.bool_value else "false"


class _Headers(Mapping[str, str]):
    """Names are read on first use, and values where they are asked for: most requests are decided without, and reading
    all costs as much as parsing the body.
    """

    __slots__ = ("_by_name", "_message")

    def __init__(self, message: HttpHeaders) -> None:
        self._message = message
        self._by_name: dict[str, HeaderValue] | None = None

    def __getitem__(self, name: str) -> str:
        return _value(self._all()[name])

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str) -> str: ...
    @overload
    def get(self, name: str, /, default: T) -> str | T: ...
    def get(self, name: str, /, default: object = None) -> object:
        """As of a dict. That of Mapping raises and catches an error for each name that is not there."""
        header = self._all().get(name)
        return default if header is None else _value(header)

    def _all(self) -> dict[str, HeaderValue]:
        if self._by_name is None:
            # Envoy writes names in lower case, other gateways as Go does: Content-Type
            self._by_name = {header.key.lower(): header for header in self._message.headers.headers}
        return self._by_name


def _value(header: HeaderValue) -> str:
    # Envoy does not check the encoding of header values; latin-1 reads any bytes, and ASCII as it is.
    raw = header.raw_value
    return raw.decode("latin-1") if raw else header.value


def read_origin(metadata: Iterable[tuple[str, str | bytes]]) -> StreamOrigin:
    """The origin in a stream's metadata; metadata of gateways other than our bundle are ignored."""
    values = {name: value for name, value in metadata if isinstance(value, str)}
    if BUNDLE_MARK not in values:
        return UNKNOWN
    return StreamOrigin(*(unquote(values.get(key, "")) for key in _ORIGIN_KEYS))
