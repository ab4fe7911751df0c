# SPDX-License-Identifier: Apache-2.0
"""Where pods are in the network: addresses on loopback and on a bridge, and the network of a whole cluster."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.cluster.netns import NoNamespace, gateway_range, network_setup_commands, pod_range, unshare_command
from bench.cluster.node.pod_network import BridgedNetwork, LoopbackNetwork, NoAddressLeft
from bench.stack.orphan_reaper import ProcessGuard
from tests.programs import not_tested


def test_on_loopback_each_pod_has_an_address_and_shares_ports_with_all() -> None:
    network = LoopbackNetwork()
    try:
        first, second = network.create_sandbox(host_network=False), network.create_sandbox(host_network=True)
        assert first.shares_ports
        assert first.address != second.address
        assert {one.address.partition(".")[0] for one in (first, second)} == {"127"}
    finally:
        network.close()


def test_on_a_bridge_a_pod_has_an_address_of_the_range_or_the_nodes_own() -> None:
    with ProcessGuard() as guard:
        network = BridgedNetwork("10.88.0.0/16", guard)
        assert network.host_ip == "10.88.0.1"
        pod, host = network.create_sandbox(host_network=False), network.create_sandbox(host_network=True)
        assert (pod.address, host.address) == ("10.88.0.2", "10.88.0.1")
        assert not pod.shares_ports
        assert not host.shares_ports


def test_no_pod_on_a_bridge_has_an_address_of_gateways_or_one_that_looks_like_a_mistake() -> None:
    with ProcessGuard() as guard:
        network = BridgedNetwork("10.88.0.0/22", guard)
        given = [network.allocate() for _ in range(3 * 254 - 1)]
        assert {one.split(".")[2] for one in given} == {"0", "1", "2"}
        assert not {one.split(".")[3] for one in given} & {"0", "255"}
        assert gateway_range("10.88.0.0/22") == "10.88.3.0/24"
        with pytest.raises(NoAddressLeft):
            network.allocate()
        network.release(given[5])
        assert network.allocate() == given[5]


def test_a_pod_is_linked_to_the_bridge_and_leaves_by_it() -> None:
    with ProcessGuard() as guard:
        network = BridgedNetwork("10.88.0.0/16", guard)
    assert network.link_commands("10.88.1.2", 77) == [
        "link add pod258 type veth peer name eth0 netns 77",
        "link set pod258 master attache0 up",
    ]
    assert network.pod_commands("10.88.1.2") == [
        "addr add 10.88.1.2/16 dev eth0",
        "link set eth0 up",
        "route add default via 10.88.0.1",
    ]


def test_gateways_have_the_last_addresses_of_the_range() -> None:
    assert "route add local 10.88.255.0/24 dev lo" in network_setup_commands("10.88.0.0/16")
    assert "addr add 10.88.0.1/16 dev attache0" in network_setup_commands("10.88.0.0/16")
    assert pod_range({}) is None
    assert pod_range({"ATTACHE_POD_RANGE": "10.88.0.0/16"}) == "10.88.0.0/16"


def test_a_command_in_the_network_sees_its_range_and_nothing_else() -> None:
    try:
        unshare_command()
    except NoNamespace as reason:
        not_tested("NAMESPACES", str(reason))
    look = "import os, socket; print(os.environ['ATTACHE_POD_RANGE'], [name for _, name in socket.if_nameindex()])"
    words = [sys.executable, "-m", "bench.cluster.netns", "--", sys.executable, "-c", look]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "Unknown device type" in done.stderr:
        not_tested("NAMESPACES", "this kernel has no bridges; load its module `bridge`")
    assert done.stdout.strip() == "10.88.0.0/16 ['lo', 'attache0']", done.stderr
