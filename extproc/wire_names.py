# SPDX-License-Identifier: Apache-2.0
"""Names on the wire between clients, Envoy, extproc and engines: inference APIs, headers, metadata keys."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Final, Literal

import msgspec

# Clients of Anthropic's API send it with every request.
ANTHROPIC_VERSION: Final = "anthropic-version"
# What the API demands of every request, where a client has not named one.
DEFAULT_ANTHROPIC_VERSION: Final = "2023-06-01"
# Answered by the gateway itself.
MODELS_PATH: Final = "/v1/models"
# Of the V2 protocol: a server's metadata; under it are its health and its models, and the verbs by which models are
# loaded and unloaded.
SERVER_ROOT: Final = "/v2"
LIVE_PATH: Final = f"{SERVER_ROOT}/health/live"
READY_PATH: Final = f"{SERVER_ROOT}/health/ready"
REPOSITORY_PATH: Final = f"{SERVER_ROOT}/repository"
READY_VERB: Final = "/ready"
# Of V1: what explainers serve.
EXPLAIN_VERB: Final = ":explain"
# Its service over gRPC, and the calls that the gateway answers by itself.
V2_SERVICE: Final = "/inference.GRPCInferenceService/"
LIVE_CALL: Final = f"{V2_SERVICE}ServerLive"
READY_CALL: Final = f"{V2_SERVICE}ServerReady"
METADATA_CALL: Final = f"{V2_SERVICE}ServerMetadata"
MODEL_READY_CALL: Final = f"{V2_SERVICE}ModelReady"
SERVER_CALLS: Final = (LIVE_CALL, READY_CALL, METADATA_CALL)
# The services of TensorFlow Serving.
_TENSORFLOW_SERVICES: Final = "/tensorflow.serving."
# Calls under these are of model servers; so are their errors.
CALL_ROOTS: Final = (V2_SERVICE, _TENSORFLOW_SERVICES)
# Calls by which engines load and unload models, or list all that they have.
REPOSITORY_CALLS: Final = (
    *(f"{V2_SERVICE}{verb}" for verb in ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload")),
    f"{_TENSORFLOW_SERVICES}ModelService/HandleReloadConfigRequest",
)
# Envoy's cluster of extproc. Local replies of Envoy have no message of gRPC: calls that the gateway answers by itself
# with one go on to extproc, under a path that names the answer.
EXTPROC_CLUSTER: Final = "attache-extproc"
ANSWERS_SERVICE: Final = "/attache.Answers/"
# In a model's name in a path, beside letters, digits and ``_.-~``: the name is a single segment.
PLAIN_IN_PATHS: Final = ":@!$&'()*+,;="
_V1_ROOT: Final = f"{MODELS_PATH}/"
_V2_ROOT: Final = f"{SERVER_ROOT}/models/"
_MESSAGES: Final = ({"role": "user", "content": "hello"},)
_TEMPLATED: Final = "`documents`, `chat_template` and its arguments"
_CHAT_PROMPT: Final = f"messages with all their texts, tokens sent in their place, tools, {_TEMPLATED}"
_WRITTEN: Final = "what is written"
# Anthropic's SDK writes it where its client uses what a header asks for.
_BETA: Final = "beta=true"
# The endpoint picker protocol of the Gateway API Inference Extension: header and metadata key, and the key's namespace.
DESTINATION: Final = "x-gateway-destination-endpoint"
LB_NAMESPACE: Final = "envoy.lb"
# The same protocol's metadata keys for the endpoints that may be chosen and for the one that served.
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
# llm-d's, in the same namespace: the scores of all endpoints.
SCORES: Final = "x-gateway-destination-endpoint-scores"
# The protocol's conformance tests choose the endpoint by this header.
CONFORMANCE_HEADER: Final = "test-epp-endpoint-selection"
# Headers that the sidecar of a decode engine obeys (llm-d): removed from what clients send.
PREFILLER: Final = "x-prefiller-host-port"
SIDECAR_HEADERS: Final = (
    PREFILLER,
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
# Which rank of an engine gets a request.
DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
# Headers that engines and their routers obey: which rank of an engine runs a request, and whose session it is. SGLang
# reads fields of the body from those that override (entrypoints/request_headers.py).
ENGINE_HEADERS: Final = (
    DATA_PARALLEL_RANK,
    "x-session-token",
    "x-prefiller-url",
    "x-kv-transfer-params",
    "x-override-rid",
    "x-override-bootstrap-host",
    "x-override-bootstrap-port",
    "x-override-bootstrap-room",
    "x-override-conversation-id",
    "x-override-routed-dp-rank",
    "x-override-disagg-prefill-dp-rank",
    "x-override-priority",
)
ACCEPT_ENCODING: Final = "accept-encoding"
CONTENT_ENCODING: Final = "content-encoding"
RETRY_AFTER: Final = "retry-after"
# How a call of gRPC has ended.
GRPC_STATUS: Final = "grpc-status"
# Headers that engines do not get. Bodies are read here, whole and as they come: no engine is to decode one into
# something else, or to be asked whether it expects one. In a compressed answer usage can be neither read nor hidden.
NOT_FOR_ENGINES: Final = (ACCEPT_ENCODING, CONTENT_ENCODING, "expect", *ENGINE_HEADERS)
# Envoy's cluster of the ModelServer that a request goes to. The prefix keeps users' names and ours apart.
SERVER_HEADER: Final = "x-attache-server"
SERVER_CLUSTER: Final = "server/"
BACKEND_CLUSTER: Final = "backend/"
# Time limit and retries of that ModelServer, where they are not the defaults: Envoy has a route for each such policy.
POLICY_HEADER: Final = "x-attache-policy"
# Of answers to requests whose rule has fallbacks: the ModelServer that answered, and what is less than was asked for.
SERVED_BY: Final = "x-attache-served-by"
DEGRADED: Final = "x-attache-degraded"
# Of an answer of an engine, between two filters of Envoy: the class of refusals for which it makes the next attempt.
REFUSED_FOR: Final = "x-attache-refused-for"
# Of a request that another process translates for its engines: how, as JSON (``extproc.translate.directive``). It goes
# to this cluster of Envoy, and comes back to a listener of Envoy's own; each has a socket in the bundle's directory.
TRANSLATE: Final = "x-attache-translate"
TRANSLATOR_CLUSTER: Final = "attache-translator"
TRANSLATOR_SOCKET: Final = "translator.sock"
TRANSLATED_SOCKET: Final = "translated.sock"
# Of a request of which Envoy sends a copy to an engine of another ModelServer: what the copy is to be, as JSON
# (``extproc.routing.mirror``). The copy goes to a listener of Envoy's own, with a socket in the bundle's directory;
# gRPC metadata of its streams, which clients cannot write, are what makes extproc believe the header.
MIRROR: Final = "x-attache-mirror"
MIRROR_KEY: Final = "x-attache-mirrored"
MIRROR_CLUSTER: Final = "attache-mirror"
MIRROR_SOCKET: Final = "mirror.sock"
# The tenant of copies: no name that a tenant can have.
MIRRORED_TENANT: Final = "(mirror)"
# Of its answer, for clients: the fields of the request that its engines have not got.
DROPPED_FIELDS: Final = "x-attache-dropped"
# Of its answer, between that listener and the first one, which removes them and keeps the values as metadata: the
# engine that answered, the number of attempts, and Envoy's details of the answer.
ENGINE_HOST: Final = "x-attache-engine-host"
ENGINE_ATTEMPTS: Final = "x-attache-engine-attempts"
ENGINE_ANSWERED: Final = "x-attache-engine-answered"
TRANSLATED_NAMESPACE: Final = "attache.translated"
TRANSLATED_ATTEMPTS: Final = "attempts"
TRANSLATED_DETAILS: Final = "details"
# That the engine, or Envoy's second listener, has cut a stream: the translator writes this comment at its end, which no
# event of an engine can become. Envoy takes it out. A stream that is cut without it was cut by the translator's end.
TRANSLATED_CUT: Final = "cut"
CUT_MARK: Final = b":cut by the engine\n\n"
# The same, of as many bytes, where the time limit of that listener's route was over.
LIMIT_MARK: Final = b":cut by time limit\n\n"
# Envoy's details of such a limit, before an answer of the engine and, from that mark, within one.
OUT_OF_TIME: Final = "response_timeout"
# Headers that belong to the gateway: Envoy removes what a client sends under these prefixes before anything reads it.
RESERVED_PREFIXES: Final = ("x-gateway-", "x-attache-")
# The caller, as Envoy writes it after authentication: the name of an API key, or claims of a token.
CLIENT: Final = "x-attache-client"
TENANT: Final = "x-attache-tenant"
USER: Final = "x-attache-user"
# The tenant whose usage an API key may read, percent-encoded.
REPORTS: Final = "x-attache-reports"
# The tenant of callers of whom no tenant is known.
ANONYMOUS: Final = "anonymous"
# Longer names are cut and end in a hash of the whole, so that two callers stay two: names are kept in memory and shown
# in metrics.
_MAX_CHARACTERS: Final = 128
_HASH_BYTES: Final = 16
# The same for the usage process: Envoy writes them on routes to it alone.
CALLER_CLIENT: Final = "x-attache-caller-client"
CALLER_TENANT: Final = "x-attache-caller-tenant"
CALLER_USER: Final = "x-attache-caller-user"
CALLER_REPORTS: Final = "x-attache-caller-reports"
# Envoy's id of a request, which answers carry, too.
REQUEST_ID: Final = "x-request-id"
# Dynamic metadata with the claims of a verified token, by the name of its issuer in our configuration.
TOKENS_NAMESPACE: Final = "envoy.filters.http.jwt_authn"
# Target of milliseconds from arrival to the first token.
DEADLINE_MS: Final = "x-attache-deadline-ms"
# Priority by InferenceObjective, the flow for fair queueing, and latency targets: llm-d's names, then the older ones of
# the Gateway API Inference Extension.
OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_IDS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
# The engine's model that a trusted gateway sets in place of the one in the body.
MODEL_REWRITES: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
# What a client sends under these prefixes is removed as well.
OBJECTIVE_PREFIXES: Final = ("x-llm-d-", "x-slo-")
# What only the gateway writes into answers: headers and trailers of a server's answer under these prefixes are removed
# before a filter or a client reads them. The second list is of engines and providers. Other servers behind HTTPRoutes
# have limits of their own, and policies for browsers.
RESERVED_IN_ANSWERS: Final = (*RESERVED_PREFIXES, *OBJECTIVE_PREFIXES, "x-envoy-")
RESERVED_FROM_ENGINES: Final = (*RESERVED_IN_ANSWERS, "x-ratelimit-", "access-control-", "alt-svc")
# Labels of pods that another value shows to be of another template, and so maybe of other weights: our own, those of
# Deployments, those of StatefulSets and DaemonSets.
REVISION_LABEL: Final = "attache.dev/revision"
REVISION_LABELS: Final = (REVISION_LABEL, "pod-template-hash", "controller-revision-hash")
# Why a request was refused, on the refusal; llm-d's header and values.
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"
# OpenAI's response headers for rate limits; our dynamic metadata uses the same names.
RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)
# Of plain answers: what they cost, in millionths of the currency.
COST_MICROS: Final = "x-attache-cost-micros"
COST_CURRENCY: Final = "x-attache-cost-currency"
# Of budgets: what is left of each, and those that are nearly spent.
BUDGET_HEADERS: Final = ("x-attache-budget-remaining", "x-attache-budget-warning")
# gRPC metadata on streams of our own bundle: its presence means that Envoy has removed the headers above from clients'
# requests. Clients cannot write it, because gRPC metadata are not HTTP request headers.
BUNDLE_MARK: Final = "x-attache-bundle"
# More of it, on streams of our bundle: the HTTPRoute that took the request, the ModelServer that it has chosen, and the
# listener that was asked. Where the HTTPRoute rewrites the path: what Envoy will write in place of the path, or of this
# prefix of it.
HTTP_ROUTE_KEY: Final = "x-attache-http-route"
SERVER_KEY: Final = "x-attache-server-key"
LISTENER_KEY: Final = "x-attache-listener"
PATH_KEY: Final = "x-attache-path"
PATH_PREFIX_KEY: Final = "x-attache-path-prefix"
# Envoy waits no longer than this for an answer of extproc, whatever is configured.
LONGEST_MESSAGE_TIMEOUT_S: Final = 3600
# Of a gateway's connection to extproc, at a time; each lives as long as its request. Envoy opens another connection for
# more, and gRPC's own clients wait.
MOST_STREAMS: Final = 10_000
# Our own dynamic metadata: the ticket joins a decision with its access log entry.
NAMESPACE: Final = "attache"
TICKET: Final = "ticket"
# Present if a streamed answer carries usage that the client did not ask for: the chunk with it is dropped on the way
# back.
HIDES_USAGE: Final = "hides_usage"
# The model's name that the client asked for, as JSON text: Envoy writes it into the answer. Absent if every engine that
# may answer has that name. And, as Envoy writes it, the length of a plain answer that has lost its content-length for
# it.
RESPONSE_MODEL: Final = "response_model"
RESPONSE_LENGTH: Final = "response_length"
# Of a request that the response cache has not found: the longest answer that is kept, in bytes. If its rule has
# fallbacks, the addresses of those that may have answered follow, each behind a space. Envoy sends a copy of the answer
# to extproc, as one message of this call, with what it is about in the call's metadata.
CACHE: Final = "cache"
STORE_PATH: Final = "/attache.cache.v1.Answers/Store"
STORE_TICKET: Final = "x-attache-ticket"
STORE_KIND: Final = "x-attache-kind"
# Of answers where a route has a cache: hit or miss.
CACHE_HEADER: Final = "x-attache-cache"
# In place of a refusal, where the response cache has answered: in metrics, and in the usage log.
CACHE_HIT: Final = "cache_hit"
# What extproc knows of a request at its decision or refusal, as JSON text (``extproc.api.usage_log.UsageContext``): for
# the usage log.
USAGE_CONTEXT: Final = "usage"
# Of a request whose rule has fallbacks: Envoy's clusters, one for each attempt; where the model's name stands in the
# body, as "first byte,length", and likewise the cache salt, which providers do not get; the ModelServers whose answers
# are marked as degraded, and how; by ModelServer, what else it reads otherwise in the body, each as
# "first byte,length,text;"; by class of refusals, the clusters that take what others have refused for it; and, as Envoy
# writes them, which endpoints have refused it, and which have answered 500.
ROUTE_NAMESPACE: Final = "attache.route"
GROUPS: Final = "priority_groups"
SPLICE: Final = "splice"
SALT: Final = "salt"
DEGRADED_SERVERS: Final = "degraded"
CLAMPS: Final = "clamps"
REFUSED: Final = "refused"
ERRORS: Final = "errors"
# By ModelServer, the retry-after of a provider that has answered 429, or 503 with it, to an attempt; maybe empty.
PAUSES_NAMESPACE: Final = "attache.pauses"
# Token usage, which Envoy's filters read out of answers.
USAGE_NAMESPACE: Final = "attache.usage"
PROMPT_TOKENS: Final = "prompt_tokens"
COMPLETION_TOKENS: Final = "completion_tokens"
CACHED_TOKENS: Final = "cached_tokens"
# Of the Messages API: what was cached by this request.
CREATED_TOKENS: Final = "created_tokens"
REASONING_TOKENS: Final = "reasoning_tokens"
# Of a stream, the events with content so far; the microseconds from the request's first byte to the first of them; and
# why the answer ended.
EVENTS: Final = "events"
FIRST_CONTENT_US: Final = "first_content_us"
FINISH: Final = "finish"
# What spans have of a request: written for sampled requests alone.
TRACE_NAMESPACE: Final = "attache.trace"
# Where reports are: of the usage process, and behind the gateway, which also sends it what begins with the second one.
USAGE_PATH: Final = "/v1/usage"
ORGANIZATION_PATH: Final = "/v1/organization/"
# Where a collector takes spans by OTLP over HTTP.
TRACES_PATH: Final = "/v1/traces"
# The host that served, which the override_host load balancing policy writes.
SERVED_NAMESPACE: Final = "attache.served"
SERVED_HOST: Final = "host"
# Custom tag of access log entries: microseconds from the request's first byte to the answer's first body byte.
TTFT_TAG: Final = "ttft_us"
# Envoy's response code details of extproc's own answers begin so; the bundle does not rewrite those answers' bodies.
DETAILS_PREFIX: Final = "attache_"
# The log name under which Envoy reports to the access log service.
ACCESS_LOG_NAME: Final = "attache"
# Statuses and types of Anthropic's page on errors. It has no 503: clients are to do as when it is overloaded.
OVERLOADED: Final = 529
ANTHROPIC_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        413: "request_too_large",
        429: "rate_limit_error",
        500: "api_error",
        502: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
        OVERLOADED: "overloaded_error",
    }
)

# Statuses of gRPC: of the gateway's errors, by their HTTP status; and what an engine's mean as HTTP statuses, as in
# google/rpc/code.proto.
GRPC_STATUSES: Final[Mapping[int, int]] = MappingProxyType(
    {400: 3, 401: 16, 403: 7, 404: 5, 405: 12, 413: 8, 429: 8, 500: 13, 502: 13, 503: 14, 504: 4}
)
_HTTP_STATUSES: Final = (200, 499, 500, 400, 504, 404, 409, 403, 429, 400, 409, 400, 501, 500, 503, 500, 401)


class ModelPaths(msgspec.Struct, frozen=True):
    """Paths that name the model: ``ROOT NAME``, then maybe a version, then a verb.

    ``verbs``: what may stand at the end, each with its method. ``selectors``: what may name a version before it:
    ``/versions/3``.
    """

    root: str
    verbs: Mapping[str, Literal["GET", "POST"]]
    selectors: tuple[str, ...] = ("versions",)


class GrpcModelCalls(msgspec.Struct, frozen=True):
    """Calls of gRPC, each with one message, which names the model. ``paths``: of the calls. ``name``: the numbers of
    the fields in which the name stands, outermost first.
    """

    paths: tuple[str, ...]
    name: tuple[int, ...]


class ApiSpec(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An inference API: what extproc, Envoy's filters, the engine simulator and the reference page are made from.

    To add one, write its row in ``Api``, its parser, and how the simulator answers (``bench/engine``).

    ``name``: as ``apis`` of ModelServers has it; none where ``protocol`` names it. ``protocol``: that its engines
    speak, as ModelServers name it. ``paths``: the API's own, then its aliases; a request keeps its path. ``parser``:
    ``module:function`` of ``extproc.request``, from a body, or its form, to an InferenceRequest. ``body``: a JSON
    object, a form (``multipart/form-data``), a message of gRPC, or unread. ``example``: the fields of a valid request
    beside ``model``; bytes are a file. ``model_paths``: in place of paths, parser and example, where the path names the
    model: the body is then unread. ``calls``: in place of them, where it is served over gRPC.
    ``fields_of``: the top-level fields by which a body is known where a gateway does not send the path. Each text is a
    set of them; ``name[]`` is a list of other things than objects, and a header's name counts as a field. Of the sets
    that fit, the largest decides, then the first. Empty: its bodies cannot be told from those of an API that costs
    more.

    ``needs_model``: engines require ``model``; where a ModelRoute decides, every API needs it. ``waits_in_queue``:
    requests pass through flow control; not those for which engines compute nothing that others wait for. ``prompt``:
    what tokenizers read: ``messages`` of OpenAI's or Anthropic's form, ``text`` in the field ``prompt``, or ``tokens``
    that the client has sent; None: nothing. ``takes_salt``: engines read ``cache_salt``. ``limits``: the fields by
    which a client limits an answer's tokens; without any, no other engine can prefill the prompt. ``errors``: whose
    form they have.

    ``usage``: what answers call the prompt's tokens. ``prompt_tokens`` stand anywhere; ``input_tokens`` stand beside
    JSON that clients and models wrote, and count in their own place only. ``reports_usage``: answers have usage.
    ``usage_if_asked``: streams have it only where ``stream_options`` requests it.

    ``query``: the parameter that a provider gets of a client's query; it gets no other.

    ``owner``, ``engines``, ``input``, ``output``: for the reference page: who defined the API, which engines serve it,
    and which tokens count.
    """

    name: str = ""
    paths: tuple[str, ...] = ()
    parser: str = ""
    example: Mapping[str, object] = MappingProxyType({})
    protocol: Literal["OpenAI", "V1", "V2", "TensorFlow", "V2-gRPC", "TensorFlow-gRPC"] = "OpenAI"
    model_paths: ModelPaths | None = None
    calls: GrpcModelCalls | None = None
    owner: str
    engines: str
    input: str
    output: str
    fields_of: tuple[str, ...] = ()
    body: Literal["json", "form", "grpc", "unread"] = "json"
    needs_model: bool = True
    waits_in_queue: bool = True
    prompt: Literal["messages", "anthropic messages", "text", "tokens"] | None = None
    takes_salt: bool = False
    limits: tuple[str, ...] = ()
    errors: Literal["openai", "anthropic", "text", "grpc"] = "openai"
    usage: Literal["prompt_tokens", "input_tokens"] = "prompt_tokens"
    reports_usage: bool = True
    usage_if_asked: bool = False
    query: str = ""


