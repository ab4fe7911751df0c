# SPDX-License-Identifier: Apache-2.0
"""ModelInfers change while clients stream through Envoy: nothing fails, nothing is cut, enough groups stay ready."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from bench.cluster.node.in_process_node import gpu_node, running_nodes
from controller.kube.api_resources import MODEL_SERVERS, NODES
from controller.kube.client import connect
from controller.models.model_infer import names
from controller.models.model_infer.reconcile import reconcile
from extproc.scheduling.builtin_pickers import NO_PREFILL
from tests.waiting import eventually
from tests.with_kube.kubes import Kube, make_namespace
from tests.with_kube.managing import define_kinds, managing, model_infer
from tests.with_kube.under_load import QUICK, Site, Streams, gateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.local_control_plane import ControlPlane
    from controller.kube.api_resources import Object
    from tests.with_kube.under_load import Watch

CRASHES: Final = {"image": "attache/host", "command": ["sh", "-c", "echo no GPU found; exit 3"], "args": []}
NOWHERE: Final = {"image": "attache/nowhere"}
# with --log-file: what was measured
log = logging.getLogger(__name__)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Shared by all tests here: each has a ModelInfer of its own."""
    kube, folder = Kube(plane.admin, plane.nobody, plane=plane), tmp_path_factory.mktemp("site")
    async with connect(kube.admin, manager="test") as client:
        namespace = await make_namespace(client, kube)
        await define_kinds(client)
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
        self._began_s = asyncio.get_running_loop().time()
        self._writes = site.manager.writes()

    def __str__(self) -> str:
        took_s = asyncio.get_running_loop().time() - self._began_s
        return f"{took_s:.1f} s, {self._site.manager.writes() - self._writes:g} writes"


@pytest.mark.parametrize(("unavailable", "surge"), [(1, 0), (0, 1)])
async def test_a_rollout_of_four_groups_cuts_no_stream(site: Site, unavailable: int, surge: int) -> None:
    name, rollout = f"rolls-{surge}", {"maxUnavailable": unavailable, "maxSurge": surge}
    async with (
        site.serving(name, replicas=4, rollout=rollout) as watch,
        Streams(site.gateway.url, name) as asking,
    ):
        await eventually(lambda: asking.open >= 6)
        watch.begin()
        measured = Measured(site)
        await site.update(name, site.role(revision="2"))
        await site.until_rolled_out(name, watch, 4)
        log.info("rollout with maxUnavailable %d, maxSurge %d: %s", unavailable, surge, measured)
        before = asking.whole
        await eventually(lambda: asking.whole >= before + 6)
    log.info("%s", asking)
    assert asking.failures == []
    assert watch.least_ready >= 4 - unavailable
    assert watch.most <= 4 + surge


@pytest.mark.parametrize(
    ("broken", "said", "on_failure"), [(CRASHES, "no GPU found", "Stop"), (NOWHERE, "did not become ready", "RollBack")]
)
async def test_a_revision_that_never_becomes_ready_harms_nobody(
    site: Site, broken: dict[str, Any], said: str, on_failure: str
) -> None:
    name = on_failure.lower()
    rollout = {"maxUnavailable": 1, "maxSurge": 0, "progressDeadline": "6s", "onFailure": on_failure}
    async with (
        site.serving(name, replicas=2, rollout=rollout) as watch,
        Streams(site.gateway.url, name, streams=3, seconds=2) as asking,
    ):
        await eventually(lambda: asking.open >= 3)
        watch.begin()
        await site.update(name, site.role(revision="2", **broken))
        await site.until_condition(name, "Degraded", "True", "BlockedByFailedLoad", said)
        await site.until_condition(name, "Progressing", "False", "BlockedByFailedLoad")
        if on_failure == "RollBack":
            await watch.until(ready=2)
            assert watch.templates() == {"1"}
        before = asking.whole
        await eventually(lambda: asking.whole >= before + 3)
        assert watch.templates() >= {"1"}
        measured = Measured(site)
        # engines that are drained first take longer than the broken ones were given
        await site.update(name, site.role(revision="3"), progressDeadline="2m")
        await site.until_rolled_out(name, watch, 2)
        log.info("rollout of 2 after a failed one that is to %s: %s", on_failure, measured)
        assert watch.templates() == {"3"}
    log.info("%s", asking)
    assert asking.failures == []
    assert watch.least_ready >= 1


