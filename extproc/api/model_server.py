# SPDX-License-Identifier: Apache-2.0
"""ModelServer: the engines of one model, and how requests are spread over them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api import patterns
from extproc.api.activation import Activation
from extproc.api.adapter_loading import AdapterLoading
from extproc.api.admission import FlowControl
from extproc.api.cel import Rule, exactly_one, together
from extproc.api.client_fields import CacheIsolation, InternalField
from extproc.api.connection import EngineConnection
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata, NonEmpty, Spec, keyed_by
from extproc.api.workload import WorkloadPort, WorkloadSelector


class StaticEndpoint(Spec, frozen=True):
    """One engine. ``address``: ``ip:port``, ``[ip6]:port`` or ``name:port``. ``labels``: what policies and ``pdGroup``
    tell endpoints apart by. ``price``: what a second of it costs, relative to others. ``draining``: it gets nothing
    new while others are there. ``kv_events`` and ``kv_replay``: where this engine publishes and replays KV events, if
    not on its ModelServer's ports, written as ``address``. ``server_name``: the name of its certificate, if not the
    ModelServer's ``connection.tls.serverName``.
    """

    address: NonEmpty
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    price: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    draining: bool = False
    kv_events: NonEmpty | None = None
    kv_replay: NonEmpty | None = None
    server_name: NonEmpty | None = None


class PdGroup(Spec, frozen=True):
    """Engines in two roles: one computes the prompt, another writes the answer. ``prefill_labels`` and
    ``decode_labels``: labels of the role. ``group_key``: a label; both engines of a pair have the same value of it.
    ``min_uncached_tokens``: prompts of which the decode engine misses fewer tokens are computed there.
    """

    prefill_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    decode_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    group_key: str = ""
    min_uncached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 512


class KvEventsSpec(Spec, frozen=True):
    """Engines publish what enters and leaves their KV caches (vLLM's ``--kv-events-config``). ``port``: rank r of a
    data-parallel engine publishes on this port plus r. ``replay_port``: where missed events are replayed; without
    it, what was missed stays unknown. ``topic``: their beginning. ``data_parallel_size``: an engine's ranks.
    """

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 5557
    replay_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    topic: str = ""
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class TokenizerSpec(Spec, frozen=True):
    """How prompts become tokens. ``path``: directory of tokenizer files; or else engines' /tokenize is asked."""

    path: NonEmpty | None = None
    # a request waits no longer than this for its tokens; the approximate index then decides
    timeout: Duration = Duration("200ms")


class RetryPolicy(Spec, frozen=True):
    """How Envoy goes down the list of endpoints when one fails before its first byte. ``attempts``: how many further
    endpoints it tries.
    """

    attempts: Annotated[int, msgspec.Meta(ge=0, le=10)] = 2


class OutlierDetection(Spec, frozen=True):
    """When Envoy takes an engine out of the set. ``consecutive_failures``: failures in a row that do so.
    ``ejection_time``: for how long at first.
    """

    consecutive_failures: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    ejection_time: Duration = Duration("10s")


class TrafficPolicy(Spec, frozen=True):
    """Time limits and retries between Envoy and the engines. ``timeout``: the longest that a whole answer may take.
    ``connect_timeout``: the longest that connecting to an engine may take. ``retry``: what happens when an engine
    fails before its first byte. ``outlier_detection``: when an engine is avoided.
    """

    timeout: Duration = Duration("30m")
    connect_timeout: Duration = Duration("1s")
    retry: RetryPolicy = RetryPolicy()
    outlier_detection: OutlierDetection = OutlierDetection()

    @property
    def route(self) -> str:
        """What Envoy's routes must know of it, as text: the time limit and the retries; empty for the defaults."""
        if (self.timeout, self.retry.attempts) == _DEFAULT_ROUTE:
            return ""
        return f"{float(self.timeout)}s/{self.retry.attempts}"


_DEFAULT_ROUTE: Final = (TrafficPolicy().timeout, TrafficPolicy().retry.attempts)


class ModelServerSpec(Spec, frozen=True):
    """The engines that serve one base model: listed as ``endpoints``, or in a cluster selected as pods.

    ``model``: the name under which the engines serve it. ``listed``: the engines. ``workload_selector``: labels of the
    pods that the engines run in. ``workload_port``: where they listen. ``engine``: whose metrics' names they use.
    ``traffic_policy``: time limits and retries. ``pd_group``: prefill and decode on separate engines. ``kv_events``:
    engines publish what is in their caches. ``tokenizer``: how prompts become tokens, where ``kv_events`` is set.
    """

    CEL: ClassVar = (
        exactly_one("endpoints", "workloadSelector"),
        together("workloadSelector", "workloadPort"),
        Rule("!has(self.pickerConfig) || !has(self.pdGroup)", "pdGroup has no effect beside pickerConfig"),
        Rule(
            "!has(self.adapterLoading) || !has(self.pdGroup)",
            "adapters are loaded on demand where one engine does both prefill and decode; remove pdGroup or"
            " adapterLoading",
        ),
        Rule(
            "!has(self.adapterLoading) || has(self.adapterLoading.port) || !has(self.engine) || self.engine == 'vLLM'",
            "only vLLM loads adapters by itself here; write adapterLoading.port, of the runtime agents beside the"
            " engines",
        ),
    )

    model: NonEmpty
    listed: (
        Annotated[tuple[StaticEndpoint, ...], msgspec.Meta(max_length=10_000, extra_json_schema=keyed_by("address"))]
        | None
    ) = msgspec.field(default=None, name="endpoints")
    workload_selector: WorkloadSelector | None = None
    workload_port: WorkloadPort | None = None
    engine: Literal["vLLM", "SGLang", "TensorRT-LLM"] = "vLLM"
    traffic_policy: TrafficPolicy = TrafficPolicy()
    # TLS and a key towards the engines; without it, plain HTTP.
    connection: EngineConnection = EngineConnection()
    # Streamed answers carry token usage only when stream_options.include_usage asks for it. Always: ask for it when the
    # client did not, and keep the chunk with it from the client. AsRequested: leave bodies alone.
    stream_usage: Literal["Always", "AsRequested"] = "Always"
    # How an engine is chosen. RoundRobin is there to compare with.
    picker: Literal["PrefixAware", "RoundRobin"] = "PrefixAware"
    # A file of this directory that holds an EndpointPickerConfig; it takes the place of ``picker``.
    picker_config: NonEmpty | None = None
    pd_group: PdGroup | None = None
    # Between two reads of an engine's metrics; 0s: never.
    scrape_interval: Duration = Duration("200ms")
    # Where engines show their metrics; without it, where the engine does by itself: /prometheus/metrics of
    # TensorRT-LLM, /metrics of the others.
    metrics_path: Annotated[str, msgspec.Meta(pattern=patterns.HTTP_PATH, max_length=1024)] | None = None
    kv_events: KvEventsSpec | None = None
    tokenizer: TokenizerSpec = TokenizerSpec()
    # The older way to say cacheIsolation: Header:NAME.
    cache_scope_header: NonEmpty | None = None
    # Whose prompts share a prefix cache; without it, the GatewayConfig's.
    cache_isolation: CacheIsolation | None = None
    # Fields by which gateways steer engines, and that clients may set here. Others are refused with 400 if they say
    # where an engine connects or a request runs (kv_transfer_params, data_parallel_rank), and removed from bodies
    # otherwise.
    allowed_fields: Annotated[tuple[InternalField, ...], msgspec.Meta(max_length=32)] = ()
    # Which requests go first while engines are full; without it, every request goes at once.
    flow_control: FlowControl | None = None
    # LoRA adapters that are loaded when a request asks for them; without it, those that the engines have.
    adapter_loading: AdapterLoading | None = None
    # Requests wait while there is no engine; without it, they are answered 503 at once.
    activation: Activation | None = None

    @property
    def endpoints(self) -> tuple[StaticEndpoint, ...]:
        """The listed engines; none where pods are selected."""
        return self.listed or ()


class ModelServer(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelServer document."""

    metadata: Metadata
    spec: ModelServerSpec
