# SPDX-License-Identifier: Apache-2.0
"""The bundle as data, and the way from one bundle to the next."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

from bench.sizes.config_generator import GatewayPorts, ObjectCounts, configuration
from controller.__main__ import main
from controller.bundle.envoy.bundle import MOST_ENDPOINT_FILES, BundleWriter, build_bundle
from controller.bundle.envoy.clusters import backend_cluster, backend_cluster_resource
from controller.bundle.envoy.envoy_json import to_json
from controller.bundle.envoy.extproc_fail_open import CHANGES_FILTER
from controller.bundle.envoy.filters import BODY_FILTERS
from controller.bundle.envoy.local_replies import local_replies
from controller.bundle.sync import GOLDEN_PATH, BundleSync, PublishStep, publish_steps, remove_orphans, write_step
from extproc.api.config_loader import ConfigDirectory, load_directory, load_snapshot
from extproc.api.http_route import Backend, BackendSpec
from extproc.api.make_before_break import DrainingServers, with_servers
from extproc.api.spec import Metadata
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bench.stack.orphan_reaper import ProcessGuard
    from extproc.api.config_snapshot import Snapshot

GATEWAY = GatewayPorts(listen="127.0.0.1:8080", admin="127.0.0.1:9901", extproc="127.0.0.1:9002", engines=8000)
ENVOY = Path(__file__).parents[3] / "envoy"
SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: NAME}
spec:
  model: engines-name
  endpoints: [{address: "10.0.0.1:8000"}, {address: "[fd00::2]:8000"}]
---
"""
ROUTE = """
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql, law]
  rules:
    - modelMatch: {headers: {X-Tester: {exact: "yes"}}, uri: {prefix: /v1/chat}}
      targetModels: [{modelServerName: one}]
    - targetModels: [{modelServerName: one, weight: 3}, {modelServerName: SECOND, weight: 1}]
---
"""


def snapshot_of(*servers: str, gateway: str = "{}", second: str = "two") -> Snapshot:
    documents = "".join(SERVER.replace("NAME", name) for name in servers) + ROUTE.replace("SECOND", second)
    gateway_document = (
        f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec: {gateway}\n"
    )
    return load_snapshot({"all.yaml": (documents + gateway_document).encode()})


