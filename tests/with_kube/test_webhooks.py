# SPDX-License-Identifier: Apache-2.0
"""The admission webhooks, asked by a real API server: accepted, refused, warned, gone, and certificates that change."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import yaml

from bench.stack.processes import free_ports
from controller.kube.api_resources import (
    CONFIG_MAPS,
    GATEWAY_CONFIGS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    MODELS,
    SECRETS,
    ApiResource,
)
from controller.kube.client import connect
from controller.kube.errors import ApiError, Forbidden
from controller.kube.manager_metrics import ManagerMetrics
from controller.manager.runner import CONTROLLER
from controller.webhooks.certificates import WEBHOOK_CONFIGURATIONS, Lifetimes, RotationSettings, utc_now
from controller.webhooks.server import WebhookServer, WebhookSettings
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.kube_objects import Object, picker_config, route, server
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_kinds
from tests.with_kube.test_gateway_role import IMPATIENT
from tests.with_kube.test_manifests import SYSTEM, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.client import Client

MANIFESTS = Path(__file__).parents[2] / "manifests" / "manager"
SECRET = "attache-webhook-certificates"  # noqa: S105 - a name
WRONG_PICKER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorr}]\n"


pytestmark = REAL


@pytest_asyncio.fixture(loop_scope="session")
async def account(
    client: Client, plane: ControlPlane, assets: ClusterBinaries, tmp_path: Path
) -> AsyncIterator[Client]:
    """A client with the token of the manager's ServiceAccount, whose manifests are there but for Deployment and
    webhooks.
    """
    await define_kinds(client)
    kept = ["namespace.yaml", "rbac.yaml", "certificates.yaml"]
    for name in kept:
        (tmp_path / name).write_text((MANIFESTS / name).read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": SYSTEM, "resources": kept}))
    assert await kubectl(plane, assets, "apply", "-k", str(tmp_path)) == 0
    # what another test has left
    await client.merge_patch(SECRETS, SECRET, SYSTEM, {"data": None})
    asked: Object = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": {}}
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/attache-manager/token"
    answer: dict[str, Any] = await client._json("POST", path, body=asked)
    access = msgspec.structs.replace(client.access, token=answer["status"]["token"], certificate="", key="")
    async with connect(access, manager=CONTROLLER) as one:
        yield one


@contextlib.asynccontextmanager
async def managing(
    account: Client, port: int, lifetimes: Lifetimes | None = None, clock: Callable[[], datetime] = utc_now
) -> AsyncIterator[WebhookServer]:
    """A replica that can be asked."""
    rotation = RotationSettings(
        namespace=SYSTEM,
        secret=SECRET,
        configuration="attache",
        names=("127.0.0.1",),
        lifetimes=lifetimes or Lifetimes(),
        every_s=0.2,
    )
    settings = WebhookSettings(listen=f"127.0.0.1:{port}", rotation=rotation)
    role = WebhookServer(
        account, settings, ManagerMetrics(), check_picker=InstalledPluginChecker(), timing=IMPATIENT, clock=clock
    )
    task = asyncio.create_task(role.run())
    try:
        async with asyncio.timeout(120):
            await role.ready.wait()
        yield role
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def configured(client: Client, port: int | None, namespace: str) -> AsyncIterator[None]:
    """The manifest's webhooks, for this test's namespace alone. They are asked at an address instead of the manifest's
    Service, unless ``port`` is None.
    """
    made = yaml.safe_load((MANIFESTS / "webhooks.yaml").read_text())
    for webhook in made["webhooks"]:
        if port is not None:
            webhook["clientConfig"] = {"url": f"https://127.0.0.1:{port}"}
        webhook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    await client.create(WEBHOOK_CONFIGURATIONS, made)
    try:
        yield
    finally:
        await client.delete(WEBHOOK_CONFIGURATIONS, "attache")


async def sent(client: Client, resource: ApiResource, thing: Object, *, dry_run: bool = True) -> list[str]:
    """Create it; the warnings. Raises ApiError."""
    metadata = {name: value for name, value in thing["metadata"].items() if name in {"name", "namespace", "labels"}}
    query = client._writing(dry_run=dry_run)
    path = resource.path(metadata["namespace"])
    async with client._answer("POST", path, query=query, body={**thing, "metadata": metadata}) as answer:
        return list(answer.headers.getall("Warning", []))


async def refusal(client: Client, resource: ApiResource, thing: Object) -> str:
    """Why it is refused; empty if it is taken."""
    try:
        await sent(client, resource, thing)
    except ApiError as error:
        return str(error)
    return ""


def wrong_route(namespace: str) -> Object:
    made = route(namespace=namespace)
    made["spec"]["rules"][0]["modelMatch"] = {"uri": {"regex": "(unclosed"}}
    return made


async def until_asked(client: Client, namespace: str) -> None:
    """API servers hear of a configuration a moment later."""

    async def is_refused() -> bool:
        return bool(await refusal(client, MODEL_ROUTES, wrong_route(namespace)))

    await eventually(is_refused)


async def test_objects_are_taken_refused_and_warned_of(client: Client, account: Client, namespace: str) -> None:
    (port,) = free_ports(1)
    async with configured(client, port, namespace), managing(account, port):
        await until_asked(client, namespace)
        said = await refusal(client, MODEL_ROUTES, wrong_route(namespace))
        assert "objects.attache.dev" in said
        assert "spec.rules[0].modelMatch.uri.regex" in said
        said = await refusal(client, CONFIG_MAPS, picker_config("epp", WRONG_PICKER, namespace=namespace))
        assert "there is no plugin type 'queue-scorr'" in said
        assert "stand for InferencePools" in await refusal(
            client, MODEL_SERVERS, server("inferencepool.x", namespace=namespace)
        )
        # a name of its own: other namespaces serve llama
        asked = route("llama", namespace=namespace, model=namespace)
        (warning,) = await sent(client, MODEL_ROUTES, asked)
        assert "there is no ModelServer 'llama'" in warning
        assert await sent(client, MODEL_SERVERS, server(namespace=namespace), dry_run=False) == []

        async def is_known() -> bool:
            return await sent(client, MODEL_ROUTES, asked) == []

        await eventually(is_known)
        # ConfigMaps of others are nothing to be asked about
        plain = picker_config("other", "x", namespace=namespace)
        plain["metadata"]["labels"] = {}
        assert await sent(client, CONFIG_MAPS, plain) == []


async def test_nobody_but_api_servers_is_told_anything(client: Client, account: Client, namespace: str) -> None:
    (port,) = free_ports(1)
    invented = {"uid": "1", "kind": {"kind": "ModelRoute"}, "operation": "CREATE", "object": route(namespace=namespace)}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": invented}
    async with configured(client, port, namespace), managing(account, port), aiohttp.ClientSession() as http:
        await until_asked(client, namespace)
        for path in ("/", "/validate", "/validate/", "/validate/x"):
            async with http.post(f"https://127.0.0.1:{port}{path}", json=review, ssl=False) as answer:
                assert (answer.status, await answer.text()) == (404, "404: Not Found")
        found = await client.get(WEBHOOK_CONFIGURATIONS, "attache")
        async with http.post(found["webhooks"][0]["clientConfig"]["url"], json=review, ssl=False) as answer:
            assert answer.status == 200


async def test_an_api_server_takes_the_path_of_a_service(client: Client, account: Client, namespace: str) -> None:
    """Of a Service's path it takes fewer characters than of a URL's."""
    (port,) = free_ports(1)
    async with configured(client, None, namespace), managing(account, port) as role:
        material = role._rotation.material
        assert material is not None
        found = await client.get(WEBHOOK_CONFIGURATIONS, "attache")
    service = {"name": "attache-manager", "namespace": SYSTEM, "path": f"/validate/{material.path}", "port": 443}
    bundle = base64.b64encode(material.ca_bundle.encode()).decode()
    expected = {"caBundle": bundle, "service": service}
    assert [one["clientConfig"] for one in found["webhooks"]] == [expected] * 2


async def test_without_the_server_objects_are_taken(client: Client, account: Client, namespace: str) -> None:
    (port,) = free_ports(1)
    async with configured(client, port, namespace):
        async with managing(account, port):
            await until_asked(client, namespace)
        assert await refusal(client, MODEL_ROUTES, wrong_route(namespace)) == ""
        async with managing(account, port):
            await until_asked(client, namespace)


class FastClock:
    """``looks``: how often the time was asked for."""

    def __init__(self) -> None:
        self.ahead = timedelta()
        self.looks = 0

    def __call__(self) -> datetime:
        self.looks += 1
        return utc_now() + self.ahead


@pytest.mark.real_time
async def test_certificates_change_while_requests_flow(client: Client, account: Client, namespace: str) -> None:
    """Two replicas share the Secret. A gap would show as an object that is taken although it has a mistake."""
    first_port, second_port = free_ports(2)
    clocks = FastClock(), FastClock()
    # an authority gets a successor after 100 s, a certificate after 40; certificates are good 10 minutes earlier, too
    lifetimes = Lifetimes(
        authority=timedelta(seconds=150), certificate=timedelta(seconds=60), settled=timedelta(seconds=20)
    )
    async with (
        configured(client, first_port, namespace),
        managing(account, first_port, lifetimes, clocks[0]) as first,
        managing(account, second_port, lifetimes, clocks[1]) as second,
    ):
        await until_asked(client, namespace)
        servers, signers, taken = set(), set(), 0
        wrong = wrong_route(namespace)

        async def have_looked(before: list[int]) -> bool:
            nonlocal taken
            taken += not await refusal(client, MODEL_ROUTES, wrong)
            # with the second look the first has been acted on
            return all(clock.looks > 1 + looks for clock, looks in zip(clocks, before, strict=True))

        async with asyncio.timeout(300):
            while len(signers) < 3:
                before = [clock.looks for clock in clocks]
                for clock in clocks:
                    clock.ahead += timedelta(seconds=4)
                await eventually(lambda before=before: have_looked(before))
                material = first._rotation.material
                assert material is not None
                servers.add(material.server)
                signers.add(material.authorities[0])
        assert taken == 0
        assert len(servers) >= 3

        async def is_shared() -> bool:
            return first._rotation.material == second._rotation.material

        await eventually(is_shared)
    secret = await client.get(SECRETS, SECRET, SYSTEM)
    assert b"PRIVATE" not in base64.b64decode(secret["data"]["ca.crt"])


async def test_the_account_may_do_nothing_more(account: Client, namespace: str) -> None:
    with pytest.raises(Forbidden):
        await account.list(SECRETS, SYSTEM)
    with pytest.raises(Forbidden):
        await account.get(SECRETS, SECRET, namespace)
    with pytest.raises(Forbidden):
        await account.delete(SECRETS, SECRET, SYSTEM)
    with pytest.raises(Forbidden):
        await account.list(WEBHOOK_CONFIGURATIONS)
    # what it makes for Models it may delete; what people write it may not
    with pytest.raises(Forbidden):
        await account.delete(MODELS, "llama", namespace)
    with pytest.raises(Forbidden):
        await account.delete(GATEWAY_CONFIGS, "gateway", SYSTEM)
    with pytest.raises(Forbidden):
        await account.create(
            SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x", "namespace": SYSTEM}}
        )


async def test_the_server_takes_the_manifests_as_they_are(
    plane: ControlPlane, assets: ClusterBinaries, account: Client
) -> None:
    assert account.manager == CONTROLLER
    words = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-k"]
    assert await kubectl(plane, assets, *words, str(MANIFESTS)) == 0
