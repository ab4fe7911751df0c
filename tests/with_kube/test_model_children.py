# SPDX-License-Identifier: Apache-2.0
"""What Models become is taken by a real API server as it stands: every object, and the pods of every template."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import yaml

from controller.kube.api_resources import PODS
from controller.kube.client import connect
from controller.models.model.model_state import CHILDREN
from controller.models.runtimes.presets import built_in_objects
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import OUR_KINDS, define_kinds
from tools.golden_models import FOLDER, golden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

pytestmark = REAL
OF_KIND = {one.kind: one for one in CHILDREN}
SOURCES = {
    path.stem: list(yaml.safe_load_all(path.read_text()))
    for path in sorted(FOLDER.glob("*.yaml"))
    if not path.name.endswith(".children.yaml")
}
MADE = {path.name.removesuffix(".children.yaml"): text for path, text in golden().items()}


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> Client:  # type: ignore[misc]  # a generator
    async with connect(kube.admin, manager="test") as one:
        await define_kinds(one)
        yield one


def pods(infer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for role in infer["spec"]["template"]["roles"]:
        for field in ("entryTemplate", "workerTemplate"):
            if field in role:
                yield {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"generateName": "made-", **role[field]["metadata"]},
                    "spec": role[field]["spec"],
                }


@pytest.mark.parametrize("name", SOURCES)
async def test_a_real_server_takes_models_and_all_that_is_made_of_them(
    client: Client, namespace: str, name: str
) -> None:
    for thing in copy.deepcopy(SOURCES[name]):
        if OUR_KINDS[thing["kind"]].namespaced:
            thing["metadata"]["namespace"] = namespace
        await client.create(OUR_KINDS[thing["kind"]], thing, dry_run=True)
    for child in (one for one in yaml.safe_load_all(MADE[name]) if one):
        # there is no Model of this uid: the server's collector would not let it live
        made = {**child, "metadata": {**child["metadata"], "namespace": namespace, "ownerReferences": []}}
        await client.apply(OF_KIND[made["kind"]], made, dry_run=True)
        if made["kind"] == "ModelInfer":
            for pod in pods(made):
                pod["metadata"]["namespace"] = namespace
                await client.create(PODS, pod, dry_run=True)


@pytest.mark.parametrize("thing", built_in_objects(), ids=lambda one: one["metadata"]["name"])
async def test_a_real_server_takes_the_runtimes(client: Client, thing: dict[str, Any]) -> None:
    await client.create(OUR_KINDS[thing["kind"]], thing, dry_run=True)
