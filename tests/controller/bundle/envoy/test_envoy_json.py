# SPDX-License-Identifier: Apache-2.0
"""Messages as plain data: what the library's own conversion writes, in a tenth of its time."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from envoy_data_plane.envoy.config.core.v3 import (
    BindConfig,
    DataSource,
    Metadata,
    SocketOption,
    SocketOptionSocketState,
)
from envoy_data_plane.envoy.config.route.v3 import (
    RedirectAction,
    RedirectActionRedirectResponseCode,
    RouteAction,
    RouteMatch,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.type.v3 import Int64Range, Percent
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.google.protobuf import Duration, ListValue, NullValue, Struct, Value
from pydantic import ValidationError

from controller.bundle.envoy import envoy_json
from controller.bundle.envoy.bundle import build_bundle
from controller.bundle.envoy.envoy_json import PROTO_NAMES, PackedMessage, to_plain, typed_extension
from extproc.api.config_loader import load_directory, load_snapshot

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

SOURCES = sorted((Path(__file__).parents[4] / "envoy" / "sources").iterdir())
# what the sources lack: TLS on both sides, tokens, mutual TLS, CORS, listeners, mirrors, retries, WebSockets
EVERYTHING = """
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  extproc: 127.0.0.1:9002
  extprocWorkers: 2
  failureMode: MODE
  servedHeader: x-served-by
  cors: {allowOrigins: ["https://a.example.com", "https://*.example.org"], maxAge: 3600}
  listeners:
    - {name: plain, address: 0.0.0.0:8080PLAIN_TLS}
    - name: tls
      address: 0.0.0.0:8443
      hostname: "*.example.com"
      tls: {certificates: [{certFile: /a.crt, keyFile: /a.key}], clientCertificates: {caFile: /ca.crt}}
  cacheSecret: 0123456789abcdef
CREDENTIALS
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: one}
spec:
  model: org/one
  endpoints: [{address: "10.0.0.1:8000"}]
  connection: {tls: {caFile: /ca.crt, serverName: engine}, apiKeyFile: /key}
  trafficPolicy: {timeout: 90s, retry: {attempts: 0}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: two}
spec: {model: org/two, endpoints: []}
---
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {name: socket}
spec: {endpoints: ["10.0.0.3:80"], protocol: WebSocket}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql, law]
  rules:
    - modelMatch: {headers: {x-a: {regex: "a.*"}}, uri: {regex: "/v1/.*"}}
      targetModels: [{modelServerName: one}]
    - targetModels: [{modelServerName: one, weight: 3}, {modelServerName: two, weight: 1}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: all}
spec:
  hostnames: [a.example.com]
  rules:
    - matches:
        - method: GET
          path: {type: RegularExpression, value: "/a.*"}
          headers: [{name: x, type: RegularExpression, value: "a.*"}]
          queryParams: [{name: q, value: "1"}]
      timeouts: {request: 1500ms, backendRequest: 1s}
      retry: {codes: [503], attempts: 2, backoff: 100ms}
      filters:
        - {type: CORS, cors: {allowOrigins: ["https://b.example.com"], maxAge: 60}}
        - type: RequestMirror
          requestMirror: {backendRef: {group: attache.dev, kind: Backend, name: socket}, percent: 10}
      backendRefs:
        - {group: attache.dev, kind: ModelServer, name: one}
        - {group: attache.dev, kind: Backend, name: socket}
    - matches: [{path: {type: Exact, value: /b}}]
      backendRefs: []
    - matches: [{path: {type: PathPrefix, value: /c}}]
      filters:
        - {type: RequestRedirect, requestRedirect: {scheme: https, port: 8443, statusCode: 308}}
    - matches: [{path: {type: PathPrefix, value: /d}}]
      filters:
        - {type: URLRewrite, urlRewrite: {hostname: d.example.net, path: {type: ReplaceFullPath, replaceFullPath: /e}}}
        - {type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: a, value: b}], remove: [c]}}
      backendRefs: [{group: attache.dev, kind: Backend, name: socket}]
"""

TOKENS = """
  authentication:
    jwt:
      - {name: login, issuer: me, anyAudience: true, remoteJwks: {uri: "https://id.example.com/keys"}}
"""
CERTIFICATES = """
  authentication:
    clientCertificates: [{name: people, field: CommonName, pattern: "{user}@bell", tenant: bell}]
"""


def by_the_library(message: Any) -> Any:  # noqa: ANN401 - any message, any JSON value
    return message.to_dict(casing=PROTO_NAMES)


def is_the_librarys(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> bool:
    ours = build_bundle(snapshot, "/x")
    monkeypatch.setattr(envoy_json, "message_json", by_the_library)
    return ours == build_bundle(snapshot, "/x")


@pytest.mark.parametrize("source", SOURCES, ids=lambda one: one.name)
def test_bundles_are_those_of_the_librarys_conversion(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_the_librarys(load_directory(source), monkeypatch)


@pytest.mark.parametrize("credentials", [TOKENS, CERTIFICATES, ""], ids=["tokens", "certificates", "anybody"])
def test_so_is_a_bundle_with_all_that_a_gateway_can_have(credentials: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EVERYTHING.replace("CREDENTIALS", credentials)
    # who is known by a certificate must have shown one
    tls = ", tls: {certificates: [{certFile: /a.crt, keyFile: /a.key}], clientCertificates: {caFile: /ca.crt}}"
    text = text.replace("PLAIN_TLS", tls if credentials == CERTIFICATES else "")
    # who may is not known without extproc
    mode = "Open" if not credentials else "Close"
    snapshot = load_snapshot({"all.yaml": text.replace("MODE", mode).encode()})
    assert is_the_librarys(snapshot, monkeypatch)


@pytest.mark.parametrize(
    "message",
    [
        RouteMatch(),
        RouteMatch(prefix=""),
        RouteAction(timeout=timedelta(0), hash_policy=[]),
        RedirectAction(
            response_code=RedirectActionRedirectResponseCode.SEE_OTHER, port_redirect=0, https_redirect=False
        ),
        Percent(value=float("inf")),
        Percent(value=float("-inf")),
        Percent(value=0.1),
        Int64Range(start=-(2**60), end=0),
        DataSource(inline_bytes=b"\x00\xff"),
        BindConfig(freebind=False, socket_options=[SocketOption(state=SocketOptionSocketState.STATE_BOUND)]),
        typed_extension("router", Router(suppress_envoy_headers=True)),
        PackedMessage(typed_extension("nested", Router())),
        PackedMessage(Duration(seconds=1, nanos=5_000_000)),
        Metadata(
            filter_metadata={
                "a": Struct(fields={"b": Value(list_value=ListValue(values=[Value(number_value=1.5)]))}),
                "c": Struct(fields={"d": Value(null_value=NullValue.NULL_VALUE), "e": Value(bool_value=False)}),
            },
            typed_filter_metadata={"f": PackedMessage(Router())},
        ),
    ],
)
def test_each_kind_of_field_is_written_as_the_library_writes_it(message: Any) -> None:  # noqa: ANN401 - any message
    assert to_plain(message) == by_the_library(message)


def test_a_packed_message_is_packed_for_readers_of_bytes() -> None:
    packed = PackedMessage(Router(suppress_envoy_headers=True))
    assert AnyMessage.parse(bytes(packed)).unpack() == packed.unpack() == packed.message


def test_a_field_of_the_wrong_type_is_refused_even_if_it_was_set_later() -> None:
    match = RouteMatch(prefix="/")
    match.headers = "not a list"  # type: ignore[assignment]  # the mistake
    with pytest.raises(ValidationError):
        to_plain(match)
