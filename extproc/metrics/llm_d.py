# SPDX-License-Identifier: Apache-2.0
"""The same numbers under the names of llm-d's endpoint picker, by option: dashboards and autoscalers go on.

Each family has its name of today (``llm_d_epp_``) and, if it had one, its name of before (``inference_pool_``,
``inference_extension_``, ``inference_objective_``), as llm-d's own picker writes both. Labels and buckets are llm-d's.
``model_name`` and ``target_model_name`` are the model that the engines serve, and ``fairness_id`` is empty: what
clients send makes no series here.
Source: llm-d-router ``pkg/epp/metrics``.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.picker_flow_control import MOST_BYTES, MOST_REQUESTS
from extproc.core.effects import ClientLeft, Decision, OutcomeJoined, RequestRefused
from extproc.core.request_states import RequestState
from extproc.metrics.exposition import CounterFamily, DeferredHistogramFamily, MetricFamily, PiecewiseCollector
from extproc.refusals import EngineStarting, NoEndpoint, QueueFull, QueueTimeout, StoredAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from prometheus_client import CollectorRegistry

    from extproc.admission.fair_queue import BandState, FlowControlGate
    from extproc.admission.flow_queues import QueuedRequest
    from extproc.core.effects import Effect
    from extproc.refusals import Refusal
    from extproc.scheduling.pool import Pool

    # the values of all labels, and the sample's
    _Sample = tuple[Sequence[str], float]

_MODELS: Final = ("model_name", "target_model_name")
_REQUEST: Final = (*_MODELS, "fairness_id", "priority")
_POOL: Final = ("name",)
_BAND: Final = ("priority", "inference_pool")
_QUEUE: Final = ("fairness_id", "priority", "inference_pool", *_MODELS)
_COLUMNS: Final = (
    # name, column of the table, text
    ("queue_size", "waiting", "the engines' waiting requests"),
    ("running_requests", "running", "the engines' running requests"),
    ("kv_cache_utilization", "kv_usage", "shares of KV caches in use"),
)
# fmt: off
_TTFT_SECONDS: Final = (
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120,
)
_SECONDS: Final = (*_TTFT_SECONDS, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600)
_NTPOT_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_TPOT_SECONDS: Final = (
    0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 2,
)
_PROCESSING_SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)
_QUEUE_SECONDS: Final = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# fmt: on
_REQUEST_BYTES: Final = tuple(2**power for power in range(6, 31))
# llm-d's bound is 32778
_ANSWER_BYTES: Final = (1, *(2**power for power in range(3, 15)), 32778, 65536)
_INPUT_TOKENS: Final = (*_ANSWER_BYTES, *(2**power for power in range(17, 21)))
_OUTPUT_TOKENS: Final = (1, *(2**power for power in range(3, 14)))


class _Kind(msgspec.Struct, frozen=True):
    """A family of llm-d. ``older``: its earlier name, empty if it had none, with ``older_labels``; None: with
    ``labels``. As many labels have the same values in the same order. ``bounds``: of a histogram's buckets.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    older: str = ""
    older_labels: tuple[str, ...] | None = None
    bounds: tuple[float, ...] = ()

    def names(self) -> Iterator[tuple[str, tuple[str, ...], Sequence[int]]]:
        """Each name, its labels, and the places of their values among those of ``labels``."""
        every = range(len(self.labels))
        yield f"llm_d_epp_{self.name}", self.labels, every
        if self.older:
            own = self.labels if self.older_labels is None else self.older_labels
            yield self.older, own, every if len(own) == len(every) else [self.labels.index(label) for label in own]


class _Gauge:
    """A gauge under each of its names."""

    def __init__(self, kind: _Kind) -> None:
        self._named = [(MetricFamily(name, kind.text, labels), places) for name, labels, places in kind.names()]
        self.families = tuple(family for family, _ in self._named)

    def exposition_chunks(self, samples: Callable[[], Iterable[_Sample]]) -> Iterator[str]:
        """``samples``: called for each name."""
        for family, places in self._named:
            yield from family.exposition_chunks(
                family.line([every[place] for place in places], value) for every, value in samples()
            )


