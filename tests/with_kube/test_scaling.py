# SPDX-License-Identifier: Apache-2.0
"""Scaling with a real API server and a fake one: what is decided is written once, by one, and others are heeded."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest_asyncio
from prometheus_client import CollectorRegistry

from controller.audit import open_audit
from controller.autoscaler.reconciler import accelerators as rooms
from controller.autoscaler.reconciler.scalables import SCALED_BY
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_INFERS,
    NODES,
    PODS,
    ApiResource,
)
from tests.waiting import eventually
from tests.with_kube.kubes import FAKE, REAL
from tests.with_kube.managing import define_kinds, model_infer, reasons
from tests.with_kube.pods import make_pod
from tests.with_kube.scaling import (
    Demand,
    Wanted,
    bind,
    delete_workloads,
    deployment,
    labels_of,
    make_policy,
    make_server,
    replicas_of,
    report,
    says,
    scaling,
    target,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    import pytest

    from controller.api.autoscaling_binding import AutoscalingPolicyBinding
    from controller.api.autoscaling_policy import AutoscalingPolicySpec
    from controller.autoscaler.decision.decision import Decision
    from controller.autoscaler.decision.situation import Situation
    from controller.kube.client import Client
    from tests.fake_api.server import ApiCall, FakeServer
    from tests.with_kube.kubes import Kube

HPAS = ApiResource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def kinds(client: Client, namespace: str) -> AsyncIterator[None]:
    """Our kinds are served. Deployments go at the end: the cluster's controllers would keep making their pods."""
    await define_kinds(client)
    yield
    await delete_workloads(client, namespace)


async def until_replicas(client: Client, namespace: str, number: int, name: str = "llama") -> None:
    async def are_there() -> bool:
        return await replicas_of(client, namespace, name) == number

    await eventually(are_there)


async def until_says(client: Client, namespace: str, type_: str, said: tuple[str, str], name: str = "one") -> None:
    async def is_said() -> bool:
        return await says(client, namespace, type_, name) == said

    await eventually(is_said)


async def until_looked(wanted: Wanted, times: int = 3) -> None:
    """Until so many more decisions have been made."""
    until = wanted.decisions + times
    await eventually(lambda: wanted.decisions >= until)


async def test_the_replicas_of_a_deployment_are_written_and_told(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    binding = await bind(client, namespace, target())
    wanted = Wanted(main=5)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_replicas(client, namespace, 5)
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        await until_says(client, namespace, "TargetsResolved", ("True", "Resolved"))
        found = await client.get(DEPLOYMENTS, "llama", namespace)
        assert found["metadata"]["annotations"][SCALED_BY] == f"{namespace}/one/{binding['metadata']['uid']}"

        async def is_told() -> bool:
            status = (await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace))["status"]
            policy = (await client.get(AUTOSCALING_POLICIES, "plain", namespace)).get("status") or {}
            return status["targets"][0].get("current") == 5 and policy.get("bindings") == 1

        await eventually(is_told)
        status = (await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace))["status"]
        assert status["lastDecision"].startswith("main from 2 to 5")
        assert (await reasons(client, namespace)).count("Scaled") == 1
        its = {
            "variant_name": "llama",
            "namespace": namespace,
            "accelerator_type": "",
            "model_name": "org/llama",
            "variant_kind": "Deployment",
        }
        assert running.metric("wva_desired_replicas", **its) == 5
        assert running.metric("wva_replica_scaling_total", **its) == 1
        assert [one.decision.binding for one in running.records.records_by_binding().values()] == [f"{namespace}/one"]
        await client.delete(AUTOSCALING_POLICY_BINDINGS, "one", namespace)
        await eventually(lambda: labels_of(running, "wva_desired_replicas") == [])


