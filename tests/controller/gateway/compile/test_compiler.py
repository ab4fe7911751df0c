# SPDX-License-Identifier: Apache-2.0
"""Objects of a cluster become a directory that extproc can read, and statuses that say what became of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gateway.compile.compiler import Compiler, CompileResult, file_name
from controller.gateway.compile.pods import parse_pod, trimmed_engine_pod
from controller.gateway.directory_writer import DirectoryWriter
from controller.kube.api_resources import key_of
from extproc.api.config_loader import load_directory, load_snapshot
from extproc.api.config_snapshot import failure_mode_of
from extproc.api.spec import object_key
from extproc.llmd.picker_builder import InstalledPluginChecker, PickerFactory, picker_notes
from extproc.scheduling.picker_cache import pickers_for
from tests.examples import examples
from tests.kube_objects import Object, picker_config, pod, resource, route, secret, server

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.picker_config import PickerFile

HTTP_LISTENER = {"name": "http", "address": "127.0.0.1:8080"}
PICKER = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: max-score-picker}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}]
"""


def compiled(*things: Object, gateway: str | None = None) -> CompileResult:
    return feed(Compiler(gateway, check_picker=InstalledPluginChecker()), things).compile()


def feed(compiler: Compiler, things: Iterable[Object]) -> Compiler:
    for thing in things:
        compiler.update_object(thing["kind"], key_of(thing), thing)
    return compiler


def snapshot(outcome: CompileResult) -> Snapshot:
    """What extproc makes of the directory: no mistakes."""
    return load_snapshot(outcome.files)


def addresses(outcome: CompileResult, name: str = "default/llama") -> list[str]:
    (found,) = (one for one in snapshot(outcome).servers if one.metadata.key == name)
    return [one.address for one in found.spec.endpoints]


def condition(outcome: CompileResult, kind: str, key: str, type_: str) -> tuple[str, str, str]:
    (found,) = (one for one in outcome.statuses[kind, key].conditions if one.type == type_)
    return found.status, found.reason, found.message


def test_objects_of_any_name_have_files_of_their_own_that_can_be_written(tmp_path: Path) -> None:
    names = ["n" * 253, "n" * 252 + "m"]
    things = [one for name in names for one in (server(name, pickerConfig=name), route(name, model=name[-1]))]
    outcome = compiled(*things, *(picker_config(name, PICKER) for name in names))
    DirectoryWriter(tmp_path).write(outcome.files)
    found = load_directory(tmp_path)
    assert [one.metadata.name for one in found.routes] == names[::-1]
    assert {one.spec.picker_config for one in found.servers} == found.picker_files.keys()
    assert len(found.picker_files) == 2


def test_an_empty_cluster_is_a_directory_with_defaults() -> None:
    outcome = compiled()
    assert list(outcome.files) == ["gateway.json"]
    assert snapshot(outcome).servers == ()


def test_ready_pods_of_the_namespace_with_the_labels_are_endpoints() -> None:
    outcome = compiled(
        server(),
        pod("b", "10.0.0.2"),
        pod("a", "10.0.0.1"),
        pod("starting", "10.0.0.3", ready=False),
        pod("other", "10.0.0.4", app="qwen"),
        pod("elsewhere", "10.0.0.5", namespace="blue"),
    )
    assert addresses(outcome) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert condition(outcome, "ModelServer", "default/llama", "Available")[0] == "True"
    assert outcome.statuses["ModelServer", "default/llama"].fields == {"endpoints": 2, "ready": 2, "draining": 0}


