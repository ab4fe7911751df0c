# SPDX-License-Identifier: Apache-2.0
"""Model: one object for the user; the controller makes the others of it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from controller.resources.common import EnvVar, Replicas, ShortName
from controller.resources.statuses import ModelStatus
from extproc.config.cel import Rule
from extproc.config.quantities import Duration
from extproc.config.spec import Metadata, Name, NonEmpty, Spec, keyed_by

ModelUri = Annotated[
    str, msgspec.Meta(pattern=r"^(hf|s3|gs|az|https?|oci|pvc|hdfs|file)://.+$", min_length=6, max_length=2048)
]
_Degree = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Parallelism(Spec, frozen=True):
    """How an engine is spread over GPUs. ``tensor``, ``pipeline`` and ``data``: degrees. ``expert``: experts are spread
    instead of copied.
    """

    tensor: _Degree = 1
    pipeline: _Degree = 1
    data: _Degree = 1
    expert: bool = False


class EngineConfig(Spec, frozen=True):
    """How one kind of engine is started. ``image``: if not the runtime's. ``parallelism``: over GPUs. ``max_length``: of
    prompt and answer, in tokens. ``args``: further arguments. ``env``: further environment. ``resources``: of a
    container. ``pod``: further fields of the PodSpec, such as ``nodeSelector`` and ``tolerations``.
    """

    image: NonEmpty | None = None
    parallelism: Parallelism = Parallelism()
    max_length: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] | None = None
    args: Annotated[tuple[str, ...], msgspec.Meta(max_length=200)] = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=200, extra_json_schema=keyed_by("name"))] = ()
    resources: dict[str, Any] | None = None
    pod: dict[str, Any] = msgspec.field(default_factory=dict)


class Disaggregation(Spec, frozen=True):
    """Prefill and decode on separate engines. ``prefill`` and ``decode``: engines of each in a group. ``connector``: how KV
    caches are moved.
    """

    prefill: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    decode: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    connector: Literal["NIXL", "LMCache", "Mooncake", "SGLang"] = "NIXL"


class Backend(Spec, frozen=True):
    """One way to run the model: a kind of GPU, or spot machines.

    ``name``: part of the names of objects. ``engine``: its family. ``runtime``: the preset that says how it is
    started; chosen by format and engine, if left out. ``config``: changes of the preset. ``replicas``: how many;
    with autoscaling, how many at first. ``min_replicas`` and ``max_replicas``: bounds of autoscaling. ``cost``: of a
    replica, relative to other backends. ``accelerator``: kind of GPU. ``spot``: may be taken away. ``weight``: share
    of requests, where the policy leaves a choice. ``disaggregation``: prefill and decode apart.
    """

    CEL: ClassVar = (
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas",
        ),
    )

    name: ShortName
    engine: Literal["vLLM", "SGLang", "TensorRT-LLM", "Triton", "MLServer", "OpenAI", "Custom"] = "vLLM"
    runtime: Name | None = None
    config: EngineConfig = EngineConfig()
    replicas: Replicas = 1
    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    cost: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    accelerator: NonEmpty | None = None
    spot: bool = False
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100
    disaggregation: Disaggregation | None = None


class LoraAdapter(Spec, frozen=True):
    """``name``: what clients ask for. ``uri``: its weights. ``pinned``: kept loaded on every engine."""

    name: NonEmpty
    uri: ModelUri
    pinned: bool = False


class ModelAutoscaling(Spec, frozen=True):
    """``policy_ref``: an AutoscalingPolicy; the default policy, if left out. ``scale_to_zero``: after so long without
    requests.
    """

    policy_ref: Name | None = None
    scale_to_zero: Duration | None = None


class ModelSpec(Spec, frozen=True):
    """A model to serve; everything but ``uri`` may be left out.

    ``uri``: the weights. ``served_name``: what clients ask for; the object's name, if left out. ``aliases``: further
    names. ``backends``: how it is run. ``adapters``: LoRA adapters. ``autoscaling``: replicas follow the load.
    ``secret_ref``: a Secret with the credentials of ``uri``. ``warm``: fetch the weights to nodes ahead. ``stop``: run
    nothing, and keep the object.
    """

    uri: ModelUri
    served_name: NonEmpty | None = None
    aliases: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=64)] = ()
    backends: Annotated[
        tuple[Backend, ...], msgspec.Meta(min_length=1, max_length=16, extra_json_schema=keyed_by("name"))
    ] = (Backend(name="default"),)
    adapters: Annotated[tuple[LoraAdapter, ...], msgspec.Meta(max_length=1000, extra_json_schema=keyed_by("name"))] = ()
    autoscaling: ModelAutoscaling | None = None
    secret_ref: Name | None = None
    warm: bool = False
    stop: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A Model object."""

    metadata: Metadata
    spec: ModelSpec
    status: ModelStatus = ModelStatus()
