# SPDX-License-Identifier: Apache-2.0
"""What a policy is given, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bench.virtual.observers import RequestObserver
from extproc.scheduling.picker import Picker


class EngineCalibration(msgspec.Struct, frozen=True):
    """What operators of some routers measure on an idle engine. ``block_size``: tokens of a KV block."""

    prefill_tokens_per_s: float
    decode_s_per_token: float
    block_size: int


class PolicySetup(msgspec.Struct, frozen=True):
    """A policy for one trial.

    ``observer``: follows the simulation for it. ``server``: further fields of its ModelServer.
    """

    picker: Picker
    observer: RequestObserver | None = None
    server: Mapping[str, Any] = {}
