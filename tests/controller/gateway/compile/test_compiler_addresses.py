# SPDX-License-Identifier: Apache-2.0
"""No ModelServer of a cluster reaches the gateway's own pod, metadata services, or networks that nobody has named."""

from __future__ import annotations

import json

import pytest

from controller.gateway.compile.compiler import Compiler
from extproc.api.addresses import parse_networks
from tests.kube_objects import resource


def said_of(networks: str | None = None, **endpoint: str) -> tuple[str, str]:
    """Whether a ModelServer that lists ``endpoint`` is accepted, and what is said. ``networks``: those that may be
    listed, empty for none; None: all.
    """
    compiler = Compiler(networks=None if networks is None else parse_networks(networks) if networks else ())
    spec = {"model": "m", "endpoints": [{"address": "10.0.0.1:8000"}, {"address": "10.0.0.2:8000"} | endpoint]}
    compiler.update_object("ModelServer", "default/a", resource("ModelServer", "a", spec))
    outcome = compiler.compile()
    accepted = next(one for one in outcome.statuses["ModelServer", "default/a"].conditions if one.type == "Accepted")
    assert ("modelserver.default.a.json" in outcome.files) == (accepted.status == "True")
    return accepted.status, accepted.message


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:9901",
        "127.1.2.3:9901",
        "[::1]:9901",
        "[::ffff:127.0.0.1]:9901",
        "[::ffff:a9fe:a9fe]:80",
        "0.0.0.0:9901",
        "[::]:9901",
        "169.254.169.254:80",
        "[fe80::1]:80",
        "224.0.0.1:80",
        "localhost:9901",
        "LocalHost:9901",
        "a.localhost:9901",
        "[fd00:ec2::254]:80",
        "100.100.100.200:80",
        "192.0.0.192:80",
        "168.63.129.16:80",
        "[64:ff9b::a9fe:a9fe]:80",
        "[64:ff9b:1::a83f:8110]:80",
        "[2002:a9fe:a9fe::1]:80",
    ],
)
def test_addresses_of_the_gateways_own_pod_and_node_and_of_metadata_services_are_refused(address: str) -> None:
    status, message = said_of(address=address)
    assert status == "False"
    assert message.startswith(f"endpoints: {address} is an address of the gateway's own pod or node")


@pytest.mark.parametrize("field", ["kvEvents", "kvReplay"])
def test_so_are_those_of_kv_events(field: str) -> None:
    assert said_of(**{field: "127.0.0.1:5557"})[0] == "False"


@pytest.mark.parametrize("address", ["10.0.0.3:80", "[fd00::1]:80", "engine.example.com:80", "localhost.example:80"])
def test_other_addresses_are_taken(address: str) -> None:
    assert said_of(address=address)[0] == "True"


@pytest.mark.parametrize(
    ("networks", "address", "accepted"),
    [
        ("10.0.0.0/24", "10.0.0.3:80", "True"),
        ("10.0.0.0/24", "engine.example.com:80", "True"),
        ("10.0.0.0/24", "10.0.1.3:80", "False"),
        ("10.0.0.0/24,10.0.1.3/32", "10.0.1.3:80", "True"),
        ("0.0.0.0/0", "169.254.169.254:80", "False"),
        ("", "10.0.0.3:80", "False"),
        ("", "engine.example.com:80", "False"),
    ],
)
def test_only_addresses_of_the_networks_that_an_operator_names_are_taken(
    networks: str, address: str, accepted: str
) -> None:
    assert said_of(networks, address=address)[0] == accepted


def test_who_lists_another_address_is_told_what_may_be_listed_and_by_whom() -> None:
    message = said_of("10.0.0.0/24,fd00::/8", address="10.9.0.1:8000")[1]
    assert message == (
        "endpoints: 10.9.0.1:8000 is not allowed: objects of this cluster may list endpoints in these networks alone: "
        "10.0.0.0/24, fd00::/8; select pods by labels, or ask who runs the gateway for --endpoint-networks"
    )


def test_the_networks_travel_with_the_document_for_names_that_are_resolved_later() -> None:
    compiler = Compiler(networks=parse_networks("10.0.0.0/24,fd00::/8"))
    listed = {"model": "m", "endpoints": [{"address": "engine.example:80"}]}
    compiler.update_object("ModelServer", "default/a", resource("ModelServer", "a", listed))
    metadata = json.loads(compiler.compile().files["modelserver.default.a.json"])["metadata"]
    assert metadata["annotations"]["attache.dev/endpoint-networks"] == "10.0.0.0/24,fd00::/8"


def provider_said(host: str, networks: str | None = None) -> tuple[str, str]:
    """The same of one whose provider is at ``host``."""
    compiler = Compiler(networks=None if networks is None else parse_networks(networks) if networks else ())
    provider = {"host": host, "scheme": "http", "port": 80}
    spec = {"model": "m", "provider": provider, "apis": ["Messages"]}
    compiler.update_object("ModelServer", "default/a", resource("ModelServer", "a", spec))
    outcome = compiler.compile()
    accepted = next(one for one in outcome.statuses["ModelServer", "default/a"].conditions if one.type == "Accepted")
    document = outcome.files.get("modelserver.default.a.json")
    assert (document is not None) == (accepted.status == "True")
    if document is not None:
        assert json.loads(document)["spec"]["provider"] == provider
        limited = {"attache.dev/endpoint-networks": networks} if networks else {}
        assert json.loads(document)["metadata"]["annotations"] == {"attache.dev/of-cluster": "true", **limited}
    return accepted.status, accepted.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "169.254.169.254", "a.localhost", "::1"])
def test_a_provider_is_not_on_the_gateways_own_pod_or_node(host: str) -> None:
    status, message = provider_said(host)
    assert status == "False"
    assert message.startswith("provider: ")
    assert "is an address of the gateway's own pod or node" in message


def test_a_provider_is_in_the_networks_that_may_be_listed() -> None:
    assert provider_said("api.example.com", "192.0.2.0/24")[0] == "True"
    assert provider_said("192.0.2.1", "192.0.2.0/24")[0] == "True"
    assert provider_said("api.example.com")[0] == "True"
    for host, networks in (("192.0.3.1", "192.0.2.0/24"), ("api.example.com", "")):
        status, message = provider_said(host, networks)
        assert status == "False"
        assert message.startswith(f"provider: {host}:80 is not allowed")
