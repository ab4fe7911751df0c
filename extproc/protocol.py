# SPDX-License-Identifier: Apache-2.0
"""Names on the wire between Envoy, extproc and the bundle: paths, headers, metadata keys."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# The paths that are routed to engines; MODELS_PATH is answered by extproc. Clients reach nothing else of the engines.
CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
RESPONSES_PATH: Final = "/v1/responses"
# Anthropic's Messages API, as engines serve it.
MESSAGES_PATH: Final = "/v1/messages"
COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"
# vLLM's own: tokens in, tokens out.
GENERATE_PATH: Final = "/inference/v1/generate"
MODELS_PATH: Final = "/v1/models"

# The endpoint picker protocol of the Gateway API Inference Extension: header and metadata key, and the key's namespace.
DESTINATION: Final = "x-gateway-destination-endpoint"
LB_NAMESPACE: Final = "envoy.lb"
# The same protocol's metadata keys for the endpoints that may be chosen and for the one that served.
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
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

# Headers that engines and their routers obey: which rank of an engine runs a request, and whose session it is.
ENGINE_HEADERS: Final = ("x-data-parallel-rank", "x-session-token", "x-prefiller-url", "x-kv-transfer-params")

# Bodies are read here, whole and as they come: no engine is to decode one into something else, or to be asked whether
# it expects one.
BODY_HEADERS: Final = ("content-encoding", "expect")

# Envoy's cluster of the ModelServer that a request goes to. The prefix keeps users' names and ours apart.
SERVER_HEADER: Final = "x-attache-server"
SERVER_CLUSTER: Final = "server/"
# Time limit and retries of that ModelServer, where they are not the defaults: Envoy has a route for each such policy.
POLICY_HEADER: Final = "x-attache-policy"

# Headers that belong to the gateway: Envoy removes what a client sends under these prefixes before anything reads it.
RESERVED_PREFIXES: Final = ("x-gateway-", "x-attache-")

# The caller, as Envoy writes it after authentication: the name of an API key, or claims of a token.
CLIENT: Final = "x-attache-client"
TENANT: Final = "x-attache-tenant"
USER: Final = "x-attache-user"
# Dynamic metadata with the claims of a verified token, by the name of its issuer in our configuration.
TOKENS_NAMESPACE: Final = "envoy.filters.http.jwt_authn"
# Clients of Anthropic's API send it with every request.
ANTHROPIC_VERSION: Final = "anthropic-version"
# Milliseconds from arrival until the first token is wanted.
DEADLINE_MS: Final = "x-attache-deadline-ms"
# Priority by InferenceObjective, the flow for fair queueing, and latency targets: llm-d's names, then the older ones of
# the Gateway API Inference Extension.
OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_IDS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
# The engine's model that a trusted gateway asks for in place of the one in the body.
MODEL_REWRITES: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
# What a client sends under these prefixes is removed as well.
OBJECTIVE_PREFIXES: Final = ("x-llm-d-", "x-slo-")

# Why a request was refused, on the refusal; llm-d's header and values.
DROPPED_REASON: Final = "x-llm-d-request-dropped-reason"

# OpenAI's response headers for rate limits; our dynamic metadata uses the same names.
RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)

# gRPC metadata on streams of our own bundle: its presence says that Envoy has removed the headers above from what
# clients sent. Clients cannot write it, because gRPC metadata are not HTTP request headers.
BUNDLE_MARK: Final = "x-attache-bundle"

# More of it, on streams of our bundle: the HTTPRoute that took the request, the ModelServer that it has chosen, and the
# listener that was asked.
HTTP_ROUTE_KEY: Final = "x-attache-http-route"
SERVER_KEY: Final = "x-attache-server-key"
LISTENER_KEY: Final = "x-attache-listener"

# Envoy waits no longer than this for an answer of extproc, whatever either is told.
LONGEST_MESSAGE_TIMEOUT_S: Final = 3600

# Our own dynamic metadata: the ticket joins a decision with its access log entry.
NAMESPACE: Final = "attache"
TICKET: Final = "ticket"
# Present if a streamed answer carries usage that the client did not ask for: the chunk with it is dropped on the way
# back.
HIDES_USAGE: Final = "hides_usage"

# Token usage, which Envoy's filters read out of answers.
USAGE_NAMESPACE: Final = "attache.usage"
PROMPT_TOKENS: Final = "prompt_tokens"
COMPLETION_TOKENS: Final = "completion_tokens"
CACHED_TOKENS: Final = "cached_tokens"
# Of the Messages API: what was not cached, and what was cached by this request. With the cached ones they are the
# prompt.
UNCACHED_TOKENS: Final = "uncached_tokens"
CREATED_TOKENS: Final = "created_tokens"

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
