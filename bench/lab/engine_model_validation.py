# SPDX-License-Identifier: Apache-2.0
"""``python -m bench validate``: the engine model against real engines.

Two questions. Is the scheduler right? Two runs of a real vLLM are replayed with step times from kernels that were
measured on the same GPU. Is the roofline right? The same runs by the roofline, and single steps against published
measurements.

Source: LLMServingSim's profiles (casys-kaist, MIT). For each layer: dense kernels by the number of tokens, and
attention by chunk, history, decodes and their KV. Once for a step: what precedes and follows the layers. Where
several chunks share a step, each is computed by itself.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from bisect import bisect_right
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from bench.engine.fake_tokenizer import answer_text
from bench.engine.hardware import GPUS, LINKS, MODELS, NO_EXCHANGE, PER_REQUEST_S, PER_STEP_S, Hardware
from bench.engine.request import Request, Token
from bench.engine.scheduler import EngineLimits
from bench.engine.step_time import RooflineStepTime, StepWork, step_seconds
from bench.reporting.report_elements import Table
from bench.reporting.request_results import Distribution, distribution
from bench.virtual.engines import EngineProfile, VirtualEngine
from bench.virtual.event_queue import EventQueue
from bench.workload.sessions import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

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
# Relative errors beyond which the check fails: with measured kernels, and by the roofline.
_BANDS: Final = {"TTFT": (0.15, 0.25), "TPOT": (0.05, 0.20), "makespan": (0.10, 0.20)}
_STEP_BAND: Final = 0.20
_WHERE: Final = "casys-kaist/LLMServingSim, bench/examples and profiler/perf, as vllm_run_* and vllm_profile_*"
# Vidur measured kernels one by one: its figures are without all-reduces.
_A100: Final = msgspec.structs.replace(GPUS["a100"], link=NO_EXCHANGE)


class InterpolatedCurve:
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


class InterpolatedSurface:
    """A function of two numbers: a curve for each measured value of the first, linear between the curves."""

    def __init__(self, points: Iterable[tuple[float, float, float]]) -> None:
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for first, second, value in points:
            rows[first].append((second, value))
        self._curves = {first: InterpolatedCurve(row) for first, row in sorted(rows.items())}

    def at(self, first: float, second: float) -> float:
        """The value at this point."""
        return InterpolatedCurve((x, curve.at(second)) for x, curve in self._curves.items()).at(first)


class MeasuredStepTime:
    """A StepTimeModel of measured kernels."""

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
        self._prefill = InterpolatedSurface(
            (chunk, history, us) for chunk, history, decodes, _, us in attention if chunk and not decodes
        )
        self._decode = InterpolatedSurface(
            (decodes, kv, us) for chunk, _, decodes, kv, us in attention if decodes and not chunk
        )
        self._together = _share_of_sum(attention, self._prefill, self._decode)

    def seconds(self, batch: StepBatch) -> float:
        """The duration of a step with this batch, from the measured curves."""
        us = sum(count * curve.at(batch.tokens) for curve, count in self._dense)
        us += sum(curve.at(batch.requests) for curve in self._last)
        overhead_s = PER_STEP_S + PER_REQUEST_S * batch.requests
        return (us + self._layers * self._attention_us(batch)) / 1e6 + overhead_s

    def growth_per_step_s(self, decodes: int) -> None:
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


def _share_of_sum(
    attention: Sequence[tuple[float, ...]], prefill: InterpolatedSurface, decode: InterpolatedSurface
) -> float:
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


def _curves(rows: Iterable[Mapping[str, str]], column: str) -> dict[str, InterpolatedCurve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        value = float(row["time_us"])
        if math.isfinite(value):
            points[row["layer"]].append((float(row[column]), value))
    return {layer: InterpolatedCurve(found) for layer, found in points.items()}


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request as vLLM logged it, under its names. Instants in seconds of a monotonic clock."""

    input_toks: int
    output_toks: int
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


class RunSummary(msgspec.Struct, frozen=True):
    """The latencies of a run. ``makespan_s``: from the first arrival to the last token."""

    ttft_s: Distribution
    tpot_s: Distribution
    makespan_s: float