@FAKE
async def test_the_audit_log_has_the_decision_that_wrote_replicas(
    client: Client, kube: Kube, namespace: str, tmp_path: Path
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    file = tmp_path / "audit.log"
    with open_audit(str(file), CollectorRegistry()) as audit:
        async with scaling(kube.admin, namespace, Wanted(main=5), audit=audit):
            await until_replicas(client, namespace, 5)
            await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert {one["cause"]["of"] for one in entries if one["objectRef"]["resource"] == "deployments"} == {
        f"AutoscalingPolicyBinding {namespace}/one"
    }
    (scaled,) = [one for one in entries if one["objectRef"].get("subresource") == "scale" and one["outcome"] == "ok"]
    assert scaled["actor"] == "attache-autoscaler"
    assert (scaled["cause"]["old"], scaled["cause"]["new"]) == ({"replicas": 2}, {"replicas": 5})
    assert scaled["cause"]["reason"]
    assert scaled["change"]["spec"] == {"replicas": 5}
    # statuses are writes, too
    assert "autoscalingpolicybindings" in {one["objectRef"]["resource"] for one in entries}


async def test_two_kinds_of_one_name_have_series_of_their_own(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await client.create(MODEL_INFERS, model_infer(namespace, replicas=1))
    await bind(client, namespace, target(), {**target("ModelInfer"), "name": "other"})
    async with scaling(kube.admin, namespace, Wanted(main=4, other=3)) as running:
        await until_replicas(client, namespace, 4)

        def are_apart() -> bool:
            found = labels_of(running, "wva_desired_replicas")
            return sorted(one["variant_kind"] for one in found) == ["Deployment", "ModelInfer"]

        await eventually(are_apart)


async def two_deployments(client: Client, namespace: str, *, replicas: int) -> None:
    """Without pods, and one node of eight H100s."""
    await make_policy(client, namespace)
    for name in ("llama", "other"):
        await client.create(DEPLOYMENTS, deployment(namespace, name=name, replicas=replicas))
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"n-{namespace}", "labels": labels}, "spec": {}}
    await client.create(NODES, node)
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    await client.merge_patch(NODES, f"n-{namespace}", None, {"status": status}, subresource="status")


@FAKE
async def test_room_on_nodes_counts_where_targets_have_accelerators(client: Client, kube: Kube, namespace: str) -> None:
    await two_deployments(client, namespace, replicas=1)
    first = target(accelerator="H100", accelerators=2)
    second = {**target(name="other", accelerator="B200"), "name": "second"}
    await bind(client, namespace, first, second)
    wanted = Wanted(main=1, second=1)

    def rooms() -> list[int | None]:
        return [one.headroom for each in wanted.situations for one in each.targets]

    try:
        async with scaling(kube.admin, namespace, wanted):
            # one of four is promised to the replica that has no node yet
            await eventually(lambda: rooms() == [3, 0])
            assert wanted.free == {"H100": 6, "B200": 0}
            taken = {"nvidia.com/gpu": "3"}
            container = {"name": "c", "image": "i", "resources": {"requests": taken, "limits": taken}}
            spec = {"nodeName": f"n-{namespace}", "containers": [container]}
            metadata = {"name": "guest", "namespace": namespace}
            await client.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
            await eventually(lambda: rooms() == [1, 0])
            # nowhere is room: whatever is cheapest may be asked for, as nodes may be added
            await client.merge_patch(NODES, f"n-{namespace}", None, {"spec": {"unschedulable": True}})
            await eventually(lambda: rooms() == [None, None])
    finally:
        await client.delete(NODES, f"n-{namespace}")


@FAKE
async def test_two_spellings_of_one_accelerator_are_counted_once(client: Client, kube: Kube, namespace: str) -> None:
    await two_deployments(client, namespace, replicas=0)
    first, second = target(accelerator="nvidia-h100"), target(name="other", accelerator="NVIDIA-H100-80GB-HBM3")
    await bind(client, namespace, first, {**second, "name": "second"})
    wanted = Wanted(main=0, second=0)
    try:
        async with scaling(kube.admin, namespace, wanted):
            await eventually(lambda: wanted.rooms == {"main": 8, "second": 8})
            assert wanted.free == {"NVIDIA-H100-80GB-HBM3 or nvidia-h100": 8}
            assert {one.pools for each in wanted.situations for one in each.targets} == {tuple(wanted.free)}
            wanted.replicas["main"] = 5
            await eventually(lambda: wanted.rooms == {"main": 3, "second": 3})
    finally:
        await client.delete(NODES, f"n-{namespace}")


