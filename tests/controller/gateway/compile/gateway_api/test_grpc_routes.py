# SPDX-License-Identifier: Apache-2.0
"""GRPCRoutes: what their backends come to, and which of them or of HTTPRoutes a listener takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.inference_pools import SETTINGS
from tests.controller.gateway.compile.gateway_api.outcomes import (
    ONE_ADDRESS,
    attached,
    backends,
    compiled,
    conditions,
    feed,
    listeners_of,
    route_says,
    served,
    snapshot,
    status,
)
from tests.gateway_objects import (
    GROUP,
    LONG_AGO,
    Object,
    backend_ref,
    endpoint_slice,
    gateway,
    gateway_class,
    grant,
    grpc_route,
    http_route,
    https,
    listener,
    pool,
    service,
    tls_secret,
)
from tests.kube_objects import resource, server

if TYPE_CHECKING:
    from controller.gateway.compile.compiler import CompileResult

GOOD = {one: ("True", one) for one in ("Accepted", "ResolvedRefs", "Programmed")}
LOST = {
    "Accepted": ("False", "HostnameConflict"),
    "ResolvedRefs": ("True", "ResolvedRefs"),
    "Programmed": ("False", "Invalid"),
}
ATTACHE = {"group": "attache.dev", "kind": "ModelServer"}
POOL = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
NEWER = "2026-02-01T00:00:00Z"
APP = service(), endpoint_slice("app", "10.1.0.1")


def calls_say(outcome: CompileResult, name: str = "app", namespace: str = "default") -> dict[str, tuple[str, str]]:
    return route_says(outcome, name, namespace, kind="GRPCRoute")


def test_a_route_is_served_with_its_matches_filters_and_weights() -> None:
    match = {"method": {"type": "Exact", "service": "a.B", "method": "C"}, "headers": [{"name": "x", "value": "1"}]}
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": backend_ref("copies")}}
    rule = {"matches": [match], "filters": [mirror], "backendRefs": [backend_ref(weight=3), backend_ref("gone")]}
    things = *APP, service("copies", appProtocol="kubernetes.io/h2c")
    outcome = compiled(gateway(), *things, grpc_route(rules=[rule], hostnames=["a.example.org"]))
    assert calls_say(outcome) == {**GOOD, "ResolvedRefs": ("False", "BackendNotFound")}
    (found,) = snapshot(outcome).grpc_routes
    (made,) = found.spec.rules
    assert made.matches[0].method is not None
    assert (made.matches[0].method.service, made.matches[0].method.method) == ("a.B", "C")
    assert [(one.name, one.weight) for one in made.backend_refs] == [("grpc.app.8080", 3), ("unresolved", 1)]
    assert found.spec.hostnames == ("a.example.org",)
    assert attached(outcome) == {"http": 1}
    assert set(backends(outcome)) == {"default/grpc.app.8080", "default/grpc.copies.8080", "default/unresolved"}
    assert {one.spec.protocol for one in snapshot(outcome).backends if one.spec.endpoints} == {"H2C"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, ""),
        ("kubernetes.io/h2c", ""),
        ("grpc", ""),
        ("http", "UnsupportedProtocol"),
        ("kubernetes.io/ws", "UnsupportedProtocol"),
        ("https", "UnsupportedProtocol"),
    ],
)
def test_services_are_called_over_http_2_unless_they_have_something_else(said: str | None, reason: str) -> None:
    fields = {} if said is None else {"appProtocol": said}
    outcome = compiled(gateway(), service(**fields), grpc_route())
    assert calls_say(outcome)["ResolvedRefs"] == (("False", reason) if reason else ("True", "ResolvedRefs"))


def test_one_port_serves_both_kinds_of_routes_each_by_its_protocol() -> None:
    both = http_route("app", hostnames=["a.org"]), grpc_route("app", hostnames=["b.org"])
    outcome = compiled(gateway(), *APP, *both)
    assert route_says(outcome) == calls_say(outcome) == GOOD
    assert {one.metadata.name: one.spec.protocol for one in snapshot(outcome).backends} == {
        "service.app.8080": "HTTP",
        "grpc.app.8080": "H2C",
    }
    assert set(served(outcome)) == {"default/app", "grpc:default/app"}
    changed = feed(Compiler(None, ONE_ADDRESS), [gateway_class(), gateway(), *APP, *both])
    changed.compile()
    again = feed(changed, [endpoint_slice("app", "10.1.0.2")]).compile()
    assert set(map(tuple, backends(again).values())) == {("10.1.0.2:3000",)}


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [("V2-gRPC", "ResolvedRefs"), ("TensorFlow-gRPC", "ResolvedRefs"), ("V2", "UnsupportedProtocol"), (None, "")],
)
def test_servers_and_pools_must_be_called_by_grpc(protocol: str | None, reason: str) -> None:
    fields = {} if protocol is None else {"protocol": protocol}
    pooled = pool()
    if protocol is not None:
        pooled["metadata"]["annotations"] = {SETTINGS: f"protocol: {protocol}"}
    things = gateway(), server("forest", **fields), pooled, service("picker")
    for reference in (backend_ref("forest", None, **ATTACHE), backend_ref("llama", None, **POOL)):
        outcome = compiled(*things, grpc_route("app", reference))
        assert calls_say(outcome)["ResolvedRefs"][1] == (reason or "UnsupportedProtocol")


def test_a_server_that_is_called_otherwise_from_now_on_is_resolved_again() -> None:
    route = grpc_route("app", backend_ref("forest", None, **ATTACHE))
    compiler = feed(Compiler(None, ONE_ADDRESS), [gateway_class(), gateway(), server("forest", protocol="V2"), route])
    assert calls_say(compiler.compile())["ResolvedRefs"] == ("False", "UnsupportedProtocol")
    assert calls_say(feed(compiler, [server("forest", protocol="V2-gRPC")]).compile()) == GOOD


def test_a_backend_of_another_namespace_needs_a_grant_for_this_kind() -> None:
    things = gateway(), service(namespace="blue"), grpc_route("app", backend_ref(namespace="blue"))
    wrong = grant(("default", GROUP, "HTTPRoute"), ("", "Service"), namespace="blue")
    assert calls_say(compiled(*things, wrong))["ResolvedRefs"] == ("False", "RefNotPermitted")
    assert calls_say(compiled(*things, grant(("default", GROUP, "GRPCRoute"), ("", "Service"), namespace="blue"))) == (
        GOOD
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"filters": [{"type": "URLRewrite", "urlRewrite": {"hostname": "a.org"}}]}, "is no filter of GRPCRoutes"),
        ({"filters": [{"type": "ExtensionRef", "extensionRef": {"name": "x"}}]}, "ExtensionRef"),
        ({"matches": [{"method": {"type": "RegularExpression", "service": "("}}]}, "not a regular expression"),
        ({"matches": [{"method": {"type": "Exact", "service": "a/b"}}]}, "is no service"),
        ({"timeouts": {"request": "1s"}}, "timeouts"),
    ],
)
def test_what_cannot_be_served_is_not_accepted(rule: Any, said: str) -> None:  # noqa: ANN401 - of any shape
    outcome = compiled(gateway(), *APP, grpc_route(rules=[{**rule, "backendRefs": [backend_ref()]}]))
    assert calls_say(outcome)["Accepted"] == ("False", "UnsupportedValue")
    assert served(outcome) == {}
    (parents,) = status(outcome, "GRPCRoute", "app").lists
    assert said in parents.entries[0].conditions[0].message


def test_listeners_of_both_protocols_take_it_if_they_allow_its_kind() -> None:
    kinds = {"kinds": [{"group": GROUP, "kind": "GRPCRoute"}]}
    alone = listener("alone", 81, allowedRoutes=kinds)
    no_calls = listener("no-calls", 82, allowedRoutes={"kinds": [{"group": GROUP, "kind": "HTTPRoute"}]})
    outcome = compiled(gateway("web", https("https", 443, "cert"), alone, no_calls), tls_secret(), *APP, grpc_route())
    assert served(outcome) == {"grpc:default/app": ["default/web/alone", "default/web/https"]}
    said = {name: [one["kind"] for one in of.fields["supportedKinds"]] for name, of in listeners_of(outcome).items()}
    assert said == {
        "https": ["HTTPRoute", "GRPCRoute", "ModelRoute"],
        "alone": ["GRPCRoute"],
        "no-calls": ["HTTPRoute"],
    }


@pytest.mark.parametrize("calls_are_older", [True, False])
def test_of_two_routes_with_hosts_in_common_the_older_is_accepted(calls_are_older: bool) -> None:
    of_http, of_calls = (NEWER, LONG_AGO) if calls_are_older else (LONG_AGO, NEWER)
    http = http_route("web", hostnames=["a.example.org"], created=of_http)
    calls = grpc_route("calls", hostnames=["*.example.org"], created=of_calls)
    outcome = compiled(gateway(), *APP, http, calls)
    found = route_says(outcome, "web"), calls_say(outcome, "calls")
    assert found == ((LOST, GOOD) if calls_are_older else (GOOD, LOST))
    assert list(served(outcome)) == ["grpc:default/calls" if calls_are_older else "default/web"]
    assert attached(outcome) == {"http": 1}
    kind, name, winner = ("HTTPRoute", "web", "calls") if calls_are_older else ("GRPCRoute", "calls", "web")
    (parents,) = status(outcome, kind, name).lists
    assert f"Route default/{winner} has hosts in common" in parents.entries[0].conditions[0].message


def test_what_loses_one_listener_keeps_the_others() -> None:
    web = gateway("web", listener("one", hostname="a.org"), listener("two", hostname="b.org"))
    http = http_route("web", hostnames=["a.org"])
    outcome = compiled(web, *APP, http, grpc_route("calls", created=NEWER))
    assert served(outcome) == {"default/web": ["default/web/one"], "grpc:default/calls": ["default/web/two"]}
    assert calls_say(outcome, "calls") == GOOD
    assert attached(outcome) == {"one": 1, "two": 1}


def test_the_loser_is_accepted_once_the_winner_has_gone_or_has_other_hosts() -> None:
    calls = grpc_route("calls", created=NEWER)
    compiler = feed(Compiler(None, ONE_ADDRESS), [gateway_class(), gateway(), *APP, http_route("web"), calls])
    assert calls_say(compiler.compile(), "calls") == LOST
    feed(compiler, [http_route("web", hostnames=["a.org"])])
    assert calls_say(compiler.compile(), "calls") == LOST
    compiler.update_object("HTTPRoute", "default/web", None)
    assert calls_say(compiler.compile(), "calls") == GOOD


def test_hosts_in_common_count_only_where_a_listener_has_them() -> None:
    http, calls = http_route("web", hostnames=["a.org", "x.net"]), grpc_route("calls", hostnames=["b.org", "x.net"])
    narrow = gateway("web", listener(hostname="*.org"))
    compiler = feed(Compiler(None, ONE_ADDRESS), [gateway_class(), narrow, *APP, http, calls])
    assert (route_says(compiler.compile(), "web"), calls_say(compiler.compile(), "calls")) == (GOOD, GOOD)
    # both are attached to the same listeners as before
    outcome = feed(compiler, [gateway("web", listener())]).compile()
    assert (route_says(outcome, "web"), calls_say(outcome, "calls")) == (LOST, GOOD)


def test_a_route_that_is_not_served_takes_no_hosts_from_others() -> None:
    broken = http_route("web", rules=[{"filters": [{"type": "ExtensionRef"}]}])
    outcome = compiled(gateway(), *APP, broken, grpc_route("calls", created=NEWER))
    assert calls_say(outcome, "calls") == GOOD


def test_routes_of_one_kind_and_models_share_hosts() -> None:
    outcome = compiled(gateway(), *APP, grpc_route("one"), grpc_route("two", created=NEWER), server("llama"))
    assert set(served(outcome)) == {"grpc:default/one", "grpc:default/two"}


def test_a_policy_of_a_route_protects_its_servers_and_is_asked_by_no_service() -> None:
    ref = {"kind": "GRPCRoute", "group": GROUP, "name": "app"}
    policy: Object = resource("ModelAccessPolicy", "only", {"targetRefs": [ref], "rules": []})
    plain = compiled(gateway(), *APP, grpc_route(), http_route("app", hostnames=["a.org"], created=NEWER), policy)
    said = conditions(status(plain, "ModelAccessPolicy", "only").conditions)
    assert said["ResolvedRefs"] == said["Programmed"] == ("False", "NoModelBackend")
    forest = server("forest", protocol="V2-gRPC")
    outcome = compiled(gateway(), forest, grpc_route("app", backend_ref("forest", None, **ATTACHE)), policy)
    (found,) = snapshot(outcome).access_policies
    assert [(one.kind, one.name) for one in found.spec.target_refs] == [("GRPCRoute", "app")]