def read_requests(file: Path) -> list[RecordedRequest]:
    """Raises OSError or DecodeError."""
    with gzip.open(file, "rb") as lines:
        return [msgspec.json.decode(line, type=RecordedRequest) for line in lines]


def measured_latencies(run: Sequence[RecordedRequest]) -> RunSummary:
    """The latencies that were measured."""
    start_at_s = min(one.queued_ts for one in run)
    return _summary(
        [(one.queued_ts, one.first_token_ts, one.last_token_ts, one.output_toks) for one in run], start_at_s
    )


def simulate_latencies(run: Sequence[RecordedRequest], kind: EngineProfile) -> RunSummary:
    """The latencies of the same requests at the same instants on an engine of ``kind``.

    No two prompts share a prefix.
    """
    events, rng = EventQueue(), random.Random(0)
    firsts: dict[int, float] = {}
    lasts: dict[int, float] = {}

    def note(tokens: Iterable[Token], now: float) -> None:
        for token in tokens:
            firsts.setdefault(token.request.key, now)
            if token.is_last:
                lasts[token.request.key] = now

    engine = VirtualEngine(kind, events, note, leaps=True)
    start_at_s = min(one.queued_ts for one in run)
    for key, one in enumerate(run):
        prompt = text_of(f"run/{key}", one.input_toks).encode()
        answer = answer_text(rng, one.output_toks)
        request = Request(key, prompt, answer, model="m", block_size=kind.limits.block_size)
        events.schedule_at(one.queued_ts - start_at_s, partial(engine.add, request))
    events.run()
    times = [(one.queued_ts - start_at_s, firsts[key], lasts[key], one.output_toks) for key, one in enumerate(run)]
    return _summary(times, 0.0)


def _summary(times: Sequence[tuple[float, float, float, int]], start_at_s: float) -> RunSummary:
    """``times``: of each request the instants of its arrival, first and last token, and its output tokens."""
    return RunSummary(
        ttft_s=distribution(first - queued for queued, first, _, _ in times),
        tpot_s=distribution((last - first) / (count - 1) for _, first, last, count in times if count > 1),
        makespan_s=max(last for _, _, last, _ in times) - start_at_s,
    )


class RecordedRun(msgspec.Struct, frozen=True):
    """A run of a real vLLM. ``name``: as in its files. ``limits``: the flags it ran with."""

    name: str
    gpu: str
    limits: EngineLimits


_RUNS: Final = (
    RecordedRun(
        "rtx4090_llama31-8b_tp1",
        "rtx4090",
        EngineLimits(max_num_seqs=256, max_num_batched_tokens=2048, block_size=16, num_gpu_blocks=2588),
    ),
    RecordedRun(
        "rtxpro6000_llama31-8b_tp1",
        "rtxpro6000",
        EngineLimits(max_num_seqs=128, max_num_batched_tokens=2048, block_size=16, num_gpu_blocks=30_000),
    ),
)


class PublishedRun(msgspec.Struct, frozen=True):
    """Mean latencies of real runs of one workload, in s: the least and the largest that were published.

    ``like``: the recorded run whose requests are played; ``requests``: how they differ from the real ones.
    """

    what: str
    hardware: Hardware
    like: RecordedRun
    requests: str
    kv_blocks: int
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]


_PUBLISHED_RUNS: Final = (
    # LLMServingSim, bench/examples/RTXPRO6000/Qwen3-32B: with vLLM 0.28 27.6 s and 67.5 ms, with 0.19 36.9 s and 80.3
    # ms
    PublishedRun(
        what="32B, 2 x RTX PRO 6000 over PCIe 5, vLLM 0.28 and 0.19",
        hardware=Hardware(MODELS["32b"], GPUS["rtxpro6000"], 2),
        like=_RUNS[1],
        requests="the same conversations in the tokens of another model",
        kv_blocks=28_884,
        ttft_s=(27.585, 36.905),
        tpot_s=(0.0675, 0.0803),
    ),
)


