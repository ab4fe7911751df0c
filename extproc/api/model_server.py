# SPDX-License-Identifier: Apache-2.0
"""ModelServer: the engines of one model, and how requests are spread over them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api import spec as patterns
from extproc.api.addresses import check_endpoint, is_hostname, parse_endpoint
from extproc.api.admission import FlowControl, check_flow_control
from extproc.api.engine_connection import EngineConnection
from extproc.api.match_patterns import check_header_name
from extproc.api.pricing import PriceSpec, check_pricing
from extproc.api.provider import Provider, check_provider
from extproc.api.quantities import LONGEST_MESSAGE_S, ByteSize, Duration, check_duration
from extproc.api.spec import (
    CelRule,
    DirectoryObject,
    NonEmpty,
    Spec,
    WorkloadPort,
    WorkloadSelector,
    both_or_neither,
    exactly_one,
    list_map_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_errors import Finding, Path


ServingProtocol = Literal["OpenAI", "V1", "V2", "TensorFlow"]
# The APIs of protocol OpenAI; ``extproc.wire_names`` has a row of each.
ServedApi = Literal[
    "ChatCompletions",
    "Completions",
    "Embeddings",
    "Responses",
    "Messages",
    "CountTokens",
    "Generate",
    "Rerank",
    "Score",
    "Transcriptions",
    "Speech",
    "Tokenize",
    "Detokenize",
]
# Those between which requests and answers can be translated.
TRANSLATABLE: Final[tuple[ServedApi, ...]] = ("ChatCompletions", "Responses", "Messages")
_SOME_TRANSLATABLE: Final = (
    f"{list(TRANSLATABLE)}.exists(one, one in self.apis) && !{list(TRANSLATABLE)}.all(one, one in self.apis)"
)
# What an address of an engine may serve: its port of gRPC is another one.
EndpointProtocol = Literal[ServingProtocol, "V2-gRPC", "TensorFlow-gRPC"]
# Fields that need to know the prompts of requests.
_OF_PROMPTS: Final = {
    "pdGroup": "pd_group",
    "kvEvents": "kv_events",
    "pickerConfig": "picker_config",
    "modelRewrites": "model_rewrites",
    "cacheIsolation": "cache_isolation",
}
# Fields about what extproc asks of engines or knows of them.
_OF_ENGINES: Final = {
    "pdGroup": "pd_group",
    "kvEvents": "kv_events",
    "adapterLoading": "adapter_loading",
    "pickerConfig": "picker_config",
    "activation": "activation",
    "metricsPath": "metrics_path",
    "metricsPort": "metrics_port",
    "allowedFields": "allowed_fields",
}
# Between two reads of a provider's load, at least: it is far away, and each read is a request there.
_SHORTEST_LOAD_INTERVAL_S: Final = 1.0
_NO_NAME: Final = "nothing says which name the engines' certificates have; write serverName"


CacheIsolation = Annotated[str, msgspec.Meta(pattern=patterns.ISOLATION)]
# A client that sets one of these makes an engine connect somewhere, or chooses where a request runs, with which adapter
# (beside ``model``, the only one that is checked) or in which session.
SteeringField = Literal[
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
    "lora_path",
    "lora_request",
    "session_params",
]
# These affect a request's order, name or cache only.
MarkingField = Literal["priority", "request_id", "rid", "extra_key", "cache_salt"]
# All fields by which gateways steer engines.
InternalField = Literal[SteeringField, MarkingField]
# How engines hand KV caches over, by vLLM's names: one engine to another, or by way of a store that all of them read.
# context_first: TensorRT-LLM's name of it. bootstrap_room: SGLang's field, with every transfer backend.
Connector = Literal[
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "ExampleConnector",
    "LMCacheConnectorV1",
    "MooncakeStoreConnector",
    "HF3FSKVConnector",
    "FlexKVConnectorV1",
    "OffloadingConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
    "context_first",
    "bootstrap_room",
]
# Ports of prefill engines, where decode engines ask for KV caches, unless transferPort says another: vLLM's
# VLLM_P2P_SIDE_CHANNEL_PORT and VLLM_MOONCAKE_BOOTSTRAP_PORT, and SGLang's --disaggregation-bootstrap-port. extproc
# writes no port of other connectors.
TRANSFER_PORTS: Final[Mapping[Connector, int]] = MappingProxyType(
    {"OffloadingConnector": 5710, "MooncakeConnector": 8998, "bootstrap_room": 8998}
)
# Connectors of engines that have no other.
_OWN_CONNECTORS: Final[Mapping[Connector, str]] = MappingProxyType(
    {"context_first": "TensorRT-LLM", "bootstrap_room": "SGLang"}
)
# Whichever field asks for one.
NO_ENCODE_STAGE: Final = (
    "there is no encode stage: the engines that compute prompts encode images and sounds themselves. Remove this; give"
    " SGLang's engines --encoder-urls, and use llm-d's endpoint picker and routing sidecar for vLLM's encoders"
)
# Of these the gateway makes no leg.
SIDECAR_CONNECTORS: Final[frozenset[Connector]] = frozenset({"MoRIIOConnector"})


class ScaleFromZeroQueue(Spec, frozen=True):
    """While no engine can take them, requests wait for the first one; without this field they are answered 503 at once.

    ``hold_timeout``: the longest time that a request waits. ``start_time``: what a start takes, for ``retry-after``,
    until one was measured. ``max_requests`` and ``max_bytes``: most requests that may wait in each process, and most
    bytes of their bodies; further ones are answered 429.
    """

    hold_timeout: Duration = Duration("10m")
    start_time: Duration = Duration("60s")
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000
    max_bytes: ByteSize = ByteSize("256Mi")


# Of a cluster's ModelServer without ``activation`` that was deleted and made again, for some minutes.
RETURNED: Final = ScaleFromZeroQueue(hold_timeout=Duration("60s"))


class AdapterSource(Spec, frozen=True):
    """One adapter, or model of a V2 server, that may be loaded. ``name``: what clients ask for, as a ModelRoute's
    ``loraAdapters`` has it. ``source``: where its weights are, a path or a URI; engines and agents get it as
    ``lora_path``. ``memory``: what it takes of the ``memory`` of a server. ``pinned``: never unloaded to make room.
    """

    name: NonEmpty
    source: NonEmpty
    memory: ByteSize | None = None
    pinned: bool = False


class AdapterLoading(Spec, frozen=True):
    """Engines load an adapter when a request needs it, and unload the least recently used one to make room. Servers of
    protocol V2 load whole models likewise, by way of their agents.

    ``adapters``: those that may be loaded. ``port``: that of the runtime agents, which then load adapters;
    without it the engines do, and vLLM needs ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` for that. ``slots``: how many
    adapters an engine may hold at a time; without it, as many as the engine reports that a batch may use
    (``max_lora``), or else as many as it had when it refused another. ``memory``: in place of ``slots``, what all that
    a server holds may take together. ``timeout``: the longest that a request waits for its adapter.
    """

    CEL: ClassVar = (CelRule("!has(self.slots) || !has(self.memory)", "write slots or memory, not both"),)

    adapters: Annotated[
        tuple[AdapterSource, ...], msgspec.Meta(min_length=1, max_length=1000, extra_json_schema=list_map_keys("name"))
    ]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1, le=10_000)] | None = None
    memory: ByteSize | None = None
    timeout: Duration = Duration("60s")


class StaticEndpoint(Spec, frozen=True):
    """One engine. ``address``: ``ip:port``, ``[ip6]:port`` or ``name:port``. ``labels``: by which policies and
    ``pdGroup`` distinguish endpoints. ``price``: what a second of it costs, relative to others. ``draining``: it gets
    no new request while there are other engines. ``kv_events`` and ``kv_replay``: where this engine publishes and
    replays KV events, if not on its ModelServer's ports, written as ``address``. ``server_name``: the name of its
    certificate, if not the ModelServer's ``connection.tls.serverName``.
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
    ``min_uncached_tokens``: the decode engine computes a prompt with fewer uncached tokens. ``decide_by``: whether it
    also computes longer ones where that takes fewer seconds, the transfer and stopped answers included.
    ``stall_weight``: of a second by which a running answer is stopped, where a second until a first token has 1.
    ``leg``: who requests the prefill. ``connector``: how the KV cache comes to the decode engine.
    ``on_prefill_failure``, ``prefill_timeout``, ``lease``: of the gateway's leg. ``lease``: how long a prefill engine
    keeps what another has not fetched, vLLM's ``kv_lease_duration``. There is no encode stage.
    """

    CEL: ClassVar = (
        CelRule("self.leg != 'Gateway' || has(self.connector)", "leg: Gateway needs connector"),
        CelRule(
            "self.leg != 'Gateway' || !has(self.connector) || self.connector != 'MoRIIOConnector'",
            "MoRIIOConnector asks both engines at once, which a sidecar does; leave leg out",
        ),
    )

    UNSUPPORTED: ClassVar = dict.fromkeys(
        ("encodeLabels", "ECExampleConnector", "ECCPUConnector", "ECMooncakeConnector"), NO_ENCODE_STAGE
    )

    prefill_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    decode_labels: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    group_key: str = ""
    min_uncached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 512
    decide_by: Literal["ExpectedSeconds", "UncachedTokens"] = "ExpectedSeconds"
    stall_weight: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.2
    # Gateway: extproc, before Envoy sends the request to the decode engine. Sidecar: a program in the decode engine's
    # pod, which reads the header x-prefiller-host-port.
    leg: Literal["Gateway", "Sidecar"] = "Sidecar"
    connector: Connector | None = None
    # Local: the decode engine computes the prompt. Fail: a fallback of the rule answers, or the client gets 503.
    # Without it Local, except with SGLang: there the decode engine has the request already, cannot compute the prompt,
    # and answers an error.
    on_prefill_failure: Literal["Local", "Fail"] | None = None
    # The longest that a prefill may take, over all engines that are asked for it. While another engine of the group
    # could be asked, one has 2 s and four times what is expected of it, or half of the time that is left if its speed
    # is not learned.
    prefill_timeout: Duration = Duration("60s")
    lease: Duration = Duration("30s")
    # Of prefill engines, where decode engines ask for KV caches. Without it, 5710 with OffloadingConnector, that of its
    # tier p2p, and 8998 with MooncakeConnector and bootstrap_room, that of the bootstrap server. Other connectors need
    # none.
    transfer_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None

    @property
    def effective_transfer_port(self) -> int:
        """``transferPort`` or its default; 0 if extproc writes none to engines."""
        default = (
            TRANSFER_PORTS.get(self.connector, 0) if self.has_gateway_prefill and self.connector is not None else 0
        )
        return default and (self.transfer_port or default)

    @property
    def has_gateway_prefill(self) -> bool:
        """Whether extproc requests the prefill."""
        return self.leg == "Gateway"

    @property
    def holds_until_prefilled(self) -> bool:
        """Whether extproc holds a request until its prefill has ended."""
        return self.has_gateway_prefill and self.connector != "bootstrap_room"


class KvEventsSpec(Spec, frozen=True):
    """Engines publish what enters and leaves their KV caches (vLLM's ``--kv-events-config``). ``port``: rank r of a
    data-parallel engine publishes on this port plus r. ``replay_port``: where missed events are replayed; without it,
    missed events are lost. ``topic``: prefix of the topics to subscribe to. ``data_parallel_size``: an engine's ranks.
    """

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 5557
    replay_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    topic: str = ""
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class TokenizerSpec(Spec, frozen=True):
    """How prompts become tokens. ``path``: directory of tokenizer files; without it, engines' /tokenize is called."""

    path: NonEmpty | None = None
    # a request waits no longer than this for its tokens; the approximate index then decides
    timeout: Duration = Duration("200ms")


class RetryPolicy(Spec, frozen=True):
    """How Envoy tries the next endpoints of the list when one fails before its first byte. ``attempts``: how many
    further endpoints it tries.
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
    def route_settings_text(self) -> str:
        """The settings for Envoy's routes, as text: the time limit and the retries; empty for the defaults."""
        if (self.timeout, self.retry.attempts) == _DEFAULT_ROUTE:
            return ""
        return f"{float(self.timeout)}s/{self.retry.attempts}"


_DEFAULT_ROUTE: Final = (TrafficPolicy().timeout, TrafficPolicy().retry.attempts)


class RewriteTarget(Spec, frozen=True):
    """``model``: a name under which the engines serve it. ``weight``: its share of the requests, relative to the other
    targets' weights.
    """

    model: NonEmpty
    weight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1


class ModelRewrite(Spec, frozen=True):
    """Which model the engines are asked for instead. ``models``: those that clients ask for; without any, every one.
    ``targets``: one of them is drawn by weight.
    """

    targets: Annotated[tuple[RewriteTarget, ...], msgspec.Meta(min_length=1, max_length=64)]
    models: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=1000)] = ()


class ModelServerSpec(Spec, frozen=True):
    """The engines that serve one base model: listed as ``endpoints``, or in a cluster selected as pods; or a provider.

    ``model``: the name under which the engines serve it. ``listed``: the engines. ``provider``: a server of others in
    their place. ``workload_selector``: labels of the
    pods that the engines run in. ``workload_port``: where they listen. ``engine``: the server program, which determines
    the names of metrics. ``traffic_policy``: time limits and retries. ``pd_group``: prefill and decode on separate
    engines. ``kv_events``: engines publish changes of their caches. ``tokenizer``: how prompts become tokens, where
    ``kv_events`` is set.
    """

    CEL: ClassVar = (
        exactly_one("endpoints", "workloadSelector", "provider"),
        both_or_neither("workloadSelector", "workloadPort"),
        CelRule(
            f"!has(self.provider) || !({' || '.join(f'has(self.{name})' for name in _OF_ENGINES)})",
            f"{', '.join(_OF_ENGINES)} are about engines, which a provider does not show; remove them",
        ),
        CelRule(
            "!has(self.provider) || !has(self.provider.scheme) || self.provider.scheme != 'http'"
            " || !has(self.connection) || !has(self.connection.tls)",
            "connection.tls has no effect with scheme: http; write https, or leave it out",
        ),
        CelRule(
            "!has(self.provider) || !has(self.provider.scheme) || self.provider.scheme != 'http'"
            " || !has(self.connection) || !(has(self.connection.apiKeyFile) || has(self.connection.apiKeyEnv)"
            " || has(self.connection.apiKeyRef))",
            "http would show the key to everybody on the way; write scheme: https, or leave the key out",
        ),
        CelRule(
            "!has(self.provider) || !has(self.pathPrefix)",
            "pathPrefix is that of engines; write provider.pathPrefix",
        ),
        CelRule(
            "!has(self.pathPrefix) || !has(self.pdGroup) || self.pdGroup.leg != 'Gateway'",
            "the gateway asks prefill engines without pathPrefix; write leg: Sidecar, or leave pathPrefix out",
        ),
        CelRule(
            "!has(self.provider) || !has(self.provider.paths) || !has(self.apis)"
            " || self.provider.paths.all(name, name in self.apis)",
            "provider.paths are those of apis; write the API there, or leave its path out",
        ),
        CelRule(
            "!has(self.provider) || !has(self.provider.auth) || self.provider.auth.type == 'AWS' ||"
            " (has(self.connection) && (has(self.connection.apiKeyFile) || has(self.connection.apiKeyEnv)"
            " || has(self.connection.apiKeyRef)))",
            "provider.auth has no effect without a key; write connection.apiKeyRef (in a directory apiKeyFile)",
        ),
        CelRule(
            "!has(self.provider) || !has(self.provider.auth) || self.provider.auth.type != 'AWS'"
            " || !has(self.connection) || !has(self.connection.apiKeyEnv)",
            "a variable holds no credentials file of AWS; write connection.apiKeyRef (in a directory apiKeyFile)",
        ),
        CelRule("!has(self.provider) || has(self.apis)", "a provider needs apis: the gateway's key reaches no others"),
        CelRule(
            "!has(self.apis) || !has(self.protocol) || self.protocol == 'OpenAI'",
            "apis are those of protocol OpenAI; remove it",
        ),
        CelRule(
            f"!has(self.translation) || self.translation == 'Never' || (has(self.apis) && {_SOME_TRANSLATABLE})",
            "translation has no effect unless apis has one or two of ChatCompletions, Responses and Messages",
        ),
        CelRule("!has(self.pickerConfig) || !has(self.pdGroup)", "pdGroup has no effect beside pickerConfig"),
        CelRule(
            "!has(self.pdGroup) || self.pdGroup.leg != 'Gateway' || !has(self.pdGroup.connector)"
            " || (self.pdGroup.connector == 'bootstrap_room') == (has(self.engine) && self.engine == 'SGLang')",
            "connector bootstrap_room is that of engine SGLang, which has no other",
        ),
        CelRule(
            "!has(self.pdGroup) || self.pdGroup.leg != 'Gateway' || !has(self.engine) || self.engine != 'SGLang'"
            " || !has(self.pdGroup.onPrefillFailure) || self.pdGroup.onPrefillFailure != 'Local'",
            "a decode engine of SGLang cannot compute prompts; write onPrefillFailure: Fail, or leave it out",
        ),
        CelRule(
            "!has(self.pdGroup) || self.pdGroup.leg != 'Gateway' || !has(self.pdGroup.connector)"
            " || (self.pdGroup.connector == 'context_first') == (has(self.engine) && self.engine == 'TensorRT-LLM')",
            "connector context_first is that of engine TensorRT-LLM, which has no other",
        ),
        CelRule(
            "!has(self.adapterLoading) || !has(self.pdGroup)",
            "adapters are loaded on demand where one engine does both prefill and decode; remove pdGroup or"
            " adapterLoading",
        ),
        CelRule(
            "!has(self.adapterLoading) || has(self.adapterLoading.port) || !has(self.engine) || self.engine == 'vLLM'",
            "only vLLM loads adapters by itself here; write adapterLoading.port, of the runtime agents beside the"
            " engines",
        ),
        CelRule(
            "!has(self.protocol) || self.protocol == 'OpenAI' ||"
            f" !({' || '.join(f'has(self.{name})' for name in _OF_PROMPTS)})",
            f"{', '.join(_OF_PROMPTS)} are about prompts, which only protocol OpenAI has; remove them",
        ),
        CelRule(
            "!has(self.adapterLoading) || !has(self.protocol) || self.protocol in ['OpenAI', 'V2']",
            "only engines of protocol OpenAI or V2 load adapters or models; remove adapterLoading",
        ),
        CelRule(
            "!has(self.adapterLoading) || has(self.adapterLoading.port) || !has(self.protocol) ||"
            " self.protocol != 'V2'",
            "models of a V2 server are loaded by way of the runtime agents beside the servers; write"
            " adapterLoading.port",
        ),
    )

    model: NonEmpty
    listed: (
        Annotated[
            tuple[StaticEndpoint, ...], msgspec.Meta(max_length=10_000, extra_json_schema=list_map_keys("address"))
        ]
        | None
    ) = msgspec.field(default=None, name="endpoints")
    provider: Provider | None = None
    workload_selector: WorkloadSelector | None = None
    workload_port: WorkloadPort | None = None
    engine: Literal["vLLM", "SGLang", "TensorRT-LLM"] = "vLLM"
    # The API of the engines. OpenAI: of generative models, Anthropic's and other APIs of vLLM included. V1, V2 (Open
    # Inference Protocol) and TensorFlow: of classical model servers, whose paths name the model. V2-gRPC and
    # TensorFlow-gRPC: the same over gRPC, at the engines' ports for that.
    protocol: EndpointProtocol = "OpenAI"
    # Which APIs of protocol OpenAI are served here; required of a provider. Requests of others go to another
    # ModelServer of their rule, are translated, or get 404. Without it, engines get requests of all.
    apis: Annotated[tuple[ServedApi, ...], msgspec.Meta(min_length=1, max_length=13)] | None = None
    # Requests of ChatCompletions, Responses or Messages, where apis has another of the three. Never: they get 404.
    # Lenient: translated by a process beside Envoy (attache translate); fields that the other API does not have are
    # left out, and named in the header x-attache-dropped. Strict: a request with such a field gets 400.
    translation: Literal["Never", "Lenient", "Strict"] = "Never"
    traffic_policy: TrafficPolicy = TrafficPolicy()
    # What stands before the path of each request to the engines, such as /openai: Envoy writes it.
    path_prefix: Annotated[str, msgspec.Meta(pattern=patterns.PATH_PREFIX, max_length=1024)] = ""
    # TLS and a key towards the engines; without it, plain HTTP.
    connection: EngineConnection = EngineConnection()
    # Streamed answers carry token usage only if the request sets stream_options.include_usage. Always: set it where the
    # client did not, and remove the chunk with it from the answer. AsRequested: leave bodies unchanged.
    stream_usage: Literal["Always", "AsRequested"] = "Always"
    # How an engine is chosen. Of protocols without prompts, PrefixAware takes the one with the least work in flight by
    # its learned speed. RoundRobin is there to compare with.
    picker: Literal["PrefixAware", "RoundRobin"] = "PrefixAware"
    # A file of this directory that holds an EndpointPickerConfig; it replaces ``picker``.
    picker_config: NonEmpty | None = None
    pd_group: PdGroup | None = None
    # Between two reads of an engine's metrics; 0s: never. Of a provider with reportsLoad: of its load, and 1s at least.
    scrape_interval: Duration = Duration("200ms")
    # Path of the engines' metrics; without it, the engine's default: /prometheus/metrics of TensorRT-LLM, /metrics of
    # the others.
    metrics_path: Annotated[str, msgspec.Meta(pattern=patterns.HTTP_PATH, max_length=1024)] | None = None
    # The port of every engine's metrics, where it is not the endpoint's own.
    metrics_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    kv_events: KvEventsSpec | None = None
    tokenizer: TokenizerSpec = TokenizerSpec()
    # The older form of cacheIsolation: Header:NAME.
    cache_scope_header: NonEmpty | None = None
    # Which prompts share a prefix cache; without it, the GatewayConfig's.
    cache_isolation: CacheIsolation | None = None
    # Fields by which gateways steer engines, and that clients may set here. Others are refused with 400 if they
    # determine where an engine connects or a request runs (kv_transfer_params, data_parallel_rank), and removed from
    # bodies otherwise.
    allowed_fields: Annotated[tuple[InternalField, ...], msgspec.Meta(max_length=32)] = ()
    # The order of requests while engines are full; without it, every request is sent at once.
    flow_control: FlowControl | None = None
    # LoRA adapters, or models of a V2 server, that are loaded when a request needs them; without it, those that the
    # engines have.
    adapter_loading: AdapterLoading | None = None
    # Of requests that no ModelRoute sends here: the first that has the model that the client asks for decides.
    model_rewrites: Annotated[tuple[ModelRewrite, ...], msgspec.Meta(max_length=1000)] = ()
    # Requests wait while there is no engine; without it, they are answered 503 at once.
    activation: ScaleFromZeroQueue | None = None
    # What requests cost: usually one price, or several with the instants from which they hold.
    pricing: Annotated[tuple[PriceSpec, ...], msgspec.Meta(max_length=64)] = ()

    @property
    def endpoints(self) -> tuple[StaticEndpoint, ...]:
        """The listed engines, or the provider, by its name until that is resolved; none where pods are selected."""
        if self.listed is None and self.provider is not None:
            return (StaticEndpoint(address=self.provider.address),)
        return self.listed or ()

    @property
    def accepts_translated_requests(self) -> bool:
        """Whether it may get requests that were translated."""
        return self.translation != "Never" and 0 < len({*TRANSLATABLE} & {*(self.apis or ())}) < len(TRANSLATABLE)

    @property
    def uses_tls(self) -> bool:
        """Whether its endpoints are reached over TLS."""
        return self.connection.tls is not None or (self.provider is not None and self.provider.scheme == "https")

    @property
    def takes_grpc(self) -> bool:
        """Whether its endpoints are ports of gRPC."""
        return self.protocol.endswith("-gRPC")

    @property
    def report_interval_s(self) -> float:
        """Between two reads of an engine's metrics, or of a provider's load; 0: they are never read."""
        interval_s = float(self.scrape_interval)
        if self.provider is None or not interval_s:
            return interval_s
        return max(interval_s, _SHORTEST_LOAD_INTERVAL_S) if self.provider.reports_load else 0.0


class ModelServer(DirectoryObject, frozen=True, kw_only=True):
    """A ModelServer document."""

    spec: ModelServerSpec


def max_wait_by_field(spec: ModelServerSpec, control: FlowControl | None) -> dict[str, float]:
    """The longest that a request waits before an engine gets it, in seconds, by the field that holds it. ``control``:
    that is in effect.
    """
    waits = {
        "flowControl": None if control is None else control.max_hold_s,
        "adapterLoading": None if spec.adapter_loading is None else spec.adapter_loading.timeout,
        "activation": None if spec.activation is None else spec.activation.hold_timeout,
        "pdGroup": None
        if spec.pd_group is None or not spec.pd_group.holds_until_prefilled
        else spec.pd_group.prefill_timeout,
    }
    return {name: float(wait_s) for name, wait_s in waits.items() if wait_s}


def check_server(spec: ModelServerSpec) -> Iterator[Finding]:
    """Endpoint addresses are ``ip:port`` or ``name:port`` and differ; no field is without effect."""
    if sum(one is not None for one in (spec.listed, spec.workload_selector, spec.provider)) != 1:
        yield ("spec",), "write endpoints, provider or, in a cluster, workloadSelector, one of the three"
    yield from _check_requests(spec)
    yield from _check_apis(spec)
    if spec.provider is not None:
        yield from _check_provider(spec, spec.provider)
        return
    if (spec.workload_selector is None) != (spec.workload_port is None):
        yield ("spec",), "workloadSelector and workloadPort go together; write both or neither"
    yield from _check_endpoints(spec)
    if spec.picker_config is not None and spec.pd_group is not None:
        yield ("spec", "pdGroup"), "has no effect beside pickerConfig; set groupKey of its disagg-profile-handler"
    yield from _check_protocol(spec)
    yield from _check_pairs(spec, spec.pd_group)
    yield from _check_adapters(spec, spec.adapter_loading)
    yield from _check_activation(spec.activation)


def _check_requests(spec: ModelServerSpec) -> Iterator[Finding]:
    """What becomes of requests, whoever serves them."""
    if spec.cache_scope_header is not None:
        yield from check_header_name(spec.cache_scope_header, ("spec", "cacheScopeHeader"))
    yield from check_pricing(spec.pricing)
    if spec.flow_control is not None:
        yield from check_header_name(spec.flow_control.session_header, ("spec", "flowControl", "sessionHeader"))
        yield from check_flow_control(spec.flow_control)
    yield from _check_traffic(spec.traffic_policy, ("spec", "trafficPolicy"))


def _check_apis(spec: ModelServerSpec) -> Iterator[Finding]:
    """Each once, and a translation has an API to translate to, and one to translate from."""
    apis = spec.apis
    if apis is None:
        if spec.provider is not None:
            yield ("spec", "apis"), "is missing; write those of the provider's APIs that requests may use"
        if spec.translation != "Never":
            yield ("spec", "translation"), "has no effect without apis, as all requests go there unchanged; write apis"
        return
    if spec.protocol != "OpenAI":
        yield ("spec", "apis"), f"are those of protocol OpenAI, and this one is {spec.protocol}; leave it out"
    if len(set(apis)) < len(apis):
        yield ("spec", "apis"), "names an API twice; write each once"
    if spec.translation != "Never" and not spec.accepts_translated_requests:
        some = "none" if set(TRANSLATABLE).isdisjoint(apis) else "all"
        yield (
            ("spec", "translation"),
            f"has no effect: apis has {some} of {', '.join(TRANSLATABLE)}, between which requests are translated;"
            " write Never or leave it out",
        )


def _check_endpoints(spec: ModelServerSpec) -> Iterator[Finding]:
    seen: set[str] = set()
    for index, endpoint in enumerate(spec.endpoints):
        path: Path = ("spec", "endpoints", index, "address")
        yield from check_endpoint(endpoint.address, path)
        if endpoint.address in seen:
            yield path, f"'{endpoint.address}' is listed twice; write each engine once"
        seen.add(endpoint.address)
        for name, address in (("kvEvents", endpoint.kv_events), ("kvReplay", endpoint.kv_replay)):
            if address is not None:
                yield from check_endpoint(address, ("spec", "endpoints", index, name))


def _check_provider(spec: ModelServerSpec, provider: Provider) -> Iterator[Finding]:
    """Nothing depends on engines."""
    path: Path = ("spec", "provider")
    connection = spec.connection
    has_key = connection.has_key or connection.api_key_ref is not None
    yield from check_provider(provider, path, has_key=has_key, tls=connection.tls)
    if provider.signs_requests and connection.api_key_env is not None:
        message = "holds no credentials file of AWS; write apiKeyFile, or leave it out to sign as Envoy's own machine"
        yield ("spec", "connection", "apiKeyEnv"), message
    for name in provider.paths:
        if name not in (spec.apis or ()):
            yield (*path, "paths"), f"'{name[:100]}' is none of apis; write it there, or leave its path out"
    for name, attribute in _OF_ENGINES.items():
        if getattr(spec, attribute):
            yield ("spec", name), "is about engines, which a provider does not show; remove it"
    if spec.path_prefix:
        yield ("spec", "pathPrefix"), "is that of engines; write provider.pathPrefix"
    if spec.protocol != "OpenAI":
        yield ("spec", "protocol"), "providers take the APIs of apis; leave it out"
    if provider.scheme == "http" and connection.tls is not None:
        yield ("spec", "connection", "tls"), "has no effect with provider.scheme http; write https, or leave it out"


def _check_protocol(spec: ModelServerSpec) -> Iterator[Finding]:
    """Nothing depends on prompts where bodies are not read."""
    if spec.protocol == "OpenAI":
        return
    # a slash is sent percent-encoded
    if spec.model in {".", ".."} and not spec.takes_grpc:
        yield ("spec", "model"), f"'{spec.model}' is no segment of a path, in which protocol {spec.protocol} names it"
    for name, attribute in _OF_PROMPTS.items():
        if getattr(spec, attribute):
            yield ("spec", name), f"is about prompts, which protocol {spec.protocol} does not have; remove it"


def _check_pairs(spec: ModelServerSpec, group: PdGroup | None) -> Iterator[Finding]:
    """extproc knows what to ask the prefill engine, and Envoy waits as long as that takes."""
    if group is None:
        return
    path: Path = ("spec", "pdGroup")
    yield from check_duration(group.prefill_timeout, (*path, "prefillTimeout"), longest_s=LONGEST_MESSAGE_S)
    yield from check_duration(group.lease, (*path, "lease"))
    if group.has_gateway_prefill and spec.path_prefix:
        yield (
            ("spec", "pathPrefix"),
            "is not written where extproc asks prefill engines; leave it, or leg: Gateway, out",
        )
    if group.has_gateway_prefill and group.connector is None:
        yield (*path, "connector"), "leg: Gateway needs it; write the engines' kv_connector, or leave leg out"
    if group.has_gateway_prefill and group.connector in SIDECAR_CONNECTORS:
        yield (*path, "leg"), f"{group.connector} asks both engines at once; leave leg out, and run a sidecar"
    for connector, engine in _OWN_CONNECTORS.items():
        if group.has_gateway_prefill and (group.connector == connector) != (spec.engine == engine):
            yield (*path, "connector"), f"{connector} is the connector of engine {engine}, which has no other"
    if group.has_gateway_prefill and spec.engine == "SGLang" and group.on_prefill_failure == "Local":
        yield (
            (*path, "onPrefillFailure"),
            "a decode engine of SGLang cannot compute prompts; write Fail or leave it out",
        )


def _check_adapters(spec: ModelServerSpec, loading: AdapterLoading | None) -> Iterator[Finding]:
    """The program that loads adapters has an API for it, each adapter has one source, none has the base model's name,
    and each fits.
    """
    if loading is None:
        return
    path: Path = ("spec", "adapterLoading")
    yield from ((path, wrong) for wrong in _cannot_load(spec, loading))
    yield from check_duration(loading.timeout, (*path, "timeout"), longest_s=LONGEST_MESSAGE_S)
    seen: set[str] = set()
    for index, adapter in enumerate(loading.adapters):
        place = (*path, "adapters", index, "name")
        if adapter.name in seen:
            yield place, f"'{adapter.name}' is listed twice; write each adapter once"
        if adapter.name == spec.model:
            yield place, f"'{adapter.name}' is the base model; give the adapter another name"
        if spec.protocol == "V2" and adapter.name in {".", ".."}:
            yield place, f"'{adapter.name}' is no segment of a path, in which protocol V2 names the model"
        seen.add(adapter.name)
    for wrong in oversized_models(loading.memory, {one.name: (one.memory, one.pinned) for one in loading.adapters}):
        yield path, wrong


def _cannot_load(spec: ModelServerSpec, loading: AdapterLoading) -> Iterator[str]:
    if spec.pd_group is not None:
        yield "has no effect beside pdGroup: adapters are loaded where one engine does both prefill and decode"
    if spec.protocol not in {"OpenAI", "V2"}:
        yield f"servers of protocol {spec.protocol} load no models on demand; remove it"
    elif spec.protocol == "V2" and loading.port is None:
        yield "models of a V2 server are loaded by the runtime agents beside the servers; write their port"
    elif loading.port is None and spec.engine != "vLLM":
        yield f"extproc cannot ask {spec.engine} to load adapters; write port, that of the runtime agents"
    if loading.slots is not None and loading.memory is not None:
        yield loading.CEL[0].message


def oversized_models(
    memory: ByteSize | None, wanted: Mapping[str, tuple[ByteSize | None, bool]], field: str = "memory"
) -> Iterator[str]:
    """Models by name, with their memory and whether they are pinned, that do not fit into the ``memory`` of a server.
    ``field``: that has it.
    """
    if memory is None:
        return
    pinned = sum(size or 0 for size, is_pinned in wanted.values() if is_pinned)
    for name, (size, is_pinned) in wanted.items():
        if size is None:
            yield f"'{name}' has no memory, which is needed beside {field}; write what it takes on a server"
        elif size > memory:
            yield f"'{name}' needs {size} of memory, more than the {memory} of {field}; raise that, or remove the model"
        elif not is_pinned and pinned <= memory < pinned + size:
            yield (
                f"'{name}' needs {size} of memory, and the pinned models leave {memory - pinned} bytes of the {memory}"
                f" of {field}; raise that, or pin fewer"
            )
    if pinned > memory:
        yield f"the pinned models need {pinned} bytes together, more than the {memory} of {field}; pin fewer"


def _check_activation(activation: ScaleFromZeroQueue | None) -> Iterator[Finding]:
    """Envoy can wait as long."""
    if activation is not None:
        path: Path = ("spec", "activation")
        yield from check_duration(activation.hold_timeout, (*path, "holdTimeout"), longest_s=LONGEST_MESSAGE_S)
        yield from check_duration(activation.start_time, (*path, "startTime"))


def _check_traffic(policy: TrafficPolicy, path: Path) -> Iterator[Finding]:
    yield from check_duration(policy.timeout, (*path, "timeout"), shortest_s=0.0)
    yield from check_duration(policy.connect_timeout, (*path, "connectTimeout"))
    ejection_time = policy.outlier_detection.ejection_time
    yield from check_duration(ejection_time, (*path, "outlierDetection", "ejectionTime"))


def check_connection(spec: ModelServerSpec) -> Iterator[Finding]:
    """A certificate can be checked, and there is one key."""
    connection = spec.connection
    path: Path = ("spec", "connection")
    keys = connection.api_key_file, connection.api_key_env, connection.api_key_ref
    if sum(one is not None for one in keys) > 1:
        yield path, "write apiKeyFile or apiKeyEnv, not both; or in a cluster apiKeyRef alone"
    tls = connection.tls
    if tls is None:
        return
    authorities = tls.ca_file, tls.ca_certificate_ref
    if sum(one is not None for one in authorities) + tls.insecure_skip_verify != 1:
        message = "write caFile, or insecureSkipVerify: true to accept any certificate; in a cluster caCertificateRef"
        yield (*path, "tls"), f"{message} in place of caFile"
    if tls.client_certificate is not None and tls.client_certificate_ref is not None:
        yield (*path, "tls"), "write clientCertificate, or in a cluster clientCertificateRef, not both"
    names = [((*path, "tls", "serverName"), tls.server_name)]
    names += [(("spec", "endpoints", index, "serverName"), one.server_name) for index, one in enumerate(spec.endpoints)]
    for where, name in names:
        if name is not None and not is_hostname(name):
            yield where, f"'{name}' is no host name; write a name that the certificate has"
    if not tls.insecure_skip_verify and tls.server_name is None and spec.provider is None:
        yield from _check_names(spec)


def check_no_references(spec: ModelServerSpec) -> Iterator[Finding]:
    """For directories: the gateway role of a cluster puts files in the place of references."""
    connection = spec.connection
    path: Path = ("spec", "connection")
    message = "is in an object of a cluster, which a directory has none of"
    if connection.api_key_ref is not None:
        yield (*path, "apiKeyRef"), f"{message}; write apiKeyFile or apiKeyEnv, or apply it to a cluster"
    if connection.tls is None:
        return
    if connection.tls.ca_certificate_ref is not None:
        yield (*path, "tls", "caCertificateRef"), f"{message}; write caFile, or apply it to a cluster"
    if connection.tls.client_certificate_ref is not None:
        yield (*path, "tls", "clientCertificateRef"), f"{message}; write clientCertificate, or apply it to a cluster"


def _check_names(spec: ModelServerSpec) -> Iterator[Finding]:
    if spec.workload_selector is not None:
        yield ("spec", "connection", "tls"), _NO_NAME
    for index, one in enumerate(spec.endpoints):
        try:
            named = one.server_name is not None or not parse_endpoint(one.address).is_ip
        except ValueError:
            continue
        if not named:
            yield ("spec", "endpoints", index), f"{_NO_NAME} here or in connection.tls"
