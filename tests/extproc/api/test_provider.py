# SPDX-License-Identifier: Apache-2.0
"""Providers in place of engines: what is refused, and what becomes of their names."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from extproc.api.errors import ConfigInvalid
from extproc.api.host_names import with_addresses
from extproc.api.load import load_snapshot
from extproc.api.provider import ANTHROPIC_APIS, PATHS, Provider, ProviderApi
from extproc.protocol import APIS_BY_PATH

KEYED = "connection: {apiKeyFile: a.key}"
IDS: Final[tuple[ProviderApi, ...]] = ("ChatCompletions",)


def documents(provider: str, more: str = "") -> dict[str, bytes]:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: a}}
spec: {{model: m, provider: {{{provider}}}{more and f", {more}"}}}
"""
    return {"a.yaml": text.encode()}


def refusals(provider: str, more: str = "") -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot(documents(provider, more))
    return str(caught.value)


@pytest.mark.parametrize(
    "host",
    [
        "https://api.example.com",
        "api.example.com/v1",
        "api.example.com:443",
        "user@api.example.com",
        "api example.com",
        "api.example.com?",
        "[::1]",
        "1.2.3",
        "",
        "-a.example",
        "a..example",
    ],
)
def test_a_host_is_no_more_than_a_host(host: str) -> None:
    said = refusals(f"host: '{host}', apis: [ChatCompletions]")
    assert "spec.provider.host" in said
    assert "write its name or IP address alone, without scheme, port and path, such as api.example.com" in said


@pytest.mark.parametrize(
    ("provider", "more", "said"),
    [
        ("host: a.b", "", "spec.provider"),
        ("host: a.b, apis: []", "", "spec.provider.apis"),
        ("host: a.b, apis: [Chat]", "", "spec.provider.apis[0]"),
        ("host: a.b, apis: [Messages, Messages]", "", "spec.provider.apis: names an API twice"),
        ("host: a.b, apis: [Messages], port: 0", "", "spec.provider.port"),
        ("host: a.b, apis: [Messages], scheme: ftp", "", "spec.provider.scheme"),
        ("host: a.b, apis: [Messages], pathPrefix: v1", "", "spec.provider.pathPrefix"),
        ("host: a.b, apis: [Messages], pathPrefix: '/v1?a=b'", "", "spec.provider.pathPrefix"),
        ("host: a.b, apis: [Messages], pathPrefix: /api/", "", "spec.provider.pathPrefix: '/api/' ends in a slash"),
        (
            "host: 192.0.2.1, apis: [Messages]",
            "",
            "spec.provider.host: is an address, and nothing names its certificate; write connection.tls.serverName",
        ),
        ("host: a.b, apis: [Messages], scheme: http", KEYED, "spec.provider.scheme: http would show the key"),
        ("host: 192.0.2.1, apis: [Messages], scheme: http", KEYED, "spec.provider.scheme: http would show the key"),
        (
            "host: a.b, apis: [Messages], scheme: http",
            "connection: {tls: {caFile: a}}",
            "spec.connection.tls: has no effect",
        ),
        (
            "host: a.b, apis: [Messages]",
            "connection: {tls: {serverName: a.b}}",
            "spec.connection.tls: write caFile, or insecureSkipVerify",
        ),
        ("host: a.b, apis: [Messages]", "connection: {apiKeyFile: a, apiKeyEnv: A}", "spec.connection: write apiKeyF"),
        ("host: a.b, apis: [Messages]", "endpoints: []", "spec: write endpoints, provider or, in a cluster,"),
        ("host: a.b, apis: [Messages]", "workloadSelector: {matchLabels: {a: b}}", "spec: write endpoints, provider"),
        ("host: a.b, apis: [Messages]", "protocol: V2", "spec.protocol: providers take the APIs of provider.apis"),
        ("host: a.b, apis: [Messages]", "trafficPolicy: {connectTimeout: 0s}", "spec.trafficPolicy.connectTimeout"),
        ("host: a.b, apis: [Messages]", "flowControl: {sessionHeader: 'a b'}", "spec.flowControl.sessionHeader"),
        *(
            ("host: a.b, apis: [Messages]", f"{field}: {value}", f"spec.{field}: is about engines")
            for field, value in (
                ("pdGroup", "{prefillLabels: {a: p}, decodeLabels: {a: d}}"),
                ("kvEvents", "{}"),
                ("adapterLoading", "{adapters: [{name: a, source: /a}]}"),
                ("activation", "{}"),
                ("metricsPath", "/metrics"),
                ("metricsPort", "9000"),
                ("allowedFields", "[priority]"),
            )
        ),
    ],
)
def test_what_cannot_be_is_named_with_its_place(provider: str, more: str, said: str) -> None:
    assert said in refusals(provider, more)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "'::1'"])
def test_on_this_machine_a_key_needs_no_tls(host: str) -> None:
    found = load_snapshot(documents(f"host: {host}, port: 8000, scheme: http, apis: [Messages]", KEYED))
    assert not found.servers[0].spec.uses_tls


def test_its_name_becomes_addresses_with_the_name_of_its_certificate() -> None:
    snapshot = load_snapshot(documents("host: API.example.com, apis: [Messages]"))
    assert [one.address for one in snapshot.servers[0].spec.endpoints] == ["API.example.com:443"]
    found = with_addresses(snapshot, {"api.example.com": ("192.0.2.1", "2001:db8::1")}).servers[0].spec
    assert [one.address for one in found.endpoints] == ["192.0.2.1:443", "[2001:db8::1]:443"]
    assert {one.server_name for one in found.endpoints} == {"api.example.com"}
    assert with_addresses(snapshot, {}).servers[0].spec.endpoints == ()


def test_nothing_is_read_of_it() -> None:
    assert not load_snapshot(documents("host: a.b, apis: [Messages]")).servers[0].spec.reads_metrics


@pytest.mark.parametrize(
    ("provider", "authority"),
    [
        (Provider(host="a.b", apis=IDS), "a.b"),
        (Provider(host="a.b", apis=IDS, port=8443), "a.b:8443"),
        (Provider(host="a.b", apis=IDS, port=80), "a.b:80"),
        (Provider(host="a.b", apis=IDS, port=80, scheme="http"), "a.b"),
        (Provider(host="::1", apis=IDS), "[::1]"),
        (Provider(host="::1", apis=IDS, port=8443), "[::1]:8443"),
    ],
)
def test_a_usual_port_is_not_in_its_host_header(provider: Provider, authority: str) -> None:
    assert provider.authority == authority


def test_each_api_has_its_path_and_its_owner() -> None:
    assert {name: APIS_BY_PATH[path].spec.errors for name, path in PATHS.items()} == {
        name: "anthropic" if name in ANTHROPIC_APIS else "openai" for name in get_args(ProviderApi)
    }
    assert Provider(host="a.b", apis=("ChatCompletions", "CountTokens")).paths == (
        "/v1/chat/completions",
        "/v1/messages/count_tokens",
    )
