# SPDX-License-Identifier: Apache-2.0
"""A scaling decision in words: what each law asked for, what changed that, and what was done."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.autoscaler.decision.decision import StageDecision
    from controller.autoscaler.reconciler.records import Record


def explained(record: Record) -> str:
    """Several lines, for a terminal."""
    decision = record.decision
    at = datetime.fromtimestamp(decision.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = [f"{decision.binding} at {at}, mode {decision.mode}"]
    for stage in decision.stages:
        lines += ["", *_stage(stage)]
    rows = [("target", "current", "desired", "ready", "starting", "done", "why")]
    for one in decision.targets:
        numbers = (_number(one.current), _number(one.desired), str(one.ready), str(one.starting))
        rows.append((one.name, *numbers, record.acts.get(one.name, ""), one.reason))
    lines += ["", *_table(rows)]
    if decision.inputs:
        lines += ["", f"inputs: {_inputs(decision.inputs)}"]
    return "\n".join(lines) + "\n"


def _stage(stage: StageDecision) -> Iterator[str]:
    asked = "the laws do not know" if stage.combined is None else f"the laws ask for {_number(stage.combined)}"
    yield f"stage {stage.stage}: {asked}"
    rows = [
        (f"  {one.law}", _number(one.replicas), one.reason, f"({_inputs(one.inputs)})" if one.inputs else "")
        for one in stage.recommendations
    ]
    yield from _table(rows)
    for step in stage.steps:
        yield f"  then {step.rule}: {_number(step.before)} -> {_number(step.after)}, {step.reason}"
    if not stage.is_proven:
        yield "  targets: not proven the cheapest; a slightly cheaper set may exist"
    waiting, freshness = stage.waiting, stage.freshness
    yield (
        f"  waiting: {_counted(waiting.requests, 'request')} with {waiting.tokens:.0f} tokens, the first for"
        f" {waiting.oldest_s:.1f} s; {waiting.at_zero} without any engine"
        if waiting.requests or waiting.at_zero
        else "  waiting: no requests"
    )
    yield (
        f"  data: {freshness.age_s:.1f} s old, of {_counted(freshness.gateways, 'gateway')}; silent gateways:"
        f" {_names(freshness.silent)}; engines without reports: {_names(freshness.unreported)}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(one) for one in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(one.ljust(width) for one, width in zip(row, widths, strict=True)).rstrip()


def _inputs(inputs: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in inputs.items())


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")
