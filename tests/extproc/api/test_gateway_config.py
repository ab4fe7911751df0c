# SPDX-License-Identifier: Apache-2.0
"""GatewayConfig: listeners, and whether Envoy and extproc reach each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from extproc.api.addresses import worker_addresses
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.document_decoder import decode
from extproc.api.gateway_config import GatewayConfigSpec, UsageLog, why_extproc_unreachable
from extproc.api.yaml_documents import split_documents
from extproc.cli.check import main

if TYPE_CHECKING:
    from pathlib import Path

TLS = "tls: {certificates: [{certFile: /tls/tls.crt, keyFile: /tls/tls.key}]}"


def refusals(listeners: str, more: str = "") -> str:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: gateway}}
spec:
  listeners:
{listeners}
{more}"""
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"gateway.yaml": text.encode()})
    return str(caught.value)


@pytest.mark.parametrize(
    ("listeners", "said"),
    [
        (
            "  - {name: a, address: 0.0.0.0:80}\n  - {name: a, address: 0.0.0.0:81}",
            "gateway.yaml:7: spec.listeners[1].name: 'a' is there already; give each listener a name of its own",
        ),
        (
            "  - {name: a, address: 0.0.0.0:80}\n  - {name: b, address: 0.0.0.0:80}",
            "gateway.yaml:7: spec.listeners[1]: has the address and the host name of 'a'; change one of them",
        ),
        (
            f"  - {{name: a, address: '[::1]:443', hostname: A.example, {TLS}}}\n"
            f"  - {{name: b, address: '[0:0::1]:443', hostname: a.example, {TLS}}}",
            "gateway.yaml:7: spec.listeners[1]: has the address and the host name of 'a'; change one of them",
        ),
        (
            f"  - {{name: a, address: 0.0.0.0:80}}\n  - {{name: b, address: 0.0.0.0:80, {TLS}}}",
            "gateway.yaml:7: spec.listeners[1].address: is that of 'a', and only one of them has tls",
        ),
        (
            "  - {name: a, address: example.com}",
            "gateway.yaml:6: spec.listeners[0].address: 'example.com' is not an address",
        ),
        (
            "  - {name: a, address: 0.0.0.0:80, hostname: 'a.*.example'}",
            "gateway.yaml:6: spec.listeners[0].hostname: 'a.*.example' is no host name; write a name such as",
        ),
        (
            "  - {name: A/b, address: 0.0.0.0:80}",
            "gateway.yaml:6: spec.listeners[0].name: 'A/b' is no name of a listener",
        ),
        ("  - {name: a, address: 0.0.0.0:80, tls: {certificates: []}}", "spec.listeners[0].tls.certificates"),
    ],
)
def test_listeners_that_cannot_be_told_apart_or_reached_are_refused(listeners: str, said: str) -> None:
    assert said in refusals(listeners)


def test_callers_known_by_certificate_need_listeners_that_ask_for_one() -> None:
    names = "clientCertificates: [{name: spiffe, field: URI, pattern: 'spiffe://a/{tenant}'}]"
    said = refusals(f"  - {{name: a, address: 0.0.0.0:443, {TLS}}}", f"  authentication: {{{names}}}")
    assert "spec.listeners[0]: asks for no client certificate, by which callers are identified" in said
    said = refusals("    []", f"  authentication: {{{names}}}")
    assert "spec.listen: asks for no client certificate" in said


