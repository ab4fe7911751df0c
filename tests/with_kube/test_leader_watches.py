# SPDX-License-Identifier: Apache-2.0
"""Which watches a leader holds open when each of its readers needs pods: none of them twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from controller.autoscaler.reconciler.controller import ScalingSettings, make_scaling_runner
from controller.autoscaler.reconciler.decision_records import DecisionRecords
from controller.autoscaler.reconciler.informers import NamespacedPodInformers
from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.kube.api_resources import MODEL_INFERS, NODES, PODS, ApiResource
from controller.kube.client import Client
from controller.kube.pod_views import POD_VIEW
from controller.kube.shared_informers import SharedInformers
from tests.waiting import eventually
from tests.with_kube.kubes import make_namespace
from tests.with_kube.managing import IMPATIENT, QUICK_QUEUE, define_kinds, managing, model_infer
from tests.with_kube.pods import make_pod, remove_pods
from tests.with_kube.scaling import bind, make_policy, target

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pytest

    from controller.autoscaler.reconciler.controller import Scaling
    from controller.kube.client import WatchEvent
    from tests.with_kube.kubes import Kube

Watch = tuple[ApiResource, str | None, str]


def open_watches(monkeypatch: pytest.MonkeyPatch) -> Counter[Watch]:
    """Those of all clients now, by kind, namespace and label selector."""
    found, watch = Counter[Watch](), Client.watch

    async def counted(
        self: Client,
        resource: ApiResource,
        namespace: str | None = None,
        *,
        labels: str = "",
        **more: Any,  # noqa: ANN401 - of the watch
    ) -> AsyncGenerator[WatchEvent]:
        found[resource, namespace, labels] += 1
        try:
            async with contextlib.aclosing(watch(self, resource, namespace, labels=labels, **more)) as events:
                async for event in events:
                    yield event
        finally:
            found[resource, namespace, labels] -= 1

    monkeypatch.setattr(Client, "watch", counted)
    return found


def watched(found: Counter[Watch]) -> dict[Watch, int]:
    return {one: count for one, count in found.items() if one[0] in (PODS, NODES) and count}


def watches(namespace: str, *pods: str | None) -> dict[Watch, int]:
    """Those of every leader, and those of all pods in these namespaces."""
    ours = "attache.dev/model-infer"
    return {
        (PODS, namespace, ours): 1,
        (PODS, namespace, f"attache.dev/model,!{ours}"): 1,
        (PODS, None, "attache.dev/tells-loads"): 1,
        (NODES, None, ""): 1,
        **{(PODS, one, ""): 1 for one in pods},
    }


def scaling(namespace: str) -> Scaling:
    settings = ScalingSettings(namespace=namespace, informers=IMPATIENT, queue=QUICK_QUEUE)
    return make_scaling_runner(settings, ScalingMetrics(CollectorRegistry()), DecisionRecords())


async def test_a_leader_watches_no_pods_twice(
    client: Client, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await define_kinds(client)
    # a gang without a gang scheduler waits for capacity of nodes; so do two targets of one stage
    gang = model_infer(namespace)
    gang["spec"]["template"]["gang"] = {}
    await client.create(MODEL_INFERS, gang)
    await make_policy(client, namespace)
    other = {**target(name="other", accelerator="B200"), "name": "second"}
    await bind(client, namespace, target(accelerator="H100"), other)
    found = open_watches(monkeypatch)
    async with managing(kube.admin, namespace, scaling=scaling(namespace)):
        await eventually(lambda: watched(found) == watches(namespace, None))


async def test_pods_of_namespaces_come_from_a_watch_of_all_pods_where_there_is_one(
    client: Client, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await make_namespace(client, kube)
    for each in (namespace, other):
        await make_pod(client, each, "a", "10.0.0.1")
    found, shared = open_watches(monkeypatch), SharedInformers(client, IMPATIENT)
    pods = NamespacedPodInformers(shared, lambda: None)

    def names(of: str) -> list[str]:
        return [one.name for one in pods.index.find_pods(of, {"app": "llama"})]

    tasks = [asyncio.create_task(each) for each in (shared.run(), pods.run())]
    try:
        pods.set_wanted([namespace])
        await eventually(lambda: pods.has_synced(namespace))
        assert (names(namespace), names(other)) == (["a"], [])
        # a gang, or a stage with several targets, needs to know what all pods take
        everything = shared.acquire(PODS, transform=POD_VIEW)
        await eventually(lambda: watched(found) == {(PODS, None, ""): 1})
        await make_pod(client, namespace, "b", "10.0.0.2")
        await eventually(lambda: names(namespace) == ["a", "b"])
        await make_pod(client, other, "b", "10.0.0.2")
        await eventually(lambda: f"{other}/b" in everything.objects)
        assert names(other) == []
        pods.set_wanted([namespace, other])
        assert pods.has_synced(other)
        assert names(other) == ["a", "b"]
        pods.set_wanted([other])
        assert names(namespace) == []
        shared.release(everything)
        await eventually(lambda: watched(found) == {(PODS, other, ""): 1})
        await make_pod(client, other, "c", "10.0.0.3")
        await eventually(lambda: names(other) == ["a", "b", "c"])
        pods.set_wanted([])
        await eventually(lambda: watched(found) == {})
        assert names(other) == []
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.wait(tasks)
        await remove_pods(client, other)
