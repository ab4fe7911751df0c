# SPDX-License-Identifier: Apache-2.0
"""The last decisions of each binding, packed, in words, and as the manager's pages.

``/decisions`` has the last of each binding, ``/decisions/NAMESPACE/NAME`` the last ones of one.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from aiohttp import web

from controller.autoscaler.decision.decision import Decision

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.autoscaler.decision.decision import StageDecision

_MOST: Final = 100
# One without anything new is kept so often, and so many of them.
_EACH_S: Final = 60.0
_MOST_QUIET: Final = 20
# Thirty million years, in seconds.
_ENDLESS: Final = 1e15
DECISIONS_PATH: Final = "/decisions"
_MOST_ON_PAGE: Final = 100


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """``decision``: with its inputs and reasons. ``acts``: what was done, or why not, by target."""

    decision: Decision
    acts: Mapping[str, str] = {}


def encode_record(record: DecisionRecord) -> bytes:
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


class BindingDecisionLog:
    """The last hundred decisions of one binding, packed, for there are many: all in which something was new, and of the
    others one a minute for the last twenty minutes.
    """

    def __init__(self) -> None:
        self.latest: DecisionRecord | None = None
        # the first one is the dictionary that the others are packed with: they are nearly the same
        self._first = b""
        self._kept: deque[_Packed] = deque(maxlen=_MOST)
        self._kept_at_s = 0.0
        self._news: Sequence[object] | None = None

    def add(self, record: DecisionRecord) -> None:
        """A decision was made."""
        self.latest, at_s, news = record, record.decision.at_s, _news(record)
        is_quiet = self._news == news
        if is_quiet and at_s - self._kept_at_s < _EACH_S:
            return
        self._news, self._kept_at_s = news, at_s
        text = encode_record(record)
        self._first = self._first or text
        self._kept.append(_Packed(_packed(text, self._first), is_quiet))
        _thin(self._kept)

    def newest_first(self) -> Iterator[bytes]:
        """JSON."""
        if self.latest is None:
            return
        newest = encode_record(self.latest)
        yield newest
        for packed in reversed(self._kept):
            text = zlib.decompressobj(zdict=self._first).decompress(packed.text)
            if text != newest:
                yield text


class DecisionRecords:
    """The decisions of the present term of leadership, for pages that outlive it."""

    def __init__(self) -> None:
        self._logs: Callable[[], Mapping[str, BindingDecisionLog]] = dict

    def set_logs(self, logs: Callable[[], Mapping[str, BindingDecisionLog]]) -> None:
        """Those of the present term, by binding."""
        self._logs = logs

    def records_by_binding(self) -> Mapping[str, DecisionRecord]:
        """By binding."""
        return {key: log.latest for key, log in self._logs().items() if log.latest is not None}

    def records_of_binding(self, key: str) -> Iterator[bytes]:
        """JSON, the newest first."""
        log = self._logs().get(key)
        return iter(()) if log is None else log.newest_first()


def _thin(kept: deque[_Packed]) -> None:
    """Drop the oldest one without anything new if there are too many."""
    quiet = [at for at, one in enumerate(kept) if one.is_quiet]
    if len(quiet) > _MOST_QUIET:
        del kept[quiet[0]]


def _packed(text: bytes, like: bytes) -> bytes:
    packer = zlib.compressobj(zdict=like)
    return packer.compress(text) + packer.flush()


def _news(record: DecisionRecord) -> Sequence[object]:
    decision = record.decision
    return (
        decision.mode,
        [(one.name, one.current, one.desired, one.ready) for one in decision.targets],
        [[step.rule for step in one.steps] for one in decision.stages],
        record.acts,
    )


def explain_record(record: DecisionRecord) -> str:
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
    message = (
        "the strategies do not know" if stage.combined is None else f"the strategies ask for {_number(stage.combined)}"
    )
    yield f"stage {stage.stage}: {message}"
    rows = [
        (f"  {one.strategy}", _number(one.replicas), one.reason, f"({_inputs(one.inputs)})" if one.inputs else "")
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


def decision_page_routes(records: DecisionRecords, leads: Callable[[], bool]) -> Sequence[web.RouteDef]:
    """``leads``: whether this replica makes decisions at all."""

    def elsewhere() -> web.Response:
        return web.Response(status=503, text="this replica does not lead; ask the one that the Lease names\n")

    async def overview(_: web.Request) -> web.Response:
        if not leads():
            return elsewhere()
        found = [
            {"binding": key, "at": one.decision.at_s, "mode": one.decision.mode, "targets": one.decision.targets}
            for key, one in sorted(records.records_by_binding().items())
        ]
        return web.Response(body=msgspec.json.encode({"bindings": found}), content_type="application/json")

    async def of_one(request: web.Request) -> web.Response:
        if not leads():
            return elsewhere()
        key = f"{request.match_info['namespace']}/{request.match_info['name']}"
        last = request.query.get("last", "")
        most = max(1, min(_MOST_ON_PAGE, int(last))) if last.isdecimal() and len(last) < 6 else _MOST_ON_PAGE
        found = list(itertools.islice(records.records_of_binding(key), most))
        if not found:
            return web.Response(status=404, text=f"nothing was decided about an AutoscalingPolicyBinding {key} yet\n")
        body = b'{"decisions":[' + b",".join(found) + b"]}"
        return web.Response(body=body, content_type="application/json")

    return [web.get(DECISIONS_PATH, overview), web.get(DECISIONS_PATH + "/{namespace}/{name}", of_one)]
