# SPDX-License-Identifier: Apache-2.0
"""What Secrets hold, in the directory: digests of keys, key sets, and nobody let in by what is missing."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from controller.gateway.compile.gateway_config import (
    CompiledAuthentication,
    SecretContent,
    referenced_secrets,
    resolve_gateway_config,
)
from extproc.api.authentication import Authentication
from extproc.api.config_loader import load_snapshot
from extproc.api.quantities import decode_quantity

KEY_SET = json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]})
ISSUER = {"name": "login", "issuer": "https://login.example", "audiences": ["us"], "jwksSecret": {"name": "login"}}


WHEN = "2026-11-23T12:00:00Z"


def resolved(given: dict[str, Any], **secrets: SecretContent) -> CompiledAuthentication:
    """Of a GatewayConfig in the namespace ``team``; what comes out is always something that a directory may hold."""
    decoded = msgspec.convert(given, Authentication)
    found = resolve_gateway_config(
        given, decoded, "team", {f"team/{name}": content for name, content in secrets.items()}
    )
    config = {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {"name": "g"}}
    load_snapshot({"g.json": json.dumps({**config, "spec": {"authentication": found.authentication}}).encode()})
    return found


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def test_each_key_of_a_secret_is_a_client_and_only_its_digest_is_handed_on() -> None:
    content = SecretContent({"web": b"sk-0123456789\n", "batch": b"sk-another-key"}, {"attache.dev/tenant": "acme"})
    own: dict[str, Any] = {"models": ["llama"], "reports": "Tenant"}
    found = resolved({"apiKeySecrets": [{"name": "keys", **own}]}, keys=content)
    assert found.authentication["apiKeys"] == [
        {"name": "batch", "tenant": "acme", "keySHA256": digest("sk-another-key"), **own},
        {"name": "web", "tenant": "acme", "keySHA256": digest("sk-0123456789"), **own},
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


def key_store(**fields: object) -> SecretContent:
    key = {"id": "0" * 12, "name": "web", "tenant": "acme", "keySHA256": digest("sk-web"), "createdAt": WHEN}
    spec = {"keys": [{**key, **fields}], "cacheSecret": "c" * 32}
    store = {"apiVersion": "attache.dev/v1alpha1", "kind": "KeyStore", "metadata": {"name": "keys"}, "spec": spec}
    return SecretContent({"keys.json": json.dumps(store).encode()})


def test_virtual_keys_of_a_secret_are_keys_with_all_that_they_have() -> None:
    previous = {"keySHA256": digest("sk-old"), "until": WHEN}
    limits = {"models": ["llama"], "rateLimits": [{"requests": 1}], "budgets": [{"window": "Day", "max": {"money": 2}}]}
    found = resolved({"virtualKeys": {"secret": "keys"}}, keys=key_store(previous=previous, **limits))
    now, before = msgspec.convert(found.authentication, Authentication, dec_hook=decode_quantity).api_keys
    assert (now.digest, before.digest) == (digest("sk-web"), digest("sk-old"))
    assert (now.name, now.id, before.name, before.id) == ("web", "0" * 12, "web", "0" * 12)
    assert (now.models, len(now.rate_limits), len(now.budgets), now.expires_at) == (("llama",), 1, 1, None)
    assert before.expires_at is not None
    assert (found.cache_secret, found.problems) == ("c" * 32, ())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"kind": "KeyStore"}'])
def test_a_store_that_cannot_be_read_lets_nobody_in(content: bytes) -> None:
    found = resolved({"virtualKeys": {"secret": "keys"}}, keys=SecretContent({"keys.json": content}))
    assert [key["name"] for key in found.authentication["apiKeys"]] == ["none"]
    assert found.problems == ("Secret keys: 'keys.json' is no KeyStore; all virtual keys are refused",)


def test_virtual_keys_stand_behind_those_of_the_object() -> None:
    own = {"name": "web", "tenant": "bell", "key": "sk-12345678"}
    found = resolved({"apiKeys": [own], "virtualKeys": {"secret": "keys"}}, keys=key_store())
    assert [key["tenant"] for key in found.authentication["apiKeys"]] == ["bell"]
    assert found.problems == ("virtual key 'web': another client has its name or its key",)
    assert resolved({"virtualKeys": {"secret": "keys"}}).problems == ()
    assert resolved({"virtualKeys": {}}).problems == ("virtualKeys names no Secret; write secret, the name of one",)


def test_what_is_pointed_to() -> None:
    given = {"apiKeySecrets": [{"name": "keys"}]}
    assert referenced_secrets(msgspec.convert(given, Authentication), "team") == {"team/keys"}
    assert referenced_secrets(msgspec.convert({"jwt": [ISSUER]}, Authentication), "team") == {"team/login"}
    assert referenced_secrets(msgspec.convert({"virtualKeys": {"secret": "keys"}}, Authentication), "team") == {
        "team/keys"
    }
    assert not referenced_secrets(None, "team")
