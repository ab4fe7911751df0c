# SPDX-License-Identifier: Apache-2.0
"""Fields of clients' requests that a ModelServer may allow, and whose prompts may share a cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from extproc.api import patterns

CacheIsolation = Annotated[str, msgspec.Meta(pattern=patterns.ISOLATION)]
# Whoever sets one of these makes an engine connect somewhere, or chooses where a request runs, with which adapter
# (beside ``model``, which alone is checked) or in whose session.
SteeringField = Literal[
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
    "lora_path",
    "lora_request",
    "session_params",
]
# These affect a request's order, name or cache only.
MarkingField = Literal["priority", "request_id", "rid", "extra_key", "cache_salt"]
# All fields by which gateways steer engines.
InternalField = Literal[SteeringField, MarkingField]
