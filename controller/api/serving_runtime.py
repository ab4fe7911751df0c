# SPDX-License-Identifier: Apache-2.0
"""ServingRuntime and ClusterServingRuntime: presets that say how an engine is started."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from controller.api.common import EnvVar, ObjectMetadata
from controller.api.engine import Connector, Engine, EngineConfig
from controller.api.statuses import Status
from extproc.api.spec import Metadata, Name, NonEmpty, Port, Rule, Spec


class SupportedFormat(Spec, frozen=True):
    """A format of weights that the engine reads. ``name``: of the format. ``version``: the only one, if it matters.
    ``auto_select``: Models of this format get this runtime without naming it or its engine. ``priority``: among
    runtimes of the same format, the highest is chosen.
    """

    name: NonEmpty
    version: NonEmpty | None = None
    auto_select: bool = False
    priority: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


class Arguments(Spec, frozen=True):
    """Words of the command line and environment that follow from settings.

    ``when``: settings by name, and the value that each must have; ``*`` is any value. All of them must hold. ``args``
    and ``env``: what is added then; ``{name}`` is replaced by a setting, and ``$(NAME)`` by Kubernetes.
    """

    CEL: ClassVar = (Rule("has(self.args) || has(self.env)", "write args, env or both"),)

    when: Annotated[dict[str, str], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    args: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=32)] = ()


class RuntimeAgent(Spec, frozen=True):
    """The sidecar that tells readiness, drains and loads adapters. ``enabled``: whether there is one. ``dialect``: how
    the engine is spoken to. ``args``: further arguments of ``attache agent``.
    """

    enabled: bool = True
    dialect: Literal["vLLM", "SGLang", "TensorRT-LLM", "Triton", "MLServer", "OpenAI"] = "OpenAI"
    args: Annotated[tuple[str, ...], msgspec.Meta(max_length=32)] = ()


class ServingRuntimeSpec(Spec, frozen=True):
    """How a kind of engine is started.

    ``engine``: its family. ``supports``: formats of weights. ``disabled``: no Model gets it. ``metrics``: whose
    metrics' names it uses; nothing is read from an engine without. ``port``: where it listens. ``config``: the lowest
    layer of Models' ``config``. ``arguments``: what typed fields become on the command line, in this order.
    ``connectors``: how it can move KV caches between prefill and decode; none, and it cannot. ``multi_node``: one
    engine can span pods.
    ``adapters``: it can load LoRA adapters. ``accelerator``: the resource that is asked for by degree of parallelism,
    such as ``nvidia.com/gpu``. ``agent``: the sidecar. ``metadata``: of pods. ``pod``: their PodSpec; the engine's
    container is called ``engine``. ``spot_pod``: merged into it for spot backends.
    """

    engine: Engine
    supports: Annotated[tuple[SupportedFormat, ...], msgspec.Meta(max_length=64)] = ()
    disabled: bool = False
    metrics: Literal["vLLM", "SGLang", "TensorRT-LLM"] | None = None
    port: Port = 8000
    config: EngineConfig = EngineConfig()
    arguments: Annotated[tuple[Arguments, ...], msgspec.Meta(max_length=128)] = ()
    connectors: Annotated[tuple[Connector, ...], msgspec.Meta(max_length=8)] = ()
    multi_node: bool = False
    adapters: bool = False
    accelerator: NonEmpty | None = None
    agent: RuntimeAgent = RuntimeAgent()
    metadata: ObjectMetadata = ObjectMetadata()
    pod: dict[str, Any] = msgspec.field(default_factory=dict)
    spot_pod: dict[str, Any] = msgspec.field(default_factory=dict)


class ServingRuntimeStatus(Status, frozen=True):
    """A runtime says nothing of itself; Models say which they use. ``conditions``: none."""


class ServingRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A ServingRuntime object: a preset for its namespace."""

    metadata: Metadata
    spec: ServingRuntimeSpec
    status: ServingRuntimeStatus = ServingRuntimeStatus()


class ClusterMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes object metadata of what has no namespace."""

    name: Name


class ClusterServingRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A ClusterServingRuntime object: a preset for all namespaces."""

    metadata: ClusterMetadata
    spec: ServingRuntimeSpec
    status: ServingRuntimeStatus = ServingRuntimeStatus()
