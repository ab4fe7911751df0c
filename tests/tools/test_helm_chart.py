# SPDX-License-Identifier: Apache-2.0
"""The Helm chart has the objects of the Kustomize bases. `make check` compares its files with what makes them. After
`make helm`, Helm and Kustomize render both here.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from extproc.api.yaml_documents import YamlLoader
from tests.programs import not_tested
from tools import helm, helm_chart
from tools.helm_chart import CHART, COMPONENTS, ROOT, Value, files, values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MANIFESTS = ROOT / "manifests"
# Helm of a plain build takes an old version for that of the cluster.
KUBE = "--kube-version=1.36.3"
NAMESPACE = "attache-system"
Objects = dict[str, dict[str, Any]]
TEMPLATES = [files()[CHART / "templates" / f"{base}.yaml"] for base in COMPONENTS]


def by_name(text: str) -> Objects:
    """Without the namespace, which Helm makes."""
    found = [one for one in yaml.load_all(text, YamlLoader) if one is not None and one["kind"] != "Namespace"]
    names = [f"{one['kind']}/{one['metadata']['name']}" for one in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def leaves(group: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, one in group.items():
        if not isinstance(one, Value):
            yield from leaves(one, f"{path}.{name}")
        elif name in {"args", "resources"}:
            yield from (f"{path}.{name}.{container}" for container in one.default)
        else:
            yield f"{path}.{name}"


def test_templates_hold_each_object_of_the_bases_once() -> None:
    plain = [re.sub(r"\{\{.*?\}\}", "x", re.sub(r"(?m)^ *\{\{-.*\n", "", text)) for text in TEMPLATES]
    found = {name for text in plain for name in by_name(text)}
    folders = [*COMPONENTS, *(folder for components in COMPONENTS.values() for folder in components.values())]
    bases = [file for folder in folders for file in (MANIFESTS / folder).glob("*.yaml")]
    wanted = [by_name(file.read_text()) for file in bases if file.name != "kustomization.yaml"]
    assert found == {name for one in wanted for name in one}


def test_each_value_is_used_and_each_that_is_used_exists() -> None:
    used = {path for text in TEMPLATES for path in re.findall(r"\.Values((?:\.\w+)+)", text)}
    assert used == set(leaves(values()))


def test_helm_sets_nothing_that_the_manager_writes() -> None:
    (text,) = (one for one in TEMPLATES if "attache-webhook-certificates" in one)
    (secret,) = (one for one in text.split("---\n") if "\nkind: Secret\n" in f"\n{one}")
    assert not re.search(r"^(data|stringData):", secret, re.MULTILINE)
    assert "caBundle" not in text


def test_each_condition_ends() -> None:
    for text in TEMPLATES:
        words = re.findall(r"\{\{- (if|with|range|end)\b", text)
        assert words.count("end") * 2 == len(words) > 0


def test_manifests_have_nothing_that_helm_takes_for_an_action() -> None:
    assert [one for folder in COMPONENTS for one in (MANIFESTS / folder).glob("*") if "{{" in one.read_text()] == []


def test_helm_installs_the_definitions_and_no_other_file_of_their_folder() -> None:
    definitions = CHART / "crds"
    assert definitions.resolve() == MANIFESTS / "crds"
    ignored = {line.removeprefix("crds/") for line in (CHART / ".helmignore").read_text().splitlines()}
    for file in definitions.iterdir():
        assert ("\nkind: CustomResourceDefinition\n" in file.read_text()) is (file.name not in ignored)


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "replace", "path": "/spec/replicas", "value": 1},
        {"op": "test", "path": "/spec/replicas", "value": 3},
        {"op": "add", "path": "/spec/replicas", "value": 3},
        {"op": "add", "path": "/spec/ports/3", "value": "c"},
    ],
)
def test_a_patch_that_no_condition_can_express_is_refused(operation: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot make a condition"):
        helm_chart._patch({"spec": {"replicas": 2, "ports": ["a", "b"]}}, operation, "x")


def test_an_item_is_inserted_where_a_patch_says_and_later_places_count_it() -> None:
    patched = {"items": [{"name": "a", "args": ["1"]}, {"name": "b", "args": []}]}
    new = {"name": "new", "args": []}
    for path, value in (("0", new), ("1/args/0", "0"), ("2/args/0", "2"), ("3", "end")):
        helm_chart._patch(patched, {"op": "add", "path": f"/items/{path}", "value": value}, ".Values.x")
    begin, end = "@@if .Values.x@@", "@@end@@"
    assert patched["items"] == [
        *(begin, new, end),
        {"name": "a", "args": [begin, "0", end, "1"]},
        {"name": "b", "args": [begin, "2", end]},
        *(begin, "end", end),
    ]


# Helm itself


def run(program: str, *words: str) -> str:
    binary = helm.built_in() / program
    if not binary.is_file():
        not_tested("HELM", f"there is no {binary}; `make helm` builds it")
    return subprocess.run([str(binary), *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Helm may write."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"HELM_{name}_HOME", str(tmp_path))


def template(given: Mapping[str, object] | None = None, *words: str, namespace: str = NAMESPACE) -> Objects:
    sets = [f"--set-json={name}={json.dumps(value)}" for name, value in (given or {}).items()]
    return by_name(run("helm", "template", "release", str(CHART), KUBE, "--namespace", namespace, *sets, *words))


def kustomized(*folders: str) -> Objects:
    found: Objects = {}
    for folder in folders:
        found |= by_name(run("kustomize", "build", str(MANIFESTS / folder)))
    return found


def changes(before: object, after: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Where two values differ, with what is there after."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from changes(before.get(name), after.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list):
        yield from changes(dict(enumerate(before)), dict(enumerate(after)), path)
    elif before != after:
        yield path, after


@pytest.mark.parametrize(
    ("given", "folders"),
    [
        ({}, ("manager", "gateway")),
        ({"gateway.highAvailability": True}, ("manager", "gateway-ha")),
        ({"gateway.gatewayAPI": True}, ("manager", "gateway-api")),
        ({"gateway.translation": True}, ("manager", "gateway-with-translation")),
        ({"gateway.console": True}, ("manager", "gateway-with-console")),
        ({"gateway.usage": True}, ("manager", "gateway-with-usage")),
        ({"manager.enabled": False}, ("gateway",)),
        (
            {"gateway.enabled": False, **{f"manager.{name}": True for name in COMPONENTS["manager"]}},
            ("manager-with-exports",),
        ),
    ],
)
def test_helm_renders_what_kustomize_does(given: dict[str, object], folders: tuple[str, ...]) -> None:
    assert template(given) == kustomized(*folders)


def test_helm_installs_the_definitions_of_the_base() -> None:
    none = {"manager.enabled": False, "gateway.enabled": False}
    assert template(none) == {}
    assert template(none, "--include-crds") == kustomized("crds")


def test_a_redis_of_ones_own_takes_the_place_of_the_charts() -> None:
    own = {"gateway.redisURL": "redis://own:1"}
    (place, argument), *others = changes(template(), template(own))
    assert (place, argument, others) == (f"{POD}.initContainers.2.args.4", "--redis=redis://own:1", [])
    both = {**own, "gateway.highAvailability": True}
    wanted = kustomized("manager", "gateway-ha")
    assert set(wanted) - set(template(both)) == {
        f"{kind}/attache-redis" for kind in ("Deployment", "Service", "NetworkPolicy")
    }


def test_usage_goes_with_every_other_value_of_the_gateway() -> None:
    """Its own container is set like the others, and what the user writes into the GatewayConfig stays."""
    given = {
        **{f"gateway.{name}": True for name in COMPONENTS["gateway"]},
        "gateway.args.usage": ["--admin-keys=ops"],
        "gateway.resources.usage.limits.memory": "1Gi",
        "gateway.config": {"usageLog": {"path": "/elsewhere", "costHeader": True}, "listen": "0.0.0.0:8080"},
    }
    made = template(given)
    containers = made["Deployment/attache-gateway"]["spec"]["template"]["spec"]["initContainers"]
    args = {one["name"]: one["args"] for one in containers}
    assert (args["usage"][-1], containers[0]["resources"]["limits"]) == ("--admin-keys=ops", {"memory": "1Gi"})
    # what each component adds, in the container that it means
    assert "--port-offset=8000" in args["gateway"]
    assert {
        "--redis=redis://attache-redis:6379",
        "--usage-api=http://127.0.0.1:9008",
        "--console-token=/etc/attache-console/token",
    } <= {*args["extproc"]}
    assert made["GatewayConfig/gateway"]["spec"] == {
        "listen": "0.0.0.0:8080",
        "steps": "0.0.0.0:9012",
        "usageLog": {"path": "/var/lib/attache/usage.log", "api": "127.0.0.1:9009", "costHeader": True},
    }


POD = "Deployment/attache-gateway.spec.template.spec"
MANAGER = "Deployment/attache-manager.spec"
# None of it is read as YAML, or as a template.
HOSTILE = 'a: "b"\n- {{ .Values }} \' #'


@pytest.mark.parametrize(
    ("name", "value", "places"),
    [
        (
            "image",
            HOSTILE,
            {f"{MANAGER}.template.spec.containers.0.image", *(f"{POD}.initContainers.{n}.image" for n in range(3))},
        ),
        ("envoyImage", "registry.example/envoy:1", {f"{POD}.containers.0.image"}),
        ("manager.replicas", 3, {f"{MANAGER}.replicas"}),
        ("gateway.replicas", 3, {"Deployment/attache-gateway.spec.replicas"}),
        (
            "manager.resources.manager.limits.memory",
            "1Gi",
            {f"{MANAGER}.template.spec.containers.0.resources.limits.memory"},
        ),
        ("gateway.resources.gateway.requests.cpu", "1", {f"{POD}.initContainers.0.resources.requests.cpu"}),
        ("gateway.resources.envoy.requests.cpu", "2", {f"{POD}.containers.0.resources.requests.cpu"}),
        ("gateway.args.gateway[0]", "--namespace=team", {f"{POD}.initContainers.0.args.6"}),
        ("gateway.args.extproc[0]", HOSTILE, {f"{POD}.initContainers.2.args.4"}),
        ("manager.args.manager[0]", "--no-work", {f"{MANAGER}.template.spec.containers.0.args.3"}),
        ("gateway.pod.imagePullSecrets", [{"name": HOSTILE}], {f"{POD}.imagePullSecrets"}),
        ("manager.pod.nodeSelector", {"a": "b"}, {f"{MANAGER}.template.spec.nodeSelector"}),
        ("gateway.service.type", "LoadBalancer", {"Service/attache-gateway.spec.type"}),
        ("gateway.serviceAnnotations", {"a": HOSTILE}, {"Service/attache-gateway.metadata.annotations"}),
        ("gateway.config.admin", "127.0.0.1:1", {"GatewayConfig/gateway.spec.admin"}),
    ],
)
def test_a_value_changes_its_field_and_no_other(name: str, value: object, places: set[str]) -> None:
    found = list(changes(template(), template({name: value})))
    assert {place for place, _ in found} == places
    assert all(one == value for _, one in found)


@pytest.mark.parametrize("namespace", ["team-a", "1e3", "null"])
def test_the_namespace_of_the_release_stands_wherever_that_of_the_bases_does(namespace: str) -> None:
    wanted = json.dumps(template()).replace(NAMESPACE, namespace)
    assert template(namespace=namespace) == json.loads(wanted)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gatway.replicas", "additional properties"),
        ("gateway.replica", "additional properties"),
        ("gateway.resources.envoi", "additional properties"),
        ("gateway.pod.containers", "invalid propertyname"),
        ("gateway.service.ports", "invalid propertyname"),
        ("gateway.replicas", "want integer"),
    ],
)
def test_a_value_that_has_no_effect_or_takes_the_place_of_the_charts_is_refused(name: str, why: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        template({name: {}})
    assert why in refused.value.stderr.lower()


def test_a_chart_that_contains_this_one_may_have_values_for_all() -> None:
    assert template({"global.region": "a"}) == template()


def test_helm_finds_nothing_wrong() -> None:
    found = run("helm", "lint", "--strict", str(CHART), KUBE)
    assert "[ERROR]" not in found
    assert "[WARNING]" not in found