@FAKE
async def test_an_accelerator_that_no_node_has_is_told(client: Client, kube: Kube, namespace: str) -> None:
    await two_deployments(client, namespace, replicas=0)
    second = {**target(name="other", accelerator="H1000"), "name": "second"}
    await bind(client, namespace, target(accelerator="H100"), second)
    try:
        async with scaling(kube.admin, namespace, Wanted(main=0, second=0)):

            async def is_told() -> bool:
                return await says(client, namespace, "CapacityBlocked") == ("True", "NoSuchAccelerator")

            await eventually(is_told)
            thing = await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace)
            said = next(one["message"] for one in thing["status"]["conditions"] if one["type"] == "CapacityBlocked")
            assert said == "second: no node has accelerators of the kind H1000; nodes have NVIDIA-H100-80GB-HBM3"
    finally:
        await client.delete(NODES, f"n-{namespace}")


@contextlib.asynccontextmanager
async def two_bindings(client: Client, kube: Kube, namespace: str, wanted: Wanted) -> AsyncIterator[None]:
    """Of two Deployments without pods, with one node of eight H100s between them."""
    await two_deployments(client, namespace, replicas=0)
    other = {**target(name="other", accelerator="h100"), "name": "second"}
    try:
        await bind(client, namespace, target(accelerator="H100"), name="one", budget={"accelerators": {"H100": 8}})
        async with scaling(kube.admin, namespace, wanted):
            await eventually(lambda: wanted.rooms == {"main": 8})
            await bind(client, namespace, other, name="two", budget={"accelerators": {"h100": 8}})
            await eventually(lambda: wanted.rooms == {"main": 8, "second": 8})
            yield
    finally:
        await client.delete(NODES, f"n-{namespace}")


@FAKE
async def test_no_binding_counts_room_that_another_one_was_promised(client: Client, kube: Kube, namespace: str) -> None:
    wanted = Wanted(main=0, second=0)
    async with two_bindings(client, kube, namespace, wanted):
        wanted.replicas["main"] = 5
        # there are no pods, so the five have no nodes yet, and the node looks as free as before
        await eventually(lambda: wanted.rooms == {"main": 3, "second": 3})
        wanted.replicas["second"] = 2
        await eventually(lambda: wanted.rooms == {"main": 1, "second": 1})


@FAKE
async def test_replicas_that_never_get_pods_keep_room_from_others_for_a_while(
    client: Client, kube: Kube, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "_PROMISED_S", 3.0)
    wanted = Wanted(main=0, second=0)
    async with two_bindings(client, kube, namespace, wanted):
        wanted.replicas["main"] = 8
        await eventually(lambda: wanted.rooms.get("second") == 0)
        await eventually(lambda: wanted.rooms.get("second") == 8)


async def test_a_settled_binding_causes_no_writes(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_replicas(client, namespace, 3)
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        await until_looked(wanted, 5)
        before = running.writes()
        await until_looked(wanted, 10)
        assert running.writes() == before


async def test_a_status_that_somebody_else_has_written_is_written_anew(
    client: Client, kube: Kube, namespace: str
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())

    async def is_said() -> bool:
        return await says(client, namespace, "TargetsResolved") == ("True", "Resolved")

    async with scaling(kube.admin, namespace, Wanted(main=2)):
        await eventually(is_said)
        lost: dict[str, object] = {"status": {"conditions": []}}
        await client.merge_patch(AUTOSCALING_POLICY_BINDINGS, "one", namespace, lost, subresource="status")
        await eventually(is_said)


async def test_a_model_infer_is_scaled_through_its_scale(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await client.create(MODEL_INFERS, model_infer(namespace, replicas=1))
    await bind(client, namespace, target("ModelInfer"))
    wanted = Wanted(main=4)
    async with scaling(kube.admin, namespace, wanted):

        async def is_scaled() -> bool:
            return (await client.get(MODEL_INFERS, "llama", namespace))["spec"]["replicas"] == 4

        await eventually(is_scaled)
        await until_says(client, namespace, "TargetsResolved", ("False", "ServerNotFound"))
        wanted.replicas["main"] = 2

        async def is_lowered() -> bool:
            return (await client.get(MODEL_INFERS, "llama", namespace))["spec"]["replicas"] == 2

        # its own controller drains
        await eventually(is_lowered)


async def test_a_change_by_hand_is_honoured_for_a_while(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, manualHold="6s")
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted):
        await until_replicas(client, namespace, 3)
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        await until_looked(wanted)
        await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"spec": {"replicas": 7}}, subresource="scale")
        await until_says(client, namespace, "ScalingActive", ("False", "ManualHold"))
        assert await replicas_of(client, namespace) == 7
        wanted.replicas["main"] = 8
        await until_replicas(client, namespace, 8)
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        assert "ManualChangeHonoured" in await reasons(client, namespace)