def test_a_pod_that_is_deleted_or_drained_stays_until_it_is_gone_and_gets_nothing_new() -> None:
    outcome = compiled(
        server(),
        pod("a", "10.0.0.1", deletionTimestamp="2026-11-01T00:00:00Z"),
        pod("b", "10.0.0.2", annotations={"attache.dev/drain": "true"}),
        pod("d", "10.0.0.4", annotations={"attache.dev/draining": "2026-11-22T05:00:00Z"}),
        pod("c", "10.0.0.3"),
    )
    (found,) = snapshot(outcome).servers
    assert [one.draining for one in found.spec.endpoints] == [True, True, False, True]
    assert outcome.statuses["ModelServer", "default/llama"].fields == {"endpoints": 4, "ready": 1, "draining": 3}


def test_a_server_whose_endpoints_all_drain_is_available_and_says_so() -> None:
    listed = [{"address": "10.0.0.1:8000", "draining": True}, {"address": "10.0.0.2:8000", "draining": True}]
    things = resource("ModelServer", "listed", {"model": "m", "endpoints": listed}), server()
    outcome = compiled(*things, pod("a", annotations={"attache.dev/drain": "true"}))
    assert outcome.statuses["ModelServer", "default/listed"].fields == {"endpoints": 2, "ready": 0, "draining": 2}
    for key in ("default/listed", "default/llama"):
        assert condition(outcome, "ModelServer", key, "Available")[:2] == ("True", "AllDraining")


def test_a_price_that_is_none_is_said() -> None:
    outcome = compiled(
        server(),
        *(pod(name, f"10.0.0.{at}", annotations={"attache.dev/price": "dear\n"}) for at, name in enumerate("dcba", 1)),
        pod("fine", "10.0.0.9", annotations={"attache.dev/price": "2"}),
    )
    assert condition(outcome, "ModelServer", "default/llama", "Available")[2] == (
        "new requests go to 5 of 5 endpoints; attache.dev/price is no positive number, and not used, "
        "on a 'dear\\n', b 'dear\\n', c 'dear\\n' and 1 more"
    )


def test_conditions_that_hold_say_what() -> None:
    config = resource("GatewayConfig", "main", {})
    outcome = compiled(config, server(), route("llama"), pod("a"), gateway="default/main")
    assert [one for status in outcome.statuses.values() for one in status.conditions if not one.message] == []


@pytest.mark.parametrize(
    ("spec", "limits", "expected"),
    [
        ({}, [], "Open"),
        ({}, [{"requests": 1, "unit": "second"}], "Close"),
        ({"failureMode": "Open"}, [{"requests": 1, "unit": "second"}], "Open"),
    ],
)
def test_the_failure_mode_that_holds_is_in_the_status(
    spec: dict[str, str], limits: list[dict[str, object]], expected: str
) -> None:
    limited = route("llama")
    limited["spec"] |= {"rateLimits": limits}
    config = resource("GatewayConfig", "main", spec)
    outcome = compiled(config, server(), limited, gateway="default/main")
    assert outcome.statuses["GatewayConfig", "default/main"].fields == {"failureMode": expected}
    assert failure_mode_of(snapshot(outcome)) == expected


def test_each_data_parallel_rank_is_an_endpoint() -> None:
    things = server(workloadPort={"port": 8000, "rankPorts": [8001]}), pod("a", "fd00::1")
    assert addresses(compiled(*things)) == ["[fd00::1]:8000", "[fd00::1]:8001"]


@pytest.mark.parametrize(("price", "expected"), [("2.5", 2.5), ("-1", 1.0), ("inf", 1.0), ("dear", 1.0), ("nan", 1.0)])
def test_a_pods_price_is_its_annotation_if_that_is_one(price: str, expected: float) -> None:
    outcome = compiled(server(), pod("a", annotations={"attache.dev/price": price}))
    (found,) = snapshot(outcome).servers
    assert found.spec.endpoints[0].price == expected


