# SPDX-License-Identifier: Apache-2.0
"""Engines on the screen: which serve, which are avoided and why, which say nothing, and what each does."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.cli.top_table import table
from extproc.endpoints.health import ADVICE, NO_ANSWER, Failure, silent_after_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.cli.top_sample import Sample

_LAST_AT_S: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_NO_ANSWER_REASON: Final = "no_answer"
_DEAD: Final = frozenset({_NO_ANSWER_REASON, Failure.PASSED_OVER.name.lower(), Failure.SILENT.name.lower()})
_EXPENDABLE: Final = ("PROMPT TOK/S", "CACHED", "RUNNING", "KV", "WAITING", "IN FLIGHT")


class EngineState(msgspec.Struct, frozen=True):
    """One engine. ``reasons``: why it is avoided, none if it is not. ``avoided_since_s``: Unix time.

    ``report_age_s``: of what it says of itself, None if it never did. ``is_read``: whether extproc reads it at all.
    ``interval_s``: between two reads.
    """

    server: str
    endpoint: str
    reasons: tuple[str, ...] = ()
    avoided_since_s: float | None = None
    report_age_s: float | None = None
    is_read: bool = True
    interval_s: float = 0.0

    @property
    def is_silent(self) -> bool:
        """It should say how it is, and does not."""
        return self.is_read and (self.report_age_s is None or self.report_age_s >= silent_after_s(self.interval_s))

    @property
    def word(self) -> str:
        """For the table."""
        if self.reasons:
            return "AVOIDED"
        return "SILENT" if self.is_silent else "serving"

    @property
    def is_dead(self) -> bool:
        """It answers nothing, so what is known of its speed is of another time."""
        return self.is_silent or not _DEAD.isdisjoint(self.reasons)


def engine_states(now: Sample) -> list[EngineState]:
    """Of all endpoints of the configuration."""
    return [
        _state(now, server, endpoint) for server, endpoint in now.values_of("attache_in_flight", "server", "endpoint")
    ]


def _state(now: Sample, server: str, endpoint: str) -> EngineState:
    where = {"server": server, "endpoint": endpoint}
    return EngineState(
        server,
        endpoint,
        tuple(reason for (reason,) in now.values_of("attache_endpoint_avoided", "reason", **where)),
        now.get("attache_endpoint_avoided_since_timestamp_seconds", **where),
        now.get("attache_engine_report_age_seconds", **where),
        is_read=now.sum("attache_engine_reports_total", server=server) > 0,
        interval_s=now.get("attache_engine_report_interval_seconds", server=server) or 0.0,
    )


def summary(states: list[EngineState]) -> str:
    """How many are in which state; those in none are left out."""
    counts = {word: sum(one.word == word for one in states) for word in ("serving", "AVOIDED", "SILENT")}
    return "engines: " + (", ".join(f"{count} {word.lower()}" for word, count in counts.items() if count) or "none")


def ailments(states: list[EngineState], *, wall_now_s: float, width: int) -> list[str]:
    """A paragraph for each engine that is not well, and an empty line; nothing if all are well."""
    lines: list[str] = []
    for one in states:
        if one.word != "serving":
            text = f"{one.endpoint} of {one.server} {_ailment(one, wall_now_s)}"
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, ""] if lines else []


def _ailment(one: EngineState, wall_now_s: float) -> str:
    if one.report_age_s is None:
        report = "it has never said how it is"
    else:
        report = f"it last said how it is {_ago(one.report_age_s)}"
    if not one.reasons:
        return f"is silent: {report}; see that it runs, and that its metrics page answers"
    since = ""
    # a page may say what it likes; after that year no clock has a name for it
    if one.avoided_since_s is not None and 0 <= one.avoided_since_s < _LAST_AT_S:
        at = datetime.fromtimestamp(one.avoided_since_s, UTC)
        since = f" since {at:%H:%M:%S} UTC ({_ago(wall_now_s - one.avoided_since_s)})"
    whys = "; ".join(_why(reason) for reason in one.reasons)
    if one.is_silent:
        return f"is avoided{since}: {whys}; {report}"
    again = "; it says how it is again, and the next request that suits it best tries it"
    is_back = one.is_read and not _reported_before(one, wall_now_s) and not _DEAD.isdisjoint(one.reasons)
    return f"is avoided{since}: {whys}" + (again if is_back else "")


def _reported_before(one: EngineState, wall_now_s: float) -> bool:
    """Its last report is older than its failure: it does not say that the engine is back."""
    if one.avoided_since_s is None or one.report_age_s is None:
        return False
    return wall_now_s - one.report_age_s <= one.avoided_since_s


def _why(reason: str) -> str:
    if reason == _NO_ANSWER_REASON:
        return f"{NO_ANSWER}; {ADVICE[Failure.PASSED_OVER]}"
    known = {one.name.lower(): one for one in Failure}.get(reason)
    return f"{known.value}; {ADVICE[known]}" if known is not None else reason


def _ago(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s ago"
    return f"{whole // 60} min ago" if whole < 7200 else f"{whole // 3600} h ago"


def engine_table(states: list[EngineState], now: Sample, rate: Callable[..., float], *, width: int) -> list[str]:
    """One line an engine. ``rate``: of a counter, by its labels. What nobody knows is a dash."""
    heads = ["SERVER", "ENGINE", "STATE", "IN FLIGHT", "RUNNING", "WAITING", "KV", "TTFT", "FAILED", "PROMPT TOK/S"]
    rows = [_row(one, partial(now.get, server=one.server, endpoint=one.endpoint), rate) for one in states]
    return table([*heads, "CACHED"], rows, width=width, expendable=_EXPENDABLE)


def _row(one: EngineState, value: Callable[[str], float | None], rate: Callable[..., float]) -> list[str]:
    def told(name: str, form: str) -> str:
        known = value(name)
        return "-" if known is None or one.is_silent else format(known, form)

    ttft_s = None if one.is_dead else value("attache_endpoint_ttft_seconds")
    return [
        one.server,
        one.endpoint,
        one.word,
        f"{value('attache_in_flight') or 0:.0f}",
        told("attache_engine_running", ".0f"),
        told("attache_engine_waiting", ".0f"),
        told("attache_engine_kv_usage", ".0%"),
        "-" if ttft_s is None else _short(ttft_s),
        f"{value('attache_endpoint_failed_ratio') or 0:.0%}",
        f"{rate('attache_prompt_tokens_total', server=one.server, endpoint=one.endpoint):,.0f}",
        f"{value('attache_cached_token_ratio') or 0:.0%}",
    ]


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
