# SPDX-License-Identifier: Apache-2.0
"""Host names of engines: which addresses are used when answers change, are partial, or stop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from extproc.api import dns_resolver
from extproc.api.addresses import HostPort, parse_endpoint
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import ConfigDirectory, SnapshotLoader, load_snapshot
from extproc.api.dns_resolver import (
    AddressHoldTimes,
    DnsCache,
    ResolvedDirectory,
    host_names_in,
    with_resolved_addresses,
)
from extproc.cli.common import resolve_host
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot

CONFIG = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  endpoints:
  - {address: "10.0.0.1:8000"}
  - {address: "Engines.example:8000", price: 2, labels: {zone: a}}
"""


def known(*, keep_s: float = 10.0, settle_s: float = 0.0) -> DnsCache:
    return DnsCache(AddressHoldTimes(keep_s=keep_s, settle_s=settle_s))


def test_an_address_stays_for_a_while_after_it_was_answered_last() -> None:
    names = known(keep_s=10.0)
    names.add_resolution("a", ["10.0.0.1", "10.0.0.2"], 0.0)
    names.add_resolution("a", ["10.0.0.2"], 2.0)
    assert names.usable_addresses(2.0) == {"a": ("10.0.0.1", "10.0.0.2")}
    names.add_resolution("a", ["10.0.0.2"], 10.5)
    assert names.usable_addresses(10.5) == {"a": ("10.0.0.2",)}


def test_a_name_that_no_longer_resolves_keeps_its_addresses() -> None:
    names = known(keep_s=10.0)
    names.add_resolution("a", ["10.0.0.1"], 0.0)
    assert names.usable_addresses(10_000.0) == {"a": ("10.0.0.1",)}
    names.add_resolution("a", ["10.0.0.2"], 10_000.0)
    assert names.usable_addresses(10_000.0) == {"a": ("10.0.0.2",)}


def test_a_new_address_waits_while_another_one_serves() -> None:
    names = known(settle_s=4.0)
    names.add_resolution("a", ["10.0.0.1"], 0.0)
    assert names.usable_addresses(0.0) == {"a": ("10.0.0.1",)}
    names.add_resolution("a", ["10.0.0.1", "10.0.0.2"], 5.0)
    assert names.usable_addresses(5.0) == {"a": ("10.0.0.1",)}
    assert names.usable_addresses(9.0) == {"a": ("10.0.0.1", "10.0.0.2")}


def test_a_new_address_does_not_wait_where_it_is_the_only_one_answered() -> None:
    names = known(settle_s=4.0)
    names.add_resolution("a", ["10.0.0.1"], 0.0)
    names.add_resolution("a", ["10.0.0.2"], 5.0)
    assert names.usable_addresses(5.0) == {"a": ("10.0.0.1", "10.0.0.2")}


def test_names_that_nobody_asks_for_are_forgotten() -> None:
    names = known()
    names.add_resolution("a", ["10.0.0.1"], 0.0)
    names.add_resolution("b", ["10.0.0.2"], 0.0)
    names.forget_all_but(["b"])
    assert names.usable_addresses(0.0) == {"b": ("10.0.0.2",)}


def all_names(snapshot: Snapshot) -> set[str]:
    return {name for _, names in host_names_in(snapshot).values() for name in names}


