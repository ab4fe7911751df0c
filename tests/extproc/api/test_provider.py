# SPDX-License-Identifier: Apache-2.0
"""Providers in place of engines: what is refused, and what becomes of their names."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import needed_file_descriptors
from extproc.api.dns_resolver import with_resolved_addresses
from extproc.api.model_server import ServedApi
from extproc.api.provider import Provider
from extproc.wire_names import APIS_BY_NAME, APIS_BY_PATH, paths_of_apis

KEYED = "connection: {apiKeyFile: a.key}, apis: [Messages]"


MESSAGES: Final = "apis: [Messages]"


def documents(provider: str, more: str = "") -> dict[str, bytes]:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: a}}
spec: {{model: m, provider: {{{provider}}}{more and f", {more}"}}}
"""
    return {"a.yaml": text.encode()}


def refusals(provider: str, more: str = MESSAGES) -> str:
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
    said = refusals(f"host: '{host}'")
    assert "spec.provider.host" in said
    assert "write its name or IP address alone, without scheme, port and path, such as api.example.com" in said


@pytest.mark.parametrize(
    ("provider", "more", "said"),
    [
        ("host: a.b", "streamUsage: Always", "spec.apis: is missing"),
        ("host: a.b", "apis: []", "spec.apis"),
        ("host: a.b", "apis: [Chat]", "spec.apis[0]"),
        ("host: a.b", "apis: [Messages, Messages]", "spec.apis: names an API twice"),
        ("host: a.b, port: 0", "apis: [Messages]", "spec.provider.port"),
        ("host: a.b, scheme: ftp", "apis: [Messages]", "spec.provider.scheme"),
        ("host: a.b, pathPrefix: v1", "apis: [Messages]", "spec.provider.pathPrefix"),
        ("host: a.b, pathPrefix: '/v1?a=b'", "apis: [Messages]", "spec.provider.pathPrefix"),
        (
            "host: a.b, pathPrefix: /api/",
            "apis: [Messages]",
            "spec.provider.pathPrefix: '/api/' is no beginning of paths",
        ),
        (
            "host: 192.0.2.1",
            "apis: [Messages]",
            "spec.provider.host: is an address, and nothing names its certificate; write connection.tls.serverName",
        ),
        ("host: a.b, scheme: http", KEYED, "spec.provider.scheme: http would show the key"),
        ("host: 192.0.2.1, scheme: http", KEYED, "spec.provider.scheme: http would show the key"),
        ("host: a.b, auth: {type: Header}", KEYED, "spec.provider.auth.header: is needed by type Header"),
        ("host: a.b, auth: {type: Bearer, header: api-key}", KEYED, "spec.provider.auth.header: is needed by type"),
        ("host: a.b, auth: {type: Basic}", KEYED, "spec.provider.auth.type"),
        ("host: a.b, auth: {type: Header, header: 'a b'}", KEYED, "spec.provider.auth.header: 'a b' is no name of"),
        (
            "host: a.b, auth: {type: Header, header: Authorization}",
            KEYED,
            "spec.provider.auth.header: has a key of type Bearer",
        ),
        *(
            (f"host: a.b, auth: {{type: Header, header: {name}}}", KEYED, "has another meaning in each request")
            for name in ("Host", "content-length", "Transfer-Encoding", "te", "user-agent")
        ),
        ("host: a.b, auth: {type: AWS}", KEYED, "spec.provider.auth.region: is needed by type AWS"),
        ("host: a.b, auth: {type: Bearer, region: a}", KEYED, "spec.provider.auth.region: is needed by type AWS"),
        ("host: a.b, auth: {type: Bearer, service: a}", KEYED, "spec.provider.auth.service: is that of type AWS"),
        ("host: a.b, auth: {type: AWS, region: US_EAST}", KEYED, "spec.provider.auth.region: 'US_EAST' is no name of"),
        (
            "host: a.b, auth: {type: AWS, region: us-east-1}",
            "connection: {apiKeyEnv: A}, apis: [Messages]",
            "spec.connection.apiKeyEnv: holds no credentials file of AWS",
        ),
        ("host: a.b, auth: {type: Bearer}", "apis: [Messages]", "spec.provider.auth: has no effect without a key"),
        ("host: a.b, paths: {Chat: /chat}", "apis: [Messages]", "spec.provider.paths: 'Chat' is none of apis"),
        ("host: a.b, paths: {ChatCompletions: /a}", "apis: [Messages]", "'ChatCompletions' is none of apis"),
        *(
            (f"host: a.b, paths: {{Messages: '{path}'}}", "apis: [Messages]", f"'{path}' is no path; write one that")
            for path in ("messages", "/a b", "/a#b", "/a?b=c d", "")
        ),
        (
            "host: a.b, scheme: http",
            "connection: {tls: {caFile: a}}, apis: [Messages]",
            "spec.connection.tls: has no effect",
        ),
        (
            "host: a.b",
            "connection: {tls: {serverName: a.b}}, apis: [Messages]",
            "spec.connection.tls: write caFile, or insecureSkipVerify",
        ),
        ("host: a.b", "connection: {apiKeyFile: a, apiKeyEnv: A}, apis: [Messages]", "spec.connection: write apiKeyF"),
        ("host: a.b", "endpoints: [], apis: [Messages]", "spec: write endpoints, provider or, in a cluster,"),
        ("host: a.b", "workloadSelector: {matchLabels: {a: b}}, apis: [Messages]", "spec: write endpoints, provider"),
        ("host: a.b", "pathPrefix: /a, apis: [Messages]", "spec.pathPrefix: is that of engines; write provider.pathP"),
        ("host: a.b", "protocol: V2, apis: [Messages]", "spec.protocol: providers take the APIs of apis"),
        ("host: a.b", "trafficPolicy: {connectTimeout: 0s}, apis: [Messages]", "spec.trafficPolicy.connectTimeout"),
        ("host: a.b", "flowControl: {sessionHeader: 'a b'}, apis: [Messages]", "spec.flowControl.sessionHeader"),
        *(
            ("host: a.b", f"{field}: {value}, apis: [Messages]", f"spec.{field}: is about engines")
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
    found = load_snapshot(documents(f"host: {host}, port: 8000, scheme: http", KEYED))
    assert not found.servers[0].spec.uses_tls


def test_its_name_becomes_addresses_with_the_name_of_its_certificate() -> None:
    snapshot = load_snapshot(documents("host: API.example.com", MESSAGES))
    assert [one.address for one in snapshot.servers[0].spec.endpoints] == ["API.example.com:443"]
    found = with_resolved_addresses(snapshot, {"api.example.com": ("192.0.2.1", "2001:db8::1")}).servers[0].spec
    assert [one.address for one in found.endpoints] == ["192.0.2.1:443", "[2001:db8::1]:443"]
    assert {one.server_name for one in found.endpoints} == {"api.example.com"}
    assert with_resolved_addresses(snapshot, {}).servers[0].spec.endpoints == ()


@pytest.mark.parametrize(
    ("provider", "more", "interval_s"),
    [
        ("host: a.b", "", 0.0),
        ("host: a.b, reportsLoad: true", "", 1.0),
        ("host: a.b, reportsLoad: true", ", scrapeInterval: 50ms", 1.0),
        ("host: a.b, reportsLoad: true", ", scrapeInterval: 5s", 5.0),
        ("host: a.b, reportsLoad: true", ", scrapeInterval: 0s", 0.0),
    ],
)
def test_nothing_is_read_of_it_but_the_load_that_it_reports(provider: str, more: str, interval_s: float) -> None:
    snapshot = load_snapshot(documents(provider, MESSAGES + more))
    assert snapshot.servers[0].spec.report_interval_s == interval_s
    assert needed_file_descriptors(snapshot) == (1 if interval_s else 0)


@pytest.mark.parametrize(
    ("provider", "authority"),
    [
        (Provider(host="a.b"), "a.b"),
        (Provider(host="a.b", port=8443), "a.b:8443"),
        (Provider(host="a.b", port=80), "a.b:80"),
        (Provider(host="a.b", port=80, scheme="http"), "a.b"),
        (Provider(host="::1"), "[::1]"),
        (Provider(host="::1", port=8443), "[::1]:8443"),
    ],
)
def test_a_usual_port_is_not_in_its_host_header(provider: Provider, authority: str) -> None:
    assert provider.authority == authority


def test_each_api_that_bodies_name_can_be_written() -> None:
    assert set(get_args(ServedApi)) == set(APIS_BY_NAME) == {one.spec.name for one in APIS_BY_PATH.values()}
    assert paths_of_apis(("ChatCompletions", "CountTokens")) == ("/v1/chat/completions", "/v1/messages/count_tokens")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("translation: Lenient", "spec.translation: has no effect without apis"),
        ("translation: Strict, apis: [Embeddings]", "spec.translation: has no effect: apis has none of ChatCompl"),
        (
            "translation: Strict, apis: [Messages, ChatCompletions, Responses]",
            "spec.translation: has no effect: apis has all of ChatCompletions, Responses, Messages",
        ),
        ("translation: true, apis: [Messages]", "spec.translation"),
        ("protocol: V2, apis: [Messages]", "spec.apis: are those of protocol OpenAI, and this one is V2"),
    ],
)
def test_a_translation_without_effect_is_refused(spec: str, said: str) -> None:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: a}}
spec: {{model: m, endpoints: [], {spec}}}
"""
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": text.encode()})
    assert said in str(caught.value)