def resources(files: Mapping[str, str], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(files[name])["resources"]
    return found


def routes(files: Mapping[str, str]) -> list[dict[str, Any]]:
    return [route for host in resources(files, "rds.json")[0]["virtual_hosts"] for route in host["routes"]]


def test_a_server_is_a_cluster_with_a_file_of_endpoints() -> None:
    files = build_bundle(snapshot_of("one", "two"), "/x")
    clusters = {cluster["name"]: cluster for cluster in resources(files, "cds.json")}
    assert set(clusters) == {"attache-extproc", "server/default/one", "server/default/two"}
    source = clusters["server/default/one"]["eds_cluster_config"]["eds_config"]["path_config_source"]
    assert source["path"] == "/x/eds/default/one.json"
    (assignment,) = resources(files, "eds/default/one.json")
    addresses = [one["endpoint"]["address"]["socket_address"] for one in assignment["endpoints"][0]["lb_endpoints"]]
    assert addresses == [
        {"address": "10.0.0.1", "port_value": 8000},
        {"address": "fd00::2", "port_value": 8000},
    ]


def test_what_extproc_decides_has_a_route_for_each_time_limit_and_number_of_retries() -> None:
    slow = "  trafficPolicy: {timeout: 2h, retry: {attempts: 0}}\n---"
    text = SERVER.replace("NAME", "one") + SERVER.replace("NAME", "two").replace("---", slow)
    text += SERVER.replace("NAME", "three").replace("---", slow) + ROUTE.replace("SECOND", "two")
    snapshot = load_snapshot({"all.yaml": text.encode()})
    _, special, default, *_ = routes(build_bundle(snapshot, "/x"))

    named = {"name": "x-attache-server", "present_match": True}
    # what extproc writes of the servers is what the route matches
    (policy,) = {one.spec.traffic_policy.route_settings_text for one in snapshot.servers[1:]}
    assert special["match"]["headers"] == [named, {"name": "x-attache-policy", "string_match": {"exact": policy}}]
    assert (special["route"]["timeout"], "retry_policy" in special["route"]) == ("7200s", False)
    assert default["match"]["headers"] == [named]
    assert (default["route"]["timeout"], default["route"]["retry_policy"]["num_retries"]) == ("1800s", 2)
    assert special["route"]["cluster_header"] == default["route"]["cluster_header"] == "x-attache-server"


def test_routes_grow_with_hosts_plus_models_and_not_with_their_product() -> None:
    def count(models: int, hosts: int, mode: Literal["Open", "Close"]) -> int:
        made = configuration(ObjectCounts(models, models + hosts, hosts, models, models, 1, 1), GATEWAY, mode)
        return len(routes(build_bundle(load_snapshot(made), "/x")))

    for mode in ("Open", "Close"):
        base, more_models, more_hosts = count(10, 10, mode), count(40, 10, mode), count(10, 40, mode)
        assert count(40, 40, mode) == more_models + more_hosts - base


def test_the_list_of_models_without_extproc_may_be_longer_than_envoys_4_kib() -> None:
    files = build_bundle(
        load_snapshot(configuration(ObjectCounts(models=60, routes=60, hosts=1, adapters=60), GATEWAY, "Open")), "/x"
    )
    listed = next(one for one in routes(files) if one["name"] == "models-without-extproc")
    size = len(listed["direct_response"]["body"]["inline_string"])
    assert 4096 < size < resources(files, "rds.json")[0]["max_direct_response_body_size_bytes"]


def test_no_cluster_keeps_envoys_limit_of_1024_streams() -> None:
    clusters = resources(build_bundle(snapshot_of("one", "two"), "/x"), "cds.json")
    assert [cluster["name"] for cluster in clusters] == ["attache-extproc", "server/default/one", "server/default/two"]
    for cluster in clusters:
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert min(limits[name] for name in ("max_connections", "max_requests", "max_pending_requests")) >= 1_000_000


def test_rules_weights_and_names_hold_without_extproc() -> None:
    found = {route["name"]: route for route in routes(build_bundle(snapshot_of("one", "two"), "/x"))}
    testers, rest = found["without-extproc/default/chat/0"], found["without-extproc/default/chat/1"]
    assert testers["match"]["prefix"] == "/v1/chat"
    assert {"name": "x-tester", "string_match": {"exact": "yes"}} in testers["match"]["headers"]
    assert testers["route"]["cluster"] == "server/default/one"
    weighted = rest["route"]["weighted_clusters"]["clusters"]
    assert [(one["name"], one["weight"]) for one in weighted] == [("server/default/one", 3), ("server/default/two", 1)]
    renamed = "engines-name"
    assert all(renamed in json.dumps(one["typed_per_filter_config"]) for one in weighted)
    adapters = found["without-extproc/default/chat/1/adapters"]
    assert renamed not in json.dumps(adapters)
    for one in [*weighted, *adapters["route"]["weighted_clusters"]["clusters"], testers]:
        (changes,) = one["typed_per_filter_config"].values()
        # nothing is allowed; the filter knows what it then refuses and removes
        assert "allowed" not in changes["filter_context"]
    assert {"law", "sql"} <= set(json.dumps(adapters["match"]["dynamic_metadata"]).replace('"', " ").split())


def test_a_rule_by_the_body_holds_for_nothing_without_extproc() -> None:
    by_body = {
        "targetModels": [{"modelServerName": "one"}],
        "modelMatch": {"body": {"tools": {"exists": True}}, "headers": {"x-a": {"exact": "1"}}},
    }
    usual = {"targetModels": [{"modelServerName": "one"}]}
    for protocol in ("OpenAI", "V2"):
        spec = {"modelName": "m", "loraAdapters": ["sql"], "rules": [by_body, usual]}
        route = {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelRoute", "metadata": {"name": "m"}, "spec": spec}
        server = SERVER.replace("NAME", "one").replace("---", f"  protocol: {protocol}\n---", 1)
        found = routes(build_bundle(load_snapshot({"all.yaml": f"{server}{json.dumps(route)}".encode()}), "/x"))
        names = [one["name"] for one in found if one["name"].startswith("without-extproc/")]
        assert names
        assert {name.split("/")[3] for name in names} == {"1"}


def test_what_a_server_allows_is_left_alone_without_extproc() -> None:
    text = SERVER.replace("NAME", "one").replace("---", "  allowedFields: [priority, data_parallel_rank]\n---", 1)
    found = routes(build_bundle(load_snapshot({"all.yaml": (text + ROUTE.replace("SECOND", "one")).encode()}), "/x"))
    (changes,) = next(one for one in found if one["name"].endswith("/0"))["typed_per_filter_config"].values()
    assert changes["filter_context"]["allowed"] == {"priority": True, "data_parallel_rank": True}


def test_bodies_are_not_read_where_extproc_has_decided() -> None:
    filters = filters_of(snapshot_of("one", "two"))
    matcher = filters["attache.body_without_extproc"]["xds_matcher"]["matcher_list"]["matchers"][0]
    assert "x-attache-server" in json.dumps(matcher["predicate"])
    assert "SkipFilter" in json.dumps(matcher["on_match"])
    # and without a route that says what changes, the other filter has no script
    assert "default_source_code" not in filters["attache.changes_without_extproc"]


def test_a_closed_gateway_has_no_way_around_extproc() -> None:
    closed = snapshot_of("one", "two", gateway="{failureMode: Close}")
    files = build_bundle(closed, "/x")
    assert [route["name"] for route in routes(files)] == ["health", "decided/default", "model_not_found"]
    assert refuses_without_extproc(closed)
    assert not [name for name in (*BODY_FILTERS, CHANGES_FILTER) if f'"{name}"' in files["lds.json"]]


def test_a_route_with_limits_closes_the_gateway_unless_it_is_opened() -> None:
    limits = ROUTE.replace("SECOND", "two").replace("  rules:", "  rateLimits: [{requests: 10}]\n  rules:")
    text = SERVER.replace("NAME", "one") + SERVER.replace("NAME", "two") + limits
    closed = load_snapshot({"all.yaml": text.encode()})
    assert [route["name"] for route in routes(build_bundle(closed, "/x"))] == [
        "health",
        "decided/default",
        "model_not_found",
    ]
    assert refuses_without_extproc(closed)
    opened = "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {failureMode: Open}\n"
    snapshot = load_snapshot({"all.yaml": (text + opened).encode()})
    assert any(route["name"].startswith("without-extproc/") for route in routes(build_bundle(snapshot, "/x")))
    assert not refuses_without_extproc(snapshot)


@pytest.mark.parametrize(
    ("gateway", "asks"),
    [
        ("{failureMode: Open}", 1),
        ("{failureMode: Close}", 2),
        ("{failureMode: Open, extprocWorkers: 2}", 2),
        ("{failureMode: Close, extprocWorkers: 2}", 2),
    ],
)
def test_extproc_is_asked_again_where_another_worker_may_answer_or_somebody_must_refuse(
    gateway: str, asks: int
) -> None:
    snapshot = snapshot_of("one", "two", gateway=gateway)
    filters = filters_of(snapshot)
    found = [name for name in filters if name in {"envoy.filters.http.ext_proc", AGAIN}]
    assert len(found) == asks
    # answers that run outlive the process that decided them
    assert filters["envoy.filters.http.ext_proc"]["failure_mode_allow"] is True
    assert refuses_without_extproc(snapshot) == ("Close" in gateway)
    # the second has what routes say of the first, and is off where the first is
    for route in routes(build_bundle(snapshot, "/x")):
        configs = route.get("typed_per_filter_config", {})
        assert asks == 1 or configs.get(AGAIN) == configs.get("envoy.filters.http.ext_proc")


AGAIN = "attache.extproc_again"


def refuses_without_extproc(snapshot: Snapshot) -> bool:
    """Whether a request that extproc has not decided goes no further."""
    again = filters_of(snapshot).get(AGAIN)
    if again is None:
        return False
    (decided,) = again["xds_matcher"]["matcher_list"]["matchers"]
    assert "x-attache-server" in json.dumps(decided["predicate"])
    assert "SkipFilter" in json.dumps(decided["on_match"])
    return "failure_mode_allow" not in again["extension_config"]["typed_config"]


def filters_of(snapshot: Snapshot) -> dict[str, Any]:
    (listener,) = resources(build_bundle(snapshot, "/etc/attache"), "lds.json")
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return {one["name"]: one.get("typed_config") for one in manager["http_filters"]} | {"manager": manager}


def test_envoy_waits_for_messages_as_configured_and_for_held_requests_as_extproc_asks() -> None:
    held = "  flowControl: {timeout: 90s, noEndpointTimeout: 7m}\n---"
    text = SERVER.replace("NAME", "one").replace("---", held, 1) + SERVER.replace("NAME", "two")
    text += ROUTE.replace("SECOND", "two")
    filters = filters_of(load_snapshot({"all.yaml": text.encode()}))
    assert filters["envoy.filters.http.ext_proc"]["message_timeout"] == "5s"
    assert filters["envoy.filters.http.ext_proc"]["max_message_timeout"] == "3600s"
    assert filters["manager"]["stream_idle_timeout"] == "720s"
    assert filters_of(snapshot_of("one", "two"))["envoy.filters.http.ext_proc"]["message_timeout"] == "5s"


def test_envoy_gives_a_request_without_engines_the_time_to_wait_for_one() -> None:
    held = "  flowControl: {timeout: 90s}\n  activation: {holdTimeout: 10m}\n---"
    text = SERVER.replace("NAME", "one").replace("---", held, 1) + SERVER.replace("NAME", "two")
    text += ROUTE.replace("SECOND", "two")
    manager = filters_of(load_snapshot({"all.yaml": text.encode()}))["manager"]
    # the queue after the wait, too
    assert manager["stream_idle_timeout"] == "990s"
    assert manager["request_timeout"] == "810s"
    assert manager["http2_protocol_options"]["connection_keepalive"] == {"interval": "30s", "timeout": "20s"}
    unlimited = (
        "\n---\napiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {requestTimeout:"
        " 0s}\n"
    )
    manager = filters_of(load_snapshot({"all.yaml": (text + unlimited).encode()}))["manager"]
    assert manager["request_timeout"] == "0s"


def test_a_server_of_a_cluster_that_comes_back_and_holds_requests_changes_no_listener() -> None:
    """Envoy would close the connections of all clients, one by one."""
    marked = 'metadata: {name: one, annotations: {attache.dev/of-cluster: "true"}}'
    text = SERVER.replace("metadata: {name: NAME}", marked)
    assert marked in text
    held = text.replace("---", "  activation: {holdTimeout: 60s}\n---", 1)
    managers = [
        filters_of(load_snapshot({"all.yaml": (one + ROUTE.replace("SECOND", "one")).encode()}))["manager"]
        for one in (text, held)
    ]
    assert managers[0] == managers[1]
    assert managers[0]["request_timeout"] == "180s"


def test_silent_connections_of_clients_are_probed() -> None:
    (listener,) = resources(build_bundle(snapshot_of("one", "two"), "/etc/attache"), "lds.json")
    assert listener["tcp_keepalive"] == {"keepalive_time": 30, "keepalive_interval": 10, "keepalive_probes": 3}


def test_llm_ds_flow_control_counts_for_the_longest_hold() -> None:
    text = SERVER.replace("NAME", "one").replace("---", "  pickerConfig: epp.yaml\n---", 1)
    epp = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins: [{type: queue-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]
flowControl: {defaultRequestTTL: 20s, noEndpointRequestTTL: 40s}
"""
    files = {"all.yaml": (text + ROUTE.replace("SECOND", "one")).encode(), "epp.yaml": epp.encode()}
    assert filters_of(load_snapshot(files))["manager"]["stream_idle_timeout"] == "340s"


def stripped(gateway: str) -> tuple[set[str], set[str]]:
    """Prefixes and names of headers that are removed before anything reads them."""
    manager = filters_of(snapshot_of("one", "two", gateway=gateway))["manager"]
    mutations = manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
    prefixes = {one["remove_on_match"]["key_matcher"]["prefix"] for one in mutations if "remove_on_match" in one}
    return prefixes, {one["remove"] for one in mutations if "remove" in one}


def test_what_clients_say_of_themselves_is_removed_unless_they_are_our_own_gateways() -> None:
    prefixes, names = stripped("{}")
    assert {"x-attache-", "x-gateway-", "x-llm-d-", "x-slo-"} <= prefixes
    prefixes, names = stripped("{clients: Trusted}")
    assert prefixes == {"x-envoy-"}
    # a destination, a key's name, a server or its time limit is nobody else's to write, trusted or not
    assert {"x-gateway-destination-endpoint", "x-attache-client", "x-attache-server", "x-attache-policy"} <= names


def test_keys_are_told_apart_before_all_else_and_go_no_further() -> None:
    keys = "{authentication: {apiKeys: [{name: acme-1, key: sk-acme-secret, tenant: acme}]}}"
    snapshot = snapshot_of("one", "two", gateway=keys)
    files = build_bundle(snapshot, "/x")
    assert list(filters_of(snapshot))[1:3] == ["attache.keys", "attache.identified"]
    (known,) = resources(files, "keys.json")
    script = known["typed_config"]["default_source_code"]["inline_string"]
    assert f'["{hashlib.sha256(b"sk-acme-secret").hexdigest()}"]="acme-1"' in script
    assert 'headers:remove("authorization")' in script
    assert 'headers:remove("x-api-key")' in script
    assert not [name for name, text in files.items() if "sk-acme-secret" in text]


def test_health_is_answered_before_callers_are_identified_unless_it_is_turned_off() -> None:
    name = "envoy.filters.http.health_check"
    for mode, needed in (("Close", {"attache-extproc": {"value": 1.0}}), ("Open", None)):
        snapshot = snapshot_of("one", "two", gateway=f"{{failureMode: {mode}, healthPath: /up}}")
        filters = filters_of(snapshot)
        assert next(iter(filters)) == name
        assert filters[name].get("cluster_min_healthy_percentages") == needed
        assert routes(build_bundle(snapshot, "/x"))[0]["match"] == {"path": "/up"}
    off = snapshot_of("one", "two", gateway='{healthPath: ""}')
    assert name not in filters_of(off)
    assert "health" not in [route["name"] for route in routes(build_bundle(off, "/x"))]


def test_extproc_is_told_that_a_bundle_asks() -> None:
    service = filters_of(snapshot_of("one", "two"))["envoy.filters.http.ext_proc"]["grpc_service"]
    assert service["initial_metadata"] == [{"key": "x-attache-bundle", "value": "1"}]


def test_equal_snapshots_give_equal_files_and_endpoints_change_their_own_file_alone() -> None:
    before = snapshot_of("one", "two")
    assert build_bundle(before, "/x") == build_bundle(snapshot_of("one", "two"), "/x")
    documents = "".join(SERVER.replace("NAME", name) for name in ("one", "two")) + ROUTE.replace("SECOND", "two")
    after = load_snapshot({"all.yaml": documents.replace("10.0.0.1", "10.0.0.9", 1).encode()})
    changed = {name for name, text in build_bundle(after, "/x").items() if build_bundle(before, "/x")[name] != text}
    assert changed == {"eds/default/one.json"}


@pytest.mark.parametrize("name", sorted(source.name for source in (ENVOY / "sources").iterdir()))
def test_golden_bundles_are_what_their_sources_give(name: str) -> None:
    snapshot = load_directory(ENVOY / "sources" / name)
    fresh = build_bundle(snapshot, GOLDEN_PATH)
    kept = ENVOY / "bundles" / name
    files = {str(file.relative_to(kept)): file.read_text() for file in kept.rglob("*.json")}
    assert files == fresh, "run `make generate`"


def names_by_step(planned: list[PublishStep], file: str) -> list[set[str]]:
    return [{one["name"] for one in resources(step.files, file)} for step in planned if file in step.files]


def test_clusters_come_before_the_routes_that_name_them_and_go_after_them() -> None:
    before, after = snapshot_of("one", "two"), snapshot_of("one", "three", second="three")
    planned = publish_steps(before, after, BundleWriter("/x"))
    assert [sorted(step.files) for step in planned] == [
        ["cds.json", "eds/default/one.json", "eds/default/three.json", "eds/default/two.json"],
        ["bootstrap.json", "lds.json", "rds.json"],
        ["cds.json"],
    ]
    assert names_by_step(planned, "cds.json") == [
        {"attache-extproc", "server/default/one", "server/default/two", "server/default/three"},
        {"attache-extproc", "server/default/one", "server/default/three"},
    ]
    assert list(planned[0].files)[-1] == "cds.json"
    assert planned[-1].gone == ("eds/default/two.json",)
    assert all(step.wait_s > 0 for step in planned[1:])


def numbered(*numbers: int) -> Snapshot:
    return snapshot_of("one", "two", *(f"more-{number}" for number in numbers))


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations([2, MOST_ENDPOINT_FILES - 2, 40], 2)])
def test_servers_that_become_few_or_many_have_their_endpoints_at_every_step(
    tmp_path: Path, before: int, after: int
) -> None:
    """In files or in their clusters; Envoy refuses a cluster whose file is not there."""
    old, new = numbered(*range(before)), numbered(*range(1, after + 1))
    writer = BundleWriter(str(tmp_path))
    for step in [*publish_steps(None, old, writer), *publish_steps(old, new, writer)]:
        write_step(tmp_path, step)
        for cluster in resources({"cds.json": (tmp_path / "cds.json").read_text()}, "cds.json"):
            if "eds_cluster_config" in cluster:
                assert Path(cluster["eds_cluster_config"]["eds_config"]["path_config_source"]["path"]).is_file()
            else:
                assert "load_assignment" in cluster
    kept = {str(file.relative_to(tmp_path)): file.read_text() for file in tmp_path.rglob("*.json")}
    assert kept == build_bundle(new, str(tmp_path))


def connected(connection: str, *addresses: str) -> Snapshot:
    listed = ", ".join(f"{{address: '{one}'}}" for one in addresses)
    spec = f"spec: {{model: m, endpoints: [{listed}], connection: {connection}}}"
    text = f"apiVersion: attache.dev/v1alpha1\nkind: ModelServer\nmetadata: {{name: one}}\n{spec}\n"
    return load_snapshot({"all.yaml": text.encode()})


TLS = "{tls: {caFile: ca.pem, serverName: a.b}}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (connected(TLS, "10.0.0.1:1"), connected("{}")),
        (connected("{}"), connected(TLS, "10.0.0.1:1")),
        (connected("{apiKeyEnv: A}", "10.0.0.1:1"), connected("{apiKeyEnv: B}", "10.0.0.2:1")),
    ],
)
def test_no_cluster_ever_reads_endpoints_that_are_reached_in_another_way(before: Snapshot, after: Snapshot) -> None:
    """Not even for the moment in which clusters and endpoints change."""
    planned = publish_steps(before, after, BundleWriter("/x"))
    (old,), (new,) = (endpoints_in(build_bundle(one, "/x")) for one in (before, after))
    assert old != new
    assert all(old not in step.files for step in planned)
    assert old in planned[-1].gone
    (cluster,) = (one for one in resources(planned[0].files, "cds.json") if one["name"] == "server/default/one")
    assert cluster["eds_cluster_config"]["eds_config"]["path_config_source"]["path"] == f"/x/{new}"


def endpoints_in(files: Mapping[str, str]) -> list[str]:
    return [name for name in files if name.startswith("eds/")]


def with_backend(name: str) -> Snapshot:
    text = f"""
apiVersion: attache.dev/v1alpha1
kind: Backend
metadata: {{name: {name}}}
spec: {{endpoints: ["10.0.0.1:80"]}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: all}}
spec: {{rules: [{{backendRefs: [{{group: attache.dev, kind: Backend, name: {name}}}]}}]}}
"""
    return load_snapshot({"all.yaml": text.encode()})


def test_clusters_of_backends_come_before_their_routes_and_go_after_them() -> None:
    planned = publish_steps(with_backend("old"), with_backend("new"), BundleWriter("/x"))
    assert [sorted(step.files) for step in planned] == [
        ["cds.json", "eds/_backends/default/new.json", "eds/_backends/default/old.json"],
        ["bootstrap.json", "lds.json", "rds.json"],
        ["cds.json"],
    ]
    assert names_by_step(planned, "cds.json") == [
        {"attache-extproc", "backend/default/new", "backend/default/old"},
        {"attache-extproc", "backend/default/new"},
    ]
    assert planned[-1].gone == ("eds/_backends/default/old.json",)


@pytest.mark.parametrize("protocol", ["HTTP", "H2C", "WebSocket"])
def test_clusters_of_backends_are_what_envoys_classes_make_of_them(
    protocol: Literal["HTTP", "H2C", "WebSocket"],
) -> None:
    one, other = (
        Backend(metadata=Metadata(name=name), spec=BackendSpec(protocol=protocol)) for name in ("one", "other")
    )
    like = backend_cluster(other, "/x")
    assert backend_cluster_resource(one, like, "/x") == backend_cluster(one, "/x")


def test_an_endpoint_more_of_a_backend_changes_one_file() -> None:
    writer, before = BundleWriter("/x"), with_backend("a")
    spec = msgspec.structs.replace(before.backends[0].spec, endpoints=("10.0.0.1:80", "10.0.0.2:80"))
    more = msgspec.structs.replace(before.backends[0], spec=spec)
    first, second = writer.build(before), writer.build(msgspec.structs.replace(before, backends=(more,)))
    assert {name for name, text in second.items() if first[name] != text} == {"eds/_backends/default/a.json"}


def test_a_server_that_leaves_lingers_for_a_while_unless_it_comes_back() -> None:
    both, one = snapshot_of("one", "two"), snapshot_of("one", second="one")
    draining = DrainingServers(5.0)
    draining.on_change(both, one, now=100.0)
    assert draining.with_draining(one, now=104.9) == with_servers(one, both.servers)
    assert draining.with_draining(one, now=105.0) == one

    draining.on_change(both, one, now=200.0)
    draining.on_change(one, both, now=201.0)
    assert draining.with_draining(both, now=201.0) == both
    draining.on_change(both, one, now=204.0)
    assert draining.with_draining(one, now=208.9) != one


def test_a_server_that_left_stays_while_the_directory_is_broken_as_extproc_may_not_have_read_that(
    tmp_path: Path,
) -> None:
    config, endpoints = tmp_path / "config", tmp_path / "out" / "eds" / "default" / "two.json"
    config.mkdir()
    servers, route = config / "servers.yaml", ROUTE.replace("SECOND", "one")
    one, two = (SERVER.replace("NAME", name) for name in ("one", "two"))
    servers.write_text(one + two + route)
    sync = BundleSync(ConfigDirectory(config), tmp_path / "out", "/x")
    sync.write_first_bundle(lambda: 0.0)

    def stays(now: float, text: str) -> bool:
        servers.write_text(text)
        sync.sync_once(lambda: now)
        return endpoints.exists()

    assert stays(1.0, one + route)
    assert stays(2.0, "kind: [")
    assert stays(100.0, "kind: [")
    assert stays(101.0, one + route)
    assert stays(129.0, one + route)
    assert not stays(131.0, one + route)


def test_files_are_replaced_whole_and_only_if_they_change(tmp_path: Path) -> None:
    write_step(tmp_path, PublishStep(0, {"eds/default/one.json": "1", "rds.json": "a"}))
    inode = (tmp_path / "rds.json").stat().st_ino
    write_step(
        tmp_path, PublishStep(0, {"eds/default/one.json": "2", "rds.json": "a"}, gone=("eds/default/none.json",))
    )
    assert (tmp_path / "rds.json").stat().st_ino == inode
    assert (tmp_path / "eds/default/one.json").read_text() == "2"
    assert {file.name for file in tmp_path.rglob("*")} == {"eds", "default", "one.json", "rds.json"}


def test_what_an_earlier_writer_left_behind_is_removed(tmp_path: Path) -> None:
    write_step(tmp_path, PublishStep(0, {"eds/default/one.json": "1", "eds/default/old.json": "1"}))
    remove_orphans(tmp_path, snapshot_of("one", second="one"))
    assert [file.name for file in (tmp_path / "eds").rglob("*.json")] == ["one.json"]


@pytest.mark.parametrize(
    ("credentials", "credential", "other"),
    [
        ("apiKeys: [{name: web, tenant: acme, key: a-key-of-the-test}]", "API key", "token"),
        ("jwt: [{name: login, issuer: me, anyAudience: true, jwksFile: /jwks.json}]", "token", "API key"),
    ],
)
def test_the_refusal_of_an_unknown_caller_names_what_this_gateway_asks_for(
    credentials: str, credential: str, other: str
) -> None:
    secret = "" if credential == "API key" else ", cacheSecret: 0123456789abcdef"
    gateway = snapshot_of("one", "two", gateway=f"{{authentication: {{{credentials}}}{secret}}}").gateway
    (said,) = (
        mapper.body_format_override.json_format.fields["error"].struct_value.fields["message"].string_value
        for mapper in local_replies(gateway).mappers
        if "invalid_api_key" in to_json(mapper)
    )
    assert f"has no {credential}" in said
    assert other not in said


def test_the_command_says_every_mistake_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "a.yaml").write_text(
        SERVER.replace("NAME", "one").replace("10.0.0.1:8000", "nowhere") + ROUTE.replace("SECOND", "gone")
    )
    assert main(["bundle", "--config", str(config), "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "'nowhere' is not an address" in said
    assert "no ModelServer is called 'gone'" in said
    assert said.endswith("\n2 mistakes\n")
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["bundle"])
    assert "write --config DIR and --out DIR" in capsys.readouterr().err


async def test_a_bundle_that_is_followed_says_what_it_refuses_and_keeps_the_last_good_one(
    tmp_path: Path, guard: ProcessGuard
) -> None:
    config, out, log = tmp_path / "config", tmp_path / "out", tmp_path / "log"
    config.mkdir()
    good = SERVER.replace("NAME", "one") + ROUTE.replace("SECOND", "one")
    (config / "a.yaml").write_text(good)
    command = ["-m", "controller", "bundle", "--config", str(config), "--out", str(out), "--watch"]
    with log.open("wb") as file:
        writer = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=file, start_new_session=True)
    guard.add(writer.pid)

    async def until(holds: Callable[[], bool]) -> None:
        async def answer() -> bool:
            return holds()

        await eventually(answer)

    try:
        await until((out / "bootstrap.json").is_file)
        before = (out / "eds" / "default" / "one.json").read_text()
        (config / "a.yaml").write_text(good.replace("10.0.0.1:8000", "nowhere"))
        await until(lambda: "'nowhere' is not an address" in log.read_text())
        assert "the last good bundle stays: a.yaml" in log.read_text()
        assert (out / "eds" / "default" / "one.json").read_text() == before

        (config / "a.yaml").write_text(good)
        await until(lambda: "the configuration can be used again" in log.read_text())
        assert log.read_text().count("the bundle has configuration") == 1

        gateway = "apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\n"
        (config / "b.yaml").write_text(gateway + "spec: {admin: '127.0.0.1:9999'}\n")
        (config / "a.yaml").write_text(good.replace("10.0.0.1", "10.0.0.9"))
        await until(lambda: "10.0.0.9" in (out / "eds" / "default" / "one.json").read_text())
        await until(lambda: "restart Envoy" in log.read_text())
    finally:
        writer.terminate()
        await writer.wait()
        guard.remove(writer.pid)


def test_an_output_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    source = str(ENVOY / "sources" / "one-model")
    assert main(["bundle", "--config", source, "--out", str(tmp_path / "out")]) == 2
    assert "cannot write the bundle" in capsys.readouterr().err
