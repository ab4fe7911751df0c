# SPDX-License-Identifier: Apache-2.0
"""What lies under deploy/ fits the commands and the configuration that it names."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from attache.__main__ import misspelt_option
from attache.commands import COMMANDS
from controller.bundle.metrics import READY_PATH
from extproc.api.config_loader import load_directory
from tests.programs import program

DEPLOY = Path(__file__).parent.parent / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def parses(words: list[str]) -> None:
    command = COMMANDS[words[0]]
    parser = command.load().parser("attache")
    if command.passes_options:
        parser.parse_known_args(words[1:])
    else:
        assert misspelt_option(parser, words[1:]) == ""
        parser.parse_args(words[1:])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_runs_commands_that_exist(unit: Path) -> None:
    lines = re.findall(r"^Exec\w+=/opt/attache/bin/attache (.*)$", unit.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        parses(shlex.split(line))


def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        (tmp_path / unit.name).write_text(re.sub(r"/opt/attache/bin/[\w-]+", "/bin/true", unit.read_text()))
    command = [program("systemd-analyze"), "verify", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_may_drain_before_they_are_killed() -> None:
    unit = (DEPLOY / "systemd" / "attache-extproc.service").read_text()
    assert "--drain 5m" in unit
    assert "TimeoutStopSec=330" in unit
    extproc = COMPOSE["services"]["extproc"]
    assert extproc["command"][-2:] == ["--drain", "5m"]
    assert extproc["stop_grace_period"] == "5m30s"


def test_services_run_commands_that_exist() -> None:
    for service in COMPOSE["services"].values():
        if service["image"] == "attache":
            parses(service["command"])


def test_the_configuration_names_the_services_addresses() -> None:
    snapshot = load_directory(DEPLOY / "compose")
    addresses = {
        name: service["networks"]["default"]["ipv4_address"]
        for name, service in COMPOSE["services"].items()
        if "networks" in service
    }
    assert snapshot.gateway.extproc == f"{addresses['extproc']}:9002"
    engines = {f"{addresses[name]}:8000" for name in ("engine-1", "engine-2")}
    assert {one.address for one in snapshot.servers[0].spec.endpoints} == engines


def test_the_image_holds_every_package() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for package in ("attache", "bench", "controller", "extproc"):
        assert f"\nCOPY {package} {package}\n" in text
        assert f"\n!{package}\n" in (DEPLOY.parent / ".dockerignore").read_text()


DEPLOYMENTS = sorted((DEPLOY.parent / "manifests").rglob("deployment.yaml"))


def test_for_each_python_the_image_has_one_version_of_a_package() -> None:
    (command,) = re.findall(r"^RUN (sed .*) > /constraints.txt$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    ran = subprocess.run(shlex.split(command), cwd=DEPLOY.parent, capture_output=True, text=True, check=True)
    pins = [Requirement(line) for line in ran.stdout.splitlines()]
    for python in ("3.11", "3.12", "3.13"):
        here = {"python_version": python, "python_full_version": f"{python}.1"}
        names = [one.name for one in pins if one.marker is None or one.marker.evaluate(here)]
        assert "numpy" in names
        assert len(names) == len(set(names))


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: str(file.relative_to(DEPLOY.parent)))
def test_pods_run_commands_that_exist_and_may_drain(file: Path) -> None:
    (deployment,) = yaml.safe_load_all(file.read_text())
    spec = deployment["spec"]["template"]["spec"]
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    ours = [one for one in containers if one["image"] == "attache"]
    assert ours
    for container in ours:
        parses([word.replace("$(NAMESPACE)", "default") for word in container["args"]])
        ports = {str(port["containerPort"]) for port in container["ports"]}
        listening = [word for word in container["args"] if "=0.0.0.0:" in word]
        assert {word.rpartition(":")[2] for word in listening} == ports
    for extproc in (one for one in ours if one["args"][0] == "extproc"):
        assert "--drain=5m" in extproc["args"]
        before_s = ((extproc.get("lifecycle") or {}).get("preStop") or {}).get("sleep", {}).get("seconds", 0)
        assert spec["terminationGracePeriodSeconds"] > before_s + 300


def test_engines_of_the_samples_run_the_image_that_a_user_builds() -> None:
    (deployment,) = yaml.safe_load_all((DEPLOY.parent / "manifests/samples/engines.yaml").read_text())
    (engine,) = deployment["spec"]["template"]["spec"]["containers"]
    assert engine["image"] == "attache"
    parses(engine["args"])


def test_envoy_is_ready_when_the_bundles_writer_says_so() -> None:
    (deployment,) = yaml.safe_load_all((DEPLOY.parent / "manifests" / "gateway" / "deployment.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (bundle,) = (one for one in spec["initContainers"] if one["name"] == "bundle")
    (envoy,) = spec["containers"]
    probe = envoy["readinessProbe"]["httpGet"]
    assert probe["path"] == READY_PATH
    assert f"--metrics=0.0.0.0:{probe['port']}" in bundle["args"]


def test_envoy_is_drained_by_the_bundles_writer_before_it_is_stopped() -> None:
    (deployment,) = yaml.safe_load_all((DEPLOY.parent / "manifests" / "gateway" / "deployment.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (bundle,) = (one for one in spec["initContainers"] if one["name"] == "bundle")
    (envoy,) = spec["containers"]
    file = Path(envoy["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert f"--drain={file}" in bundle["args"]
    for container in (bundle, envoy):
        assert {"name": "tmp", "mountPath": str(file.parent)} in container["volumeMounts"]


def test_the_image_for_llm_ds_flags_starts_that_command() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    (epp,) = [stage for stage in stages if stage.startswith("attache AS epp")]
    assert 'ENTRYPOINT ["attache", "epp"]' in epp
    # what is built without --target
    assert stages[-1].strip() == "attache"


def test_removing_the_manager_leaves_the_namespace_that_it_shares_with_the_gateway() -> None:
    manifests = DEPLOY.parent / "manifests"
    folders = [yaml.safe_load((manifests / one / "namespace.yaml").read_text()) for one in ("manager", "gateway")]
    assert folders[0] == folders[1]
    removal = yaml.safe_load((manifests / "removal/manager/kustomization.yaml").read_text())
    assert removal["resources"] == ["../../manager"]
    (kept,) = [yaml.safe_load(one["patch"]) for one in removal["patches"]]
    assert kept == {
        "$patch": "delete",
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": folders[0]["metadata"]["name"]},
    }


def test_many_gateways_are_scaled_by_containers_that_they_have_and_share_a_redis_that_is_there() -> None:
    folder = DEPLOY.parent / "manifests"
    many = folder / "gateway-ha"
    pod = yaml.safe_load((folder / "gateway" / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    autoscaler = yaml.safe_load((many / "autoscaler.yaml").read_text())["spec"]
    measured = {one["containerResource"]["container"] for one in autoscaler["metrics"]}
    # a share of a request can be measured where there is a request
    assert measured <= {one["name"] for one in containers if "cpu" in one["resources"]["requests"]}
    (patch,) = yaml.safe_load((many / "kustomization.yaml").read_text())["patches"]
    (added,) = (one["value"] for one in yaml.safe_load(patch["patch"]) if one["path"].endswith("args/-"))
    kinds = {one["kind"]: one for one in yaml.safe_load_all((many / "redis.yaml").read_text())}
    service = kinds["Service"]
    assert added == f"--redis=redis://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    (extproc,) = (one for one in containers if one["name"] == "extproc")
    parses([*extproc["args"], added])
    allowed = kinds["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed == pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]


@pytest.mark.parametrize("folder", ["gateway-api", "manager-components/external-metrics", "manager-components/keda"])
def test_a_port_that_is_added_to_a_service_is_added_to_the_network_policy(folder: str) -> None:
    manifests = DEPLOY.parent / "manifests"
    patches = yaml.safe_load((manifests / folder / "kustomization.yaml").read_text())["patches"]
    added = {
        kind: [
            one["value"]
            for patch in patches
            if patch["target"]["kind"] == kind
            for one in yaml.safe_load(patch["patch"])
            if one["path"].endswith("/ports/-")
        ]
        for kind in ("Service", "NetworkPolicy")
    }
    assert added["Service"]
    assert [one["targetPort"] for one in added["Service"]] == [one["port"] for one in added["NetworkPolicy"]]
