# SPDX-License-Identifier: Apache-2.0
"""Our CustomResourceDefinitions on an API server: they are taken, fill in defaults, and refuse what breaks a rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import yaml

from controller.kube.api_resources import CRDS, MODEL_ROUTES, MODEL_SERVERS
from controller.kube.client import connect
from controller.kube.custom_resources import KINDS, CustomResourceKind, crd_object
from controller.kube.errors import Invalid
from tests.kube_objects import resource
from tests.rule_cases import CASES, Case
from tests.with_kube.managing import OUR_KINDS, define_kinds

if TYPE_CHECKING:
    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

GOLDEN = Path(__file__).parents[1] / "controller" / "convert" / "golden"
CONVERTED = {file.stem: file.read_text() for file in sorted(GOLDEN.glob("*.converted"))}


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> Client:  # type: ignore[misc]  # a generator
    """A client of a server that has our kinds."""
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        yield one


@pytest.mark.parametrize("kube", ["real"], indirect=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_real_server_takes_every_definition_as_it_is(client: Client, kind: CustomResourceKind) -> None:
    found = await client.get(CRDS, f"{kind.resource.plural}.{kind.resource.group}")
    conditions = {one["type"]: one for one in found["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    # a schema that is not structural is served, and told here
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("kube", ["real"], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.rule}")
async def test_a_real_server_takes_and_refuses_what_the_rules_say(client: Client, namespace: str, case: Case) -> None:
    target = OUR_KINDS[case.kind]
    for number, document in enumerate((case.accepted(), case.refused())):
        document["metadata"] = metadata(case, f"example-{number}", namespace)
        if number == 0:
            await client.create(target, document, dry_run=True)
        else:
            with pytest.raises(Invalid):
                await client.create(target, document, dry_run=True)


@pytest.mark.parametrize("kube", ["real"], indirect=True)
@pytest.mark.parametrize("file", CONVERTED)
async def test_a_real_server_takes_what_was_converted(client: Client, namespace: str, file: str) -> None:
    for document in yaml.safe_load_all(CONVERTED[file]):
        if document is not None:
            document["metadata"]["namespace"] = namespace
            await client.create(OUR_KINDS[document["kind"]], document, dry_run=True)


def metadata(case: Case, name: str, namespace: str) -> dict[str, str]:
    return {"name": name, "namespace": namespace} if OUR_KINDS[case.kind].namespaced else {"name": name}


@pytest.mark.parametrize("kube", ["real"], indirect=True)
async def test_every_rule_has_a_case_that_breaks_it(client: Client, namespace: str) -> None:
    """The messages of all refusals together are those of all rules."""
    said = ""
    for case in CASES:
        document = case.refused()
        document["metadata"] = metadata(case, "example", namespace)
        try:
            await client.create(OUR_KINDS[case.kind], document, dry_run=True)
        except Invalid as error:
            said += str(error)
    rules = [rule for kind in KINDS for rule in rules_in(crd_object(kind))]
    assert [rule for rule in rules if rule not in said] == []


def rules_in(node: object) -> list[str]:
    """Messages of all rules in a definition."""
    if isinstance(node, list):
        return [found for one in node for found in rules_in(one)]
    if not isinstance(node, dict):
        return []
    own = [one["message"] for one in node.get("x-kubernetes-validations", ()) if "message" in one]
    return own + [found for one in node.values() for found in rules_in(one)]


@pytest.mark.parametrize("kube", ["real"], indirect=True)
@pytest.mark.parametrize("wrong", ["10", "10 seconds", "5min", ""])
async def test_a_duration_that_is_wrong_is_told_how_to_write_it(client: Client, namespace: str, wrong: str) -> None:
    spec = {"model": "m", "endpoints": [], "scrapeInterval": wrong}
    said = f"'{wrong}' is not a duration; write a number with a unit, such as 250ms, 30s, 5m or 1h30m"
    with pytest.raises(Invalid, match=re.escape(said)):
        await client.create(MODEL_SERVERS, resource("ModelServer", "a", spec, namespace=namespace), dry_run=True)


async def test_defaults_are_filled_in_and_unknown_fields_refused(client: Client, namespace: str) -> None:
    selecting = {"workloadSelector": {"matchLabels": {"app": "a"}}, "workloadPort": {"port": 8000}}
    made = await client.create(
        MODEL_SERVERS, resource("ModelServer", "a", {"model": "m", **selecting}, namespace=namespace)
    )
    spec = made["spec"]
    assert spec["engine"] == "vLLM"
    assert spec["trafficPolicy"]["retry"]["attempts"] == 2
    assert spec["trafficPolicy"]["timeout"] == "30m"
    assert "endpoints" not in spec
    misspelt = resource("ModelServer", "b", {"model": "m", "endpoint": [], **selecting}, namespace=namespace)
    with pytest.raises(Exception, match="endpoint"):
        await client.create(MODEL_SERVERS, misspelt)


@pytest.mark.parametrize("kube", ["real"], indirect=True)
async def test_null_stays_where_it_means_something(client: Client, namespace: str) -> None:
    saturation = {"queueDepth": None, "maxRequests": 4}
    spec = {"model": "m", "endpoints": [], "flowControl": {"saturation": saturation}}
    made = await client.create(MODEL_SERVERS, resource("ModelServer", "n", spec, namespace=namespace))
    found = made["spec"]["flowControl"]["saturation"]
    assert found["queueDepth"] is None
    assert found["kvUsage"] == 0.8
    assert [band["name"] for band in made["spec"]["flowControl"]["bands"]] == [
        "critical",
        "high",
        "standard",
        "best-effort",
    ]


async def test_a_status_does_not_change_the_generation(client: Client, namespace: str) -> None:
    spec = {"modelName": "m", "rules": [{"targetModels": [{"modelServerName": "a"}]}]}
    made = await client.create(MODEL_ROUTES, resource("ModelRoute", "r", spec, namespace=namespace))
    patch = {"status": {"observedGeneration": 1}}
    after = await client.merge_patch(MODEL_ROUTES, "r", namespace, patch, subresource="status")
    assert after["metadata"]["generation"] == made["metadata"]["generation"] == 1
    assert after["status"] == {"observedGeneration": 1}
