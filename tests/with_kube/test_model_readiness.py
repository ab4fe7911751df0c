# SPDX-License-Identifier: Apache-2.0
"""A Model is Ready once a gateway sends requests to its engine, and without any gateway after a while."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest_asyncio

from controller.kube.api_resources import MODEL_ROUTES, MODELS, PODS
from controller.models.model.model_state import ModelSettings
from controller.models.model_infer.reconcile import reconcile
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE
from tests.with_kube.managing import define_kinds, managing, settings
from tests.with_kube.pods import set_ready
from tests.with_kube.test_gateway_role import Reporting, serving

if TYPE_CHECKING:
    from pathlib import Path

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

# pods have no node here, so the tests make them ready
pytestmark = FAKE
MODEL: dict[str, Any] = {
    "apiVersion": MODELS.api_version,
    "kind": "Model",
    "metadata": {"name": "llama"},
    "spec": {"uri": "file:///models/llama"},
}


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client) -> None:
    """Our kinds are served."""
    await define_kinds(client)


async def create_with_engine(client: Client, namespace: str) -> None:
    """A Model whose engine is ready."""
    await client.create(MODELS, {**MODEL, "metadata": {"name": "llama", "namespace": namespace}})

    async def has_pod() -> bool:
        return len((await client.list(PODS, namespace)).items) == 1

    await eventually(has_pod)
    (pod,) = (await client.list(PODS, namespace)).items
    running = {"status": {"phase": "Running", "podIP": "127.0.1.1", "podIPs": [{"ip": "127.0.1.1"}]}}
    await client.merge_patch(PODS, pod["metadata"]["name"], namespace, running, subresource="status")
    await set_ready(client, namespace, pod["metadata"]["name"])


async def ready_condition(client: Client, namespace: str) -> dict[str, Any]:
    found = ((await client.get(MODELS, "llama", namespace)).get("status") or {}).get("conditions") or ()
    return next((one for one in found if one["type"] == "Ready"), {})


async def until_ready_is(client: Client, namespace: str, status: str, reason: str) -> None:
    async def is_so() -> bool:
        found = await ready_condition(client, namespace)
        return (found.get("status"), found.get("reason")) == (status, reason)

    await eventually(is_so)


async def test_it_is_ready_once_a_gateway_sends_requests_to_its_engine(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    extproc = Reporting(tmp_path)
    extproc.warming = frozenset({f"{namespace}/llama-default"})
    async with (
        extproc.serving() as address,
        serving(client, namespace, tmp_path, extproc=address),
        managing(kube.admin, namespace, decide=reconcile),
    ):
        await create_with_engine(client, namespace)
        await until_ready_is(client, namespace, "False", "WaitingForGateway")

        async def says_what_for() -> bool:
            message = (await ready_condition(client, namespace))["message"]
            return bool(message == "ModelServer llama-default: extproc uses its first endpoints once Envoy has them")

        await eventually(says_what_for)
        extproc.warming = frozenset()
        await until_ready_is(client, namespace, "True", "Serving")

        # a change: what serves it serves it meanwhile, and clients that wait for the change wait
        extproc.is_stuck = True
        await client.merge_patch(MODELS, "llama", namespace, {"spec": {"aliases": ["chat"]}})

        async def is_waiting() -> bool:
            conditions = (await client.get(MODELS, "llama", namespace))["status"]["conditions"]
            return any("not taken it yet" in one["message"] for one in conditions if one["type"] == "ModelRoutesReady")

        await eventually(is_waiting)
        meanwhile = await ready_condition(client, namespace)
        assert (meanwhile["status"], meanwhile["reason"], meanwhile["observedGeneration"]) == ("True", "Serving", 1)
        extproc.is_stuck = False

        async def has_taken_it() -> bool:
            return bool((await ready_condition(client, namespace))["observedGeneration"] == 2)

        await eventually(has_taken_it)
        assert (await ready_condition(client, namespace))["lastTransitionTime"] == meanwhile["lastTransitionTime"]


async def test_without_a_gateway_it_is_ready_after_a_while_whatever_is_in_its_status(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    work = settings(namespace, models=ModelSettings(gateway_wait_s=3.0))
    async with managing(kube.admin, namespace, decide=reconcile, work=work):
        await create_with_engine(client, namespace)
        await until_ready_is(client, namespace, "False", "WaitingForGateway")
        for resource, name, type_ in ((MODELS, "llama", "ModelRoutesReady"), (MODEL_ROUTES, "llama", "Programmed")):
            garbage = {
                "type": type_,
                "status": "Unknown",
                "reason": "Nonsense",
                "message": "x" * 32_768,
                "observedGeneration": 2**53,
                "lastTransitionTime": "9999-12-31T23:59:59Z",
            }
            patch = {"status": {"conditions": [garbage]}}
            await client.merge_patch(resource, name, namespace, patch, subresource="status")
        await until_ready_is(client, namespace, "True", "GatewayUnconfirmed")
        assert len((await ready_condition(client, namespace))["message"]) <= 4096
        # a gateway that comes later has the last word
        async with serving(client, namespace, tmp_path):
            await until_ready_is(client, namespace, "True", "Serving")