def test_an_endpoint_is_labelled_with_the_node_of_its_pod_unless_the_pod_says_otherwise() -> None:
    on_a_node = {**pod("a"), "spec": {"nodeName": "gpu-7"}}
    found = parse_pod(trimmed_engine_pod(on_a_node))
    assert found.labels["kubernetes.io/hostname"] == "gpu-7"
    own = {**on_a_node, "metadata": {**on_a_node["metadata"], "labels": {"kubernetes.io/hostname": "rack-3"}}}
    assert parse_pod(trimmed_engine_pod(own)).labels == {"kubernetes.io/hostname": "rack-3"}
    assert "kubernetes.io/hostname" not in parse_pod(trimmed_engine_pod(pod("a"))).labels


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        ({}, [8000, 8001]),
        ({"llm-d.ai/active-ports": "8001"}, [8001]),
        ({"llm-d.ai/active-ports": " 8000, 8001,9999"}, [8000, 8001]),
        ({"llm-d.ai/active-ports": ""}, []),
        ({"llm-d.ai/active-ports": "many,-1,9" + "9" * 9000}, []),
        ({"inference.networking.k8s.io/active-ports": "8000"}, [8000]),
        ({"inference.networking.k8s.io/active-ports": "8000", "llm-d.ai/active-ports": "8001"}, [8001]),
    ],
)
def test_llm_ds_annotation_says_which_ranks_of_a_pod_serve(annotations: dict[str, str], ports: list[int]) -> None:
    one = pod("a")
    one["metadata"]["annotations"] = annotations
    found = parse_pod(trimmed_engine_pod(one)).endpoints([8000, 8001])
    assert [int(endpoint["address"].rpartition(":")[2]) for endpoint in found] == ports


@pytest.mark.parametrize("ip", ["", "localhost", "10.0.0.1; rm", "10.0.0.1/8"])
def test_what_is_no_address_is_no_endpoint(ip: str) -> None:
    assert addresses(compiled(server(), pod("a", ip))) == []


def test_pods_that_share_an_address_are_one_endpoint() -> None:
    outcome = compiled(server(), pod("a", "10.0.0.1"), pod("b", "10.0.0.1"))
    (found,) = snapshot(outcome).servers
    assert [one.labels["attache.dev/pod"] for one in found.spec.endpoints] == ["a"]


def test_a_server_without_pods_says_what_it_looks_for() -> None:
    outcome = compiled(server())
    status, reason, message = condition(outcome, "ModelServer", "default/llama", "Available")
    assert (status, reason) == ("False", "NoPods")
    assert "app=llama" in message


def test_a_route_to_a_server_that_is_not_there_is_answered_503_and_says_so() -> None:
    outcome = compiled(route("llama", "gone"))
    assert addresses(outcome, "default/gone") == []
    status, reason, message = condition(outcome, "ModelRoute", "default/llama", "ResolvedRefs")
    assert (status, reason) == ("False", "BackendNotFound")
    assert message == "no usable ModelServer default/gone; rules without another target are answered 503"


def test_other_targets_carry_what_a_missing_one_had() -> None:
    outcome = compiled(server(), route("llama", "gone", "llama"))
    found = snapshot(outcome)
    assert [one.metadata.key for one in found.servers] == ["default/llama"]
    (rule,) = found.routes[0].spec.rules
    assert [one.model_server_name for one in rule.target_models] == ["llama"]


def test_a_rule_goes_on_without_a_mirror_that_is_not_there() -> None:
    mirrored = route("llama", "llama")
    mirrored["spec"]["rules"][0]["mirror"] = {"modelServerName": "gone"}
    outcome = compiled(server(), mirrored)
    (rule,) = snapshot(outcome).routes[0].spec.rules
    assert rule.mirror is None
    status, _, message = condition(outcome, "ModelRoute", "default/llama", "ResolvedRefs")
    assert (status, message.partition(";")[0]) == ("False", "no usable ModelServer default/gone")
    both = compiled(server(), server("gone"), mirrored)
    (rule,) = snapshot(both).routes[0].spec.rules
    assert rule.mirror is not None
    assert condition(both, "ModelRoute", "default/llama", "ResolvedRefs")[0] == "True"


