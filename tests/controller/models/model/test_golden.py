# SPDX-License-Identifier: Apache-2.0
"""What Models become, whole: every child as it stands in a file, and as our own decoders and bounds have it."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import yaml

from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.api.model_infer import ModelInfer
from extproc.api.model_route import ModelRoute
from extproc.api.model_server import ModelServer
from extproc.api.quantities import decode_quantity
from extproc.api.yaml_documents import YamlLoader
from tools.golden_models import FOLDER, golden

KINDS = {
    one.__name__: one for one in (ModelInfer, ModelServer, ModelRoute, AutoscalingPolicy, AutoscalingPolicyBinding)
}
NAMES = sorted(path.name.removesuffix(".children.yaml") for path in FOLDER.glob("*.children.yaml"))
# each text is made once, by the first test that needs one
texts = cache(golden)


@cache
def objects(name: str) -> list[dict[str, Any]]:
    """To be read only."""
    text = texts()[FOLDER / f"{name}.children.yaml"]
    return [one for one in yaml.load_all(text, YamlLoader) if one]


def test_every_golden_model_has_its_file() -> None:
    assert [path.name.removesuffix(".children.yaml") for path in texts()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_children_are_those_of_the_file(name: str) -> None:
    path = FOLDER / f"{name}.children.yaml"
    assert path.read_text() == texts()[path], "look at the difference, then: python -m tools.golden_models"


@pytest.mark.parametrize("name", NAMES)
def test_children_are_what_our_own_decoders_take(name: str) -> None:
    for one in objects(name):
        if one["kind"] in KINDS:
            made = {"metadata": {"name": one["metadata"]["name"]}, "spec": one["spec"]}
            msgspec.convert(made, KINDS[one["kind"]], dec_hook=decode_quantity)


@pytest.mark.parametrize("name", NAMES)
def test_every_child_belongs_to_its_model(name: str) -> None:
    for one in objects(name):
        (owner,) = one["metadata"]["ownerReferences"]
        assert owner["kind"] == "Model"
        assert owner["controller"]
        assert one["metadata"]["labels"]["attache.dev/model"] == owner["name"]
        assert one["metadata"]["name"].startswith(owner["name"])


def test_prefill_and_decode_are_two_groups_of_four_pods() -> None:
    (infer,) = (one for one in objects("disaggregated") if one["kind"] == "ModelInfer")
    roles = infer["spec"]["template"]["roles"]
    assert infer["spec"]["replicas"] == 2
    assert {one["name"]: one["replicas"] for one in roles} == {"prefill": 2, "decode": 2}
    assert "gang" in infer["spec"]["template"]


def test_a_stopped_model_keeps_its_objects_and_runs_nothing() -> None:
    found = objects("stopped")
    assert [one["kind"] for one in found] == ["ModelInfer", "ModelServer", "ModelRoute"]
    assert found[0]["spec"]["replicas"] == 0


def test_credentials_reach_the_download_and_never_the_engine() -> None:
    for one in objects("canary"):
        if one["kind"] == "ModelInfer":
            pod = one["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
            given = {each["name"] for each in (*pod["initContainers"], *pod["containers"]) if "envFrom" in each}
            assert given == {"download"}


def test_what_a_template_deletes_of_a_runtime_is_gone() -> None:
    stable, canary = (one for one in objects("canary") if one["kind"] == "ModelInfer")
    for infer, node in ((stable, "a100"), (canary, "h100")):
        pod = infer["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
        assert [one["name"] for one in pod["containers"]] == ["engine"]
        assert pod["nodeSelector"] == {"gpu": node}


def test_a_claim_is_mounted_where_it_is() -> None:
    (infer,) = (one for one in objects("adapters") if one["kind"] == "ModelInfer")
    pod = infer["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    assert [one["name"] for one in pod["initContainers"]] == ["agent"]
    mounts = pod["containers"][0]["volumeMounts"]
    assert {"name": "models", "mountPath": "/mnt/models", "readOnly": True, "subPath": "llama/8b"} in mounts


def test_workers_have_no_probes_and_no_sidecar() -> None:
    for infer in (one for one in objects("multi-node") if one["kind"] == "ModelInfer"):
        (role,) = infer["spec"]["template"]["roles"]
        assert role["workerReplicas"] == 1
        pod = role["workerTemplate"]["spec"]
        assert [one["name"] for one in pod["initContainers"]] == ["download"]
        (engine,) = pod["containers"]
        assert not {"readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports"} & set(engine)
