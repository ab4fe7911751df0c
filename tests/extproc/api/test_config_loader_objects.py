# SPDX-License-Identifier: Apache-2.0
"""What has not changed is the same object again; what has, is read and checked anew. Objects are namespace and name."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import SnapshotLoader, load_snapshot

SERVER = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: NAME}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}], scrapeInterval: 1s}
"""
ROUTE = """apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: NAME}
spec: {modelName: NAME, rules: [{targetModels: [{modelServerName: NAME}]}]}
"""
PICKER = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins: [{type: queue-scorer}]
flowControl: {defaultRequestTTL: 20s}
"""


def server(name: str, *, namespace: str = "default") -> str:
    return SERVER.replace("NAME", name).replace("{name:", f"{{namespace: {namespace}, name:")


def route(name: str, *, namespace: str = "default") -> str:
    return ROUTE.replace("NAME", name).replace("{name:", f"{{namespace: {namespace}, name:")


def as_json(*documents: str) -> bytes:
    return msgspec.json.encode([yaml.safe_load(one) for one in documents])


def mistakes_of(loader: SnapshotLoader, **files: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        loader.load({f"{name}.yaml": text.encode() for name, text in files.items()})
    return str(caught.value)


@pytest.mark.parametrize("is_json", [False, True])
def test_in_a_changed_file_the_documents_that_stay_are_the_same_objects(*, is_json: bool) -> None:
    def file(*documents: str) -> dict[str, bytes]:
        return {"all.json": as_json(*documents)} if is_json else {"all.yaml": "---\n".join(documents).encode()}

    loader = SnapshotLoader()
    before = loader.load(file(server("a"), server("b"), route("a")))
    moved = server("a").replace("10.0.0.1", "10.0.0.9") + "# one line more\n"
    after = loader.load(file(moved, server("b"), route("a")))
    assert before.version != after.version
    assert after.servers[0].spec.endpoints[0].address == "10.0.0.9:8000"
    assert after.servers[1] is before.servers[1]
    assert after.routes[0] is before.routes[0]
    assert after == load_snapshot(file(moved, server("b"), route("a")))


def test_a_file_under_another_name_is_not_decoded_again() -> None:
    loader = SnapshotLoader()
    before = loader.load({"a.yaml": server("a").encode()})
    after = loader.load({"b.yaml": server("a").encode()})
    assert after.servers[0] is before.servers[0]


def test_mistakes_are_told_again_until_they_are_mended_and_on_the_lines_where_they_then_are() -> None:
    loader = SnapshotLoader()
    wrong = server("b").replace("model: m", "modle: m")
    assert "x.yaml:9: spec.modle: there is no such field" in mistakes_of(loader, x=server("a") + "---\n" + wrong)
    assert "x.yaml:9: spec.modle" in mistakes_of(loader, x=server("a") + "---\n" + wrong)
    assert "x.yaml:10: spec.modle" in mistakes_of(loader, x="# comment\n" + server("a") + "---\n" + wrong)
    good = loader.load({"x.yaml": (server("a") + "---\n" + server("b")).encode()})
    assert [one.metadata.key for one in good.servers] == ["default/a", "default/b"]


def test_references_are_checked_anew_though_neither_document_has_changed() -> None:
    loader = SnapshotLoader()
    loader.load({"server.yaml": server("a").encode(), "route.yaml": route("a").encode()})
    assert "route.yaml:4: spec.rules[0].targetModels[0].modelServerName: no ModelServer" in mistakes_of(
        loader, route=route("a")
    )
    assert "the ModelServer 'default/a' is already in" in mistakes_of(loader, one=server("a"), two=server("a"))


def test_names_are_unique_in_their_namespace_and_routes_refer_to_their_own() -> None:
    documents = [server("a", namespace="team-1"), server("a", namespace="team-2"), route("a", namespace="team-2")]
    found = load_snapshot({"all.yaml": "---\n".join(documents).encode()})
    assert [one.metadata.key for one in found.servers] == ["team-1/a", "team-2/a"]
    (only,) = found.routes
    assert only.server_key(only.spec.rules[0].target_models[0]) == "team-2/a"
    elsewhere = "---\n".join([server("a", namespace="team-1"), route("a", namespace="team-2")])
    assert "no ModelServer is called 'a' in the namespace 'team-2'" in mistakes_of(SnapshotLoader(), all=elsewhere)
    assert "metadata.namespace: 'a/b' is not a name" in mistakes_of(SnapshotLoader(), all=server("a", namespace="a/b"))


def test_a_model_has_one_route_in_all_namespaces() -> None:
    documents = [text for n in ("one", "two") for text in (server("a", namespace=n), route("a", namespace=n))]
    assert "the model or adapter 'a' is already in all.yaml" in mistakes_of(
        SnapshotLoader(), all="---\n".join(documents)
    )


def test_json_is_held_to_the_same_rules() -> None:
    wrong = as_json(server("a").replace("1s", "soon").replace("model: m", "model: 7"))
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.json": wrong})
    said = [str(one) for one in caught.value.mistakes]
    assert said[0].startswith("a.json:1: spec.model: 7 is a number; put it in quotes")
    assert said[1].startswith("a.json:1: spec.scrapeInterval: 'soon' is not a duration")
    twice = b'{"apiVersion": "attache.dev/v1alpha1", "kind": "ModelServer",\n "metadata": {"name": "a", "name": "b"},'
    with pytest.raises(ConfigInvalid, match=r"a.json:2: metadata.name: is written twice"):
        load_snapshot({"a.json": twice + b'"spec": {"model": "m", "endpoints": []}}'})


def test_json_of_other_programs_is_left_alone() -> None:
    keys = b'{"keys": [{"kty": "RSA"}]}'
    assert load_snapshot({"jwks.json": keys, "a.yaml": server("a").encode()}).servers
    with pytest.raises(ConfigInvalid, match="'ModelSrever' is not a kind"):
        load_snapshot({"a.json": as_json(server("a").replace("ModelServer", "ModelSrever"))})


def test_a_kind_of_the_cluster_is_not_taken_for_a_misspelt_one() -> None:
    with pytest.raises(ConfigInvalid, match="Model is read in a cluster only; here write a ModelServer"):
        load_snapshot({"a.yaml": server("a").replace("kind: ModelServer", "kind: Model").encode()})


def test_a_picker_file_keeps_its_decoded_form_and_tells_mistakes_where_it_now_stands() -> None:
    loader = SnapshotLoader()
    before = loader.load({"epp.yaml": f"---\n{PICKER}".encode()}).picker_files["epp.yaml"]
    after = loader.load({"epp.yaml": (server("a") + "---\n" + PICKER).encode()}).picker_files["epp.yaml"]
    assert after.config.plugins is before.config.plugins
    assert after.flow_control is before.flow_control
    assert (before.document.line, after.document.line) == (1, 5)


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("20s", "soon", "epp.yaml:5: flowControl.defaultRequestTTL: 'soon' is not a duration"),
        ("20s,", "20s, maxBytes: lots,", "epp.yaml:5: flowControl.maxBytes: 'lots' is not a quantity"),
        ("20s,", "20s, maxByte: 1,", "epp.yaml:5: flowControl.maxByte: there is no such field"),
        (
            "{type: queue-scorer}]",
            "{type: concurrency-detector, parameters: {maxConcurrency: many}}]",
            "epp.yaml:4: plugins[0].parameters.maxConcurrency: 'many' is text; write a whole number",
        ),
    ],
)
def test_mistakes_in_a_picker_file_are_found_when_it_is_read(old: str, new: str, mistake: str) -> None:
    text = PICKER.replace("20s}", "20s, saturationDetector: {pluginRef: concurrency-detector}}").replace(old, new)
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"epp.yaml": text.encode()})
    assert mistake in str(caught.value)


def test_labels_that_yaml_makes_something_else_of_are_mistakes_and_no_crash() -> None:
    labelled = server("a").replace('"10.0.0.1:8000"', '"10.0.0.1:8000", labels: {1: x, gpu: 2}')
    found = mistakes_of(SnapshotLoader(), a=labelled)
    assert "spec.endpoints[0].labels.1: 1 is a number; put it in quotes" in found
    assert "spec.endpoints[0].labels.gpu: 2 is a number; put it in quotes" in found
