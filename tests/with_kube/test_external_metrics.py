# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' own HPA controller scales by what we decide, through the API server; and pages need a token with the
right.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import ssl
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
import yaml

from bench.cluster.certificates import write_private
from bench.cluster.local_control_plane import write_kubeconfig
from bench.stack.processes import Processes, free_ports
from controller.autoscaler.export.keda_messages import GetMetricsRequest, GetMetricsResponse, ScaledObjectRef
from controller.kube.api_resources import MODEL_INFERS, SECRETS, SERVICE_ACCOUNTS, SERVICES, ApiResource
from controller.kube.errors import ClusterError, NotFound
from controller.webhooks.certificates import API_SERVICES
from tests.waiting import eventually
from tests.with_kube.kubes import REAL
from tests.with_kube.managing import define_kinds, model_infer
from tests.with_kube.monitors import checked, configuration, scrape_configs
from tests.with_kube.prometheus import scraping
from tests.with_kube.scaling import Demand, Wanted, bind, make_policy, make_server, says, scaling, target
from tests.with_kube.test_manager_permissions import account
from tests.with_kube.test_manifests import MANIFESTS, SYSTEM, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from tests.with_kube.kubes import Kube

__all__ = ["account"]
pytestmark = REAL
API = "v1beta1.external.metrics.k8s.io"
PATH = "/apis/external.metrics.k8s.io/v1beta1"
HPAS = ApiResource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
ROLES = ApiResource("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False)
BINDINGS = ApiResource("rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False)
NAME = "manager"
CERTIFICATES = "attache-webhook-certificates"


class Manager:
    """A manager process that serves only. ``ports``: of its servers."""

    def __init__(self, processes: Processes, ports: dict[str, int]) -> None:
        self.processes = processes
        self.ports = ports

    async def page(self, path: str, token: str = "", port: str = "metrics") -> tuple[int, str]:
        """Status and body; without a check of the certificate."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        headers = {"authorization": f"Bearer {token}"} if token else {}
        url = f"https://127.0.0.1:{self.ports[port]}{path}"
        async with aiohttp.ClientSession() as http, http.get(url, headers=headers, ssl=context) as answer:
            return answer.status, await answer.text()

    async def is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return (await self.page("/readyz"))[0] == 200
        return False


@pytest_asyncio.fixture(loop_scope="session")
async def manager(
    client: Client, account: ClusterAccess, plane: ControlPlane, assets: ClusterBinaries, namespace: str, tmp_path: Path
) -> AsyncIterator[Manager]:
    """With the external metrics API behind the API server, the manager's own account and the rights of our
    manifests.
    """
    await define_kinds(client)
    ports = dict(zip(("listen", "metrics", "external-metrics", "keda"), free_ports(4), strict=True))
    for one in ("external-metrics", "metrics-auth"):
        rights = MANIFESTS / "manager-components" / one / "rbac.yaml"
        assert await kubectl(plane, assets, "apply", "-f", str(rights)) == 0
    await client.apply(SECRETS, _named("v1", "Secret", CERTIFICATES, SYSTEM))
    service = _named("v1", "Service", "attache-manager", namespace)
    await client.create(SERVICES, {**service, "spec": {"type": "ExternalName", "externalName": "localhost"}})
    where = {"name": "attache-manager", "namespace": namespace, "port": ports["external-metrics"]}
    spec = {"group": "external.metrics.k8s.io", "version": "v1beta1", "service": where}
    priorities = {"groupPriorityMinimum": 100, "versionPriority": 100}
    api = {"apiVersion": API_SERVICES.api_version, "kind": "APIService", "metadata": {"name": API}}
    await client.create(API_SERVICES, {**api, "spec": {**spec, **priorities}})
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", account)
    words = [one for name, port in ports.items() for one in (f"--{name}", f"127.0.0.1:{port}")]
    words += ["--no-work", "--metrics-auth", "--host", f"attache-manager.{namespace}.svc", "--namespace", SYSTEM]
    words += ["--watch-namespace", namespace]
    command = ["env", f"KUBECONFIG={kubeconfig}", sys.executable, "-m", "attache", "manager", *words]
    try:
        async with Processes(tmp_path) as processes:
            await processes.start(NAME, command)
            found = Manager(processes, ports)
            await processes.wait_ready(NAME, found.is_ready)
            yield found
    finally:
        await client.delete(API_SERVICES, API)
        await client.delete(SECRETS, CERTIFICATES, SYSTEM)


def _named(version: str, kind: str, name: str, namespace: str) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}


def hpa(namespace: str, kind: str = "AverageValue") -> Object:
    metric = {"name": "wva_desired_replicas", "selector": {"matchLabels": {"variant_name": "llama"}}}
    value = "averageValue" if kind == "AverageValue" else "value"
    external = {"metric": metric, "target": {"type": kind, value: "1"}}
    at_once = {"stabilizationWindowSeconds": 0}
    spec = {
        "scaleTargetRef": {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelInfer", "name": "llama"},
        "minReplicas": 1,
        "maxReplicas": 9,
        "metrics": [{"type": "External", "external": external}],
        "behavior": {"scaleUp": at_once, "scaleDown": at_once},
    }
    return {**_named(HPAS.api_version, "HorizontalPodAutoscaler", "llama", namespace), "spec": spec}


async def replicas(client: Client, namespace: str) -> int:
    return int((await client.get(MODEL_INFERS, "llama", namespace))["spec"]["replicas"])


async def until_replicas(client: Client, namespace: str, number: int) -> None:
    async def are_there() -> bool:
        return await replicas(client, namespace) == number

    await eventually(are_there)


async def condition_of(client: Client, namespace: str, type_: str) -> str:
    """Of the HPA: its status and reason."""
    status = (await client.get(HPAS, "llama", namespace)).get("status") or {}
    found = [one for one in status.get("conditions") or () if one["type"] == type_]
    return f"{found[0]['status']} {found[0]['reason']}" if found else ""


async def test_the_hpa_controller_scales_a_model_infer_by_our_metric(
    client: Client, kube: Kube, namespace: str, manager: Manager
) -> None:
    await make_policy(client, namespace, mode="Export")
    await make_server(client, namespace)
    await client.create(MODEL_INFERS, model_infer(namespace, "llama"))
    status = {"status": {"replicas": 1, "labelSelector": "app=llama"}}
    await client.merge_patch(MODEL_INFERS, "llama", namespace, status, subresource="status")
    await bind(client, namespace, target("ModelInfer"))
    wanted = Wanted(main=4)
    async with scaling(kube.admin, namespace, wanted, Demand()):
        await client.create(HPAS, hpa(namespace))
        await until_replicas(client, namespace, 4)
        # one autoscaler writes, and the other is no rival of it
        await eventually(lambda: wanted.decisions > 3)
        assert await says(client, namespace, "ScalingActive") == ("True", "Exporting")
        assert await says(client, namespace, "TargetsResolved") == ("True", "Resolved")
        wanted.replicas["main"] = 2
        await until_replicas(client, namespace, 2)
        # whoever decides restarts, and knows nothing for now: nobody sees a gap or a zero
        wanted.replicas["main"] = None
    async with scaling(kube.admin, namespace, Wanted(), Demand()):
        await asyncio.sleep(3.0)
        assert await condition_of(client, namespace, "ScalingActive") == "True ValidMetricFound"
        assert await replicas(client, namespace) == 2
    # who serves the metric is gone, and nothing is scaled
    await manager.processes.end(NAME, signal.SIGKILL)

    async def is_unknown() -> bool:
        return (await condition_of(client, namespace, "ScalingActive")).startswith("False")

    await eventually(is_unknown)
    assert await replicas(client, namespace) == 2
    await client.delete(HPAS, "llama", namespace)


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
async def test_prometheus_gets_metrics_by_what_our_monitors_say(
    kind: str,
    client: Client,
    manager: Manager,
    plane: ControlPlane,
    assets: ClusterBinaries,
    namespace: str,
    tmp_path: Path,
) -> None:
    folder = "pod-monitor-with-auth" if kind == "PodMonitor" else "service-monitor-with-auth"
    words = [str(assets.binary("kubectl")), "kustomize", str(MANIFESTS / "monitoring" / folder)]
    built = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    made, _ = await built.communicate()
    things = list(yaml.safe_load_all(made))
    (monitor,) = (one for one in things if one["kind"] == kind and one["metadata"]["name"] == "attache-manager")
    (asks,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    assert (asks["scheme"], asks["port"]) == ("https", "metrics")
    scraper = MANIFESTS / "monitoring" / "metrics-auth" / "scraper.yaml"
    assert await kubectl(plane, assets, "apply", "-f", str(scraper)) == 0

    async def secret(place: dict[str, str]) -> str:
        """Of the monitor's own namespace."""
        data = (await client.get(SECRETS, place["name"], monitor["metadata"]["namespace"])).get("data") or {}
        return base64.b64decode(data.get(place["key"], "")).decode()

    async def has_token() -> bool:
        return bool(await secret(asks["authorization"]["credentials"]))

    await eventually(has_token)
    token = await secret(asks["authorization"]["credentials"])
    authority = await secret(asks["tlsConfig"]["ca"]["secret"])
    # this manager was told another namespace than the one of the manifests
    name = asks["tlsConfig"]["serverName"].replace(SYSTEM, namespace)
    context = ssl.create_default_context(cadata=authority)
    url = f"https://127.0.0.1:{manager.ports['metrics']}"
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.get(f"{url}/metrics", ssl=context, server_hostname=name) as answer:
            assert answer.status == 200
            assert "attache_manager" in await answer.text()
        async with http.get(f"{url}/decisions", ssl=context, server_hostname=name) as answer:
            assert answer.status == 403
    # and a real Prometheus, with all that the monitor says
    files = {
        (asks["authorization"]["credentials"]["name"], asks["authorization"]["credentials"]["key"]): token,
        (asks["tlsConfig"]["ca"]["secret"]["name"], asks["tlsConfig"]["ca"]["secret"]["key"]): authority,
    }
    secrets = {place: tmp_path / f"secret-{number}" for number, place in enumerate(files)}
    for place, text in files.items():
        write_private(secrets[place], text)
    asks["tlsConfig"]["serverName"] = name
    jobs = scrape_configs(monitor, {"metrics": f"127.0.0.1:{manager.ports['metrics']}"}, secrets)
    folder_of_prometheus = tmp_path / "prometheus"
    folder_of_prometheus.mkdir()
    async with scraping(folder_of_prometheus, checked(tmp_path, "config", configuration(jobs))) as prometheus:

        async def is_up() -> bool:
            return len(await prometheus.query("up == 1")) == 1

        await eventually(is_up)
        assert await prometheus.problems() == []
        assert await prometheus.query("attache_manager_leader")


async def test_the_wrong_kind_of_target_is_told(client: Client, kube: Kube, namespace: str, manager: Manager) -> None:
    """With Value an HPA multiplies what is there by what should be there."""
    assert manager.ports
    await make_policy(client, namespace, mode="Export")
    await make_server(client, namespace)
    await client.create(MODEL_INFERS, model_infer(namespace, "llama"))
    await bind(client, namespace, target("ModelInfer"))
    async with scaling(kube.admin, namespace, Wanted(main=1), Demand()):
        await client.create(HPAS, hpa(namespace, "Value"))

        async def is_told() -> bool:
            return await says(client, namespace, "TargetsResolved") == ("False", "WrongMetricTarget")

        await eventually(is_told)
    await client.delete(HPAS, "llama", namespace)


async def test_the_external_metrics_api_answers_those_who_may_ask(
    client: Client, kube: Kube, namespace: str, manager: Manager
) -> None:
    other = {**target("Deployment", "qwen"), "name": "other"}
    binding = await bind(client, namespace, target("Deployment"), other)
    targets = [{"name": "main", "desired": 3, "current": 2}, {"name": "other", "current": 5}]
    patch = {"status": {"targets": targets}}
    await client.merge_patch(_resource(binding), binding["metadata"]["name"], namespace, patch, subresource="status")
    path = f"{PATH}/namespaces/{namespace}/wva_desired_replicas"

    async def is_served() -> bool:
        with contextlib.suppress(ClusterError):
            return bool((await client._json("GET", path))["items"])
        return False

    await eventually(is_served)
    # what nothing was decided about is not there, rather than 0
    (item,) = (await client._json("GET", path))["items"]
    assert (item["value"], item["metricLabels"]["variant_name"]) == ("3", "llama")
    query = {"labelSelector": "variant_name=qwen"}
    assert (await client._json("GET", path, query=query))["items"] == []
    ratio = await client._json("GET", path.replace("replicas", "ratio"), query={"labelSelector": "binding in (one, x)"})
    assert ratio["items"][0]["value"] == "1500m"
    with pytest.raises(NotFound):
        await client._json("GET", path.replace("wva", "other"))
    assert "wva_desired_replicas" in str(await client._json("GET", PATH))
    # straight to the server: neither a stranger, nor headers without the API server's certificate
    assert (await manager.page(path, port="external-metrics"))[0] == 401
    assert (await manager.page(path, kube.nobody.token, port="external-metrics"))[0] == 403
    assert (await manager.page(path, kube.admin.token, port="external-metrics"))[0] == 200
    async with grpc.aio.insecure_channel(f"127.0.0.1:{manager.ports['keda']}") as channel:
        call = channel.unary_unary(
            "/externalscaler.ExternalScaler/GetMetrics",
            request_serializer=GetMetricsRequest.SerializeToString,
            response_deserializer=GetMetricsResponse.FromString,
        )
        metadata = {"binding": "one", "target": "main"}
        asked = ScaledObjectRef(name="llama", namespace=namespace, scalerMetadata=metadata)
        answer = await call(GetMetricsRequest(scaledObjectRef=asked, metricName=""))
        assert answer.metricValues[0].metricValue == 3


async def test_pages_need_a_token_with_the_right(client: Client, namespace: str, manager: Manager) -> None:
    accounts = {name: await token_of(client, namespace, name) for name in ("scraper", "stranger")}
    await let_scrape(client, namespace, "scraper")

    async def is_allowed() -> bool:
        return (await manager.page("/metrics", accounts["scraper"]))[0] == 200

    await eventually(is_allowed)
    found = {
        (path, who): (await manager.page(path, token))[0]
        for path in ("/metrics", "/healthz")
        for who, token in {**accounts, "nobody": "", "liar": "no.such.token"}.items()
    }
    assert found == {
        ("/metrics", "scraper"): 200,
        ("/metrics", "stranger"): 403,
        ("/metrics", "nobody"): 401,
        ("/metrics", "liar"): 401,
        ("/healthz", "scraper"): 200,
        ("/healthz", "stranger"): 200,
        ("/healthz", "nobody"): 200,
        ("/healthz", "liar"): 200,
    }
    # plain HTTP is not spoken
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{manager.ports['metrics']}/metrics"):
            pass


async def let_scrape(client: Client, namespace: str, name: str) -> None:
    """The ServiceAccount may get /metrics."""
    role = {"apiVersion": ROLES.api_version, "kind": "ClusterRole", "metadata": {"name": f"metrics-{namespace}"}}
    await client.create(ROLES, {**role, "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"metrics-{namespace}"}
    made = {"apiVersion": BINDINGS.api_version, "kind": "ClusterRoleBinding", "metadata": role["metadata"]}
    await client.create(BINDINGS, {**made, "roleRef": reference, "subjects": [subject]})


async def token_of(client: Client, namespace: str, name: str) -> str:
    """A ServiceAccount's token."""
    await client.create(SERVICE_ACCOUNTS, _named("v1", "ServiceAccount", name, namespace))
    asked: Any = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "metadata": {}, "spec": {}}
    answer = await client.post(SERVICE_ACCOUNTS, name, namespace, "token", asked)
    return str(answer["status"]["token"])


def _resource(thing: Object) -> ApiResource:
    return ApiResource("attache.dev", "v1alpha1", "autoscalingpolicybindings", thing["kind"])
