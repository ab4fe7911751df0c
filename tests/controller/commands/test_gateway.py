# SPDX-License-Identifier: Apache-2.0
"""The options of attache gateway: mistakes are told before a cluster is looked for."""

from __future__ import annotations

import pytest

from controller.commands import gateway as gateway_command
from controller.commands.gateway import endpoint_networks
from extproc.api.addresses import parse_networks
from extproc.api.picker_config import accept_any_plugins


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gateway-config", "gateway"], "--gateway-config: write NAMESPACE/NAME"),
        (["--pool", "llama"], "--pool: write NAMESPACE/NAME"),
        (["--pool", "/llama"], "--pool: write NAMESPACE/NAME"),
        (["--pool", "a/b", "--namespace", "a"], "--namespace does not go with --pool"),
        (["--pool", "a/b", "--gateway-config", "a/b"], "--gateway-config does not go with --pool"),
        (["--picker-config", "a"], "--picker-config needs --pool"),
        (["--pool", "a/b", "--picker-config", "a", "--picker-config-file", "b"], "write one of them"),
        (["--endpoint-networks", "10.0.0.1/8"], "argument --endpoint-networks: 10.0.0.1/8 has host bits set"),
        (["--endpoint-networks", "pods"], "argument --endpoint-networks: 'pods' does not appear to be an IPv4 or IPv6"),
        (["--grace", "10"], "argument --grace: 10 has no unit; write 10s"),
        (["--pool", "a/b", "--grace", "0s"], "--grace does not go with --pool"),
        (["--pool", "a/b", "--pool-group", "x"], "--pool-group: write inference.networking.k8s.io or"),
    ],
)
def test_options_that_do_not_fit_are_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway_command.main(["--config", "unused", *words], "attache gateway", accept_any_plugins)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_objects_of_many_namespaces_list_no_endpoints_unless_an_operator_names_networks() -> None:
    named = parse_networks("10.0.0.0/8")
    assert endpoint_networks(None, None) == ()
    assert endpoint_networks(None, "team") is None
    assert endpoint_networks(named, None) == endpoint_networks(named, "team") == named
