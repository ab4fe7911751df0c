# SPDX-License-Identifier: Apache-2.0
"""What one manager costs once it has settled: its processor time, memory, looks at bindings, writes and scrapes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from bench.usage import cpu_seconds

_CLOCK: Final = time.perf_counter  # benchmarks have clocks
# One scrape each: they must not be what the manager is busy with.
_LOOK_EACH_S: Final = 10.0
_SLICE_S: Final = 10.0
_SCRAPES: Final = 3
# Scaling starts by itself, and bindings rest after a minute.
_LEAST_S: Final = 90.0
# Settled: looks come once a period, nearly, or more often but evenly, and few bindings are written about in a minute.
_MOST_OFF: Final = 0.1
_MOST_WRITTEN: Final = 0.02


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """``cores``: of the whole process, in each ten seconds of the measured time. ``rss_mib``: at its end;
    ``peak_rss_mib``: the most since the start. ``looks_per_s``: of bindings. ``decided``: the share of looks in which a
    decision was made anew. ``scrape_s``: a page of metrics of ``page_mib``. ``writes``: during the measured time.
    ``load``: of the machine, the mean of a minute. ``settled_s``: how long it took; None: it never did, and the figures
    are of a busy start.
    """

    cores: Sequence[float]
    rss_mib: float
    peak_rss_mib: float
    looks_per_s: float
    decided: float
    scrape_s: float
    page_mib: float
    writes: float
    load: float
    settled_s: float | None


async def cost_of(pid: int, port: int, *, bindings: int, period_s: float, for_s: float, settle_s: float) -> Cost:
    """``pid``: of a manager whose pages are at ``port``. ``settle_s``: how long to wait at most until it has
    settled.
    """
    async with aiohttp.ClientSession() as http:
        settled_s = await _settled(http, port, bindings, period_s, settle_s)
        before = await _page(http, port)
        cores = [await _slice(pid) for _ in range(max(1, round(for_s / _SLICE_S)))]
        load, memory = os.getloadavg()[0], _memory_mib(pid)
        after = await _page(http, port)
        took_s = [await _scraped_s(http, port) for _ in range(_SCRAPES)]

    def grew(metric: str, having: str = "") -> float:
        return _sum(after, metric, having) - _sum(before, metric, having)

    looks = grew("attache_scaling_looks_total")
    return Cost(
        cores=cores,
        rss_mib=memory.get("VmRSS", 0.0),
        peak_rss_mib=memory.get("VmHWM", 0.0),
        looks_per_s=looks / (len(cores) * _SLICE_S),
        decided=grew("attache_scaling_looks_total", 'outcome="decided"') / looks if looks else 0.0,
        scrape_s=statistics.median(took_s),
        page_mib=len(after) / 2**20,
        writes=grew("attache_scaling_writes_total"),
        load=load,
        settled_s=settled_s,
    )


async def _slice(pid: int) -> float:
    began_s, used_s = _CLOCK(), cpu_seconds(pid)
    await asyncio.sleep(_SLICE_S)
    return (cpu_seconds(pid) - used_s) / (_CLOCK() - began_s)


async def _settled(
    http: aiohttp.ClientSession, port: int, bindings: int, period_s: float, most_s: float
) -> float | None:
    """In how many seconds every binding was looked at once a period for a minute in which little was written."""
    began_s = _CLOCK()
    seen: list[tuple[float, float, float]] = []
    while (now_s := _CLOCK()) - began_s < most_s:
        page = await _page(http, port)
        if "attache_manager_leader 1.0" not in page:
            seen.clear()
        seen.append((now_s, _sum(page, "attache_scaling_looks_total"), _sum(page, "attache_scaling_writes_total")))
        if now_s - began_s >= _LEAST_S and _is_calm(seen[-round(60.0 / _LOOK_EACH_S) - 1 :], bindings, period_s):
            return now_s - began_s
        await asyncio.sleep(_LOOK_EACH_S)
    return None


def _is_calm(seen: Sequence[tuple[float, float, float]], bindings: int, period_s: float) -> bool:
    """``seen``: instants, with the looks and writes until then."""
    began, ended = seen[0], seen[-1]
    if ended[0] - began[0] < 50.0:
        return False
    # jumps of load cause more looks than the period alone
    mean = (ended[1] - began[1]) / (ended[0] - began[0])
    rates = [(new[1] - old[1]) / (new[0] - old[0]) for old, new in itertools.pairwise(seen)]
    return (
        ended[2] - began[2] <= _MOST_WRITTEN * bindings
        and mean >= (1 - _MOST_OFF) * bindings / period_s
        and all(abs(one - mean) <= _MOST_OFF * mean + 1.0 for one in rates)
    )


async def _scraped_s(http: aiohttp.ClientSession, port: int) -> float:
    asked_s = _CLOCK()
    await _page(http, port)
    return _CLOCK() - asked_s


async def _page(http: aiohttp.ClientSession, port: int) -> str:
    """The metrics; empty while the page is not there yet."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.get(f"http://127.0.0.1:{port}/metrics") as answer:
            return await answer.text()
    return ""


def _sum(page: str, name: str, having: str = "") -> float:
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and having in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _memory_mib(pid: int) -> dict[str, float]:
    """Of the only process whose session this is: the shell that sets the environment became it."""
    found = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) / 1024 for words in found if words[0] in ("VmRSS:", "VmHWM:")}
