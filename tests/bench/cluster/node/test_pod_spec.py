# SPDX-License-Identifier: Apache-2.0
"""What a node makes of images, variables, volumes, quantities and addresses."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.node.pod_files import (
    mount_paths,
    ports_of,
    remove_stale_files,
    rewrite_argument,
    volume_files,
    write_files,
)
from bench.cluster.node.pod_network import LoopbackAddresses, NoAddressLeft
from bench.cluster.node.pod_spec import (
    IMAGES,
    ImageMissing,
    ReferencedSources,
    ReferenceMissing,
    container_command,
    environment,
    expand_variables,
    image_repository,
    referenced_names,
)

POD: dict[str, Any] = {
    "metadata": {"name": "one", "namespace": "default", "uid": "u", "labels": {"app": "test"}},
    "spec": {"containers": [], "nodeName": "node-0"},
}
CONFIG = {"kind": "ConfigMap", "data": {"colour": "red"}, "binaryData": {"blob": base64.b64encode(b"\0").decode()}}
SECRET = {"kind": "Secret", "data": {"key": base64.b64encode(b"hush").decode()}}
SOURCES = ReferencedSources(config_maps={"c": CONFIG}, secrets={"s": SECRET}, pod_ip="127.1.0.1", host_ip="127.0.0.1")


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("attache/engine-sim", "attache/engine-sim"),
        ("registry.test:5000/attache/engine-sim:v1@sha256:0", "attache/engine-sim"),
        ("localhost/python:3.11", "python"),
        ("busybox:latest", "busybox"),
    ],
)
def test_a_repository_is_an_image_without_registry_and_tag(image: str, name: str) -> None:
    assert image_repository(image) == name


def test_a_command_replaces_the_entry_point_and_args_follow_it() -> None:
    entry = IMAGES["attache/engine-sim"]
    assert container_command({"image": "attache/engine-sim", "args": ["--port", "1"]}, IMAGES) == (
        entry,
        ("--port", "1"),
    )
    assert container_command({"image": "busybox", "command": ["sh"], "args": ["-c"]}, IMAGES) == ((), ("sh", "-c"))
    with pytest.raises(ImageMissing, match="nobody/nothing"):
        container_command({"image": "nobody/nothing:v1"}, IMAGES)


def test_redis_takes_the_words_of_its_container_and_connections_of_other_pods() -> None:
    entry, words = container_command({"image": "redis:8-alpine", "args": ["redis-server", "--save", ""]}, IMAGES)
    done = subprocess.run([*entry, "echo", *words[1:]], capture_output=True, text=True, check=True)
    assert done.stdout == "--save  --protected-mode no\n"


def test_variables_come_from_values_references_and_fields() -> None:
    container = {
        "env": [
            {"name": "A", "value": "1"},
            {"name": "B", "value": "$(A)-$(C)-$$(A)"},
            {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "colour"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y", "optional": True}}},
        ],
        "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}],
        "resources": {"limits": {"cpu": "1500m"}},
    }
    found = environment(POD, container, SOURCES)
    assert found == {
        "P_colour": "red",
        "P_blob": "\0",
        "A": "1",
        "B": "1-$(C)-$(A)",
        "COLOUR": "red",
        "KEY": "hush",
        "APP": "test",
        "NODE": "node-0",
        "IP": "127.1.0.1",
        "CPU": "2",
    }
    assert expand_variables("$(A)/x", found) == "1/x"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"configMapKeyRef": {"name": "x", "key": "y"}}, 'configmap "x" not found'),
        ({"secretKeyRef": {"name": "x", "key": "y"}}, 'secret "x" not found'),
        ({"configMapKeyRef": {"name": "c", "key": "y"}}, "couldn't find key y in c"),
        ({"fieldRef": {"fieldPath": "status.phase"}}, "status.phase is not supported"),
    ],
)
def test_what_is_missing_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ReferenceMissing, match=why):
        environment(POD, {"env": [{"name": "A", "valueFrom": given}]}, SOURCES)


def test_all_references_are_found() -> None:
    main = {
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s1", "key": "k"}}}],
        "envFrom": [{"configMapRef": {"name": "c1"}}, {"secretRef": {"name": "s2"}}],
    }
    volumes = [
        {"name": "a", "configMap": {"name": "c2"}},
        {"name": "b", "secret": {"secretName": "s3"}},
        {"name": "c", "projected": {"sources": [{"configMap": {"name": "c3"}}, {"secret": {"name": "s4"}}]}},
    ]
    pod = {"spec": {"containers": [main], "volumes": volumes}}
    assert referenced_names(pod) == ({"c1", "c2", "c3"}, {"s1", "s2", "s3", "s4"})


def test_volumes_are_files() -> None:
    volumes = [
        {"name": "all", "configMap": {"name": "c"}},
        {"name": "some", "configMap": {"name": "c", "items": [{"key": "colour", "path": "sub/colour.txt"}]}},
        {"name": "empty", "emptyDir": {}},
        {"name": "hidden", "secret": {"secretName": "s"}},
        {"name": "fields", "downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "none", "configMap": {"name": "x", "optional": True}},
    ]
    assert volume_files({**POD, "spec": {"volumes": volumes}}, SOURCES) == {
        "all": {"colour": b"red", "blob": b"\0"},
        "some": {"sub/colour.txt": b"red"},
        "empty": {},
        "hidden": {"key": b"hush"},
        "fields": {"name": b"one"},
        "none": {},
    }
    with pytest.raises(ReferenceMissing):
        volume_files({"spec": {"volumes": [{"name": "a", "configMap": {"name": "x"}}]}}, SOURCES)


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("/config", "/v/c"),
        ("--config=/config/a.yaml", "--config=/v/c/a.yaml"),
        ("/config/deep", "/v/d"),
        ("cat /config/a; ls /config", "cat /v/c/a; ls /v/c"),
        ("/configuration", "/configuration"),
        ("/etc/config", "/etc/config"),
        ("0.0.0.0:8000", "127.1.0.1:8000"),
        ("--host=0.0.0.0", "--host=127.1.0.1"),
        ("[::]:8000", "127.1.0.1:8000"),
        ("10.0.0.0", "10.0.0.0"),
        ("--engine=http://127.0.0.1:8000/v1", "--engine=http://127.1.0.1:8000/v1"),
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:80001", "http://127.0.0.1:80001"),
        ("/v", "/x/v"),
    ],
)
def test_words_are_rewritten_for_this_machine(word: str, becomes: str, tmp_path: Path) -> None:
    container = {
        "volumeMounts": [
            {"mountPath": "/config", "name": "c"},
            {"mountPath": "/config/deep/", "name": "d"},
            {"mountPath": "/v", "name": "v"},
        ]
    }
    places = mount_paths(container, tmp_path)
    assert places["/config/deep"] == tmp_path / "d"
    named = {"/config": "/v/c", "/config/deep": "/v/d", "/v": "/x/v"}
    declared = ports_of({"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 8000}]}]}})
    assert (
        rewrite_argument(word, {path: Path(place) for path, place in named.items()}, "127.1.0.1", declared) == becomes
    )


def test_files_are_written_once_and_removed_when_they_are_no_more(tmp_path: Path) -> None:
    assert write_files(tmp_path, {"a": b"1", "sub/b": b"2"})
    assert not write_files(tmp_path, {"a": b"1"})
    assert write_files(tmp_path, {"a": b"3"})
    (tmp_path / "old").write_text("x")
    remove_stale_files(tmp_path, {"a": b"3"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "sub"]


def test_addresses_are_handed_out_again_as_late_as_possible() -> None:
    with LoopbackAddresses() as addresses:
        given = [addresses.allocate() for _ in range(254 * 255)]
        assert len(set(given)) == len(given)
        assert {one.rpartition(".")[2] for one in given} == {str(number) for number in range(1, 255)}
        with pytest.raises(NoAddressLeft):
            addresses.allocate()
        addresses.release(given[3])
        addresses.release(given[0])
        assert [addresses.allocate(), addresses.allocate()] == [given[0], given[3]]


def test_two_clusters_have_different_networks() -> None:
    with LoopbackAddresses([201, 202]) as first, LoopbackAddresses([201, 202]) as second:
        assert (first.allocate(), second.allocate()) == ("127.201.0.1", "127.202.0.1")
        with pytest.raises(NoAddressLeft):
            LoopbackAddresses([201, 202])
    with LoopbackAddresses([201, 202]) as again:
        assert again.allocate() == "127.201.0.1"
