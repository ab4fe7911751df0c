"""The names on the wire between Envoy, extproc and the bundle that the controller writes: headers and metadata keys."""

from __future__ import annotations

from typing import Final

# What is routed to engines, and what the gateway answers by itself. All else that engines serve stays out of reach.
CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
RESPONSES_PATH: Final = "/v1/responses"
MODELS_PATH: Final = "/v1/models"

# The endpoint picker protocol of the Gateway API Inference Extension: header and metadata key, and its namespace.
DESTINATION: Final = "x-gateway-destination-endpoint"
LB_NAMESPACE: Final = "envoy.lb"
# Of the same protocol: the endpoints that may be chosen, and the one that served.
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SERVED: Final = "x-gateway-destination-endpoint-served"
# By this header the protocol's conformance tests choose the endpoint.
CONFORMANCE_HEADER: Final = "test-epp-endpoint-selection"

# What the sidecar of a decode engine obeys (llm-d): it must be our word, never a client's.
PREFILLER: Final = "x-prefiller-host-port"
SIDECAR_HEADERS: Final = (
    PREFILLER,
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)

# Which ModelServer a request goes to; Envoy's routes match on it.
SERVER_HEADER: Final = "x-attache-server"

# Headers that belong to the gateway: what a client sends under these prefixes is removed before anything reads it.
RESERVED_PREFIXES: Final = ("x-gateway-", "x-attache-")

# Who asks, as Envoy writes it after authentication: the name of an API key, or what a token says.
CLIENT: Final = "x-attache-client"
TENANT: Final = "x-attache-tenant"
USER: Final = "x-attache-user"
# Milliseconds from arrival until the first token is wanted.
DEADLINE_MS: Final = "x-attache-deadline-ms"
# Of llm-d and, older, of the Gateway API Inference Extension: what a request is worth, whose flow it belongs to, its targets.
OBJECTIVES: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_IDS: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
# Clients' own words in those are removed as well.
OBJECTIVE_PREFIXES: Final = ("x-llm-d-", "x-slo-")

# Of OpenAI's API; in our metadata under the same names.
RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
)

# On gRPC streams of our own bundle, which has removed all of these that a client sent: no client can write it.
BUNDLE_MARK: Final = "x-attache-bundle"

# Our own dynamic metadata: the ticket that joins a decision with its access log entry, and the model asked for.
NAMESPACE: Final = "attache"
TICKET: Final = "ticket"

# Token usage as Envoy's json_to_metadata and sse_to_metadata filters read it out of answers.
USAGE_NAMESPACE: Final = "attache.usage"
PROMPT_TOKENS: Final = "prompt_tokens"
COMPLETION_TOKENS: Final = "completion_tokens"
CACHED_TOKENS: Final = "cached_tokens"

# The host that served, written by the override_host load balancing policy.
SERVED_NAMESPACE: Final = "attache.served"
SERVED_HOST: Final = "host"

# Access log custom tag: microseconds from the request's first byte to the answer's first body byte.
TTFT_TAG: Final = "ttft_us"

# extproc's own answers name themselves so in Envoy's response code details; what is so named is sent as it is.
DETAILS_PREFIX: Final = "attache_"

# The name under which Envoy reports to the access log service.
ACCESS_LOG_NAME: Final = "attache"
