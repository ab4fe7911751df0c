"""Headers and metadata of ext_proc messages as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from extproc.core.types import Head
from extproc.protocol import LB_NAMESPACE, SERVED, SUBSET, SUBSET_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.streams.messages import HeaderValue, HttpHeaders, Metadata, ProcessingRequest
    from extproc.streams.messages import Value as _Value


def read_head(message: HttpHeaders, *, is_trusted: bool = False) -> Head:
    """A request's method, path and headers; ``is_trusted``: a gateway vouches for what they say of the caller."""
    method = path = ""
    for header in message.headers.headers:
        if header.key == ":path":
            path, _, _ = _value(header).partition("?")
        elif header.key == ":method":
            method = _value(header)
    return Head(method, path, _Headers(message), has_body=not message.end_of_stream, is_trusted=is_trusted)


def read_status(message: HttpHeaders) -> int:
    """An answer's status; 0 if it has none."""
    for header in message.headers.headers:
        if header.key == ":status":
            text = _value(header)
            return int(text) if text.isdigit() else 0
    return 0


def read_subset(message: ProcessingRequest) -> list[str] | None:
    """The endpoints that the gateway allows, as a list or in one string; None: it does not say."""
    value = metadata_value(message.metadata_context, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "list_value":
        return [one.string_value for one in value.list_value.values if one.string_value]
    return [part.strip() for part in value.string_value.split(",") if part.strip()]


def read_served(message: ProcessingRequest) -> str:
    """The endpoint that answered, as the gateway says; empty: it does not."""
    value = metadata_value(message.metadata_context, LB_NAMESPACE, SERVED)
    return value.string_value if value is not None else ""


def metadata_value(metadata: Metadata, namespace: str, key: str) -> _Value | None:
    """One value of dynamic metadata, if it is there."""
    # reading a missing key of a protobuf map would add it
    if namespace not in metadata.filter_metadata:
        return None
    return metadata.filter_metadata[namespace].fields.get(key)


class _Headers(Mapping[str, str]):
    """Decoded when a route has a condition on one: most have none, and decoding all costs as much as parsing the body."""

    def __init__(self, message: HttpHeaders) -> None:
        self._message = message
        self._decoded: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, str]:
        if self._decoded is None:
            self._decoded = {header.key: _value(header) for header in self._message.headers.headers}
        return self._decoded


def _value(header: HeaderValue) -> str:
    # Header values are bytes to Envoy; those that conditions are written for are ASCII.
    return header.raw_value.decode("latin-1") if header.raw_value else header.value
