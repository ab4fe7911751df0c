# SPDX-License-Identifier: Apache-2.0
"""Clusters of providers: whose certificates they accept, what they share with those of engines, and hostile texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from controller.bundle.envoy.bundle import build_bundle
from controller.bundle.envoy.clusters import endpoints_file
from controller.bundle.envoy.secrets import Authorities, SystemAuthorities, secret_sources
from extproc.api.load import load_snapshot

if TYPE_CHECKING:
    from extproc.api.snapshot import Snapshot


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
        )
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (PROVIDER % (80, "http", "/a]]\\\\')--"), "attache.provider"),
        ('endpoints: [], pathPrefix: "/a]]\\\\\')--"', "attache.path_prefix"),
    ],
)
def test_no_text_leaves_its_place_in_the_script(spec: str, name: str) -> None:
    text = json.dumps(cluster_of(configured(spec))["typed_extension_protocol_options"])
    assert name in text
    assert "/a]]" not in text
    assert "--" not in text.replace("-- ", "")
