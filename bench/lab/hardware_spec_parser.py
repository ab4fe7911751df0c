# SPDX-License-Identifier: Apache-2.0
"""Engines by words, ``h100x4`` or mixed, ``h100*4+l40s*4``; hardware and models of one's own from YAML files.

``h100x4`` is four H100s for each engine; ``h100*4+l40s*4`` is four engines of one kind and four of another. In place of
a GPU's name the path of its file may stand: ``rig.yaml``, ``rig.yamlx2*4``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from bench.engine.hardware import (
    GPUS,
    KV_READING,
    LINKS,
    MODELS,
    PER_LAYER_S,
    PREFILL_GEMM,
    WEIGHT_STREAMING,
    Gpu,
    GpuLink,
    Hardware,
    ModelShape,
)
from bench.engine.scheduler import EngineLimits
from bench.engine.step_time import MockerStepTime
from bench.virtual.engines import EngineProfile, roofline_engine
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.quantities import Duration, decode_quantity
from extproc.api.schema_validation import check_shape
from extproc.api.yaml_documents import parse_document, split_documents

T = TypeVar("T")
_Above0 = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
# Dynamo's mocked engines: 16,384 blocks of 64 tokens.
MOCKER: Final = "dynamo-mocker"
_MOCKER_TOKENS: Final = 16_384 * 64
_PART: Final = re.compile(r"(?P<gpu>[a-z0-9]+?|[^+*]+?\.ya?ml)(?:x(?P<gpus>\d+))?(?:\*(?P<count>\d+))?")


class MeasuredLink(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A link that was measured: ``bandwidth`` of all-reduces in bytes/s, ``latency`` of one of a few bytes."""

    bandwidth: _Above0
    latency: Duration


class GpuFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One GPU.

    ================================  ========  =======================================================
    field                             unit      meaning
    ================================  ========  =======================================================
    ``flops``                         1/s       peak, dense bf16, of the data sheet
    ``bandwidth``                     bytes/s   peak of its memory
    ``memory``                        bytes
    ``link``                                    ``nvlink3`` to ``nvlink5``, ``pcie4``, ``pcie5``
    ``own_link``                                a link that was measured, in place of ``link``
    ``weight_streaming``              0 to 1    share of ``bandwidth`` at which weights are read
    ``kv_reading``                    0 to 1    share at which decode attention reads the KV cache
    ``prefill_gemm``                  0 to 1    share of ``flops`` that prefill's matrix products reach
    ``per_layer``                     duration  overhead of each layer; 0 if decodes run as CUDA graphs
    ================================  ========  =======================================================
    """

    flops: _Above0
    bandwidth: _Above0
    memory: _Above0
    link: Literal["nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"] = "pcie5"
    own_link: MeasuredLink | None = None
    weight_streaming: _Share = WEIGHT_STREAMING
    kv_reading: _Share = KV_READING
    prefill_gemm: _Share = PREFILL_GEMM
    per_layer: Duration = Duration(f"{1e6 * PER_LAYER_S:g}us")

    def gpu(self) -> Gpu:
        """As the engine model takes it."""
        own = self.own_link
        return Gpu(
            flops=self.flops,
            bandwidth=self.bandwidth,
            memory=self.memory,
            link=LINKS[self.link] if own is None else GpuLink(own.bandwidth, float(own.latency)),
            weight_streaming=self.weight_streaming,
            kv_reading=self.kv_reading,
            prefill_gemm=self.prefill_gemm,
            per_layer_s=float(self.per_layer),
        )


class ModelFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A decoder-only transformer; the fields are those of ModelShape, from its config.json."""

    parameters: _Above0
    layers: _Count
    hidden: _Count
    heads: _Count
    kv_heads: _Count
    head_dim: _Count
    active_parameters: _Above0 | None = None
    experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    experts_per_token: Annotated[int, msgspec.Meta(ge=0)] = 0
    experts_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    bytes_per_parameter: _Above0 = 2

    def shape(self) -> ModelShape:
        """As the engine model takes it."""
        return ModelShape(**msgspec.structs.asdict(self))


def is_file(name: str) -> bool:
    """Whether a GPU or a model is named by its file."""
    return name.endswith((".yaml", ".yml"))


def read_gpu(file: str) -> Gpu:
    """Raises ConfigInvalid with every mistake, on its line."""
    return _read(file, GpuFile, "one GPU").gpu()


