# SPDX-License-Identifier: Apache-2.0
"""Clusters of providers: whose certificates they accept, what they share with those of engines, and hostile texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.bundle.envoy.bundle import build_bundle
from controller.bundle.envoy.clusters import endpoints_file
from controller.bundle.envoy.secrets import Authorities, SystemAuthorities, secret_sources
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot


def configured(spec: str) -> Snapshot:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: a}}
spec: {{model: m, {spec}}}
"""
    return load_snapshot({"a.yaml": text.encode()})


def cluster_of(snapshot: Snapshot) -> dict[str, Any]:
    clusters = json.loads(build_bundle(snapshot, "/x")["cds.json"])["resources"]
    (found,) = (one for one in clusters if one["name"] == "server/default/a")
    return found


PROVIDER = 'apis: [Messages], provider: {host: 192.0.2.1, port: %d, scheme: %s, pathPrefix: "%s"}'
HTTPS = PROVIDER % (443, "https", "")
NAMED = "serverName: a.b, caFile: ca.pem"


def test_without_an_authority_of_its_own_the_machines_are_trusted() -> None:
    snapshot = configured("provider: {host: a.example}, apis: [Messages]")
    assert secret_sources(snapshot) == (SystemAuthorities(),)
    assert Authorities("ca.pem") in secret_sources(configured(f"{HTTPS}, connection: {{tls: {{{NAMED}}}}}"))
    insecure = configured(f"{HTTPS}, connection: {{tls: {{serverName: a.b, insecureSkipVerify: true}}}}")
    assert secret_sources(insecure) == ()


@pytest.mark.parametrize(
    ("tls", "secret"), [(NAMED, Authorities("ca.pem").name), ("serverName: a.b, insecureSkipVerify: true", "")]
)
def test_certificates_are_checked_unless_that_is_given_up(tls: str, secret: str) -> None:
    context = cluster_of(configured(f"{HTTPS}, connection: {{tls: {{{tls}}}}}"))["transport_socket"]["typed_config"]
    checked = context["common_tls_context"].get("validation_context_sds_secret_config", {})
    assert checked.get("name", "") == secret
    assert context["auto_host_sni"]
    assert context.get("auto_sni_san_validation", False) == bool(secret)


def test_endpoints_of_a_provider_are_in_no_file_of_engines() -> None:
    """Clusters and endpoints do not change at one moment: none must be reached as the other is."""
    found = {
        endpoints_file(configured(spec).servers[0])
        for spec in (
            "endpoints: []",
            PROVIDER % (80, "http", ""),
            PROVIDER % (80, "http", "/v9"),
            PROVIDER % (81, "http", ""),
            "apis: [Messages], provider: {host: a.b}",
            "apis: [Messages], provider: {host: a.b, auth: {type: AWS, region: us-east-1}}",
            "apis: [Messages], provider: {host: a.b, auth: {type: AWS, region: us-east-2}}",
            "apis: [Messages], provider: {host: a.b, paths: {Messages: /messages}}",
        )
    }
    assert len(found) == 8


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (PROVIDER % (80, "http", "/a]]\\\\')--"), "attache.provider"),
        ('apis: [Messages], provider: {host: localhost, paths: {Messages: "/a]]\\\\\')--?x=--"}}', "attache.provider"),
        ('endpoints: [], pathPrefix: "/a]]\\\\\')--"', "attache.path_prefix"),
    ],
)
def test_no_text_leaves_its_place_in_the_script(spec: str, name: str) -> None:
    text = json.dumps(cluster_of(configured(spec))["typed_extension_protocol_options"])
    assert name in text
    assert "/a]]" not in text
    assert "--" not in text.replace("-- ", "")


def filters_of(snapshot: Snapshot) -> list[str]:
    (options,) = cluster_of(snapshot)["typed_extension_protocol_options"].values()
    return [one["name"] for one in options["http_filters"]]


def test_what_is_signed_is_changed_no_more() -> None:
    """Nothing but what reads answers stands behind the signature, and no key is written."""
    signed = "provider: {host: localhost, auth: {type: AWS, region: us-east-1}}, apis: [Messages]"
    expected = [
        "attache.provider",
        "attache.trailers",
        "envoy.filters.http.aws_request_signing",
        "attache.reserved",
        "envoy.filters.http.upstream_codec",
    ]
    for connection in ("{}", "{apiKeyFile: aws}"):
        assert filters_of(configured(f"{signed}, connection: {connection}")) == expected


def test_only_a_server_with_tls_can_choose_http2() -> None:
    found = [
        cluster_of(configured(PROVIDER % (443, scheme, "") + named))["typed_extension_protocol_options"]
        for scheme, named in (("http", ""), ("https", f", connection: {{tls: {{{NAMED}}}}}"))
    ]
    plain, secure = (next(iter(one.values())) for one in found)
    assert "auto_config" not in plain
    assert "http_protocol_options" in plain["explicit_http_config"]
    assert {"http_protocol_options", "http2_protocol_options"} == secure["auto_config"].keys()
