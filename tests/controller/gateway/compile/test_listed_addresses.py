# SPDX-License-Identifier: Apache-2.0
"""No ModelServer of a cluster reaches what listens for the gateway's own pod alone."""

from __future__ import annotations

import pytest

from controller.gateway.compile.compiler import Compiler
from tests.kube_objects import resource


def said_of(**endpoint: str) -> tuple[str, str]:
    """Whether a ModelServer that lists ``endpoint`` is accepted, and what is said."""
    compiler = Compiler()
    spec = {"model": "m", "endpoints": [{"address": "10.0.0.1:8000"}, {"address": "10.0.0.2:8000"} | endpoint]}
    compiler.put("ModelServer", "default/a", resource("ModelServer", "a", spec))
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
    ],
)
def test_addresses_of_the_gateways_own_pod_and_node_are_refused(address: str) -> None:
    status, message = said_of(address=address)
    assert status == "False"
    assert message.startswith(f"endpoints: {address} is an address of the gateway's own pod or node")


@pytest.mark.parametrize("field", ["kvEvents", "kvReplay"])
def test_so_are_those_of_kv_events(field: str) -> None:
    assert said_of(**{field: "127.0.0.1:5557"})[0] == "False"


@pytest.mark.parametrize("address", ["10.0.0.3:80", "[fd00::1]:80", "engine.example.com:80", "localhost.example:80"])
def test_other_addresses_are_taken(address: str) -> None:
    assert said_of(address=address)[0] == "True"
