# SPDX-License-Identifier: Apache-2.0
"""Secrets and ModelAccessPolicies in a cluster: they are in the directory, and what goes wrong opens nothing."""

from __future__ import annotations

import base64
from hashlib import sha256

from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
from extproc.api.tracing import Tracing
from tests.controller.gateway.compile.gateway_api.outcomes import compiled, conditions, snapshot, status
from tests.gateway_objects import Object, backend_ref, gateway, http_route, listener, make, pool, service
from tests.kube_objects import pod, resource, route, server

KEY = b"0123456789abcdef"
CONFIG = resource("GatewayConfig", "main", {"authentication": {"apiKeySecrets": [{"name": "keys"}]}})
PARAMETERS = {"parametersRef": {"group": "attache.dev", "kind": "GatewayConfig", "name": "main"}}


def secret(**keys: bytes) -> Object:
    data = {name: base64.b64encode(key).decode() for name, key in keys.items()}
    return make("v1", "Secret", "keys", type="Opaque", data=data)


def policy(*targets: Object, **spec: object) -> Object:
    content = {"rules": [{"models": ["llama"]}], **({"targetRefs": list(targets)} if targets else {}), **spec}
    return resource("ModelAccessPolicy", "only", content)


def test_keys_of_a_secret_are_digests_in_the_directory() -> None:
    outcome = compiled(gateway(infrastructure=PARAMETERS), CONFIG, secret(alice=KEY))
    authentication = snapshot(outcome).gateway.authentication
    assert authentication is not None
    (key,) = authentication.api_keys
    assert (key.name, key.tenant, key.key_sha256) == ("alice", "alice", sha256(KEY).hexdigest())
    assert ReferencedObjectKey("Secret", "default/keys") in outcome.pointers
    assert not any(KEY in content for content in outcome.files.values())


def test_tracing_of_the_config_is_that_of_the_gateway() -> None:
    config = resource("GatewayConfig", "main", {"tracing": {"endpoint": "otel.example:4317", "samplingPercent": 5}})
    found = snapshot(compiled(gateway(infrastructure=PARAMETERS), config)).gateway.tracing
    assert found == Tracing(endpoint="otel.example:4317", sampling_percent=5.0)


def test_while_a_secret_is_missing_nobody_gets_in_and_the_config_says_so() -> None:
    outcome = compiled(gateway(infrastructure=PARAMETERS), CONFIG)
    authentication = snapshot(outcome).gateway.authentication
    assert authentication is not None
    assert [one.key_sha256 for one in authentication.api_keys] == ["0" * 64]
    assert conditions(status(outcome, "GatewayConfig", "main").conditions)["ResolvedRefs"] == (
        "False",
        "SecretNotUsable",
    )


def test_a_policy_of_a_gateway_is_about_its_listeners() -> None:
    web = {"kind": "Gateway", "group": "gateway.networking.k8s.io", "name": "web"}
    things = gateway("web", listener("a"), listener("b", 8080)), gateway("other", listener("c", 90))
    outcome = compiled(*things, policy(web))
    (found,) = snapshot(outcome).access_policies
    assert {one.section_name for one in found.spec.target_refs} == {"default/web/a", "default/web/b"}
    assert conditions(status(outcome, "ModelAccessPolicy", "only").conditions)["Programmed"][0] == "True"
    one = compiled(*things, policy({**web, "sectionName": "b"}))
    assert [ref.section_name for ref in snapshot(one).access_policies[0].spec.target_refs] == ["default/web/b"]


def test_a_policy_of_a_route_that_is_not_served_says_so() -> None:
    target = {"kind": "ModelRoute", "name": "llama"}
    outcome = compiled(server(), policy(target))
    assert snapshot(outcome).access_policies == ()
    assert conditions(status(outcome, "ModelAccessPolicy", "only").conditions)["ResolvedRefs"] == (
        "False",
        "TargetNotFound",
    )
    assert len(snapshot(compiled(server(), route("llama"), policy(target))).access_policies) == 1


def test_keys_of_a_secret_that_are_good_for_some_models_close_a_gateway_without_extproc() -> None:
    keys = {"apiKeySecrets": [{"name": "keys", "models": ["llama"]}]}
    config = resource("GatewayConfig", "main", {"failureMode": "Open", "authentication": keys})
    outcome = compiled(config, secret(alice=KEY), config="default/main")
    assert snapshot(outcome).gateway.failure_mode == "Close"


def test_beside_policies_a_gateway_is_closed_without_extproc() -> None:
    config = resource("GatewayConfig", "main", {"failureMode": "Open"})
    outcome = compiled(config, policy(), config="default/main")
    assert snapshot(outcome).gateway.failure_mode == "Close"
    (accepted, *_) = status(outcome, "GatewayConfig", "main").conditions
    assert "Close is served" in accepted.message
    assert snapshot(compiled(config, config="default/main")).gateway.failure_mode == "Open"


def test_a_policy_of_a_pool_is_about_the_server_that_serves_it() -> None:
    ref = {"kind": "InferencePool", "group": "inference.networking.k8s.io", "name": "llama"}
    pooled = backend_ref("llama", None, group="inference.networking.k8s.io", kind="InferencePool")
    things = gateway(), pool(), service("picker", 9002), pod("a")
    outcome = compiled(*things, http_route("app", pooled), policy(ref))
    (found,) = snapshot(outcome).access_policies
    (attached,) = found.spec.target_refs
    assert (attached.kind, attached.name) == ("ModelServer", "inferencepool.llama")
    assert conditions(status(outcome, "ModelAccessPolicy", "only").conditions)["Programmed"][0] == "True"
    # nobody can ask its engines through this gateway
    unrouted = compiled(*things, policy(ref))
    assert snapshot(unrouted).access_policies == ()


def test_a_policy_of_a_route_to_a_service_is_asked_by_nobody() -> None:
    ref = {"kind": "HTTPRoute", "group": "gateway.networking.k8s.io", "name": "app"}
    plain = compiled(gateway(), service(), http_route(), policy(ref))
    said = conditions(status(plain, "ModelAccessPolicy", "only").conditions)
    assert said["ResolvedRefs"] == said["Programmed"] == ("False", "NoModelBackend")
    to_server = backend_ref("llama", None, group="attache.dev", kind="ModelServer")
    mixed = compiled(gateway(), service(), server(), http_route("app", backend_ref(), to_server), policy(ref))
    assert conditions(status(mixed, "ModelAccessPolicy", "only").conditions)["ResolvedRefs"][0] == "True"
