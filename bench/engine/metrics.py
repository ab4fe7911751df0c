# SPDX-License-Identifier: Apache-2.0
"""``GET /metrics`` under vLLM's names."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from bench.engine.lora_adapters import Adapters
    from bench.engine.request import Request
    from bench.engine.scheduler import EngineLimits, Scheduler

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TRANSFERS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BETWEEN = (0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)


class ServerMetrics:
    """Counters and histograms of requests, and a collector that reads the scheduler. Times are engine seconds."""

    def __init__(self, scheduler: Scheduler, limits: EngineLimits, *, model: str, adapters: Adapters) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_SchedulerCollector(scheduler, limits, model, adapters))
        names = ["model_name", "engine"]
        self._finished = Counter(
            "vllm:request_success",
            "Requests by how they finished.",
            [*names, "finished_reason"],
            registry=self.registry,
        )
        ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", names, buckets=_SECONDS, registry=self.registry
        )
        between = Histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", names, buckets=_BETWEEN, registry=self.registry
        )
        whole = Histogram(
            "vllm:e2e_request_latency_seconds", "Whole request.", names, buckets=_SECONDS, registry=self.registry
        )
        self._model = model
        self.ttft = ttft.labels(model, "0")
        self.between = between.labels(model, "0")
        self.whole = whole.labels(model, "0")

    def count_finished(self, reason: str) -> None:
        """Count a request that has ended. ``reason``: ``length``, ``stop`` or ``abort``."""
        self._finished.labels(self._model, "0", reason).inc()


class TransferMetrics:
    """Of KV caches that come from and go to other engines, under the names of vLLM's NixlConnector."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        labels = ["model_name", "engine"]
        made = [
            Histogram(f"vllm:nixl_{name}", text, labels, buckets=buckets, registry=registry).labels(model, "0")
            for name, text, buckets in (
                ("xfer_time_seconds", "Duration of transfers, engine seconds.", _TRANSFERS),
                ("bytes_transferred", "Bytes of transfers.", [2.0 ** (10 + i) for i in range(1, 25, 2)]),
            )
        ]
        self._seconds, self._bytes = made
        counters = [
            Counter(f"vllm:nixl_{name}", text, labels, registry=registry).labels(model, "0")
            for name, text in (
                ("num_failed_transfers", "Transfers that failed, at the decode engine."),
                ("num_kv_expired_reqs", "Prefills that nobody pulled in time, at the prefill engine."),
                ("num_notifications_after_expiry", "Reads after the end of the lease, at the prefill engine."),
            )
        ]
        self.failed_transfers, self.expired, self.late_notifications = counters

    def count_transfer(self, size: float, seconds: float) -> None:
        """A transfer of ``size`` bytes has ended at the decode engine."""
        self._seconds.observe(seconds)
        self._bytes.observe(size)


class RequestTimer:
    """Times of one answer, in engine seconds, into the metrics."""

    def __init__(self, metrics: ServerMetrics, request: Request, speed: float) -> None:
        self._metrics = metrics
        self._request = request
        self._speed = speed
        self._clock = asyncio.get_running_loop().time
        self._began = self._last = self._clock()

    def __enter__(self) -> Callable[[], None]:
        return self._token_came

    def __exit__(self, *_: object) -> None:
        ended = "length" if self._request.finish_reason == "length" else "stop"
        self._metrics.count_finished(ended if self._request.is_done else "abort")
        self._metrics.whole.observe((self._clock() - self._began) * self._speed)

    def _token_came(self) -> None:
        now = self._clock()
        observe = self._metrics.ttft.observe if self._request.produced == 1 else self._metrics.between.observe
        observe((now - self._last) * self._speed)
        self._last = now


class _SchedulerCollector(Collector):
    def __init__(self, scheduler: Scheduler, limits: EngineLimits, model: str, adapters: Adapters) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._labels = [model, "0"]
        self._adapters = adapters
        self._clock = time.time  # noqa: TID251 - the edge

    def collect(self) -> Iterator[Metric]:
        scheduler, pool, counted = self._scheduler, self._scheduler.pool, self._scheduler.counters
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", len(scheduler.waiting))
        usage = 1 - pool.free_blocks / pool.total
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", counted.queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", counted.hits)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", counted.prompt_tokens)
        yield self._by_source()
        yield self._counter("vllm:prompt_tokens_cached", "Cached prompt tokens.", counted.hits + counted.transferred)
        yield self._counter("vllm:generation_tokens", "Generated tokens.", counted.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions.", counted.preemptions)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=["block_size", "num_gpu_blocks", "engine"]
        )
        info.add_metric([str(self._limits.block_size), str(self._limits.num_gpu_blocks), "0"], 1)
        yield info
        yield self._adapters_info()

    def _adapters_info(self) -> Metric:
        """As in vLLM, the value is the time of reading in Unix seconds: of several series the newest counts."""

        names = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        info = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of the requests in the engine.", labels=names)
        running = {request.adapter for request in self._scheduler.running if request.adapter}
        waiting = {request.adapter for request in self._scheduler.waiting if request.adapter}
        limits = self._adapters.limits
        most = len(self._adapters.paths) if limits is None else limits.max_loras
        info.add_metric([str(most), ",".join(sorted(running)), ",".join(sorted(waiting))], self._clock())
        return info

    def _by_source(self) -> Metric:
        counted = self._scheduler.counters
        by_source = {
            "local_compute": counted.prompt_tokens - counted.hits - counted.transferred,
            "local_cache_hit": counted.hits,
            "external_kv_transfer": counted.transferred,
        }
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source.", labels=["model_name", "engine", "source"]
        )
        for source, tokens in by_source.items():
            family.add_metric([*self._labels, source], tokens)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", "engine"])
        family.add_metric(self._labels, value)
        return family