def test_a_fallback_that_is_not_there_breaks_nothing() -> None:
    one = route("llama", "llama")
    one["spec"]["rules"][0] |= {"fallback": [{"modelServerName": "gone"}], "retry": {"minConcurrency": 3}}
    outcome = compiled(server(), one)
    (rule,) = snapshot(outcome).routes[0].spec.rules
    assert (rule.fallback, rule.retry) == ((), None)
    assert "default/gone" in condition(outcome, "ModelRoute", "default/llama", "ResolvedRefs")[2]
    one["spec"]["rules"][0]["fallback"] += [{"modelServerName": "spare"}]
    outcome = compiled(server(), server("spare"), one)
    (rule,) = snapshot(outcome).routes[0].spec.rules
    assert [each.model_server_name for each in rule.fallback] == ["spare"]
    assert rule.retry is not None
    # of two targets one is left, which is the fallback of the other
    two = route("llama", "gone", "llama")
    two["spec"]["rules"][0]["fallback"] = [{"modelServerName": "llama"}]
    (rule,) = snapshot(compiled(server(), two)).routes[0].spec.rules
    assert rule.fallback == ()


def test_the_older_of_two_routes_has_the_name() -> None:
    old = route("old", "llama", model="m", creationTimestamp="2026-01-01T00:00:00Z", namespace="blue")
    new = route("new", "llama", model="m", creationTimestamp="2026-02-01T00:00:00Z")
    outcome = compiled(new, old)
    assert [one.metadata.key for one in snapshot(outcome).routes] == ["blue/old"]
    assert condition(outcome, "ModelRoute", "default/new", "Accepted")[:2] == ("False", "Conflict")
    assert "blue/old" in condition(outcome, "ModelRoute", "default/new", "Accepted")[2]


def of_steps(name: str, *servers: str, namespace: str = "default", model: str = "", **metadata: object) -> Object:
    made = route(name, *servers, namespace=namespace, model=model, **metadata)
    made["spec"]["callers"] = "Steps"
    return made


def test_a_route_of_steps_shares_its_name_with_one_of_clients_and_with_no_other_of_steps() -> None:
    config = resource("GatewayConfig", "gateway", {"steps": "0.0.0.0:9012"})
    outcome = compiled(
        config,
        server(),
        server(namespace="blue"),
        route("clients", "llama", model="m"),
        of_steps("steps", "llama", model="m", creationTimestamp="2026-01-01T00:00:00Z"),
        of_steps("taken", "llama", model="m", namespace="blue"),
        gateway="default/gateway",
    )
    found = snapshot(outcome)
    assert {one.metadata.key: one.spec.callers for one in found.routes} == {
        "default/clients": "Clients",
        "default/steps": "Steps",
    }
    assert found.gateway.steps == "0.0.0.0:9012"
    assert condition(outcome, "ModelRoute", "default/steps", "Programmed")[0] == "True"
    assert condition(outcome, "ModelRoute", "blue/taken", "Accepted")[:2] == ("False", "Conflict")


def test_a_route_of_steps_says_that_they_have_no_listener_until_they_have_one() -> None:
    things = [resource("GatewayConfig", "gateway", {}), server(), of_steps("llama")]
    compiler = feed(Compiler("default/gateway", check_picker=InstalledPluginChecker()), things)
    wanted = ("False", "NoListener")
    assert condition(compiler.compile(), "ModelRoute", "default/llama", "Programmed")[:2] == wanted
    feed(compiler, [resource("GatewayConfig", "gateway", {"steps": "0.0.0.0:9012"}, generation=2)])
    assert condition(compiler.compile(), "ModelRoute", "default/llama", "Programmed")[0] == "True"


def test_a_route_of_steps_has_no_gateways() -> None:
    made = of_steps("llama")
    made["spec"]["parentRefs"] = [{"name": "web"}]
    outcome = compiled(server(), made)
    assert condition(outcome, "ModelRoute", "default/llama", "Accepted")[:2] == ("False", "Invalid")


