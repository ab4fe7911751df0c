# SPDX-License-Identifier: Apache-2.0
"""What of a configuration cannot be served for want of its certificates or keys; the rest is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controller.bundle.envoy.secrets import engine_secrets, listener_secrets
from extproc.api.connection import EngineConnection
from extproc.api.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.bundle.envoy.secrets import SecretSource
    from extproc.api.errors import Mistake
    from extproc.api.model_server import ModelServer
    from extproc.api.snapshot import Snapshot

_NO_CONNECTION: Final = EngineConnection()


def without(snapshot: Snapshot, unusable: Mapping[SecretSource, Mistake]) -> Snapshot:
    """``snapshot`` without the listeners that lack one of the secrets ``unusable``, and without the endpoints of
    servers that do: requests to those are answered 503, as nothing may be sent to their engines in another way.

    Raises ConfigInvalid if no listener is left: without any, Envoy would have the plain one of ``listen``.
    """
    if not unusable:
        return snapshot
    named = snapshot.gateway.listeners
    listeners = tuple(one for one in named if unusable.keys().isdisjoint(listener_secrets(one)))
    if named and not listeners:
        raise ConfigInvalid(list(unusable.values()))
    servers = tuple(
        one if unusable.keys().isdisjoint(engine_secrets(one.spec.connection)) else _unconnected(one)
        for one in snapshot.servers
    )
    gateway = snapshot.gateway
    if listeners != named:
        gateway = msgspec.structs.replace(gateway, listeners=listeners)
    return msgspec.structs.replace(snapshot, gateway=gateway, servers=servers)


def _unconnected(server: ModelServer) -> ModelServer:
    spec = msgspec.structs.replace(server.spec, listed=(), connection=_NO_CONNECTION)
    return msgspec.structs.replace(server, spec=spec)
