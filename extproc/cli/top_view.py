# SPDX-License-Identifier: Apache-2.0
"""Two readings of metrics pages, joined over processes, as a picture that fits a terminal: engines, queues, tenants."""

from __future__ import annotations

import math
import textwrap
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.breaker import BreakerState
from extproc.endpoints.health import ADVICE, NO_ANSWER, EngineFailure, silent_after_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


_Labels = tuple[tuple[str, str], ...]

_Names = tuple[str, ...]

_Series = tuple[dict[str, str], float]

_Index = dict[tuple[str, ...], list[_Series]]

MODEL_MISSING: Final = "attache_engine_model_missing"
# Metrics that every process reports for all processes, not for its own part.
_SEEN_BY_ALL: Final = frozenset(
    {
        "attache_engine_waiting",
        "attache_engine_running",
        "attache_engine_kv_usage",
        "attache_engine_report_interval_seconds",
        "attache_in_flight",
        "attache_saturation",
        "attache_cached_token_ratio",
        "attache_endpoint_avoided",
        "attache_breaker_state",
        "attache_endpoint_failed_ratio",
        "attache_endpoint_role",
        "attache_endpoint_ttft_seconds",
        MODEL_MISSING,
        "attache_budget_used_ratio",
    }
)

# Metrics of which the least value of all processes counts: the freshest report, the first instant, a refusal.
_CONFIG_VALID: Final = "attache_config_valid"
_LEAST: Final = frozenset(
    {"attache_engine_report_age_seconds", "attache_endpoint_avoided_since_timestamp_seconds", _CONFIG_VALID}
)


_TEXTS: Final = frozenset(
    {"SERVER", "ENGINE", "ROLE", "STATE", "BAND", "TENANT", "BUDGET", "CALLER", "OF", "ROUTE", "CLASS", "OBJECTIVE"}
)
_GAP: Final = "  "
_LAST_AT_S: Final = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_NO_ANSWER_REASON: Final = "no_answer"
_DEAD: Final = frozenset({_NO_ANSWER_REASON, EngineFailure.PASSED_OVER.name.lower(), EngineFailure.SILENT.name.lower()})
_EXPENDABLE: Final = ("PROMPT TOK/S", "CACHED", "RUNNING", "KV", "WAITING", "IN FLIGHT")
_REFUSED: Final = (
    "rate_limited",
    "budget_spent",
    "queue_full",
    "queue_timeout",
    "shed",
    "objective_unmeetable",
    "limits_unavailable",
    "no_endpoint",
    "server_failing",
    "guard",
    "guard_unavailable",
)
UNBOUNDED: Final = 10_000
# By the state of its breaker.
_TRIED: Final[Mapping[float, str]] = {
    BreakerState.OPEN: "; its breaker is open",
    BreakerState.HALF_OPEN: "; its breaker is half-open: one request at a time tries it",
}
_UNITS: Final = {
    "cost_micros": "money",
    "total_tokens": "tokens",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
}


def format_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    without: Sequence[str] = (),
    expendable: Sequence[str] = (),
) -> list[str]:
    """Text to the left, numbers to the right, and an empty line at the end; nothing if there are no rows.

    ``without``: heads of columns that are left out. ``expendable``: the same, one after the other, until lines are at
    most ``width`` long.
    """
    if not rows:
        return []
    columns = {head: [head, *(row[index] for row in rows)] for index, head in enumerate(heads) if head not in without}
    widths = {head: max(map(len, cells)) for head, cells in columns.items()}
    for head in expendable:
        if sum(widths.values()) + len(_GAP) * (len(widths) - 1) <= width:
            break
        del widths[head]
    return [
        *(
            _GAP.join(_aligned(columns[head][index], widths[head], head) for head in widths).rstrip()
            for index in range(len(rows) + 1)
        ),
        "",
    ]


def _aligned(cell: str, width: int, head: str) -> str:
    return cell.ljust(width) if head in _TEXTS else cell.rjust(width)


