# SPDX-License-Identifier: Apache-2.0
"""HTTPRoutes: to which listeners they attach, what their backends come to, and what they say of both."""

from __future__ import annotations

from typing import Any

import pytest

from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.gateway_api.listeners import hostnames_intersect
from extproc.api.http_route import HTTPRouteRetry
from extproc.api.quantities import Duration
from tests.controller.gateway.compile.gateway_api.outcomes import (
    addresses,
    attached,
    backends,
    compiled,
    conditions,
    feed,
    parents,
    route_says,
    served,
    snapshot,
    status,
    targets,
)
from tests.gateway_objects import (
    Object,
    backend_ref,
    endpoint_slice,
    gateway,
    gateway_class,
    grant,
    http_route,
    listener,
    namespace,
    pool,
    service,
)
from tests.kube_objects import pod, route, server

RESOLVED = {"Accepted": ("True", "Accepted"), "ResolvedRefs": ("True", "ResolvedRefs")}
GOOD = {**RESOLVED, "Programmed": ("True", "Programmed")}
APP = service(), endpoint_slice("app", "10.1.0.1")
ATTACHE = {"group": "attache.dev", "kind": "ModelServer"}
POOL = {"group": "inference.networking.k8s.io", "kind": "InferencePool"}


def test_a_route_to_a_service_goes_to_its_ready_endpoints() -> None:
    found = endpoint_slice("app", "10.1.0.2", "10.1.0.1")
    outcome = compiled(gateway(), service(), found, http_route(hostnames=["a.example.org"]))
    assert route_says(outcome) == GOOD
    assert served(outcome) == {"default/app": ["default/web/http"]}
    assert backends(outcome) == {"default/service.app.8080": ["10.1.0.1:3000", "10.1.0.2:3000"]}
    assert targets(outcome) == [("Backend", "default/service.app.8080", 1)]
    assert attached(outcome) == {"http": 1}
    (document,) = snapshot(outcome).http_routes
    assert document.spec.hostnames == ("a.example.org",)
    assert document.metadata.creation_timestamp is not None


@pytest.mark.parametrize(
    ("app_protocol", "expected"), [(None, "HTTP"), ("kubernetes.io/h2c", "H2C"), ("kubernetes.io/ws", "WebSocket")]
)
def test_the_protocol_is_the_services(app_protocol: str | None, expected: str) -> None:
    fields = {} if app_protocol is None else {"appProtocol": app_protocol}
    (found,) = snapshot(compiled(gateway(), service(**fields), http_route())).backends
    assert found.spec.protocol == expected


def test_endpoints_that_end_count_only_where_there_are_no_others() -> None:
    ending = {"ready": False, "serving": True, "terminating": True}
    starting = {"ready": False, "serving": False, "terminating": False}
    leaving = endpoint_slice("app", "10.1.0.9", name="leaving", conditions=ending)
    waiting = endpoint_slice("app", "10.1.0.8", name="waiting", conditions=starting)
    alone = compiled(gateway(), service(), leaving, waiting, http_route())
    assert backends(alone) == {"default/service.app.8080": ["10.1.0.9:3000"]}
    assert backends(compiled(gateway(), *APP, leaving, http_route())) == {"default/service.app.8080": ["10.1.0.1:3000"]}


@pytest.mark.parametrize(
    "rule",
    [
        "text",
        {"backendRefs": 3},
        {"backendRefs": ["app"]},
        {"backendRefs": [{"kind": "Service"}]},
        {"backendRefs": [{"name": "app", "filters": ["x"]}]},
        {"filters": [{"type": "RequestMirror", "requestMirror": {"backendRef": {"name": ["app"]}}}]},
    ],
)
def test_a_route_of_another_shape_is_left_out_and_the_others_are_served(rule: Any) -> None:  # noqa: ANN401 - of any shape
    odd = http_route("odd", rules=[rule])
    outcome = compiled(gateway(), service(), endpoint_slice("app", "10.0.0.5"), http_route(), odd)
    assert [one.metadata.name for one in snapshot(outcome).http_routes] == ["app"]


