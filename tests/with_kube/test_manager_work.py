# SPDX-License-Identifier: Apache-2.0
"""The shell of the manager with a small reconciler: what is planned is done, once, and mended when others meddle."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from bench.cluster.local_control_plane import write_kubeconfig
from bench.stack.processes import Processes, free_ports
from controller.commands.manager import _innermost
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    LEASES,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    MODELS,
    PODS,
)
from controller.kube.errors import Forbidden
from controller.kube.kopf_thread import KopfEnded
from controller.manager.runner import CONTROLLER
from controller.models.model_infer import names
from controller.models.model_infer.model_infer_state import PodLoad
from controller.models.model_infer.reconcile import reconcile
from controller.models.rollouts_page import rollouts_page
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE, REAL
from tests.with_kube.managing import (
    condition,
    define_kinds,
    managing,
    model_infer,
    pod_names,
    pods,
    reasons,
    role,
    settings,
    status,
)
from tests.with_kube.pods import make_pod
from tests.with_kube.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.reconcile_plan import Plan
    from controller.models.model_infer.model_infer_state import ModelInferState
    from controller.models.rollouts_page import RolloutView
    from tests.fake_api.server import FakeServer
    from tests.with_kube.kubes import Kube

SOON_S = 40.0
# Kubernetes' garbage collector looks for new kinds every half minute.
COLLECTED_S = 60.0
TWO_ROLES = (role("prefill"), role("decode", replicas=2, workers=1))
OF_ONE_GROUP = {
    "llama-0-prefill-0-0",
    "llama-0-decode-0-0",
    "llama-0-decode-0-1",
    "llama-0-decode-1-0",
    "llama-0-decode-1-1",
}
OF_BOTH = OF_ONE_GROUP | {name.replace("llama-0", "llama-1") for name in OF_ONE_GROUP}


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client) -> None:
    """Our kinds are served."""
    await define_kinds(client)


async def until_pods(client: Client, namespace: str, names: set[str], within_s: float = SOON_S) -> None:
    async def are_there() -> bool:
        return await pod_names(client, namespace) == names

    await eventually(are_there, timeout_s=within_s)


async def until_says(client: Client, namespace: str, type_: str, said: tuple[str, str]) -> None:
    async def says() -> bool:
        return await condition(client, namespace, type_) == said

    await eventually(says)


async def until_forbidden_no_more(client: Client, namespace: str) -> None:
    """A real server refuses the first pods of a namespace for a moment."""

    async def accepted() -> bool:
        try:
            await make_pod(client, namespace, "first", "10.0.0.1")
        except Forbidden:
            return False
        await client.delete(PODS, "first", namespace, grace_s=0)
        return True

    await eventually(accepted)


async def test_a_model_infer_becomes_pods_is_scaled_and_goes(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    async with managing(kube.admin, namespace, with_kopf=True):
        await client.create(MODEL_INFERS, model_infer(namespace, "llama", *TWO_ROLES, replicas=2))
        await until_pods(client, namespace, OF_BOTH)
        await until_says(client, namespace, "Available", ("False", "Waiting"))
        assert (await status(client, namespace))["replicas"] == 2
        await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 1}}, subresource="scale")
        await until_pods(client, namespace, OF_ONE_GROUP)
        await client.delete(MODEL_INFERS, "llama", namespace)
        await until_pods(client, namespace, set(), COLLECTED_S)


async def test_what_others_change_is_mended(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    async with managing(kube.admin, namespace):
        await client.create(MODEL_INFERS, model_infer(namespace))
        await until_pods(client, namespace, {"llama-0-main-0-0"})
        before = (await pods(client, namespace))[0]["metadata"]["uid"]
        await client.delete(PODS, "llama-0-main-0-0", namespace, grace_s=0)

        async def is_another() -> bool:
            found = await pods(client, namespace)
            return bool(found) and found[0]["metadata"]["uid"] != before

        await eventually(is_another)
        for label in (names.ROLE, names.MODEL_INFER):  # without the second one our informers do not see the pod
            patch = {"metadata": {"labels": {label: None}}}
            await client.merge_patch(PODS, "llama-0-main-0-0", namespace, patch)

            async def is_back(label: str = label) -> bool:
                return label in (await pods(client, namespace))[0]["metadata"]["labels"]

            await eventually(is_back)


async def test_a_name_that_is_taken_is_told_and_used_once_it_is_free(
    client: Client, kube: Kube, namespace: str
) -> None:
    await until_forbidden_no_more(client, namespace)
    await make_pod(client, namespace, "llama-0-main-0-0", "10.0.0.1")
    theirs = (await pods(client, namespace))[0]["metadata"]
    async with managing(kube.admin, namespace):
        await client.create(MODEL_INFERS, model_infer(namespace))
        await until_says(client, namespace, "Degraded", ("True", "NameTaken"))
        await asyncio.sleep(1)
        assert (await reasons(client, namespace)).count("NameTaken") == 1
        (pod,) = await pods(client, namespace)
        assert (pod["metadata"]["uid"], pod["metadata"]["labels"]) == (theirs["uid"], theirs["labels"])
        await client.delete(PODS, "llama-0-main-0-0", namespace, grace_s=0)

        async def is_ours() -> bool:
            return any("ownerReferences" in one["metadata"] for one in await pods(client, namespace))

        await eventually(is_ours)


@REAL
async def test_a_pod_that_the_server_refuses_is_told(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    async with managing(kube.admin, namespace):
        wrong = role("main", containers=[{"name": "engine"}])
        await client.create(MODEL_INFERS, model_infer(namespace, "llama", wrong))
        await until_says(client, namespace, "Degraded", ("True", "InvalidObject"))
        (said,) = [
            one["message"] for one in (await status(client, namespace))["conditions"] if one["type"] == "Degraded"
        ]
        assert "image" in said
        assert (await status(client, namespace))["summary"].startswith("InvalidObject: "), "kubectl get mi shows it"
        right = model_infer(namespace)["spec"]["template"]
        await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"template": right}})
        await until_pods(client, namespace, {"llama-0-main-0-0"})


@FAKE
async def test_a_mistake_of_ours_is_told_of_its_object_and_stops_no_other(
    client: Client, kube: Kube, namespace: str
) -> None:
    def decide(observed: ModelInferState, now_s: float) -> Plan:
        if observed.thing["metadata"]["name"] == "odd":
            raise TypeError("nobody thought of this")
        return stand_in(observed, now_s)

    async with managing(kube.admin, namespace, decide=decide):
        await client.create(MODEL_INFERS, model_infer(namespace, "odd"))
        await client.create(MODEL_INFERS, model_infer(namespace))
        await until_pods(client, namespace, {"llama-0-main-0-0"})

        async def is_told() -> bool:
            return await condition(client, namespace, "Degraded", "odd") == ("True", "InternalError")

        await eventually(is_told)
        assert (await reasons(client, namespace)).count("InternalError") == 1


@FAKE
async def test_a_pod_of_another_namespace_that_names_the_owner_is_none_of_its(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    """Uids are no secrets: whoever forges one would stand in for an engine of somebody else."""
    seen: list[list[str]] = []

    def decide(observed: ModelInferState, now_s: float) -> Plan:
        seen.append([one["metadata"]["namespace"] for one in observed.pods])
        return stand_in(observed, now_s)

    async with managing(kube.admin, namespace, decide=decide, work=settings(None)):
        made = await client.create(MODEL_INFERS, model_infer(namespace))
        await until_pods(client, namespace, {"llama-0-main-0-0"})
        (pod,) = await pods(client, namespace)
        forged = {name: pod["metadata"][name] for name in ("name", "labels", "ownerReferences")}
        assert forged["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
        other = f"{namespace}-other"
        fake.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
        fake.create({**pod, "metadata": {**forged, "namespace": other}})
        await client.merge_patch(MODEL_INFERS, "llama", namespace, {"spec": {"replicas": 2}})
        await until_pods(client, namespace, {"llama-0-main-0-0", "llama-1-main-0-0"})
        looks = len(seen)
        await eventually(lambda: len(seen) > looks)
        assert all(other not in one for one in seen)


@FAKE
async def test_much_work_on_one_object_is_done_in_turns(client: Client, kube: Kube, namespace: str) -> None:
    """Somebody else's object does not wait until a thousand pods of the first are made."""
    most: list[int] = []

    def decide(observed: ModelInferState, now_s: float) -> Plan:
        most.append(len(observed.pods))
        return stand_in(observed, now_s)

    async with managing(kube.admin, namespace, decide=decide, work=settings(namespace, most_actions=2)):
        await client.create(MODEL_INFERS, model_infer(namespace, replicas=5))
        await until_pods(client, namespace, {f"llama-{group}-main-0-0" for group in range(5)})
        assert {2, 4} <= set(most)