class PublishedStep(msgspec.Struct, frozen=True):
    """A published measurement of a single step: between ``low_s`` and ``high_s``."""

    what: str
    source: str
    hardware: Hardware
    batch: tuple[StepWork, ...]
    low_s: float
    high_s: float


def _decodes(count: int) -> tuple[StepWork, ...]:
    return (StepWork(1, 0),) * count


_PUBLISHED: Final = (
    PublishedStep(
        what="32B, 2 x H100, prefill of 8,192",
        source="llm-d, 2026-08-17",
        hardware=Hardware(MODELS["32b"], GPUS["h100"], 2),
        batch=(StepWork(8192, 0),),
        low_s=0.40,
        high_s=0.514,
    ),
    PublishedStep(
        what="120B-A5B, H100, prefill of 8,192",
        source="llm-d, 2026-08-17",
        hardware=Hardware(MODELS["120b-a5b"], GPUS["h100"]),
        batch=(StepWork(8192, 0),),
        low_s=0.2097,
        high_s=0.2097,
    ),
    PublishedStep(
        what="8B, A100, decode of 64",
        source="Vidur",
        hardware=Hardware(MODELS["8b"], _A100),
        batch=_decodes(64),
        low_s=0.0114,
        high_s=0.0114,
    ),
    PublishedStep(
        what="8B, A100, prefill of 2,048",
        source="Vidur",
        hardware=Hardware(MODELS["8b"], _A100),
        batch=(StepWork(2048, 0),),
        low_s=0.150,
        high_s=0.150,
    ),
    PublishedStep(
        what="70B, 4 x A100, prefill of 2,048",
        source="Vidur",
        hardware=Hardware(MODELS["70b"], _A100, 4),
        batch=(StepWork(2048, 0),),
        low_s=0.353,
        high_s=0.353,
    ),
    PublishedStep(
        what="70B, 4 x A100, decode of 64",
        source="Vidur",
        hardware=Hardware(MODELS["70b"], _A100, 4),
        batch=_decodes(64),
        low_s=0.0276,
        high_s=0.0276,
    ),
    PublishedStep(
        what="70B, 4 x A100, decode of 256",
        source="Vidur",
        hardware=Hardware(MODELS["70b"], _A100, 4),
        batch=_decodes(256),
        low_s=0.053,
        high_s=0.053,
    ),
    PublishedStep(
        what="70B, 8 x A100, prefill of 2,048",
        source="Vidur",
        hardware=Hardware(MODELS["70b"], _A100, 8),
        batch=(StepWork(2048, 0),),
        low_s=0.200,
        high_s=0.200,
    ),
    PublishedStep(
        what="70B, 8 x A100, decode of 1",
        source="Vidur",
        hardware=Hardware(MODELS["70b"], _A100, 8),
        batch=_decodes(1),
        low_s=0.0146,
        high_s=0.0146,
    ),
)


class Finding(msgspec.Struct, frozen=True):
    """One comparison. ``error``: of the model, relative to the measurement. ``band``: the largest error that passes."""

    what: str
    measured: str
    model: float
    error: float
    band: float

    @property
    def is_good(self) -> bool:
        """The error is within the band."""
        return abs(self.error) <= self.band


def validate(traces: Path, console: Console) -> int:
    """Print every error; the exit status is 1 if one is out of its band.

    Without recorded runs in the directory ``traces`` it prints that, and compares single steps alone.
    """
    findings = list(_steps())
    try:
        findings += [finding for run in _RUNS for finding in _run(run, traces)]
        findings += [finding for run in _PUBLISHED_RUNS for finding in _published_run(run, traces)]
    except OSError as error:
        console.print(
            f"NOT COMPARED WITH REAL RUNS: {error}. Put {_WHERE} into a directory and give --traces.", style="bold red"
        )
    console.print(_table(findings).as_rich_table())
    never = "; ".join(f"{kind} {', '.join(names)}" for kind, names in unmeasured_hardware().items() if names)
    console.print(f"never held against a measurement: {never}; and all models and hardware from files")
    out = [finding for finding in findings if not finding.is_good]
    for finding in out:
        console.print(f"{finding.what}: {finding.error:+.1%} is beyond {finding.band:.0%}", style="red")
    return 1 if out else 0


