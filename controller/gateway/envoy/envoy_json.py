# SPDX-License-Identifier: Apache-2.0
"""Helpers for Envoy's configuration: durations, addresses, extensions, JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import msgspec
import xxhash
from envoy_data_plane.envoy.config.core.v3 import Address, Pipe, SocketAddress, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any

from extproc.config.validation import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from betterproto2 import Casing, Message


def _as_it_is(name: str) -> str:
    """Envoy's own field names: the default camel case breaks those with digits, such as consecutive_5xx."""
    return name


# the parameter is annotated as an enum of callables; any callable will do
_PROTO_NAMES = cast("Casing", _as_it_is)


def typed(name: str, message: Message) -> TypedExtensionConfig:
    """An extension called ``name`` with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=Any.pack(message))


def http_filter(name: str, message: Message) -> HttpFilter:
    """An HTTP filter called ``name`` with its configuration."""
    return HttpFilter(name=name, typed_config=Any.pack(message))


def seconds(value: float) -> timedelta:
    """Envoy's durations are timedeltas here and strings such as ``0.250s`` in JSON."""
    return timedelta(seconds=value)


def address(text: str) -> Address:
    """``ip:port`` or ``unix:path``."""
    if text.startswith("unix:"):
        return Address(pipe=Pipe(path=text.removeprefix("unix:")))
    ip, port = parse_address(text)
    return Address(socket_address=SocketAddress(address=ip, port_value=port))


def to_json(message: Message) -> str:
    """A whole message as a file."""
    return json.dumps(to_plain(message), indent=1) + "\n"


def to_plain(message: Message) -> dict[str, object]:
    """A message as plain JSON data."""
    plain: dict[str, object] = message.to_dict(casing=_PROTO_NAMES)
    return plain


def to_resource(message: Message) -> dict[str, object]:
    """The same with its type, as a resource of xDS."""
    return to_plain(Any.pack(message))


def resources_file(resources: Sequence[Mapping[str, object]]) -> str:
    """A file of xDS: a DiscoveryResponse with ``resources``, its version a digest of them."""
    version = xxhash.xxh3_64_hexdigest(json.dumps(resources).encode())
    # json indents in Python, which takes a second for some hundred routes
    text = msgspec.json.encode({"version_info": version, "resources": list(resources)})
    return msgspec.json.format(text, indent=1).decode() + "\n"
