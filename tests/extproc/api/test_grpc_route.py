# SPDX-License-Identifier: Apache-2.0
"""GRPCRoutes of a directory: every mistake is found, and calls are matched by their path."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from extproc.api.grpc_route import GRPCRouteMatch, GRPCRouteSpec, check_grpc_route, effective_matches
from extproc.api.http_route import PathMatch, ValueMatch
from extproc.api.quantities import decode_quantity
from tests.extproc.api.test_http_route import mistakes_of, read

ROUTE = """
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: calls}
spec:
  rules:
    - backendRefs:
        - {group: attache.dev, kind: Backend, name: files}
"""
FOREST = """
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: forest}
spec: {model: forest-2, protocol: V2-gRPC, endpoints: [{address: "127.0.0.1:8081"}]}
---
"""


def findings_of_rule(**rule: object) -> list[tuple[str, str]]:
    spec = msgspec.convert({"rules": [rule]}, GRPCRouteSpec, dec_hook=decode_quantity)
    return [(".".join(map(str, path[3:])), message) for path, message in check_grpc_route(spec)]


def test_it_leads_to_backends_and_to_servers_that_are_called_by_grpc() -> None:
    to_forest = ROUTE + "        - {group: attache.dev, kind: ModelServer, name: forest}\n"
    (route,) = read(FOREST + to_forest).grpc_routes
    assert [one.name for one in route.spec.rules[0].backend_refs] == ["files", "forest"]
    assert (route.reference, route.metadata.key) == ("grpc:default/calls", "default/calls")
    (mistake,) = mistakes_of(FOREST + to_forest.replace("forest}\n", "llama}\n"))
    assert "backendRefs[1].name: the ModelServer 'llama' is not called by gRPC; name one with protocol V2-gRPC" in (
        mistake
    )
    (gone,) = mistakes_of(ROUTE.replace("files", "zzz"))
    assert "no Backend is called 'zzz'" in gone


def test_one_name_may_be_of_a_route_of_each_kind() -> None:
    both = ROUTE + "---" + ROUTE.replace("GRPCRoute", "HTTPRoute")
    assert len(read(both).gateway_api_routes) == 2


@pytest.mark.parametrize(
    ("method", "path"),
    [
        (None, PathMatch(type="PathPrefix", value="/")),
        ({"service": "a.B", "method": "C"}, PathMatch(type="Exact", value="/a.B/C")),
        ({"service": "a.B"}, PathMatch(type="PathPrefix", value="/a.B")),
    ],
)
def test_a_call_is_a_path(method: Any, path: PathMatch) -> None:  # noqa: ANN401 - of any shape
    match = msgspec.convert({"method": method, "headers": [{"name": "x", "value": "1"}]}, GRPCRouteMatch)
    assert match.as_http.path == path
    assert match.as_http.headers == (ValueMatch(name="x", value="1"),)


@pytest.mark.parametrize(
    ("method", "taken", "others"),
    [
        ({"method": "C"}, ["/a.B/C", "/b/C"], ["/C", "/a.B/CC", "/a/b/C", "/a.B/C/d"]),
        (
            {"type": "RegularExpression", "service": "a|b", "method": "C|D"},
            ["/a/C", "/b/D"],
            ["/a", "/C", "/b/DD", "/aa/C"],
        ),
        ({"type": "RegularExpression", "service": "a.*"}, ["/a.B/C"], ["/a.B", "/a.B/", "/b/C"]),
        ({"type": "RegularExpression", "method": "Get.*"}, ["/x/GetIt"], ["/x/DoIt", "/GetIt"]),
    ],
)
def test_what_is_no_whole_path_is_an_expression(method: Any, taken: list[str], others: list[str]) -> None:  # noqa: ANN401 - likewise
    path = msgspec.convert({"method": method}, GRPCRouteMatch).as_http.path
    assert path.type == "RegularExpression"
    assert [one for one in (*taken, *others) if re.fullmatch(path.value, one)] == taken


def test_a_rule_without_matches_takes_every_call() -> None:
    (rule,) = GRPCRouteSpec().rules
    (match,) = effective_matches(rule)
    assert match.path == PathMatch()


@pytest.mark.parametrize(
    ("method", "where", "said"),
    [
        ({}, "method", "neither service nor method"),
        ({"service": "", "method": ""}, "method", "neither service nor method"),
        ({"service": "a/B"}, "method.service", "'a/B' is no service; write one such as inference.GRPC"),
        ({"service": "a..B"}, "method.service", "is no service"),
        ({"service": "a.B", "method": "c.d"}, "method.method", "'c.d' is no method; write one such as ModelInfer"),
        ({"service": "ä"}, "method.service", "is no service"),
        ({"type": "RegularExpression", "service": "a)|(b"}, "method.service", "not a regular expression"),
        ({"type": "RegularExpression", "method": "(?=a)"}, "method.method", "not a regular expression"),
        ({"type": "RegularExpression", "service": "a{600}", "method": "b{600}"}, "method", "instructions"),
    ],
)
def test_a_match_that_no_call_can_meet_is_refused(method: Any, where: str, said: str) -> None:  # noqa: ANN401 - likewise
    ((path, message),) = findings_of_rule(matches=[{"method": method}])
    assert path == f"matches.0.{where}"
    assert said in message


def test_headers_are_checked_as_those_of_http_routes() -> None:
    ((path, message),) = findings_of_rule(matches=[{"headers": [{"name": "a b", "value": "x"}]}])
    assert path == "matches.0.headers.0.name"
    assert "is no name of a header" in message


@pytest.mark.parametrize("kind", ["URLRewrite", "RequestRedirect", "CORS"])
def test_filters_that_grpc_routes_lack_are_refused(kind: str) -> None:
    field = {"URLRewrite": "urlRewrite", "RequestRedirect": "requestRedirect", "CORS": "cors"}[kind]
    found = findings_of_rule(filters=[{"type": kind, field: {}}])
    assert ("filters.0.type", f"{kind} is no filter of GRPCRoutes") in found
    modifier = {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x"]}}
    assert findings_of_rule(filters=[modifier], backendRefs=[{"name": "a", "filters": [modifier]}]) == []
    assert findings_of_rule(filters=[modifier, modifier]) == [
        ("filters.1.type", "a second RequestHeaderModifier; put both into one")
    ]
