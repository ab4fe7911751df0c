# SPDX-License-Identifier: Apache-2.0
"""Step times by interpolation between kernels that were measured inside vLLM.

Source: LLMServingSim's profiles (casys-kaist, MIT). For each layer: dense kernels by the number of tokens, and
attention by chunk, history, decodes and their KV. Once for a step: what precedes and follows the layers. Where
several chunks share a step, each is computed by itself.
"""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from bench.engine.hardware import PER_REQUEST_S, PER_STEP_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from bench.engine.step_time import StepBatch

_EACH_LAYER: Final = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_ONCE: Final = ("embedding", "final_layernorm")


class Curve:
    """A function of one number: linear between measurements, extrapolated beyond the last, never below 0."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        self._x = [x for x, _ in ordered]
        self._y = [y for _, y in ordered]

    def at(self, x: float) -> float:
        """The value at ``x``."""
        if len(self._x) == 1:
            return self._y[0]
        right = min(max(bisect_right(self._x, x), 1), len(self._x) - 1)
        low, high = self._x[right - 1], self._x[right]
        share = (x - low) / (high - low)
        return max(0.0, self._y[right - 1] + share * (self._y[right] - self._y[right - 1]))


class Surface:
    """A function of two numbers: a curve for each measured value of the first, linear between the curves."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for first, second, value in points:
            rows[first].append((second, value))
        self._curves = {first: Curve(row) for first, row in sorted(rows.items())}

    def at(self, first: float, second: float) -> float:
        """The value at this point."""
        return Curve((x, curve.at(second)) for x, curve in self._curves.items()).at(first)


class MeasuredKernels:
    """A StepTime of measured kernels."""

    def __init__(self, directory: Path, name: str, layers: int = 32) -> None:
        """Read the profile called ``name`` in ``directory``, of a model with ``layers``.

        Raises OSError or ValueError.
        """
        self._layers = layers
        dense = _curves(_rows(directory / f"vllm_profile_{name}.dense.csv.gz"), "tokens")
        self._dense = [(dense[layer], count * layers) for layer, count in _EACH_LAYER.items()]
        self._dense += [(dense[layer], 1) for layer in _ONCE]
        self._last = list(_curves(_rows(directory / f"vllm_profile_{name}.per_sequence.csv.gz"), "sequences").values())
        attention = [
            tuple(float(row[key]) for key in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
            for row in _rows(directory / f"vllm_profile_{name}.attention.csv.gz")
        ]
        self._prefill = Surface(
            (chunk, history, us) for chunk, history, decodes, _, us in attention if chunk and not decodes
        )
        self._decode = Surface((decodes, kv, us) for chunk, _, decodes, kv, us in attention if decodes and not chunk)
        self._together = _share_of_sum(attention, self._prefill, self._decode)

    def seconds(self, batch: StepBatch) -> float:
        """See the module."""
        us = sum(count * curve.at(batch.tokens) for curve, count in self._dense)
        us += sum(curve.at(batch.requests) for curve in self._last)
        overhead_s = PER_STEP_S + PER_REQUEST_S * batch.requests
        return (us + self._layers * self._attention_us(batch)) / 1e6 + overhead_s

    def growth_s(self, decodes: int) -> None:
        """None: the growth is not constant."""
        del decodes

    def _attention_us(self, batch: StepBatch) -> float:
        chunk = batch.tokens - batch.decodes
        decode = self._decode.at(batch.decodes, batch.read / batch.decodes) if batch.decodes else 0.0
        if not chunk:
            return decode
        history = batch.pairs / chunk - chunk / 2
        # chunks of several requests have fewer pairs than one chunk of their total length
        each, count = (chunk, 1.0) if history >= 0 else (2 * batch.pairs / chunk, chunk * chunk / (2 * batch.pairs))
        prefill = count * self._prefill.at(each, max(0.0, history))
        return self._together * (prefill + decode) if decode else prefill


def _share_of_sum(attention: Sequence[tuple[float, ...]], prefill: Surface, decode: Surface) -> float:
    """The time of prefill and decode in one kernel, relative to two kernels: the median of the measurements."""

    ratios = sorted(
        us / (prefill.at(chunk, history) + decode.at(decodes, kv))
        for chunk, history, decodes, kv, us in attention
        if chunk and decodes
    )
    return ratios[len(ratios) // 2] if ratios else 1.0


def _rows(file: Path) -> list[Mapping[str, str]]:
    with gzip.open(file, "rt") as text:
        return list(csv.DictReader(text))


def _curves(rows: Iterable[Mapping[str, str]], column: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        value = float(row["time_us"])
        if math.isfinite(value):
            points[row["layer"]].append((float(row[column]), value))
    return {layer: Curve(found) for layer, found in points.items()}
