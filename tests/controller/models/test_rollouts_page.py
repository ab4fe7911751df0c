# SPDX-License-Identifier: Apache-2.0
"""The manager's page of rollouts, of statuses as the controllers write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from controller.models.model_infer.rollout import RolloutProgress
from controller.models.model_infer.status import (
    Condition,
    DegradedReason,
    degraded_condition,
    progressing_condition,
    refused_status,
)
from controller.models.rollouts_page import ROLLOUTS_PATH, rollout_page_routes, rollouts_page

if TYPE_CHECKING:
    from controller.kube.api_resources import Object

SINCE = "2026-11-29T01:00:00Z"


def model(name: str, **status: object) -> Object:
    return {"metadata": {"namespace": "team", "name": name}, "spec": {}, **({"status": status} if status else {})}


def infer(
    name: str, *conditions: Condition, of: str = "", backend: str = "", replicas: int = 4, **status: object
) -> Object:
    owners = [{"kind": "Model", "name": of, "controller": True}] if of else []
    labels = {"attache.dev/backend": backend} if backend else {}
    written = [{**msgspec.to_builtins(one), "lastTransitionTime": SINCE} for one in conditions]
    return {
        "metadata": {"namespace": "team", "name": name, "labels": labels, "ownerReferences": owners},
        "spec": {"replicas": replicas},
        "status": {**status, "conditions": written},
    }


def rollout(phase: Any, message: str) -> Condition:  # noqa: ANN401 - any phase
    return progressing_condition(RolloutProgress(phase=phase, message=message, is_moving=True))


FINE = degraded_condition([])


def test_a_canary_has_its_revisions_its_groups_and_its_share_of_the_models_requests() -> None:
    moving = infer(
        "llama-new",
        FINE,
        rollout("InProgress", "1 of 4 groups have revision bbb"),
        of="llama",
        backend="new",
        currentRevision="aaa",
        updateRevision="bbb",
        updatedReplicas=1,
        readyReplicas=4,
        replicas=5,
    )
    backends = [{"name": "old", "weight": 90}, {"name": "new", "weight": 10}]
    owner = model("llama", phase="Loaded", transitionStatus="InProgress", phaseSince=SINCE, backends=backends)
    answer = rollouts_page(([owner], [moving]))
    (found,) = answer.rollouts
    assert msgspec.to_builtins(found) == {
        "name": "team/llama-new",
        "model": "team/llama",
        "backend": "new",
        "phase": "InProgress",
        "since": SINCE,
        "current": "aaa",
        "target": "bbb",
        "groups": 5,
        "updated": 1,
        "ready": 4,
        "share": 0.1,
        "message": "1 of 4 groups have revision bbb",
    }
    (shown,) = answer.models
    assert (shown.phase, shown.transition, shown.since) == ("Loaded", "InProgress", SINCE)


def test_faults_come_first_then_what_changes_then_the_rest_by_name() -> None:
    blocked = "revision bbb made no progress for 30m; it has stopped, and aaa serves"
    things = [
        infer("b-done", FINE, rollout("UpToDate", "all groups have revision aaa")),
        infer("a-done", FINE, rollout("UpToDate", "all groups have revision aaa")),
        infer("paused", FINE, rollout("Paused", "3 groups wait")),
        {"metadata": {"namespace": "team", "name": "new"}, "spec": {}},
        infer(
            "z-crashes",
            degraded_condition([DegradedReason("RuntimeUnhealthy", "exit 1\nbefore that it wrote:\nx")]),
            rollout("UpToDate", "all"),
        ),
        infer(
            "y-blocked",
            degraded_condition([DegradedReason("BlockedByFailedLoad", blocked), DegradedReason("PodFailed", "pod x")]),
            rollout("BlockedByFailedLoad", blocked),
        ),
    ]
    refused = refused_status({"metadata": {"generation": 1}}, ["replicas: 3 is wrong"])
    things.append({"metadata": {"namespace": "team", "name": "x-refused"}, "spec": {}, "status": refused})
    found = {one.name.partition("/")[2]: one for one in rollouts_page(([], things)).rollouts}
    assert list(found) == ["x-refused", "y-blocked", "z-crashes", "new", "paused", "a-done", "b-done"]
    phases = [one.phase for one in found.values()]
    assert phases == ["InvalidSpec", "BlockedByFailedLoad", "UpToDate", "", "Paused", "UpToDate", "UpToDate"]
    assert found["x-refused"].message.endswith("replicas: 3 is wrong")
    # the failed rollout is named once, and nothing of a log
    assert found["y-blocked"].message == blocked
    assert found["z-crashes"].message == "all; RuntimeUnhealthy"
    assert (found["new"].groups, found["new"].share) == (1, None)


def test_models_that_failed_come_first_with_the_reason() -> None:
    failure = {"reason": "ModelLoadFailed", "message": "no such file"}
    models = [
        model("a", phase="Loaded", transitionStatus="UpToDate"),
        model("b", phase="Loading", transitionStatus="InProgress"),
        model("c"),
        model("d", phase="FailedToLoad", failure=failure),
        model("e", phase="Loaded", transitionStatus="BlockedByFailedLoad"),
        model("f", phase="Pending", transitionStatus="InvalidSpec"),
    ]
    found = rollouts_page((models, [])).models
    assert [one.name[-1] for one in found] == ["d", "e", "f", "b", "c", "a"]
    assert found[0].message == "ModelLoadFailed"


def test_the_answer_is_bounded_whatever_there_is_and_the_rest_is_found_by_name() -> None:
    long = "\x01" * 100_000
    conditions = degraded_condition([DegradedReason("PodFailed", long)]), rollout("InProgress", long)
    infers = [infer(f"{'n' * 240}-{at}", *conditions, of="m" * 240) for at in range(3_000)]
    failure = {"reason": long, "message": long}
    models = [model(f"{'m' * 240}-{at}", phase="FailedToLoad", failure=failure) for at in range(3_000)]
    answer = rollouts_page((models, infers))
    assert (answer.model_count, answer.rollout_count) == (3_000, 3_000)
    assert (len(answer.models), len(answer.rollouts)) == (100, 100)
    # the console takes 1 MiB
    assert len(msgspec.json.encode(answer)) < 700_000
    answer = rollouts_page((models, infers), find="N-2999")
    assert [one.name[-4:] for one in answer.rollouts] == ["2999"]
    assert answer.models == ()


@pytest.mark.asyncio
async def test_the_page_is_the_leaders_alone() -> None:
    leads, app = [True], web.Application()
    app.add_routes(rollout_page_routes(lambda: ([model("a"), model("b")], []), lambda: leads[0]))
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    url = f"http://127.0.0.1:{port}{ROLLOUTS_PATH}"
    async with aiohttp.ClientSession() as http:
        async with http.get(url, params={"find": "B"}) as answer:
            found = await answer.json()
        leads[0] = False
        async with http.get(url) as answer:
            assert answer.status == 503
    await runner.cleanup()
    assert [one["name"] for one in found["models"]] == ["team/b"]
