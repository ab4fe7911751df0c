# SPDX-License-Identifier: Apache-2.0
"""A picker in a cluster behind an Envoy that something else configures: as manifests/picker has it, and as llm-d's
chart starts one.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from typing import TYPE_CHECKING

import httpx
import msgspec
import openai
import pytest_asyncio
import yaml

from bench.cluster.certificates import Authority
from bench.cluster.node.in_process_node import gpu_node, running_nodes
from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.kube.api_resources import DEPLOYMENTS, INFERENCE_POOLS, NODES, PODS, SECRETS, ApiResource, Object
from controller.kube.client import Client
from tests.controller.commands.test_epp import CHART
from tests.controller.gateway.compile.test_inference_pool_compiler import PICKER
from tests.waiting import eventually
from tests.with_envoy.gateways import NO_HINT, bootstrap, pool_cluster
from tests.with_kube.kubes import REAL, Kube
from tests.with_kube.pods import remove_pods
from tests.with_kube.test_end_to_end import engines, is_served, load
from tests.with_kube.test_manifests import MANIFESTS, kubectl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from bench.cluster.kubernetes_binaries import ClusterBinaries

pytestmark = REAL
SECRET = "attache-picker-tls"  # noqa: S105 - a name


class Site(msgspec.Struct, frozen=True):
    """A namespace with a pool, its picker in a pod, and Envoy."""

    client: Client
    namespace: str
    authorities: tuple[Authority, Authority]
    picker_ip: str
    metrics_port: int
    url: str

    async def scale(self, replicas: int) -> None:
        """Make the engines so many, and wait until the picker has them."""
        await self.client.merge_patch(DEPLOYMENTS, "llama", self.namespace, {"spec": {"replicas": replicas}})

        async def is_done() -> bool:
            page = await fetch(f"http://{self.picker_ip}:{self.metrics_port}/metrics")
            return len([line for line in page.splitlines() if line.startswith("attache_in_flight{")]) == replicas

        await eventually(is_done)

    async def metric(self, name: str) -> float:
        page = await fetch(f"http://{self.picker_ip}:{self.metrics_port}/metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


async def fetch(url: str) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(url)).text


def secret(namespace: str, authority: Authority) -> Object:
    certificate, key = authority.issue("attache-picker", names=[f"attache-picker.{namespace}.svc"])
    metadata = {"name": SECRET, "namespace": namespace}
    data = {"tls.crt": certificate, "tls.key": key}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "stringData": data}


def overlay(folder: Path, namespace: str) -> Path:
    """manifests/picker as somebody would adapt it: one replica, on the test's node, with a certificate."""
    folder.mkdir()
    spec = "/spec/template/spec"
    patch = [
        {"op": "replace", "path": "/spec/replicas", "value": 1},
        {"op": "add", "path": f"{spec}/nodeSelector", "value": {"test": namespace}},
    ]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [os.path.relpath(MANIFESTS / "picker" / "base", folder)],
        "components": [os.path.relpath(MANIFESTS / "picker" / "certificate", folder)],
        "patches": [{"target": {"kind": "Deployment"}, "patch": json.dumps(patch)}],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


