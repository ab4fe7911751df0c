# SPDX-License-Identifier: Apache-2.0
"""Hardware and models of one's own, as YAML files: ``--hardware rig.yaml --model shape.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from bench.engine.hardware import KV_READING, PER_LAYER_S, PREFILL_GEMM, WEIGHT_STREAMING, Gpu, ModelShape
from bench.engine.links import LINKS, Link
from extproc.api.documents import read, split
from extproc.api.errors import ConfigInvalid, Mistake
from extproc.api.quantities import Duration, decode_quantity
from extproc.api.schema import check_shape

T = TypeVar("T")
_Above0 = Annotated[float, msgspec.Meta(gt=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class OwnLink(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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
    own_link: OwnLink | None = None
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
            link=LINKS[self.link] if own is None else Link(own.bandwidth, float(own.latency)),
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
        documents = split(file, Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid([Mistake(file, 0, "", f"cannot be read: {error}")]) from None
    if len(documents) != 1:
        raise ConfigInvalid([Mistake(file, 0, "", f"has {len(documents)} documents; describe {what}")])
    (document,) = documents
    value, findings = read(document)
    value = _with_numbers(value)
    mistakes = document.mistakes([*findings, *check_shape(value, kind)])
    if mistakes:
        raise ConfigInvalid(mistakes)
    return msgspec.convert(value, kind, dec_hook=decode_quantity)


def _with_numbers(value: object) -> object:
    """YAML takes ``989e12`` for text: it wants a point and a sign."""
    if not isinstance(value, dict):
        return value
    return {key: _with_numbers(_number(one)) for key, one in value.items()}


def _number(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
