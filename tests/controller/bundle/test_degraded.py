# SPDX-License-Identifier: Apache-2.0
"""A certificate that was never good costs its own listener or server, and nobody else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from controller.bundle.sync import Follower
from extproc.api.errors import ConfigInvalid
from extproc.api.load import ConfigDirectory
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

AUTHORITY = Authority()
GATEWAY = """\
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  listeners:
  - {name: plain, address: "127.0.0.1:8080"}
  - name: api
    address: 127.0.0.1:8443
    tls: {certificates: [{certFile: api.crt, keyFile: api.key}]}
"""
SERVER = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: NAME}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}], connection: CONNECTION}
"""
TLS = "{tls: {caFile: NAME.pem, serverName: a.b}}"


def clock() -> float:
    return 0.0


def server(name: str, connection: str = "{}") -> str:
    return SERVER.replace("CONNECTION", connection).replace("NAME", name)


class Written:
    """A directory, the writer that follows it, and what is in its bundle."""

    def __init__(self, folder: Path) -> None:
        self.config, self.out = folder / "config", folder / "out"
        self.config.mkdir()
        self.follower = Follower(ConfigDirectory(self.config), self.out, "/x")

    def put(self, **documents: str) -> None:
        for name, text in documents.items():
            (self.config / f"{name}.yaml").write_text(text)

    def follow(self) -> None:
        self.follower.follow_once(clock)

    def listeners(self) -> set[int]:
        found = json.loads((self.out / "lds.json").read_text())["resources"]
        return {one["address"]["socket_address"]["port_value"] for one in found}

    def engines(self, name: str) -> int:
        (file,) = (self.out / "eds" / "default").glob(f"{name}*.json")
        found = json.loads(file.read_text())["resources"][0].get("endpoints", [])
        return sum(len(one.get("lb_endpoints", [])) for one in found)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_half_a_certificate_keeps_no_other_listener_from_being_served(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    written.put(gateway=GATEWAY, one=server("one"))
    caplog.set_level("INFO")
    pair = AUTHORITY.issue(dns=["a.example"])
    (written.config / "api.crt").write_bytes(pair.cert)
    written.follower.start(clock)
    assert written.listeners() == {8080}
    assert written.follower.secrets.stale == 1
    for _ in range(3):
        written.follow()
    assert caplog.text.count("are not served until they are good") == 1
    assert "api.key: No such file or directory" in caplog.text
    (written.config / "api.key").write_bytes(pair.key)
    written.follow()
    assert written.listeners() == {8080, 8443}
    assert written.follower.secrets.stale == 0
    assert "all certificates and keys are good" in caplog.text


def test_a_server_whose_authority_is_missing_has_no_endpoints_and_no_plain_cluster_has_them(written: Written) -> None:
    written.put(gateway=GATEWAY.partition("  - name: api")[0], one=server("one", TLS), two=server("two"))
    written.follower.start(clock)
    assert (written.engines("one"), written.engines("two")) == (0, 1)
    (written.config / "one.pem").write_bytes(AUTHORITY.cert)
    written.follow()
    assert (written.engines("one"), written.engines("two")) == (1, 1)
    assert "transport_socket" in (written.out / "cds.json").read_text()


def test_without_any_good_listener_nothing_is_written(written: Written) -> None:
    """No listener at all would be a plain one on the default address."""
    plain = '  - {name: plain, address: "127.0.0.1:8080"}\n'
    written.put(gateway=GATEWAY.replace(plain, ""), one=server("one"))
    with pytest.raises(ConfigInvalid, match=r"api\.crt"):
        written.follower.start(clock)
    assert not written.out.exists()


def test_other_changes_are_taken_while_a_certificate_is_waited_for(written: Written) -> None:
    written.put(gateway=GATEWAY, one=server("one"))
    written.follower.start(clock)
    written.put(two=server("two"))
    written.follow()
    assert written.follower.is_valid
    assert written.engines("two") == 1


def test_what_is_served_is_not_replaced_by_what_cannot_be(written: Written) -> None:
    AUTHORITY.issue(dns=["a.example"]).write(written.config, "api")
    written.put(gateway=GATEWAY, one=server("one"))
    written.follower.start(clock)
    before = (written.out / "lds.json").read_text()
    written.put(gateway=GATEWAY.replace("api.crt", "new.crt"))
    written.follow()
    assert not written.follower.is_valid
    assert (written.out / "lds.json").read_text() == before
