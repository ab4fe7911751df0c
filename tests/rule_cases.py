# SPDX-License-Identifier: Apache-2.0
"""One accepted and one refused object for every CEL rule: for the directory's own checks and for a real API server."""

from __future__ import annotations

import copy
from typing import Any, Final, NamedTuple

API_VERSION: Final = "attache.dev/v1alpha1"

_ROUTE: Final = {"modelName": "llama", "rules": [{"targetModels": [{"modelServerName": "llama"}]}]}
_SERVER: Final = {"model": "m", "endpoints": [{"address": "10.0.0.1:8000"}]}
_PROVIDER: Final = {"provider": {"host": "api.example.com"}, "apis": ["Messages"]}
_KEYED: Final = {
    "model": "m",
    "apis": ["ChatCompletions"],
    "provider": {"host": "a.b", "auth": {"type": "Header", "header": "api-key"}},
    "connection": {"apiKeyFile": "api.key"},
}
_SIGNED: Final = {**_KEYED, "provider": {"host": "a.b", "auth": {"type": "AWS", "region": "us-east-1"}}}
_POD: Final = {"spec": {"containers": [{"name": "engine", "image": "attache/engine-sim"}]}}
_INFER: Final = {"template": {"roles": [{"name": "all", "entryTemplate": _POD}]}}
_TARGET: Final = {"name": "a", "maxReplicas": 4, "ref": {"kind": "ModelInfer", "name": "llama"}}
_BINDING: Final = {"policyRef": "default", "targets": [_TARGET, {**_TARGET, "name": "b"}]}
_QUERY: Final = {"address": "https://prometheus:9090", "query": "up"}
_STRATEGIES: Final = {
    name: f"{name[0].lower()}{name[1:]}"
    for name in ("Work", "Concurrency", "Saturation", "SpareCapacity", "Tokens", "Slo", "Predictive")
}
_KEY: Final = {"name": "a", "tenant": "a", "key": "12345678"}
_KEYS: Final = {"apiKeys": [_KEY]}
_ISSUER: Final = {
    "name": "a",
    "issuer": "https://a",
    "jwks": '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}',
    "audiences": ["us"],
}
_ON_DEMAND: Final = {"adapters": [{"name": "a", "source": "/adapters/a"}]}
_MANY: Final = {"port": 9000, "adapters": [{"name": "a", "source": "s3://models/a", "memory": "1Gi"}]}
_OWN_LEG: Final = {
    "prefillLabels": {"role": "prefill"},
    "decodeLabels": {"role": "decode"},
    "leg": "Gateway",
    "connector": "NixlConnector",
}
_STAGES: Final = {"prefill": 1, "maxPrefill": 2, "decode": 1, "maxDecode": 2}
_TIER: Final = {"aboveInputTokens": 1000, "perMillion": {"input": "2"}}
_CLIENT: Final = {"certFile": "client.crt", "keyFile": "client.key"}


class Case(NamedTuple):
    """``rule``: whose case it is. ``spec``: is accepted. ``path``: where ``bad`` is written to make it refused; with
    ``None`` the field is removed.
    """

    rule: str
    kind: str
    spec: dict[str, Any]
    path: tuple[str | int, ...]
    bad: Any
    # whether a configuration directory may hold the kind, and its reader refuses the same
    in_directory: bool = True

    def accepted(self) -> dict[str, Any]:
        """The object that breaks no rule."""
        return _object(self.kind, self.spec)

    def refused(self) -> dict[str, Any]:
        """The same object with one change that breaks the rule."""
        spec = copy.deepcopy(self.spec)
        inner: Any = spec
        for step in self.path[:-1]:
            inner = inner[step]
        if self.bad is None:
            del inner[self.path[-1]]
        else:
            inner[self.path[-1]] = self.bad
        return _object(self.kind, spec)


def _object(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "example"}, "spec": copy.deepcopy(spec)}


def _route(**fields: object) -> dict[str, Any]:
    return copy.deepcopy({**_ROUTE, **fields})


