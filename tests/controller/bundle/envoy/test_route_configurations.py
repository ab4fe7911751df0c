# SPDX-License-Identifier: Apache-2.0
"""Route configurations: which hosts there are, and which of a connection's hosts belong to another listener."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from controller.bundle.envoy.envoy_json import BuildMemo
from controller.bundle.envoy.http_routes import escape_header_value, redirect_action
from controller.bundle.envoy.listeners import listener_groups
from controller.bundle.envoy.route_configurations import route_configuration
from extproc.api.config_loader import load_snapshot
from extproc.api.http_route import HTTPRouteMatch, PathMatch, PathModifier, RequestRedirect
from tests.with_envoy.http_stand import backend, document, ref, route, rule

TLS = {"certificates": [{"certFile": "/c.pem", "keyFile": "/k.pem"}]}


def configurations(listeners: list[dict[str, Any]], *routes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the name of the first listener of each group: by domain, the virtual host."""
    gateway = document("GatewayConfig", "gateway", {"listeners": listeners, "failureMode": "Close"})
    text = yaml.safe_dump_all([backend("a", "127.0.0.1:80"), *routes, gateway])
    snapshot = load_snapshot({"all.yaml": text.encode()})
    memo = BuildMemo()
    found = {}
    for group in listener_groups(snapshot.gateway):
        resource: Any = route_configuration(group, snapshot, memo)
        found[group.listeners[0].name] = {host["domains"][0]: host for host in resource["virtual_hosts"]}
    return found


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"budgets": [{"window": "Month", "max": {"requests": 2}}]}, {"x-attache-budget-remaining"}),
        ({"rateLimits": [{"unit": "minute", "requests": 9}]}, {"x-ratelimit-remaining-requests"}),
        ({}, set()),
    ],
)
def test_answers_have_what_is_left_if_only_keys_have_limits(own: dict[str, Any], named: set[str]) -> None:
    authentication = {"apiKeys": [{"name": "k", "tenant": "a", "keySHA256": "cd" * 32, **own}]}
    gateway = document("GatewayConfig", "gateway", {"failureMode": "Close", "authentication": authentication})
    snapshot = load_snapshot({"all.yaml": yaml.safe_dump_all([gateway]).encode()})
    (group,) = listener_groups(snapshot.gateway)
    text = str(route_configuration(group, snapshot, BuildMemo()))
    left = ("x-attache-budget-remaining", "x-ratelimit-remaining-requests")
    assert {name for name in left if f":{name})%" in text} == named


def last_status(host: dict[str, Any]) -> int:
    status: int = host["routes"][-1]["direct_response"]["status"]
    return status


def https(name: str, hostname: str | None = None) -> dict[str, Any]:
    return {"name": name, "address": "127.0.0.1:443", "tls": TLS, **({"hostname": hostname} if hostname else {})}


def test_a_connection_of_one_https_listener_serves_no_host_of_another() -> None:
    listeners = [https("any"), https("one", "one.test"), https("wide", "*.wide.test"), https("deep", "a.wide.test")]
    to_a = route("wide", rule("/", ref("a")), hostnames=["a.wide.test", "b.wide.test"], sections=["wide"])

    found = configurations(listeners, to_a)

    statuses = {name: {domain: last_status(host) for domain, host in hosts.items()} for name, hosts in found.items()}
    assert statuses == {
        "any": {"*": 404, "one.test": 421, "*.wide.test": 421, "a.wide.test": 421},
        "one": {"one.test": 404, "*": 421, "*.wide.test": 421, "a.wide.test": 421},
        "wide": {"*.wide.test": 404, "b.wide.test": 404, "*": 421, "one.test": 421, "a.wide.test": 421},
        "deep": {"a.wide.test": 404, "*": 421, "one.test": 421, "*.wide.test": 421},
    }


def test_hosts_of_plain_listeners_share_a_configuration_and_others_are_unknown() -> None:
    listeners = [
        {"name": "one", "address": "127.0.0.1:80", "hostname": "one.test"},
        {"name": "wide", "address": "127.0.0.1:80", "hostname": "*.test"},
    ]

    found = configurations(listeners)

    assert {domain: last_status(host) for domain, host in found["one"].items()} == {
        "one.test": 404,
        "*.test": 404,
        "*": 404,
    }


