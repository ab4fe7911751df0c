# SPDX-License-Identifier: Apache-2.0
"""Connections to engines, and their addresses: what is refused, and what is written instead."""

from __future__ import annotations

import re

import pytest

from extproc.api.addresses import HostPort, parse_endpoint
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot


def refusals(spec: str) -> str:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: a}}
spec: {{model: m, {spec}}}
"""
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": text.encode()})
    return str(caught.value)


ONE = 'endpoints: [{address: "10.0.0.1:8000"}]'


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            f"{ONE}, connection: {{apiKeyFile: a, apiKeyEnv: A}}",
            "spec.connection: write apiKeyFile or apiKeyEnv, not both",
        ),
        (
            f"{ONE}, connection: {{tls: {{serverName: a.b}}}}",
            "spec.connection.tls: write caFile, or insecureSkipVerify",
        ),
        (
            f"{ONE}, connection: {{tls: {{serverName: a.b, caFile: a, insecureSkipVerify: true}}}}",
            "spec.connection.tls: write caFile, or insecureSkipVerify",
        ),
        (f"{ONE}, connection: {{tls: {{caFile: a}}}}", "spec.endpoints[0]: nothing says which name the engines'"),
        (
            f"{ONE}, connection: {{tls: {{caFile: a, serverName: 'a b'}}}}",
            "spec.connection.tls.serverName: 'a b' is no host name",
        ),
        (
            f"{ONE}, connection: {{apiKeyRef: {{name: keys}}}}",
            "spec.connection.apiKeyRef: is in an object of a cluster, which a directory has none of; write apiKeyFile",
        ),
        (
            f"{ONE}, connection: {{tls: {{serverName: a.b, caCertificateRef: {{name: ca}}}}}}",
            "spec.connection.tls.caCertificateRef: is in an object of a cluster, which a directory has none of; write "
            "caFile",
        ),
        (
            f"{ONE}, connection: {{tls: {{insecureSkipVerify: true, clientCertificateRef: {{name: a}}}}}}",
            "spec.connection.tls.clientCertificateRef: is in an object of a cluster, which a directory has none of; "
            "write clientCertificate",
        ),
        (
            f"{ONE}, connection: {{tls: {{serverName: a.b, caFile: a, caCertificateRef: {{name: ca}}}}}}",
            "spec.connection.tls: write caFile, or insecureSkipVerify",
        ),
        (
            f"{ONE}, connection: {{apiKeyRef: {{name: keys, key: a/b}}}}",
            "spec.connection.apiKeyRef.key: 'a/b' is no key of a Secret's or ConfigMap's data",
        ),
        (
            "workloadSelector: {matchLabels: {a: b}}, workloadPort: {port: 80}, connection: {tls: {caFile: a}}",
            "spec.connection.tls: nothing says which name the engines' certificates have; write serverName",
        ),
    ],
)
def test_connections_that_could_not_be_checked_are_refused(spec: str, said: str) -> None:
    assert said in refusals(spec)


@pytest.mark.parametrize(
    "connection",
    [
        f"{ONE}, connection: {{tls: {{caFile: a, serverName: engines.example}}}}",
        f"{ONE}, connection: {{tls: {{insecureSkipVerify: true}}}}",
        'endpoints: [{address: "10.0.0.1:8000", serverName: a.b}], connection: {tls: {caFile: a}}',
        'endpoints: [{address: "a.b:8000"}], connection: {tls: {caFile: a}, apiKeyEnv: A}',
    ],
)
def test_connections_that_can_be_checked_are_taken(connection: str) -> None:
    text = (
        f"apiVersion: attache.dev/v1alpha1\nkind: ModelServer\nmetadata: {{name: a}}\nspec: {{model: m, {connection}}}"
    )
    assert load_snapshot({"a.yaml": text.encode()}).servers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:80", HostPort("10.0.0.1", 80, is_ip=True)),
        ("[::1]:80", HostPort("::1", 80, is_ip=True)),
        ("Engine-0.example.com:8000", HostPort("engine-0.example.com", 8000, is_ip=False)),
        ("localhost:1", HostPort("localhost", 1, is_ip=False)),
    ],
)
def test_engines_are_addresses_or_names(text: str, expected: HostPort) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("10.0.0.300:80", "write IP:PORT or NAME:PORT"),
        ("-a:80", "write IP:PORT or NAME:PORT"),
        ("a..b:80", "write IP:PORT or NAME:PORT"),
        (":80", "write IP:PORT or NAME:PORT"),
        ("1.2:3", "write IP:PORT or NAME:PORT"),
        ("engine", "it has no port: write engine:8000"),
        ("engine:0", "'0' is not a port"),
        ("engine:x", "'x' is not a port"),
        ("::1:80", "write an IPv6 address in brackets"),
    ],
)
def test_what_is_neither_is_refused(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not an address; {advice}"):
        parse_endpoint(text)
