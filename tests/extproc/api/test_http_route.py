# SPDX-License-Identifier: Apache-2.0
"""HTTPRoutes and Backends of a directory: every mistake is found, with its line and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.http_route import HTTPRouteSpec, check_http_route
from extproc.api.quantities import decode_quantity
from extproc.api.spec import ParentReference, is_attached

if TYPE_CHECKING:
    from extproc.api.config_snapshot import Snapshot

DIRECTORY = """
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {name: files}
spec: {endpoints: ["127.0.0.1:8001"]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: llama-3.1-8b, endpoints: [{address: "127.0.0.1:8002"}]}
---
"""
ROUTE = """
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: all}
spec:
  rules:
    - backendRefs:
        - {group: attache.dev, kind: Backend, name: files}
        - {group: attache.dev, kind: ModelServer, name: llama}
"""
LISTENERS = """
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  listeners:
    - {name: public, address: "127.0.0.1:8080"}
    - {name: inside, address: "127.0.0.1:8081"}
"""


def read(text: str) -> Snapshot:
    return load_snapshot({"all.yaml": (DIRECTORY + text).encode()})


def mistakes_of(text: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        read(text)
    return [str(mistake) for mistake in caught.value.mistakes]


def findings_of(**spec: object) -> list[tuple[str, str]]:
    """Of an HTTPRoute with this spec, in the directory's spelling: where, and what."""
    found = check_http_route(msgspec.convert(spec, HTTPRouteSpec, dec_hook=decode_quantity))
    return [(".".join(map(str, path[1:])), message) for path, message in found]


def findings_of_rule(**rule: object) -> list[tuple[str, str]]:
    return [(path.removeprefix("rules.0."), message) for path, message in findings_of(rules=[rule])]


def matching(path: str, kind: str = "PathPrefix") -> dict[str, Any]:
    return {"matches": [{"path": {"type": kind, "value": path}}]}


def test_a_route_to_backends_and_engines_is_read() -> None:
    snapshot = read(ROUTE)

    (route,), (backend,) = snapshot.http_routes, snapshot.backends
    assert [ref.name for ref in route.spec.rules[0].backend_refs] == ["files", "llama"]
    assert backend.spec.endpoints == ("127.0.0.1:8001",)


def test_backends_that_are_missing_or_of_another_kind_are_named_with_their_line() -> None:
    text = ROUTE.replace("name: files}", "name: fils}").replace("kind: ModelServer, name", "kind: InferencePool, name")

    first, second = mistakes_of(text)

    assert first.startswith("all.yaml:19: spec.rules[0].backendRefs[0].name: no Backend is called 'fils'; did you mean")
    assert "all.yaml:20: spec.rules[0].backendRefs[1]: refers to a InferencePool of 'attache.dev'" in second


def test_a_mirror_needs_a_backend_that_exists() -> None:
    mirror = "{type: RequestMirror, requestMirror: {backendRef: {group: attache.dev, kind: Backend, name: copies}}}"

    (mistake,) = mistakes_of(ROUTE.replace("- backendRefs:", f"- filters: [{mirror}]\n      backendRefs:"))

    assert "filters[0].requestMirror.backendRef.name: no Backend is called 'copies'" in mistake