def unmeasured_hardware() -> dict[str, list[str]]:
    """What has a name here and is in no measurement: GPUs, links between GPUs, and models."""
    held = [one.hardware for one in (*_PUBLISHED, *_PUBLISHED_RUNS)]
    held += [Hardware(MODELS["8b"], GPUS[one.gpu]) for one in _RUNS]
    linked = [one.gpu.link for one in held if one.gpus > 1]
    # the A100s of some measurements have another link
    peaks = {(one.gpu.flops, one.gpu.bandwidth) for one in held}
    return {
        "GPUs": [name for name, gpu in GPUS.items() if (gpu.flops, gpu.bandwidth) not in peaks],
        "links": [name for name, link in LINKS.items() if link not in linked],
        "models": [name for name, model in MODELS.items() if model not in [one.model for one in held]],
    }


def _steps() -> Iterator[Finding]:
    for one in _PUBLISHED:
        seconds = step_seconds(one.hardware, one.batch)
        yield _between(f"{one.what} ({one.source})", seconds, (one.low_s, one.high_s), band=_STEP_BAND)


def _published_run(run: PublishedRun, traces: Path) -> Iterator[Finding]:
    requests = read_requests(traces / f"vllm_run_{run.like.name}.requests.jsonl.gz")
    limits = msgspec.structs.replace(run.like.limits, num_gpu_blocks=run.kv_blocks)
    found = simulate_latencies(requests, EngineProfile(RooflineStepTime(run.hardware), limits))
    for what, seconds, measured in (
        ("TTFT", found.ttft_s.mean, run.ttft_s),
        ("TPOT", found.tpot_s.mean, run.tpot_s),
    ):
        name = f"{run.what}: mean {what} ({run.requests})"
        yield _between(name, seconds, measured, band=_BANDS[what][1])


def _between(what: str, seconds: float, measured: tuple[float, float], *, band: float) -> Finding:
    """The error against the nearest of the measured values, which are bounds."""
    low, high = measured
    message = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    error = seconds / min(max(seconds, low), high) - 1
    return Finding(what=what, measured=message, model=seconds, error=error, band=band)


def _run(run: RecordedRun, traces: Path) -> Iterator[Finding]:
    requests = read_requests(traces / f"vllm_run_{run.name}.requests.jsonl.gz")
    measured = measured_latencies(requests)
    kernels = simulate_latencies(requests, EngineProfile(MeasuredStepTime(traces, run.name), run.limits))
    roofline = simulate_latencies(
        requests, EngineProfile(RooflineStepTime(Hardware(MODELS["8b"], GPUS[run.gpu])), run.limits)
    )
    for number, (step_times, model) in enumerate((("measured kernels", kernels), ("roofline", roofline))):
        yield from _compared(f"vLLM on {run.gpu}, {step_times}", measured, model, band=number)


def _compared(name: str, measured: RunSummary, model: RunSummary, *, band: int) -> Iterator[Finding]:
    pairs = {
        "TTFT": (measured.ttft_s.mean, model.ttft_s.mean),
        "TPOT": (measured.tpot_s.mean, model.tpot_s.mean),
        "makespan": (measured.makespan_s, model.makespan_s),
    }
    for what, (was, found) in pairs.items():
        yield Finding(
            what=f"{name}: mean {what}",
            measured=f"{was:.4g}",
            model=found,
            error=found / was - 1,
            band=_BANDS[what][band],
        )


def _table(findings: Sequence[Finding]) -> Table:
    rows = [[one.what, one.measured, f"{one.model:.4g}", f"{one.error:+.1%}", f"{one.band:.0%}"] for one in findings]
    headings = ["", "measured", "model", "error", "band"]
    styles = ["" if one.is_good else "red" for one in findings]
    return Table("the engine model against real engines, seconds", headings, rows, row_styles=styles)