def _server(**fields: object) -> dict[str, Any]:
    return copy.deepcopy({**_SERVER, **fields})


_RULE: Final = _ROUTE["rules"][0]
_MATCHED: Final = {**_RULE, "modelMatch": {"headers": {"x-a": {"exact": "1"}}}}

CASES: Final = (
    Case(
        "exactly one kind of match",
        "ModelRoute",
        _route(rules=[_MATCHED]),
        ("rules", 0, "modelMatch", "headers", "x-a", "prefix"),
        "1",
    ),
    Case("no kind of match", "ModelRoute", _route(rules=[_MATCHED]), ("rules", 0, "modelMatch", "headers", "x-a"), {}),
    Case(
        "one kind of condition on a field",
        "ModelRoute",
        _route(rules=[{**_RULE, "modelMatch": {"body": {"stream": {"boolean": True}}}}]),
        ("rules", 0, "modelMatch", "body", "stream", "atLeast"),
        1,
    ),
    Case(
        "a range of a field in order",
        "ModelRoute",
        _route(rules=[{**_RULE, "modelMatch": {"body": {"n": {"atLeast": 1.5, "atMost": 2}}}}]),
        ("rules", 0, "modelMatch", "body", "n", "atMost"),
        1,
    ),
    Case(
        "a range of tokens has an end",
        "ModelRoute",
        _route(rules=[{**_RULE, "modelMatch": {"inputTokens": {"atMost": 9}}}]),
        ("rules", 0, "modelMatch", "inputTokens", "atMost"),
        None,
    ),
    Case(
        "a range of tokens in order",
        "ModelRoute",
        _route(rules=[{**_RULE, "modelMatch": {"outputTokens": {"atLeast": 5, "atMost": 9}}}]),
        ("rules", 0, "modelMatch", "outputTokens", "atMost"),
        4,
    ),
    Case(
        "retry goes with fallback",
        "ModelRoute",
        _route(rules=[{**_RULE, "fallback": [{"modelServerName": "b"}], "retry": {"minConcurrency": 3}}]),
        ("rules", 0, "fallback"),
        None,
    ),
    Case(
        "a mirror is no target",
        "ModelRoute",
        _route(rules=[{**_RULE, "mirror": {"modelServerName": "b"}}]),
        ("rules", 0, "mirror", "modelServerName"),
        _RULE["targetModels"][0]["modelServerName"],
    ),
    Case("a positive weight", "ModelRoute", _route(), ("rules", 0, "targetModels", 0, "weight"), 0),
    Case(
        "tiers choose among two",
        "ModelRoute",
        _route(rules=[{**_RULE, "targetModels": [*_RULE["targetModels"], {"modelServerName": "b"}], "tiers": {}}]),
        ("rules", 0, "targetModels", 1, "weight"),
        0,
    ),
    Case(
        "tiers choose without stickiness",
        "ModelRoute",
        _route(
            rules=[
                {
                    "targetModels": [*_RULE["targetModels"], {"modelServerName": "b"}],
                    "tiers": {},
                    "sticky": "None",
                }
            ]
        ),
        ("rules", 0, "sticky"),
        "User",
    ),
    Case(
        "a class is for someone",
        "ModelRoute",
        _route(
            rules=[
                {
                    "targetModels": [*_RULE["targetModels"], {"modelServerName": "b"}],
                    "tiers": {"classes": [{"tenants": ["a"]}]},
                }
            ]
        ),
        ("rules", 0, "tiers", "classes", 0),
        {"ttft": "1s"},
    ),
    Case("a name to ask for", "ModelRoute", _route(), ("modelName",), None),
    Case("steps have one listener", "ModelRoute", _route(callers="Steps"), ("parentRefs",), [{"name": "web"}]),
    Case("the rule without a match is last", "ModelRoute", _route(rules=[_MATCHED, _RULE]), ("rules", 0), _RULE),
    Case("a limit limits", "ModelRoute", _route(rateLimits=[{"requests": 1}]), ("rateLimits", 0), {"per": "User"}),
    Case(
        "header goes with per: Header",
        "ModelRoute",
        _route(rateLimits=[{"requests": 1, "per": "Header", "header": "x-a"}]),
        ("rateLimits", 0, "header"),
        None,
    ),
    Case(
        "withoutRedis goes with Global",
        "ModelRoute",
        _route(rateLimits=[{"requests": 1, "scope": "Global", "withoutRedis": "Refuse"}]),
        ("rateLimits", 0, "scope"),
        "Local",
    ),
    Case(
        "others, or whom it names",
        "ModelRoute",
        _route(rateLimits=[{"requests": 1, "tenants": ["a"]}]),
        ("rateLimits", 0, "others"),
        True,
    ),
    Case(
        "a class promises something", "ModelRoute", _route(slo=[{"name": "a", "ttft": "1s"}]), ("slo", 0), {"name": "a"}
    ),
    Case(
        "what cannot be in time is refused by ttft or e2e",
        "ModelRoute",
        _route(slo=[{"name": "a", "ttft": "1s", "tpot": "1s", "unmeetable": "Refuse"}]),
        ("slo", 0),
        {"name": "a", "tpot": "1s", "unmeetable": "Refuse"},
    ),
    Case(
        "endpoints or a selector",
        "ModelServer",
        _server(),
        ("workloadSelector",),
        {"matchLabels": {"app": "llama"}},
    ),
    Case("neither endpoints nor a selector", "ModelServer", _server(), ("endpoints",), None),
    Case("prompts are OpenAI's", "ModelServer", _server(cacheIsolation="User"), ("protocol",), "V2"),
    Case("a provider has APIs", "ModelServer", {"model": "m", **_PROVIDER}, ("apis",), None),
    Case(
        "paths of a provider's APIs",
        "ModelServer",
        {"model": "m", **_PROVIDER, "provider": {"host": "a.b", "paths": {"Messages": "/messages"}}},
        ("apis",),
        ["ChatCompletions"],
    ),
    Case("what is shown is there", "ModelServer", _KEYED, ("connection",), None),
    Case("a header for its type", "ModelServer", _KEYED, ("provider", "auth", "type"), "Bearer"),
    Case("no header but for keys", "ModelServer", _KEYED, ("provider", "auth", "header"), "Content-Length"),
    Case("a service of its type", "ModelServer", _KEYED, ("provider", "auth", "service"), "bedrock"),
    Case(
        "another Attaché takes a key as it is",
        "ModelServer",
        {**_KEYED, "provider": {"host": "a.b", "auth": {"type": "Bearer"}, "reportsLoad": True}},
        ("provider", "auth"),
        {"type": "Header", "header": "api-key"},
    ),
    Case("a region for its type", "ModelServer", _SIGNED, ("provider", "auth", "region"), None),
    Case("signed by a file", "ModelServer", _SIGNED, ("connection",), {"apiKeyEnv": "AWS"}),
    Case("APIs of OpenAI's protocol", "ModelServer", _server(apis=["Messages"]), ("protocol",), "V2"),
    *(
        Case("a translation has an effect", "ModelServer", _server(apis=apis, translation="Strict"), ("apis",), bad)
        for apis, bad in (
            (["Messages"], None),
            (["Messages", "Responses"], ["Messages", "Responses", "ChatCompletions"]),
            (["ChatCompletions", "Embeddings"], ["Embeddings"]),
        )
    ),
    Case("endpoints or a provider", "ModelServer", _server(), ("provider",), _PROVIDER["provider"]),
    *(
        Case(
            f"a provider has no {field}",
            "ModelServer",
            {"model": "m", **_PROVIDER},
            (field,),
            value,
        )
        for field, value in (
            ("pdGroup", {"prefillLabels": {"role": "prefill"}, "decodeLabels": {"role": "decode"}}),
            ("kvEvents", {"port": 5557}),
            ("adapterLoading", _ON_DEMAND),
            ("pickerConfig", "epp.yaml"),
            ("activation", {"maxRequests": 1}),
            ("metricsPath", "/metrics"),
            ("pathPrefix", "/openai"),
            ("metricsPort", 9000),
            ("allowedFields", ["priority"]),
        )
    ),
    Case(
        "TLS has an effect",
        "ModelServer",
        {"model": "m", **_PROVIDER, "connection": {"tls": {"caFile": "ca.crt"}}},
        ("provider", "scheme"),
        "http",
    ),
    Case(
        "no key in the clear",
        "ModelServer",
        {"model": "m", **_PROVIDER, "connection": {"apiKeyFile": "api.key"}},
        ("provider", "scheme"),
        "http",
    ),
    Case(
        "the selector's port",
        "ModelServer",
        {"model": "m", "workloadSelector": {"matchLabels": {"app": "a"}}, "workloadPort": {"port": 8000}},
        ("workloadPort",),
        None,
    ),
    Case(
        "pdGroup without pickerConfig",
        "ModelServer",
        _server(pdGroup={"prefillLabels": {"role": "prefill"}, "decodeLabels": {"role": "decode"}}),
        ("pickerConfig",),
        "epp.yaml",
    ),
    Case(
        "the gateway's leg has no prefix",
        "ModelServer",
        _server(pdGroup=_OWN_LEG),
        ("pathPrefix",),
        "/openai",
    ),
    Case(
        "the gateway's leg has a connector",
        "ModelServer",
        _server(pdGroup=_OWN_LEG),
        ("pdGroup", "connector"),
        None,
    ),
    Case(
        "the gateway's leg and its connector fit",
        "ModelServer",
        _server(pdGroup=_OWN_LEG),
        ("pdGroup", "connector"),
        "MoRIIOConnector",
    ),
    Case(
        "SGLang has a connector of its own",
        "ModelServer",
        _server(pdGroup=_OWN_LEG),
        ("engine",),
        "SGLang",
    ),
    Case(
        "which other engines do not have",
        "ModelServer",
        _server(engine="SGLang", pdGroup={**_OWN_LEG, "connector": "bootstrap_room"}),
        ("engine",),
        "vLLM",
    ),
    Case(
        "decode engines of SGLang compute no prompt",
        "ModelServer",
        _server(engine="SGLang", pdGroup={**_OWN_LEG, "connector": "bootstrap_room", "onPrefillFailure": "Fail"}),
        ("pdGroup", "onPrefillFailure"),
        "Local",
    ),
    Case(
        "the connector of the gateway's leg is the engine's",
        "ModelServer",
        _server(engine="TensorRT-LLM", pdGroup={**_OWN_LEG, "connector": "context_first"}),
        ("pdGroup", "connector"),
        "NixlConnector",
    ),
    Case(
        "adapters on demand without pdGroup",
        "ModelServer",
        _server(adapterLoading=_ON_DEMAND),
        ("pdGroup",),
        {"prefillLabels": {"role": "prefill"}, "decodeLabels": {"role": "decode"}},
    ),
    Case(
        "other engines than vLLM have an agent that loads",
        "ModelServer",
        _server(engine="SGLang", adapterLoading={**_ON_DEMAND, "port": 9000}),
        ("adapterLoading", "port"),
        None,
    ),
    Case(
        "retries go to fallbacks",
        "ModelRoute",
        {
            **_ROUTE,
            "rules": [
                {
                    "targetModels": [{"modelServerName": "llama"}],
                    "fallback": [{"modelServerName": "other"}],
                    "retry": {},
                }
            ],
        },
        ("rules", 0, "fallback"),
        None,
    ),
    Case(
        "prompts are OpenAI's",
        "ModelServer",
        _server(protocol="V2"),
        ("kvEvents",),
        {"port": 5557},
    ),
    Case(
        "slots or memory",
        "ModelServer",
        _server(adapterLoading={**_MANY, "slots": 2}),
        ("adapterLoading", "memory"),
        "1Gi",
    ),
    Case(
        "V2 servers load by way of agents",
        "ModelServer",
        _server(protocol="V2", adapterLoading=_MANY),
        ("adapterLoading", "port"),
        None,
    ),
    Case(
        "other protocols load nothing",
        "ModelServer",
        _server(protocol="V2", adapterLoading=_MANY),
        ("protocol",),
        "V1",
    ),
    Case(
        "an adapter twice",
        "ModelServer",
        _server(adapterLoading=_ON_DEMAND),
        ("adapterLoading", "adapters"),
        [{"name": "a", "source": "/a"}, {"name": "a", "source": "/b"}],
    ),
    Case(
        "an address twice",
        "ModelServer",
        _server(),
        ("endpoints",),
        [{"address": "10.0.0.1:8000"}, {"address": "10.0.0.1:8000"}],
    ),
    Case(
        "priorities of bands differ",
        "ModelServer",
        _server(
            flowControl={"bands": [{"name": "a", "priority": 1, "share": 1}, {"name": "b", "priority": 2, "share": 1}]}
        ),
        ("flowControl", "bands", 1, "priority"),
        1,
    ),
    Case(
        "an authority, or none",
        "ModelServer",
        _server(connection={"tls": {"caFile": "ca.pem", "serverName": "a.example"}}),
        ("connection", "tls", "insecureSkipVerify"),
        True,
    ),
    Case(
        "an authority in a file or in an object",
        "ModelServer",
        _server(connection={"tls": {"caFile": "ca.pem", "serverName": "a.example"}}),
        ("connection", "tls", "caCertificateRef"),
        {"name": "ca"},
    ),
    Case(
        "an authority in an object, or none",
        "ModelServer",
        _server(connection={"tls": {"insecureSkipVerify": True}}),
        ("connection", "tls", "caCertificateRef"),
        {"kind": "Secret", "name": "ca", "key": "root.pem"},
    ),
    Case(
        "TLS checks certificates, or says that it does not",
        "ModelServer",
        _server(connection={"tls": {"insecureSkipVerify": True, "serverName": "a.example"}}),
        ("connection", "tls", "insecureSkipVerify"),
        None,
    ),
    Case(
        "a client's certificate from one place",
        "ModelServer",
        _server(connection={"tls": {"insecureSkipVerify": True, "clientCertificate": _CLIENT}}),
        ("connection", "tls", "clientCertificateRef"),
        {"name": "client"},
    ),
    Case(
        "a key in a file or in a Secret",
        "ModelServer",
        _server(connection={"apiKeyEnv": "KEY"}),
        ("connection", "apiKeyRef"),
        {"name": "engines"},
    ),
    Case(
        "an engine's key from one place",
        "ModelServer",
        _server(connection={"apiKeyFile": "key.txt"}),
        ("connection", "apiKeyEnv"),
        "KEY",
    ),
    Case(
        "a budget has a bound",
        "ModelRoute",
        _route(budgets=[{"name": "a", "window": "Day", "max": {"requests": 1}}]),
        ("budgets", 0, "max"),
        {},
    ),
    Case(
        "a budget of all routes has a bound",
        "GatewayConfig",
        {"budgets": [{"name": "a", "window": "Day", "max": {"requests": 1}}]},
        ("budgets", 0, "max"),
        {},
    ),
    Case("a price costs something", "ModelServer", _server(pricing=[{"perRequest": "1"}]), ("pricing", 0), {}),
    Case(
        "a price an hour stands alone",
        "ModelServer",
        _server(pricing=[{"perHour": "1"}]),
        ("pricing", 0, "perRequest"),
        "1",
    ),
    Case(
        "what is about prompts goes with OpenAI",
        "ModelServer",
        _server(protocol="OpenAI", cacheIsolation="Shared"),
        ("protocol",),
        "V2",
    ),
    Case(
        "tiers change rates",
        "ModelServer",
        _server(pricing=[{"perMillion": {"input": "1"}, "perRequest": "1", "tiers": [_TIER]}]),
        ("pricing", 0, "perMillion"),
        None,
    ),
    Case(
        "a limit of a key",
        "GatewayConfig",
        {"authentication": {"apiKeys": [{**_KEY, "rateLimits": [{"requests": 1}]}]}},
        ("authentication", "apiKeys", 0, "rateLimits", 0, "requests"),
        None,
    ),
    Case(
        "a budget of a key",
        "GatewayConfig",
        {"authentication": {"apiKeys": [{**_KEY, "budgets": [{"window": "Day", "max": {"tokens": 1}}]}]}},
        ("authentication", "apiKeys", 0, "budgets", 0, "max", "tokens"),
        None,
    ),
    Case(
        "virtual keys or tokens",
        "GatewayConfig",
        {"authentication": {"virtualKeys": {}}},
        ("authentication", "jwt"),
        [_ISSUER],
    ),
    Case(
        "one key of a guard",
        "GatewayConfig",
        {"guards": [{"name": "pii", "url": "http://127.0.0.1:1/", "apiKeyFile": "guard.key"}]},
        ("guards", 0, "apiKeyEnv"),
        "GUARD_KEY",
    ),
    Case(
        "one sink of payloads",
        "GatewayConfig",
        {"payloadLog": {"path": "/var/lib/attache/payload.log"}},
        ("payloadLog", "url"),
        "http://127.0.0.1:1/",
    ),
    Case("keys or tokens", "GatewayConfig", {"authentication": _KEYS}, ("authentication", "jwt"), [_ISSUER]),
    Case(
        "a key or its file",
        "GatewayConfig",
        {"authentication": _KEYS},
        ("authentication", "apiKeys", 0, "keyFile"),
        "key.txt",
    ),
    Case(
        "signing keys or their file",
        "GatewayConfig",
        {"authentication": {"jwt": [_ISSUER]}},
        ("authentication", "jwt", 0, "jwks"),
        None,
    ),
    Case(
        "audiences",
        "GatewayConfig",
        {"authentication": {"jwt": [_ISSUER]}},
        ("authentication", "jwt", 0, "audiences"),
        None,
    ),
    Case(
        "a target of its kind's group",
        "ModelAccessPolicy",
        {},
        ("targetRefs",),
        [{"kind": "ModelRoute", "name": "llama", "group": "gateway.networking.k8s.io"}],
    ),
    Case(
        "a pool's group",
        "ModelAccessPolicy",
        {"targetRefs": [{"kind": "InferencePool", "name": "llama", "group": "inference.networking.k8s.io"}]},
        ("targetRefs", 0, "group"),
        "attache.dev",
        in_directory=False,
    ),
    Case(
        "a listener of a gateway",
        "ModelAccessPolicy",
        {},
        ("targetRefs",),
        [{"kind": "ModelRoute", "name": "llama", "sectionName": "https"}],
    ),
    Case(
        "callers are described",
        "ModelAccessPolicy",
        {"rules": [{"from": [{"tenants": ["acme"]}], "models": ["llama", "sql-*"]}]},
        ("rules", 0, "from", 0),
        {},
    ),
    Case(
        "workers have a template",
        "ModelInfer",
        _INFER,
        ("template", "roles", 0, "workerReplicas"),
        2,
        in_directory=False,
    ),
    Case(
        "a role can change",
        "ModelInfer",
        {"template": {"roles": [{**_INFER["template"]["roles"][0], "maxUnavailable": 0, "maxSurge": 1}]}},
        ("template", "roles", 0, "maxSurge"),
        None,
        in_directory=False,
    ),
    Case(
        "roles of the gang",
        "ModelInfer",
        {"template": {**_INFER["template"], "gang": {"minRoleReplicas": {"all": 1}}}},
        ("template", "gang", "minRoleReplicas"),
        {"prefill": 1},
        in_directory=False,
    ),
    Case(
        "a role does not wait for itself",
        "ModelInfer",
        _INFER,
        ("template", "roles", 0, "startsAfter"),
        ["all"],
        in_directory=False,
    ),
    Case(
        "a rollout can move",
        "ModelInfer",
        {**_INFER, "rollout": {"maxUnavailable": 0, "maxSurge": 1}},
        ("rollout", "maxSurge"),
        "0%",
        in_directory=False,
    ),
    Case(
        "a Model has weights",
        "Model",
        {"uri": "hf://org/model"},
        ("uri",),
        None,
        in_directory=False,
    ),
    Case(
        "one model or many",
        "Model",
        {"models": [{"name": "iris", "uri": "s3://models/iris"}]},
        ("uri",),
        "hf://org/model",
        in_directory=False,
    ),
    Case(
        "a lower bound has an upper one",
        "Model",
        {"uri": "hf://org/model", "backends": [{"name": "a", "minReplicas": 1, "maxReplicas": 2}]},
        ("backends", 0, "maxReplicas"),
        None,
        in_directory=False,
    ),
    Case(
        "engines of prefill have bounds",
        "Model",
        {"uri": "hf://org/model", "backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "disaggregation", "prefill"),
        3,
        in_directory=False,
    ),
    Case(
        "engines of decode have bounds",
        "Model",
        {"uri": "hf://org/model", "backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "disaggregation", "decode"),
        3,
        in_directory=False,
    ),
    Case(
        "groups or stages are scaled",
        "Model",
        {"uri": "hf://org/model", "backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "maxReplicas"),
        2,
        in_directory=False,
    ),
    Case(
        "engines of prefill have bounds",
        "ModelTemplate",
        {"backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "disaggregation", "prefill"),
        3,
        in_directory=False,
    ),
    Case(
        "engines of decode have bounds",
        "ModelTemplate",
        {"backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "disaggregation", "decode"),
        3,
        in_directory=False,
    ),
    Case(
        "groups or stages are scaled",
        "ModelTemplate",
        {"backends": [{"name": "a", "disaggregation": _STAGES}]},
        ("backends", 0, "maxReplicas"),
        2,
        in_directory=False,
    ),
    Case(
        "scale to zero belongs to the policy",
        "Model",
        {"uri": "hf://org/model", "autoscaling": {"policyRef": "p"}},
        ("autoscaling", "scaleToZero"),
        "5m",
        in_directory=False,
    ),
    Case(
        "one place for weights",
        "ModelTemplate",
        {"cache": {"claim": "weights"}},
        ("cache", "hostPath"),
        "/models",
        in_directory=False,
    ),
    Case(
        "a rule adds something",
        "ServingRuntime",
        {"engine": "vLLM", "arguments": [{"when": {"tensor": "*"}, "args": ["--tp={tensor}"]}]},
        ("arguments", 0, "args"),
        None,
        in_directory=False,
    ),
    Case(
        "a rule adds something",
        "ClusterServingRuntime",
        {"engine": "vLLM", "arguments": [{"env": [{"name": "A", "value": "{name}"}]}]},
        ("arguments", 0, "env"),
        None,
        in_directory=False,
    ),
    *(
        Case(
            "gRPC is of classical models",
            kind,
            {"engine": "Custom", "protocolVersions": ["V2"], "grpcPort": 8081},
            ("protocolVersions",),
            ["OpenAI"],
            in_directory=False,
        )
        for kind in ("ServingRuntime", "ClusterServingRuntime")
    ),
    *(
        Case(
            "gRPC has a port of its own",
            kind,
            {"engine": "Triton", "port": 8000, "grpcPort": 8001},
            ("grpcPort",),
            8000,
            in_directory=False,
        )
        for kind in ("ServingRuntime", "ClusterServingRuntime")
    ),
    Case(
        "bounds of a backend",
        "Model",
        {"uri": "hf://org/model", "backends": [{"name": "a", "minReplicas": 1, "maxReplicas": 2}]},
        ("backends", 0, "minReplicas"),
        3,
        in_directory=False,
    ),
    Case(
        "a query goes with Prometheus",
        "AutoscalingPolicy",
        {"metrics": [{"name": "m", "value": 1, "source": "Prometheus", "prometheus": _QUERY}]},
        ("metrics", 0, "prometheus"),
        None,
        in_directory=False,
    ),
    Case(
        "a page of engines",
        "AutoscalingPolicy",
        {"metrics": [{"name": "m", "value": 1, "source": "Engine", "engine": {}}]},
        ("metrics", 0, "source"),
        "Gateway",
        in_directory=False,
    ),
    *(
        Case(
            f"parameters of {name}",
            "AutoscalingPolicy",
            {"strategies": [{"name": name, field: {}}], "objective": {"ttft": "1s"}},
            ("strategies", 0, "name"),
            "Saturation" if name == "Tokens" else "Tokens",
            in_directory=False,
        )
        for name, field in _STRATEGIES.items()
    ),
    *(
        Case(
            f"thresholds of {name}",
            "AutoscalingPolicy",
            {"strategies": [{"name": name, field: {}}], "objective": {"ttft": "1s"}},
            ("strategies", 0, field),
            {f"scaleUp{what}": 0.5, f"scaleDown{what}": 0.5},
            in_directory=False,
        )
        for name, field, what in (
            ("Saturation", "saturation", "Threshold"),
            ("Tokens", "tokens", "Utilization"),
            ("Slo", "slo", "Threshold"),
        )
    ),
    Case(
        "a latency to keep", "AutoscalingPolicy", {"objective": {"ttft": "1s"}}, ("objective",), {}, in_directory=False
    ),
    Case(
        "a schedule bounds",
        "AutoscalingPolicy",
        {"schedules": [{"start": "0 8 * * *", "duration": "8h", "minReplicas": 1}]},
        ("schedules", 0, "minReplicas"),
        None,
        in_directory=False,
    ),
    Case(
        "metrics of Target",
        "AutoscalingPolicy",
        {"strategies": [{"name": "Target"}], "metrics": [{"name": "m", "value": 1}]},
        ("metrics",),
        None,
        in_directory=False,
    ),
    Case(
        "metrics of Step",
        "AutoscalingPolicy",
        {"strategies": [{"name": "Step"}], "metrics": [{"name": "m", "value": 1}]},
        ("metrics",),
        None,
        in_directory=False,
    ),
    Case(
        "the zone of Step",
        "AutoscalingPolicy",
        {"strategies": [{"name": "Step", "step": {}}], "metrics": [{"name": "m", "value": 1}]},
        ("strategies", 0, "step"),
        {"scaleUp": [{"ratio": 1, "value": 1}], "scaleDown": [{"ratio": 2, "value": 1}]},
        in_directory=False,
    ),
    Case(
        "parameters of Step",
        "AutoscalingPolicy",
        {
            "strategies": [{"name": "Step", "step": {}}],
            "metrics": [{"name": "m", "value": 1}],
            "objective": {"ttft": "1s"},
        },
        ("strategies", 0, "name"),
        "Tokens",
        in_directory=False,
    ),
    Case(
        "objective of Slo",
        "AutoscalingPolicy",
        {"strategies": [{"name": "Slo"}], "objective": {"ttft": "1s"}},
        ("objective",),
        None,
        in_directory=False,
    ),
    Case(
        "bounds of a target",
        "AutoscalingPolicyBinding",
        _BINDING,
        ("targets", 0, "minReplicas"),
        5,
        in_directory=False,
    ),
    Case(
        "bounds of a ratio",
        "AutoscalingPolicyBinding",
        {**_BINDING, "ratios": [{"numerator": "a", "denominator": "b", "min": 1, "max": 2}]},
        ("ratios", 0, "min"),
        3,
        in_directory=False,
    ),
    Case(
        "targets of a ratio",
        "AutoscalingPolicyBinding",
        {**_BINDING, "ratios": [{"numerator": "a", "denominator": "b", "min": 1, "max": 2}]},
        ("ratios", 0, "numerator"),
        "c",
        in_directory=False,
    ),
)