def test_listeners_that_do_not_exist_are_mistakes_of_all_kinds_of_routes() -> None:
    refs = "spec:\n  parentRefs: [{name: gateway, sectionName: pubic}]"
    model_route = f"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: chat}}
{refs}
  modelName: chat
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
"""

    found = mistakes_of(ROUTE.replace("spec:", refs) + model_route + LISTENERS)

    assert len(found) == 2
    assert all("parentRefs[0].sectionName: the GatewayConfig has no listener 'pubic'" in one for one in found)


def test_section_names_count_only_where_there_are_listeners() -> None:
    refs = "spec:\n  parentRefs: [{name: gateway, sectionName: http}]"

    assert len(read(ROUTE.replace("spec:", refs)).http_routes) == 1


def test_a_route_is_attached_to_the_listeners_that_it_names_or_to_all() -> None:
    public = ParentReference(name="gateway", section_name="public")

    assert is_attached((), "public")
    assert is_attached((public,), "public")
    assert not is_attached((public,), "inside")
    assert is_attached((public, ParentReference(name="gateway")), "inside")


def model_route(name: str, *sections: str) -> str:
    refs = ", ".join(f"{{name: gateway, sectionName: {section}}}" for section in sections)
    return f"""
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: {name}}}
spec:
  parentRefs: [{refs}]
  modelName: chat
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
"""


def test_two_routes_may_serve_one_name_on_different_listeners() -> None:
    assert len(read(model_route("a", "public") + model_route("b", "inside") + LISTENERS).routes) == 2


def test_two_routes_for_one_name_on_one_listener_are_a_mistake_said_once() -> None:
    (mistake,) = mistakes_of(model_route("a") + model_route("b") + LISTENERS)
    (of_one,) = mistakes_of(model_route("a") + model_route("b", "inside") + LISTENERS)

    assert "the model or adapter 'chat' of the listener 'public' is already in all.yaml" in mistake
    assert "of the listener 'inside'" in of_one


@pytest.mark.parametrize(
    ("hostname", "is_good"),
    [
        ("api.example.com", True),
        ("*.example.com", True),
        ("localhost", True),
        ("API.example.com", False),
        ("10.0.0.1", False),
        ("a.*.com", False),
        ("*", False),
        ("-a.com", False),
        ("a..b", False),
        ("a.com:80", False),
    ],
)
def test_hostnames_are_those_of_the_gateway_api(hostname: str, is_good: bool) -> None:
    assert [path for path, _ in findings_of(hostnames=[hostname])] == ([] if is_good else ["hostnames.0"])


@pytest.mark.parametrize(
    ("path", "kind", "is_good"),
    [
        ("/", "PathPrefix", True),
        ("/files/", "PathPrefix", True),
        ("/a/b.c", "Exact", True),
        ("files", "Exact", False),
        ("/a//b", "PathPrefix", False),
        ("/a/../b", "Exact", False),
        ("/a/.", "Exact", False),
        ("/a%2Fb", "PathPrefix", False),
        ("/a?b", "PathPrefix", False),
        ("/[a-z]+", "RegularExpression", True),
        ("/(?=a)", "RegularExpression", False),
    ],
)
def test_paths_are_such_as_requests_have(path: str, kind: str, is_good: bool) -> None:
    found = [where for where, _ in findings_of_rule(**matching(path, kind))]

    assert found == ([] if is_good else ["matches.0.path.value"])


def test_expressions_and_names_of_headers_are_checked() -> None:
    headers = [{"name": "a b", "value": "x"}, {"name": "c", "value": "(", "type": "RegularExpression"}]
    parameters = [{"name": "q", "value": "[", "type": "RegularExpression"}]

    found = findings_of_rule(matches=[{"headers": headers, "queryParams": parameters}])

    assert [path for path, _ in found] == [
        "matches.0.headers.0.name",
        "matches.0.headers.1.value",
        "matches.0.queryParams.0.value",
    ]


SET_HEADER: dict[str, Any] = {
    "type": "RequestHeaderModifier",
    "requestHeaderModifier": {"set": [{"name": "a", "value": "1"}]},
}
REDIRECT: dict[str, Any] = {"type": "RequestRedirect", "requestRedirect": {"hostname": "example.com"}}
TO_PREFIX: dict[str, Any] = {
    "type": "URLRewrite",
    "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/x"}},
}
BACKEND: dict[str, Any] = {"group": "attache.dev", "kind": "Backend", "name": "files"}


@pytest.mark.parametrize(
    ("rule", "where"),
    [
        ({"filters": [{"type": "CORS"}]}, ["filters.0"]),
        ({"filters": [{**SET_HEADER, "cors": {}}]}, ["filters.0.cors"]),
        ({"filters": [SET_HEADER, SET_HEADER]}, ["filters.1.type"]),
        ({"filters": [REDIRECT, TO_PREFIX]}, ["filters"]),
        ({"filters": [REDIRECT], "backendRefs": [BACKEND]}, ["backendRefs"]),
        ({"filters": [TO_PREFIX], **matching("/a", "Exact")}, ["filters"]),
        ({"filters": [TO_PREFIX], **matching("/a")}, []),
        ({"backendRefs": [{**BACKEND, "filters": [TO_PREFIX]}]}, ["backendRefs.0.filters.0.type"]),
        ({"backendRefs": [{**BACKEND, "filters": [SET_HEADER]}]}, []),
        ({"timeouts": {"request": "1s", "backendRequest": "2s"}}, ["timeouts.backendRequest"]),
        ({"timeouts": {"request": "0s", "backendRequest": "2s"}}, []),
    ],
)
def test_filters_and_timeouts_do_not_contradict_each_other(rule: dict[str, Any], where: list[str]) -> None:
    assert [path for path, _ in findings_of_rule(**rule)] == where


@pytest.mark.parametrize(
    ("filter_", "where"),
    [
        (
            {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["Host"]}},
            "requestHeaderModifier.remove.0",
        ),
        (
            {"type": "ResponseHeaderModifier", "responseHeaderModifier": {"add": [{"name": ":status", "value": "1"}]}},
            "responseHeaderModifier.add.0.name",
        ),
        ({"type": "URLRewrite", "urlRewrite": {"hostname": "*.example.com"}}, "urlRewrite.hostname"),
        (
            {"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplaceFullPath", "replacePrefixMatch": "/x"}}},
            "urlRewrite.path",
        ),
        (
            {"type": "URLRewrite", "urlRewrite": {"path": {"type": "ReplaceFullPath", "replaceFullPath": "x?y"}}},
            "urlRewrite.path.replaceFullPath",
        ),
        (
            {
                "type": "RequestMirror",
                "requestMirror": {"backendRef": BACKEND, "percent": 1, "fraction": {"numerator": 1}},
            },
            "requestMirror",
        ),
        (
            {
                "type": "RequestMirror",
                "requestMirror": {"backendRef": BACKEND, "fraction": {"numerator": 5, "denominator": 4}},
            },
            "requestMirror.fraction",
        ),
        ({"type": "CORS", "cors": {"allowOrigins": ["example.com"]}}, "cors.allowOrigins.0"),
    ],
)
def test_what_a_filter_says_makes_sense(filter_: dict[str, Any], where: str) -> None:
    assert [path for path, _ in findings_of_rule(filters=[filter_])] == [f"filters.0.{where}"]


def test_addresses_of_backends_are_checked() -> None:
    found = mistakes_of("""
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {name: copies}
spec: {endpoints: ["127.0.0.1:8001", "127.0.0.1:8001", "files"]}
""")

    assert [one.partition(": ")[2][:18] for one in found] == ["spec.endpoints[1]:", "spec.endpoints[2]:"]
