# SPDX-License-Identifier: Apache-2.0
"""The component that adds a writer of usage rows to the gateway's manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.commands import usage
from extproc.api.config_loader import load_snapshot
from extproc.cli import serve

MANIFESTS = Path(__file__).parents[1] / "manifests"
FOLDER = "/var/lib/attache"


@pytest.fixture
def objects() -> dict[str, Any]:
    """The gateway's, with the component's patches, by kind."""
    files = ("deployment.yaml", "gateway-config.yaml", "network-policy.yaml")
    made = [yaml.safe_load((MANIFESTS / "gateway" / file).read_text()) for file in files]
    found = {one["kind"]: one for one in made}
    component = yaml.safe_load((MANIFESTS / "gateway-components/usage/kustomization.yaml").read_text())
    for patch in component["patches"]:
        for step in yaml.safe_load(patch["patch"]):
            apply(found[patch["target"]["kind"]], **step)
    return found


def apply(document: Any, *, op: str, path: str, value: Any) -> None:  # noqa: ANN401 - of YAML
    *parents, last = path.strip("/").split("/")
    for name in parents:
        document = document[int(name)] if isinstance(document, list) else document[name]
    if op == "test":
        assert document[last] == value
    elif isinstance(document, list):
        document.insert(len(document) if last == "-" else int(last), value)
    else:
        assert op == "add"
        document[last] = value


def containers(deployment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    pod = deployment["spec"]["template"]["spec"]
    return {one["name"]: one for one in (*pod["initContainers"], *pod["containers"])}


def test_without_the_component_there_is_neither_a_log_nor_a_place_for_one() -> None:
    text = (MANIFESTS / "gateway/deployment.yaml").read_text()
    assert FOLDER not in text
    assert "usageLog" not in (MANIFESTS / "gateway/gateway-config.yaml").read_text()


def test_the_log_that_envoy_writes_is_the_one_that_is_read(objects: dict[str, Any]) -> None:
    gateway = load_snapshot({"g.yaml": yaml.safe_dump(objects["GatewayConfig"]).encode()}).gateway
    found = containers(objects["Deployment"])
    options = usage.parser().parse_args(found["usage"]["args"][1:])
    assert gateway.usage_log is not None
    assert (str(options.log), options.listen) == (gateway.usage_log.path, gateway.usage_log.api)
    assert options.envoy_admin == gateway.admin
    # the database's URL has a password, and is in no argument
    assert options.store == "$STORE"
    assert found["usage"]["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "attache-usage", "key": "store"}}
    own = serve.parser("extproc").parse_args(found["extproc"]["args"][1:])
    assert own.usage_api == f"http://{options.admin}"


def test_it_starts_first_and_so_stops_last_and_no_request_waits_for_it(objects: dict[str, Any]) -> None:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["initContainers"]] == ["usage", "gateway", "bundle", "extproc"]
    assert not {name for name in containers(objects["Deployment"])["usage"] if name.endswith("Probe")}


def test_whoever_writes_or_reads_the_log_has_its_volume_which_is_bounded(objects: dict[str, Any]) -> None:
    found = containers(objects["Deployment"])
    mounts = {name for name, one in found.items() for mount in one["volumeMounts"] if mount["mountPath"] == FOLDER}
    assert mounts == {"usage", "extproc", "envoy"}
    volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "usage", "emptyDir": {"sizeLimit": "2Gi"}} in volumes
    assert {"port": "usage", "protocol": "TCP"} in objects["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