def read_model(file: str) -> ModelShape:
    """Raises ConfigInvalid with every mistake, on its line."""
    return _read(file, ModelFile, "one model").shape()


def _read(file: str, kind: type[T], what: str) -> T:
    try:
        documents = split_documents(file, Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid([Mistake(file, 0, "", f"cannot be read: {error}")]) from None
    if len(documents) != 1:
        raise ConfigInvalid([Mistake(file, 0, "", f"has {len(documents)} documents; describe {what}")])
    (document,) = documents
    value, findings = parse_document(document)
    value = _with_numbers(value)
    mistakes = document.locate_mistakes([*findings, *check_shape(value, kind)])
    if mistakes:
        raise ConfigInvalid(mistakes)
    return msgspec.convert(value, kind, dec_hook=decode_quantity)


def _with_numbers(value: object) -> object:
    """YAML parses ``989e12`` as text: a number needs a point and a sign."""
    if not isinstance(value, dict):
        return value
    return {key: _with_numbers(_number(one)) for key, one in value.items()}


def _number(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class HardwareUnknown(Exception):
    """No such GPU or model, or a model that does not fit; the message lists the known ones."""


def engine_profiles(
    hardware: str, model: str, *, count: int, block_size: int, kv_blocks: int | None = None
) -> list[EngineProfile]:
    """The kind of each engine. Raises HardwareUnknown, or ConfigInvalid for a file.

    ``count``: engines in all, shared equally by the parts of ``hardware`` that name no number. ``block_size``: tokens
    of a KV block. ``kv_blocks``: of each engine; None: what its GPUs' memory holds.
    """
    if hardware == MOCKER:
        limits = EngineLimits(block_size=block_size, num_gpu_blocks=_MOCKER_TOKENS // block_size)
        kinds = [EngineProfile(MockerStepTime(_MOCKER_TOKENS), limits)] * count
    else:
        kinds = [roofline_engine(one, block_size=block_size) for one in _engines_of(hardware, model, count)]
    return kinds if kv_blocks is None else [_with_blocks(kind, kv_blocks) for kind in kinds]


def _with_blocks(kind: EngineProfile, kv_blocks: int) -> EngineProfile:
    return msgspec.structs.replace(kind, limits=msgspec.structs.replace(kind.limits, num_gpu_blocks=kv_blocks))


def gpus_of(hardware: str) -> list[tuple[str, int]]:
    """The GPUs that ``hardware`` names, by name or file, with how many of them make an engine."""
    found = [one for part in hardware.split("+") if (one := _PART.fullmatch(part))]
    return [(one["gpu"], int(one["gpus"] or 1)) for one in found]


def hardware_files(hardware: str, model: str) -> list[str]:
    """The files that a trial's hardware and model are read from."""
    return [one for one in (*(gpu for gpu, _ in gpus_of(hardware)), model) if is_file(one)]


def _engines_of(hardware: str, model: str, count: int) -> list[Hardware]:
    shape = _model(model)
    parts = hardware.split("+")
    engines: list[Hardware] = []
    for number, part in enumerate(parts):
        found = _PART.fullmatch(part)
        gpu = _gpu(found["gpu"]) if found is not None else None
        if found is None or gpu is None:
            msg = (
                f"{part}: is no hardware; write GPU, GPUxN or GPUxN*ENGINES with one of {', '.join(GPUS)} or with a "
                f"GPU's YAML file, or {MOCKER}"
            )
            raise HardwareUnknown(msg)
        one = Hardware(shape, gpu, int(found["gpus"] or 1))
        if one.kv_tokens() <= 0:
            msg = f"{part}: {model} does not fit; it needs more GPUs for each engine"
            raise HardwareUnknown(msg)
        share = count // len(parts) + (number < count % len(parts))
        engines += [one] * int(found["count"] or share)
    return engines


def _model(name: str) -> ModelShape:
    if is_file(name):
        return read_model(name)
    if name not in MODELS:
        msg = f"there is no model {name}; there are {', '.join(MODELS)}, and YAML files as in shape.yaml"
        raise HardwareUnknown(msg)
    return MODELS[name]


def _gpu(name: str) -> Gpu | None:
    return read_gpu(name) if is_file(name) else GPUS.get(name)
