# SPDX-License-Identifier: Apache-2.0
"""What Envoy says of itself, and what is said about the bundle then."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import math
import threading
import urllib.request
from typing import TYPE_CHECKING

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from bench.stack.loopback_stack import documents
from bench.stack.processes import free_ports
from controller.bundle.acknowledgements import (
    PATIENCE_S,
    AcknowledgementPoller,
    bundle_versions,
    file_version,
    subscription_names,
)
from controller.bundle.envoy_admin_client import EnvoyState, read_envoy_state
from controller.bundle.metrics import BundleMetrics, serve_metrics
from controller.bundle.sync import BundleSync, write_bundle_once
from controller.commands.bundle import main
from controller.gateway.statuses import read_report
from extproc.api.config_loader import ConfigDirectory, load_snapshot
from extproc.api.status_page_contents import ConfigReport
from extproc.listen_sockets import ListenFailed

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot

CLUSTERS = "cluster_manager.cds"
ROUTES = "http.attache.rds.attache"
ENGINES = "cluster.server/default/llama"


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """Its bundle is in ``tmp_path``."""
    found = load_snapshot({"a.yaml": documents(["127.0.0.1:8000"], gateway={}).encode()})
    write_bundle_once(found, tmp_path, str(tmp_path))
    return found


class Envoys:
    """What answers at each admin address."""

    def __init__(self) -> None:
        self.states: dict[str, EnvoyState] = {}
        self.asked: list[str] = []

    def read(self, address: str) -> EnvoyState | None:
        self.asked.append(address)
        return self.states.get(address)


def taking(snapshot: Snapshot, out: Path) -> EnvoyState:
    versions, subscriptions = bundle_versions(out, snapshot), subscription_names(snapshot)
    used = {subscriptions[name]: version for name, version in versions.items()}
    return EnvoyState(bootstrap=f"{out}/bootstrap.json", versions=used, refused={})


ADMIN = "127.0.0.1:9901"


def started(envoys: Envoys, snapshot: Snapshot, out: Path) -> AcknowledgementPoller:
    acknowledgements = AcknowledgementPoller(envoys.read, f"{out}/bootstrap.json")
    acknowledgements.expect(snapshot, out, 100.0)
    return acknowledgements


def test_an_envoy_that_uses_all_files_is_nothing_to_speak_of(
    snapshot: Snapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envoys = Envoys()
    envoys.states[ADMIN] = taking(snapshot, tmp_path)
    assert started(envoys, snapshot, tmp_path).poll(101.0).status == "Taken"
    assert not caplog.records


def test_a_bundle_that_nobody_reads_is_said_once_after_a_while(
    snapshot: Snapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envoys = Envoys()
    acknowledgements = started(envoys, snapshot, tmp_path)
    assert [acknowledgements.poll(at).status for at in (101.0, 110.0, 129.0)] == ["NoEnvoy"] * 3
    assert not caplog.records
    for at in (131.0, 142.0, 153.0):
        acknowledgements.poll(at)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"no Envoy answers at its admin address {ADMIN}" in record.getMessage()


def test_an_envoy_of_another_bundle_is_said(
    snapshot: Snapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envoys = Envoys()
    state = taking(snapshot, tmp_path)
    others = dict.fromkeys(state.versions, "another")
    envoys.states[ADMIN] = EnvoyState(bootstrap="/other/bootstrap.json", versions=others, refused={})
    acknowledgements = started(envoys, snapshot, tmp_path)
    acknowledgements.poll(101.0)
    assert acknowledgements.poll(131.0).status == "OtherBundle"
    assert "started with /other/bootstrap.json" in caplog.text


def test_a_refused_file_is_said_at_once_with_the_reason_and_when_it_is_well_again(
    snapshot: Snapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    envoys, good = Envoys(), taking(snapshot, tmp_path)
    refused = EnvoyState(
        bootstrap=good.bootstrap,
        versions={**good.versions, CLUSTERS: "the one before"},
        refused={CLUSTERS: 1},
        details=("it does not please",),
    )
    envoys.states[ADMIN] = refused
    acknowledgements = started(envoys, snapshot, tmp_path)
    verdict = acknowledgements.poll(101.0)
    assert (verdict.status, verdict.files) == ("Refused", ("cds.json",))
    acknowledgements.poll(120.0)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "Envoy refused cds.json and keeps what it had: it does not please" in record.getMessage()

    # it stays refused while other files change
    moved = load_snapshot({"a.yaml": documents(["127.0.0.1:8001"], gateway={}).encode()})
    write_bundle_once(moved, tmp_path, str(tmp_path))
    acknowledgements.expect(moved, tmp_path, 200.0)
    verdict = acknowledgements.poll(201.0)
    assert (verdict.status, verdict.files) == ("Refused", ("cds.json",))

    # the next one is not refused because the last one was
    policy = {"trafficPolicy": {"connectTimeout": "2s"}}
    other = load_snapshot({"a.yaml": documents(["127.0.0.1:8000"], gateway={}, more=policy).encode()})
    write_bundle_once(other, tmp_path, str(tmp_path))
    acknowledgements.expect(other, tmp_path, 201.0)
    assert acknowledgements.poll(202.0).status == "Behind"
    good = taking(other, tmp_path)
    envoys.states[ADMIN] = msgspec.structs.replace(good, refused={CLUSTERS: 1})
    assert acknowledgements.poll(203.0).status == "Taken"
    assert caplog.records[-1].getMessage() == "Envoy uses the bundle as it is"


def test_a_file_that_is_refused_while_others_are_still_written_is_refused(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys, good = Envoys(), taking(snapshot, tmp_path)
    envoys.states[ADMIN] = good
    acknowledgements = started(envoys, snapshot, tmp_path)
    assert acknowledgements.poll(101.0).status == "Taken"
    acknowledgements.on_write_started()
    moved = load_snapshot({"a.yaml": documents(["127.0.0.1:8000"], gateway={"listen": "127.0.0.1:1"}).encode()})
    write_bundle_once(moved, tmp_path, str(tmp_path))
    after = taking(moved, tmp_path)
    versions = {**after.versions, "listener_manager.lds": good.versions["listener_manager.lds"]}
    envoys.states[ADMIN] = msgspec.structs.replace(after, versions=versions, refused={"listener_manager.lds": 1})
    acknowledgements.poll(112.0)
    acknowledgements.expect(moved, tmp_path, 113.0)
    verdict = acknowledgements.poll(114.0)
    assert (verdict.status, verdict.files) == ("Refused", ("lds.json",))


def test_a_file_that_is_not_taken_up_in_time_is_said(
    snapshot: Snapshot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    envoys, good = Envoys(), taking(snapshot, tmp_path)
    envoys.states[ADMIN] = good
    acknowledgements = started(envoys, snapshot, tmp_path)
    acknowledgements.poll(101.0)
    behind = {**good.versions, "http.attache.rds.attache": "the one before"}
    envoys.states[ADMIN] = EnvoyState(bootstrap=good.bootstrap, versions=behind, refused={})
    acknowledgements.expect(snapshot, tmp_path, 200.0)
    assert acknowledgements.poll(201.0).status == "Behind"
    assert not caplog.records
    acknowledgements.poll(200.5 + PATIENCE_S)
    assert "does not use the newest rds.json" in caplog.text


def test_until_envoy_is_restarted_its_former_admin_address_is_asked_too(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys = Envoys()
    envoys.states[ADMIN] = taking(snapshot, tmp_path)
    acknowledgements = started(envoys, snapshot, tmp_path)
    acknowledgements.poll(101.0)
    moved = msgspec.structs.replace(snapshot, gateway=msgspec.structs.replace(snapshot.gateway, admin="127.0.0.1:9999"))
    acknowledgements.expect(moved, tmp_path, 200.0)
    assert acknowledgements.poll(201.0).status == "Taken"
    assert envoys.asked[-2:] == ["127.0.0.1:9999", ADMIN]


def test_who_answers_and_is_no_envoy_is_none() -> None:
    assert read_envoy_state("127.0.0.1:1") is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"command_line_options":' + b"[" * 100_000,
        b'{"x":' + b"[" * 100_000,
        b'{"command_line_options":{"config_path":"\xff"},"refused":"\xff"}',
    ],
)
def test_who_answers_what_nobody_can_read_is_none(body: bytes) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert read_envoy_state(f"127.0.0.1:{server.server_port}") is None
            assert read_report(f"127.0.0.1:{server.server_port}") is None
        finally:
            server.shutdown()
            thread.join()


def test_metrics_say_what_envoy_does(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys = Envoys()
    good = taking(snapshot, tmp_path)
    envoys.states[ADMIN] = msgspec.structs.replace(good, versions={}, refused={CLUSTERS: 2})
    acknowledgements = started(envoys, snapshot, tmp_path)
    registry = CollectorRegistry()
    registry.register(BundleMetrics(BundleSync(ConfigDirectory(tmp_path), tmp_path, str(tmp_path), acknowledgements)))
    acknowledgements.poll(101.0)
    page = generate_latest(registry).decode()
    assert 'attache_bundle_acknowledgement{status="Refused"} 1.0' in page
    assert 'attache_bundle_acknowledgement{status="Taken"} 0.0' in page
    assert "attache_bundle_refused_files 1.0" in page
    assert "attache_bundle_config_valid 1.0" in page


def test_the_report_says_which_files_envoy_uses(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys, good = Envoys(), taking(snapshot, tmp_path)
    acknowledgements = started(envoys, snapshot, tmp_path)
    assert "not been asked" in acknowledgements.report.waiting
    acknowledgements.poll(101.0)
    assert acknowledgements.report.files == {}
    assert "no Envoy answers" in acknowledgements.report.waiting
    envoys.states[ADMIN] = good
    acknowledgements.poll(140.0)
    assert acknowledgements.report == ConfigReport(files=snapshot.digests)
    newer = msgspec.structs.replace(snapshot, digests={"a.yaml": "newer"})
    acknowledgements.expect(newer, tmp_path, 200.0)
    envoys.states[ADMIN] = msgspec.structs.replace(
        good, versions={**good.versions, CLUSTERS: "the one before"}, refused={CLUSTERS: 1}
    )
    acknowledgements.poll(201.0)
    assert acknowledgements.report.files == snapshot.digests
    assert "Envoy refused cds.json" in acknowledgements.report.refused


def test_an_envoy_that_restarts_and_refuses_its_routes_uses_nothing_of_the_directory(
    snapshot: Snapshot, tmp_path: Path
) -> None:
    envoys = Envoys()
    acknowledgements = started(envoys, snapshot, tmp_path)
    routes = ROUTES
    taken = envoys.states[ADMIN] = taking(snapshot, tmp_path)
    acknowledgements.poll(101.0)
    assert acknowledgements.report.files == snapshot.digests
    # one that runs keeps its routes
    refusing = msgspec.structs.replace(taken, versions={**taken.versions, routes: "old"}, refused={routes: 1})
    envoys.states[ADMIN] = refusing
    acknowledgements.poll(200.0)
    assert (acknowledgements.report.has_nothing, acknowledgements.report.files) == (False, snapshot.digests)
    # also where another refusal was counted before: counts begin anew with Envoy
    for time_s, before in ((300.0, {}), (400.0, {routes: 1})):
        envoys.states[ADMIN] = msgspec.structs.replace(refusing, refused=before)
        acknowledgements.poll(time_s)
        acknowledgements.expect(snapshot, tmp_path, time_s)
        envoys.states[ADMIN] = msgspec.structs.replace(refusing, versions={**taken.versions, routes: ""})
        acknowledgements.poll(time_s + 50)
        assert (acknowledgements.report.has_nothing, acknowledgements.report.files) == (True, {})


def test_routes_are_not_written_before_envoy_has_their_clusters(tmp_path: Path) -> None:
    config, out = tmp_path / "config", tmp_path / "out"
    config.mkdir()
    (config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={}))
    read_late, routes_meanwhile = [], []

    def version(name: str) -> str:
        return file_version((out / name).read_bytes())

    def read(_: str) -> EnvoyState:
        """An Envoy that uses what is there at once, but for new clusters: these take it two looks more."""
        clusters = version("cds.json")
        if clusters != used and len(read_late) < 2:
            read_late.append(clusters)
            routes_meanwhile.append(version("rds.json"))
            clusters = used
        others = {ROUTES: "rds.json", "listener_manager.lds": "lds.json", ENGINES: "eds/default/llama.json"}
        versions = {CLUSTERS: clusters, **{name: version(file) for name, file in others.items()}}
        return EnvoyState(f"{out}/bootstrap.json", versions, {})

    acknowledgements = AcknowledgementPoller(read, f"{out}/bootstrap.json")
    follower = BundleSync(ConfigDirectory(config), out, str(out), acknowledgements)
    follower.write_first_bundle(lambda: 0.0)
    used, routes = version("cds.json"), version("rds.json")
    acknowledgements.poll(math.inf)
    assert acknowledgements.has_acknowledged
    second = documents(["127.0.0.1:8001"], gateway={}, server="other", alias="other").split("---")
    (config / "b.yaml").write_text("---".join(second[:2]).replace("name: llama", "name: other"))
    follower.sync_once(lambda: 0.0)
    assert routes_meanwhile == [routes, routes]
    assert version("rds.json") != routes


def test_an_envoy_that_never_answered_is_not_waited_for(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys, files = Envoys(), {"cds.json": file_version((tmp_path / "cds.json").read_bytes())}
    acknowledgements = started(envoys, snapshot, tmp_path)
    taken = envoys.states[ADMIN] = taking(snapshot, tmp_path)
    assert acknowledgements.is_used(files, snapshot) is None
    acknowledgements.poll(101.0)
    assert acknowledgements.is_used(files, snapshot) is True
    envoys.states[ADMIN] = msgspec.structs.replace(taken, versions={**taken.versions, CLUSTERS: "before"})
    assert acknowledgements.is_used(files, snapshot) is False
    # it never will
    envoys.states[ADMIN] = msgspec.structs.replace(envoys.states[ADMIN], refused={CLUSTERS: 1})
    assert acknowledgements.is_used(files, snapshot) is True
    # nor does it ask for the routes of a listener that it does not have
    envoys.states[ADMIN] = msgspec.structs.replace(taken, versions={})
    assert acknowledgements.is_used(files, snapshot) is True


def test_endpoints_on_their_way_make_nothing_new(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys, good = Envoys(), taking(snapshot, tmp_path)
    (endpoints,) = (name for file, name in subscription_names(snapshot).items() if file.startswith("eds/"))
    envoys.states[ADMIN] = msgspec.structs.replace(good, versions={**good.versions, endpoints: "the one before"})
    acknowledgements = started(envoys, snapshot, tmp_path)
    assert acknowledgements.poll(101.0).status == "Behind"
    assert acknowledgements.report.files == snapshot.digests


def test_a_bundle_that_changes_all_the_time_is_looked_at_all_the_same(snapshot: Snapshot, tmp_path: Path) -> None:
    envoys = Envoys()
    envoys.states[ADMIN] = taking(snapshot, tmp_path)
    acknowledgements = started(envoys, snapshot, tmp_path)
    for tick in range(1, 20):
        acknowledgements.expect(snapshot, tmp_path, 100.0 + tick / 5)
        acknowledgements.poll(100.0 + tick / 5)
    assert len(envoys.asked) >= 5


def test_the_report_is_a_page_beside_the_metrics(snapshot: Snapshot, tmp_path: Path) -> None:
    config, port = tmp_path / "config", free_ports(1)[0]
    config.mkdir()
    (config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={}))
    follower = BundleSync(ConfigDirectory(config), tmp_path / "out", "/x")
    follower.write_first_bundle(lambda: 0.0)
    serve_metrics(follower, ("127.0.0.1", port), CollectorRegistry())
    assert read_report(f"127.0.0.1:{port}") == ConfigReport(files=snapshot.digests)
    (config / "b.yaml").write_text("kind: Nonsense")
    follower.sync_once(lambda: 1.0)
    report = read_report(f"127.0.0.1:{port}")
    assert report is not None
    assert "'Nonsense' is not a kind" in report.refused
    assert report.files == snapshot.digests
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        assert b"attache_bundle_config_valid 0.0" in page.read()
    with pytest.raises(ListenFailed):
        serve_metrics(follower, ("127.0.0.1", port), CollectorRegistry())


def test_a_probe_is_told_what_envoy_says_of_itself(tmp_path: Path) -> None:
    live: list[tuple[int, bytes]] = [(200, b"LIVE\n"), (200, b"{}")]

    def stats(**values: object) -> tuple[int, bytes]:
        found = [{"name": name.replace("__", "."), "value": value} for name, value in values.items()]
        return 200, msgspec.json.encode({"stats": found})

    closed = stats(listener_manager__lds__version_text="1f", listener_manager__total_listeners_active=0)
    answers = [
        (503, b"PRE_INITIALIZING\n"),
        *(*live, stats(http__attache__rds__attache__version_text="")),
        *(*live, closed, (200, b'{"configs": [{"name": "attache"}]}')),
        *(*live, stats(http__attache__rds__attache__version_text="1f")),
        # the bundle has no listener, so there is nothing to route
        *(*live, closed, (200, b"{}")),
    ]

    class Envoy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            code, text = answers.pop(0)
            self.send_response(code)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    envoy = http.server.HTTPServer(("127.0.0.1", 0), Envoy)
    threading.Thread(target=envoy.serve_forever, daemon=True).start()
    config, port = tmp_path / "config", free_ports(1)[0]
    config.mkdir()
    (config / "a.yaml").write_text(documents(["127.0.0.1:8000"], gateway={"admin": f"127.0.0.1:{envoy.server_port}"}))
    acknowledgements = AcknowledgementPoller(lambda _: None, "/x/bootstrap.json")
    follower = BundleSync(ConfigDirectory(config), tmp_path / "out", "/x", acknowledgements)
    serve_metrics(follower, ("127.0.0.1", port), CollectorRegistry())

    def probe() -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/readyz")
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    assert probe() == (503, "no bundle is written yet")
    follower.write_first_bundle(lambda: 0.0)
    assert probe() == (503, "Envoy says PRE_INITIALIZING")
    for missing in ("routes", "listeners"):
        status, said = probe()
        assert (status, said.split(":")[0]) == (503, f"Envoy has no {missing}")
    assert probe() == (200, "Envoy takes requests")
    assert probe() == (200, "Envoy takes requests")
    envoy.shutdown()
    envoy.server_close()
    status, said = probe()
    assert status == 503
    assert "no Envoy answers at its admin address" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--wait", "soon"],
        ["--admin", "nowhere"],
        ["--wait", "1s", "--watch"],
        ["--wait", "1s", "--admin", "off"],
        ["--metrics", "127.0.0.1:1"],
    ],
)
def test_options_that_do_not_fit_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(tmp_path), "--out", str(tmp_path / "out"), *words])
    assert caught.value.code == 2