class Api(enum.Enum):
    """The inference APIs that are routed to engines: clients reach nothing else of them."""

    CHAT = ApiSpec(
        name="ChatCompletions",
        paths=("/v1/chat/completions",),
        parser="openai:parse_chat",
        fields_of=("messages",),
        prompt="messages",
        takes_salt=True,
        limits=("max_tokens", "max_completion_tokens"),
        usage_if_asked=True,
        example={"messages": _MESSAGES, "max_tokens": 3},
        owner="OpenAI",
        engines="all",
        input=_CHAT_PROMPT,
        output=_WRITTEN,
    )
    COMPLETIONS = ApiSpec(
        name="Completions",
        paths=("/v1/completions",),
        parser="openai:parse_completion",
        fields_of=("prompt",),
        prompt="text",
        takes_salt=True,
        limits=("max_tokens",),
        usage_if_asked=True,
        example={"prompt": "once upon", "max_tokens": 3},
        owner="OpenAI",
        engines="all",
        input="all prompts, each with `suffix`",
        output=_WRITTEN,
    )
    EMBEDDINGS = ApiSpec(
        name="Embeddings",
        paths=("/v1/embeddings",),
        parser="openai:parse_embeddings",
        fields_of=("input dimensions", "input encoding_format", "input[]"),
        usage_if_asked=True,
        example={"input": ["one", "two"]},
        owner="OpenAI",
        engines="all",
        input="all texts",
        output="nothing",
    )
    RESPONSES = ApiSpec(
        name="Responses",
        paths=("/v1/responses",),
        parser="openai:parse_responses",
        fields_of=("input",),
        takes_salt=True,
        limits=("max_output_tokens",),
        usage="input_tokens",
        example={"input": "hello", "max_output_tokens": 3},
        owner="OpenAI",
        engines="all",
        input=f"input, instructions, tools, `prompt`, `previous_response` and the like, {_TEMPLATED}",
        output=_WRITTEN,
    )
    MESSAGES = ApiSpec(
        name="Messages",
        paths=("/v1/messages",),
        parser="anthropic:parse_messages",
        fields_of=("messages system", f"messages {ANTHROPIC_VERSION}"),
        prompt="anthropic messages",
        takes_salt=True,
        limits=("max_tokens",),
        errors="anthropic",
        query=_BETA,
        usage="input_tokens",
        example={"messages": _MESSAGES, "max_tokens": 3},
        owner="Anthropic",
        engines="vLLM",
        input=f"messages with all their blocks, system, tools, {_TEMPLATED}",
        output=_WRITTEN,
    )
    COUNT_TOKENS = ApiSpec(
        name="CountTokens",
        paths=("/v1/messages/count_tokens",),
        parser="anthropic:parse_count_tokens",
        waits_in_queue=False,
        errors="anthropic",
        query=_BETA,
        usage="input_tokens",
        reports_usage=False,
        example={"messages": _MESSAGES},
        owner="Anthropic",
        engines="vLLM",
        input="nothing",
        output="nothing",
    )
    GENERATE = ApiSpec(
        name="Generate",
        paths=("/inference/v1/generate",),
        parser="token_apis:parse_generate",
        fields_of=("token_ids sampling_params",),
        needs_model=False,
        prompt="tokens",
        takes_salt=True,
        limits=("sampling_params.max_tokens",),
        usage_if_asked=True,
        example={"token_ids": (1, 2), "sampling_params": {"max_tokens": 3}},
        owner="vLLM",
        engines="vLLM",
        input="the tokens sent",
        output=_WRITTEN,
    )
    RERANK = ApiSpec(
        name="Rerank",
        paths=("/v1/rerank", "/v2/rerank", "/rerank"),
        parser="rerank:parse_rerank",
        fields_of=("query documents",),
        example={"query": "hello", "documents": ("one", "two")},
        owner="Jina, Cohere",
        engines="vLLM, SGLang (`/v1/rerank`)",
        input="the query and its instruction with each document",
        output="nothing",
    )
    SCORE = ApiSpec(
        name="Score",
        paths=("/v1/score", "/score"),
        parser="rerank:parse_score",
        fields_of=("text_1 text_2", "queries documents", "queries items", "query items", "data_1 data_2"),
        example={"text_1": "hello", "text_2": ("one", "two")},
        owner="vLLM",
        engines="vLLM, SGLang (`/v1/score`)",
        input="each pair of texts",
        output="nothing",
    )
    TRANSCRIPTIONS = ApiSpec(
        name="Transcriptions",
        paths=("/v1/audio/transcriptions",),
        parser="audio:parse_transcription",
        body="form",
        fields_of=("file model",),
        reports_usage=False,
        # 0.125 ms of silence
        example={"file": b"RIFF(\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80>\0\0\0}\0\0\2\0\x10\0data\4\0\0\0\0\0\0\0"},
        owner="OpenAI",
        engines="vLLM, SGLang",
        input="the seconds of the audio, 25 tokens each, and `prompt`",
        output=_WRITTEN,
    )
    SPEECH = ApiSpec(
        name="Speech",
        paths=("/v1/audio/speech",),
        parser="audio:parse_speech",
        fields_of=("input voice",),
        reports_usage=False,
        example={"input": "hello", "voice": "alloy"},
        owner="OpenAI",
        engines="vLLM-Omni",
        input="the text",
        output="the seconds that the text takes to be spoken, at 15 characters a second, 25 tokens each",
    )
    TOKENIZE = ApiSpec(
        name="Tokenize",
        paths=("/tokenize",),
        parser="token_apis:parse_tokenize",
        needs_model=False,
        waits_in_queue=False,
        reports_usage=False,
        example={"prompt": "once upon"},
        owner="vLLM",
        engines="vLLM, SGLang",
        input="nothing",
        output="nothing",
    )
    DETOKENIZE = ApiSpec(
        name="Detokenize",
        paths=("/detokenize",),
        parser="token_apis:parse_detokenize",
        fields_of=("tokens",),
        needs_model=False,
        waits_in_queue=False,
        reports_usage=False,
        example={"tokens": (1, 2)},
        owner="vLLM",
        engines="vLLM, SGLang",
        input="nothing",
        output="nothing",
    )
    V1 = ApiSpec(
        protocol="V1",
        body="unread",
        model_paths=ModelPaths(_V1_ROOT, {"": "GET", ":predict": "POST", EXPLAIN_VERB: "POST"}),
        errors="text",
        reports_usage=False,
        owner="KServe",
        engines="KServe's model servers",
        input="nothing",
        output="nothing",
    )
    V2 = ApiSpec(
        protocol="V2",
        body="unread",
        model_paths=ModelPaths(
            _V2_ROOT, {"": "GET", "/ready": "GET", "/infer": "POST", "/generate": "POST", "/generate_stream": "POST"}
        ),
        errors="text",
        reports_usage=False,
        owner="Open Inference Protocol",
        engines="Triton, MLServer, KServe's model servers",
        input="nothing",
        output="nothing",
    )
    TENSORFLOW = ApiSpec(
        protocol="TensorFlow",
        body="unread",
        model_paths=ModelPaths(
            _V1_ROOT,
            {"": "GET", "/metadata": "GET", ":predict": "POST", ":classify": "POST", ":regress": "POST"},
            ("versions", "labels"),
        ),
        errors="text",
        reports_usage=False,
        owner="TensorFlow",
        engines="TensorFlow Serving",
        input="nothing",
        output="nothing",
    )
    V2_GRPC = ApiSpec(
        protocol="V2-gRPC",
        body="grpc",
        calls=GrpcModelCalls((f"{V2_SERVICE}ModelInfer", f"{V2_SERVICE}ModelMetadata", MODEL_READY_CALL), (1,)),
        errors="grpc",
        reports_usage=False,
        owner="Open Inference Protocol",
        engines="Triton, MLServer, KServe's model servers",
        input="nothing",
        output="nothing",
    )
    TENSORFLOW_GRPC = ApiSpec(
        protocol="TensorFlow-gRPC",
        body="grpc",
        calls=GrpcModelCalls(
            (
                *(
                    f"{_TENSORFLOW_SERVICES}PredictionService/{method}"
                    for method in ("Predict", "Classify", "Regress", "GetModelMetadata")
                ),
                f"{_TENSORFLOW_SERVICES}ModelService/GetModelStatus",
            ),
            # model_spec, and its name
            (1, 1),
        ),
        errors="grpc",
        reports_usage=False,
        owner="TensorFlow",
        engines="TensorFlow Serving",
        input="nothing",
        output="nothing",
    )

    def __init__(self, spec: ApiSpec) -> None:
        # an attribute of its own: a member's value is found by Python code
        self.spec = spec