class EngineState(msgspec.Struct, frozen=True):
    """One engine. ``reasons``: why it is avoided, none if it is not. ``avoided_since_s``: Unix time. ``breaker``: its
    state, as the metric has it.

    ``report_age_s``: age of its last report, None if there was none. ``is_read``: whether extproc reads its metrics at
    all. ``interval_s``: between two reads. ``missing_model``: its ModelServer's, if the engine lists others alone.
    ``role``: such as ``prefill``; empty if it has none.
    """

    server: str
    endpoint: str
    reasons: tuple[str, ...] = ()
    avoided_since_s: float | None = None
    report_age_s: float | None = None
    is_read: bool = True
    interval_s: float = 0.0
    missing_model: str = ""
    role: str = ""
    breaker: float = 0.0

    @property
    def is_silent(self) -> bool:
        """Its metrics are read, and there is no recent report."""
        return self.is_read and (self.report_age_s is None or self.report_age_s >= silent_after_s(self.interval_s))

    @property
    def status_text(self) -> str:
        """For the table."""
        if self.reasons:
            return "AVOIDED"
        if self.is_silent:
            return "SILENT"
        return "NO MODEL" if self.missing_model else "serving"

    @property
    def is_dead(self) -> bool:
        """It does not answer, so its learned speed is out of date."""
        return self.is_silent or not _DEAD.isdisjoint(self.reasons)


def engine_states(now: MetricsSnapshot) -> list[EngineState]:
    """Of all endpoints of the configuration."""
    return [
        _state(now, server, endpoint)
        for server, endpoint in now.label_values("attache_in_flight", "server", "endpoint")
    ]


def _state(now: MetricsSnapshot, server: str, endpoint: str) -> EngineState:
    where = {"server": server, "endpoint": endpoint}
    return EngineState(
        server,
        endpoint,
        tuple(reason for (reason,) in now.label_values("attache_endpoint_avoided", "reason", **where)),
        now.get("attache_endpoint_avoided_since_timestamp_seconds", **where),
        now.get("attache_engine_report_age_seconds", **where),
        is_read=now.sum("attache_engine_reports_total", server=server) > 0,
        interval_s=now.get("attache_engine_report_interval_seconds", server=server) or 0.0,
        missing_model=next((model for (model,) in now.label_values(MODEL_MISSING, "model", **where)), ""),
        role=next((role for (role,) in now.label_values("attache_endpoint_role", "role", **where)), ""),
        breaker=now.get("attache_breaker_state", **where) or 0.0,
    )


def engine_summary(states: list[EngineState]) -> str:
    """How many are in which state; those in none are left out."""
    counts = {
        status_text: sum(one.status_text == status_text for one in states)
        for status_text in ("serving", "NO MODEL", "AVOIDED", "SILENT")
    }
    return "engines: " + (
        ", ".join(f"{count} {status_text.lower()}" for status_text, count in counts.items() if count) or "none"
    )


def describe_unhealthy_engines(states: list[EngineState], *, wall_now_s: float, width: int) -> list[str]:
    """A paragraph for each engine that is not well, and an empty line; nothing if all are well."""
    lines: list[str] = []
    for one in states:
        if one.status_text != "serving":
            text = f"{one.endpoint} of {one.server} {_ailment(one, wall_now_s)}"
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, ""] if lines else []


def _ailment(one: EngineState, wall_now_s: float) -> str:
    if one.report_age_s is None:
        report = "it has never said how it is"
    else:
        report = f"it last said how it is {_ago(one.report_age_s)}"
    if not one.reasons and not one.is_silent:
        return f"lists other models than '{one.missing_model}', that of its ModelServer"
    if not one.reasons:
        return f"is silent: {report}; see that it runs, and that its metrics page answers"
    since = ""
    # a page may have any number; datetime has no later year
    if one.avoided_since_s is not None and 0 <= one.avoided_since_s < _LAST_AT_S:
        at = datetime.fromtimestamp(one.avoided_since_s, UTC)
        since = f" since {at:%H:%M:%S} UTC ({_ago(wall_now_s - one.avoided_since_s)})"
    whys = "; ".join(_why(reason) for reason in one.reasons) + _TRIED.get(one.breaker, "")
    if one.is_silent:
        return f"is avoided{since}: {whys}; {report}"
    again = "; it reports again, and the next request for which it is the best choice tries it"
    is_back = one.is_read and not _reported_before(one, wall_now_s) and not _DEAD.isdisjoint(one.reasons)
    return f"is avoided{since}: {whys}" + (again if is_back else "")


def _reported_before(one: EngineState, wall_now_s: float) -> bool:
    """Its last report is older than its failure, so it does not show that the engine is back."""
    if one.avoided_since_s is None or one.report_age_s is None:
        return False
    return wall_now_s - one.report_age_s <= one.avoided_since_s


