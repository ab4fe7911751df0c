# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: how an engine is started. ServingRuntime and ClusterServingRuntime: presets of it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec

from controller.api.shared_types import EnvVar, LayeredSpec, PodMetadata, Words
from controller.api.statuses import CommonStatus
from extproc.api import spec as patterns
from extproc.api.model_server import EndpointProtocol
from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import CelRule, Metadata, Name, NonEmpty, Port, Spec, list_map_keys
from extproc.wire_names import GRPC_PROTOCOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

Engine = Literal[
    "vLLM", "SGLang", "TensorRT-LLM", "Triton", "MLServer", "KServe", "TensorFlow", "TorchServe", "OpenAI", "Custom"
]
# Of a runtime that names none; other engines have OpenAI's API.
_PROTOCOLS: Final[Mapping[Engine, tuple[EndpointProtocol, ...]]] = MappingProxyType(
    {
        "Triton": ("V2",),
        "MLServer": ("V2",),
        "KServe": ("V1", "V2"),
        "TensorFlow": ("TensorFlow", "V1"),
        "TorchServe": ("V1", "V2"),
    }
)
Connector = Literal["NIXL", "LMCache", "Mooncake"]
_Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Parallelism(LayeredSpec, frozen=True):
    """How an engine is spread over GPUs. ``tensor``, ``pipeline`` and ``data``: degrees. ``expert``: experts are
    distributed over GPUs instead of replicated.
    """

    tensor: _Degree = 1
    pipeline: _Degree = 1
    data: _Degree = 1
    expert: bool = False


class LoraLimits(LayeredSpec, frozen=True):
    """``max_loaded``: adapters in one batch. ``max_cached``: adapters in the host's memory. ``max_rank``: the highest
    rank. What is left out is the engine's default.
    """

    max_loaded: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    max_cached: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    max_rank: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None


class HostedModelLimits(LayeredSpec, frozen=True):
    """Of the many models on each server. ``memory``: what those that are loaded may take together; without it, all are
    loaded on every server. ``idle_unload``: one that is not pinned is unloaded when it was not used for so long; 0s:
    never.
    """

    memory: ByteSize | None = None
    idle_unload: Duration = Duration("2h")


class EngineConfig(LayeredSpec, frozen=True):
    """How an engine is started; fields left out have the runtime's or the engine's default.

    ``image``: of the engine. ``command``: instead of the image's entry point. ``parallelism``: over GPUs. ``nodes``:
    pods of one engine, the first of which leads the others; its GPUs are distributed evenly. ``max_length``: of prompt
    and answer together, in tokens. ``prefix_caching``: the engine caches prompt prefixes. ``kv_events``: the engine
    publishes changes of its KV cache. ``prompt_token_details``: responses report cached tokens. ``lora``: limits of
    adapters. ``models``: limits of the many models on each server. ``args``: further arguments, after those of the
    runtime. ``env``: further environment. ``resources``: of the engine's container. ``drain_timeout``: how long running
    requests have to end before a pod is deleted. ``pod``: further fields of the PodSpec, merged as Kubernetes'
    strategic merge does; the engine's container is called ``engine``.
    """

    image: NonEmpty | None = None
    command: Words | None = None
    parallelism: Parallelism = Parallelism()
    nodes: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    max_length: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None = None
    prefix_caching: bool | None = None
    kv_events: bool = False
    prompt_token_details: bool = False
    lora: LoraLimits = LoraLimits()
    models: HostedModelLimits = HostedModelLimits()
    args: Words = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=200, extra_json_schema=list_map_keys("name"))] = ()
    resources: dict[str, Any] | None = None
    drain_timeout: Duration = Duration("5m")
    pod: dict[str, Any] = msgspec.field(default_factory=dict)


class SupportedFormat(Spec, frozen=True):
    """A format of weights that the engine reads. ``name``: of the format. ``version``: the only one that a Model with a
    version may have; without it, any. ``auto_select``: Models of this format get this runtime without naming it or its
    engine. ``priority``: among runtimes of the same format, the highest is chosen.
    """

    name: NonEmpty
    version: NonEmpty | None = None
    auto_select: bool = False
    priority: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0


class ConditionalArguments(Spec, frozen=True):
    """Words of the command line and environment that follow from settings.

    ``when``: settings by name, and the value that each must have; ``*`` is any value. All of them must hold. ``args``
    and ``env``: what is added then; ``{name}`` is replaced by a setting, and ``$(NAME)`` by Kubernetes.
    """

    CEL: ClassVar = (CelRule("has(self.args) || has(self.env)", "write args, env or both"),)

    when: Annotated[dict[str, str], msgspec.Meta(max_length=8)] = msgspec.field(default_factory=dict)
    args: Annotated[tuple[str, ...], msgspec.Meta(max_length=64)] = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=32)] = ()


