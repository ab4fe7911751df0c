# SPDX-License-Identifier: Apache-2.0
"""The last decisions of each binding, packed, and a decision in words, for people who ask why."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.autoscaler.decision.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.autoscaler.decision.decision import StageDecision

_MOST: Final = 100
# One without anything new is kept so often, and so many of them.
_EACH_S: Final = 60.0
_MOST_QUIET: Final = 20
# Thirty million years, in seconds.
_ENDLESS: Final = 1e15


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """``decision``: with its inputs and reasons. ``acts``: what was done, or why not, by target."""

    decision: Decision
    acts: Mapping[str, str] = {}


def encoded(record: Record) -> bytes:
    """JSON, which has no infinite numbers: a very large one stands for them."""
    text = msgspec.json.encode(record)
    # what is infinite is written as nothing; where there is nothing, all is finite
    return msgspec.json.encode(_finite(msgspec.to_builtins(record))) if b"null" in text else text


def _finite(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return -_ENDLESS if value < 0 else _ENDLESS
    return value


class _Packed(NamedTuple):
    """``is_quiet``: without anything new."""

    text: bytes
    is_quiet: bool


class Records:
    """The last hundred of each binding, packed, for there are many: all in which something was new, and of the others
    one a minute for the last twenty minutes.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Record] = {}
        # the first one of a binding is the dictionary that the others are packed with: they say nearly the same
        self._first: dict[str, bytes] = {}
        self._kept: dict[str, deque[_Packed]] = {}
        self._kept_at_s: dict[str, float] = {}
        self._news: dict[str, Sequence[object]] = {}

    def add(self, record: Record) -> None:
        """A decision was made."""
        key, at_s = record.decision.binding, record.decision.at_s
        news = _news(record)
        self._latest[key] = record
        is_quiet = self._news.get(key) == news
        if not is_quiet or at_s - self._kept_at_s[key] >= _EACH_S:
            self._news[key] = news
            text = encoded(record)
            packed = _packed(text, self._first.setdefault(key, text))
            kept = self._kept.setdefault(key, deque(maxlen=_MOST))
            kept.append(_Packed(packed, is_quiet))
            _thin(kept)
            self._kept_at_s[key] = at_s

    def forget(self, key: str) -> None:
        """The binding is gone."""
        for one in (self._latest, self._first, self._kept, self._kept_at_s, self._news):
            one.pop(key, None)

    def clear(self) -> None:
        """This replica does not lead any more."""
        for key in list(self._latest):
            self.forget(key)

    def latest(self) -> Mapping[str, Record]:
        """By binding."""
        return self._latest

    def of(self, key: str) -> Iterator[bytes]:
        """JSON, the newest first."""
        latest = self._latest.get(key)
        if latest is None:
            return
        newest = encoded(latest)
        yield newest
        for packed in reversed(self._kept[key]):
            text = zlib.decompressobj(zdict=self._first[key]).decompress(packed.text)
            if text != newest:
                yield text


def _thin(kept: deque[_Packed]) -> None:
    """Drop the oldest one without anything new if there are too many."""
    quiet = [at for at, one in enumerate(kept) if one.is_quiet]
    if len(quiet) > _MOST_QUIET:
        del kept[quiet[0]]


def _packed(text: bytes, like: bytes) -> bytes:
    packer = zlib.compressobj(zdict=like)
    return packer.compress(text) + packer.flush()


def _news(record: Record) -> Sequence[object]:
    decision = record.decision
    return (
        decision.mode,
        [(one.name, one.current, one.desired, one.ready) for one in decision.targets],
        [[step.rule for step in one.steps] for one in decision.stages],
        record.acts,
    )


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
