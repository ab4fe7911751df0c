# SPDX-License-Identifier: Apache-2.0
"""A soak's verdict, from records that are made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.soak.verdict import (
    MIB,
    BrokenFileRefusal,
    ConfigAdoption,
    Latency,
    LostRequest,
    ProcessSample,
    Sample,
    SoakLimits,
    SoakRecord,
    judge,
    longest_stall_s,
    passes,
    slope_mib_per_hour,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BOUNDS = SoakLimits()
QUIET = Latency(0.01, 0.02, 0.03)


def sample(at_s: float, rss_mib: float, **counters: float) -> Sample:
    """With one process, and a feed that has brought something unless ``counters`` say otherwise."""
    process = ProcessSample(round(rss_mib * MIB), cpu_s=at_s / 10, fds=20, threads=5)
    counted = {"feed KV events": at_s, "envoy rejected": 0.0, **counters}
    return Sample(at_s, {"extproc": process}, {"honest": {"ok": 150}}, QUIET, counted, 0.01)


def good() -> SoakRecord:
    """An hour in which memory grew in the first ten minutes, and then not any more."""
    samples = [sample(at_s, min(100.0, 50.0 + at_s / 10)) for at_s in range(10, 3601, 10)]
    return SoakRecord(
        models=1000,
        seconds=3600.0,
        hostile=(),
        samples=samples,
        totals={"honest": {"ok": 54_000}, "known": {"ok": 4_000}},
        uptakes=[ConfigAdoption("weight", "a.yaml", 10.0, extproc_s=0.2, envoy_s=1.0)],
        refusals=[BrokenFileRefusal("no YAML", 30.0, extproc_s=0.1, bundle_s=0.2, mended_s=1.0)],
    )


def failed(record: SoakRecord) -> list[str]:
    """The names of the checks that failed."""
    return [one.name for one in judge(record, BOUNDS) if one.is_ok is False]


def test_a_soak_in_which_nothing_went_wrong_is_well() -> None:
    assert passes(judge(good(), BOUNDS))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"ended": ["extproc ended"]}, "processes"),
        ({"log_lines": ["extproc.log: KeyError (3 times)"]}, "logs"),
        ({"trapped": 1}, "redirects"),
        ({"stopped_by": "stopped after 7 s"}, "end"),
        ({"totals": {"honest": {"ok": 5, "lost": 1}, "known": {"ok": 1}}}, "honest requests"),
        ({"totals": {"honest": {"ok": 5}, "known": {"lost": 1}}}, "known requests"),
        ({"totals": {}}, "honest requests"),
        ({"uptakes": []}, "changes"),
        ({"uptakes": [ConfigAdoption("weight", "a.yaml", 10.0, extproc_s=31.0)]}, "changes"),
        ({"uptakes": [ConfigAdoption("weight", "a.yaml", 10.0, client_s=36.0)]}, "changes"),
        ({"uptakes": [ConfigAdoption("a", "a", 1.0, extproc_s=1.0), ConfigAdoption("b", "b", 9.0)]}, "changes"),
        ({"refusals": [BrokenFileRefusal("no YAML", 30.0, extproc_s=0.1)]}, "broken files"),
        ({"samples": [sample(1.0, 50.0, **{"envoy rejected": 1.0}), *good().samples]}, "Envoy's updates"),
        ({"samples": [*good().samples, sample(3700.0, 100.0, **{"feed KV events": 3600.0})]}, "feed KV events"),
    ],
)
def test_each_thing_that_goes_wrong_fails_a_check(change: dict[str, object], name: str) -> None:
    assert name in failed(msgspec.structs.replace(good(), **change))


def test_what_the_last_seconds_could_not_show_fails_nothing() -> None:
    late = msgspec.structs.replace(good(), uptakes=[*good().uptakes, ConfigAdoption("weight", "b.yaml", 3590.0)])

    assert failed(late) == []


def test_a_change_that_the_next_one_of_its_file_overtook_is_not_late() -> None:
    overtaken = ConfigAdoption("weight", "b.yaml", 10.0, is_superseded=True)

    assert failed(msgspec.structs.replace(good(), uptakes=[*good().uptakes, overtaken])) == []


def test_a_client_may_notice_a_change_a_pause_of_its_requests_later() -> None:
    noticed = ConfigAdoption("model added", "b.yaml", 10.0, extproc_s=29.0, client_s=34.0)

    assert failed(msgspec.structs.replace(good(), uptakes=[noticed])) == []


def test_a_page_that_did_not_answer_says_nothing_of_feeds() -> None:
    gap = [msgspec.structs.replace(one, counters={}) for one in good().samples[100:110]]
    samples = [*good().samples[:100], *gap, *good().samples[110:]]

    assert failed(msgspec.structs.replace(good(), samples=samples)) == []


def test_requests_to_hostile_and_mixed_engines_may_be_lost() -> None:
    losses = [LostRequest(1.0, "hostile", "dies", "chat", "503"), LostRequest(2.0, "mixed", "mixed", "chat", "503")]
    totals = {**good().totals, "hostile": {"lost": 1}, "mixed": {"lost": 1}}

    assert failed(msgspec.structs.replace(good(), losses=losses, totals=totals)) == []


def test_a_lost_request_is_listed_with_its_time() -> None:
    lost = LostRequest(12.3, "honest", "m7.0", "chat", "503 no engine")
    record = msgspec.structs.replace(good(), losses=[lost], totals={"honest": {"ok": 1, "lost": 1}})

    (check,) = (one for one in judge(record, BOUNDS) if one.name == "honest requests")

    assert "12.3 s m7.0 chat: 503 no engine" in check.text


def test_memory_that_grows_after_the_warm_up_fails() -> None:
    # 30 MiB in the hour
    growing = [sample(at_s, 100 + at_s / 120) for at_s in range(10, 3601, 10)]

    assert failed(msgspec.structs.replace(good(), samples=growing)) == ["memory of extproc"]


def short(rss_mib: Callable[[float], float]) -> tuple[SoakRecord, SoakLimits]:
    """A quarter of an hour, five minutes of it the warm-up."""
    samples = [sample(at_s, rss_mib(at_s)) for at_s in range(10, 901, 10)]
    return msgspec.structs.replace(good(), seconds=900.0, samples=samples), SoakLimits(warm_up_s=300.0)


@pytest.mark.parametrize("at_s", [310, 450, 600, 890])
def test_one_step_of_memory_fails_no_short_soak(at_s: float) -> None:
    # what Envoy's allocator took at once in an hour of no leak
    assert passes(judge(*short(lambda now_s: 186.0 if now_s >= at_s else 180.0)))


def test_memory_that_grows_all_the_time_fails_a_short_soak() -> None:
    checks = judge(*short(lambda now_s: 100 + now_s / 36))

    assert [one.name for one in checks if one.is_ok is False] == ["memory of extproc"]


def test_memory_of_too_short_a_soak_is_not_judged() -> None:
    brief = msgspec.structs.replace(good(), samples=[sample(at_s, at_s) for at_s in range(10, 1000, 10)])

    (check,) = (one for one in judge(brief, BOUNDS) if one.name == "memory of extproc")

    assert check.is_ok is None


def test_the_slope_is_that_of_the_best_line() -> None:
    assert slope_mib_per_hour([(0, 0), (1800, 5 * MIB), (3600, 10 * MIB)]) == pytest.approx(10)


def test_a_feed_is_silent_while_its_counter_stands_still() -> None:
    assert longest_stall_s([(0, 1), (10, 2), (20, 2), (50, 2), (60, 3)]) == 40
    assert longest_stall_s([]) == 0
