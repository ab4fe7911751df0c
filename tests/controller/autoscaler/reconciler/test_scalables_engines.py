# SPDX-License-Identifier: Apache-2.0
"""From pods to engines: states by what pods say, and several pods as one replica."""

from __future__ import annotations

from typing import Any

import pytest

from controller.autoscaler.decision.situation import EngineReport, EngineState
from controller.autoscaler.reconciler.scalables import KINDS, ScalableKind
from controller.autoscaler.reconciler.situations import engine_state, engines_from_pods
from controller.kube.api_resources import DEPLOYMENTS, MODEL_INFERS
from controller.kube.pod_views import view_of
from controller.models.model_infer import names

DRAINS = {"attache.dev/draining": "2026-11-22T09:00:00Z"}
READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-22T08:00:30Z"}


def pod(name: str = "a", ip: str = "", node: str = "node", **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    metadata = {"name": name, "namespace": "default", "uid": name, "creationTimestamp": "2026-11-22T08:00:00Z"}
    status = {"phase": more.pop("phase", "Running"), "podIP": ip, "conditions": more.pop("conditions", [])}
    status["containerStatuses"] = more.pop("containers", [])
    return {"metadata": {**metadata, **more}, "spec": {"nodeName": node} if node else {}, "status": status}


def kind(resource: object) -> ScalableKind:
    return next(one for one in KINDS if one.resource == resource)


def waiting(reason: str) -> dict[str, Any]:
    return {"name": "engine", "state": {"waiting": {"reason": reason}}}


@pytest.mark.parametrize(
    ("given", "state"),
    [
        (pod(conditions=[READY]), EngineState.READY),
        (pod(), EngineState.STARTING),
        (pod(node=""), EngineState.STARTING),
        (
            pod(node="", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]),
            EngineState.UNSCHEDULABLE,
        ),
        (pod(containers=[waiting("CrashLoopBackOff")]), EngineState.FAILING),
        (pod(containers=[waiting("ContainerCreating")]), EngineState.STARTING),
        (pod(conditions=[READY], annotations=DRAINS), EngineState.DRAINING),
        (pod(conditions=[READY], annotations={"attache.dev/drain": "true"}), EngineState.DRAINING),
        (pod(conditions=[READY], deletionTimestamp="2026-11-22T09:00:00Z"), EngineState.DRAINING),
    ],
)
def test_a_pod_says_what_its_engine_does(given: dict[str, Any], state: EngineState) -> None:
    assert engine_state(view_of(given)) is state


def test_a_pod_that_has_ended_is_no_engine() -> None:
    assert engines_from_pods(kind(DEPLOYMENTS), [view_of(pod(phase="Failed"))], {}) == ()


def test_each_pod_of_a_deployment_is_an_engine_with_its_own_report() -> None:
    pods = [view_of(pod("a", "10.0.0.1", conditions=[READY])), view_of(pod("b", "10.0.0.2"))]
    known = EngineReport(at_s=5.0, in_flight=3)
    first, second = engines_from_pods(kind(DEPLOYMENTS), pods, {"10.0.0.1": known})
    assert (first.name, first.report, second.report) == ("a", known, None)
    assert first.ready_at_s is not None
    assert first.ready_at_s - first.created_at_s == 30.0


def test_a_group_is_as_good_as_its_worst_pod_and_as_busy_as_all_together() -> None:
    def member(name: str, ip: str, group: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        return pod(name, ip, labels={names.GROUP: group}, **more)

    pods = [
        view_of(member("x-0-a", "10.0.0.1", "0", conditions=[READY])),
        view_of(member("x-0-b", "10.0.0.2", "0", containers=[waiting("ImagePullBackOff")])),
        view_of(member("x-1-a", "10.0.0.3", "1", conditions=[READY])),
        view_of(member("x-1-b", "10.0.0.4", "1", conditions=[READY])),
    ]
    reports = {
        "10.0.0.3": EngineReport(at_s=5.0, in_flight=3, waiting=1.0, kv_usage=0.25),
        "10.0.0.4": EngineReport(at_s=4.0, in_flight=2, kv_usage=0.5),
    }
    broken, whole = engines_from_pods(kind(MODEL_INFERS), pods, reports)
    assert (broken.state, broken.ready_at_s, broken.report) == (EngineState.FAILING, None, None)
    assert whole.state is EngineState.READY
    assert whole.report == EngineReport(at_s=4.0, in_flight=5, waiting=1.0, kv_usage=0.5)