def test_where_gateways_bring_the_listeners_a_config_need_not_have_any() -> None:
    names = "clientCertificates: [{name: spiffe, field: URI, pattern: 'spiffe://a/{tenant}'}]"
    head = "{apiVersion: attache.dev/v1alpha1, kind: GatewayConfig, metadata: {name: a}, spec: {authentication: {"
    (document,) = split_documents("gateway.yaml", f"{head}{names}}}}}}}")
    assert decode(document, listeners_may_come=True)[1] == []
    assert len(decode(document)[1]) == 1
    plain = "listeners: [{name: a, address: '0.0.0.0:80'}], authentication"
    (document,) = split_documents("gateway.yaml", f"{head.replace('authentication', plain)}{names}}}}}}}")
    assert len(decode(document, listeners_may_come=True)[1]) == 1


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("pattern: 'spiffe://a/{team}/{tenant}'", "may have {tenant} and {user}, each once"),
        ("pattern: '{tenant}/{tenant}'", "may have {tenant} and {user}, each once"),
        ("pattern: '{tenant}/}'", "may have {tenant} and {user}, each once"),
        ("pattern: '{tenant}{user}'", "does not say where {tenant} ends and {user} begins"),
        ("pattern: a", "write {tenant} in the pattern or tenant, one of the two"),
        ("pattern: '{tenant}', tenant: a", "write {tenant} in the pattern or tenant, one of the two"),
    ],
)
def test_patterns_of_certificates_say_who_the_tenant_is(named: str, said: str) -> None:
    authentication = f"  authentication: {{clientCertificates: [{{name: a, field: URI, {named}}}]}}"
    assert said in refusals("    []", authentication)


def test_origins_that_no_browser_sends_are_refused() -> None:
    assert "spec.cors.allowOrigins[0]: 'app.example.com' is no origin" in refusals(
        "    []", "  cors: {allowOrigins: [app.example.com]}"
    )


@pytest.mark.parametrize(
    ("called", "listens"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9002"),
        ("127.0.0.1:9002", "0.0.0.0:9002"),
        ("127.0.0.1:9002", "[::]:9002"),
        ("10.1.2.3:9002", "0.0.0.0:9002"),
        ("[::1]:9002", "[::]:9002"),
        ("0.0.0.0:9002", "127.0.0.1:9002"),
        ("unix:/run/attache.sock", "unix:/run/attache.sock"),
        ("unix:/run/attache.sock", "unix:/run/../run//attache.sock"),
    ],
)
def test_these_two_meet(called: str, listens: str) -> None:
    assert why_extproc_unreachable(GatewayConfigSpec(extproc=called), [listens]) == ""


@pytest.mark.parametrize(
    ("called", "listens"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9012"),
        ("127.0.0.1:9002", "10.1.2.3:9002"),
        ("10.1.2.3:9002", "127.0.0.1:9002"),
        ("[::1]:9002", "0.0.0.0:9002"),
        ("[::1]:9002", "127.0.0.1:9002"),
        ("unix:/run/attache.sock", "unix:/run/other.sock"),
        ("unix:/run/attache.sock", "127.0.0.1:9002"),
        ("127.0.0.1:9002", "unix:/run/attache.sock"),
    ],
)
def test_these_two_miss_each_other_and_both_are_named(called: str, listens: str) -> None:
    said = why_extproc_unreachable(GatewayConfigSpec(extproc=called), [listens])
    assert f"call {called}, and extproc listens on {listens}" in said
    assert "attache serve makes them agree when it starts" in said


def test_as_many_workers_must_listen_as_are_called() -> None:
    gateway = GatewayConfigSpec(extproc="127.0.0.1:9002", extproc_workers=4)
    assert why_extproc_unreachable(gateway, worker_addresses("0.0.0.0:9002", 4)) == ""
    for workers in (1, 3, 5):
        said = why_extproc_unreachable(gateway, worker_addresses("0.0.0.0:9002", workers))
        assert "127.0.0.1:9002 to 127.0.0.1:9005" in said
        assert "extprocWorkers" in said


def test_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {extproc:"
        " '127.0.0.1:9002'}\n"
    )
    assert main([str(tmp_path), "--listen", "0.0.0.0:9002"]) == 0
    assert main([str(tmp_path), "--listen", "127.0.0.1:9012"]) == 2
    assert "call 127.0.0.1:9002, and extproc listens on 127.0.0.1:9012" in capsys.readouterr().err
    assert main([str(tmp_path), "--listen", "127.0.0.1:9002", "--workers", "2"]) == 2
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--listen", "nowhere"])


