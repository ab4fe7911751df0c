# SPDX-License-Identifier: Apache-2.0
"""Backend: servers that are no engines, for HTTPRoutes; extproc has no part in their requests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from extproc.api.spec import Metadata, NonEmpty, Spec


class BackendSpec(Spec, frozen=True):
    """Servers over which Envoy balances by itself. ``endpoints``: ``ip:port`` or ``name:port``; without any, requests
    are answered 503. ``protocol``: ``H2C`` is HTTP/2 without TLS, ``WebSocket`` lets connections be upgraded.
    ``unresolved``: the reference to it cannot be resolved; requests are answered 500, as the Gateway API says.
    """

    endpoints: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=10_000)] = ()
    protocol: Literal["HTTP", "H2C", "WebSocket"] = "HTTP"
    unresolved: bool = False


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A Backend document."""

    metadata: Metadata
    spec: BackendSpec
