# SPDX-License-Identifier: Apache-2.0
"""Which watches a leader holds open when each of its readers needs pods: none of them twice."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from controller.autoscaler.reconciler.controller import ScalingSettings, scaling_of
from controller.autoscaler.reconciler.metrics import ScalingMetrics
from controller.autoscaler.reconciler.records import Records
from controller.kube.client import Client
from controller.kube.resources import MODEL_INFERS, NODES, PODS, Resource
from tests.waiting import eventually
from tests.with_kube.managing import IMPATIENT, QUICK_QUEUE, define_kinds, managing, model_infer
from tests.with_kube.scaling import bind, make_policy, target

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pytest

    from controller.kube.client import WatchEvent
    from tests.with_kube.kubes import Kube

Watch = tuple[Resource, str | None, str]


def open_watches(monkeypatch: pytest.MonkeyPatch) -> Counter[Watch]:
    """Those of all clients now, by kind, namespace and label selector."""
    found, watch = Counter[Watch](), Client.watch

    async def counted(
        self: Client,
        resource: Resource,
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
    settings = ScalingSettings(namespace=namespace, informers=IMPATIENT, queue=QUICK_QUEUE)
    scaling = scaling_of(settings, ScalingMetrics(CollectorRegistry()), Records())
    found = open_watches(monkeypatch)
    async with managing(kube.admin, namespace, scaling=scaling):
        ours = "attache.dev/model-infer"
        wanted = {
            (PODS, namespace, ours): 1,
            (PODS, namespace, f"attache.dev/model,!{ours}"): 1,
            (PODS, None, "attache.dev/tells-loads"): 1,
            (PODS, namespace, ""): 1,
            (PODS, None, ""): 1,
            (NODES, None, ""): 1,
        }
        await eventually(lambda: {one: count for one, count in found.items() if one[0] in (PODS, NODES)} == wanted)
