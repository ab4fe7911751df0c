# SPDX-License-Identifier: Apache-2.0
"""Where a stream comes from: what our own bundle's Envoy says of it in gRPC's metadata, which clients cannot write."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec

from extproc.protocol import BUNDLE_MARK, LISTENER_KEY, SERVER_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable


class Origin(msgspec.Struct, frozen=True):
    """``is_bundle``: our own bundle asks. ``server``: the ModelServer ``namespace/name`` that an HTTPRoute has chosen.
    ``listener``: the name of the listener that the client asked.
    """

    is_bundle: bool = False
    server: str | None = None
    listener: str | None = None


UNKNOWN = Origin()


def read_origin(metadata: Iterable[tuple[str, str | bytes]]) -> Origin:
    """What the metadata of a stream say; of gateways other than our bundle, nothing is believed."""
    said = {name: value for name, value in metadata if isinstance(value, str)}
    if BUNDLE_MARK not in said:
        return UNKNOWN
    server, listener = said.get(SERVER_KEY), said.get(LISTENER_KEY)
    return Origin(
        is_bundle=True,
        server=None if server is None else unquote(server),
        listener=None if listener is None else unquote(listener),
    )