def test_a_refused_route_takes_no_names() -> None:
    broken = route("broken", model="m", creationTimestamp="2026-01-01T00:00:00Z")
    broken["spec"]["rules"] = []
    outcome = compiled(broken, route("llama", model="m"))
    assert [one.metadata.key for one in snapshot(outcome).routes] == ["default/llama"]
    assert condition(outcome, "ModelRoute", "default/broken", "Accepted")[:2] == ("False", "Invalid")


def test_a_server_with_a_mistake_concerns_nobody_else() -> None:
    broken = server("broken", flowControl={"bands": []})
    outcome = compiled(broken, server(), route("llama"), pod("a"))
    assert addresses(outcome) == ["10.0.0.1:8000"]
    status, reason, message = condition(outcome, "ModelServer", "default/broken", "Accepted")
    assert (status, reason) == ("False", "Invalid")
    assert "bands" in message


@pytest.mark.parametrize(
    "connection",
    [
        {"apiKeyFile": "/var/run/secrets/token"},
        {"apiKeyEnv": "PATH"},
        {"tls": {"caFile": "/ca.pem", "serverName": "a.example"}},
        {"tls": {"insecureSkipVerify": True, "clientCertificate": {"certFile": "/a", "keyFile": "/b"}}},
    ],
)
def test_a_server_that_names_files_of_the_gateway_is_refused(connection: dict[str, object]) -> None:
    """Or its author could have the gateway's own secrets sent to an engine of theirs."""
    outcome = compiled(server("sly", connection=connection), server(), pod("a"))
    _, reason, said = condition(outcome, "ModelServer", "default/sly", "Accepted")
    assert reason == "Invalid"
    assert "names files or variables of the gateway" in said
    assert [one.metadata.key for one in snapshot(outcome).servers] == ["default/llama"]


def test_a_picker_is_a_config_map_of_the_servers_namespace() -> None:
    things = server(pickerConfig="epp"), picker_config("epp", PICKER), picker_config("epp", "x", namespace="blue")
    outcome = compiled(*things)
    (found,) = snapshot(outcome).servers
    assert found.spec.picker_config == "picker.default.epp.yaml"
    assert outcome.files["picker.default.epp.yaml"] == PICKER.encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "document"),
        ("kind: Other", "kind"),
        ("kind: EndpointPickerConfig\nplugins: 3", "line 2: plugins"),
        (
            PICKER.replace("queue-scorer", "queue-scorr"),
            "line 3: plugins[0].type: there is no plugin type 'queue-scorr'",
        ),
        (PICKER.replace("max-score-picker}", "max-score-picker, parameters: {x: 1}}", 1), "plugins[1].parameters"),
    ],
)
def test_a_server_whose_picker_is_wrong_is_served_by_the_default_one_and_says_why(text: str, said: str) -> None:
    outcome = compiled(server(pickerConfig="epp"), picker_config("epp", text))
    (found,) = snapshot(outcome).servers
    assert found.spec.picker_config is None
    assert not [name for name in outcome.files if name.startswith("picker.")]
    status, reason, message = condition(outcome, "ModelServer", "default/llama", "ResolvedRefs")
    assert (status, reason) == ("False", "PickerConfigInvalid")
    assert said in message
    assert picker_notes(snapshot(outcome)) == []


def test_a_server_whose_picker_has_not_come_yet_is_served_by_the_default_one() -> None:
    outcome = compiled(server(pickerConfig="epp"), picker_config("epp", PICKER, namespace="blue"))
    (found,) = snapshot(outcome).servers
    assert found.spec.picker_config is None
    status, reason, message = condition(outcome, "ModelServer", "default/llama", "ResolvedRefs")
    assert (status, reason) == ("False", "PickerConfigNotFound")
    assert "attache.dev/picker-config" in message


