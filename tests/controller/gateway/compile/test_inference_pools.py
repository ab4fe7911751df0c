# SPDX-License-Identifier: Apache-2.0
"""An InferencePool becomes a ModelServer that the compiler takes like any other."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.gateway.compile.inference_pools import SETTINGS, server_from_pool, server_key
from controller.gateway.compile.model_servers import ModelServerCompiler
from controller.kube.api_resources import key_of
from extproc.api.picker_config import accept_any_plugins
from tests.kube_objects import Object, pod


def pool(name: str = "llama", *, annotation: str = "", **spec: object) -> Object:
    """An InferencePool v1 that selects the pods of ``app: llama``."""
    content: dict[str, Any] = {
        "selector": {"matchLabels": {"app": "llama"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "picker", "port": {"number": 9002}},
        **spec,
    }
    metadata: dict[str, Any] = {"name": name, "namespace": "team", "uid": "u", "generation": 3}
    if annotation:
        metadata["annotations"] = {SETTINGS: annotation}
    version = "inference.networking.k8s.io/v1"
    return {"apiVersion": version, "kind": "InferencePool", "metadata": metadata, "spec": content}


def compiled(thing: Object, *pods: Object) -> tuple[dict[str, Any] | None, str]:
    """The spec in the directory, and why there is none."""
    found = server_from_pool(thing)
    assert found.server is not None, found.complaint
    servers = ModelServerCompiler(accept_any_plugins, lambda _: None)
    servers.put_pool("team/llama", thing)
    for one in pods:
        servers.put_pod(key_of(one), one)
    servers.compile()
    text = servers.results[server_key("team/llama")].document
    return (json.loads(text)["spec"] if text else None), servers.pool_problems().get("team/llama", "")


def test_every_port_of_every_ready_pod_is_an_endpoint() -> None:
    ports = [{"number": 8000}, {"number": 8001}]
    pods = [pod("a", "10.0.0.1", namespace="team"), pod("b", "10.0.0.2", namespace="team", ready=False)]
    spec, _ = compiled(pool(targetPorts=ports), *pods, pod("c", "10.0.0.3", namespace="other"))
    assert spec is not None
    assert [one["address"] for one in spec["endpoints"]] == ["10.0.0.1:8000", "10.0.0.1:8001"]


def test_the_older_version_is_read_too() -> None:
    older = pool()
    older["apiVersion"] = "inference.networking.x-k8s.io/v1alpha2"
    older["spec"] = {"selector": {"app": "llama"}, "targetPortNumber": 9000, "extensionRef": {"name": "picker"}}
    spec, _ = compiled(older, pod("a", "10.0.0.1", namespace="team"))
    assert spec is not None
    assert [one["address"] for one in spec["endpoints"]] == ["10.0.0.1:9000"]


def test_fields_that_a_pool_does_not_have_come_from_its_annotation() -> None:
    spec, _ = compiled(pool(annotation="engine: SGLang\nmodel: org/llama"))
    assert spec is not None
    assert (spec["engine"], spec["model"]) == ("SGLang", "org/llama")
    nothing, said = compiled(pool(annotation="engine: nvLLM"))
    assert nothing is None
    assert "engine" in said


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (pool(annotation="a: [1"), "as YAML"),
        (pool(annotation="engine: vLLM\nengine: vLLM"), "as YAML"),
        (pool(annotation="- engine"), "as YAML"),
        (pool(annotation="endpoints: []"), "leave 'endpoints' out"),
        (pool(selector={"matchLabels": {}}), "needs both"),
        (pool(targetPorts=[]), "needs both"),
        (pool("p" * 250), "choose a shorter one"),
    ],
)
def test_a_pool_that_cannot_be_used_says_why(thing: Object, said: str) -> None:
    found = server_from_pool(thing)
    assert found.server is None
    assert said in found.complaint


def test_a_named_config_map_has_precedence_over_the_annotation() -> None:
    found = server_from_pool(pool(annotation="pickerConfig: a"), picker_config="b")
    assert found.server is not None
    assert found.server["spec"]["pickerConfig"] == "b"
    assert server_key("team/llama") == "team/inferencepool.llama"


@pytest.mark.parametrize("key", ["1", "1.5", "null", "true", "2024-01-01"])
@pytest.mark.parametrize("text", ["{key}: x", "trafficPolicy: {{{key}: x}}", "endpoint: [[{{{key}: x}}]]"])
def test_keys_of_the_annotation_that_are_no_text_are_refused(key: str, text: str) -> None:
    found = server_from_pool(pool(annotation=text.format(key=key)))
    assert found.server is None
    assert found.complaint.endswith("every key must be text, so put others in quotes")