def test_what_is_not_referred_to_is_not_in_the_directory() -> None:
    outcome = compiled(gateway(), *APP, service("other"), pool(), service("picker"))
    assert list(outcome.files) == ["gateway.json"]


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (backend_ref("gone"), "BackendNotFound"),
        (backend_ref("app", 9999), "BackendNotFound"),
        (backend_ref("alias"), "BackendNotFound"),
        (backend_ref("secure"), "UnsupportedProtocol"),
        (backend_ref("app", None, group="unknown.io", kind="Odd"), "InvalidKind"),
        (backend_ref("app", namespace="blue"), "RefNotPermitted"),
        (backend_ref("gone", None, **ATTACHE), "BackendNotFound"),
        (backend_ref("gone", None, **POOL), "BackendNotFound"),
        (backend_ref("pickerless", None, **POOL), "BackendNotFound"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_answered_500_and_keeps_its_share(
    reference: Object, reason: str
) -> None:
    alias = service("alias")
    alias["spec"] |= {"type": "ExternalName", "externalName": "example.com"}
    secure = service("secure", appProtocol="https")
    outcome = compiled(
        gateway(),
        *APP,
        alias,
        secure,
        pool("pickerless"),
        http_route("app", backend_ref(weight=3), {**reference, "weight": 7}),
    )
    assert route_says(outcome) == {**GOOD, "ResolvedRefs": ("False", reason)}
    assert targets(outcome) == [
        ("Backend", "default/service.app.8080", 3),
        ("Backend", "default/unresolved", 7),
    ]
    assert backends(outcome)["default/unresolved"] == ["unresolved"]
    assert attached(outcome) == {"http": 1}


def test_all_references_that_cannot_be_resolved_are_named() -> None:
    outcome = compiled(
        gateway(), *APP, http_route("app", backend_ref("one"), backend_ref("two", None, **POOL), backend_ref("one"))
    )
    (entry,) = status(outcome, "HTTPRoute", "app").lists[0].entries
    (said,) = (one.message for one in entry.conditions if one.type == "ResolvedRefs")
    assert said == "the Service default/one is not there; there is no InferencePool default/two"


def test_a_backend_of_another_namespace_needs_a_grant() -> None:
    things = gateway(), service(namespace="blue"), http_route("app", backend_ref(namespace="blue"))
    source = ("default", "gateway.networking.k8s.io", "HTTPRoute")
    allowed = compiled(*things, grant(source, ("", "Service"), namespace="blue"))
    assert route_says(allowed) == GOOD
    assert targets(allowed) == [("Backend", "blue/service.app.8080", 1)]
    other = compiled(*things, grant(source, ("", "Service"), namespace="blue", name="other"))
    assert route_says(other)["ResolvedRefs"] == ("False", "RefNotPermitted")


def test_a_route_to_a_model_server_goes_to_its_engines() -> None:
    outcome = compiled(gateway(), server(), http_route("app", backend_ref("llama", None, **ATTACHE)))
    assert route_says(outcome) == GOOD
    assert targets(outcome) == [("ModelServer", "default/llama", 1)]


def test_a_route_to_a_pool_goes_to_its_ready_pods() -> None:
    things = pool(), service("picker"), pod("a"), pod("b", "10.0.0.2", ready=False), pod("c", "10.0.0.3", app="other")
    outcome = compiled(gateway(), *things, http_route("app", backend_ref("llama", None, **POOL)))
    assert route_says(outcome) == GOOD
    assert targets(outcome) == [("ModelServer", "default/inferencepool.llama", 1)]
    (found,) = snapshot(outcome).servers
    assert [one.address for one in found.spec.endpoints] == ["10.0.0.1:8000"]
    (parent,) = parents(outcome, "InferencePool", "llama")
    assert parent == {"name": "web", **RESOLVED}


def test_the_port_of_a_reference_to_a_pool_has_no_effect() -> None:
    outcome = compiled(gateway(), pool(), service("picker"), http_route("app", backend_ref("llama", 9999, **POOL)))
    assert route_says(outcome) == GOOD


def test_a_pool_whose_picker_is_gone_is_served_only_if_it_may_fail_open() -> None:
    reference = http_route("app", backend_ref("llama", None, **POOL))
    picker = pool()["spec"]["endpointPickerRef"]
    closed = compiled(gateway(), pool(), reference)
    assert parents(closed, "InferencePool", "llama")[0]["ResolvedRefs"] == ("False", "InvalidExtensionRef")
    assert targets(closed) == [("Backend", "default/unresolved", 1)]
    opened = compiled(gateway(), pool(endpointPickerRef={**picker, "failureMode": "FailOpen"}), reference)
    assert parents(opened, "InferencePool", "llama")[0]["ResolvedRefs"] == ("False", "InvalidExtensionRef")
    assert targets(opened) == [("ModelServer", "default/inferencepool.llama", 1)]


def test_a_pool_says_nothing_where_no_route_refers_to_it() -> None:
    assert parents(compiled(gateway(), pool(), service("picker")), "InferencePool", "llama") == []


def test_a_model_route_may_name_a_pool() -> None:
    outcome = compiled(pool(), service("picker"), pod("a"), route("llama", "inferencepool.llama"))
    (found,) = snapshot(outcome).servers
    assert found.metadata.key == "default/inferencepool.llama"


def test_names_of_pools_are_refused_to_model_servers() -> None:
    outcome = compiled(
        gateway(),
        pool(),
        service("picker"),
        server("inferencepool.llama", app="other"),
        pod("a"),
        pod("b", "10.0.0.2", app="other"),
        http_route("app", backend_ref("llama", None, **POOL)),
    )
    (found,) = snapshot(outcome).servers
    assert [one.address for one in found.spec.endpoints] == ["10.0.0.1:8000"]
    said = conditions(status(outcome, "ModelServer", "inferencepool.llama").conditions)
    assert said["Accepted"] == ("False", "Invalid")


def test_mirrors_and_filters_of_backends_are_resolved_too() -> None:
    header = {"type": "RequestHeaderModifier", "requestHeaderModifier": {"set": [{"name": "a", "value": "b"}]}}
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "shadow", "port": 8080}}}
    rules = [{"filters": [mirror], "backendRefs": [backend_ref(filters=[header])]}]
    outcome = compiled(gateway(), *APP, service("shadow"), http_route(rules=rules))
    assert route_says(outcome) == GOOD
    (found,) = snapshot(outcome).http_routes
    (rule,) = found.spec.rules
    assert rule.filters[0].request_mirror is not None
    assert rule.filters[0].request_mirror.backend_ref.name == "service.shadow.8080"
    assert rule.backend_refs[0].filters[0].request_header_modifier is not None
    gone = compiled(gateway(), *APP, http_route(rules=rules))
    assert route_says(gone)["ResolvedRefs"] == ("False", "BackendNotFound")


