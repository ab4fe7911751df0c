# SPDX-License-Identifier: Apache-2.0
"""Addresses: which may be host names, and what is said of text that is none."""

from __future__ import annotations

import pytest

from extproc.api import addresses
from extproc.api.addresses import (
    is_in,
    is_local_or_metadata_host,
    parse_address,
    parse_endpoint,
    parse_envoy_upstream,
    parse_networks,
)
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.gateway_config import GatewayConfigSpec, why_extproc_unreachable

GATEWAY = """apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: gateway}}
spec: {{{field}: "{text}"}}
"""


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "192.0.0.192",
        "168.63.129.16",
        "::ffff:168.63.129.16",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::6464:64c8",
        "2002:a9fe:a9fe::1",
        "::169.254.169.254",
        "fe80::1%eth0",
        "localhost",
    ],
)
def test_addresses_of_this_machine_and_of_metadata_services_are_guarded_in_every_form(host: str) -> None:
    assert is_local_or_metadata_host(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "64:ff9b::a00:1", "2002:a00:1::1", "100.100.100.201", "a.b"])
def test_other_addresses_are_not(host: str) -> None:
    assert not is_local_or_metadata_host(host)


def test_an_address_is_in_a_network_if_all_that_it_may_stand_for_is() -> None:
    known = parse_networks("10.20.0.0/16, fd00::/8,64:ff9b::/96")
    assert is_in("10.20.0.1", known)
    assert is_in("::ffff:10.20.0.1", known)
    assert is_in("fd00::1", known)
    assert is_in("64:ff9b::a14:1", known)
    assert not is_in("64:ff9b::a15:1", known)
    assert not is_in("10.21.0.1", known)
    assert not is_in("10.20.0.1", ())
    with pytest.raises(ValueError, match="host bits"):
        parse_networks("10.20.0.1/16")


def test_localhost_is_an_address_to_listen_on_and_to_call() -> None:
    assert parse_address("localhost:8080") == parse_address("Localhost:8080") == ("127.0.0.1", 8080)
    assert parse_envoy_upstream("localhost:9002") == ("127.0.0.1", 9002, True)
    assert parse_envoy_upstream("extproc:9002") == ("extproc", 9002, False)
    # for engines a name that is resolved: Envoy is told of IP addresses alone
    assert parse_endpoint("localhost:8000") == ("localhost", 8000, False)


def test_advice_is_sought_for_mistakes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # a directory has thousands of addresses, and requests wait while they are parsed
    sought: list[str] = []

    def no_address(text: str, *, takes_names: bool) -> str:
        sought.append(text)
        return f"{text}, {takes_names}"

    monkeypatch.setattr(addresses, "address_hint", no_address)
    assert parse_endpoint("10.0.0.1:8000") == ("10.0.0.1", 8000, True)
    assert parse_endpoint("[fd00::1]:8000") == ("fd00::1", 8000, True)
    assert sought == []
    with pytest.raises(ValueError, match=r"10\.0\.0\.1, True"):
        parse_endpoint("10.0.0.1")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("gateway.example.com:8080", "not on a name: write 0.0.0.0:8080 for all interfaces, or 127.0.0.1:8080"),
        (":8080", "write 0.0.0.0:8080 for all interfaces"),
        ("*:8080", "write 0.0.0.0:8080 for all interfaces"),
        ("http://10.0.0.1:8080/", "leave out scheme and path: 10.0.0.1:8080"),
        ("http://10.0.0.1", "leave out scheme and path: 10.0.0.1:8000"),
        ("10.0.0.1", "it has no port: write 10.0.0.1:8000"),
        ("[::1]", "it has no port: write [::1]:8000"),
        ("::1", "write an IPv6 address in brackets and a port after it: [::1]:8000"),
        ("10.0.0.1:80800", "'80800' is not a port: write one from 1 to 65535"),
        ("10.0.0.1:", "'' is not a port: write one from 1 to 65535"),
        ("10.0.0:8080", "such as 127.0.0.1:8080"),
        ("", "it has no port: write 127.0.0.1:8000"),
    ],
)
def test_what_is_no_address_to_listen_on_is_told_how_to_write_it(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match="is not an address") as caught:
        parse_address(text)
    assert advice in str(caught.value)


@pytest.mark.parametrize("text", ["engine 0:8000", "-a.example:8000", "10.0.0:8000", "a..b:8000"])
def test_a_server_has_an_ip_address_or_a_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"write IP:PORT or NAME:PORT, such as 127\.0\.0\.1:8000"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("listen", "localhost:8080", ""),
        ("listen", "gateway:8080", "spec.listen: 'gateway:8080' is not an address; a process listens on an IP address"),
        ("admin", "localhost:9901", ""),
        ("admin", "envoy:9901", "spec.admin: 'envoy:9901' is not an address; a process listens on an IP address"),
        ("extproc", "localhost:9002", ""),
        ("extproc", "extproc:9002", ""),
        ("extproc", "extproc", "spec.extproc: 'extproc' is not an address; it has no port: write extproc:8000"),
    ],
)
def test_a_gateway_takes_names_where_it_calls_and_not_where_it_listens(field: str, text: str, said: str) -> None:
    content = {"a.yaml": GATEWAY.format(field=field, text=text).encode()}
    if not said:
        assert getattr(load_snapshot(content).gateway, field) == text
        return
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot(content)
    (mistake,) = caught.value.mistakes
    assert said in str(mistake)


@pytest.mark.parametrize(
    ("called", "listens", "meets"),
    [
        ("localhost:9002", "127.0.0.1:9002", True),
        ("localhost:9002", "10.0.0.1:9002", False),
        ("extproc:9002", "0.0.0.0:9002", True),
        ("extproc:9002", "0.0.0.0:9003", False),
    ],
)
def test_whether_a_name_reaches_extproc_is_judged_by_its_port(called: str, listens: str, *, meets: bool) -> None:
    assert (why_extproc_unreachable(GatewayConfigSpec(extproc=called), [listens]) == "") == meets
