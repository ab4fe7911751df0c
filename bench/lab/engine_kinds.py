# SPDX-License-Identifier: Apache-2.0
"""Engines by words: ``h100x4``, or mixed: ``h100*4+l40s*4``.

``h100x4`` is four H100s for each engine; ``h100*4+l40s*4`` is four engines of one kind and four of another. In place of
a GPU's name the path of its file may stand: ``rig.yaml``, ``rig.yamlx2*4``.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from bench.engine.hardware import GPUS, MODELS, Gpu, Hardware, ModelShape
from bench.engine.mocker_time import MockerTime
from bench.engine.scheduler import EngineLimits
from bench.lab.hardware_file import is_file, read_gpu, read_model
from bench.virtual.engines import EngineKind, roofline_engine

# Dynamo's mocked engines: 16,384 blocks of 64 tokens.
MOCKER: Final = "dynamo-mocker"
_MOCKER_TOKENS: Final = 16_384 * 64
_PART: Final = re.compile(r"(?P<gpu>[a-z0-9]+?|[^+*]+?\.ya?ml)(?:x(?P<gpus>\d+))?(?:\*(?P<count>\d+))?")


class HardwareUnknown(Exception):
    """No such GPU or model, or a model that does not fit; the message says what there is."""


def engine_kinds(
    hardware: str, model: str, *, count: int, block_size: int, kv_blocks: int | None = None
) -> list[EngineKind]:
    """The kind of each engine. Raises HardwareUnknown, or ConfigInvalid for a file.

    ``count``: engines in all, shared equally by the parts of ``hardware`` that name no number. ``block_size``: tokens
    of a KV block. ``kv_blocks``: of each engine; None: what its GPUs' memory holds.
    """
    if hardware == MOCKER:
        limits = EngineLimits(block_size=block_size, num_gpu_blocks=_MOCKER_TOKENS // block_size)
        kinds = [EngineKind(MockerTime(_MOCKER_TOKENS), limits)] * count
    else:
        kinds = [roofline_engine(one, block_size=block_size) for one in _engines_of(hardware, model, count)]
    return kinds if kv_blocks is None else [_with_blocks(kind, kv_blocks) for kind in kinds]


def _with_blocks(kind: EngineKind, kv_blocks: int) -> EngineKind:
    return EngineKind(kind.speed, msgspec.structs.replace(kind.limits, num_gpu_blocks=kv_blocks))


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
