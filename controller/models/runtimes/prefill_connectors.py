# SPDX-License-Identifier: Apache-2.0
"""Who requests the prefill of engines in two roles: the gateway where extproc has the connector, else a sidecar."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.api.model import Disaggregation
    from controller.api.serving_runtime import Connector, Engine
    from extproc.api.model_server import Connector as OwnConnector

# The connectors of extproc's own leg. SGLang's contract is one with every transfer backend. TensorRT-LLM's 1.0.0, the
# image of our preset, refuses the disagg_request_id of extproc's context_first.
OWN_LEGS: Final[Mapping[tuple[Engine, Connector], OwnConnector]] = MappingProxyType(
    {
        ("vLLM", "NIXL"): "NixlConnector",
        ("vLLM", "LMCache"): "LMCacheConnectorV1",
        ("vLLM", "Mooncake"): "MooncakeConnector",
        ("SGLang", "NIXL"): "bootstrap_room",
        ("SGLang", "Mooncake"): "bootstrap_room",
    }
)


def gateway_connector(engine: Engine, wanted: Disaggregation) -> OwnConnector | None:
    """The connector by which the gateway requests prefills; None: a sidecar does."""
    return None if wanted.leg == "Sidecar" else OWN_LEGS.get((engine, wanted.connector))


def why_sidecar_needed(engine: Engine, wanted: Disaggregation) -> str:
    """Why a sidecar is needed that nobody has asked for; empty where none is."""
    if wanted.leg == "Sidecar" or gateway_connector(engine, wanted) is not None:
        return ""
    return f"extproc requests no prefills of {engine} with {wanted.connector} yet"
