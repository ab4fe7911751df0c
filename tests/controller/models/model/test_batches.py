# SPDX-License-Identifier: Apache-2.0
"""``batching`` of a Model: who joins its requests, and which runtimes cannot."""

from __future__ import annotations

from typing import Any

import pytest

from controller.commands.render import render_models
from controller.models.runtimes.engine_settings import BATCHED_PORT

Plain = dict[str, Any]


def runtime(**spec: object) -> Plain:
    """A server of V1, as KServe's are."""
    own = {
        "engine": "Custom",
        "supports": [{"name": "sklearn"}],
        "protocolVersions": ["V1"],
        "port": 8080,
        "config": {"image": "sklearnserver"},
        "agent": {"dialect": "MLServer"},
        "arguments": [{"args": ["--http_port={port}"]}],
    }
    metadata = {"name": "own", "namespace": "default"}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "ServingRuntime", "metadata": metadata, "spec": own | spec}


def model(*, runtime: str = "own", **spec: object) -> Plain:
    own = {"uri": "s3://models/iris", "format": {"name": "sklearn"}, "backends": [{"name": "a", "runtime": runtime}]}
    metadata = {"name": "iris", "namespace": "default", "uid": "u"}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": own | spec}


def pod_and_server(*objects: Plain) -> tuple[dict[str, Plain], Plain]:
    """The containers of the pod by name, and the spec of the ModelServer."""
    (made,) = render_models(list(objects))
    assert made.problem == ""
    (infer,) = (one for one in made.children if one["kind"] == "ModelInfer")
    (server,) = (
        one
        for one in made.children
        if one["kind"] == "ModelServer" and not one["spec"].get("protocol", "").endswith("gRPC")
    )
    pod = infer["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    return {one["name"]: one for one in (*pod["containers"], *pod["initContainers"])}, server["spec"]


def test_the_sidecar_has_the_engines_port_so_that_pods_of_both_revisions_of_a_rollout_have_the_same() -> None:
    before, old = pod_and_server(runtime(), model())
    after, new = pod_and_server(runtime(), model(batching={"maxSize": 16, "maxDelay": "2ms"}))
    assert old == new
    assert new["workloadPort"] == {"port": 8080}
    assert "--http_port=8080" in before["engine"]["args"]
    assert f"--http_port={BATCHED_PORT}" in after["engine"]["args"]
    assert after["engine"]["ports"] == [{"name": "http", "containerPort": BATCHED_PORT}]
    assert {"--batch-listen=0.0.0.0:8080", "--batch-size=16", "--batch-delay=0.002"} <= {*after["agent"]["args"]}
    assert f"--engine=http://127.0.0.1:{BATCHED_PORT}" in after["agent"]["args"]


def test_the_built_in_mlserver_listens_where_it_is_told() -> None:
    containers, server = pod_and_server(model(runtime="mlserver", batching={}))
    env = {one["name"]: one["value"] for one in containers["engine"]["env"]}
    assert env["MLSERVER_HTTP_PORT"] == str(BATCHED_PORT)
    assert "--batch-listen=0.0.0.0:8000" in containers["agent"]["args"]
    assert server["workloadPort"] == {"port": 8000}


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        ([model(runtime="triton", batching={})], "write dynamic_batching"),
        ([model(runtime="vllm", batching={})], "only requests of V1 and V2 can be joined"),
        ([runtime(protocolVersions=["TensorFlow"]), model(batching={})], "only requests of V1 and V2 can be joined"),
        ([runtime(agent={"enabled": False}), model(batching={})], "no sidecar"),
        ([runtime(arguments=[{"args": ["--http_port=8080"]}]), model(batching={})], "use {port}"),
        ([runtime(port=BATCHED_PORT), model(batching={})], "another port than"),
        ([runtime(), model(batching={"maxSize": 1})], "maxSize"),
        ([runtime(), model(batching={"maxDelay": "5"})], "maxDelay"),
    ],
)
def test_where_requests_cannot_be_joined_the_model_says_why(objects: list[Plain], why: str) -> None:
    (made,) = render_models(objects)
    assert why in made.problem
