# SPDX-License-Identifier: Apache-2.0
"""Model: one object of the user; the controller creates the others from it. ModelTemplate: fields that Models share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from controller.api.model_infer import RolloutStrategy
from controller.api.serving_runtime import Connector, Engine, EngineConfig
from controller.api.shared_types import LayeredSpec, Positive, Replicas, ShortName
from controller.api.statuses import CommonStatus, ModelStatus
from controller.api.transformers_and_explainers import Step, Transformer
from extproc.api.model_server import NO_ENCODE_STAGE, ServingProtocol
from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import CelRule, Metadata, Name, NonEmpty, ParentReference, list_map_keys

ModelUri = Annotated[
    str, msgspec.Meta(pattern=r"^(hf|s3|gs|az|https?|oci|pvc|hdfs|file)://.+$", min_length=6, max_length=2048)
]
_AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/[^\x00-\x1f]*$", max_length=1024)]
# A new group is started before an old one is removed, as Deployments do.
_ROLLOUT = RolloutStrategy(max_unavailable="25%", max_surge="25%")


class ModelFormat(LayeredSpec, frozen=True):
    """``name``: of the weights' format, as runtimes have it: ``huggingface``, ``gguf``, ``onnx``, ``sklearn``.
    ``version``: of the format, if runtimes differ in it.
    """

    name: NonEmpty
    version: NonEmpty | None = None


class PrefillDecodeRatio(LayeredSpec, frozen=True):
    """Prefill engines for each decode engine. ``min`` and ``max``: their bounds."""

    CEL: ClassVar = (CelRule("self.min <= self.max", "min is above max"),)

    min: Positive
    max: Positive


class Disaggregation(LayeredSpec, frozen=True):
    """Prefill and decode on separate engines. ``prefill`` and ``decode``: engines of each in a group. ``max_prefill``
    and ``max_decode``: upper bounds of autoscaling, which scales the two apart, in one group; ``prefill`` and
    ``decode`` are then the lower bounds. A stage without upper bound keeps its engines. ``ratio``: of the engines of
    both while they are autoscaled. ``connector``: how KV caches are moved. ``leg``: who requests the prefill; without
    it the gateway where it can, else a sidecar in the decode engine's pod, which you add. ``on_prefill_failure``: of
    the gateway's leg. ``prefill_config`` and ``decode_config``: overrides for engines of one role. There is no encode
    stage.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.maxPrefill) || !has(self.prefill) || self.prefill <= self.maxPrefill",
            "prefill is above maxPrefill",
        ),
        CelRule(
            "!has(self.maxDecode) || !has(self.decode) || self.decode <= self.maxDecode", "decode is above maxDecode"
        ),
    )

    UNSUPPORTED: ClassVar = dict.fromkeys(("encode", "maxEncode", "encodeConfig"), NO_ENCODE_STAGE)

    prefill: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    decode: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    max_prefill: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    max_decode: Annotated[int, msgspec.Meta(ge=1, le=64)] | None = None
    ratio: PrefillDecodeRatio | None = None
    connector: Connector = "NIXL"
    leg: Literal["Gateway", "Sidecar"] | None = None
    # Local: the decode engine computes the prompt. Fail: the request is answered 503. Without it Local, except with
    # SGLang: there the decode engine has the request already, cannot compute the prompt, and answers an error.
    on_prefill_failure: Literal["Local", "Fail"] | None = None
    prefill_config: EngineConfig = EngineConfig()
    decode_config: EngineConfig = EngineConfig()

    @property
    def is_scaled_by_stage(self) -> bool:
        """Whether autoscalers set the engines of each stage, rather than the number of groups."""
        return self.max_prefill is not None or self.max_decode is not None

    @property
    def can_scale_to_zero(self) -> bool:
        """Whether the bounds of stages that are scaled apart keep one engine of each, and no more."""
        return (self.prefill, self.decode) == (1, 1)

    @property
    def prefill_bounds(self) -> tuple[int, int]:
        """The fewest and the most."""
        return self.prefill, self.prefill if self.max_prefill is None else self.max_prefill

    @property
    def decode_bounds(self) -> tuple[int, int]:
        """The fewest and the most."""
        return self.decode, self.decode if self.max_decode is None else self.max_decode