async def test_of_two_bindings_the_older_one_scales(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target(), name="a")
    await bind(client, namespace, target(), name="b")
    async with scaling(kube.admin, namespace, Wanted(main=4)):
        await until_replicas(client, namespace, 4)
        await until_says(client, namespace, "TargetsResolved", ("False", "Conflict"), name="b")
        await until_says(client, namespace, "TargetsResolved", ("True", "Resolved"), name="a")
        await client.delete(AUTOSCALING_POLICY_BINDINGS, "a", namespace)
        await until_says(client, namespace, "TargetsResolved", ("True", "Resolved"), name="b")


async def test_a_target_with_another_autoscaler_is_left_alone(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}
    spec = {"scaleTargetRef": reference, "minReplicas": 1, "maxReplicas": 5}
    metadata = {"name": "hpa", "namespace": namespace}
    await client.create(HPAS, {"apiVersion": "autoscaling/v2", "kind": HPAS.kind, "metadata": metadata, "spec": spec})
    await bind(client, namespace, target())
    wanted = Wanted(main=4)
    async with scaling(kube.admin, namespace, wanted):
        await until_says(client, namespace, "TargetsResolved", ("False", "OtherAutoscaler"))
        await until_looked(wanted)
        assert await replicas_of(client, namespace) == 2
        await client.delete(HPAS, "hpa", namespace)
        await until_replicas(client, namespace, 4)


async def test_a_target_that_is_made_anew_is_scaled_again(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=4)
    async with scaling(kube.admin, namespace, wanted):
        await until_replicas(client, namespace, 4)
        await client.delete(DEPLOYMENTS, "llama", namespace, propagation="Background")
        await until_says(client, namespace, "TargetsResolved", ("False", "TargetNotFound"))
        await client.create(DEPLOYMENTS, deployment(namespace, replicas=1))
        await until_replicas(client, namespace, 4)


async def test_a_server_or_a_role_that_is_not_there_is_named(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace))
    await bind(client, namespace, target(server="lama"))
    await bind(client, namespace, target("ModelInfer", name="pair", role="prefill"), name="two")

    async def message(name: str) -> str:
        conditions = (await client.get(AUTOSCALING_POLICY_BINDINGS, name, namespace))["status"]["conditions"]
        return str(next(one["message"] for one in conditions if one["type"] == "TargetsResolved"))

    async with scaling(kube.admin, namespace, Wanted(main=2)):
        await until_says(client, namespace, "TargetsResolved", ("False", "ServerNotFound"))
        await until_says(client, namespace, "TargetsResolved", ("False", "TargetNotFound"), name="two")
    assert await message("one") == "there is no ModelServer lama, which the field server of the target names"
    said = "there is no ModelInferRole pair-prefill: the ModelInfer pair needs a role prefill with scalable: true"
    assert await message("two") == said


async def test_what_is_only_recommended_is_told_and_not_written(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, mode="Recommend")
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=6)
    async with scaling(kube.admin, namespace, wanted):
        await until_says(client, namespace, "ScalingActive", ("True", "Recommending"))
        await until_looked(wanted)
        status = (await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace))["status"]
        assert (status["targets"][0]["current"], status["targets"][0]["desired"]) == (2, 6)
        assert await replicas_of(client, namespace) == 2
        changed = {"spec": {"mode": "Auto"}}
        await client.merge_patch(AUTOSCALING_POLICIES, "plain", namespace, changed)
        await until_replicas(client, namespace, 6)


