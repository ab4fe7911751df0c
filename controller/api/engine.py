# SPDX-License-Identifier: Apache-2.0
"""How an engine is started, in typed fields: what presets, templates and Models say in layers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from controller.api.common import EnvVar, Layered
from extproc.api.quantities import Duration
from extproc.api.spec import NonEmpty, keyed_by

Engine = Literal["vLLM", "SGLang", "TensorRT-LLM", "Triton", "MLServer", "OpenAI", "Custom"]
Connector = Literal["NIXL", "LMCache", "Mooncake"]
_Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=200)]


class Parallelism(Layered, frozen=True):
    """How an engine is spread over GPUs. ``tensor``, ``pipeline`` and ``data``: degrees. ``expert``: experts are spread
    instead of copied.
    """

    tensor: _Degree = 1
    pipeline: _Degree = 1
    data: _Degree = 1
    expert: bool = False


class LoraLimits(Layered, frozen=True):
    """``max_loaded``: adapters in one batch. ``max_cached``: adapters in the host's memory. ``max_rank``: the highest
    rank. What is left out is the engine's default.
    """

    max_loaded: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    max_cached: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    max_rank: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None


class EngineConfig(Layered, frozen=True):
    """How an engine is started; what is left out is the runtime's or the engine's default.

    ``image``: of the engine. ``command``: instead of the image's entry point. ``parallelism``: over GPUs. ``nodes``:
    pods of one engine, the first of which commands the others; its GPUs are shared out evenly. ``max_length``: of
    prompt and answer, in tokens. ``prefix_caching``: prompts' beginnings are kept. ``kv_events``: the engine publishes
    what its cache holds. ``prompt_token_details``: answers tell cached tokens. ``lora``: limits of adapters. ``args``:
    further arguments, after those of the runtime. ``env``: further environment. ``resources``: of the engine's
    container.
    ``drain_timeout``: how long running requests have to end before a pod is deleted. ``pod``: further fields of the
    PodSpec, merged as Kubernetes' strategic merge does; the engine's container is called ``engine``.
    """

    image: NonEmpty | None = None
    command: _Words | None = None
    parallelism: Parallelism = Parallelism()
    nodes: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    max_length: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None = None
    prefix_caching: bool | None = None
    kv_events: bool = False
    prompt_token_details: bool = False
    lora: LoraLimits = LoraLimits()
    args: _Words = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=200, extra_json_schema=keyed_by("name"))] = ()
    resources: dict[str, Any] | None = None
    drain_timeout: Duration = Duration("5m")
    pod: dict[str, Any] = msgspec.field(default_factory=dict)