class _Recorder:
    """A counter or a histogram under each of its names."""

    def __init__(self, registry: CollectorRegistry, kind: _Kind) -> None:
        self._named = [
            (
                DeferredHistogramFamily(name, kind.text, kind.bounds, labels, registry).observe
                if kind.bounds
                else CounterFamily(name, kind.text, labels, registry).add_amount,
                places,
            )
            for name, labels, places in kind.names()
        ]

    def record(self, value: float, every: Sequence[str]) -> None:
        """An observation, or an amount to add. ``every``: the values of all labels."""
        for write, places in self._named:
            write(value, *[every[place] for place in places])


def _of_pool(name: str, text: str, older: str = "") -> _Gauge:
    return _Gauge(_Kind(name, text, _POOL, older and f"inference_pool_{older}"))


def _of_queue(name: str, text: str, labels: tuple[str, ...], *, has_older: bool = False) -> _Gauge:
    whole = f"flow_control_{name}"
    return _Gauge(_Kind(whole, text, labels, f"inference_extension_{whole}" if has_older else ""))


_RUNNING: Final = _Gauge(
    _Kind("request_running", "Requests in flight.", _REQUEST, "inference_objective_running_requests", ("model_name",))
)
_EACH_QUEUE: Final = _Gauge(
    _Kind(
        "per_endpoint_queue_size",
        "Waiting requests of one engine.",
        ("name", "model_server_endpoint"),
        "inference_pool_per_pod_queue_size",
        ("name", "model_server_pod"),
    )
)


def _reported(pool: Pool, column: str) -> NDArray[np.float64]:
    """Of the engines that have reported."""
    table = pool.table
    found: NDArray[np.float64] = getattr(table, column)[[row for row in table.active_rows if table.has_reported(row)]]
    return found


def _mean(pool: Pool, column: str) -> float:
    """0 if no engine has reported."""
    values = _reported(pool, column)
    return float(values.mean()) if values.size else 0.0


def _deviation(pool: Pool, column: str) -> float:
    """Of a sample, as llm-d's; 0 of fewer than two engines."""
    values = _reported(pool, column)
    return float(values.std(ddof=1)) if values.size > 1 else 0.0


_READY: Final = _of_pool("ready_endpoints", "Endpoints that get requests.", "ready_pods")
_MEANS: Final = [
    (_of_pool(f"average_{name}", f"Mean of {text}.", f"average_{name}"), partial(_mean, column=column))
    for name, column, text in _COLUMNS
]
_DEVIATIONS: Final = [
    (_of_pool(f"std_dev_{name}", f"Standard deviation of {text}."), partial(_deviation, column=column))
    for name, column, text in _COLUMNS
]
_QUEUE_SIZE: Final = _of_queue("queue_size", "Requests that wait for an engine.", _QUEUE, has_older=True)
_QUEUE_BYTES: Final = _of_queue("queue_bytes", "Bytes of requests that wait.", _QUEUE, has_older=True)
_SATURATION: Final = _of_queue(
    "pool_saturation", "How full the engines are; 1: requests wait.", ("inference_pool", "stage"), has_older=True
)
_STALE: Final = _of_queue("stale_endpoints", "Engines without a recent report.", ("detector",))
_BAND_REQUESTS: Final = _of_queue("capacity_utilization_requests", "Share of a band's places in use.", _BAND)
_BAND_BYTES: Final = _of_queue("capacity_utilization_bytes", "Share of a band's bytes in use.", _BAND)
_ALL_REQUESTS: Final = _of_queue(
    "global_capacity_utilization_requests", "Share of all bands' places in use.", ("inference_pool",)
)
_ALL_BYTES: Final = _of_queue(
    "global_capacity_utilization_bytes", "Share of all bands' bytes in use.", ("inference_pool",)
)
_GAUGES: Final = (
    *(_RUNNING, _READY, _EACH_QUEUE, *(gauge for gauge, _ in _MEANS), *(gauge for gauge, _ in _DEVIATIONS)),
    *(_QUEUE_SIZE, _QUEUE_BYTES, _SATURATION, _STALE, _BAND_REQUESTS, _BAND_BYTES, _ALL_REQUESTS, _ALL_BYTES),
)


