# SPDX-License-Identifier: Apache-2.0
"""Two readings of metrics to a picture of what goes on: engines, queues, tenants."""

from __future__ import annotations

import textwrap
from functools import partial
from typing import TYPE_CHECKING, Final

from extproc.cli.top_engines import ailments, engine_states, engine_table, summary
from extproc.cli.top_table import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.cli.top_sample import Sample

_REFUSED: Final = ("rate_limited", "queue_full", "queue_timeout", "shed", "limits_unavailable", "no_endpoint")
UNBOUNDED: Final = 10_000


def render(
    before: Sample, now: Sample, *, seconds: float, tenants: int, wall_now_s: float = 0.0, width: int = UNBOUNDED
) -> str:
    """Counters become rates over the ``seconds`` between the two. ``wall_now_s``: Unix time of the second.

    What needs somebody's attention comes first, as a terminal may be too low for all lines.
    """
    rate = partial(_rate, before, now, seconds)
    states = engine_states(now)
    lines = [
        f"{rate('attache_picks_total'):.1f} picks/s, {now.sum('attache_open_streams'):.0f} requests open, "
        f"{rate('attache_requests_total', outcome='rate_limited'):.1f} rate-limited/s, "
        f"{now.sum('attache_queue_waiting'):.0f} waiting",
        summary(states),
        "",
        *ailments(states, wall_now_s=wall_now_s, width=width),
        *_failing_plugins(now, rate, width),
        *engine_table(states, now, rate, width=width),
        *_answers(now, rate, width),
        *_queues(before, now, rate, width),
        *_tenants(now, rate, tenants, width),
    ]
    return "\n".join(lines)


def _failing_plugins(now: Sample, rate: Callable[..., float], width: int) -> list[str]:
    """Plugins of other packages that have failed since extproc started."""
    name = "attache_plugin_failures_total"
    texts = [
        f"plugin {plugin} of {server} has failed {now.sum(name, server=server, plugin=plugin):.0f} times "
        f"({rate(name, server=server, plugin=plugin):.1f}/s): requests are decided without it; see extproc's log"
        for server, plugin in now.values_of(name, "server", "plugin")
    ]
    lines = [line for text in texts for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return [*lines, ""] if lines else []


def _answers(now: Sample, rate: Callable[..., float], width: int) -> list[str]:
    """What clients of each ModelServer got."""
    name = "attache_answers_total"
    rows = [
        [
            server,
            f"{rate('attache_picks_total', server=server):.1f}",
            *(f"{rate(name, server=server, status_class=one):.1f}" for one in ("2xx", "4xx", "5xx", "none")),
            f"{rate(name, server=server, first_choice='no'):.1f}",
        ]
        for (server,) in now.values_of("attache_picks_total", "server")
    ]
    return table(["SERVER", "PICKS/S", "2XX/S", "4XX/S", "5XX/S", "NO ANSWER/S", "FALLBACKS/S"], rows, width=width)


def _queues(before: Sample, now: Sample, rate: Callable[..., float], width: int) -> list[str]:
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
        for server, band in now.values_of("attache_queue_waiting", "server", "band")
    ]
    heads = ["SERVER", "BAND", "WAITING", "SENT/S", "MEAN WAIT", "TIMEOUTS/S", "LEFT/S", "SATURATION"]
    return table(heads, rows, width=width, expendable=("LEFT/S", "SENT/S", "TIMEOUTS/S"))


def _rate(before: Sample, now: Sample, seconds: float, name: str, **labels: str) -> float:
    return max(0.0, now.sum(name, **labels) - before.sum(name, **labels)) / seconds


def _tenants(now: Sample, rate: Callable[..., float], most: int, width: int) -> list[str]:
    names = [name for (name,) in now.values_of("attache_tenant_requests_total", "tenant")]
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
    return table(heads, rows, width=width, expendable=("SERVICE TOK/S",))


def _mean_wait(before: Sample, now: Sample, server: str, band: str) -> str:
    count, total = (
        now.sum(name, server=server, band=band) - before.sum(name, server=server, band=band)
        for name in ("attache_queue_wait_seconds_count", "attache_queue_wait_seconds_sum")
    )
    return f"{total / count:.2f}s" if count > 0 else "-"