def test_a_filter_that_is_not_supported_refuses_the_route() -> None:
    odd = {"type": "ExtensionRef", "extensionRef": {"group": "a", "kind": "B", "name": "c"}}
    outcome = compiled(gateway(), *APP, http_route(rules=[{"filters": [odd], "backendRefs": [backend_ref()]}]))
    assert route_says(outcome)["Accepted"] == ("False", "UnsupportedValue")
    assert served(outcome) == {}
    assert attached(outcome) == {"http": 0}


def test_retries_of_a_rule_are_those_of_the_directory() -> None:
    retry = {"codes": [500, 503], "attempts": 2, "backoff": "100ms"}
    outcome = compiled(gateway(), *APP, http_route(rules=[{"retry": retry, "backendRefs": [backend_ref()]}]))
    (found,) = snapshot(outcome).http_routes
    assert found.spec.rules[0].retry == HTTPRouteRetry(codes=(500, 503), attempts=2, backoff=Duration("100ms"))
    (entry,) = status(outcome, "HTTPRoute", "app").lists[0].entries
    assert entry.conditions[0].message == ""


def test_sessions_of_a_rule_have_no_effect_and_the_route_says_so() -> None:
    sticky = {"sessionPersistence": {"sessionName": "a"}, "backendRefs": [backend_ref()]}
    outcome = compiled(gateway(), *APP, http_route(rules=[sticky]))
    assert served(outcome) == {"default/app": ["default/web/http"]}
    (entry,) = status(outcome, "HTTPRoute", "app").lists[0].entries
    assert entry.conditions[0].message == "sessionPersistence of rules is not supported and has no effect"