async def test_an_urgent_demand_is_decided_about_at_once(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace, period="10m")
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=0))
    await bind(client, namespace, target())
    wanted, demand = Wanted(main=0), Demand()
    async with scaling(kube.admin, namespace, wanted, demand):
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        wanted.replicas["main"] = 1
        assert demand.urgent is not None
        demand.urgent(f"{namespace}/llama")
        await until_replicas(client, namespace, 1)


async def test_what_is_not_known_changes_nothing(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=3))
    await bind(client, namespace, target())
    wanted = Wanted(main=None)
    async with scaling(kube.admin, namespace, wanted):
        await until_says(client, namespace, "MetricsAvailable", ("False", "DataMissing"))
        await until_looked(wanted)
        assert await replicas_of(client, namespace) == 3
        assert "FailedGetMetrics" in await reasons(client, namespace)


async def test_a_manager_that_starts_anew_finds_what_it_had_learned(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=4)
    async with scaling(kube.admin, namespace, wanted):
        await until_replicas(client, namespace, 4)

        async def is_kept() -> bool:
            thing = await client.get(AUTOSCALING_POLICY_BINDINGS, "one", namespace)
            return "attache.dev/learned" in (thing["metadata"].get("annotations") or {})

        await eventually(is_kept)
    # the second one knows nothing of the demand yet
    again = Wanted(main=None)
    async with scaling(kube.admin, namespace, again) as running:
        await until_looked(again)
        first = running.records.records_by_binding()[f"{namespace}/one"].decision.targets[0].reason
        assert int(first.removeprefix("look ")) >= 7
        assert await replicas_of(client, namespace) == 4
        # what we wrote ourselves is no change by hand
        assert await says(client, namespace, "ScalingActive") == ("True", "Scaling")


@FAKE
async def test_engines_finish_before_a_deployment_loses_them(client: Client, kube: Kube, namespace: str) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    for number in (1, 2):
        await make_pod(client, namespace, f"llama-{number}", f"10.9.0.{number}")
    await bind(client, namespace, target())
    wanted, demand = Wanted(main=1), Demand()
    demand.reports = {"10.9.0.1": report(4), "10.9.0.2": report(2)}
    async with scaling(kube.admin, namespace, wanted, demand):

        async def drains(name: str) -> bool:
            metadata = (await client.get(PODS, name, namespace))["metadata"]
            return "attache.dev/draining" in (metadata.get("annotations") or {})

        await eventually(lambda: drains("llama-2"))
        assert not await drains("llama-1")
        await until_looked(wanted)
        assert await replicas_of(client, namespace) == 2
        # load is back: it stays
        wanted.replicas["main"] = 2

        async def stays() -> bool:
            return not await drains("llama-2")

        await eventually(stays)
        wanted.replicas["main"] = 1
        await eventually(lambda: drains("llama-2"))
        demand.reports["10.9.0.2"] = report(0)
        await until_replicas(client, namespace, 1)


@FAKE
async def test_faults_of_the_server_are_lived_through(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=2)
    async with scaling(kube.admin, namespace, wanted):
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        fake.expire()
        fake.watches.expire()
        fake.faults.refuse(3, 429, retry_after_s=1, of=_writes)
        fake.faults.refuse(2, 503, of=_writes)
        fake.faults.conflicts(2, of=lambda call: call.target.subresource == "scale")
        wanted.replicas["main"] = 5
        await until_replicas(client, namespace, 5)
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))

        async def is_told() -> bool:
            return "Scaled" in await reasons(client, namespace)

        await eventually(is_told)
        assert (await reasons(client, namespace)).count("Scaled") == 1


@FAKE
async def test_while_the_server_is_away_decisions_know_that_and_writes_are_made_up_for(
    client: Client, kube: Kube, fake: FakeServer, namespace: str
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=2)

    def is_cut_off() -> bool:
        return wanted.situations[0].freshness.cut_off_s is not None

    async with scaling(kube.admin, namespace, wanted):
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"))
        assert not is_cut_off()
        fake.faults.refuse(10_000, 503, of=lambda call: call.verb != "get")
        fake.watches.expire()
        await eventually(is_cut_off)
        wanted.replicas["main"] = 5
        await until_looked(wanted)
        assert is_cut_off()
        assert await replicas_of(client, namespace) == 2
        fake.faults.heal()
        await until_replicas(client, namespace, 5)
        await eventually(lambda: not is_cut_off())


