# SPDX-License-Identifier: Apache-2.0
"""What objects compile to is printed, and the exit status says whether all of them are used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from attache.__main__ import main
from extproc.api.config_loader import load_directory
from tests.gateway_objects import (
    endpoint_slice,
    gateway,
    gateway_class,
    http_route,
    https,
    listener,
    service,
    tls_secret,
)
from tests.kube_objects import picker_config, resource, route, server
from tests.kube_objects import pod as make_pod

if TYPE_CHECKING:
    from pathlib import Path

PICKER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorr}]\n"


def written(folder: Path, *things: dict[str, Any]) -> Path:
    """As people write them: without what the API server adds, several in a file, and Lists."""
    for thing in things:
        for field in ("generation", "creationTimestamp"):
            thing["metadata"].pop(field, None)
    folder.mkdir(exist_ok=True)
    (folder / "all.yaml").write_text(yaml.safe_dump_all(things[1:]))
    (folder / "first.json").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": things[:1]}))
    return folder


def shown(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(capsys.readouterr().out))


def condition(documents: list[dict[str, Any]], kind: str, type_: str) -> tuple[str, str]:
    (status,) = (one["status"] for one in documents if one["kind"] == kind and "status" in one)
    (found,) = (one for one in status["conditions"] if one["type"] == type_)
    return found["status"], found["reason"]


def test_files_are_printed_with_what_objects_would_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "in", server(), route(), make_pod("a"))
    assert main(["render", str(folder)]) == 0
    documents = shown(capsys)
    (found,) = (one for one in documents if one["kind"] == "ModelServer" and "spec" in one)
    assert [one["address"] for one in found["spec"]["endpoints"]] == ["10.0.0.1:8000"]
    assert condition(documents, "ModelRoute", "ResolvedRefs")[0] == "True"


def test_an_object_that_is_not_used_as_it_is_written_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "in", server(pickerConfig="epp"), picker_config("epp", PICKER), make_pod("a"))
    assert main(["render", str(folder)]) == 1
    assert condition(shown(capsys), "ModelServer", "ResolvedRefs") == ("False", "PickerConfigInvalid")


LISTED = {"model": "m", "endpoints": [{"address": "10.1.2.3:8000"}]}


@pytest.mark.parametrize(
    ("words", "status", "accepted"),
    [
        ([], 1, "False"),
        (["--endpoint-networks", "10.9.0.0/16"], 1, "False"),
        (["--endpoint-networks", "10.9.0.0/16,10.1.0.0/16"], 0, "True"),
        (["--namespace", "default"], 0, "True"),
    ],
)
def test_listed_endpoints_are_taken_as_a_gateway_with_these_options_takes_them(
    words: list[str], status: int, accepted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "in", resource("ModelServer", "llama", LISTED))
    assert main(["render", str(folder), *words]) == status
    assert condition(shown(capsys), "ModelServer", "Accepted")[0] == accepted


def test_files_are_written_that_extproc_and_envoy_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = resource("GatewayConfig", "main", {"listen": "127.0.0.1:1234"})
    folder = written(tmp_path / "in", server(), route(), config, make_pod("a"))
    words = ["render", str(folder), "--gateway-config", "default/main", "--bundle", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    snapshot = load_directory(tmp_path / "out" / "config")
    assert snapshot.gateway.listen == "127.0.0.1:1234"
    endpoints = (tmp_path / "out" / "bundle" / "eds" / "default" / "llama.json").read_text()
    assert "10.0.0.1" in endpoints
    assert {one["kind"] for one in shown(capsys)} == {"GatewayConfig", "ModelRoute", "ModelServer"}


def test_a_gateway_config_that_is_not_there_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "in", server(), resource("GatewayConfig", "other", {}))
    assert main(["render", str(folder), "--gateway-config", "default/main"]) == 1
    said = capsys.readouterr().err
    assert "nothing would be changed: there is no GatewayConfig default/main" in said
    assert "GatewayConfig default/other is not served" in said


def test_secrets_are_read_if_something_points_to_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"authentication": {"apiKeySecrets": [{"name": "keys"}]}}
    config = resource("GatewayConfig", "main", keys)
    folder = written(tmp_path / "in", server(), make_pod("a"), config)
    words = ["render", str(folder), "--gateway-config", "default/main"]
    main(words)
    assert "Secret default/keys is not there, and something points to it" in capsys.readouterr().err
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {}, "data": {}}
    written(tmp_path / "in", server(), make_pod("a"), config, secret)
    main(words)
    assert "points to it" not in capsys.readouterr().err


def test_other_kinds_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "in", server(), make_pod("a"), {"apiVersion": "v1", "kind": "Node", "metadata": {}})
    assert main(["render", str(folder)]) == 0
    assert "a gateway does not look at them: Node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1\n", "is no object"),
        ("apiVersion: attache.dev/v1alpha1\nkind: ModelServer\nspec: {}\n", "has no metadata.name"),
        ("kind: [", "not YAML"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a, name: b}\n", "name"),
    ],
)
def test_a_file_that_holds_no_objects_is_a_mistake(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.yaml").write_text(text)
    assert main(["render", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--cluster", "x"], ["x", "--gateway-config", "x"]])
def test_options_that_do_not_fit_are_told(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["render", *words])
    assert ended.value.code == 2


def test_no_cluster_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert main(["render", "--cluster"]) == 2
    assert capsys.readouterr().err


def test_gateways_and_routes_are_rendered_and_no_private_key_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = gateway("web", listener("http"), https("https", 443, "cert"))
    things = gateway_class(), web, tls_secret(), http_route(), service(), endpoint_slice("app", "10.1.0.1")
    assert main(["render", str(written(tmp_path / "in", *things))]) == 0
    text = capsys.readouterr().out
    assert "PRIVATE KEY" not in text
    documents = [one for one in yaml.safe_load_all(text) if one is not None]
    (config,) = (one for one in documents if one["kind"] == "GatewayConfig")
    assert [one["name"] for one in config["spec"]["listeners"]] == ["default/web/http", "default/web/https"]
    (status,) = (one["status"] for one in documents if one["kind"] == "Gateway")
    assert [one["attachedRoutes"] for one in status["listeners"]] == [1, 1]
    assert main(["render", str(written(tmp_path / "gone", gateway_class(), gateway(), http_route()))]) == 1


def test_definitions_that_files_lack_are_not_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["render", str(written(tmp_path / "in", gateway_class(), gateway()))])
    assert "CustomResourceDefinition" not in capsys.readouterr().err


def test_a_model_shows_what_is_made_of_it_and_its_merged_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"uri": "hf://org/model", "baseRefs": ["shared"]}
    template = {"backends": [{"name": "default", "config": {"maxLength": 4096}}]}
    folder = written(tmp_path / "in", resource("Model", "llama", spec), resource("ModelTemplate", "shared", template))
    assert main(["render", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "#   runtime: built-in runtime vllm" in text
    assert "#     maxLength: 4096" in text
    made = [one for one in yaml.safe_load_all(text) if one]
    assert [one["kind"] for one in made] == ["ModelInfer", "ModelServer", "ModelRoute"]
    # an owner without a uid is refused by the API server, and one with a uid would take all of it along when it goes
    assert all("ownerReferences" not in one["metadata"] for one in made)
    # what is printed can be applied, and rendered in its turn: a gateway would serve it
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "all.yaml").write_text(text)
    assert main(["render", str(tmp_path / "made")]) == 0


def test_a_model_that_cannot_be_made_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "in", resource("Model", "llama", {"uri": "hf://org/model", "format": {"name": "new"}}))
    assert main(["render", str(folder)]) == 1
    assert (
        "# Model default/llama: NoSupportingRuntime: backend 'default': no runtime supports" in capsys.readouterr().out
    )
