# SPDX-License-Identifier: Apache-2.0
"""Authentication and access in a directory: what is refused, and what to write instead."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import failure_mode_of

ISSUER: dict[str, Any] = {"name": "login", "issuer": "https://login.example", "audiences": ["attache"]}


def document(kind: str, **spec: object) -> dict[str, Any]:
    return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": "one"}, "spec": spec}


def mistakes(*documents: dict[str, Any]) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.json": json.dumps(documents).encode()})
    return "\n".join(map(str, caught.value.mistakes))


def issuer(**fields: object) -> dict[str, Any]:
    return document("GatewayConfig", authentication={"jwt": [{**ISSUER, **fields}]})


@pytest.mark.parametrize(
    "uri",
    [
        "http://login.example/keys",
        "login.example",
        "https://",
        "https:///keys",
        "https://user@login.example/keys",
        "https://login.example/keys#here",
        "https://login.example:99999/keys",
        "https://login.example:0/keys",
        "https://login.example/ke ys",
        "https://login.example/keys\n",
        "https://-login.example/",
    ],
)
def test_key_sets_are_fetched_over_tls_from_a_host(uri: str) -> None:
    assert "spec.authentication.jwt[0].remoteJwks.uri" in mistakes(issuer(remoteJwks={"uri": uri}))


@pytest.mark.parametrize("uri", ["https://login.example", "https://127.0.0.1:8443/a/b?c=d", "https://[::1]/keys"])
def test_addresses_of_key_sets(uri: str) -> None:
    found = load_snapshot({"a.json": json.dumps(issuer(remoteJwks={"uri": uri})).encode()})
    assert found.gateway.authentication is not None
    assert found.gateway.authentication.jwt[0].remote_jwks is not None


@pytest.mark.parametrize("fields", [{"cacheDuration": "0s"}, {"cacheDuration": "2d"}, {"timeout": "0s"}])
def test_fetches_take_a_time_and_come_again(fields: dict[str, str]) -> None:
    said = mistakes(issuer(remoteJwks={"uri": "https://login.example", **fields}))
    assert f"spec.authentication.jwt[0].remoteJwks.{next(iter(fields))}: Envoy takes no" in said


def test_a_key_set_comes_from_one_place() -> None:
    said = mistakes(issuer(remoteJwks={"uri": "https://login.example"}, jwksFile="keys.json"))
    assert "write one of jwks, jwksFile, jwksSecret and remoteJwks" in said
    assert "write one of jwks, jwksFile, jwksSecret and remoteJwks" in mistakes(issuer())


def test_a_directory_has_no_secrets() -> None:
    assert "apiKeySecrets: is in a Secret, which a directory has none of; write apiKeys" in mistakes(
        document("GatewayConfig", authentication={"apiKeySecrets": [{"name": "keys"}]})
    )
    assert "jwksSecret: is in a Secret, which a directory has none of; write jwksFile" in mistakes(
        issuer(jwksSecret={"name": "keys"})
    )


@pytest.mark.parametrize("model", ["a*b", "**", "*a*", "", "a\nb"])
def test_a_star_stands_at_one_end(model: str) -> None:
    said = mistakes(document("ModelAccessPolicy", rules=[{"models": [model]}]))
    assert "spec.rules[0].models[0]" in said


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            {"kind": "ModelRoute", "name": "lama"},
            "targetRefs[0].name: no ModelRoute is called 'lama' here; did you mean",
        ),
        ({"kind": "ModelServer", "name": "x"}, "no ModelServer is called 'x' here"),
        (
            {"kind": "HTTPRoute", "name": "x", "group": "gateway.networking.k8s.io"},
            "no HTTPRoute is called 'x' here; there is none",
        ),
        (
            {"kind": "Gateway", "name": "x", "group": "gateway.networking.k8s.io"},
            "targetRefs[0].kind: a directory has no Gateways; write GatewayConfig",
        ),
        (
            {"kind": "GatewayConfig", "name": "x", "sectionName": "https"},
            "sectionName: no listener has this name; there is none",
        ),
    ],
)
def test_a_policy_for_what_is_not_there_is_refused(target: dict[str, str], said: str) -> None:
    """It would protect nothing."""
    rules = [{"targetModels": [{"modelServerName": "llama"}]}]
    server = document("ModelServer", model="m", endpoints=[])
    server["metadata"]["name"] = "llama"
    route = document("ModelRoute", modelName="llama", rules=rules)
    route["metadata"]["name"] = "llama"
    assert said in mistakes(server, route, document("ModelAccessPolicy", targetRefs=[target]))


def test_a_policy_and_failure_mode_open_do_not_go_together() -> None:
    policy = document("ModelAccessPolicy")
    assert failure_mode_of(load_snapshot({"a.json": json.dumps(policy).encode()})) == "Close"
    said = mistakes(policy, document("GatewayConfig", failureMode="Open"))
    assert (
        "spec.failureMode: without extproc, requests would get round ModelAccessPolicy default/one; write Close" in said
    )
