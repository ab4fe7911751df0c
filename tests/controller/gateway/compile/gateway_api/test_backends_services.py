# SPDX-License-Identifier: Apache-2.0
"""EndpointSlices as they are kept: smaller, and with all that counts."""

from __future__ import annotations

import pytest

from controller.gateway.compile.gateway_api.backends import EndpointSlice, parse_endpoint_slice, trim_endpoint_slice
from tests.gateway_objects import Object, endpoint_slice

ENDING = {"ready": False, "serving": True, "terminating": True}


@pytest.mark.parametrize("conditions", [{"ready": True}, {}, {"ready": False}, ENDING])
def test_a_trimmed_slice_means_the_same(conditions: Object) -> None:
    whole = endpoint_slice("app", "10.1.0.1", "fd00::1", conditions=conditions)
    whole["endpoints"][0] |= {"nodeName": "node-0", "targetRef": {"kind": "Pod", "name": "app-1"}, "zone": "a"}
    whole["metadata"]["managedFields"] = [{"manager": "endpointslice-controller"}]
    slim = trim_endpoint_slice(whole)
    assert parse_endpoint_slice(slim) == parse_endpoint_slice(whole)
    assert "managedFields" not in slim["metadata"]
    assert "zone" not in slim["endpoints"][0]


def test_slices_of_nobody_and_of_host_names_are_left_out() -> None:
    orphan = endpoint_slice("app", "10.1.0.1")
    orphan["metadata"]["labels"] = {}
    assert parse_endpoint_slice(orphan) is None
    assert parse_endpoint_slice({**endpoint_slice("app", "a.example.org"), "addressType": "FQDN"}) is None
    found = parse_endpoint_slice(endpoint_slice("app", "10.1.0.1; rm", "10.1.0.2"))
    assert found == EndpointSlice("default/app", {"http": 3000}, ("10.1.0.2",), ())


@pytest.mark.parametrize("port", [None, 0, -1, 65536, 2**31 - 1])
def test_what_is_no_port_is_left_out(port: int | None) -> None:
    """One slice of one namespace must not make the whole directory invalid."""
    odd = endpoint_slice("app", "10.1.0.1")
    odd["ports"] = [{"name": "odd", "port": port}, {"name": "http", "port": 3000}]
    assert parse_endpoint_slice(odd) == EndpointSlice("default/app", {"http": 3000}, ("10.1.0.1",), ())