def test_what_has_no_effect_in_a_picker_is_said() -> None:
    outcome = compiled(server(pickerConfig="epp"), picker_config("epp", PICKER + "dataLayer: {sources: []}\n"))
    status, _, message = condition(outcome, "ModelServer", "default/llama", "ResolvedRefs")
    assert status == "True"
    assert message.startswith("dataLayer: read, and not used; in its place, the scraper")


def test_a_plugin_that_fails_unforeseen_concerns_its_server_alone() -> None:
    def check(file: PickerFile) -> list[str]:
        raise RuntimeError(file.document.file)

    compiler = Compiler(check_picker=check)
    outcome = feed(compiler, [server(pickerConfig="epp"), picker_config("epp", PICKER), server("qwen")]).compile()
    assert len(snapshot(outcome).servers) == 2
    assert "RuntimeError" in condition(outcome, "ModelServer", "default/llama", "ResolvedRefs")[2]


def test_without_its_gateway_config_nothing_is_served_anew() -> None:
    config = resource("GatewayConfig", "main", {"failureMode": "Open"})
    assert compiled(config, gateway="default/main").refused == ""
    assert snapshot(compiled(config, gateway="default/main")).gateway.failure_mode == "Open"
    assert "default/main" in compiled(gateway="default/main").refused
    broken = resource("GatewayConfig", "main", {"authentication": {"apiKeys": []}})
    outcome = compiled(broken, gateway="default/main")
    assert "authentication" in outcome.refused
    assert condition(outcome, "GatewayConfig", "default/main", "Accepted")[1] == "Invalid"


def test_another_gateways_config_is_none_of_ours() -> None:
    outcome = compiled(resource("GatewayConfig", "other", {"failureMode": "Open"}))
    assert outcome.statuses == {}
    assert snapshot(outcome).gateway.failure_mode is None


def test_files_do_not_meet() -> None:
    assert file_name("ModelServer", "a/b.c") != file_name("ModelServer", "a-b/c")
    assert (
        len({file_name("ModelServer", object_key(space, name)) for space in "ab" for name in ("a.b", "b.a", "b")}) == 6
    )


def test_documents_say_nothing_of_who_changed_them() -> None:
    thing = server()
    thing["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    thing["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 1000}
    (text,) = (text for name, text in compiled(thing).files.items() if name.startswith("modelserver"))
    annotations = {"attache.dev/of-cluster": "true"}
    assert json.loads(text)["metadata"] == {"name": "llama", "namespace": "default", "annotations": annotations}


# few, so that objects meet
NAMES = st.sampled_from(["a", "b"])
SPACES = st.sampled_from(["default", "default", "default", "blue"])
TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])


@st.composite
def servers(draw: st.DrawFn) -> Object:
    more = draw(st.sampled_from([{}, {"pickerConfig": "a"}, {"pdGroup": {"prefillLabels": {}}}]))
    return server(draw(NAMES), namespace=draw(SPACES), app=draw(NAMES), **more)


@st.composite
def listing_servers(draw: st.DrawFn) -> Object:
    addresses = draw(st.sampled_from([["10.0.0.9:1"], [], ["nowhere"]]))
    endpoints = [{"address": one} for one in addresses]
    return resource("ModelServer", draw(NAMES), {"model": "m", "endpoints": endpoints}, namespace=draw(SPACES))


@st.composite
def routes(draw: st.DrawFn) -> Object:
    targets = draw(st.lists(NAMES, min_size=1, max_size=2))
    made = route(draw(NAMES), *targets, namespace=draw(SPACES), model=draw(NAMES), creationTimestamp=draw(TIMES))
    adapters = draw(st.lists(NAMES, max_size=2))
    made["spec"] |= {"loraAdapters": adapters} if adapters else {}
    return made