def logging_to(file: str) -> bytes:
    head = "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\n"
    return f"{head}spec: {{usageLog: {{path: {file}}}}}\n".encode()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("usage.log", "depends on where Envoy was started"),
        ("/var/lib/attache/", "is a directory; write a file in it, such as /var/lib/attache/usage.log"),
        ("/dev/stdout", "is no file that can be read again"),
        ("/var/../dev/null", "is no file that can be read again"),
    ],
)
def test_a_usage_log_is_a_file_that_can_be_read_and_rotated(file: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        load_snapshot({"gateway.yaml": logging_to(file)})


def test_a_usage_log_with_an_absolute_path_is_accepted() -> None:
    gateway = load_snapshot({"gateway.yaml": logging_to("/var/lib/attache/usage.log")}).gateway
    assert gateway.usage_log == UsageLog(path="/var/lib/attache/usage.log")


def test_costs_are_not_told_where_cached_tokens_are_hidden() -> None:
    shown = logging_to("/u.log, costHeader: true")
    assert load_snapshot({"gateway.yaml": shown}).gateway.usage_log == UsageLog(path="/u.log", cost_header=True)
    with pytest.raises(ConfigInvalid, match="tells how much was cached, which cachedTokens: Hidden hides"):
        load_snapshot({"gateway.yaml": shown.replace(b"spec: {", b"spec: {cachedTokens: Hidden, ")})


@pytest.mark.parametrize(
    ("tracing", "said"),
    [
        (
            "{endpoint: 'http://c:4317'}",
            "spec.tracing.endpoint: 'http://c:4317' is a URL; write host:port",
        ),
        ("{endpoint: collector}", "spec.tracing.endpoint: 'collector' is not an address"),
        ("{endpoint: 'c:4317', samplingPercent: 101}", "spec.tracing.samplingPercent"),
        ("{endpoint: 'c:4317', samplingPercent: -1}", "spec.tracing.samplingPercent"),
        ("{endpoint: 'c:4317', protocol: udp}", "spec.tracing.protocol"),
        ("{endpoint: 'c:4317', resource: {service.name: x}}", "has a field of its own; write serviceName"),
    ],
)
def test_mistakes_in_tracing_are_refused(tracing: str, said: str) -> None:
    assert said in refusals("  - {name: a, address: 0.0.0.0:80}", f"  tracing: {tracing}")


def test_check_notes_that_the_collectors_authorities_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(
        "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\n"
        "spec: {tracing: {endpoint: 'collector:4317', tls: {caFile: missing.pem}}}\n"
    )
    assert main([str(tmp_path)]) == 0
    assert "tracing: " in (shown := "".join(capsys.readouterr()))
    assert "no spans are sent" in shown


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("steps: nowhere", "spec.steps: 'nowhere'"),
        ("steps: 127.0.0.1:8080", "spec.steps: is the address of another listener"),
        ("steps: 127.0.0.1:9901", "spec.steps: is the address of another listener"),
        (
            "steps: 0.0.0.0:80\n  listeners: [{name: a, address: '0.0.0.0:80'}]",
            "spec.listeners[0].address: is that of steps",
        ),
    ],
)
def test_steps_have_an_address_of_their_own(spec: str, said: str) -> None:
    text = f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec:\n  {spec}\n"
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"gateway.yaml": text.encode()})
    assert said in str(caught.value)


def test_check_says_that_steps_have_no_listener(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "apiVersion: attache.dev/v1alpha1\nkind: "
    (tmp_path / "all.yaml").write_text(
        f"{head}ModelServer\nmetadata: {{name: s}}\nspec: {{model: m, endpoints: [{{address: '10.0.0.1:80'}}]}}\n---\n"
        f"{head}ModelRoute\nmetadata: {{name: r}}\nspec:\n"
        "  {modelName: m, callers: Steps, rules: [{targetModels: [{modelServerName: s}]}]}\n"
    )
    assert main([str(tmp_path)]) == 0
    assert "ModelRoute default/r: callers: Steps has no effect" in capsys.readouterr().out
