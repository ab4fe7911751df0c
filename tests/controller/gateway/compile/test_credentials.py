# SPDX-License-Identifier: Apache-2.0
"""What Secrets hold, in the directory: digests of keys, key sets, and nobody let in by what is missing."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from controller.gateway.compile.gateway_config import Credentials, SecretContent, resolve, secrets_of
from extproc.api.authentication import Authentication
from extproc.api.load import load

KEY_SET = json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]})
ISSUER = {"name": "login", "issuer": "https://login.example", "audiences": ["us"], "jwksSecret": {"name": "login"}}


def resolved(given: dict[str, Any], **secrets: SecretContent) -> Credentials:
    """Of a GatewayConfig in the namespace ``team``; what comes out is always something that a directory may hold."""
    decoded = msgspec.convert(given, Authentication)
    found = resolve(given, decoded, "team", {f"team/{name}": content for name, content in secrets.items()})
    config = {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {"name": "g"}}
    load({"g.json": json.dumps({**config, "spec": {"authentication": found.authentication}}).encode()})
    return found


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def test_each_key_of_a_secret_is_a_client_and_only_its_digest_is_handed_on() -> None:
    content = SecretContent({"web": b"sk-0123456789\n", "batch": b"sk-another-key"}, {"attache.dev/tenant": "acme"})
    found = resolved({"apiKeySecrets": [{"name": "keys", "models": ["llama"]}]}, keys=content)
    assert found.authentication["apiKeys"] == [
        {"name": "batch", "tenant": "acme", "keySHA256": digest("sk-another-key"), "models": ["llama"]},
        {"name": "web", "tenant": "acme", "keySHA256": digest("sk-0123456789"), "models": ["llama"]},
    ]
    assert "sk-" not in str(found)


@pytest.mark.parametrize(
    ("ref", "annotations", "tenant", "user"),
    [
        ({}, {}, "web", None),
        ({}, {"attache.dev/tenant": "acme", "attache.dev/user": "alice"}, "acme", "alice"),
        ({"tenant": "bell", "user": "bob"}, {"attache.dev/tenant": "acme", "attache.dev/user": "alice"}, "bell", "bob"),
    ],
)
def test_whose_keys_they_are(ref: dict[str, str], annotations: dict[str, str], tenant: str, user: str | None) -> None:
    content = SecretContent({"web": b"sk-0123456789"}, annotations)
    (key,) = resolved({"apiKeySecrets": [{"name": "keys", **ref}]}, keys=content).authentication["apiKeys"]
    assert (key["tenant"], key.get("user")) == (tenant, user)


def test_keys_of_the_object_itself_stay_and_become_digests() -> None:
    given = {
        "apiKeys": [
            {"name": "own", "tenant": "a", "key": "sk-own-012345"},
            {"name": "f", "tenant": "a", "keyFile": "/k"},
        ],
        "apiKeySecrets": [{"name": "keys"}],
    }
    found = resolved(given, keys=SecretContent({"web": b"sk-0123456789"}))
    own, file, web = found.authentication["apiKeys"]
    assert own == {"name": "own", "tenant": "a", "keySHA256": digest("sk-own-012345")}
    assert (file["keyFile"], web["name"]) == ("/k", "web")
    assert "sk-own" not in str(found.authentication)


def test_a_secret_that_is_missing_lets_nobody_in() -> None:
    found = resolved({"apiKeySecrets": [{"name": "keys"}]})
    assert found.authentication["apiKeys"] == [{"name": "none", "tenant": "none", "keySHA256": "0" * 64}]
    assert found.problems == ("there is no Secret keys; its keys are refused",)


@pytest.mark.parametrize(
    ("name", "value"), [("Web", b"sk-0123456789"), ("web", b"short"), ("web", b"\xff" * 12), ("web", b"two words 123")]
)
def test_what_is_no_key_is_left_out_and_never_repeated(name: str, value: bytes) -> None:
    found = resolved({"apiKeySecrets": [{"name": "keys"}]}, keys=SecretContent({name: value, "good": b"sk-0123456789"}))
    assert [one["name"] for one in found.authentication["apiKeys"]] == ["good"]
    (problem,) = found.problems
    assert f"Secret keys: '{name}' is not used" in problem
    assert value.decode(errors="replace") not in problem


def test_of_two_clients_alike_the_first_counts() -> None:
    given = {"apiKeySecrets": [{"name": "one"}, {"name": "two"}]}
    one = SecretContent({"web": b"sk-0123456789"})
    two = SecretContent({"web": b"sk-other-6789", "copy": b"sk-0123456789", "new": b"sk-new-456789"})
    found = resolved(given, one=one, two=two)
    assert [key["name"] for key in found.authentication["apiKeys"]] == ["web", "new"]
    assert len(found.problems) == 2


def test_a_key_set_of_a_secret_takes_its_place() -> None:
    found = resolved({"jwt": [ISSUER]}, login=SecretContent({"jwks": KEY_SET.encode()}))
    (issuer,) = found.authentication["jwt"]
    assert (issuer["jwks"], "jwksSecret" in issuer) == (KEY_SET, False)
    assert not found.problems


@pytest.mark.parametrize("secrets", [{}, {"login": SecretContent({"jwks": b"{}"})}, {"login": SecretContent({})}])
def test_an_issuer_without_a_key_set_lets_nobody_in(secrets: dict[str, SecretContent]) -> None:
    alone = resolved({"jwt": [ISSUER]}, **secrets)
    assert [key["name"] for key in alone.authentication["apiKeys"]] == ["none"]
    assert "tokens of the issuer 'login' are refused" in alone.problems[0]
    other = {**{key: value for key, value in ISSUER.items() if key != "jwksSecret"}, "name": "b", "jwks": KEY_SET}
    both = resolved({"jwt": [ISSUER, other]}, **secrets)
    assert [one["name"] for one in both.authentication["jwt"]] == ["b"]


def test_what_is_pointed_to() -> None:
    given = {"apiKeySecrets": [{"name": "keys"}]}
    assert secrets_of(msgspec.convert(given, Authentication), "team") == {"team/keys"}
    assert secrets_of(msgspec.convert({"jwt": [ISSUER]}, Authentication), "team") == {"team/login"}
    assert not secrets_of(None, "team")