@st.composite
def pods(draw: st.DrawFn) -> Object:
    leaving = draw(st.sampled_from([{}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}]))
    ip = draw(st.sampled_from(["10.0.0.1", "10.0.0.2", ""]))
    return pod(draw(NAMES), ip, namespace=draw(SPACES), app=draw(NAMES), ready=draw(st.booleans()), **leaving)


@st.composite
def objectives(draw: st.DrawFn) -> Object:
    made = resource("InferenceObjective", draw(NAMES), {"priority": draw(st.sampled_from([1, "high"]))})
    return {**made, "apiVersion": "inference.networking.x-k8s.io/v1alpha2"}


UNKNOWN_PLUGIN = PICKER.replace("queue-scorer", "queue-scorr")
PICKERS = st.builds(picker_config, NAMES, st.sampled_from([PICKER, "nonsense", UNKNOWN_PLUGIN]), namespace=SPACES)
MODES = st.sampled_from(
    [
        {"failureMode": "Open"},
        {"failureMode": "Ajar"},
        {"authentication": {"apiKeySecrets": [{"name": "a"}, {"name": "b", "tenant": "t"}]}},
        {"failureMode": "Open", "tenants": [{"name": "t", "models": ["a"]}], "listeners": [HTTP_LISTENER]},
    ]
)
SECRETS = st.builds(
    secret, NAMES, st.dictionaries(st.sampled_from(["web", "Web", "job"]), st.sampled_from(["sk-0123456789", "x"]))
)


@st.composite
def policies(draw: st.DrawFn) -> Object:
    kinds = st.sampled_from(["ModelRoute", "ModelServer", "GatewayConfig", "HTTPRoute", "Gateway"])
    targets = draw(st.lists(st.tuples(kinds, NAMES, st.sampled_from([{}, {"sectionName": "http"}])), max_size=2))
    theirs = {"group": "gateway.networking.k8s.io"}
    refs = [
        {"kind": kind, "name": name, **more, **(theirs if kind in {"HTTPRoute", "Gateway"} else {})}
        for kind, name, more in targets
    ]
    rules = draw(st.sampled_from([[], [{"models": ["a"]}], [{"models": ["a*b"]}], "all"]))
    spec = {"rules": rules} | ({"targetRefs": refs} if refs else {})
    return resource("ModelAccessPolicy", draw(NAMES), spec, namespace=draw(SPACES))


GATEWAYS = st.builds(resource, st.just("GatewayConfig"), NAMES, MODES)
THINGS = st.one_of(servers(), listing_servers(), routes(), pods(), PICKERS, GATEWAYS, objectives(), policies(), SECRETS)
STEPS = st.lists(
    st.tuples(THINGS, st.sampled_from(["put", "compile", "compile", "delete", "twice"])), min_size=10, max_size=40
)


@settings(max_examples=examples(200))
@given(steps=STEPS, gateway=st.sampled_from([None, "default/a"]))
def test_any_history_ends_as_a_fresh_compilation_does_and_can_be_read(
    steps: list[tuple[Object, str]], gateway: str | None
) -> None:
    compiler = Compiler(gateway, check_picker=InstalledPluginChecker())
    state: dict[tuple[str, str], Object] = {}
    for thing, verb in steps:
        kind, key = thing["kind"], key_of(thing)
        if verb == "delete":
            state.pop((kind, key), None)
            compiler.update_object(kind, key, None)
            continue
        state[kind, key] = thing
        for _ in range(2 if verb == "twice" else 1):
            compiler.update_object(kind, key, thing)
        if verb == "compile":
            compiler.compile()
    outcome = compiler.compile()
    fresh = compiled(*state.values(), gateway=gateway)
    assert outcome == fresh
    if not outcome.refused:
        # as extproc reads it, plugins included
        pickers_for(snapshot(outcome), {}, PickerFactory())
    kinds = ("ModelServer", "ModelRoute", "ModelAccessPolicy")
    assert {key for key in state if key[0] in kinds} <= outcome.statuses.keys()
