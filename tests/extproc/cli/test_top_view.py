# SPDX-License-Identifier: Apache-2.0
"""The terminal picture: rates between two readings, sums over processes."""

from __future__ import annotations

import pytest

from extproc.__main__ import main
from extproc.cli.top_view import Sample, render


def reading(**samples: float) -> Sample:
    made = Sample()
    for text, value in samples.items():
        name, *pairs = text.split("__")
        labels = dict(pair.split("_is_") for pair in pairs)
        made.add(f"attache_{name}", labels, value)
    return made


def test_counters_are_rates_and_gauges_are_as_they_are() -> None:
    before = reading(picks_total__server_is_llama=100, open_streams=3)
    now = reading(picks_total__server_is_llama=150, open_streams=7)
    assert render(before, now, seconds=2.0, tenants=9).startswith("25.0 picks/s, 7 requests open, 0.0 rate-limited/s")


def test_what_every_process_sees_whole_is_not_added_up() -> None:
    now = Sample()
    for _ in range(2):
        now.add("attache_in_flight", {"server": "default/llama", "endpoint": "e"}, 5)
        now.add("attache_prompt_tokens_total", {"server": "default/llama", "endpoint": "e"}, 50)
    engine = next(line for line in render(Sample(), now, seconds=1.0, tenants=9).splitlines() if "llama" in line)
    assert engine.split() == ["default/llama", "e", "5", "0", "0", "0%", "100", "0%"]


def test_queues_show_who_waits_and_how_long() -> None:
    before = reading(queue_waiting__server_is_llama__band_is_high=0)
    now = reading(
        queue_waiting__server_is_llama__band_is_high=12,
        queue_wait_seconds_count__server_is_llama__band_is_high=4,
        queue_wait_seconds_sum__server_is_llama__band_is_high=6,
        saturation__server_is_llama=1.0,
    )
    band = next(line for line in render(before, now, seconds=2.0, tenants=9).splitlines() if "high" in line)
    assert band.split() == ["llama", "high", "12", "2.0", "1.50s", "0.0", "0.0", "100%"]


def test_tenants_are_shown_by_their_share_and_the_largest_first() -> None:
    now = Sample()
    for tenant, service, refused in (("acme", 100.0, 0.0), ("bell", 300.0, 4.0), ("zero", 0.0, 0.0)):
        now.add("attache_tenant_requests_total", {"tenant": tenant, "outcome": "picked"}, 10)
        now.add("attache_tenant_requests_total", {"tenant": tenant, "outcome": "rate_limited"}, refused)
        now.add("attache_tenant_service_tokens_total", {"tenant": tenant, "server": "default/llama"}, service)
    lines = render(Sample(), now, seconds=2.0, tenants=2).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("TENANT"))
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["bell", "5.0", "150", "75%", "0.00", "2.0"],
        ["acme", "5.0", "50", "25%", "0.00", "0.0"],
    ]
    assert "zero" not in "\n".join(lines)


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "127.0.0.1:1"]) == 2
    assert "is extproc running there?" in capsys.readouterr().err


def test_words_that_are_no_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "localhost"])
    assert "is not an address" in capsys.readouterr().err