@pytest.mark.parametrize(
    ("parent", "reason"),
    [
        ({"sectionName": "gone"}, "NoMatchingParent"),
        ({"port": 9999}, "NoMatchingParent"),
        ({"sectionName": "http", "port": 81}, "NoMatchingParent"),
        ({"sectionName": "models"}, "NotAllowedByListeners"),
        ({"sectionName": "other"}, "NoMatchingListenerHostname"),
    ],
)
def test_why_a_route_is_not_attached(parent: Object, reason: str) -> None:
    models = listener("models", 81, allowedRoutes={"kinds": [{"group": "attache.dev", "kind": "ModelRoute"}]})
    other = listener("other", 82, hostname="other.org")
    web = gateway("web", listener("http"), models, other)
    outcome = compiled(web, *APP, http_route(hostnames=["a.example.org"], parents=({"name": "web", **parent},)))
    assert route_says(outcome)["Accepted"] == ("False", reason)
    assert route_says(outcome)["ResolvedRefs"] == ("True", "ResolvedRefs")
    assert served(outcome) == {}
    assert set(attached(outcome).values()) == {0}


def test_a_route_attaches_to_all_listeners_that_it_names() -> None:
    web = gateway("web", listener("a"), listener("b", 8080), listener("c", 8090, hostname="c.org"))
    refs = {"name": "web", "port": 8080}, {"name": "web", "sectionName": "a"}
    outcome = compiled(web, *APP, http_route(parents=refs))
    assert served(outcome) == {"default/app": ["default/web/a", "default/web/b"]}
    assert [one["Accepted"] for one in parents(outcome, "HTTPRoute", "app")] == [("True", "Accepted")] * 2
    assert attached(compiled(web, *APP, http_route())) == {"a": 1, "b": 1, "c": 1}


def test_gateways_of_others_are_left_to_them() -> None:
    foreign = gateway("foreign")
    foreign["spec"]["gatewayClassName"] = "other"
    outcome = compiled(gateway(), foreign, *APP, http_route(parents=({"name": "foreign"}, {"name": "gone"})))
    assert parents(outcome, "HTTPRoute", "app") == []
    assert served(outcome) == {}