APIS_BY_NAME: Final[Mapping[str, Api]] = MappingProxyType({api.spec.name: api for api in Api if api.spec.name})
APIS_BY_PATH: Final[Mapping[str, Api]] = MappingProxyType({path: api for api in Api for path in api.spec.paths})
# A path that contains one of these is of Anthropic's: prefixes may stand before it, and other calls of it behind.
ANTHROPIC_PATHS: Final = tuple(
    path
    for path, api in APIS_BY_PATH.items()
    if api.spec.errors == "anthropic" and not any(other in path for other in APIS_BY_PATH if other != path)
)
CHAT_PATH: Final = Api.CHAT.spec.paths[0]
# The APIs whose bodies name the model; those whose paths do, with these paths; those whose message of gRPC does.
BODY_APIS: Final = tuple(api for api in Api if api.spec.body in {"json", "form"})
PATH_APIS: Final = tuple((api, api.spec.model_paths) for api in Api if api.spec.model_paths is not None)
APIS_BY_CALL: Final[Mapping[str, Api]] = MappingProxyType(
    {path: api for api in Api if api.spec.calls is not None for path in api.spec.calls.paths}
)
GRPC_PROTOCOLS: Final = frozenset(api.spec.protocol for api in APIS_BY_CALL.values())
UNREAD_PROTOCOLS: Final = frozenset(api.spec.protocol for api, _ in PATH_APIS)
MODEL_ROOTS: Final = tuple(dict.fromkeys(paths.root for _, paths in PATH_APIS))
# Errors under a path that contains one of these are ``{"error": "..."}``. The root of V1 is also that of OpenAI's list
# of models.
TEXT_ERROR_PATHS: Final = (
    *(f"{SERVER_ROOT}/{what}/" for what in ("models", "health", "repository")),
    *dict.fromkeys(verb for _, paths in PATH_APIS for verb in paths.verbs if verb.startswith(":")),
)


def paths_of_apis(names: Iterable[str]) -> tuple[str, ...]:
    """The own path of each API of these names."""
    return tuple([APIS_BY_NAME[name].spec.paths[0] for name in names])


def api_of_path(path: str) -> Api | None:
    """The API of a path that Envoy may still change: ``/team/v1/chat/completions`` is one of chat."""
    found = APIS_BY_PATH.get(path)
    if found is None:
        # the longest: /team/v1/score is an end of /score, too
        ends = [one for one in APIS_BY_PATH if path.endswith(one)]
        found = APIS_BY_PATH[max(ends, key=len)] if ends else None
    return found


def http_status(grpc_status: int) -> int:
    """What a status of gRPC means as one of HTTP."""
    return _HTTP_STATUSES[grpc_status] if 0 <= grpc_status < len(_HTTP_STATUSES) else 500


def truncate_name(name: str) -> str:
    """``name`` in at most 128 characters."""
    if len(name) <= _MAX_CHARACTERS:
        return name
    hashed = blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
    return f"{name[: _MAX_CHARACTERS - len(hashed) - 1]}~{hashed}"
