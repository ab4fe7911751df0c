# SPDX-License-Identifier: Apache-2.0
"""llm-d's file-discovery: its files as a directory; what cannot be used leaves what was there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from controller.gateway.compile.file_discovery import (
    DiscoveryInvalid,
    FileDiscoverySettings,
    FilePoolCompiler,
    parse_file_discovery,
    read_endpoints,
)
from controller.gateway.inference_pool_reconciler import read_bounded_text
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.document_decoder import read_picker_file
from extproc.llmd.picker_builder import InstalledPluginChecker

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - name: file-disc
    type: file-discovery
    parameters: {path: /etc/epp/endpoints.yaml, watchFile: true}
  - type: queue-scorer
dataLayer:
  discovery: {pluginRef: file-disc}
"""
# As docs/discovery.md of llm-d-router has it.
ENDPOINTS = """\
endpoints:
  - name: vllm-0
    address: "10.0.0.1"
    port: "8000"
    labels:
      model: llama-3-8b

  - name: vllm-1
    namespace: inference
    address: "10.0.0.2"
    port: "8000"
"""


def discovery(text: str) -> FileDiscoverySettings | None:
    return parse_file_discovery(read_picker_file("epp.yaml", text).config)


def test_the_file_says_where_the_endpoints_are() -> None:
    assert discovery(CONFIG) == FileDiscoverySettings("/etc/epp/endpoints.yaml", watches=True)
    assert discovery(CONFIG.replace("file-discovery", "multicluster-file-discovery")) is not None
    assert discovery(CONFIG.replace(", watchFile: true", "")) == FileDiscoverySettings(
        "/etc/epp/endpoints.yaml", watches=False
    )
    assert discovery(CONFIG[: CONFIG.index("dataLayer")]) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pluginRef: file-disc", "pluginRef: file-dics", "name a plugin of type file-discovery"),
        ("type: file-discovery", "type: models-data-source", "'file-disc' of type models-data-source"),
        ("path: /etc/epp/endpoints.yaml, ", "", "the parameter 'path' is missing"),
    ],
)
def test_a_discovery_that_there_is_not_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(DiscoveryInvalid, match=said):
        discovery(CONFIG.replace(old, new))


def test_endpoints_have_their_labels_and_the_name_as_one_of_them() -> None:
    found = read_endpoints("endpoints.yaml", ENDPOINTS)
    assert found.problems == ()
    assert found.endpoints == (
        {"address": "10.0.0.1:8000", "labels": {"model": "llama-3-8b", "attache.dev/pod": "vllm-0"}},
        {"address": "10.0.0.2:8000", "labels": {"attache.dev/pod": "vllm-1"}},
    )


def listed(*entries: object) -> str:
    return json.dumps({"endpoints": entries})


def addresses(text: str) -> list[str]:
    return [one["address"] for one in read_endpoints("endpoints.json", text).endpoints]


def test_of_two_entries_with_one_name_or_one_address_the_later_one_counts() -> None:
    first = {"name": "a", "address": "10.0.0.1", "port": "1"}
    assert addresses(listed(first, {**first, "port": "2"})) == ["10.0.0.1:2"]
    assert addresses(listed(first, {**first, "namespace": "other", "port": "2"})) == ["10.0.0.1:1", "10.0.0.1:2"]
    (found,) = read_endpoints("f", listed(first, {**first, "name": "b"})).endpoints
    assert found["labels"]["attache.dev/pod"] == "b"


@pytest.mark.parametrize(
    "entry",
    [
        {"address": "10.0.0.1", "port": "1"},
        {"name": "a", "address": "10.0.0.300", "port": "1"},
        {"name": "a", "address": "10.0.0.1", "port": "0"},
        {"name": "a", "address": "10.0.0.1", "port": "70000"},
        {"name": "a", "address": "10.0.0.1", "port": "1", "labels": {"a": 1}},
        "10.0.0.1:8000",
        None,
    ],
)
def test_an_entry_that_cannot_be_used_is_left_out_and_told(entry: object) -> None:
    good = {"name": "good", "address": "10.0.0.9", "port": 9, "rank": "ignored"}
    found = read_endpoints("f", listed(entry, good))
    assert [one["address"] for one in found.endpoints] == ["10.0.0.9:9"]
    assert len(found.problems) == 1
    assert found.problems[0].startswith("endpoints[0]: ")


def test_addresses_of_ip6_and_names_are_more_than_llm_d_takes() -> None:
    assert addresses(listed({"name": "a", "address": "fd00::1", "port": "1"})) == ["[fd00::1]:1"]
    assert addresses(listed({"name": "a", "address": "node-7.cluster", "port": "1"})) == ["node-7.cluster:1"]


@pytest.mark.parametrize(
    "text", ["endpoints: 3", "- a", "endpoints: [", "a: 1\na: 2", "", "endpoints: []\n" + "#" * 2**20]
)
def test_a_file_that_is_no_list_of_endpoints_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid):
        read_endpoints("f", text)


def test_what_comes_of_the_files_is_a_directory_that_loads_and_problems_leave_it() -> None:
    compiler = FilePoolCompiler("slurm/job", {"engine": "SGLang"}, check_picker=InstalledPluginChecker())
    assert compiler.compile().files is None
    compiler.put_config(CONFIG)
    compiler.put_endpoints("e.yaml", ENDPOINTS)
    before = compiler.compile()
    assert before.files is not None
    snapshot = load_snapshot(before.files)
    (server,) = snapshot.servers
    assert (server.metadata.key, server.spec.engine, server.spec.stream_usage) == ("slurm/job", "SGLang", "AsRequested")
    assert [one.address for one in server.spec.endpoints] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.spec.picker_config in snapshot.picker_files
    assert (before.endpoints, before.problems) == (2, ())
    assert any(note.startswith("file-discovery") for note in before.notes)

    compiler.put_config(CONFIG.replace("queue-scorer", "queue-scorr"))
    compiler.put_endpoints("e.yaml", "endpoints: 3")
    after = compiler.compile()
    assert after.files == before.files
    assert {one.reason for one in after.problems} == {"PickerConfigInvalid", "EndpointsInvalid"}
    assert all(one.message.endswith("what was used before stays") for one in after.problems)

    compiler.put_config(CONFIG)
    compiler.put_endpoints("e.yaml", "endpoints: []")
    emptied = compiler.compile()
    assert [one.reason for one in emptied.problems] == ["NoEndpoints"]
    assert msgspec.structs.replace(emptied, problems=(), files=None).endpoints == 0


def test_fields_of_the_model_server_that_cannot_be_are_told() -> None:
    compiler = FilePoolCompiler("slurm/job", {"engin": "SGLang"}, check_picker=InstalledPluginChecker())
    compiler.put_config(CONFIG)
    compiler.put_endpoints("e.yaml", ENDPOINTS)
    (problem,) = compiler.compile().problems
    assert problem.reason == "PoolInvalid"
    assert "did you mean 'engine'" in problem.message


def test_a_pipe_is_not_waited_for_and_no_name_of_a_file_ends_the_role(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert [read_bounded_text(one) for one in (tmp_path / "pipe", tmp_path, Path("a\0b"), Path("x" * 5000))] == [
        None
    ] * 4
