# SPDX-License-Identifier: Apache-2.0
"""What reading thousands of engines may cost one process: processor time and file descriptors"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.model_server import ModelServer
    from extproc.api.snapshot import Snapshot

# Engines' pages that the process reads. A page of vLLM's costs some 65 us, so these take a sixth of a core.
MOST_SCRAPES_PER_S: Final = 2_500.0
# For connections of Envoys and of readers of pages, files, and libraries: never taken by connections to engines.
RESERVED_DESCRIPTORS: Final = 1_024
# Of a subscription to KV events: two sockets of ZeroMQ, each with a descriptor to wake it, and the connection.
_OF_A_SUBSCRIPTION: Final = 4


def scrape_stretch(servers: Iterable[ModelServer]) -> float:
    """By what every ``scrapeInterval`` is multiplied, 1 or more, so that reading engines leaves time for requests."""
    specs = [one.spec for one in servers]
    asked_per_s = sum(len(one.endpoints) / one.scrape_interval for one in specs if one.scrape_interval > 0)
    return max(1.0, asked_per_s / MOST_SCRAPES_PER_S)


def kept_connections(limit: float) -> float:
    """How many connections to engines may stay open between two reads. ``limit``: descriptors of the process."""
    return max(0.0, limit - max(RESERVED_DESCRIPTORS, limit / 8))


def stretched_intervals(snapshot: Snapshot) -> Iterator[str]:
    """That engines are read less often than configured."""
    stretch = scrape_stretch(snapshot.servers)
    if stretch > 1:
        read = [one.spec for one in snapshot.servers if one.spec.scrape_interval > 0]
        endpoints = sum(len(one.endpoints) for one in read)
        shortest_s = min(float(one.scrape_interval) for one in read if one.endpoints)
        yield (
            f"{endpoints} endpoints: their scrapeIntervals ask for {stretch * MOST_SCRAPES_PER_S:.0f} reads a second,"
            f" and one process reads {MOST_SCRAPES_PER_S:.0f}; all intervals are {stretch:.3g} times as long as written"
            f" ({shortest_s:g} s is {shortest_s * stretch:.3g} s); write longer ones where loads change slowly, so that"
            " the others stay as they are"
        )


def wanted_descriptors(snapshot: Snapshot) -> int:
    """What connections to all engines take, and subscriptions to their events."""
    wanted = 0
    for server in snapshot.servers:
        spec = server.spec
        ranks = 0 if spec.kv_events is None else spec.kv_events.data_parallel_size
        wanted += len(spec.endpoints) * ((spec.scrape_interval > 0) + ranks * _OF_A_SUBSCRIPTION)
    return wanted


def missing_descriptors(snapshot: Snapshot, limit: float) -> Iterator[str]:
    """That connections to engines are made anew for each read, for want of descriptors."""
    wanted = wanted_descriptors(snapshot)
    if wanted > kept_connections(limit):
        yield (
            f"the engines want {wanted} file descriptors, and a process may have {limit:.0f}, of which some are kept"
            f" for Envoy: connections to engines beyond that are made anew for each read; raise the hard limit to"
            f" {wanted * 8 // 7 + RESERVED_DESCRIPTORS} (ulimit -Hn, LimitNOFILE= of systemd)"
        )