class Backend(LayeredSpec, frozen=True):
    """One way to run the model: a kind of GPU, or spot machines.

    ``name``: part of the names of objects. ``engine``: its family; by default any runtime of the model's format is
    used. ``runtime``: the preset that starts the engine; by default chosen by format and engine. ``config``: overrides
    of the preset. ``replicas``: number of engines, or groups of prefill and decode; left out, it starts at 1 and
    autoscalers may set it. ``min_replicas`` and ``max_replicas``: bounds of autoscaling; a backend without
    ``maxReplicas`` is not autoscaled, unless ``disaggregation`` has bounds for its stages. ``cost``: of a replica,
    relative to other backends. ``accelerator``: kind of GPU. ``spot``: its nodes may be reclaimed. ``weight``: share of
    requests, 0 for none. ``disaggregation``: prefill and decode on separate engines. ``rollout``: how changes reach its
    replicas.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas",
        ),
        CelRule(
            "!has(self.minReplicas) || has(self.maxReplicas)",
            "minReplicas needs maxReplicas beside it; write both. With maxPrefill or maxDecode remove it: prefill and"
            " decode are the lower bounds",
        ),
        CelRule(
            "!has(self.disaggregation) || !(has(self.disaggregation.maxPrefill) || has(self.disaggregation.maxDecode))"
            " || (!has(self.maxReplicas) && (!has(self.replicas) || self.replicas <= 1))",
            "maxPrefill and maxDecode scale the engines of one group; remove maxReplicas, and replicas above 1, or"
            " remove maxPrefill and maxDecode to scale groups",
        ),
    )

    name: ShortName
    engine: Engine | None = None
    runtime: Name | None = None
    config: EngineConfig = EngineConfig()
    replicas: Replicas | None = None
    min_replicas: Replicas | None = None
    max_replicas: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    cost: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    accelerator: NonEmpty | None = None
    spot: bool = False
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100
    disaggregation: Disaggregation | None = None
    rollout: RolloutStrategy = _ROLLOUT

    @property
    def scales_stages(self) -> bool:
        """Whether prefill and decode are autoscaled apart."""
        return self.disaggregation is not None and self.disaggregation.is_scaled_by_stage

    @property
    def target_names(self) -> tuple[str, ...]:
        """Its targets of an AutoscalingPolicyBinding."""
        if self.scales_stages:
            return f"{self.name}-prefill", f"{self.name}-decode"
        return () if self.max_replicas is None else (self.name,)


class LoraAdapter(LayeredSpec, frozen=True):
    """``name``: the model name in requests. ``uri``: its weights. ``pinned``: kept loaded on every engine; others are
    loaded when a request names them.
    """

    name: NonEmpty
    uri: ModelUri
    pinned: bool = False


class HostedModel(LayeredSpec, frozen=True):
    """One of many models on each server. ``name``: the model name in requests. ``uri``: its weights. ``format``: of the
    weights, if not the Model's. ``memory``: what it takes on a server, of ``config.models.memory``. ``pinned``: kept
    loaded on every server; others are loaded when a request names them.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._:@+-]*$", max_length=200)]
    uri: ModelUri
    format: ModelFormat | None = None
    memory: ByteSize | None = None
    pinned: bool = False


class ModelAutoscaling(LayeredSpec, frozen=True):
    """``policy_ref``: an AutoscalingPolicy; by default the default policy. Its ``scaleToZero`` applies to all backends
    without ``minReplicas``, and its ``holdTimeout`` to requests that wait. ``scale_to_zero``: time without requests
    before the last replica is removed.
    """

    CEL: ClassVar = (
        CelRule(
            "!has(self.policyRef) || !has(self.scaleToZero)",
            "write scaleToZero into the policy that policyRef names, not beside it",
        ),
    )

    policy_ref: Name | None = None
    scale_to_zero: Duration | None = None