async def test_a_settled_object_causes_no_write(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    async with managing(kube.admin, namespace) as manager:
        await client.create(MODEL_INFERS, model_infer(namespace, "llama", *TWO_ROLES))
        await until_pods(client, namespace, OF_ONE_GROUP)
        await until_says(client, namespace, "Available", ("False", "Waiting"))

        def looks() -> float:
            return manager.metric("attache_manager_reconciles_total", {"kind": "ModelInfer", "outcome": "settled"})

        before_looks = looks()
        await eventually(lambda: looks() > before_looks)
        writes, seen = manager.writes(), looks()
        # resyncs come every two seconds
        await eventually(lambda: looks() >= seen + 3)
        assert manager.writes() == writes


@FAKE
async def test_our_own_writes_are_waited_for_and_then_listed(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    seen: list[int] = []

    def decide(observed: ModelInferState, now_s: float) -> Plan:
        if not seen:
            # what is written from now on, no watch tells
            fake.faults.freeze()
        seen.append(len(observed.pods))
        return stand_in(observed, now_s)

    late = {"kind": "ModelInfer"}
    work = settings(namespace, patience_s=0.5)
    async with managing(kube.admin, namespace, decide=decide, work=work) as manager:
        await client.create(MODEL_INFERS, model_infer(namespace))
        await eventually(lambda: len(seen) >= 2)
        assert manager.metric("attache_manager_late_lists_total", late) >= 1
        assert seen[:2] == [0, 1], "the second decision knew of the pod"
        assert manager.metric("attache_manager_writes_total", {"kind": "Pod", "verb": "create"}) == 1
        settled = {"kind": "ModelInfer", "outcome": "settled"}
        await eventually(lambda: manager.metric("attache_manager_reconciles_total", settled) >= 1)
        assert manager.metric("attache_manager_writes_total", {"kind": "ModelInfer", "verb": "status"}) == 1
        fake.faults.heal()


class StubLoads:
    """Knows one pod."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    async def fetch(self, pods: Collection[str]) -> Mapping[str, PodLoad]:
        self.asked.append(set(pods))
        return {one: PodLoad(3, 100) for one in pods if one.endswith("0-0")}


@FAKE
async def test_loads_are_asked_for_the_next_look_and_only_then(client: Client, kube: Kube, namespace: str) -> None:
    looks: list[tuple[frozenset[str], Mapping[str, PodLoad]]] = []
    pods_asked = frozenset({f"{namespace}/llama-0-main-0-0", f"{namespace}/llama-1-main-0-0"})

    def decide(observed: ModelInferState, now_s: float) -> Plan:
        looks.append((observed.loads_asked_of, observed.loads))
        asks = pods_asked if len(observed.pods) == 2 and len(looks) < 6 else frozenset()
        return msgspec.structs.replace(stand_in(observed, now_s), asks_loads_of=asks)

    loads = StubLoads()
    async with managing(kube.admin, namespace, decide=decide, loads=loads):
        await client.create(MODEL_INFERS, model_infer(namespace, replicas=2))
        await eventually(lambda: any(asked for asked, _ in looks))
        asked = next(one for one in looks if one[0])
        assert asked[0] == pods_asked
        assert set(asked[1].values()) == {PodLoad(3, 100)}
        # a resync later nobody asks any more
        await eventually(lambda: len(looks) > 7)
        assert len(loads.asked) < len(looks)
        assert looks[-1] == (frozenset(), {})


@FAKE
async def test_faults_of_the_api_server_are_outlived(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    async with managing(kube.admin, namespace):
        fake.faults.refuse(
            7, 500, of=lambda call: call.verb in ("create", "patch") and call.target.name != "attache-manager"
        )
        fake.faults.refuse(3, 429, retry_after_s=1, of=lambda call: call.verb == "patch")
        fake.create(model_infer(namespace, "llama", *TWO_ROLES, replicas=2))
        await asyncio.sleep(0.3)
        fake.watches.drop()
        fake.expire()
        await until_pods(client, namespace, OF_BOTH)
        await until_says(client, namespace, "Available", ("False", "Waiting"))


async def test_a_manager_that_is_ended_at_any_moment_is_continued(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    await client.create(MODEL_INFERS, model_infer(namespace, "llama", *TWO_ROLES, replicas=2))
    for number in range(12):
        async with managing(kube.admin, namespace):
            await asyncio.sleep(0.02 * number)
    async with managing(kube.admin, namespace) as manager:
        await until_pods(client, namespace, OF_BOTH)
        await until_says(client, namespace, "Available", ("False", "Waiting"))
        assert not manager.task.done()


@FAKE
async def test_an_end_of_kopf_ends_the_role_with_an_error(client: Client, kube: Kube, namespace: str) -> None:
    async def source(_: object) -> None:
        await asyncio.sleep(0.3)
        raise KopfEnded("kopf's thread has ended") from RuntimeError("nobody expects this")

    async with managing(kube.admin, namespace, source=source) as manager:
        await asyncio.wait([manager.task], timeout=SOON_S)
        error = manager.task.exception()
        assert error is not None
        innermost = _innermost(error)
        assert isinstance(innermost, KopfEnded)
        assert "nobody expects this" in str(innermost.__cause__)
        lease = await client.get(LEASES, CONTROLLER, namespace)
        assert lease["spec"]["holderIdentity"] == "", "another may begin at once"
        manager.task.exception()


@FAKE
async def test_a_model_follows_the_policy_that_it_names(client: Client, kube: Kube, namespace: str) -> None:
    policy: Object = {
        "apiVersion": AUTOSCALING_POLICIES.api_version,
        "kind": "AutoscalingPolicy",
        "metadata": {"name": "quiet", "namespace": namespace},
        "spec": {"scaleToZero": {"holdTimeout": "3m"}},
    }
    backends = [{"name": "default", "maxReplicas": 4}]
    spec = {"uri": "hf://org/llama", "autoscaling": {"policyRef": "quiet"}, "backends": backends}
    metadata = {"name": "llama", "namespace": namespace}

    async def activation() -> Object | None:
        found = (await client.list(MODEL_SERVERS, namespace)).items
        return found[0]["spec"].get("activation") if found else None

    async with managing(kube.admin, namespace):
        model = {"apiVersion": MODELS.api_version, "kind": "Model", "metadata": metadata, "spec": spec}
        await client.create(MODELS, model)
        await client.create(AUTOSCALING_POLICIES, policy)

        async def holds(said: str) -> bool:
            return ((await activation()) or {}).get("holdTimeout") == said

        await eventually(lambda: holds("3m"))
        changed = {"spec": {"scaleToZero": {"holdTimeout": "9m"}}}
        await client.merge_patch(AUTOSCALING_POLICIES, "quiet", namespace, changed)
        await eventually(lambda: holds("9m"))


async def test_a_model_becomes_what_serves_it_and_is_mended(client: Client, kube: Kube, namespace: str) -> None:
    await until_forbidden_no_more(client, namespace)
    async with managing(kube.admin, namespace, with_kopf=True) as manager:
        model = {"apiVersion": MODELS.api_version, "kind": "Model", "spec": {"uri": "hf://org/llama"}}
        await client.create(MODELS, {**model, "metadata": {"name": "llama", "namespace": namespace}})
        kinds = (MODEL_INFERS, MODEL_SERVERS, MODEL_ROUTES)

        async def children() -> list[Object]:
            listed = [await client.list(one, namespace) for one in kinds]
            return [thing for one in listed for thing in one.items]

        async def are_made() -> bool:
            return len(await children()) == len(kinds)

        await eventually(are_made)
        own = {"namespace": namespace, "model": "llama"}
        phases = ("Pending", "Standby", "Loading", "Loaded", "FailedToLoad")

        def has_series() -> bool:
            wanted = manager.metric("attache_model_wanted_replicas", own)
            return wanted == sum(manager.metric("attache_model_phase", {**own, "phase": one}) for one in phases) == 1

        await eventually(has_series)
        (server,) = (await client.list(MODEL_SERVERS, namespace)).items
        wrong = {"spec": {"workloadPort": {"port": 1}}}
        await client.merge_patch(MODEL_SERVERS, server["metadata"]["name"], namespace, wrong)

        async def is_mended() -> bool:
            (found,) = (await client.list(MODEL_SERVERS, namespace)).items
            return bool(found["spec"] == server["spec"])

        await eventually(is_mended)
        for thing in await children():
            resource = next(one for one in kinds if one.kind == thing["kind"])
            await client.delete(resource, thing["metadata"]["name"], namespace, propagation="Background")
        await eventually(are_made)

        def looks() -> float:
            return manager.metric("attache_manager_reconciles_total", {"kind": "Model", "outcome": "settled"})

        await asyncio.sleep(1)
        writes, seen = manager.writes(), looks()
        await eventually(lambda: looks() >= seen + 3)
        assert manager.writes() == writes
    # of the replica that leads, and of no other
    assert not has_series()


@FAKE
async def test_the_page_of_rollouts_follows_the_objects_until_the_term_ends(
    client: Client, kube: Kube, namespace: str
) -> None:
    async with managing(kube.admin, namespace, decide=reconcile) as manager:
        found = rollouts_page(manager.leader.objects()).rollouts
        assert found == ()
        await client.create(MODEL_INFERS, model_infer(namespace, "llama", *TWO_ROLES))

        def rollout() -> RolloutView | None:
            return next(iter(rollouts_page(manager.leader.objects()).rollouts), None)

        await eventually(lambda: (one := rollout()) is not None and one.phase == "InProgress")
        seen = rollout()
        written = (await client.get(MODEL_INFERS, "llama", namespace))["status"]
        assert seen is not None
        assert (seen.name, seen.groups, seen.ready) == (f"{namespace}/llama", 1, 0)
        assert (seen.current, seen.target) == (written["currentRevision"], written["updateRevision"])
        # there are no nodes to make pods for
        assert seen.message.startswith(f"0 of 1 groups have revision {seen.target}")
        # an invalid one is named, with its mistake
        wrong = {"spec": {"replicas": 5_000}}
        await client.merge_patch(MODEL_INFERS, "llama", namespace, wrong)
        await eventually(lambda: (one := rollout()) is not None and one.phase == "InvalidSpec")
        assert (one := rollout()) is not None
        assert "ask for fewer replicas" in one.message
    assert manager.leader.objects() == ((), ())


@FAKE
async def test_the_command_serves_the_page_of_rollouts_without_scaling_too(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    await client.create(MODEL_INFERS, model_infer(namespace, "llama"))
    (port,) = free_ports(1)
    words = ["--no-webhooks", "--no-scaling", "--watch-namespace", namespace, "--lease-namespace", namespace]
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", kube.admin)
    command = ["env", f"KUBECONFIG={kubeconfig}", sys.executable, "-m", "attache", "manager", *words]

    async def is_listed() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/rollouts") as answer:
                found = (await answer.json())["rollouts"] if answer.status == 200 else []
                return [one["name"] for one in found if one["target"]] == [f"{namespace}/llama"]
        return False

    async with Processes(tmp_path) as processes:
        await processes.start("manager", [*command, "--metrics", f"127.0.0.1:{port}"])
        await eventually(is_listed)


@pytest.mark.parametrize("kube", ["fake"], indirect=True)
async def test_a_loss_of_the_lease_ends_all_work_before_another_begins(
    client: Client, kube: Kube, namespace: str
) -> None:
    async with managing(kube.admin, namespace) as first:
        await eventually(lambda: first.metric("attache_manager_leader") == 1)
        async with managing(kube.admin, namespace) as second:
            await asyncio.sleep(0.3)
            assert second.metric("attache_manager_leader") == 0
            await first.stop()
            await eventually(lambda: second.metric("attache_manager_leader") == 1)
            await client.create(MODEL_INFERS, model_infer(namespace))
            await until_pods(client, namespace, {"llama-0-main-0-0"})