def _why(reason: str) -> str:
    if reason == _NO_ANSWER_REASON:
        return f"{NO_ANSWER}; {ADVICE[EngineFailure.PASSED_OVER]}"
    known = {one.name.lower(): one for one in EngineFailure}.get(reason)
    return f"{known.value}; {ADVICE[known]}" if known is not None else reason


def _ago(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s ago"
    return f"{whole // 60} min ago" if whole < 7200 else f"{whole // 3600} h ago"


def engine_table(
    states: list[EngineState], now: MetricsSnapshot, rate: Callable[..., float], *, width: int
) -> list[str]:
    """One line an engine. ``rate``: of a counter, by its labels. An unknown value is a dash. Roles have a column where
    there are any.
    """
    heads = ["STATE", "IN FLIGHT", "RUNNING", "WAITING", "KV", "TTFT", "FAILED", "PROMPT TOK/S", "CACHED"]
    values = [_row(one, partial(now.get, server=one.server, endpoint=one.endpoint), rate) for one in states]
    rows = [[one.server, one.endpoint, one.role or "-", *row] for one, row in zip(states, values, strict=True)]
    without = () if any(one.role for one in states) else ("ROLE",)
    return format_table(
        ["SERVER", "ENGINE", "ROLE", *heads], rows, width=width, without=without, expendable=_EXPENDABLE
    )


def _row(one: EngineState, value: Callable[[str], float | None], rate: Callable[..., float]) -> list[str]:
    def formatted(name: str, form: str) -> str:
        known = value(name)
        return "-" if known is None or one.is_silent else format(known, form)

    ttft_s = None if one.is_dead else value("attache_endpoint_ttft_seconds")
    return [
        one.status_text,
        f"{value('attache_in_flight') or 0:.0f}",
        formatted("attache_engine_running", ".0f"),
        formatted("attache_engine_waiting", ".0f"),
        formatted("attache_engine_kv_usage", ".0%"),
        "-" if ttft_s is None else _short(ttft_s),
        f"{value('attache_endpoint_failed_ratio') or 0:.0%}",
        f"{rate('attache_prompt_tokens_total', server=one.server, endpoint=one.endpoint):,.0f}",
        f"{value('attache_cached_token_ratio') or 0:.0%}",
    ]


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def render(
    before: MetricsSnapshot,
    now: MetricsSnapshot,
    *,
    seconds: float,
    tenants: int,
    wall_now_s: float = 0.0,
    width: int = UNBOUNDED,
) -> str:
    """Counters become rates over the ``seconds`` between the two. ``wall_now_s``: Unix time of the second.

    Lines that need attention come first, as a terminal may be too low for all lines.
    """
    rate = partial(_rate, before, now, seconds)
    states = engine_states(now)
    lines = [
        f"{rate('attache_picks_total'):.1f} picks/s, {now.sum('attache_open_streams'):.0f} requests open, "
        f"{rate('attache_requests_total', outcome='rate_limited'):.1f} rate-limited/s, "
        f"{now.sum('attache_queue_waiting'):.0f} waiting",
        engine_summary(states),
        "",
        *_refused_directory(now, width),
        *_failing_servers(now, width),
        *_wrong_models(now, width),
        *describe_unhealthy_engines(states, wall_now_s=wall_now_s, width=width),
        *_failing_plugins(now, rate, width),
        *engine_table(states, now, rate, width=width),
        *_answers(now, rate, width),
        *_caches(now, rate, width),
        *_queues(before, now, rate, width),
        *_tenants(now, rate, tenants, width),
        *_budgets(now, tenants, width),
    ]
    return "\n".join(lines)


def _wrong_models(now: MetricsSnapshot, width: int) -> list[str]:
    """A paragraph for each ModelServer whose engines all lack its model, and an empty line."""
    found = [f"{server}: {problem}" for server, problem in sorted(now.wrong_models.items())]
    lines = [line for one in found for line in textwrap.wrap(one, width, subsequent_indent="  ")]
    return [*lines, ""] if lines else []


def _refused_directory(now: MetricsSnapshot, width: int) -> list[str]:
    """A paragraph while the directory as it is now is not in use, and an empty line."""
    if now.get(_CONFIG_VALID) != 0:
        return []
    text = (
        "the configuration directory has a mistake, and the last valid state stays in use; attache check and extproc's "
        "log name the mistake"
    )
    return [*textwrap.wrap(text, width, subsequent_indent="  "), ""]


def _failing_servers(now: MetricsSnapshot, width: int) -> list[str]:
    """A paragraph for each ModelServer whose breaker is not closed, and an empty line."""
    lines: list[str] = []
    for (server,) in now.label_values("attache_breaker_state", "server", endpoint=""):
        state = now.get("attache_breaker_state", server=server, endpoint="")
        if state:
            text = (
                f"the breaker of {server} is {'half-open' if state == BreakerState.HALF_OPEN else 'open'}: most of its "
                "requests have failed, so they go to another ModelServer of their rule or get 503 (server_failing); "
                f"attache reset {server} closes it"
            )
            lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, ""] if lines else []