class Batching(LayeredSpec, frozen=True):
    """Requests that come at once are joined into one call of the engine. ``max_size``: of a call, as instances, or rows
    of tensors. ``max_delay``: how long a request waits for others, while the engine computes.
    """

    max_size: Annotated[int, msgspec.Meta(ge=2, le=4096)] = 32
    max_delay: Duration = Duration("5ms")


class WeightsCache(LayeredSpec, frozen=True):
    """Where downloaded weights are kept. ``claim``: a PersistentVolumeClaim that all pods mount. ``host_path``: a
    directory of each node, in which each namespace has its own. Without either, each pod has its own copy.
    """

    CEL: ClassVar = (CelRule("!has(self.claim) || !has(self.hostPath)", "write claim or hostPath, not both"),)

    claim: Name | None = None
    host_path: _AbsolutePath | None = None


class CommonModelFields(LayeredSpec, frozen=True):
    """What a Model and a ModelTemplate have in common."""

    # The model name in requests; by default the object's name.
    served_name: NonEmpty | None = None
    # Further model names that requests may use.
    aliases: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=64)] = ()
    # Format of the weights; by default inferred from the URI's suffix (.gguf, .onnx), otherwise huggingface.
    format: ModelFormat | None = None
    # The API by which clients ask it; without it, the first of the runtime's protocolVersions. A runtime that does not
    # serve it is not chosen.
    protocol: ServingProtocol | None = None
    # How it is run.
    backends: Annotated[
        tuple[Backend, ...], msgspec.Meta(min_length=1, max_length=16, extra_json_schema=list_map_keys("name"))
    ] = (Backend(name="default"),)
    # LoRA adapters.
    adapters: Annotated[
        tuple[LoraAdapter, ...], msgspec.Meta(max_length=1000, extra_json_schema=list_map_keys("name"))
    ] = ()
    # Many models on each server, in place of one of uri: the runtime must be able to load them (multiModel).
    models: Annotated[
        tuple[HostedModel, ...], msgspec.Meta(max_length=1000, extra_json_schema=list_map_keys("name"))
    ] = ()
    # Replicas follow the load.
    autoscaling: ModelAutoscaling | None = None
    # Join requests into batches, for engines of V1 and V2.
    batching: Batching | None = None
    # A Secret whose entries become environment variables of downloads.
    secret_ref: Name | None = None
    # Where downloaded weights are kept.
    cache: WeightsCache = WeightsCache()
    # The gateways that serve it; without them, all of its namespace.
    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()
    # Fetch the weights to the cache ahead of pods.
    warm: bool = False
    # Run nothing, and keep the objects.
    stop: bool = False
    # A server that requests pass first.
    transformer: Transformer | None = None
    # A server that answers ``:explain`` of V1.
    explainer: Step | None = None

    @property
    def declared_adapters_and_models(self) -> tuple[LoraAdapter | HostedModel, ...]:
        """What agents load into running engines."""
        return (*self.adapters, *self.models)


class ModelSpec(CommonModelFields, frozen=True, kw_only=True):
    """A model to serve; everything but ``uri``, or ``models``, may be left out.

    ``uri``: the weights. ``base_refs``: ModelTemplates that supply the fields left out here; a later one overrides an
    earlier one. They are looked up in this namespace, then in the manager's.
    """

    CEL: ClassVar = (
        CelRule("has(self.uri) || has(self.models) || has(self.baseRefs)", "write uri, or models"),
        CelRule("!has(self.uri) || !has(self.models)", "write uri or models, not both"),
    )

    uri: ModelUri | None = None
    base_refs: Annotated[tuple[Name, ...], msgspec.Meta(max_length=16)] = ()


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A Model object."""

    metadata: Metadata
    spec: ModelSpec
    status: ModelStatus = ModelStatus()


class ModelTemplateSpec(CommonModelFields, frozen=True):
    """Fields of Models; a Model that names this template in ``baseRefs`` has them. ``uri``: the weights."""

    uri: ModelUri | None = None


class ModelTemplateStatus(CommonStatus, frozen=True):
    """A template has no status of its own. ``conditions``: none."""


class ModelTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelTemplate object."""

    metadata: Metadata
    spec: ModelTemplateSpec = ModelTemplateSpec()
    status: ModelTemplateStatus = ModelTemplateStatus()
