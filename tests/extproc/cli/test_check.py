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
LIMITED = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: []}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec:
  modelName: llama
  rules: [{targetModels: [{modelServerName: llama}]}]
  rateLimits: [{unit: hour, requests: 3}]
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  budgets: [{name: team, window: Month, max: {tokens: 5}}]
  authentication:
    apiKeys:
    - name: a
      key: sk-0123456789
      tenant: acme
      rateLimits: [{unit: hour, requests: 3}]
      budgets: [{window: Day, max: {tokens: 5}}]
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


def test_limits_and_budgets_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(LIMITED)
    assert main([str(tmp_path)]) == 0
    assert "1 ModelServer with 0 endpoints, 1 API key, 2 rate limits, 2 budgets\n" in capsys.readouterr().out


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


def test_files_that_cannot_be_read_here_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "here.pem").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.yaml").write_text("""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  listeners:
  - name: web
    address: 0.0.0.0:443
    tls: {certificates: [{certFile: here.pem, keyFile: gone.pem}]}
  authentication:
    apiKeys:
    - {name: web, tenant: a, keyFile: keys/web}
    - {name: other, tenant: a, keyFile: folder}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints: [{address: engine.example:443}]
  connection: {tls: {caFile: here.pem}, apiKeyFile: /no/such/key}
  tokenizer: {path: model}
""")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    gone = "cannot be read here: No such file or directory; without it"
    assert f"listener web: '{tmp_path}/gone.pem' {gone} this is not served" in said
    assert f"ModelServer default/llama: '/no/such/key' {gone} this is not served" in said
    assert f"ModelServer default/llama: '{tmp_path}/model/tokenizer.json' {gone} the index" in said
    assert f"key web: '{tmp_path}/keys/web' {gone} these callers get 401" in said
    assert f"key other: '{tmp_path}/folder' cannot be read here: is not a regular file; without it these" in said
    assert "here.pem" not in said


def test_files_of_issuers_that_cannot_be_read_here_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  authentication:
    jwt:
    - {name: login, issuer: i, jwksFile: set.json, anyAudience: true}
    - {name: remote, issuer: j, remoteJwks: {uri: "https://j/jwks", caFile: ca.pem}, anyAudience: true}
""")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    gone = "cannot be read here: No such file or directory; without it these callers get 401"
    assert f"issuer login: '{tmp_path}/set.json' {gone}" in said
    assert f"issuer remote: '{tmp_path}/ca.pem' {gone}" in said


def test_files_of_an_endpoint_picker_config_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [{address: "127.0.0.1:1"}], pickerConfig: epp.yaml}
""")
    (tmp_path / "epp.yaml").write_text("""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: metrics-data-source, parameters: {scheme: https, insecureSkipVerify: false, caCertPath: ca.pem}}
""")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"epp.yaml: '{tmp_path}/ca.pem' cannot be read here: No such file or directory; without it engines'" in said
    (tmp_path / "ca.pem").write_text("")
    assert main([str(tmp_path)]) == 0
    assert "cannot be read here" not in capsys.readouterr().out


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


def test_listeners_and_keys_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listeners = "listeners: [{name: a, address: 127.0.0.1:1}, {name: b, address: 127.0.0.1:2}]"
    (tmp_path / "a.yaml").write_text(CONFIG.replace("failureMode: Open", listeners))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("1 ModelServer with 0 endpoints, 2 listeners, 1 API key\n")