def _failing_plugins(now: MetricsSnapshot, rate: Callable[..., float], width: int) -> list[str]:
    """Plugins of other packages that have failed since extproc started."""
    name = "attache_plugin_failures_total"
    texts = [
        f"plugin {plugin} of {server} has failed {now.sum(name, server=server, plugin=plugin):.0f} times "
        f"({rate(name, server=server, plugin=plugin):.1f}/s): requests are decided without it; see extproc's log"
        for server, plugin in now.label_values(name, "server", "plugin")
    ]
    lines = [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return [*lines, ""] if lines else []


def _answers(now: MetricsSnapshot, rate: Callable[..., float], width: int) -> list[str]:
    """The outcomes of each ModelServer's requests."""
    name = "attache_answers_total"
    rows = [
        [
            server,
            f"{rate('attache_picks_total', server=server):.1f}",
            *(f"{rate(name, server=server, status_class=one):.1f}" for one in ("2xx", "4xx", "5xx", "none")),
            f"{rate(name, server=server, first_choice='no'):.1f}",
        ]
        for (server,) in now.label_values("attache_picks_total", "server")
    ]
    return format_table(
        ["SERVER", "PICKS/S", "2XX/S", "4XX/S", "5XX/S", "NO ANSWER/S", "FALLBACKS/S"], rows, width=width
    )


def _caches(now: MetricsSnapshot, rate: Callable[..., float], width: int) -> list[str]:
    """What the response cache of each route does."""
    name = "attache_response_cache_lookups_total"
    rows = []
    for (route,) in now.label_values(name, "route"):
        hits, misses, passed = (rate(name, route=route, result=one) for one in ("hit", "miss", "bypass"))
        share = f"{hits / (hits + misses):.0%}" if hits + misses else "-"
        rows.append([route, f"{hits:.1f}", f"{misses:.1f}", f"{passed:.1f}", share])
    return format_table(["ROUTE", "CACHE HITS/S", "MISSES/S", "NOT LOOKED UP/S", "HIT SHARE"], rows, width=width)


def _queues(before: MetricsSnapshot, now: MetricsSnapshot, rate: Callable[..., float], width: int) -> list[str]:
    rows = [
        [
            server,
            band,
            f"{now.sum('attache_queue_waiting', server=server, band=band):.0f}",
            f"{rate('attache_queue_wait_seconds_count', server=server, band=band):.1f}",
            _mean_wait(before, now, server, band),
            f"{rate('attache_queue_waits_total', server=server, band=band, outcome='queue_timeout'):.1f}",
            f"{rate('attache_queue_waits_total', server=server, band=band, outcome='left'):.1f}",
            f"{now.sum('attache_saturation', server=server):.0%}",
        ]
        for server, band in now.label_values("attache_queue_waiting", "server", "band")
    ]
    heads = ["SERVER", "BAND", "WAITING", "SENT/S", "MEAN WAIT", "TIMEOUTS/S", "LEFT/S", "SATURATION"]
    return format_table(heads, rows, width=width, expendable=("LEFT/S", "SENT/S", "TIMEOUTS/S"))


def _rate(before: MetricsSnapshot, now: MetricsSnapshot, seconds: float, name: str, **labels: str) -> float:
    return max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) / seconds