@pytest.mark.parametrize(
    ("namespaces", "expected"),
    [
        ({}, ["default"]),
        ({"from": "Same"}, ["default"]),
        ({"from": "None"}, []),
        ({"from": "All"}, ["blue", "default", "red"]),
        ({"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}, ["blue"]),
        ({"from": "Selector", "selector": {"matchLabels": {"kubernetes.io/metadata.name": "red"}}}, ["red"]),
        (
            {
                "from": "Selector",
                "selector": {"matchExpressions": [{"key": "team", "operator": "In", "values": ["b"]}]},
            },
            ["red"],
        ),
        (
            {
                "from": "Selector",
                "selector": {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["b"]}]},
            },
            ["blue", "default"],
        ),
        (
            {"from": "Selector", "selector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}},
            ["default"],
        ),
        (
            {"from": "Selector", "selector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}},
            ["blue", "red"],
        ),
    ],
)
def test_routes_of_namespaces_that_the_listener_allows(namespaces: Object, expected: list[str]) -> None:
    web = gateway("web", listener(allowedRoutes={"namespaces": namespaces}))
    routes = [
        http_route(space, rules=[], namespace=space, parents=({"name": "web", "namespace": "default"},))
        for space in ("default", "blue", "red")
    ]
    outcome = compiled(web, *routes, namespace("blue", team="a"), namespace("red", team="b"))
    assert sorted(served(outcome)) == [f"{space}/{space}" for space in expected]


@pytest.mark.parametrize(
    ("host", "names", "expected"),
    [
        (None, ("a.org",), True),
        ("a.org", (), True),
        ("a.org", ("A.org",), True),
        ("a.org", ("b.org",), False),
        ("*.a.org", ("x.a.org",), True),
        ("*.a.org", ("x.y.a.org",), True),
        ("*.a.org", ("a.org",), False),
        ("x.a.org", ("*.a.org",), True),
        ("*.a.org", ("*.x.a.org",), True),
        ("*.a.org", ("*.b.org",), False),
        ("a.org", ("*.a.org",), False),
        ("xa.org", ("*.a.org",), False),
    ],
)
def test_hosts_that_meet(host: str | None, names: tuple[str, ...], expected: bool) -> None:
    assert hostnames_intersect(host, names) == expected


def test_a_model_route_is_served_by_the_listeners_that_it_names() -> None:
    named = route("llama")
    named["spec"]["parentRefs"] = [{"name": "web", "sectionName": "b"}]
    web = gateway("web", listener("a"), listener("b", 8080))
    outcome = compiled(web, server(), named)
    (found,) = snapshot(outcome).routes
    assert [one.section_name for one in found.spec.parent_refs] == ["default/web/b"]
    assert parents(outcome, "ModelRoute", "llama") == [{"name": "web", **RESOLVED}]
    assert attached(outcome) == {"a": 0, "b": 1}


def test_a_model_route_that_names_no_gateway_is_served_by_all_that_let_it() -> None:
    everywhere = gateway("all", listener(allowedRoutes={"namespaces": {"from": "All"}}), namespace="blue")
    routes_only = gateway("http", listener(allowedRoutes={"kinds": [{"kind": "HTTPRoute"}]}))
    settings = GatewayApiSettings(bind=("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"))
    things = gateway(), everywhere, routes_only, gateway("own", namespace="blue")
    outcome = compiled(*things, server(), route("llama"), settings=settings)
    (found,) = snapshot(outcome).routes
    assert {one.section_name for one in found.spec.parent_refs} == {"default/web/http", "blue/all/http"}


def test_a_model_route_that_no_listener_lets_in_says_where_to_let_it() -> None:
    outcome = compiled(gateway(namespace="blue"), server(), route("llama"))
    assert snapshot(outcome).routes == ()
    (programmed,) = (one for one in status(outcome, "ModelRoute", "llama").conditions if one.type == "Programmed")
    assert programmed.reason == "NoMatchingParent"
    assert "allowedRoutes allow ModelRoutes of the namespace default" in programmed.message


def test_a_model_route_whose_gateways_are_not_there_says_which() -> None:
    named = route("llama")
    named["spec"]["parentRefs"] = [{"name": "webb"}, {"name": "web", "namespace": "blue"}]
    outcome = compiled(gateway(), server(), named)
    assert snapshot(outcome).routes == ()
    (programmed,) = (one for one in status(outcome, "ModelRoute", "llama").conditions if one.type == "Programmed")
    assert programmed.reason == "NoMatchingParent"
    assert "is called default/webb, blue/web" in programmed.message


def test_a_model_route_of_a_gateway_that_does_not_serve_it_is_not_served() -> None:
    named = route("llama")
    named["spec"]["parentRefs"] = [{"name": "web", "sectionName": "gone"}]
    outcome = compiled(gateway(), server(), named)
    assert snapshot(outcome).routes == ()
    said = conditions(status(outcome, "ModelRoute", "llama").conditions)
    assert said["Programmed"] == ("False", "NoMatchingParent")
    assert parents(outcome, "ModelRoute", "llama")[0]["Accepted"] == ("False", "NoMatchingParent")


def test_without_gateways_references_to_them_have_no_effect() -> None:
    named = route("llama")
    named["spec"]["parentRefs"] = [{"name": "web"}]
    outcome = compiled(server(), named)
    (found,) = snapshot(outcome).routes
    assert found.spec.parent_refs == ()


def test_a_change_of_status_alone_compiles_nothing_anew() -> None:
    from controller.gateway.compile.compiler import Compiler  # noqa: PLC0415

    compiler = feed(Compiler(None, GatewayApiSettings(bind=("10.0.0.1",))), [gateway_class(), gateway(), *APP])
    feed(compiler, [http_route()])
    before = compiler.compile()
    again = http_route()
    again["status"] = {"parents": []}
    after = feed(compiler, [again, gateway(has=("10.0.0.1",))]).compile()
    assert after == before
    assert addresses(after) == {"default/web/http": "10.0.0.1:80"}