class RuntimeAgent(Spec, frozen=True):
    """The sidecar that reports readiness, drains the engine and loads adapters. ``enabled``: whether pods have it.
    ``dialect``: the engine's API. ``args``: further arguments of ``attache agent``.
    """

    enabled: bool = True
    dialect: Literal["vLLM", "SGLang", "TensorRT-LLM", "Triton", "MLServer", "KServe", "TensorFlow", "OpenAI"] = (
        "OpenAI"
    )
    args: Annotated[tuple[str, ...], msgspec.Meta(max_length=32)] = ()


class ServingRuntimeSpec(Spec, frozen=True):
    """How a kind of engine is started.

    ``engine``: its family. ``supports``: formats of weights. ``disabled``: no Model uses it. ``metrics``: the
    engine family that defines its metric names; without it, engines' metrics are not read. ``protocol_versions``:
    the protocols that it serves; a Model that names none gets the first. Without it: V2 for Triton and MLServer, V1
    and V2 for KServe and TorchServe, TensorFlow and V1 for TensorFlow, and OpenAI for others.
    ``openai_path_prefix``: what stands before the paths of protocol OpenAI there. ``port``: the port that it
    listens on. ``grpc_port``: that on which it serves the same models over gRPC. ``config``: defaults of Models'
    ``config``. ``arguments``: command line and environment derived from settings, in this order. ``connectors``:
    supported ways to move KV caches between prefill and decode; empty: none. ``multi_node``: one engine can span
    pods. ``adapters``: it can load LoRA adapters. ``multi_model``: it loads and unloads models by V2's repository
    calls, so a Model may have many. ``accelerator``: the resource that pods request by degree of parallelism, such
    as ``nvidia.com/gpu``. ``agent``: the sidecar. ``metadata``: of pods. ``pod``: their PodSpec; the engine's
    container is called ``engine``. ``spot_pod``: merged into it for spot backends.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.grpcPort) || (has(self.protocolVersions) ? self.protocolVersions.exists(one, one != 'OpenAI') :"
            " self.engine in ['KServe', 'MLServer', 'TensorFlow', 'TorchServe', 'Triton'])",
            "grpcPort is of engines of classical models; write protocolVersions with one of theirs, or leave it out",
        ),
        CelRule(
            "!has(self.grpcPort) || self.grpcPort != (has(self.port) ? self.port : 8000)",
            "grpcPort is another port than port",
        ),
    )

    engine: Engine
    supports: Annotated[tuple[SupportedFormat, ...], msgspec.Meta(max_length=64)] = ()
    disabled: bool = False
    metrics: Literal["vLLM", "SGLang", "TensorRT-LLM"] | None = None
    protocol_versions: Annotated[tuple[EndpointProtocol, ...], msgspec.Meta(max_length=6)] = ()
    openai_path_prefix: Annotated[str, msgspec.Meta(pattern=patterns.PATH_PREFIX, max_length=1024)] = ""
    port: Port = 8000
    grpc_port: Port | None = None
    config: EngineConfig = EngineConfig()
    arguments: Annotated[tuple[ConditionalArguments, ...], msgspec.Meta(max_length=128)] = ()
    connectors: Annotated[tuple[Connector, ...], msgspec.Meta(max_length=8)] = ()
    multi_node: bool = False
    adapters: bool = False
    multi_model: bool = False
    accelerator: NonEmpty | None = None
    agent: RuntimeAgent = RuntimeAgent()
    metadata: PodMetadata = PodMetadata()
    pod: dict[str, Any] = msgspec.field(default_factory=dict)
    spot_pod: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def protocols(self) -> tuple[EndpointProtocol, ...]:
        """``protocolVersions`` or their default."""
        return self.protocol_versions or _PROTOCOLS.get(self.engine, ("OpenAI",))

    @property
    def grpc_protocol(self) -> EndpointProtocol | None:
        """At ``grpc_port``; None if there is none."""
        if self.grpc_port is None or self.protocols == ("OpenAI",):
            return None
        usual: EndpointProtocol = "TensorFlow-gRPC" if "TensorFlow" in self.protocols else "V2-gRPC"
        return next((one for one in self.protocols if one in GRPC_PROTOCOLS), usual)


class ServingRuntimeStatus(CommonStatus, frozen=True):
    """A runtime has no status of its own; the status of Models names the runtime used. ``conditions``: none."""


class ServingRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A ServingRuntime object: a preset for its namespace."""

    metadata: Metadata
    spec: ServingRuntimeSpec
    status: ServingRuntimeStatus = ServingRuntimeStatus()


class ClusterScopedMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Kubernetes object metadata of what has no namespace."""

    name: Name


class ClusterServingRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """A ClusterServingRuntime object: a preset for all namespaces."""

    metadata: ClusterScopedMetadata
    spec: ServingRuntimeSpec
    status: ServingRuntimeStatus = ServingRuntimeStatus()
