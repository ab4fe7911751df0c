# SPDX-License-Identifier: Apache-2.0
"""The records of a soak, and their evaluation, without I/O.

Memory must not grow for ever: a line is fitted to a process's memory after the warm-up, in which caches fill and
allocators find their size (measured: extproc goes from 86 to 101 MB in 8 minutes, and stays). The bound is 20 MiB an
hour. That is half a GiB a day, what a container may have to spare between two deployments. It is also what the fit can
distinguish from noise: memory that jumps by 10 MiB gives the slope of 50 minutes, with a sample every 10 s, an error of
2 MiB an hour. And it is little: 400 bytes kept of each of 15 requests a second, or 6 KB of each change a second, are
above it.

Allocators take memory in steps, too: Envoy took 4 MiB at once in an hour. One step of 10 MiB fails no soak. In the
middle of what is fitted it gives a slope of 1.5 times its height over that time: 18 MiB an hour in 50 minutes, and 90
in ten. So ten minutes show only what keeps 1.7 KB of each request, or 26 KB of each change.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB: Final = 1024 * 1024
_SHOWN: Final = 20
# Printed length of an error: its beginning names its kind.
_KIND: Final = 120


class ProcessSample(msgspec.Struct, frozen=True):
    """One process at one moment."""

    rss_bytes: int
    cpu_s: float
    fds: int
    threads: int


class Latency(msgspec.Struct, frozen=True):
    """Of the honest requests that ended since the last sample, from the first byte sent to the first received."""

    p50_s: float
    p99_s: float
    slowest_s: float


class Sample(msgspec.Struct, frozen=True):
    """``outcomes``: since the last sample, by audience: how many ended well (``ok``), lost, left. ``counters``: of
    extproc's feeds and of Envoy's updates, since the start. ``slowest_page_s``: extproc's page of its configuration is
    requested twice a second, so this is the longest time that its event loop was blocked.
    """

    at_s: float
    processes: Mapping[str, ProcessSample]
    outcomes: Mapping[str, Mapping[str, int]]
    latency: Latency
    counters: Mapping[str, float]
    slowest_page_s: float


class LostRequest(msgspec.Struct, frozen=True):
    """A request that did not get what it should. ``at_s``: when it was sent."""

    at_s: float
    audience: str
    model: str
    api: str
    error: str


class ConfigAdoption(msgspec.Struct):
    """Seconds from a change until it was used; None: not seen, as the end or the next change of the same file came
    first. ``client_s``: until a client sent the first request that observed it. ``at_s``: of the change, or of the
    mending of a broken file because of which the directory was refused.
    """

    change: str
    file: str
    at_s: float
    extproc_s: float | None = None
    envoy_s: float | None = None
    client_s: float | None = None
    is_superseded: bool = False


class BrokenFileRefusal(msgspec.Struct):
    """A broken file: when each process refused it, and when both used the mended one; None: not within a minute. One
    that the end of the soak interrupted is not recorded.
    """

    what: str
    at_s: float
    extproc_s: float | None = None
    bundle_s: float | None = None
    mended_s: float | None = None


class SoakRecord(msgspec.Struct):
    """All of a soak."""

    models: int
    seconds: float
    hostile: tuple[str, ...]
    samples: list[Sample] = []
    losses: list[LostRequest] = []
    totals: dict[str, dict[str, int]] = {}
    uptakes: list[ConfigAdoption] = []
    refusals: list[BrokenFileRefusal] = []
    log_lines: list[str] = []
    ended: list[str] = []
    trapped: int = 0
    stopped_by: str = ""


class SoakLimits(msgspec.Struct, frozen=True):
    """``uptake_s``: extproc waits 3 s before it uses a new ModelServer, and both are to have read 1,000 models; the
    slowest of all changes counts. ``probe_s``: the longest pause between two requests that look for a change.
    ``feed_s``: the longest that a feed may bring nothing. ``least_fitted_s``: samples must reach over so much; those of
    a soak of 15 minutes do, less what it warms up. ``step_mib``: memory may grow once by so much.
    """

    warm_up_s: float = 600.0
    least_fitted_s: float = 540.0
    growth_mib_per_hour: float = 20.0
    step_mib: float = 10.0
    uptake_s: float = 30.0
    probe_s: float = 5.0
    feed_s: float = 60.0


class SoakCheck(msgspec.Struct, frozen=True):
    """One criterion. ``is_ok``: None where the soak was too short to decide."""

    name: str
    is_ok: bool | None
    text: str


def judge(record: SoakRecord, bounds: SoakLimits) -> list[SoakCheck]:
    """Everything that was to be well, and whether it was."""
    return [
        *_lost(record),
        *_memory(record, bounds),
        _list("processes", record.ended, "all ran to the end"),
        _list("logs", record.log_lines, "no traceback and no assertion"),
        *_feeds(record, bounds),
        _adoptions(record, bounds),
        _refusals(record),
        _envoy(record),
        SoakCheck("redirects", record.trapped == 0, f"{record.trapped} requests followed an engine's redirect"),
        SoakCheck("end", not record.stopped_by, record.stopped_by or "the soak ran for its time"),
    ]


def passes(checks: Sequence[SoakCheck]) -> bool:
    """Nothing failed."""
    return all(one.is_ok is not False for one in checks)


def slope_mib_per_hour(points: Sequence[tuple[float, int]]) -> float:
    """The growth of memory: least squares through (seconds, bytes)."""
    found = statistics.linear_regression([at_s for at_s, _ in points], [rss for _, rss in points])
    return found.slope * 3600 / MIB


def _lost(record: SoakRecord) -> Iterator[SoakCheck]:
    for audience in ("honest", "known"):
        lost = [one for one in record.losses if one.audience == audience]
        sent = sum(record.totals.get(audience, {}).values())
        kinds = Counter(one.error[:_KIND] for one in lost)
        shown = "".join(f"\n  {times} times {kind}" for kind, times in kinds.most_common(_SHOWN))
        shown += "".join(f"\n  {one.at_s:.1f} s {one.model} {one.api}: {one.error[:_KIND]}" for one in lost[:_SHOWN])
        count = record.totals.get(audience, {}).get("lost", 0)
        what = "requests to honest models" if audience == "honest" else "requests to models just added or deleted"
        yield SoakCheck(f"{audience} requests", count == 0 and sent > 0, f"{count} of {sent} {what} lost{shown}")


def _memory(record: SoakRecord, bounds: SoakLimits) -> Iterator[SoakCheck]:
    warm = [one for one in record.samples if one.at_s >= bounds.warm_up_s]
    names = sorted({name for one in record.samples for name in one.processes})
    for name in names:
        points = [(one.at_s, one.processes[name].rss_bytes) for one in warm if name in one.processes]
        fitted_s = points[-1][0] - points[0][0] if points else 0.0
        if len(points) < 2 or fitted_s < bounds.least_fitted_s:
            yield SoakCheck(f"memory of {name}", None, "too short to tell")
            continue
        slope, last = slope_mib_per_hour(points), points[-1][1] / MIB
        most = max(bounds.growth_mib_per_hour, 1.5 * bounds.step_mib * 3600 / fitted_s)
        text = f"{slope:+.1f} MiB/h at {last:.0f} MiB; at most {most:+.1f}"
        yield SoakCheck(f"memory of {name}", slope <= most, text)


def _feeds(record: SoakRecord, bounds: SoakLimits) -> Iterator[SoakCheck]:
    feeds = sorted({name for one in record.samples for name in one.counters if name.startswith("feed ")})
    for feed in feeds:
        # extproc's page may not have answered in time; others measure that
        known = [one for one in record.samples if feed in one.counters]
        longest = longest_stall_s([(one.at_s, one.counters[feed]) for one in known])
        text = f"never silent for more than {longest:.0f} s; at most {bounds.feed_s:g}"
        yield SoakCheck(feed, longest <= bounds.feed_s, text)


def longest_stall_s(points: Sequence[tuple[float, float]]) -> float:
    """The longest time without a change of a counter, in seconds; a fall marks a restart of its process."""
    longest, since_s = 0.0, points[0][0] if points else 0.0
    for (_, before), (at_s, value) in itertools.pairwise(points):
        if value != before:
            since_s = at_s
        longest = max(longest, at_s - since_s)
    return longest


def _adoptions(record: SoakRecord, bounds: SoakLimits) -> SoakCheck:
    texts, is_ok = [], True
    limits = {"extproc_s": bounds.uptake_s, "envoy_s": bounds.uptake_s, "client_s": bounds.uptake_s + bounds.probe_s}
    for side, most_s in limits.items():
        known = sorted(value for one in record.uptakes if (value := getattr(one, side)) is not None)
        if not known:
            continue
        middle, last = known[len(known) // 2], known[-1]
        is_ok = is_ok and last <= most_s
        texts.append(f"{side[:-2]} {middle:.1f} s (slowest {last:.1f})")
    open_s = [record.seconds - one.at_s for one in record.uptakes if one.extproc_s is None and not one.is_superseded]
    late = sum(one > bounds.uptake_s for one in open_s)
    text = f"{', '.join(texts) or 'none seen'}; {late} of {len(record.uptakes)} not used within {bounds.uptake_s:g} s"
    return SoakCheck("changes", is_ok and not late and bool(texts), text)


def _refusals(record: SoakRecord) -> SoakCheck:
    missed = [
        f"{one.what} at {one.at_s:.0f} s"
        for one in record.refusals
        if one.extproc_s is None or one.bundle_s is None or one.mended_s is None
    ]
    count = len(record.refusals)
    text = f"{count - len(missed)} of {count} refused by both and mended"
    return SoakCheck("broken files", not missed, f"{text}{': not ' if missed else ''}{', '.join(missed[:_SHOWN])}")


def _envoy(record: SoakRecord) -> SoakCheck:
    rejected = max((one.counters.get("envoy rejected", 0.0) for one in record.samples), default=0.0)
    return SoakCheck("Envoy's updates", rejected == 0, f"{rejected:g} rejected")


def _list(name: str, found: Sequence[str], well: str) -> SoakCheck:
    return SoakCheck(name, not found, "\n  ".join([f"{len(found)}:", *found[:_SHOWN]]) if found else well)