async def test_scaling_in_cuts_no_stream_of_thirty_seconds(site: Site) -> None:
    name = "shrinks"
    async with (
        site.serving(name, replicas=4, drain_s=90) as watch,
        Streams(site.gateway.url, name, streams=0, seconds=30) as asking,
    ):
        for _ in range(8):
            asking.one_more()
            await asyncio.sleep(0.1)
        await eventually(lambda: are_busy(site, watch, 4), pause_s=0.2)
        measured = Measured(site)
        await site.scale(name, 2)
        await watch.until(ready=2)
        await eventually(lambda: has_pods(site, name, 2), pause_s=0.1)
        log.info("from 4 to 2 with streams of 30 s: %s", measured)
    log.info("%s", asking)
    assert asking.failures == []
    assert asking.whole == 8


async def test_the_least_busy_and_then_the_least_cached_go_first(site: Site) -> None:
    name = "chooses"
    async with (
        site.serving(name, replicas=4) as watch,
        Streams(site.gateway.url, name, streams=0, plain=0, seconds=12) as asking,
    ):
        # by their ordinals alone, 3 and 2 would go
        for group in (0, 1):
            await site.annotate(f"{name}-{group}-all-0-0", {"attache.dev/drain": "true"})
        await eventually(lambda: site.draining(name, 2), pause_s=0.1)
        for _ in range(4):
            asking.one_more()
            await asyncio.sleep(0.3)
        await eventually(lambda: are_busy(site, watch, 2), pause_s=0.1)
        for group in (0, 1):
            await site.annotate(f"{name}-{group}-all-0-0", {"attache.dev/drain": None})
        await eventually(lambda: site.draining(name, 0), pause_s=0.1)
        assert await busy(site, watch) == {"2", "3"}
        measured = Measured(site)
        await site.scale(name, 2)
        await eventually(lambda: has_pods(site, name, 2), pause_s=0.1)
        log.info("from 4 to 2, the two that go are idle: %s", measured)
        assert set(watch.groups()) == {"2", "3"}
        await eventually(lambda: asking.open == 0)
        await site.scale(name, 4)
        await watch.until(ready=4)
        await site.scale(name, 2)
        await eventually(lambda: has_pods(site, name, 2), pause_s=0.1)
        assert set(watch.groups()) == {"2", "3"}, "their caches are worth more than those of new engines"
    assert asking.failures == []
    assert asking.whole == 4


async def test_a_killed_engine_and_a_lost_node_fail_no_request_without_a_first_byte(site: Site) -> None:
    name = "breaks"
    # Else the scheduler puts all four on one node more often than not, and no engine would be left. Three may be on
    # one.
    apart = {
        "maxSkew": 2,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        # a node that is lost does not keep the other from having all
        "nodeTaintsPolicy": "Honor",
        "labelSelector": {"matchLabels": {names.MODEL_INFER: name}},
    }
    engines = site.role()
    engines["entryTemplate"]["spec"]["topologySpreadConstraints"] = [apart]
    async with (
        site.serving(name, engines, replicas=4, server={"trafficPolicy": {"retry": {"attempts": 3}}}) as watch,
        Streams(site.gateway.url, name, streams=0, plain=6, plain_tokens=14) as asking,
    ):
        await eventually(lambda: asking.answers >= 6)
        measured = Measured(site)
        nodes = Counter(one["spec"]["nodeName"] for one in engines_of(watch))
        assert len(nodes) == 2, f"none is left if that node is lost: {nodes}"
        ((node, _),) = nodes.most_common(1)
        victim = next(one for one in engines_of(watch) if one["spec"]["nodeName"] == node)
        site.nodes[node].kill(f"{site.namespace}/{victim['metadata']['name']}")
        await eventually(lambda: any(map(has_restarted, engines_of(watch))))
        await watch.until(ready=4)
        log.info("an engine was killed and is back: %s", measured)
        measured = Measured(site)
        lost = site.nodes[node]
        watch.begin()
        await lost.fail()
        try:
            await eventually(lambda: watch.least_ready < 4)
            await watch.until(ready=4)
            log.info("a node with %d of 4 engines was lost: %s", 4 - watch.least_ready, measured)
            assert node not in {one["spec"]["nodeName"] for one in engines_of(watch)}
        finally:
            await lost.recover()
    log.info("%s", asking)
    assert asking.failures == []


