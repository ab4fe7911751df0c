# SPDX-License-Identifier: Apache-2.0
"""Plausible mistakes: each is told of once, by its name, with what to write instead."""

from __future__ import annotations

import json

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.document_decoder import decode
from extproc.api.yaml_documents import Document

TEXT = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata:
  name: llama
spec:
  model: llama-8b
  engine: vLLM
  endpoints:
  - address: 127.0.0.1:8000
  trafficPolicy:
    timeout: 30s
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata:
  name: llama
spec:
  modelName: llama-8b
  rules:
  - targetModels:
    - modelServerName: llama
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  model:", "\tmodel:", "a.yaml:6: not YAML: a tab in the indentation"),
        ("  - address", "\t- address", "a.yaml:9: not YAML: a tab in the indentation"),
        ("- address", "-\taddress", "a.yaml:9: not YAML: a tab in the indentation"),
        (" 30s", " 30", "30 has no unit; write 30s if it is seconds"),
        (" 30s", " 5 minutes", "'5 minutes' is not a duration; write 5m"),
        (" 30s", "", "has no value; write a duration, such as 30s"),
        ("model: llama-8b", "model: 8", "8 is a number; put it in quotes"),
        ("model: llama-8b", "model: @llama", "must not begin with @"),
        ("model: llama-8b", 'model: "llama', "a.yaml:6: not YAML: a quote is opened here and never closed"),
        ("modelName: llama-8b", "modelName: *", "must not begin with *"),
        ("  - address", "    address", "write a list, each item on a line that begins with '- '"),
        ("- address: ", "- ", "is text; write fields, indented, such as address:"),
        ("address", "adress", "did you mean 'address'?"),
        ("engine: vLLM", "engine: vllm", "did you mean 'vLLM'?"),
        (
            "  rules:",
            "  rateLimits: [{requests: 10, per: minute}]\n  rules:",
            "'minute' is a choice of 'unit': write unit: minute, and here one of: ApiKey, Header, Route, Tenant, User",
        ),
        ("---\n", "", "a.yaml:12: apiVersion: a second document begins here"),
        ("kind: ModelServer\n", "", "the field 'kind' is missing"),
        ("kind: ModelServer", "Kind: ModelServer", "a.yaml:2: Kind: there is no such field; did you mean 'kind'?"),
        ("spec:\n", "specs:\n", "a.yaml:5: specs: there is no such field; did you mean 'spec'?"),
        (
            "  trafficPolicy:",
            "trafficPolicy:",
            "trafficPolicy: there is no such field; 'spec' has one: indent it below",
        ),
        ("spec:\n", "guard: {}\nspec:\n", "a.yaml:5: guard: there is no such field; write one of: metadata, spec"),
        (
            "  name: llama\nspec",
            "  nmespace: a\n  name: llama\nspec",
            "metadata.nmespace: there is no such field; did you mean 'namespace'?",
        ),
        ("---\n", " ---\n", "a.yaml:12: not YAML: dashes that separate no documents; write '---'"),
        ("---\n", "--\n", "a.yaml:12: not YAML: dashes that separate no documents; write '---'"),
        ("model: llama-8b", "model:llama-8b", "a.yaml:6: not YAML: 'model' is no field without a colon and a space"),
        ("model: llama-8b", "model llama-8b", "a.yaml:6: not YAML: 'model' is no field without a colon and a space"),
        ("model: llama-8b", 'model: "llama"-8b', "a.yaml:6: not YAML: text after the closing quote"),
        ("model: llama-8b", "model: {{ .model }}", "a.yaml:6: holds a template"),
        ("- address", "-address", "a.yaml:9: spec.-address: there is no such field; write a space between the dash"),
        ("engine: vLLM", "engine: [vLLM]", '["vLLM"] is not a choice; did you mean'),
        ("  trafficPolicy:\n    timeout", "  timeout", "spec.timeout: there is no such field; "),
        ("8000\n", "8000\n    price: -1\n", "price: -1 is too small; write more than 0"),
        ("8000\n", "8000\n    price: cheap\n", "price: 'cheap' is text; write a number"),
        ("8000\n", "8000\n    draining: yes please\n", "draining: 'yes please' is text; write true or false"),
        ("modelServerName: llama", "modelServerName: lama", "did you mean 'llama'?"),
        ("127.0.0.1:8000", "127.0.0.1", "it has no port: write 127.0.0.1:8000"),
        ("  model:", "  flowControl: {maxBytes: 10GB}\n  model:", "write 10Gi for powers of 1024"),
    ],
)
def test_one_mistake_is_one_message(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": TEXT.replace(old, new, 1).encode()})
    (mistake,) = caught.value.mistakes
    assert said in str(mistake)


@pytest.mark.parametrize(("field", "value"), [("encodeLabels", "{role: encode}"), ("connector", "ECExampleConnector")])
def test_an_encode_stage_is_refused_with_what_to_do(field: str, value: str) -> None:
    group = f"  pdGroup: {{prefillLabels: {{role: p}}, decodeLabels: {{role: d}}, {field}: {value}}}\n  model:"
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": TEXT.replace("  model:", group, 1).encode()})
    (mistake,) = caught.value.mistakes
    assert f"spec.pdGroup.{field}: there is no encode stage" in str(mistake)
    assert "use llm-d's endpoint picker and routing sidecar" in str(mistake)


def test_a_field_beside_its_parent_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": TEXT.replace("    timeout", "  timeout").encode()})
    first, second = map(str, caught.value.mistakes)
    assert "spec.trafficPolicy: has no value; write fields, indented, such as timeout:" in first
    assert "spec.timeout: there is no such field; 'trafficPolicy' has one: indent it below that" in second


@pytest.mark.parametrize("kind", ["ModelRoute", "ModelServer", "GatewayConfig", "ModelAccessPolicy", "HTTPRoute"])
@pytest.mark.parametrize("is_json", [False, True])
def test_no_field_beside_the_spec_is_ignored(kind: str, is_json: bool) -> None:
    version = "gateway.networking.k8s.io/v1" if kind == "HTTPRoute" else "attache.dev/v1alpha1"
    spec = {
        "ModelRoute": {"modelName": "m", "rules": [{"targetModels": [{"modelServerName": "m"}]}]},
        "ModelServer": {"model": "m", "endpoints": [{"address": "127.0.0.1:8000"}]},
        "HTTPRoute": {"rules": [{}]},
    }.get(kind, {})
    metadata = {"name": "m", "uid": "1", "resourceVersion": "2", "managedFields": [], "generation": 1}
    written = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec, "status": {"conditions": []}}
    for change, place in (
        ({}, None),
        ({"authentication": {"virtualKeys": {}}}, "authentication"),
        ({"Status": {}}, "Status"),
        ({"metadata": {**metadata, "lables": {}}}, "metadata.lables"),
    ):
        found, mistakes = decode(Document("a.json", json.dumps({**written, **change}), is_json=is_json))
        assert [one.path for one in mistakes] == ([] if place is None else [place])
        assert found is not None
