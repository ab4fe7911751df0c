# SPDX-License-Identifier: Apache-2.0
"""What Gateways must know of GatewayConfigs: whether they can be used, and what they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.gateway_config import GatewayConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.gateway.compile.sources import Source


class GatewayConfigs:
    """``sources``: every GatewayConfig by key; it may change."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def problem(self, key: str) -> str:
        """Why a GatewayConfig cannot be used; empty if it can."""
        config = self._sources.get(key)
        if config is None:
            return "there is no such GatewayConfig"
        if config.mistakes or not isinstance(config.decoded, GatewayConfig):
            return config.complaint()
        return ""

    def needs_certificates(self, key: str | None) -> bool:
        """Whether callers are identified by client certificates."""
        config = self._sources.get(key or "")
        if config is None or not isinstance(config.decoded, GatewayConfig):
            return False
        authentication = config.decoded.spec.authentication
        return authentication is not None and bool(authentication.client_certificates)
