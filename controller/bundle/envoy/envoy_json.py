# SPDX-License-Identifier: Apache-2.0
"""Helpers for Envoy's configuration: durations, addresses, extensions, JSON."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import xxhash
from envoy_data_plane.envoy.config.core.v3 import Address, Pipe, SocketAddress, TypedExtensionConfig
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter

from controller.bundle.envoy.plain import Packed, plain
from extproc.api.validation import parse_target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from betterproto2 import Message


def typed(name: str, message: Message) -> TypedExtensionConfig:
    """An extension called ``name`` with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=Packed(message))


def http_filter(name: str, message: Message) -> HttpFilter:
    """An HTTP filter called ``name`` with its configuration."""
    return HttpFilter(name=name, typed_config=Packed(message))


def seconds(value: float) -> timedelta:
    """Envoy's durations are timedeltas here and strings such as ``0.250s`` in JSON."""
    return timedelta(seconds=value)


def address(text: str) -> Address:
    """``ip:port``, ``name:port`` or ``unix:path``."""
    if text.startswith("unix:"):
        return Address(pipe=Pipe(path=text.removeprefix("unix:")))
    target = parse_target(text)
    return Address(socket_address=SocketAddress(address=target.host, port_value=target.port))


def to_json(message: Message) -> str:
    """A whole message as a file."""
    return json.dumps(to_plain(message), indent=1) + "\n"


def to_plain(message: Message) -> dict[str, object]:
    """A message as plain JSON data."""
    found: dict[str, object] = plain(message)
    return found


def to_resource(message: Message) -> dict[str, object]:
    """The same with its type, as a resource of xDS."""
    return to_plain(Packed(message))


def resources_file(resources: Sequence[Mapping[str, object]]) -> str:
    """A file of xDS: a DiscoveryResponse with ``resources``, its version a digest of them."""
    version = xxhash.xxh3_64_hexdigest(json.dumps(resources).encode())
    # json indents in Python, which takes a second for some hundred routes
    text = msgspec.json.encode({"version_info": version, "resources": list(resources)})
    return msgspec.json.format(text, indent=1).decode() + "\n"
