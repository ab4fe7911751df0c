# SPDX-License-Identifier: Apache-2.0
"""Which listeners share a connection manager and its routes."""

from __future__ import annotations

from controller.gateway.envoy.listener_groups import ListenerGroup, listener_groups
from extproc.config.gateway_config import GatewayConfigSpec
from extproc.config.listeners import CertificateFiles, Listener, ListenerTls

TLS = ListenerTls(certificates=(CertificateFiles(cert_file="/tls/tls.crt", key_file="/tls/tls.key"),))


def test_listen_alone_is_one_listener_called_default_on_the_routes_of_the_whole_gateway() -> None:
    assert listener_groups(GatewayConfigSpec(listen="127.0.0.1:8080")) == (
        ListenerGroup(
            route_config_name="attache",
            address="127.0.0.1:8080",
            listeners=(Listener(name="default", address="127.0.0.1:8080"),),
        ),
    )


def test_plain_listeners_of_one_address_are_one_group_and_https_listeners_are_alone() -> None:
    web = Listener(name="web", address="0.0.0.0:80")
    api = Listener(name="api", address="0.0.0.0:80", hostname="api.example.com")
    first = Listener(name="first", address="0.0.0.0:443", hostname="a.example.com", tls=TLS)
    second = Listener(name="second", address="0.0.0.0:443", hostname="b.example.com", tls=TLS)
    assert listener_groups(GatewayConfigSpec(listeners=(web, first, api, second))) == (
        ListenerGroup(route_config_name="attache/http/0.0.0.0:80", address="0.0.0.0:80", listeners=(web, api)),
        ListenerGroup(
            route_config_name="attache/https/first", address="0.0.0.0:443", listeners=(first,), tls=first.tls
        ),
        ListenerGroup(
            route_config_name="attache/https/second", address="0.0.0.0:443", listeners=(second,), tls=second.tls
        ),
    )


def test_addresses_that_are_spelled_differently_are_one() -> None:
    long = Listener(name="long", address="[0:0:0:0:0:0:0:1]:80")
    short = Listener(name="short", address="[::1]:80", hostname="api.example.com")
    (group,) = listener_groups(GatewayConfigSpec(listeners=(long, short)))
    assert group.address == "[::1]:80"
    assert group.listeners == (long, short)
