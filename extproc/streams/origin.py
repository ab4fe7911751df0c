# SPDX-License-Identifier: Apache-2.0
"""Where a stream comes from: what our own bundle's Envoy says of it in gRPC's metadata, which clients cannot write."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from extproc.protocol import BUNDLE_MARK, HTTP_ROUTE_KEY, LISTENER_KEY, SERVER_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable


class Origin(msgspec.Struct, frozen=True):
    """What is not known is empty. ``listener``: the name of the listener that the client asked. ``http_route`` and
    ``server``: the HTTPRoute that took the request, and the ModelServer that it has chosen, ``namespace/name``.
    """

    listener: str = ""
    http_route: str = ""
    server: str = ""


UNKNOWN = Origin()


def read_origin(metadata: Iterable[tuple[str, str | bytes]]) -> Origin:
    """What the metadata of a stream say; of gateways other than our bundle, nothing is believed."""
    said = {name: value for name, value in metadata if isinstance(value, str)}
    if BUNDLE_MARK not in said:
        return UNKNOWN
    return Origin(*(unquote(said.get(key, "")) for key in (LISTENER_KEY, HTTP_ROUTE_KEY, SERVER_KEY)))
