# SPDX-License-Identifier: Apache-2.0
"""Typed fields as settings by name, from which presets make the command line.

A setting that is not set, or has the value that changes nothing (a degree of 1), is not there.

    name, model, port            the served name, the directory of weights, the engine's port; always there
    format, formatVersion        of the weights
    tensor, pipeline, data       degrees of parallelism above 1
    expert                       true
    gpus                         GPUs of one pod, if the preset has an accelerator
    nodes, node                  pods of one engine, if more than 1; and this one: entry or worker
    maxLength                    tokens of prompt and answer
    prefixCaching                true or false
    kvEvents, promptTokenDetails true
    lora                         true, where there are adapters
    maxLoras, maxCachedLoras, maxLoraRank
    connector, role              of prefill and decode: NIXL, LMCache or Mooncake; prefill or decode
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from controller.api.engine import Connector, EngineConfig
from controller.api.model import ModelFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_PATH: Final = "/mnt/models"
NAMES: Final = frozenset(
    {
        *("name", "model", "port", "format", "formatVersion", "tensor", "pipeline", "data", "expert", "gpus"),
        *("nodes", "node", "maxLength", "prefixCaching", "kvEvents", "promptTokenDetails"),
        *("lora", "maxLoras", "maxCachedLoras", "maxLoraRank", "connector", "role"),
    }
)
Node = Literal["entry", "worker"]


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is started for. ``served_name``: of the model. ``path`` and ``format``: of its weights. ``port``:
    where it listens. ``config``: all layers merged. ``role`` and ``connector``: of prefill and decode.
    ``has_adapters``: LoRA adapters are loaded into it.
    """

    served_name: str
    path: str
    format: ModelFormat
    port: int
    config: EngineConfig
    role: Literal["prefill", "decode"] | None = None
    connector: Connector | None = None
    has_adapters: bool = False


def gpus_of(config: EngineConfig) -> int | None:
    """GPUs of one pod; None if they cannot be shared out evenly."""
    total = config.parallelism.tensor * config.parallelism.pipeline * config.parallelism.data
    each, rest = divmod(total, config.nodes)
    return None if rest else each


def settings_of(engine: Engine, node: Node) -> Mapping[str, str]:
    """By name."""
    config, spread, lora = engine.config, engine.config.parallelism, engine.config.lora
    degrees = {"tensor": spread.tensor, "pipeline": spread.pipeline, "data": spread.data, "nodes": config.nodes}
    numbers = {
        "port": engine.port,
        "gpus": gpus_of(config),
        **{name: degree for name, degree in degrees.items() if degree > 1},
        "maxLength": config.max_length,
        "maxLoras": lora.max_loaded,
        "maxCachedLoras": lora.max_cached,
        "maxLoraRank": lora.max_rank,
    }
    switches = {
        "expert": spread.expert or None,
        "prefixCaching": config.prefix_caching,
        "kvEvents": config.kv_events or None,
        "promptTokenDetails": config.prompt_token_details or None,
        "lora": engine.has_adapters or None,
    }
    texts = {
        "name": engine.served_name,
        "model": engine.path,
        "format": engine.format.name,
        "formatVersion": engine.format.version,
        "node": node if config.nodes > 1 else None,
        "connector": engine.connector,
        "role": engine.role,
    }
    found = {name: str(number) for name, number in numbers.items() if number is not None}
    found |= {name: "true" if value else "false" for name, value in switches.items() if value is not None}
    return {**found, **{name: text for name, text in texts.items() if text is not None}}
