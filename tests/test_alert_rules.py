# SPDX-License-Identifier: Apache-2.0
"""Prometheus itself evaluates the shipped rules for objectives, over days of counters, those for Models, and that for
the response cache.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Sequence

ALERTS: Final = Path(__file__).parent.parent / "manifests" / "monitoring" / "common" / "alerts.yaml"
LABELS: Final = {"route": "default/chat", "class": "chat", "objective": "ttft"}
FAST, MIDDLE, SLOW = "AttacheSloBurnsFast", "AttacheSloBurns", "AttacheSloBurnsSlowly"
HOUR, DAY = 60, 24 * 60
# Minutes between two samples, and two evaluations.
STEP = 2
# The longest window of a rule: what was before a fault counts in it.
WELL = 3 * DAY


def series(name: str, values: str, **more: str) -> dict[str, str]:
    labels = ",".join(f'{label}="{value}"' for label, value in {**LABELS, **more}.items())
    return {"series": f"{name}{{{labels}}}", "values": values}


def counter(*parts: tuple[int, float]) -> str:
    """Prometheus' notation for a counter: for so many minutes, so many more each."""
    value, texts = 0.0, []
    for minutes, each in parts:
        texts.append(f"{value:g}+{STEP * each:g}x{minutes // STEP - 1}")
        value += each * minutes
    return " ".join(texts)


def traffic(*parts: tuple[int, float], pod: str = "a", per_minute: float = 1000) -> list[dict[str, str]]:
    """Of one process: for so many minutes, this share of the requests has missed the objective."""
    bad = counter(*((minutes, per_minute * share) for minutes, share in parts))
    good = counter(*((minutes, per_minute * (1 - share)) for minutes, share in parts))
    minutes = sum(one for one, _ in parts)
    return [
        series("attache_slo_requests_total", bad, result="bad", pod=pod),
        series("attache_slo_requests_total", good, result="good", pod=pod),
        series("attache_slo_share", f"0.99x{minutes // STEP}", pod=pod),
    ]


def firing(
    folder: Path, inputs: Sequence[dict[str, str]], expected: dict[int, set[str]], group: str = "attache-slo"
) -> None:
    """Alerts of the group that fire, by minute."""
    groups = yaml.safe_load(ALERTS.read_text())["spec"]["groups"]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": [one for one in groups if one["name"] == group]}))
    checks: list[dict[str, Any]] = [
        {
            "eval_time": f"{minute}m",
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
        }
        for minute, names in expected.items()
    ]
    test = {"interval": f"{STEP}m", "input_series": list(inputs), "promql_expr_test": checks}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": f"{STEP}m", "tests": [test]}))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_outage_pages_within_ten_minutes_and_ends_with_it(tmp_path: Path) -> None:
    # all requests missed: more than 14.4% of the hour's after 9 minutes
    inputs = traffic((WELL, 0.0), (10, 1.0), (2 * HOUR, 0.0))
    firing(tmp_path, inputs, {WELL: set(), WELL + 4: set(), WELL + 10: {FAST}, WELL + 12: {FAST}, WELL + 20: set()})


@pytest.mark.slow
def test_a_fifth_that_misses_pages_within_an_hour(tmp_path: Path) -> None:
    inputs = traffic((WELL, 0.0), (3 * HOUR, 0.2))
    firing(tmp_path, inputs, {WELL + 35: set(), WELL + 50: {FAST}, WELL + 170: {FAST, MIDDLE}})


@pytest.mark.slow
def test_eight_percent_for_hours_page_too(tmp_path: Path) -> None:
    inputs = traffic((WELL, 0.0), (6 * HOUR, 0.08))
    firing(tmp_path, inputs, {WELL + 240: set(), WELL + 290: {MIDDLE}, WELL + 350: {MIDDLE}})


@pytest.mark.slow
def test_a_budget_that_will_not_last_is_a_warning(tmp_path: Path) -> None:
    inputs = traffic((DAY, 0.002), (3 * DAY, 0.015))
    firing(tmp_path, inputs, {DAY: set(), 2 * DAY: set(), 4 * DAY - 1: {SLOW}})


@pytest.mark.slow
def test_a_budget_that_lasts_is_nothing_to_report(tmp_path: Path) -> None:
    firing(tmp_path, traffic((4 * DAY, 0.008)), {10: set(), HOUR: set(), DAY: set(), 4 * DAY - 1: set()})


