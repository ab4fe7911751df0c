# SPDX-License-Identifier: Apache-2.0
"""The same numbers under the names of llm-d's endpoint picker, by option: dashboards and autoscalers go on.

Each family has its name of today (``llm_d_epp_``) and the one before (``inference_pool_``, ``inference_extension_``,
``inference_objective_``), as llm-d's own picker writes both. Labels are llm-d's. ``model_name`` and
``target_model_name`` are the model that the engines serve, and ``fairness_id`` is empty: what clients send makes no
series here.
Source: llm-d-router ``docs/metrics.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.effects import Decision, RequestRefused, RequestSettled
from extproc.metrics.exposition import Counters, DeferredHistograms, MetricFamily, PiecewiseCollector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from extproc.admission.flows import QueuedRequest
    from extproc.admission.queue import Gate
    from extproc.core.effects import Effect
    from extproc.scheduling.pool import Pool

_REQUEST: Final = ("model_name", "target_model_name", "fairness_id", "priority")
_POOL: Final = ("name",)
_QUEUE: Final = ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name")
_OF_REQUESTS: Final = ("llm_d_epp_", "inference_objective_")
_OF_POOLS: Final = ("llm_d_epp_", "inference_pool_")
_OF_QUEUES: Final = ("llm_d_epp_", "inference_extension_")
_SECONDS: Final = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
_TOKENS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
_STALE: Final = MetricFamily(
    "llm_d_epp_flow_control_stale_endpoints", "Engines without a recent report.", ("detector",)
)


def _both(names: tuple[str, ...], name: str, text: str, labels: tuple[str, ...]) -> tuple[MetricFamily, ...]:
    return tuple(MetricFamily(f"{prefix}{name}", text, labels) for prefix in names)


_RUNNING: Final = _both(_OF_REQUESTS, "request_running", "Requests in flight.", _REQUEST)
_READY: Final = _both(_OF_POOLS, "ready_endpoints", "Endpoints that get requests.", _POOL)
_AVERAGE_QUEUE: Final = _both(_OF_POOLS, "average_queue_size", "Mean of the engines' waiting requests.", _POOL)
_AVERAGE_RUNNING: Final = _both(_OF_POOLS, "average_running_requests", "Mean of the engines' running requests.", _POOL)
_AVERAGE_KV: Final = _both(_OF_POOLS, "average_kv_cache_utilization", "Mean share of KV caches in use.", _POOL)
_EACH_QUEUE: Final = _both(
    _OF_POOLS, "per_endpoint_queue_size", "Waiting requests of one engine.", ("name", "model_server_endpoint")
)
_QUEUE_SIZE: Final = _both(_OF_QUEUES, "flow_control_queue_size", "Requests that wait for an engine.", _QUEUE)
_QUEUE_BYTES: Final = _both(_OF_QUEUES, "flow_control_queue_bytes", "Bytes of requests that wait.", _QUEUE)
_SATURATION: Final = _both(
    _OF_QUEUES,
    "flow_control_pool_saturation",
    "How full the engines are; 1: requests wait.",
    ("inference_pool", "stage"),
)


class LlmdMetrics(PiecewiseCollector):
    """``pools``: by key. ``gates``: of those with flow control. ``clock``: that of endpoint tables."""

    families = (
        *_RUNNING,
        *_READY,
        *_AVERAGE_QUEUE,
        *_AVERAGE_RUNNING,
        *_AVERAGE_KV,
        *_EACH_QUEUE,
        *_QUEUE_SIZE,
        *_QUEUE_BYTES,
        *_SATURATION,
        _STALE,
    )

    def __init__(
        self,
        registry: CollectorRegistry,
        pools: Callable[[], Iterable[Pool]],
        gates: Callable[[], Mapping[str, Gate]],
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._gates, self._clock = pools, gates, clock
        # by server, as it was when the page was read last: looking for it takes a while
        self._models: dict[str, str] = {}
        self._requests = _counters("request", "Requests that were sent to an engine.", _REQUEST, registry)
        self._errors = _counters("request_error", "Requests that failed.", (*_REQUEST, "error_code"), registry)
        self._duration = _histograms("request_duration_seconds", "Whole answers.", _SECONDS, registry)
        self._ttft = _histograms("request_ttft_seconds", "Time to first token.", _SECONDS, registry)
        self._input = _histograms("request_input_tokens", "Prompt tokens.", _TOKENS, registry)
        self._output = _histograms("request_output_tokens", "Tokens of the answer.", _TOKENS, registry)
        self._cached = _histograms("request_cached_tokens", "Prompt tokens found in the cache.", _TOKENS, registry)
        registry.register(self)

    def count_effect(self, effect: Effect) -> None:
        """What the core decided or learned."""
        match effect:
            case Decision():
                _add(self._requests, self._request_labels(effect.server, _priority(effect.queued)))
            case RequestRefused():
                labels = self._request_labels(effect.arrival.pool.name, effect.arrival.priority)
                _add(self._errors, (*labels, str(effect.refusal.status)))
            case RequestSettled() if effect.is_ours:
                self._observe(effect)

    def pieces(self) -> Iterator[str]:
        """Read from pools and queues while the page is written."""
        pools = list(self._pools())
        self._models = {pool.name: _model_of(pool) for pool in pools}
        for family in _RUNNING:
            yield from family.pieces(
                family.line(self._request_labels(pool.name, 0), float(pool.table.in_flight[_rows(pool)].sum()))
                for pool in pools
            )
        for family in _READY:
            yield from family.pieces(family.line((_short(pool.name),), float(len(_rows(pool)))) for pool in pools)
        for families, column in ((_AVERAGE_QUEUE, "waiting"), (_AVERAGE_RUNNING, "running"), (_AVERAGE_KV, "kv_usage")):
            for family in families:
                yield from family.pieces(family.line((_short(pool.name),), _mean(pool, column)) for pool in pools)
        for family in _EACH_QUEUE:
            yield from family.pieces(
                family.line((_short(pool.name), address), float(pool.table.waiting[row]))
                for pool in pools
                for address, row in zip(pool.table.active_addresses, pool.table.active_rows, strict=True)
            )
        yield from self._queues()

    def _queues(self) -> Iterator[str]:
        gates, now = list(self._gates().items()), self._clock()
        for _, gate in gates:
            gate.measure(now)
        bands = [
            (self._queue_labels(name, band.spec.priority), band) for name, gate in gates for band in gate.queue.bands
        ]
        for family in _QUEUE_SIZE:
            yield from family.pieces(family.line(labels, band.requests) for labels, band in bands)
        for family in _QUEUE_BYTES:
            yield from family.pieces(family.line(labels, band.bytes) for labels, band in bands)
        for family in _SATURATION:
            yield from family.pieces(
                family.line((_short(name), stage), gate.saturation)
                for name, gate in gates
                for stage in ("decode", "effective")
            )
        stale = sum(gate.stale_endpoints for _, gate in gates)
        yield from _STALE.pieces([_STALE.line(("utilization-detector",), stale)] if gates else [])

    def _observe(self, settled: RequestSettled) -> None:
        outcome = settled.outcome
        labels = self._request_labels(settled.server, settled.priority)
        if outcome.status >= 400 or not outcome.status:
            _add(self._errors, (*labels, str(outcome.status or 499)))
        for histograms, value in (
            (self._duration, outcome.duration_s),
            (self._ttft, outcome.ttfb_s),
            (self._input, outcome.prompt_tokens),
            (self._output, outcome.completion_tokens),
            (self._cached, outcome.cached_tokens),
        ):
            if value is not None:
                for one in histograms:
                    one.observe(value, *labels)

    def _model(self, server: str) -> str:
        known = self._models.get(server)
        if known is None:
            known = next((_model_of(pool) for pool in self._pools() if pool.name == server), "")
            self._models[server] = known
        return known

    def _request_labels(self, server: str, priority: int) -> tuple[str, str, str, str]:
        model = self._model(server)
        return model, model, "", str(priority)

    def _queue_labels(self, server: str, priority: int) -> tuple[str, str, str, str, str]:
        model = self._model(server)
        return "", str(priority), _short(server), model, model


def _counters(name: str, text: str, labels: tuple[str, ...], registry: CollectorRegistry) -> list[Counters]:
    return [Counters(f"{prefix}{name}", text, labels, registry) for prefix in _OF_REQUESTS]


def _histograms(
    name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry
) -> list[DeferredHistograms]:
    return [DeferredHistograms(f"{prefix}{name}", text, bounds, _REQUEST, registry) for prefix in _OF_REQUESTS]


def _add(counters: list[Counters], labels: tuple[str, ...]) -> None:
    for one in counters:
        one.add(*labels)


def _model_of(pool: Pool) -> str:
    """What the engines call the model. A pool does not say it; their lists of models do."""
    served = {name for row in pool.table.active_rows for name in pool.table.loras[row].served or ()}
    return pool.spec.model if not served or pool.spec.model in served else min(served)


def _priority(queued: QueuedRequest | None) -> int:
    """0 where nothing is queued, as llm-d's default."""
    return 0 if queued is None else queued.priority


def _rows(pool: Pool) -> list[int]:
    return pool.table.active_rows


def _mean(pool: Pool, column: str) -> float:
    """Over the engines that have reported; 0 if none has."""
    table = pool.table
    rows = [row for row in table.active_rows if table.has_reported(row)]
    return float(getattr(table, column)[rows].mean()) if rows else 0.0


def _short(server: str) -> str:
    """An InferencePool's own name: llm-d's labels are without the namespace."""
    return server.partition("/")[2]
