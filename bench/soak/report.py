# SPDX-License-Identifier: Apache-2.0
"""A soak's record as JSON, its verdict as lines, and a picture of it over time."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from bench.reporting.pages import figure
from bench.soak.verdict import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.soak.verdict import Check, Record, Sample

_MARKS = {True: "ok", False: "FAILED", None: "not judged"}


def lines(checks: Sequence[Check]) -> str:
    """One line a check, and more where something is to be told."""
    return "\n".join(f"{_MARKS[one.is_ok]:<10} {one.name}: {one.text}" for one in checks)


def write(record: Record, checks: Sequence[Check], out: Path) -> None:
    """``soak.json`` and ``soak.png`` in ``out``."""
    text = msgspec.json.format(msgspec.json.encode({"verdict": checks, "record": record}))
    (out / "soak.json").write_bytes(text)
    if not record.samples:
        return
    with figure(out / "soak.png", rows=5, columns=1, size_inches=(11, 17)) as axes:
        _memory(axes[0], record.samples)
        _cpu(axes[1], record.samples)
        _latency(axes[2], record.samples)
        _outcomes(axes[3], record.samples)
        _uptakes(axes[4], record)
        axes[-1].set_xlim(axes[0].get_xlim())
        axes[-1].set_xlabel("minutes")


def _minutes(samples: Sequence[Sample]) -> list[float]:
    return [one.at_s / 60 for one in samples]


def _names(samples: Sequence[Sample]) -> list[str]:
    return sorted(set.intersection(*(set(one.processes) for one in samples)))


def _memory(axes: Axes, samples: Sequence[Sample]) -> None:
    for name in _names(samples):
        axes.plot(_minutes(samples), [one.processes[name].rss_bytes / MIB for one in samples], label=name)
    axes.set_ylabel("resident memory, MiB")


def _cpu(axes: Axes, samples: Sequence[Sample]) -> None:
    pairs = list(itertools.pairwise(samples))
    for name in _names(samples):
        shares = [
            (after.processes[name].cpu_s - before.processes[name].cpu_s) / (after.at_s - before.at_s)
            for before, after in pairs
        ]
        axes.plot(_minutes(samples[1:]), shares, label=name)
    axes.set_ylabel("cores in use")


def _latency(axes: Axes, samples: Sequence[Sample]) -> None:
    for label in ("p50_s", "p99_s", "slowest_s"):
        axes.plot(_minutes(samples), [getattr(one.latency, label) for one in samples], label=label[:-2])
    axes.plot(_minutes(samples), [one.slowest_page_s for one in samples], label="extproc's slowest page")
    axes.set_ylabel("first byte, s")
    axes.set_yscale("log")


def _outcomes(axes: Axes, samples: Sequence[Sample]) -> None:
    kinds = sorted({(who, what) for one in samples for who, counts in one.outcomes.items() for what in counts})
    for who, what in kinds:
        counts = [one.outcomes.get(who, {}).get(what, 0) for one in samples]
        axes.plot(_minutes(samples), counts, label=f"{who}: {what}", linestyle="--" if what == "lost" else "-")
    axes.set_ylabel("requests in a sample")


def _uptakes(axes: Axes, record: Record) -> None:
    for side in ("extproc_s", "envoy_s", "client_s"):
        points = [(one.at_s / 60, value) for one in record.uptakes if (value := getattr(one, side)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), ".", markersize=3, label=f"change until used by {side[:-2]}")
    axes.set_ylabel("s")