def _tenants(now: MetricsSnapshot, rate: Callable[..., float], most: int, width: int) -> list[str]:
    names = [name for (name,) in now.label_values("attache_tenant_requests_total", "tenant")]
    service = {name: rate("attache_tenant_service_tokens_total", tenant=name) for name in names}
    whole = sum(service.values())
    rows = [
        [
            name,
            f"{rate('attache_tenant_requests_total', tenant=name, outcome='picked'):.1f}",
            f"{service[name]:,.0f}",
            f"{service[name] / whole:.0%}" if whole else "-",
            f"{rate('attache_tenant_wait_seconds_total', tenant=name):.2f}",
            f"{sum(rate('attache_tenant_requests_total', tenant=name, outcome=one) for one in _REFUSED):.1f}",
        ]
        for name in sorted(names, key=lambda name: -service[name])[:most]
    ]
    heads = ["TENANT", "SENT/S", "SERVICE TOK/S", "SHARE", "WAITING", "REFUSED/S"]
    return format_table(heads, rows, width=width, expendable=("SERVICE TOK/S",))


def _budgets(now: MetricsSnapshot, most: int, width: int) -> list[str]:
    """The callers that have used the largest part of a budget."""
    name = "attache_budget_used_ratio"
    found = [
        (now.get(name, budget=budget, unit=unit, caller=caller) or 0.0, budget, caller, unit)
        for budget, unit, caller in now.label_values(name, "budget", "unit", "caller")
    ]
    rows = [
        [budget, caller or "(all)", _UNITS.get(unit, unit), f"{used:.0%}"]
        for used, budget, caller, unit in sorted(found, key=lambda one: (-one[0], one[1:]))[:most]
    ]
    return format_table(["BUDGET", "CALLER", "OF", "USED"], rows, width=width)


def _mean_wait(before: MetricsSnapshot, now: MetricsSnapshot, server: str, band: str) -> str:
    count, total = (
        now.sum(name, server=server, band=band) - before.sum(name, server=server, band=band)
        for name in ("attache_queue_wait_seconds_count", "attache_queue_wait_seconds_sum")
    )
    return f"{total / count:.2f}s" if count > 0 else "-"


class MetricsSnapshot:
    """Samples of one moment, added up over processes.

    A query uses an index by the labels that it names, which is built once for each set of label names: a screen of many
    engines queries each of them, and must not scan the series of all others each time.
    """

    def __init__(self) -> None:
        # by ModelServer, as the page of the configuration has them
        self.wrong_models: dict[str, str] = {}
        self._values: dict[str, dict[_Labels, float]] = {}
        self._indexes: dict[str, dict[_Names, _Index]] = {}

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """Add one sample; one that is no finite number is ignored."""
        if not math.isfinite(value):
            return
        series = self._values.setdefault(name, {})
        self._indexes.pop(name, None)
        key = tuple(sorted(labels.items()))
        known = series.get(key)
        if known is None:
            series[key] = value
        elif name in _SEEN_BY_ALL:
            series[key] = max(known, value)
        elif name in _LEAST:
            series[key] = min(known, value)
        else:
            series[key] = known + value

    def sum(self, name: str, **labels: str) -> float:
        """Over all series that have these labels."""
        return sum(value for _, value in self._having(name, labels))

    def get(self, name: str, **labels: str) -> float | None:
        """The sum, or None if no series has these labels."""
        found = self._having(name, labels)
        return sum(value for _, value in found) if found else None

    def label_values(self, name: str, *labels: str, **where: str) -> list[tuple[str, ...]]:
        """All values of some labels, in order. ``where``: labels that the series have."""
        return sorted({tuple(series.get(label, "") for label in labels) for series, _ in self._having(name, where)})

    @property
    def has_extproc_metrics(self) -> bool:
        """Whether a page of extproc is among them."""
        return "attache_open_streams" in self._values

    def _having(self, name: str, labels: Mapping[str, str]) -> Sequence[_Series]:
        """The series that have these labels, and maybe others."""
        indexes = self._indexes.setdefault(name, {})
        names = tuple(labels)
        index = indexes.get(names)
        if index is None:
            index = indexes[names] = _index(self._values.get(name, {}), names)
        return index.get(tuple(labels.values()), ())


def _index(values: Mapping[_Labels, float], names: _Names) -> _Index:
    """Series by their values of these labels; those that lack one of them are left out."""
    index: _Index = {}
    for key, value in values.items():
        labels = dict(key)
        if all(name in labels for name in names):
            index.setdefault(tuple(labels[name] for name in names), []).append((labels, value))
    return index
