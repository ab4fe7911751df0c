# SPDX-License-Identifier: Apache-2.0
"""The kinds that extproc and the controller share, and the Snapshot of all of them.

The YAML documents of the configuration directory (and, in a cluster, the custom resources of the same names) decode
into these structs. ``Snapshot`` is one consistent reading of a whole directory. Field names on the wire are camelCase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.config import patterns
from extproc.config.admission import FlowControl, InferenceObjective, Priority, RateLimit
from extproc.config.authentication import Authentication, Tenant
from extproc.config.cel import Rule, exactly_one, together
from extproc.config.client_fields import CacheIsolation, InternalField
from extproc.config.picker_config import PickerFile
from extproc.config.quantities import ByteSize, Duration
from extproc.config.spec import Metadata, Name, NonEmpty, Spec, keyed_by, object_key
from extproc.config.workload import ParentReference, WorkloadPort, WorkloadSelector

API_VERSION = "attache.dev/v1alpha1"


class StringMatch(Spec, frozen=True):
    """Exactly one of the three is set. ``exact``: the value. ``prefix``: its beginning. ``regex``: matches all of it
    (RE2).
    """

    CEL: ClassVar = (exactly_one("exact", "prefix", "regex"),)

    exact: str | None = None
    prefix: str | None = None
    regex: str | None = None


class ModelMatch(Spec, frozen=True):
    """All given conditions must hold. ``headers``: by name, which is case-insensitive. ``uri``: the request's path."""

    headers: Annotated[dict[str, StringMatch], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    uri: StringMatch | None = None


class TargetModel(Spec, frozen=True):
    """One weighted destination of a rule. ``model_server_name``: the name of a ModelServer. ``weight``: its share of
    the requests, relative to the other targets' weights.
    """

    model_server_name: Name
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100


class RouteRule(Spec, frozen=True):
    """The first rule whose match holds decides; a rule without a match always holds. ``target_models``: where requests
    go. ``name``: for people. ``model_match``: conditions on the request.
    """

    CEL: ClassVar = (
        Rule("self.targetModels.exists(one, one.weight > 0)", "all weights are 0; give one a positive weight"),
    )

    target_models: Annotated[tuple[TargetModel, ...], msgspec.Meta(min_length=1, max_length=16)]
    name: str = ""
    model_match: ModelMatch | None = None
    # of requests without an InferenceObjective; those below 0 are refused first when engines are full
    priority: Priority = 0
    # time to first token that these requests want, for the order Deadline
    ttft_target: Duration | None = None


class ModelRouteSpec(Spec, frozen=True):
    """Which model names a client may ask for, and where such requests go.

    A request for ``model_name`` is sent on under the ModelServer's own model name; one for an adapter keeps its
    name.

    ``rules``: the first one that matches decides. ``model_name``: what clients ask for. ``lora_adapters``: adapters
    that the engines have loaded, and clients may ask for. ``rate_limits``: each request must pass all of them.
    ``parent_refs``: the gateways of a cluster that serve it; without them, all of its namespace.
    """

    CEL: ClassVar = (
        Rule("has(self.modelName) || has(self.loraAdapters)", "write modelName, loraAdapters or both"),
        Rule(
            "self.rules.filter(one, !has(one.modelMatch)).size() <= 1 && "
            "(self.rules.all(one, has(one.modelMatch)) || !has(self.rules[self.rules.size() - 1].modelMatch))",
            "a rule without modelMatch always holds; write it last",
        ),
    )

    rules: Annotated[tuple[RouteRule, ...], msgspec.Meta(min_length=1, max_length=16)]
    model_name: NonEmpty | None = None
    lora_adapters: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=1000)] = ()
    rate_limits: Annotated[tuple[RateLimit, ...], msgspec.Meta(max_length=16)] = ()
    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=32)] = ()


class StaticEndpoint(Spec, frozen=True):
    """One engine. ``address``: ``ip:port`` or ``[ip6]:port``. ``labels``: what policies and ``pdGroup`` tell endpoints
    apart by. ``price``: what a second of it costs, relative to others. ``draining``: it gets nothing new while
    others are there. ``kv_events`` and ``kv_replay``: where this engine publishes and replays KV events, if not on
    its ModelServer's ports.
    """

    address: NonEmpty
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    price: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    draining: bool = False
    kv_events: NonEmpty | None = None
    kv_replay: NonEmpty | None = None


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
    kv_events: KvEventsSpec | None = None
    tokenizer: TokenizerSpec = TokenizerSpec()
    # The older way to say cacheIsolation: Header:NAME.
    cache_scope_header: NonEmpty | None = None
    # Whose prompts share a prefix cache; without it, the GatewayConfig's.
    cache_isolation: CacheIsolation | None = None
    # Fields by which gateways steer engines, and that clients may set here. Others are refused with 400 if they say where an
    # engine connects or a request runs (kv_transfer_params, data_parallel_rank), and removed from bodies otherwise.
    allowed_fields: Annotated[tuple[InternalField, ...], msgspec.Meta(max_length=32)] = ()
    # Which requests go first while engines are full; without it, every request goes at once.
    flow_control: FlowControl | None = None

    @property
    def endpoints(self) -> tuple[StaticEndpoint, ...]:
        """The listed engines; none where pods are selected."""
        return self.listed or ()


