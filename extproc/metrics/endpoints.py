# SPDX-License-Identifier: Apache-2.0
"""Series by endpoint, read from the endpoint tables when Prometheus asks"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from extproc.endpoints.health import EndpointHealth
    from extproc.scheduling.pool import Pool


# It could not be reached or answered nothing, which needs no comparison with others.
_BACKS_OFF: Final = "no_answer"


class EndpointSeries(Collector):
    """They end when the endpoint leaves the configuration."""

    def __init__(
        self, pools: Callable[[], Iterable[Pool]], clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        """``clock``: the one that endpoint tables go by."""
        self._pools = pools
        self._clock = clock
        self._wall_clock = wall_clock

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for clashes; asking would need the pools."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One sample an endpoint and family."""
        labels = ["server", "endpoint"]
        in_flight = GaugeMetricFamily("attache_in_flight", "Requests picked and not over.", labels=labels)
        rate = GaugeMetricFamily("attache_prefill_tokens_per_second", "Learned speed of prefill.", labels=labels)
        prompt = CounterMetricFamily("attache_prompt_tokens", "Prompt tokens, as engines report.", labels=labels)
        cached = CounterMetricFamily("attache_cached_tokens", "Prompt tokens found in the cache.", labels=labels)
        ratio = GaugeMetricFamily("attache_cached_token_ratio", "Cached share of all prompt tokens.", labels=labels)
        blocks = GaugeMetricFamily("attache_prefix_blocks", "Blocks in the prefix index.", labels=labels)
        waiting = GaugeMetricFamily("attache_engine_waiting", "Waiting requests, as the engine says.", labels=labels)
        running = GaugeMetricFamily("attache_engine_running", "Running requests, as the engine says.", labels=labels)
        usage = GaugeMetricFamily("attache_engine_kv_usage", "Share of the KV cache in use, 0 to 1.", labels=labels)
        age = GaugeMetricFamily("attache_engine_report_age_seconds", "Age of what the engine says.", labels=labels)
        ttft = GaugeMetricFamily(
            "attache_endpoint_ttft_seconds", "Recent mean time to first token; no series if unknown.", labels=labels
        )
        failed = GaugeMetricFamily(
            "attache_endpoint_failed_ratio",
            "Failed share of its last 50 answers or so, the latest most.",
            labels=labels,
        )
        avoided = GaugeMetricFamily(
            "attache_endpoint_avoided",
            "1 while it is avoided, by how it fails; no series otherwise.",
            labels=[*labels, "reason"],
        )
        since = GaugeMetricFamily(
            "attache_endpoint_avoided_since_timestamp_seconds", "Since when it is avoided.", labels=labels
        )
        now, wall_now_s = self._clock(), self._wall_clock()
        for pool in self._pools():
            table = pool.table
            for address in table.active_addresses:
                row = table.row_of(address)
                if row is None:
                    continue
                key = [pool.name, address]
                prompt_tokens, cached_tokens = int(table.prompt_tokens[row]), int(table.cached_tokens[row])
                in_flight.add_metric(key, float(table.in_flight[row]))
                rate.add_metric(key, float(table.prefill_rate[row]))
                prompt.add_metric(key, prompt_tokens)
                cached.add_metric(key, cached_tokens)
                ratio.add_metric(key, cached_tokens / prompt_tokens if prompt_tokens else 0.0)
                blocks.add_metric(key, pool.caches.index.blocks_held(row))
                if table.has_reported(row):
                    waiting.add_metric(key, float(table.waiting[row]))
                    running.add_metric(key, float(table.running[row]))
                    usage.add_metric(key, float(table.kv_usage[row]))
                    age.add_metric(key, now - float(table.reported_at_s[row]))
                if table.ttft_s[row]:
                    ttft.add_metric(key, float(table.ttft_s[row]))
                health = table.healths[row]
                failed.add_metric(key, health.failed / health.answers if health.answers else 0.0)
                reasons = _reasons(health, backs_off=bool(table.failures[row]))
                for reason in reasons:
                    avoided.add_metric([*key, reason], 1)
                if reasons:
                    since.add_metric(key, wall_now_s - (now - health.avoided_since_s))
        yield from (in_flight, rate, prompt, cached, ratio, blocks, waiting, running, usage, age)
        yield from (ttft, failed, avoided, since)


def _reasons(health: EndpointHealth, *, backs_off: bool) -> list[str]:
    """How an endpoint that is avoided fails; none if it is not avoided."""
    reasons = sorted(one.name.lower() for one in health.reasons)
    return reasons or ([_BACKS_OFF] if backs_off else [])
