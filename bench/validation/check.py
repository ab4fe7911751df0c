"""``python -m bench validate``: how far the engine model is from real engines, and whether that is too far.

Two questions. Is the scheduler right? Two runs of a real vLLM are played again with step times from kernels that were measured on the same GPU. Is
the roofline right? The same runs by the roofline, and single steps against published measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from rich.table import Table

from bench.engine.hardware import GPUS, MODELS, Hardware
from bench.engine.scheduler import Limits
from bench.engine.step_time import Roofline, Work, step_seconds
from bench.validation.measured import Measured
from bench.validation.runs import modelled, read_run, real
from bench.virtual.engines import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from bench.validation.runs import PlayedRun

# What a check fails beyond, by what is measured: with measured kernels, and by the roofline.
_BANDS: Final = {"TTFT": (0.15, 0.25), "TPOT": (0.05, 0.20), "makespan": (0.10, 0.20)}
_STEP_BAND: Final = 0.20
_WHERE: Final = "casys-kaist/LLMServingSim, bench/examples and profiler/perf, as vllm_run_* and vllm_profile_*"


class Run(msgspec.Struct, frozen=True):
    """A run of a real vLLM: its name, GPU and flags."""

    name: str
    gpu: str
    limits: Limits


_RUNS: Final = (
    Run("rtx4090_llama31-8b_tp1", "rtx4090", Limits(256, 2048, 16, 2588)),
    Run("rtxpro6000_llama31-8b_tp1", "rtxpro6000", Limits(128, 2048, 16, 30_000)),
)


class Published(msgspec.Struct, frozen=True):
    """A single step that somebody measured: between ``low_s`` and ``high_s``."""

    what: str
    source: str
    hardware: Hardware
    batch: tuple[Work, ...]
    low_s: float
    high_s: float


def _decodes(count: int) -> tuple[Work, ...]:
    return (Work(1, 0),) * count


_A100: Final = GPUS["a100"]
_PUBLISHED: Final = (
    Published(
        "32B, 2 x H100, prefill of 8,192",
        "llm-d, 2026-08-17",
        Hardware(MODELS["32b"], GPUS["h100"], 2),
        (Work(8192, 0),),
        0.40,
        0.514,
    ),
    Published(
        "120B-A5B, H100, prefill of 8,192",
        "llm-d, 2026-08-17",
        Hardware(MODELS["120b-a5b"], GPUS["h100"]),
        (Work(8192, 0),),
        0.2097,
        0.2097,
    ),
    Published("8B, A100, decode of 64", "Vidur", Hardware(MODELS["8b"], _A100), _decodes(64), 0.0114, 0.0114),
    Published("8B, A100, prefill of 2,048", "Vidur", Hardware(MODELS["8b"], _A100), (Work(2048, 0),), 0.150, 0.150),
    Published(
        "70B, 4 x A100, prefill of 2,048", "Vidur", Hardware(MODELS["70b"], _A100, 4), (Work(2048, 0),), 0.353, 0.353
    ),
    Published("70B, 4 x A100, decode of 64", "Vidur", Hardware(MODELS["70b"], _A100, 4), _decodes(64), 0.0276, 0.0276),
    Published("70B, 4 x A100, decode of 256", "Vidur", Hardware(MODELS["70b"], _A100, 4), _decodes(256), 0.053, 0.053),
    Published(
        "70B, 8 x A100, prefill of 2,048", "Vidur", Hardware(MODELS["70b"], _A100, 8), (Work(2048, 0),), 0.200, 0.200
    ),
    Published("70B, 8 x A100, decode of 1", "Vidur", Hardware(MODELS["70b"], _A100, 8), _decodes(1), 0.0146, 0.0146),
)


class Finding(msgspec.Struct, frozen=True):
    """One comparison; ``error`` as a share of what was measured."""

    what: str
    measured: str
    model: float
    error: float
    band: float

    @property
    def is_good(self) -> bool:
        """Within its band."""
        return abs(self.error) <= self.band


def validate(traces: Path, console: Console) -> int:
    """Prints every error; 1 if one is out of its band. Without recorded runs it says so, and compares single steps alone."""
    findings = list(_steps())
    try:
        findings += [finding for run in _RUNS for finding in _run(run, traces)]
    except OSError as error:
        console.print(
            f"NOT COMPARED WITH REAL RUNS: {error}. Put {_WHERE} into a directory and give --traces.", style="bold red"
        )
    console.print(_table(findings))
    out = [finding for finding in findings if not finding.is_good]
    for finding in out:
        console.print(f"{finding.what}: {finding.error:+.1%} is beyond {finding.band:.0%}", style="red")
    return 1 if out else 0


def _steps() -> Iterator[Finding]:
    for one in _PUBLISHED:
        seconds = step_seconds(one.hardware, one.batch)
        nearest = min(max(seconds, one.low_s), one.high_s)
        said = f"{one.low_s:.4g}" if one.low_s == one.high_s else f"{one.low_s:.4g} to {one.high_s:.4g}"
        yield Finding(f"{one.what} ({one.source})", said, seconds, seconds / nearest - 1, _STEP_BAND)


def _run(run: Run, traces: Path) -> Iterator[Finding]:
    served = read_run(traces / f"vllm_run_{run.name}.requests.jsonl.gz")
    was = real(served)
    kernels = modelled(served, Kind(Measured(traces, run.name), run.limits))
    roofline = modelled(served, Kind(Roofline(Hardware(MODELS["8b"], GPUS[run.gpu])), run.limits))
    for number, (how, outcome) in enumerate((("measured kernels", kernels), ("roofline", roofline))):
        yield from _outcome(f"vLLM on {run.gpu}, {how}", was, outcome, number)


def _outcome(name: str, was: PlayedRun, found: PlayedRun, band: int) -> Iterator[Finding]:
    pairs = {
        "TTFT": (was.ttft_s.mean, found.ttft_s.mean),
        "TPOT": (was.tpot_s.mean, found.tpot_s.mean),
        "makespan": (was.makespan_s, found.makespan_s),
    }
    for what, (measured, model) in pairs.items():
        yield Finding(f"{name}: mean {what}", f"{measured:.4g}", model, model / measured - 1, _BANDS[what][band])


def _table(findings: Sequence[Finding]) -> Table:
    made = Table(title="the engine model against real engines, seconds")
    for heading in ("", "measured", "model", "error", "band"):
        made.add_column(heading, justify="right" if heading else "left")
    for one in findings:
        style = "" if one.is_good else "red"
        made.add_row(one.what, one.measured, f"{one.model:.4g}", f"{one.error:+.1%}", f"{one.band:.0%}", style=style)
    return made