async def test_a_decision_that_fails_is_told_and_harms_no_other_binding(
    client: Client, kube: Kube, namespace: str
) -> None:
    await make_policy(client, namespace)
    for name in ("ill", "well"):
        await make_server(client, namespace, name, app=name)
        await client.create(DEPLOYMENTS, deployment(namespace, name, replicas=3))
        await bind(client, namespace, target(name=name), name=name)
    wanted = Failing(main=3)
    async with scaling(kube.admin, namespace, wanted) as running:
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"), "ill")
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"), "well")
        wanted.fails.add(f"{namespace}/ill")
        wanted.replicas["main"] = 1
        await until_says(client, namespace, "ScalingActive", ("False", "DecisionFailed"), "ill")
        # with what was raised
        assert "ZeroDivisionError('no engines')" in await message(client, namespace, "ScalingActive", "ill")
        await eventually(lambda: told(client, namespace, "DecisionFailed"))
        # the other one goes on, and the replicas of this one stay, however often it is tried
        await until_replicas(client, namespace, 1, "well")
        tries = wanted.failures
        await eventually(lambda: wanted.failures >= tries + 3)
        assert await replicas_of(client, namespace, "ill") == 3
        assert await says(client, namespace, "ScalingActive", "well") == ("True", "Scaling")
        assert running.metric("attache_scaling_reconciles_total", outcome="error") >= 3
        # the same failure is written once
        writes = running.writes()
        await eventually(lambda: wanted.failures >= tries + 5)
        assert running.writes() == writes
        wanted.fails.clear()
        await until_replicas(client, namespace, 1, "ill")
        await until_says(client, namespace, "ScalingActive", ("True", "Scaling"), "ill")


class Failing(Wanted):
    """Cannot decide about the bindings in ``fails``. ``failures``: how often that was."""

    def __init__(self, **replicas: int | None) -> None:
        super().__init__(**replicas)
        self.fails: set[str] = set()
        self.failures = 0

    def decide(
        self,
        policy: AutoscalingPolicySpec,
        binding: AutoscalingPolicyBinding,
        situations: Sequence[Situation],
        memory: int | None,
        now_s: float,
        *,
        free: Mapping[str, int] | None = None,
    ) -> tuple[Decision, int]:
        if binding.metadata.key in self.fails:
            self.failures += 1
            raise ZeroDivisionError("no engines")
        return super().decide(policy, binding, situations, memory, now_s, free=free)


async def message(client: Client, namespace: str, type_: str, name: str) -> str:
    thing = await client.get(AUTOSCALING_POLICY_BINDINGS, name, namespace)
    return str(next(one["message"] for one in thing["status"]["conditions"] if one["type"] == type_))


async def told(client: Client, namespace: str, reason: str) -> bool:
    return reason in await reasons(client, namespace)


def _writes(call: ApiCall) -> bool:
    return call.verb == "patch" and call.target.kind.resource == DEPLOYMENTS


@REAL
async def test_a_write_of_somebody_else_in_between_leads_to_a_new_decision(
    client: Client, kube: Kube, namespace: str
) -> None:
    await make_policy(client, namespace)
    await make_server(client, namespace)
    await client.create(DEPLOYMENTS, deployment(namespace, replicas=2))
    await bind(client, namespace, target())
    wanted = Wanted(main=3)
    async with scaling(kube.admin, namespace, wanted):
        await until_replicas(client, namespace, 3)
        # the controllers of the cluster write its status all the time: no conflict of ours
        for number in range(4, 8):
            await client.merge_patch(DEPLOYMENTS, "llama", namespace, {"metadata": {"labels": {"number": str(number)}}})
            wanted.replicas["main"] = number
            await until_replicas(client, namespace, number)
        assert await says(client, namespace, "ScalingActive") == ("True", "Scaling")