def test_processes_are_added_up(tmp_path: Path) -> None:
    # one that fails entirely has a tenth of the requests: 10% are below 14.4%
    inputs = [*traffic((8 * HOUR, 0.0), per_minute=900), *traffic((8 * HOUR, 1.0), pod="b", per_minute=100)]
    firing(tmp_path, inputs, {7 * HOUR: {MIDDLE, SLOW}})


@pytest.mark.parametrize("begins_at", ["0", "50000"])
def test_a_restart_is_no_outage(tmp_path: Path, begins_at: str) -> None:
    inputs = traffic((3 * HOUR, 0.0), (3 * HOUR, 0.0))
    inputs[1]["values"] = f"{begins_at}+2000x89 0+2000x90"
    inputs[0]["values"] = "7x89 0x90"
    firing(tmp_path, inputs, {179: set(), 181: set(), 190: set(), 359: set()})


def test_no_requests_are_no_alert(tmp_path: Path) -> None:
    firing(tmp_path, traffic((DAY, 0.0), per_minute=0), {HOUR: set(), DAY - 1: set()})


def of_model(ready: str, wanted: str, replicas: str, failed: str) -> list[dict[str, str]]:
    where = '{namespace="default",model="llama"'
    return [
        {"series": f"attache_model_ready{where}}}", "values": ready},
        {"series": f"attache_model_wanted_replicas{where}}}", "values": wanted},
        {"series": f"attache_model_ready_replicas{where}}}", "values": replicas},
        {"series": f'attache_model_phase{where},phase="FailedToLoad"}}', "values": failed},
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (of_model("1x60", "2x60", "2x60", "0x60"), set()),
        (of_model("0x60", "0x60", "0x60", "0x60"), set()),
        (of_model("0x60", "2x60", "0x60", "1x60"), {"AttacheModelFailsToLoad"}),
        (of_model("0x60", "2x60", "0x60", "0x60"), {"AttacheModelNotReady"}),
        (of_model("1x60", "2x60", "1x60", "0x60"), {"AttacheReplicasMissing"}),
    ],
    ids=["ready", "without replicas", "failed", "loading for an hour", "one of two"],
)
def test_a_model_that_does_not_serve_is_told(tmp_path: Path, model: list[dict[str, str]], expected: set[str]) -> None:
    early = expected & {"AttacheModelFailsToLoad"}
    firing(tmp_path, model, {0: set(), 10: early, 50: expected}, "attache-models")


@pytest.mark.parametrize(
    ("misses", "stored", "expected"),
    [
        ("0+10x90", "0x90", {"AttacheResponseCacheStoresNothing"}),
        ("0+10x90", "0+1x90", set()),
        ("0+1x90", "0x90", set()),
    ],
    ids=["nothing is stored", "some is stored", "hardly any requests"],
)
def test_a_response_cache_that_stores_nothing_is_told(
    tmp_path: Path, misses: str, stored: str, expected: set[str]
) -> None:
    where = 'namespace="attache",pod="a"'
    inputs = [
        {
            "series": f'attache_response_cache_lookups_total{{{where},route="default/chat",result="miss"}}',
            "values": misses,
        },
        {"series": f'attache_response_cache_answers_total{{{where},result="stored"}}', "values": stored},
        {"series": f'attache_response_cache_answers_total{{{where},result="not_whole"}}', "values": misses},
    ]
    firing(tmp_path, inputs, {10: set(), 120: expected}, "attache-response-cache")


@pytest.mark.parametrize(
    ("ended", "values", "expected"),
    [
        ("untranslatable", "0+1x60", {"AttacheAnswersUntranslatable"}),
        # one is no fault that lasts
        ("untranslatable", "0x20 1x40", set()),
        ("answered", "0+9x60", set()),
        ("left", "0+9x60", set()),
    ],
)
def test_engines_whose_answers_are_no_ones_of_their_api_are_told(
    tmp_path: Path, ended: str, values: str, expected: set[str]
) -> None:
    name = f'attache_translations_total{{client="messages",engine="chat",ended="{ended}",pod="a"}}'
    firing(tmp_path, [{"series": name, "values": values}], {40: expected, 100: expected}, "attache-engines")
