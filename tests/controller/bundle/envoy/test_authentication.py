# SPDX-License-Identifier: Apache-2.0
"""Clusters for the key sets that Envoy fetches, patterns of certificates' names in Lua, and the files of filters."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.bundle.envoy.authentication import (
    AUTHENTICATION_FILES,
    authentication_files,
    certificate_lua_pattern,
    unused_authentication_files,
)
from controller.bundle.envoy.bundle import build_bundle
from extproc.api.authentication import Authentication, CertificateTenantPattern
from extproc.api.config_loader import load_snapshot


def bundle(**remote: str) -> dict[str, Any]:
    """The files of a gateway whose tokens' keys are fetched."""
    issuer = {"name": "login", "issuer": "https://login.example", "anyAudience": True, "remoteJwks": remote}
    gateway = {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "GatewayConfig",
        "metadata": {"name": "g"},
        "spec": {"authentication": {"jwt": [issuer]}},
    }
    files = build_bundle(load_snapshot({"g.json": json.dumps(gateway).encode()}), "/etc/attache/envoy")
    return {name: json.loads(text) for name, text in files.items()}


def cluster(uri: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = bundle(uri=uri, caFile="/etc/ca.pem")["cds.json"]["resources"]
    return next(one for one in found if one["name"] == "jwks/login")


@pytest.mark.parametrize(
    ("uri", "kind", "address", "port", "sni", "name"),
    [
        (
            "https://login.example/keys?a=b",
            "STRICT_DNS",
            "login.example",
            443,
            "login.example",
            ("DNS", "login.example"),
        ),
        ("https://login.example:8443", "STRICT_DNS", "login.example", 8443, "login.example", ("DNS", "login.example")),
        ("https://127.0.0.1:9/k", "STATIC", "127.0.0.1", 9, None, ("IP_ADDRESS", "127.0.0.1")),
        ("https://[::1]:9/k", "STATIC", "::1", 9, None, ("IP_ADDRESS", "::1")),
    ],
)
def test_a_key_set_comes_from_its_host_alone(
    uri: str, kind: str, address: str, port: int, sni: str | None, name: tuple[str, str]
) -> None:
    found = cluster(uri)
    assert found["type"] == kind
    ((endpoint,),) = (
        [one["endpoint"] for one in group["lb_endpoints"]] for group in found["load_assignment"]["endpoints"]
    )
    assert endpoint["address"]["socket_address"] == {"address": address, "port_value": port}
    tls = found["transport_socket"]["typed_config"]
    assert tls.get("sni") == sni
    checked = tls["common_tls_context"]["validation_context"]
    assert checked["trusted_ca"] == {"filename": "/etc/ca.pem"}
    assert checked["match_typed_subject_alt_names"] == [{"san_type": name[0], "matcher": {"exact": name[1]}}]


def test_the_set_is_fetched_beside_the_requests() -> None:
    (found,) = bundle(uri="https://login.example/keys", cacheDuration="1m", timeout="2s")["tokens.json"]["resources"]
    provider = found["typed_config"]["providers"]["login"]
    assert "local_jwks" not in provider
    assert provider["remote_jwks"] == {
        "http_uri": {"uri": "https://login.example/keys", "cluster": "jwks/login", "timeout": "2s"},
        "cache_duration": "60s",
        "async_fetch": {"fast_listener": True, "failed_refetch_duration": "2s"},
    }


def test_without_such_issuers_there_are_no_such_clusters() -> None:
    files = build_bundle(load_snapshot({}), "/etc/attache/envoy")
    assert [one["name"] for one in json.loads(files["cds.json"])["resources"]] == ["attache-extproc"]


@pytest.mark.parametrize(
    ("field", "pattern", "expected"),
    [
        ("URI", "spiffe://a.b/{tenant}/{user}", "^spiffe%:%/%/a%.b%/([^/%c%z]+)%/([^/%c%z]+)$"),
        ("DNS", "{user}.{tenant}.Example", "^([^%.%c%z]+)%.([^%.%c%z]+)%.example$"),
        ("CommonName", "100%-{tenant}", "^100%%%-([^/@%c%z]+)$"),
        ("CommonName", "billing", "^billing$"),
    ],
)
def test_all_but_the_names_is_taken_literally(field: str, pattern: str, expected: str) -> None:
    tenant = None if "{tenant}" in pattern else "fixed"
    assert (
        certificate_lua_pattern(CertificateTenantPattern(name="a", field=field, pattern=pattern, tenant=tenant))
        == expected
    )  # type: ignore[arg-type]


def test_the_bundle_has_the_files_of_one_way_to_authenticate() -> None:
    named = CertificateTenantPattern(name="a", field="URI", pattern='x"\\{tenant}')
    authentication = Authentication(client_certificates=(named,))
    files = authentication_files(authentication)
    assert set(files) == {"certificates.json"}
    assert unused_authentication_files(authentication) == set(AUTHENTICATION_FILES) - set(files)