class GatewayConfigSpec(Spec, frozen=True):
    """How Envoy listens and how it talks to extproc. At most one such document in a directory. ``listen``: where
    clients connect. ``admin``: Envoy's administration, for this machine only. ``extproc``: where extproc listens,
    ``ip:port`` or ``unix:/path``. ``max_body_size``: the largest request. ``access_log_flush``: how long Envoy may
    keep outcomes back.
    """

    listen: str = "127.0.0.1:8080"
    admin: str = "127.0.0.1:9901"
    extproc: str = "127.0.0.1:9002"
    # As many processes as `extproc --workers` starts, on consecutive ports (or unix:PATH.0, unix:PATH.1, ...).
    extproc_workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Open: without extproc, Envoy balances over the engines by itself. Close: it answers 503. If left out: Close where
    # there are rateLimits, rules by tenant, caches that tenants do not share, or models of tenants or keys, which Open
    # would undo; else Open.
    failure_mode: Literal["Open", "Close"] | None = None
    # The longest that Envoy waits for extproc's answer to one message; the longest hold is added for requests that are held.
    message_timeout: Duration = Duration("5s")
    max_body_size: ByteSize = ByteSize("16Mi")
    # Envoy's memory: near this, it resets the streams that hold most of it, then takes no more requests, then no connections.
    max_heap: ByteSize = ByteSize("2Gi")
    # The most that clients may have open at a time; more are closed at once.
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 20_000
    # How long a client may take to send a whole request; the longest hold is added.
    request_timeout: Duration = Duration("2m")
    access_log_flush: Duration = Duration("200ms")
    # Trusted: only gateways of our own can connect, which write tenants, users and objectives into headers and remove
    # their clients'. Untrusted: such headers are removed here.
    clients: Literal["Untrusted", "Trusted"] = "Untrusted"
    # How Envoy identifies callers; without it everybody is the tenant "anonymous".
    authentication: Authentication | None = None
    # Tenants that may not use every model.
    tenants: Annotated[tuple[Tenant, ...], msgspec.Meta(max_length=10_000)] = ()
    # Hidden: clients read 0 where engines report tokens found in their caches, which tell what others have asked.
    cached_tokens: Literal["Shown", "Hidden"] = "Shown"
    # A header of answers that names the engine's address, for debugging; without it, clients do not learn it.
    served_header: Annotated[str, msgspec.Meta(pattern=patterns.HEADER, max_length=64)] | None = None
    # Whose prompts share a prefix cache: of one Tenant, of one User, under one value of a request header that clients cannot
    # choose (Header:NAME), or everybody's (Shared). Tenant is the default where callers are authenticated, else Shared.
    cache_isolation: CacheIsolation | None = None
    # The key of cache salts, for all replicas of extproc. Without it, a tenant's API keys are its key.
    cache_secret: Annotated[str, msgspec.Meta(min_length=16, max_length=512)] | None = None


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelRoute document."""

    metadata: Metadata
    spec: ModelRouteSpec

    def server_key(self, target: TargetModel) -> str:
        """The ModelServer that ``target`` names: one of this route's own namespace."""
        return object_key(self.metadata.namespace, target.model_server_name)


class ModelServer(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelServer document."""

    metadata: Metadata
    spec: ModelServerSpec


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A GatewayConfig document."""

    metadata: Metadata
    spec: GatewayConfigSpec


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One consistent, validated reading of a configuration directory, sorted by namespace and name.

    ``version`` is a digest of the content: equal directories have equal versions. ``picker_files``:
    EndpointPickerConfigs by the name of their file; which plugins there are, extproc knows.
    """

    version: str
    routes: tuple[ModelRoute, ...]
    servers: tuple[ModelServer, ...]
    gateway: GatewayConfigSpec
    objectives: tuple[InferenceObjective, ...] = ()
    picker_files: Mapping[str, PickerFile] = {}

    def flow_control_of(self, spec: ModelServerSpec) -> FlowControl | None:
        """A server's own, or else that of its EndpointPickerConfig."""
        if spec.flow_control is not None or spec.picker_config is None:
            return spec.flow_control
        return self.picker_files[spec.picker_config].flow_control