def test_each_address_of_a_name_is_an_endpoint_with_what_is_said_of_the_name() -> None:
    snapshot = load_snapshot({"a.yaml": CONFIG.encode()})
    assert all_names(snapshot) == {"engines.example"}
    resolved = with_resolved_addresses(snapshot, {"engines.example": ("10.0.0.1", "10.0.0.2", "fd00::1")})
    endpoints = resolved.servers[0].spec.endpoints
    # the first is listed by address, too
    assert [one.address for one in endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert [one.price for one in endpoints] == [1.0, 2.0, 2.0]
    assert endpoints[1].labels == {"zone": "a"}
    assert resolved.version != snapshot.version
    assert len(with_resolved_addresses(snapshot, {}).servers[0].spec.endpoints) == 1


@pytest.mark.parametrize(
    ("tls", "expected"),
    [
        ("", None),
        ("  connection: {tls: {caFile: a}}\n", "engines.example"),
        ("  connection: {tls: {caFile: a, serverName: all.example}}\n", None),
    ],
)
def test_tls_asks_for_the_name_unless_another_is_configured(tls: str, expected: str | None) -> None:
    text = CONFIG.replace('  - {address: "10.0.0.1:8000"}\n', "") + tls
    resolved = with_resolved_addresses(load_snapshot({"a.yaml": text.encode()}), {"engines.example": ("10.0.0.2",)})
    assert resolved.servers[0].spec.endpoints[0].server_name == expected


def test_only_servers_that_have_changed_are_searched_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, other = SnapshotLoader(), CONFIG.replace("name: llama", "name: other")
    known = host_names_in(loader.load({"a.yaml": CONFIG.encode(), "b.yaml": other.encode()}))
    parsed: list[str] = []

    def parse(text: str) -> HostPort:
        parsed.append(text)
        return parse_endpoint(text)

    monkeypatch.setattr(dns_resolver, "parse_endpoint", parse)
    changed = loader.load(
        {"a.yaml": CONFIG.encode(), "b.yaml": other.replace("Engines.example", "more.example").encode()}
    )
    again = host_names_in(changed, known)
    assert {name for _, names in again.values() for name in names} == {"engines.example", "more.example"}
    assert sorted(parsed) == ["10.0.0.1:8000", "more.example:8000"]


WITH_EVENTS = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: m
  kvEvents: {port: 5557}
  endpoints:
  - {address: "10.0.0.1:8000", kvEvents: "events.example:5557", kvReplay: "localhost:5558"}
  - {address: "engines.example:8000", kvEvents: "engines.example:6000"}
---
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {name: web}
spec: {endpoints: ["web.example:80", "localhost:81", "10.0.0.9:80"]}
"""


def test_names_of_kv_events_and_backends_are_resolved_too() -> None:
    snapshot = load_snapshot({"a.yaml": WITH_EVENTS.encode()})
    assert all_names(snapshot) == {"events.example", "localhost", "engines.example", "web.example"}
    answers = {
        "events.example": ("10.0.0.5",),
        "localhost": ("127.0.0.1",),
        "engines.example": ("10.0.0.2", "10.0.0.3"),
        "web.example": ("10.0.0.8", "10.0.0.9"),
    }
    resolved = with_resolved_addresses(snapshot, answers)
    # an engine publishes from its own address where its name has several
    assert [(one.address, one.kv_events, one.kv_replay) for one in resolved.servers[0].spec.endpoints] == [
        ("10.0.0.1:8000", "10.0.0.5:5557", "127.0.0.1:5558"),
        ("10.0.0.2:8000", "10.0.0.2:6000", None),
        ("10.0.0.3:8000", "10.0.0.3:6000", None),
    ]
    assert resolved.backends[0].spec.endpoints == ("10.0.0.8:80", "10.0.0.9:80", "127.0.0.1:81")


def test_an_engine_whose_events_have_a_name_that_does_not_resolve_is_used_without_them() -> None:
    resolved = with_resolved_addresses(load_snapshot({"a.yaml": WITH_EVENTS.encode()}), {})
    assert [(one.address, one.kv_events) for one in resolved.servers[0].spec.endpoints] == [
        ("10.0.0.1:8000", "events.example:5557")
    ]
    assert resolved.backends[0].spec.endpoints == ("10.0.0.9:80",)


class Names:
    """A name server."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.answers = dict(answers)
        self.now_s = 0.0
        self.asked = threading.Event()

    def lookup(self, name: str) -> Sequence[str]:
        self.asked.set()
        if name not in self.answers:
            raise OSError("Name or service not known")
        return self.answers[name]

    def clock(self) -> float:
        return self.now_s


def directory(path: Path, names: Names) -> ResolvedDirectory:
    (path / "a.yaml").write_text(CONFIG)
    patience = AddressHoldTimes(keep_s=10.0, settle_s=0.0)
    return ResolvedDirectory(ConfigDirectory(path), patience, lookup=names.lookup, clock=names.clock)


async def test_a_directory_changes_with_the_addresses_of_its_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(**{"engines.example": ["10.0.0.2"]})
    followed = directory(tmp_path, names)
    first = followed.read()
    assert [one.address for one in first.servers[0].spec.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert not followed.has_changed()
    names.answers["engines.example"], names.now_s = ["10.0.0.3"], 20.0
    await eventually(followed.has_changed)
    second = followed.read()
    assert [one.address for one in second.servers[0].spec.endpoints] == ["10.0.0.1:8000", "10.0.0.3:8000"]
    assert second.version != first.version
    names.answers.clear()
    names.now_s = 40.0
    await eventually(lambda: "its last addresses stay: 10.0.0.3" in caplog.text)
    names.now_s = 60.0
    assert not followed.has_changed()
    assert followed.read() == second


async def test_a_directory_with_a_mistake_is_not_read_again_for_a_name(tmp_path: Path) -> None:
    names = Names(**{"engines.example": ["10.0.0.2"]})
    followed = directory(tmp_path, names)
    followed.read()
    (tmp_path / "a.yaml").write_text("kind: nothing")
    assert followed.has_changed()
    with pytest.raises(ConfigInvalid):
        followed.read()
    assert not followed.has_changed()


def test_without_names_nothing_is_looked_up(tmp_path: Path) -> None:
    names = Names()
    followed = directory(tmp_path, names)
    (tmp_path / "a.yaml").write_text(CONFIG.replace("Engines.example", "10.0.0.2"))
    plain = ConfigDirectory(tmp_path).read()
    assert followed.read() == plain
    assert not names.asked.is_set()


def test_addresses_of_version_4_are_preferred() -> None:
    assert resolve_host("localhost") == ["127.0.0.1"]


@pytest.mark.parametrize("own", ["127.0.0.1", "::1", "169.254.169.254", "::ffff:127.0.0.1", "::"])
def test_a_name_of_a_clusters_server_leads_to_no_address_of_the_gateways_own(own: str) -> None:
    """Its author may own the name: Envoy's admin interface and a cloud's metadata are none of theirs."""
    answers = {"engines.example": (own, "10.0.0.2")}
    by_hand = load_snapshot({"a.yaml": CONFIG.encode()})
    assert len(with_resolved_addresses(by_hand, answers).servers[0].spec.endpoints) == 3
    compiled = CONFIG.replace("{name: llama}", '{name: llama, annotations: {attache.dev/of-cluster: "true"}}')
    resolved = with_resolved_addresses(load_snapshot({"a.yaml": compiled.encode()}), answers)
    assert [one.address for one in resolved.servers[0].spec.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_a_name_of_a_clusters_server_leads_to_addresses_of_the_networks_that_may_be_listed_alone() -> None:
    answers = {"engines.example": ("10.9.0.1", "10.0.0.2")}
    annotations = 'annotations: {attache.dev/of-cluster: "true", attache.dev/endpoint-networks: "10.0.0.0/24,fd00::/8"}'
    compiled = CONFIG.replace("{name: llama}", f"{{name: llama, {annotations}}}")
    resolved = with_resolved_addresses(load_snapshot({"a.yaml": compiled.encode()}), answers)
    assert [one.address for one in resolved.servers[0].spec.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]
