# SPDX-License-Identifier: Apache-2.0
"""What ``check`` says of a directory that is valid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.cli.check import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], flowControl: {timeout: 59m, noEndpointTimeout: 1h}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, loraAdapters: [sql], rules: [{targetModels: [{modelServerName: llama}]}]}
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  failureMode: Open
  authentication: {apiKeys: [{name: a, key: sk-0123456789, tenant: acme}]}
"""
RESTRICTED = """
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  tenants: [{name: acme, models: [lama, sql, "s*", "x*"]}]
  authentication: {apiKeys: [{name: a, key: sk-0123456789, tenant: acme, models: [llama, sq]}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelAccessPolicy
metadata: {name: p}
spec: {rules: [{models: [lamma, llama, "*"], baseModels: [sql]}]}
"""


def test_what_is_valid_and_has_no_effect_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(CONFIG)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert (
        "note: ModelServer default/llama: flowControl holds requests for up to 3600 s, and Envoy waits an hour" in said
    )
    assert "note: ModelServer default/llama: cacheIsolation Tenant has no effect while extproc is down" in said
    assert said.count("note:") == 2
    assert "sk-0123456789" not in said


def test_waits_that_are_longer_together_than_envoy_waits_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], activation: {holdTimeout: 59m}, flowControl: {timeout: 2m}}
"""
    (tmp_path / "a.yaml").write_text(server)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "note: ModelServer default/llama: flowControl and activation hold requests for up to 3660 s" in said


def test_models_that_no_route_serves_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(
        CONFIG.replace("flowControl: {timeout: 59m, noEndpointTimeout: 1h}", "")
        .partition("kind: GatewayConfig")[0]
        .rpartition("---")[0]
    )
    (tmp_path / "b.yaml").write_text(RESTRICTED)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "note: no ModelRoute serves 'lama' of the tenant 'acme'; did you mean 'llama'?" in said
    assert "note: no ModelRoute serves 'x*' of the tenant 'acme'; write one of: llama, sql" in said
    assert "note: no ModelRoute serves 'sq' of the key 'a'; did you mean 'sql'?" in said
    assert "note: no ModelRoute serves 'lamma' of the ModelAccessPolicy 'default/p'; did you mean 'llama'?" in said
    assert said.count("note:") == 4
    assert "1 ModelAccessPolicy" in said
    assert "sk-0123456789" not in said


def test_files_of_certificates_that_are_not_here_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here.pem").write_text("")
    (tmp_path / "a.yaml").write_text("""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  listeners:
  - name: web
    address: 0.0.0.0:443
    tls: {certificates: [{certFile: here.pem, keyFile: gone.pem}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [{address: engine.example:443}]
  connection: {tls: {caFile: here.pem}, apiKeyFile: /no/such/key}
""")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"listener web: there is no file '{tmp_path}/gone.pem' here" in said
    assert "ModelServer default/llama: there is no file '/no/such/key' here" in said
    assert "here.pem' here" not in said


ROUTED = """
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {name: a}
spec: {endpoints: ["127.0.0.1:80"]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: lost}
spec:
  hostnames: [b.test]
  rules: [{backendRefs: [{group: attache.dev, kind: Backend, name: a}]}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: found}
spec:
  hostnames: [one.a.test, b.test]
  rules: [{backendRefs: [{group: attache.dev, kind: Backend, name: a}]}]
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec: {listeners: [{name: a, address: "127.0.0.1:8080", hostname: "*.a.test"}]}
"""


def test_routes_that_no_listener_takes_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(ROUTED)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "note: HTTPRoute default/lost: no listener that it is attached to takes its hostnames (b.test);" in said
    assert said.count("note:") == 1
    assert "2 HTTPRoutes, 1 Backend" in said


def test_an_adapter_that_nobody_can_ask_for_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [{address: "127.0.0.1:1"}]
  adapterLoading: {adapters: [{name: sql, source: /adapters/sql}, {name: law, source: /adapters/law}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {loraAdapters: [sql], rules: [{targetModels: [{modelServerName: llama}]}]}
""")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no ModelRoute sends requests for the adapter 'law' there; add it to loraAdapters of one" in said
    assert "'sql'" not in said