class LlmdMetrics(PiecewiseCollector):
    """``pools``: by key. ``gates``: of those with flow control. ``clock``: that of endpoint tables."""

    families = tuple(family for gauge in _GAUGES for family in gauge.families)

    def __init__(
        self,
        registry: CollectorRegistry,
        pools: Callable[[], Iterable[Pool]],
        gates: Callable[[], Mapping[str, FlowControlGate]],
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._gates, self._clock = pools, gates, clock
        # by server, as it was when the page was read last: looking for it takes a while
        self._models: dict[str, str] = {}
        # by server
        self._names: dict[str, str] = {}

        def of_requests(
            name: str, text: str, older: str = "", labels: tuple[str, ...] = _MODELS, bounds: tuple[float, ...] = ()
        ) -> _Recorder:
            older = older and f"inference_objective_{older}"
            return _Recorder(registry, _Kind(f"request_{name}", text, _REQUEST, older, labels, bounds))

        self._requests = _Recorder(
            registry,
            _Kind(
                "request",
                "Requests that were sent to an engine.",
                _REQUEST,
                "inference_objective_request",
                (*_MODELS, "priority"),
            ),
        )
        self._errors = _Recorder(
            registry,
            _Kind(
                "request_error",
                "Requests that failed.",
                (*_REQUEST, "error_code"),
                "inference_objective_request_error",
                (*_MODELS, "error_code"),
            ),
        )
        self._ttft = _Recorder(
            registry,
            _Kind("request_ttft_seconds", "Time to first token.", (*_REQUEST, "streaming"), bounds=_TTFT_SECONDS),
        )
        self._size = of_requests("size_bytes", "Bodies of requests.", "request_sizes", bounds=_REQUEST_BYTES)
        self._duration = of_requests("duration_seconds", "Whole answers.", "request_duration_seconds", bounds=_SECONDS)
        self._input = of_requests("input_tokens", "Prompt tokens.", "input_tokens", bounds=_INPUT_TOKENS)
        self._output = of_requests("output_tokens", "Tokens of the answer.", "output_tokens", bounds=_OUTPUT_TOKENS)
        self._cached = of_requests(
            "cached_tokens", "Prompt tokens found in the cache.", "prompt_cached_tokens", bounds=_INPUT_TOKENS
        )
        self._ntpot = of_requests(
            "ntpot_seconds",
            "Duration of an answer for each of its tokens.",
            "normalized_time_per_output_token_seconds",
            bounds=_NTPOT_SECONDS,
        )
        self._tpot = of_requests(
            "streaming_tpot_seconds", "Time for each token of a stream after the first.", bounds=_TPOT_SECONDS
        )
        self._answer_size = _Recorder(
            registry,
            _Kind(
                "response_size_bytes",
                "Bodies of answers.",
                _REQUEST,
                "inference_objective_response_sizes",
                _MODELS,
                _ANSWER_BYTES,
            ),
        )
        self._processing = _Recorder(
            registry,
            _Kind(
                "request_processing_duration_seconds",
                "From the whole request to its decision, waits included.",
                (),
                bounds=_PROCESSING_SECONDS,
            ),
        )
        self._waits = _Recorder(
            registry,
            _Kind(
                "flow_control_request_queue_duration_seconds",
                "What requests spent in flow control.",
                ("fairness_id", "priority", "outcome", "inference_pool", *_MODELS),
                "inference_extension_flow_control_request_queue_duration_seconds",
                bounds=_QUEUE_SECONDS,
            ),
        )
        self._ends = _Recorder(
            registry,
            _Kind("flow_control_requests", "Requests of flow control by what became of them.", ("outcome", *_BAND)),
        )
        registry.register(self)

    def observe_pick_seconds(self, seconds: float) -> None:
        """A request was decided without a wait."""
        self._processing.record(seconds, ())

    def count_effect(self, effect: Effect) -> None:
        """What the core decided or learned."""
        match effect:
            case Decision(history=history):
                labels = self._request_labels(effect.server, _priority(history.queued))
                self._requests.record(1, labels)
                self._size.record(history.size_bytes, labels)
                if history.held_s:
                    self._processing.record(history.held_s, ())
                self._leave_queue(
                    effect.server, history.queued, "Dispatched", history.waits.get(RequestState.QUEUED, 0.0)
                )
            case RequestRefused() if not isinstance(effect.refusal, StoredAnswer):
                labels = self._request_labels(effect.arrival.pool.name, effect.arrival.priority)
                self._errors.record(1, (*labels, str(effect.refusal.status)))
                self._leave_queue(
                    effect.arrival.pool.name,
                    effect.queued,
                    _end_of(effect.refusal, was_held=effect.was_held),
                    self._since(effect.queued),
                )
            case ClientLeft():
                self._leave_queue(effect.server, effect.queued, "EvictedContextCancelled", self._since(effect.queued))
            case OutcomeJoined() if effect.is_ours:
                self._observe(effect)

    def exposition_chunks(self) -> Iterator[str]:
        """Read from pools and queues while the page is written."""
        pools = list(self._pools())
        self._models = {pool.name: _model_of(pool) for pool in pools}
        self._names = _names_of(pools)
        # pools may serve one model
        running = Counter[str]()
        for pool in pools:
            running[self._model(pool.name)] += int(pool.table.in_flight[pool.table.active_rows].sum())
        yield from _RUNNING.exposition_chunks(
            lambda: ((_labels_of(model, 0), count) for model, count in running.items())
        )
        yield from _READY.exposition_chunks(partial(self._of_each, pools, lambda pool: len(pool.table.active_rows)))
        for gauge, value in (*_MEANS, *_DEVIATIONS):
            yield from gauge.exposition_chunks(partial(self._of_each, pools, value))
        yield from _EACH_QUEUE.exposition_chunks(
            lambda: (
                ((self._name(pool.name), address), float(pool.table.waiting[row]))
                for pool in pools
                for address, row in zip(pool.table.active_addresses, pool.table.active_rows, strict=True)
            )
        )
        yield from self._queues()

    def _queues(self) -> Iterator[str]:
        gates = [(self._name(server), gate, self._model(server)) for server, gate in self._gates().items()]
        now = self._clock()
        for _, gate, _ in gates:
            gate.update_saturation(now)
        bands = [(name, model, band) for name, gate, model in gates for band in gate.queue.bands]
        yield from _QUEUE_SIZE.exposition_chunks(lambda: ((_queue_labels(*one), one[2].request_count) for one in bands))
        yield from _QUEUE_BYTES.exposition_chunks(lambda: ((_queue_labels(*one), one[2].bytes) for one in bands))
        yield from _BAND_REQUESTS.exposition_chunks(
            lambda: (
                ((str(band.spec.priority), name), band.request_count / band.spec.max_requests)
                for name, _, band in bands
            )
        )
        yield from _BAND_BYTES.exposition_chunks(
            lambda: (((str(band.spec.priority), name), band.bytes / band.most_bytes) for name, _, band in bands)
        )
        # as in llm-d, none where all bands together have no limit
        yield from _ALL_REQUESTS.exposition_chunks(
            lambda: (
                ((name,), len(gate.queue) / gate.control.max_requests)
                for name, gate, _ in gates
                if gate.control.max_requests < MOST_REQUESTS
            )
        )
        yield from _ALL_BYTES.exposition_chunks(
            lambda: (
                ((name,), gate.queue.total_bytes / gate.control.max_bytes)
                for name, gate, _ in gates
                if gate.control.max_bytes < MOST_BYTES
            )
        )
        yield from _SATURATION.exposition_chunks(
            lambda: (((name, stage), gate.saturation) for name, gate, _ in gates for stage in ("decode", "effective"))
        )
        stale = sum(gate.stale_endpoints for _, gate, _ in gates)
        yield from _STALE.exposition_chunks(lambda: [(("utilization-detector",), stale)] if gates else [])

    def _observe(self, settled: OutcomeJoined) -> None:
        outcome, times = settled.outcome, settled.times
        labels = self._request_labels(settled.server, settled.priority)
        if outcome.status >= 400 or not outcome.status:
            self._errors.record(1, (*labels, str(outcome.status or 499)))
        tokens = outcome.completion_tokens
        for recorder, value in (
            (self._duration, outcome.duration_s),
            (self._answer_size, outcome.answer_bytes),
            (self._input, outcome.prompt_tokens or None),
            (self._output, tokens or None),
            (self._cached, outcome.cached_tokens),
            (self._ntpot, outcome.duration_s / tokens if tokens else None),
            (self._tpot, None if times is None else times.tpot_s),
        ):
            if value is not None:
                recorder.record(value, labels)
        if outcome.ttfb_s is not None:
            first_s = outcome.ttfb_s if settled.is_streamed else outcome.duration_s
            self._ttft.record(first_s, (*labels, "true" if settled.is_streamed else "false"))

    def _leave_queue(self, server: str, queued: QueuedRequest | None, end: str, waited_s: float) -> None:
        """``queued``: None without flow control."""
        if queued is not None:
            priority, model = str(queued.priority), self._model(server)
            name = self._name(server)
            self._ends.record(1, (end, priority, name))
            self._waits.record(waited_s, ("", priority, end, name, model, model))

    def _since(self, queued: QueuedRequest | None) -> float:
        return 0.0 if queued is None else max(0.0, self._clock() - queued.arrived_at_s)

    def _of_each(self, pools: Iterable[Pool], value: Callable[[Pool], float]) -> Iterator[_Sample]:
        return (((self._name(pool.name),), value(pool)) for pool in pools)

    def _name(self, server: str) -> str:
        """Of a pool, in labels."""
        if server not in self._names:
            self._names = _names_of(self._pools())
        return self._names.get(server, _short(server))

    def _model(self, server: str) -> str:
        known = self._models.get(server)
        if known is None:
            known = next((_model_of(pool) for pool in self._pools() if pool.name == server), "")
            self._models[server] = known
        return known

    def _request_labels(self, server: str, priority: int) -> tuple[str, ...]:
        return _labels_of(self._model(server), priority)


def _names_of(pools: Iterable[Pool]) -> dict[str, str]:
    """By server: its own name, as llm-d writes it, whose picker serves one pool; with its namespace where another pool
    has the same name, because two series with the same labels make a page invalid.
    """
    servers = [pool.name for pool in pools]
    times = Counter(map(_short, servers))
    return {server: _short(server) if times[_short(server)] == 1 else server for server in servers}


def _end_of(refusal: Refusal, *, was_held: bool) -> str:
    """llm-d's word for what became of a request that flow control did not send."""
    match refusal:
        case QueueTimeout():
            return "EvictedTTL"
        case QueueFull() if not was_held:
            return "RejectedCapacity"
        case NoEndpoint() | EngineStarting():
            reason = "NoEndpoints"
        case _:
            reason = "Other"
    return f"{'Evicted' if was_held else 'Rejected'}{reason}"


def _labels_of(model: str, priority: int) -> tuple[str, ...]:
    return model, model, "", str(priority)


def _queue_labels(name: str, model: str, band: BandState) -> tuple[str, ...]:
    return "", str(band.spec.priority), name, model, model


def _model_of(pool: Pool) -> str:
    """What the engines call the model. A pool does not say it; their lists of models do."""
    served = {name for row in pool.table.active_rows for name in pool.table.loras[row].served or ()}
    return pool.spec.model if not served or pool.spec.model in served else min(served)


def _priority(queued: QueuedRequest | None) -> int:
    """0 where nothing is queued, as llm-d's default."""
    return 0 if queued is None else queued.priority


def _short(server: str) -> str:
    """An InferencePool's own name: llm-d's labels are without the namespace."""
    return server.partition("/")[2]