def epp(namespace: str) -> Object:
    """A Deployment as llm-d's chart writes it, with the image changed."""
    flags = [word.replace("team", namespace) for word in CHART]
    container = {
        "name": "epp",
        "image": "attache",
        # what the image `epp` begins with; pods of these tests share ports, so that each needs its own address
        "args": ["epp", "--bind-address=0.0.0.0", *flags, "--cert-path=/certs"],
        "ports": [{"name": "grpc", "containerPort": 9002}, {"name": "grpc-health", "containerPort": 9003}],
        "livenessProbe": {"grpc": {"port": 9003, "service": "inference-extension"}, "initialDelaySeconds": 5},
        "readinessProbe": {"grpc": {"port": 9003, "service": "inference-extension"}, "periodSeconds": 2},
        "env": [{"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}],
        "volumeMounts": [
            {"name": "plugins", "mountPath": "/config"},
            {"name": "certs", "mountPath": "/certs"},
        ],
    }
    spec = {
        "serviceAccountName": "epp",
        "nodeSelector": {"test": namespace},
        "containers": [container],
        "volumes": [
            {"name": "plugins", "configMap": {"name": "epp"}},
            {"name": "certs", "secret": {"secretName": SECRET}},
        ],
    }
    labels = {"app.kubernetes.io/name": "attache-picker"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    content = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return {**named("apps/v1", "Deployment", namespace), "spec": content}


def named(version: str, kind: str, namespace: str, name: str = "epp") -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": namespace}}


async def apply_epp(client: Client, namespace: str) -> None:
    """What llm-d's chart makes. Its account may neither read ConfigMaps nor write Events."""
    rbac = "rbac.authorization.k8s.io"
    reading = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": reading},
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": reading},
        {"apiGroups": ["llm-d.ai"], "resources": ["inferenceobjectives"], "verbs": reading},
    ]
    reference = {"apiGroup": rbac, "kind": "Role", "name": "epp"}
    things: list[tuple[ApiResource, Object]] = [
        (ApiResource("", "v1", "serviceaccounts", "ServiceAccount"), named("v1", "ServiceAccount", namespace)),
        (ApiResource(rbac, "v1", "roles", "Role"), {**named(f"{rbac}/v1", "Role", namespace), "rules": rules}),
        (
            ApiResource(rbac, "v1", "rolebindings", "RoleBinding"),
            {
                **named(f"{rbac}/v1", "RoleBinding", namespace),
                "roleRef": reference,
                "subjects": [{"kind": "ServiceAccount", "name": "epp"}],
            },
        ),
        (
            ApiResource("", "v1", "configmaps", "ConfigMap"),
            {**named("v1", "ConfigMap", namespace), "data": {"default-plugins.yaml": PICKER, "another.yaml": "{}"}},
        ),
        (DEPLOYMENTS, epp(namespace)),
    ]
    pool = yaml.safe_load((MANIFESTS / "picker" / "base" / "pool.yaml").read_text())
    pool["metadata"]["namespace"] = namespace
    del pool["metadata"]["annotations"]
    await client.create(INFERENCE_POOLS, pool)
    for resource, thing in things:
        await client.create(resource, thing)


@pytest_asyncio.fixture(loop_scope="session", params=["manifests", "llm-d"])
async def site(
    request: pytest.FixtureRequest, client: Client, kube: Kube, namespace: str, assets: ClusterBinaries, tmp_path: Path
) -> AsyncIterator[Site]:
    """Two engines, the picker, and an Envoy that connects to it with TLS and takes the address from the header."""
    assert kube.plane is not None
    for folder in ("inference-extension", "gateway-api"):
        assert (
            await kubectl(kube.plane, assets, "apply", "--server-side", "-f", str(assets.crd_directory / folder)) == 0
        )
    await eventually(lambda: client.serves(INFERENCE_POOLS))
    authorities = Authority(dt.datetime.now(dt.UTC)), Authority(dt.datetime.now(dt.UTC))
    await client.create(SECRETS, secret(namespace, authorities[0]))
    deployment = engines(namespace)
    deployment["spec"]["template"]["spec"]["containers"][0]["args"][1] = "llama"
    await client.create(DEPLOYMENTS, deployment)
    if request.param == "manifests":
        folder_ = overlay(tmp_path / "overlay", namespace)
        assert await kubectl(kube.plane, assets, "apply", "-k", str(folder_)) == 0
    else:
        await apply_epp(client, namespace)
    node = gpu_node(f"node-{namespace}", 8, {"test": namespace})
    async with running_nodes(client, [node], tmp_path / "pods"), Processes(tmp_path) as processes:
        picker: dict[str, str] = {}

        async def is_ready() -> bool:
            for pod in (await client.list(PODS, namespace, labels="app.kubernetes.io/name=attache-picker")).items:
                conditions = (pod.get("status") or {}).get("conditions") or ()
                if any(one["type"] == "Ready" and one["status"] == "True" for one in conditions):
                    picker["ip"] = pod["status"]["podIP"]
            return "ip" in picker

        await eventually(is_ready)
        listen, admin = free_ports(2)
        trusted = authorities[0].certificate + authorities[1].certificate
        configured = bootstrap(
            listeners=[(listen, NO_HINT)],
            admin=admin,
            extproc=9002,
            host=picker["ip"],
            cluster=pool_cluster("original_dst", ()),
            tls={"validation_context": {"trusted_ca": {"inline_string": trusted}}},
        )
        bundle = tmp_path / "envoy"
        bundle.mkdir()
        (bundle / "bootstrap.json").write_text(json.dumps(configured))
        await processes.start("envoy", envoy_command(bundle))
        found = Site(client, namespace, authorities, picker["ip"], 9090, f"http://127.0.0.1:{listen}")
        await found.scale(2)
        await eventually(lambda: is_served(found.url))
        yield found
        await remove_pods(client, namespace)
        await client.delete(NODES, node.name)


async def test_no_request_fails_while_engines_come_and_go_and_the_certificate_is_renewed(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        question = [{"role": "user", "content": "Hello"}]
        stream = await client.chat.completions.create(model="llama", max_tokens=5, stream=True, messages=question)  # type: ignore[call-overload]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    async with load(site.url) as asking:
        await site.scale(4)
        await site.scale(1)
        await site.client.delete(SECRETS, SECRET, site.namespace)
        await site.client.create(SECRETS, secret(site.namespace, site.authorities[1]))

        async def is_renewed() -> bool:
            return await site.metric('attache_tls_certificate_loads_total{result="used"}') == 2

        await eventually(is_renewed)
        before = asking.answers
        await eventually(lambda: asking.answers > before + 50)
        await site.scale(3)
    assert asking.failures == []
