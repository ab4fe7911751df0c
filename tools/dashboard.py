# SPDX-License-Identifier: Apache-2.0
"""Grafana's dashboard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FILE: Final = Path(__file__).parents[1] / "manifests" / "monitoring" / "common" / "dashboard.json"
_WIDTH: Final = 8
_HEIGHT: Final = 7
_ROW: Final = 24


class Panel(NamedTuple):
    """``queries``: an expression and the name of its lines."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def _rate(metric: str, by: str, *, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"


def _increase(metric: str, *, where: str = "") -> str:
    return f"sum by (route, class, objective) (increase({metric}{where}[$__range]))"


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    names = "".join(f" {{{{{one}}}}}" for one in by.split(", ") if one)
    labels = f"le, {by}" if by else "le"
    return tuple(
        (f"histogram_quantile({share}, {_rate(f'{metric}_bucket', labels)})", f"p{share * 100:g}{names}")
        for share in (0.5, 0.95, 0.99)
    )


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Requests",
        (
            Panel("Requests by outcome", "reqps", ((_rate("attache_requests_total", "outcome"), "{{outcome}}"),)),
            Panel(
                "Answers by status",
                "reqps",
                ((_rate("attache_answers_total", "server, status_class"), "{{server}} {{status_class}}"),),
            ),
            Panel(
                "Served by the first choice",
                "percentunit",
                (
                    (
                        _rate("attache_answers_total", "server", where='{first_choice="yes"}')
                        + " / "
                        + _rate("attache_answers_total", "server"),
                        "{{server}}",
                    ),
                ),
                "The rest went down the list: an engine could not be reached, or said 503.",
            ),
            Panel("Time to decide", "s", _quantiles("attache_pick_seconds"), "From the whole body to the decision."),
            Panel("Length of requests", "s", _quantiles("attache_stream_seconds")),
            Panel("Open requests", "short", (("sum by (pod) (attache_open_streams)", "{{pod}}"),)),
            Panel(
                "Translated requests",
                "reqps",
                ((_rate("attache_translations_total", "client, engine, ended"), "{{client}} to {{engine}} {{ended}}"),),
            ),
        ),
    ),
    (
        "Queues",
        (
            Panel(
                "Waiting",
                "short",
                (("sum by (server, band) (attache_queue_waiting)", "{{server}} band {{band}}"),),
            ),
            Panel("Time in the queue", "s", _quantiles("attache_queue_wait_seconds", "server")),
            Panel(
                "How waits end",
                "reqps",
                ((_rate("attache_queue_waits_total", "server, outcome"), "{{server}} {{outcome}}"),),
            ),
            Panel("Saturation", "percentunit", (("max by (server) (attache_saturation)", "{{server}}"),)),
            Panel(
                "Waiting without an engine",
                "short",
                (("sum by (server) (attache_wanted_engines)", "{{server}}"),),
                "Requests that wait while there is no engine: start one.",
            ),
            Panel(
                "Tenants",
                "reqps",
                ((_rate("attache_tenant_requests_total", "tenant, outcome"), "{{tenant}} {{outcome}}"),),
            ),
            Panel(
                "Tokens of tenants",
                "short",
                tuple(
                    (_rate(f"attache_tenant_{kind}_tokens_total", "tenant"), f"{{{{tenant}}}} {kind}")
                    for kind in ("prompt", "cached", "output")
                ),
                "Tokens a second; those of prompts include cached ones.",
            ),
            Panel("Time to the first content, by tenant", "s", _quantiles("attache_tenant_ttft_seconds", "tenant")),
        ),
    ),
    (
        "Engines",
        (
            Panel(
                "Requests in flight",
                "short",
                (("max by (server, endpoint) (attache_in_flight)", "{{server}} {{endpoint}}"),),
                "As each extproc knows them, those of the others included: the greatest counts, not the sum.",
            ),
            Panel(
                "Waiting in engines",
                "short",
                (("max by (server, endpoint) (attache_engine_waiting)", "{{server}} {{endpoint}}"),),
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                (("max by (server, endpoint) (attache_engine_kv_usage)", "{{server}} {{endpoint}}"),),
            ),
            Panel(
                "Prompt tokens from the cache",
                "percentunit",
                (
                    (
                        (
                            f"{_rate('attache_cached_tokens_total', 'server')} /"
                            f" {_rate('attache_prompt_tokens_total', 'server')}"
                        ),
                        "{{server}}",
                    ),
                ),
            ),
            Panel(
                "Avoided",
                "short",
                (
                    (
                        "max by (server, endpoint, reason) (attache_endpoint_avoided)",
                        "{{server}} {{endpoint}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Age of engines' reports",
                "s",
                (("max by (server, endpoint) (attache_engine_report_age_seconds)", "{{server}} {{endpoint}}"),),
            ),
        ),
    ),
    (
        "Configuration",
        (
            Panel(
                "Something is wrong",
                "short",
                (
                    ("max by (pool, reason) (attache_pool_problem)", "{{pool}} {{reason}}"),
                    ("max by (pod) (attache_gateway_refused)", "{{pod}} refused"),
                    ("1 - min by (pod) (attache_config_valid)", "{{pod}} directory"),
                    ("1 - min by (pod) (attache_bundle_config_valid)", "{{pod}} bundle"),
                ),
                "Lines above 0.",
            ),
            Panel(
                "Endpoints of pools",
                "short",
                (("max by (pool, state) (attache_pool_endpoints)", "{{pool}} {{state}}"),),
            ),
            Panel(
                "Changes of the cluster",
                "ops",
                ((_rate("attache_gateway_changes_total", "pod"), "{{pod}}"),),
            ),
            Panel("Time to compile a change", "s", _quantiles("attache_gateway_compile_seconds")),
            Panel("Age of the configuration in use", "s", (("max by (pod) (attache_config_age_seconds)", "{{pod}}"),)),
            Panel(
                "Certificates end in",
                "s",
                (
                    ("min by (pod) (attache_tls_certificate_expires_timestamp_seconds) - time()", "{{pod}}"),
                    (
                        "min by (pod, file) (attache_bundle_certificate_end_timestamp_seconds) - time()",
                        "{{pod}} {{file}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Models and rollouts",
        (
            Panel("Models by phase", "short", (("sum by (phase) (attache_model_phase)", "{{phase}}"),)),
            Panel(
                "Not ready",
                "short",
                (("1 - max by (namespace, model) (attache_model_ready)", "{{namespace}}/{{model}}"),),
                "Lines above 0.",
            ),
            Panel(
                "Replicas",
                "short",
                (
                    (
                        "max by (namespace, model) (attache_model_wanted_replicas)",
                        "{{namespace}}/{{model}} wanted",
                    ),
                    ("max by (namespace, model) (attache_model_ready_replicas)", "{{namespace}}/{{model}} ready"),
                ),
            ),
            Panel(
                "Reconciles",
                "ops",
                ((_rate("attache_manager_reconciles_total", "kind, outcome"), "{{kind}} {{outcome}}"),),
                "Without an error and with nothing to do an object is settled.",
            ),
            Panel(
                "Objects that wait or fail",
                "short",
                (
                    ("max by (pod) (attache_manager_queue_depth)", "{{pod}} waiting"),
                    ("max by (pod) (attache_manager_queue_failing)", "{{pod}} failing"),
                ),
            ),
            Panel(
                "Writes of the manager",
                "ops",
                ((_rate("attache_manager_writes_total", "kind, verb"), "{{verb}} {{kind}}"),),
            ),
            Panel("Calls to the Kubernetes API", "s", _quantiles("attache_api_call_seconds", "verb")),
            Panel(
                "Calls that failed",
                "ops",
                (
                    (
                        _rate(
                            "attache_api_call_seconds_count", "verb, resource, code_class", where='{code_class!="2xx"}'
                        ),
                        "{{verb}} {{resource}} {{code_class}}",
                    ),
                ),
                "4xx are also what is not there, and conflicts.",
            ),
            Panel(
                "Replicas that start, or cannot be had",
                "short",
                (
                    (
                        "max by (namespace, variant_name) (attache_scaling_pending_replicas)",
                        "{{namespace}}/{{variant_name}} starting",
                    ),
                    (
                        "max by (namespace, variant_name) (attache_scaling_blocked)",
                        "{{namespace}}/{{variant_name}} blocked",
                    ),
                ),
            ),
        ),
    ),
    (
        "Objectives",
        (
            Panel(
                "Attained",
                "percentunit",
                (
                    (
                        _increase("attache_slo_requests_total", where='{result="good"}')
                        + " / "
                        + _increase("attache_slo_requests_total"),
                        "{{route}} {{class}} {{objective}}",
                    ),
                ),
                "Share of requests that met the objective, over the time that is shown.",
            ),
            Panel(
                "Error budget left",
                "percentunit",
                (
                    (
                        "1 - ("
                        + _increase("attache_slo_requests_total", where='{result="bad"}')
                        + " / "
                        + _increase("attache_slo_requests_total")
                        + ") / (1 - max by (route, class, objective) (attache_slo_share))",
                        "{{route}} {{class}} {{objective}}",
                    ),
                ),
                "Over the time that is shown: choose the window of the objective.",
            ),
            Panel(
                "Burn rate",
                "none",
                (
                    (
                        "("
                        + _rate("attache_slo_requests_total", "route, class, objective", where='{result="bad"}')
                        + " / "
                        + _rate("attache_slo_requests_total", "route, class, objective")
                        + ") / (1 - max by (route, class, objective) (attache_slo_share))",
                        "{{route}} {{class}} {{objective}}",
                    ),
                ),
                "1 uses the error budget up in exactly the window.",
            ),
            Panel(
                "Requests that could not be in time",
                "reqps",
                (
                    (
                        _rate("attache_slo_unmeetable_requests_total", "route, class, result"),
                        "{{route}} {{class}} {{result}}",
                    ),
                ),
                "Of classes with unmeetable: Refuse.",
            ),
            Panel("Time to the first content", "s", _quantiles("attache_request_ttft_seconds", "server, class")),
            Panel("Time per token", "s", _quantiles("attache_request_tpot_seconds", "server, class")),
            Panel("Time of whole answers", "s", _quantiles("attache_request_duration_seconds", "server, class")),
            Panel("Time held by extproc", "s", _quantiles("attache_request_held_seconds", "server, class")),
        ),
    ),
    (
        "Response cache",
        (
            Panel(
                "Looked up",
                "reqps",
                ((_rate("attache_response_cache_lookups_total", "route, result"), "{{route}} {{result}}"),),
                "Requests of routes with a cache; a bypass was not looked up.",
            ),
            Panel(
                "Share of hits",
                "percentunit",
                (
                    (
                        _rate("attache_response_cache_lookups_total", "route", where='{result="hit"}')
                        + " / "
                        + _rate("attache_response_cache_lookups_total", "route", where='{result=~"hit|miss"}'),
                        "{{route}}",
                    ),
                ),
                "Of the requests that were looked up.",
            ),
            Panel(
                "Why not looked up",
                "reqps",
                (
                    (
                        _rate("attache_response_cache_lookups_total", "route, reason", where='{result="bypass"}'),
                        "{{route}} {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Answers that came to be stored",
                "reqps",
                ((_rate("attache_response_cache_answers_total", "result"), "{{result}}"),),
            ),
            Panel(
                "Memory",
                "bytes",
                (("max by (pod) (attache_response_cache_bytes)", "{{pod}}"),),
                "Of the process that has most; each has at most 64 MiB.",
            ),
            Panel(
                "Answers that made room for others",
                "ops",
                (("sum by (pod) (rate(attache_response_cache_evictions[$__rate_interval]))", "{{pod}}"),),
            ),
        ),
    ),
    (
        "Usage",
        (
            Panel(
                "Cost by tenant",
                "none",
                (
                    (
                        "sum by (tenant, currency) (rate(attache_cost_micros_total[$__rate_interval])) * 0.0036",
                        "{{tenant}} {{currency}}",
                    ),
                ),
                "Whole units of the currency an hour.",
            ),
            Panel(
                "Usage rows behind",
                "s",
                (("max by (pod) (attache_usage_lag_seconds)", "{{pod}}"),),
                "How old the end of the oldest request is whose row is not kept.",
            ),
        ),
    ),
)


def dashboard() -> str:
    """The whole file."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _ROW, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        y += 1
        for number, panel in enumerate(row):
            x = number * _WIDTH % _ROW
            place = {"h": _HEIGHT, "w": _WIDTH, "x": x, "y": y + number * _WIDTH // _ROW * _HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        y += -(-len(row) * _WIDTH // _ROW) * _HEIGHT
    content = {
        "title": "Attaché",
        "uid": "attache",
        "schemaVersion": 39,
        "tags": ["attache"],
        "timezone": "",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": name}
            for index, (expression, name) in enumerate(panel.queries)
        ],
    }
