# SPDX-License-Identifier: Apache-2.0
"""ModelInfers change while clients stream through Envoy: nothing fails, nothing is cut, and enough groups stay ready."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from bench.cluster.assets import ROOT
from bench.cluster.node.node import gpu_node
from bench.cluster.node.running import running_nodes
from controller.cluster.client import connect
from controller.cluster.resources import NAMESPACES, NODES, PODS
from controller.reconcile.model_infer.reconcile import reconcile
from tests.waiting import eventually
from tests.with_kube.conftest import has_account
from tests.with_kube.kubes import REAL, Kube
from tests.with_kube.managing import define_kinds, managing
from tests.with_kube.under_load import PATIENCE_S, QUICK, Site, Streams, gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.control_plane import ControlPlane

# with --log-file: what was measured
log = logging.getLogger(__name__)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Shared by all tests here: each has a ModelInfer of its own."""
    kube, folder = Kube(plane.admin, plane.nobody, plane=plane), tmp_path_factory.mktemp("site")
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    async with connect(kube.admin, manager="test") as client:
        await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        await eventually(lambda: has_account(client, namespace), timeout_s=30)
        await define_kinds(client, ROOT / "manifests" / "crds")
        specs = [gpu_node(f"node-{number}-{namespace}", labels={"test": namespace}) for number in range(2)]
        async with (
            running_nodes(client, specs, folder / "pods", timing=QUICK) as nodes,
            gateway(client, kube, namespace, folder) as served,
            managing(kube.admin, namespace, decide=reconcile) as manager,
        ):
            yield Site(client, namespace, served, manager, nodes)
            for one in specs:
                await client.delete(NODES, one.name)


class Measured:
    """Seconds and writes from here on."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._began_s = time.monotonic()
        self._writes = site.manager.writes()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._began_s:.1f} s, {self._site.manager.writes() - self._writes:g} writes"


@pytest.mark.parametrize(("unavailable", "surge"), [(1, 0), (0, 1)])
async def test_a_rollout_of_four_groups_cuts_no_stream(site: Site, unavailable: int, surge: int) -> None:
    name, rollout = f"rolls-{surge}", {"maxUnavailable": unavailable, "maxSurge": surge}
    async with (
        site.serving(name, replicas=4, rollout=rollout) as watch,
        Streams(site.gateway.url, name) as asking,
    ):
        await eventually(lambda: asking.open >= 6, timeout_s=PATIENCE_S)
        watch.begin()
        measured = Measured(site)
        await site.update(name, site.role(revision="2"))
        await site.until_rolled_out(name, watch, 4)
        log.info("rollout with maxUnavailable %d, maxSurge %d: %s", unavailable, surge, measured)
        before = asking.whole
        await eventually(lambda: asking.whole >= before + 6, timeout_s=PATIENCE_S)
    log.info("%d streams, %d other answers, %d failures", asking.whole, asking.answers, len(asking.failures))
    assert asking.failures == []
    assert watch.least_ready >= 4 - unavailable
    assert watch.most <= 4 + surge