async def test_what_is_deleted_and_made_again_loses_no_request(site: Site) -> None:
    name = "returns"
    # as long as a gateway takes to notice; a Model's engines ask their agent
    drains = site.role(lifecycle={"preStop": {"exec": {"command": ["sleep", "5"]}}})
    async with (
        site.serving(name, drains, replicas=2) as watch,
        Streams(site.gateway.url, name, streams=2, plain=4, seconds=1) as asking,
    ):
        await eventually(lambda: asking.answers >= 8)
        for _ in range(2):
            await site.delete(name)
            await eventually(lambda: not watch.groups())
            await site.make(name, model_infer(site.namespace, name, drains, replicas=2), {})
        await watch.until(ready=2)
        before = asking.answers
        await eventually(lambda: asking.answers >= before + 8)
    log.info("%s", asking)
    assert asking.failures == []


async def test_a_selector_that_is_wrong_for_some_seconds_loses_no_request(site: Site) -> None:
    name = "mistyped"
    async with (
        site.serving(name, replicas=2) as _,
        Streams(site.gateway.url, name, streams=0, plain=4) as asking,
    ):
        await eventually(lambda: asking.answers >= 8)
        await site.select(name, "mistypde")

        async def is_said() -> bool:
            thing = await site.client.get(MODEL_SERVERS, name, site.namespace)
            found = {one["type"]: one for one in thing["status"]["conditions"]}["Available"]
            return found["reason"] == "NoPods" and "before its last change it selected 2 pods" in found["message"]

        await eventually(is_said)
        before = asking.answers
        await eventually(lambda: asking.answers >= before + 8)
        await site.select(name, name)
        before = asking.answers
        await eventually(lambda: asking.answers >= before + 8)
    assert asking.failures == []


async def test_pairs_are_of_one_group_while_groups_are_replaced(site: Site) -> None:
    name = "pairs"
    group = {
        "decideBy": "UncachedTokens",
        "prefillLabels": {names.ROLE: "prefill"},
        "decodeLabels": {names.ROLE: "decode"},
        "groupKey": names.GROUP_REVISION,
        "minUncachedTokens": 0,
    }
    roles = [site.role("prefill"), site.role("decode")]
    async with (
        site.serving(name, *roles, replicas=2, server={"pdGroup": group}) as watch,
        Streams(site.gateway.url, name, streams=3, seconds=2) as asking,
    ):
        await eventually(lambda: asking.whole >= 3)
        watch.begin()
        measured = Measured(site)
        await site.update(name, *(site.role(one, revision="2") for one in ("prefill", "decode")))
        await site.until_rolled_out(name, watch, 2)
        log.info("rollout of 2 groups of prefill and decode: %s", measured)
        before = asking.whole
        await eventually(lambda: asking.whole >= before + 3)
    log.info("%s", asking)
    assert asking.failures == []
    assert watch.least_ready >= 1
    decided = site.decisions(name)
    # an engine of a group whose other half has not started yet does all by itself
    assert {one["stage"] for one in decided if not one["prefill"]} <= {NO_PREFILL}
    pairs = [one for one in decided if one["prefill"]]
    assert len(pairs) > len(decided) / 2
    for one in pairs:
        decoders = [watch.places[address.partition(":")[0]] for address in one["addresses"]]
        number, role = watch.places[one["prefill"].partition(":")[0]]
        assert role == "prefill"
        assert set(decoders) == {(number, "decode")}


def engines_of(watch: Watch) -> list[Object]:
    """All pods that are not being deleted."""
    return [one for pods in watch.groups().values() for one in pods]


def has_restarted(pod: Object) -> bool:
    """Whether its kubelet has told of a container's end. That it was not ready meanwhile may never be told."""
    return any(one["restartCount"] for one in (pod.get("status") or {}).get("containerStatuses") or ())


async def busy(site: Site, watch: Watch) -> set[str]:
    """Groups with a request in flight."""
    return {watch.places[address][0] for address in await site.in_flight() if address in watch.places}


async def are_busy(site: Site, watch: Watch, count: int) -> bool:
    return len(await busy(site, watch)) == count


async def has_pods(site: Site, name: str, count: int) -> bool:
    """Pods that are being deleted count."""
    return len(await site.pods(name)) == count