PREFIX = HTTPRouteMatch(path=PathMatch(value="/old"))


def test_a_redirect_without_a_port_goes_to_where_clients_connect() -> None:
    there = [{"type": "RequestRedirect", "requestRedirect": {"hostname": "new.test"}}]
    public = {"name": "public", "address": "127.0.0.1:9080", "publicPort": 80}
    bound = {"name": "bound", "address": "127.0.0.1:9081"}
    found = configurations([public, bound], route("old", {"filters": there}))
    ports = {name: hosts["*"]["routes"][0]["redirect"].get("port_redirect") for name, hosts in found.items()}
    assert ports == {"public": None, "bound": 9081}


@pytest.mark.parametrize(
    ("redirect", "listens", "location"),
    [
        # scheme, port of the redirect; port and TLS of the listener; what Envoy is told: host, port
        ({}, (80, False), ("", 0)),
        ({}, (8080, False), ("", 8080)),
        ({}, (443, True), ("", 0)),
        ({}, (8443, True), ("", 8443)),
        ({"scheme": "https"}, (80, False), ("", 0)),
        ({"scheme": "https"}, (8080, False), ("", 443)),
        ({"scheme": "http"}, (443, True), ("", 0)),
        ({"port": 80}, (8080, False), ("", 80)),
        ({"port": 80}, (80, False), ("", 0)),
        ({"port": 443}, (80, False), ("", 443)),
        ({"scheme": "https", "port": 8443}, (80, False), ("", 8443)),
        ({"hostname": "new.test"}, (8080, False), ("new.test", 8080)),
        ({"hostname": "new.test", "scheme": "https"}, (8080, False), ("new.test", 0)),
    ],
)
def test_ports_of_redirects(redirect: dict[str, Any], listens: tuple[int, bool], location: tuple[str, int]) -> None:
    port, is_tls = listens
    action = redirect_action(RequestRedirect(**redirect), PREFIX, domain="*", port=port, is_tls=is_tls)

    assert (action.host_redirect, action.port_redirect) == location


def test_a_host_that_is_known_needs_no_port_of_the_clients() -> None:
    action = redirect_action(RequestRedirect(scheme="https"), PREFIX, domain="a.test", port=8080, is_tls=False)

    assert (action.host_redirect, action.port_redirect, action.scheme_redirect) == ("a.test", 0, "https")


@pytest.mark.parametrize(
    ("prefix", "new", "told"),
    [
        ("/old", "/new", "/new"),
        ("/old/", "/new/", "/new"),
        ("/", "/new", "/new/"),
        ("/old", "/", "^/old/*"),
        ("/o.d", "", r"^/o\.d/*"),
        ("/", "/", ""),
    ],
)
def test_prefixes_are_replaced_by_whole_elements(prefix: str, new: str, told: str) -> None:
    match = HTTPRouteMatch(path=PathMatch(value=prefix))
    modifier = PathModifier(type="ReplacePrefixMatch", replace_prefix_match=new)
    action = redirect_action(RequestRedirect(path=modifier), match, domain="*", port=80, is_tls=False)

    regex = action.regex_rewrite.pattern.regex if action.regex_rewrite and action.regex_rewrite.pattern else ""
    assert (action.prefix_rewrite or "") + regex == told


def test_a_header_of_the_configuration_holds_no_commands_of_envoy() -> None:
    assert escape_header_value("100% %REQ(x)%") == "100%% %%REQ(x)%%"


def test_a_route_for_all_hosts_is_made_once_however_many_hosts_others_have() -> None:
    anywhere = route("anywhere", rule("/", ref("a")))
    several = route("several", rule("/x", ref("a")), hostnames=["a.test", "b.test"])
    (hosts,) = configurations([{"name": "one", "address": "127.0.0.1:80"}], anywhere, several).values()
    one, other = (
        next(found for found in hosts[domain]["routes"] if found["name"] == "http/default/anywhere/0/0")
        for domain in ("a.test", "b.test")
    )
    assert one is other
