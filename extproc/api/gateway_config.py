# SPDX-License-Identifier: Apache-2.0
"""GatewayConfig: how Envoy listens, and how it talks to extproc."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from extproc.api import patterns
from extproc.api.authentication import Authentication, Tenant
from extproc.api.client_fields import CacheIsolation
from extproc.api.http_route import Cors
from extproc.api.listeners import Listener
from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import Metadata, Spec, keyed_by


class GatewayConfigSpec(Spec, frozen=True):
    """How Envoy listens and how it talks to extproc. At most one such document in a directory. ``listen``: where
    clients connect. ``admin``: Envoy's administration, for this machine only. ``extproc``: where extproc listens,
    ``ip:port``, ``name:port`` or ``unix:/path``. ``max_body_size``: the largest request. ``access_log_flush``: how
    long Envoy may keep outcomes back.
    """

    listen: str = "127.0.0.1:8080"
    # Several listeners, with host names and TLS; ``listen`` then has no effect.
    listeners: Annotated[tuple[Listener, ...], msgspec.Meta(max_length=256, extra_json_schema=keyed_by("name"))] = ()
    admin: str = "127.0.0.1:9901"
    extproc: str = "127.0.0.1:9002"
    # As many processes as `extproc --workers` starts, on consecutive ports (or unix:PATH.0, unix:PATH.1, ...).
    extproc_workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Open: without extproc, Envoy balances over the engines by itself. Close: it answers 503. If left out: Close where
    # there are rateLimits, rules by tenant, caches that tenants do not share, or models of tenants or keys, which Open
    # would undo; else Open.
    failure_mode: Literal["Open", "Close"] | None = None
    # The longest that Envoy waits for extproc's answer to one message; the longest hold is added for requests that are
    # held.
    message_timeout: Duration = Duration("5s")
    max_body_size: ByteSize = ByteSize("16Mi")
    # Envoy's memory: near this, it resets the streams that hold most of it, then takes no more requests, then no
    # connections.
    max_heap: ByteSize = ByteSize("2Gi")
    # The most that clients may have open at a time; more are closed at once.
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 20_000
    # How long a client may take to send a whole request; the longest hold is added.
    request_timeout: Duration = Duration("2m")
    access_log_flush: Duration = Duration("200ms")
    # Trusted: only gateways of our own can connect, which write tenants, users and objectives into headers and remove
    # their clients'. Untrusted: such headers are removed here.
    clients: Literal["Untrusted", "Trusted"] = "Untrusted"
    # How Envoy identifies callers; without it everybody is the tenant "anonymous".
    authentication: Authentication | None = None
    # Which scripts of other origins may use the gateway; Envoy answers their preflight requests by itself.
    cors: Cors | None = None
    # Tenants that may not use every model.
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=10_000)] = ()
    # Hidden: no answer tells how many tokens were found in caches, which tell what others have asked.
    cached_tokens: Literal["Shown", "Hidden"] = "Shown"
    # A header of answers that names the engine's address, for debugging; without it, clients do not learn it.
    served_header: Annotated[str, msgspec.Meta(pattern=patterns.HEADER, max_length=64)] | None = None
    # Whose prompts share a prefix cache: of one Tenant, of one User, under one value of a request header that clients
    # cannot choose (Header:NAME), or everybody's (Shared). Tenant is the default where callers are authenticated, else
    # Shared.
    cache_isolation: CacheIsolation | None = None
    # The key of cache salts, for all replicas of extproc. Without it, a tenant's API keys are its key.
    cache_secret: Annotated[str, msgspec.Meta(min_length=16, max_length=512)] | None = None


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A GatewayConfig document."""

    metadata: Metadata
    spec: GatewayConfigSpec
