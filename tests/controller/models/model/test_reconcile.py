# SPDX-License-Identifier: Apache-2.0
"""A Model's life as the reconciler sees it: made, drifted, changed, stopped, and what it says of itself meanwhile."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from controller.kube.api_resources import MODEL_INFERS
from controller.kube.reconcile_plan import Apply, Delete, Plan
from controller.models.model.children import smoothed_start_time
from controller.models.model.model_state import ModelSettings, ModelState
from controller.models.model.reconcile import reconcile

Plain = dict[str, Any]
NOW_S = 1_700_000_000.0
UID = "11111111-2222-3333-4444-555555555555"


def model(status: Plain | None = None, **spec: object) -> Plain:
    return {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "llama", "namespace": "default", "uid": UID, "generation": 1},
        "spec": {"uri": "hf://org/llama", **spec},
        "status": status or {},
    }


def applied(plan: Plan) -> dict[str, Plain]:
    return {
        f"{one.resource.kind} {one.thing['metadata']['name']}": one.thing
        for one in plan.actions
        if isinstance(one, Apply)
    }


def deleted(plan: Plan) -> list[str]:
    return [f"{one.resource.kind} {one.key}" for one in plan.actions if isinstance(one, Delete)]


def condition(plan: Plan, type_: str) -> Plain:
    assert plan.status is not None
    (found,) = (one for one in plan.status["conditions"] if one["type"] == type_)
    return dict(found)


def on_server(plan: Plan) -> list[Plain]:
    """What the API server makes of it: defaults, a uid, a generation."""
    found = []
    for thing in applied(plan).values():
        made = copy.deepcopy(thing)
        made["metadata"] |= {"uid": f"uid-{made['metadata']['name']}-{made['kind']}", "generation": 1}
        if made["kind"] == "ModelInfer":
            made["spec"]["recovery"] = "Role"
        found.append(made)
    return found


def seen(thing: Plain, children: list[Plain], **more: Any) -> ModelState:  # noqa: ANN401 - fields of Observed
    return ModelState(thing=thing, children=children, **more)


def told(children: list[Plain], ready: int = 1, *, is_served: bool = True, **status: object) -> list[Plain]:
    """Children as their own controllers report on them."""
    found = copy.deepcopy(children)
    for one in found:
        if one["kind"] == "ModelInfer":
            counts = {"replicas": one["spec"]["replicas"], "readyReplicas": ready, "updatedReplicas": ready}
            one["status"] = {"observedGeneration": 1, **counts, **status}
        elif is_served:
            said = {"status": "True", "reason": "Yes", "message": ""}
            one["status"] = {"conditions": [{"type": about, **said} for about in ("Programmed", "Available")]}
    return found


def test_a_settled_model_causes_no_write() -> None:
    first = reconcile(seen(model(), []), NOW_S)
    assert set(applied(first)) == {"ModelInfer llama-default", "ModelServer llama-default", "ModelRoute llama"}
    children = told(on_server(first))
    second = reconcile(seen(model(), children), NOW_S)
    assert second.actions == ()
    assert second.status is not None
    third = reconcile(seen(model(status=dict(second.status)), children), NOW_S + 1000)
    assert third.actions == ()
    assert third.status == second.status
    assert third.events == ()


def test_what_somebody_changed_is_repaired_and_nothing_else_is_written() -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    (route,) = (one for one in children if one["kind"] == "ModelRoute")
    route["spec"]["rules"][0]["targetModels"][0]["weight"] = 1
    assert list(applied(reconcile(seen(model(), children), NOW_S))) == ["ModelRoute llama"]


def test_what_somebody_removed_is_made_again() -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    left = [one for one in children if one["kind"] != "ModelServer"]
    assert list(applied(reconcile(seen(model(), left), NOW_S))) == ["ModelServer llama-default"]


def test_replicas_that_nobody_wrote_are_left_to_autoscalers() -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    (infer,) = (one for one in children if one["kind"] == "ModelInfer")
    infer["spec"]["replicas"] = 7
    assert reconcile(seen(model(), children), NOW_S).actions == ()


def test_replicas_that_are_written_are_kept() -> None:
    written = model(backends=[{"name": "default", "replicas": 2}])
    plan = reconcile(seen(written, []), NOW_S)
    children = on_server(plan)
    (infer,) = (one for one in children if one["kind"] == "ModelInfer")
    infer["spec"]["replicas"] = 7
    again = reconcile(seen(written, children), NOW_S)
    assert applied(again)["ModelInfer llama-default"]["spec"]["replicas"] == 2
    assert [one.yields for one in again.actions if isinstance(one, Apply)] == [()]


def test_with_autoscaling_the_replicas_yield_and_stop_does_not() -> None:
    scaled: Plain = {"autoscaling": {}, "backends": [{"name": "default", "replicas": 2, "maxReplicas": 4}]}

    def yields(**spec: object) -> list[tuple[tuple[str, ...], ...]]:
        plan = reconcile(seen(model(**spec), []), NOW_S)
        return [one.yields for one in plan.actions if isinstance(one, Apply) and one.resource is MODEL_INFERS]

    assert yields(**scaled) == [(("spec", "replicas"),)]
    assert yields(**scaled, stop=True) == [()]


def test_a_field_that_is_no_longer_wanted_is_taken_back() -> None:
    with_events = model(backends=[{"name": "default", "config": {"kvEvents": True}}])
    children = on_server(reconcile(seen(with_events, []), NOW_S))
    again = applied(reconcile(seen(model(), children), NOW_S))
    assert "kvEvents" not in again["ModelServer llama-default"]["spec"]


def test_a_backend_that_is_gone_takes_its_objects_with_it_once_the_route_names_it_no_more() -> None:
    two = model(backends=[{"name": "a"}, {"name": "b"}])
    children = on_server(reconcile(seen(two, []), NOW_S))
    plan = reconcile(seen(model(backends=[{"name": "a"}]), children), NOW_S)
    assert list(applied(plan)) == ["ModelRoute llama"]
    assert deleted(plan) == ["ModelServer default/llama-b", "ModelInfer default/llama-b"]
    assert isinstance(plan.actions[0], Apply)


def test_the_name_of_another_owner_is_not_taken() -> None:
    other = {"kind": "ModelRoute", "metadata": {"name": "llama", "namespace": "default", "uid": "u"}, "spec": {}}
    plan = reconcile(seen(model(), [other]), NOW_S)
    assert "ModelRoute llama" not in applied(plan)
    assert deleted(plan) == []
    assert condition(plan, "Resolved")["reason"] == "NameTaken"
    assert plan.status is not None
    assert plan.status["transitionStatus"] == "InvalidSpec"


def test_a_model_whose_engines_run_but_whose_route_is_another_owners_says_so_in_ready() -> None:
    other = {"kind": "ModelRoute", "metadata": {"name": "llama", "namespace": "default", "uid": "u"}, "spec": {}}
    children = [one for one in on_server(reconcile(seen(model(), []), NOW_S)) if one["kind"] != "ModelRoute"]
    plan = reconcile(seen(model(), [*told(children), other]), NOW_S)
    assert condition(plan, "Ready")["reason"] == "NameTaken"
    assert "ModelRoute llama" in condition(plan, "Ready")["message"]


def test_a_model_that_is_being_deleted_needs_nothing() -> None:
    thing = model()
    thing["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z"
    assert reconcile(seen(thing, []), NOW_S) == Plan()


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"baseRefs": ["gone"]}, "InvalidSpec", "there is no ModelTemplate gone"),
        ({"backends": [{"name": "a", "runtime": "gone"}]}, "RuntimeNotRecognized", "there is no runtime 'gone'"),
        ({"format": {"name": "new"}}, "NoSupportingRuntime", "no runtime supports format 'new'"),
        ({"aliases": ["llama"]}, "InvalidSpec", "'llama' is there 2 times"),
        ({"backends": [{"name": "a", "runtime": "openai"}]}, "InvalidSpec", "names no image"),
    ],
)
def test_what_cannot_be_made_changes_nothing_and_what_runs_goes_on(spec: Plain, reason: str, words: str) -> None:
    children = told(on_server(reconcile(seen(model(), []), NOW_S)))
    plan = reconcile(seen(model(**spec), children), NOW_S)
    assert plan.actions == ()
    assert plan.status is not None
    assert plan.status["transitionStatus"] == "InvalidSpec"
    assert plan.status["failure"]["reason"] == reason
    assert words in plan.status["failure"]["message"]
    assert condition(plan, "Ready")["status"] == "True"
    assert [one.reason for one in plan.events if one.type == "Warning"] == [reason]


def test_an_upgrade_of_ours_alone_starts_no_engine_anew() -> None:
    first = reconcile(seen(model(), [], settings=ModelSettings(image="attache:1")), NOW_S)
    children = on_server(first)
    upgraded = ModelSettings(image="attache:2")
    assert reconcile(seen(model(), children, settings=upgraded), NOW_S).actions == ()
    changed = model(backends=[{"name": "default", "config": {"maxLength": 4096}}])
    again = applied(reconcile(seen(changed, children, settings=upgraded), NOW_S))
    pod = again["ModelInfer llama-default"]["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    assert {one["image"] for one in pod["initContainers"]} == {"attache:2"}


def test_a_canary_gets_its_share_once_it_is_ready() -> None:
    two = model(backends=[{"name": "a", "weight": 90}, {"name": "b", "weight": 10}])
    children = told(on_server(reconcile(seen(two, []), NOW_S)), ready=0)
    for one in children:
        if one["metadata"]["name"] == "llama-a" and one["kind"] == "ModelInfer":
            one["status"]["readyReplicas"] = 1

    def weights(plan: Plan) -> list[int]:
        return [one["weight"] for one in applied(plan)["ModelRoute llama"]["spec"]["rules"][0]["targetModels"]]

    assert weights(reconcile(seen(two, children), NOW_S)) == [100 - 10, 0]
    assert weights(reconcile(seen(two, []), NOW_S)) == [90, 10]


def pod(name: str = "llama-default-0-engine-0-0", **status: object) -> Plain:
    labels = {"attache.dev/model": "llama", "attache.dev/backend": "default"}
    metadata = {"name": name, "namespace": "default", "labels": labels, "creationTimestamp": "2024-01-01T00:00:00Z"}
    return {"kind": "Pod", "metadata": metadata, "status": status}


SCHEDULED = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2024-01-01T00:00:02Z"}
READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2024-01-01T00:01:30Z"}


def test_phases_and_how_long_each_was() -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    pending = reconcile(seen(model(), told(children, 0)), NOW_S)
    assert pending.status is not None
    assert pending.status["phase"] == "Pending"
    loading = reconcile(
        seen(model(status=dict(pending.status)), told(children, 0), pods=[pod(conditions=[SCHEDULED])]), NOW_S + 5
    )
    assert loading.status is not None
    assert loading.status["phase"] == "Loading"
    loaded = reconcile(
        seen(model(status=dict(loading.status)), told(children), pods=[pod(conditions=[SCHEDULED, READY])]), NOW_S + 65
    )
    assert loaded.status is not None
    assert loaded.status["phase"] == "Loaded"
    assert loaded.status["transitionStatus"] == "UpToDate"
    assert loaded.status["phaseTimes"] == [{"name": "Loading", "seconds": 60.0}, {"name": "Pending", "seconds": 5.0}]
    assert [one.reason for one in loaded.events] == ["Loaded"]


def test_what_a_start_took_is_told_by_the_pod_that_became_ready_last() -> None:
    download = {"startedAt": "2024-01-01T00:00:05Z", "finishedAt": "2024-01-01T00:00:45Z", "exitCode": 0}
    started = pod(
        conditions=[SCHEDULED, READY],
        initContainerStatuses=[{"name": "download", "state": {"terminated": download}}],
        containerStatuses=[{"name": "engine", "state": {"running": {"startedAt": "2024-01-01T00:00:46Z"}}}],
    )
    plan = reconcile(seen(model(), told(on_server(reconcile(seen(model(), []), NOW_S))), pods=[started]), NOW_S)
    assert plan.status is not None
    assert plan.status["backends"][0]["start"] == {
        "schedulingSeconds": 2.0,
        "downloadSeconds": 40.0,
        "loadSeconds": 44.0,
    }
    kept = reconcile(seen(model(status=dict(plan.status)), told(on_server(reconcile(seen(model(), []), NOW_S)))), NOW_S)
    assert kept.status is not None
    assert kept.status["backends"][0]["start"]["loadSeconds"] == 44.0


@pytest.mark.parametrize(
    ("field", "container", "reason"),
    [("initContainerStatuses", "download", "ModelLoadFailed"), ("containerStatuses", "engine", "RuntimeUnhealthy")],
)
def test_why_it_does_not_load(field: str, container: str, reason: str) -> None:
    crashed = {
        "name": container,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 3, "message": "no such repository"}},
    }
    children = told(on_server(reconcile(seen(model(), []), NOW_S)), 0)
    plan = reconcile(seen(model(), children, pods=[pod(conditions=[SCHEDULED], **{field: [crashed]})]), NOW_S)
    assert plan.status is not None
    assert plan.status["phase"] == "FailedToLoad"
    assert plan.status["transitionStatus"] == "BlockedByFailedLoad"
    assert plan.status["failure"] == {
        "reason": reason,
        "message": f"pod llama-default-0-engine-0-0, container {container}: "
        "CrashLoopBackOff, exit status 3, no such repository",
    }
    assert condition(plan, "Ready")["reason"] == reason


def test_the_log_that_the_model_infer_tells_of_says_more_than_a_pod_in_its_back_off() -> None:
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=engine"}
    crashed = {"name": "engine", "state": {"waiting": waiting}, "lastState": {"terminated": {"exitCode": 2}}}
    said = "pod x: container engine ended with code 2, 4 restarts: unrecognized arguments: --flag"
    degraded = {"type": "Degraded", "status": "True", "reason": "RuntimeUnhealthy", "message": said}
    children = told(on_server(reconcile(seen(model(), []), NOW_S)), 0, conditions=[degraded])
    plan = reconcile(seen(model(), children, pods=[pod(conditions=[SCHEDULED], containerStatuses=[crashed])]), NOW_S)
    assert plan.status is not None
    assert plan.status["failure"] == {"reason": "RuntimeUnhealthy", "message": f"ModelInfer llama-default: {said}"}


@pytest.mark.parametrize(
    ("reason", "phase", "transition"),
    [
        ("Unschedulable", "Pending", "InProgress"),
        ("NotAnswering", "Pending", "InProgress"),
        ("ModelLoadFailed", "FailedToLoad", "BlockedByFailedLoad"),
    ],
)
def test_what_may_pass_is_told_and_is_no_failure_to_load(reason: str, phase: str, transition: str) -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    degraded = {"type": "Degraded", "status": "True", "reason": reason, "message": "pod x"}
    plan = reconcile(seen(model(), told(children, 0, conditions=[degraded])), NOW_S)
    assert plan.status is not None
    assert (plan.status["phase"], plan.status["transitionStatus"]) == (phase, transition)
    assert plan.status["failure"] == {"reason": reason, "message": "ModelInfer llama-default: pod x"}


def test_a_revision_that_does_not_become_ready_blocks_and_the_old_serves() -> None:
    children = on_server(reconcile(seen(model(), []), NOW_S))
    blocked = {"type": "Degraded", "status": "True", "reason": "BlockedByFailedLoad", "message": "group 1 is not ready"}
    plan = reconcile(seen(model(), told(children, 1, updatedReplicas=0, conditions=[blocked])), NOW_S)
    assert plan.status is not None
    assert plan.status["phase"] == "Loaded"
    assert plan.status["transitionStatus"] == "BlockedByFailedLoad"
    assert condition(plan, "Ready")["status"] == "True"


def test_no_gateway_has_an_engine_yet() -> None:
    children = told(on_server(reconcile(seen(model(), []), NOW_S)))
    (server,) = (one for one in children if one["kind"] == "ModelServer")
    server["status"]["conditions"][1] |= {"status": "False", "reason": "NoReadyPods"}
    plan = reconcile(seen(model(), children), NOW_S)
    assert condition(plan, "Ready")["reason"] == "NotAvailable"
    assert condition(plan, "ModelServersReady")["message"].startswith("ModelServer llama-default: NoReadyPods")


def test_a_model_of_a_classical_server_is_routed_by_its_protocol() -> None:
    own = model(uri="s3://models/iris", format={"name": "sklearn"})
    children = told(on_server(reconcile(seen(own, []), NOW_S)))
    rest, calls = (one for one in children if one["kind"] == "ModelServer")
    assert (rest["metadata"]["name"], calls["metadata"]["name"]) == ("llama-default", "llama-default.grpc")
    assert (rest["spec"]["protocol"], rest["spec"]["scrapeInterval"]) == ("V2", "0s")
    # the same pods, at another port
    assert calls["spec"] == {**rest["spec"], "protocol": "V2-gRPC", "workloadPort": {"port": 8001}}
    (route,) = (one for one in children if one["kind"] == "ModelRoute")
    assert route["spec"]["rules"][0]["targetModels"] == [
        {"modelServerName": "llama-default", "weight": 100},
        {"modelServerName": "llama-default.grpc", "weight": 100},
    ]
    plan = reconcile(seen(own, children), NOW_S)
    ready = condition(plan, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Serving")
    assert not plan.actions


@pytest.mark.parametrize(
    ("protocol", "port", "expected"),
    [
        ("V1", 8081, ["V1", "V2-gRPC"]),
        ("TensorFlow", 8500, ["TensorFlow", "TensorFlow-gRPC"]),
        ("V2", None, ["V2"]),
        # an API server refuses it; a file of presets may have it
        ("OpenAI", 8081, ["OpenAI"]),
    ],
)
def test_a_runtime_says_at_which_port_it_serves_grpc(protocol: str, port: int | None, expected: list[str]) -> None:
    arguments = [{"args": ["--port={port}"]}, {"when": {"grpcPort": "*"}, "args": ["--grpc={grpcPort}"]}]
    spec: Plain = {"engine": "Custom", "protocolVersions": [protocol], "port": 8080, "arguments": arguments}
    if port is not None:
        spec["grpcPort"] = port
    runtime = {"metadata": {"name": "own", "namespace": "default"}, "spec": {**spec, "config": {"image": "own"}}}
    backends = [{"name": "a", "runtime": "own", "weight": 3}, {"name": "b", "runtime": "own", "weight": 1}]
    own = model(uri="s3://models/iris", format={"name": "odd"}, backends=backends)
    children = on_server(reconcile(seen(own, [], runtimes=[runtime]), NOW_S))
    found = [one["spec"].get("protocol", "OpenAI") for one in children if one["kind"] == "ModelServer"]
    assert sorted(found) == sorted([*expected, *expected])
    (route,) = (one for one in children if one["kind"] == "ModelRoute")
    assert [one["weight"] for one in route["spec"]["rules"][0]["targetModels"]] == [3, 1] * len(expected)
    infer = next(one for one in children if one["kind"] == "ModelInfer")
    (engine,) = infer["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]["containers"]
    assert engine["args"] == ["--port=8080", *([f"--grpc={port}"] if port else [])]


def test_the_servers_of_grpc_go_with_the_port_and_the_routes_first() -> None:
    runtime = {
        "metadata": {"name": "own", "namespace": "default"},
        "spec": {"engine": "Custom", "protocolVersions": ["V2"], "grpcPort": 8081, "config": {"image": "own"}},
    }
    own = model(uri="s3://models/iris", format={"name": "odd"}, backends=[{"name": "a", "runtime": "own"}])
    children = told(on_server(reconcile(seen(own, [], runtimes=[runtime]), NOW_S)))
    del runtime["spec"]["grpcPort"]
    plan = reconcile(seen(own, children, runtimes=[runtime]), NOW_S)
    kinds = [
        (type(one).__name__, (one.thing if isinstance(one, Apply) else {"kind": one.resource.kind})["kind"])
        for one in plan.actions
    ]
    assert kinds == [("Apply", "ModelRoute"), ("Delete", "ModelServer")]


def test_a_stopped_model_is_on_standby() -> None:
    stopped = model(stop=True)
    children = told(on_server(reconcile(seen(stopped, []), NOW_S)), 0)
    plan = reconcile(seen(stopped, children), NOW_S)
    assert plan.status is not None
    assert plan.status["phase"] == "Standby"
    assert plan.status["transitionStatus"] == "UpToDate"
    assert condition(plan, "Ready")["reason"] == "Stopped"


@pytest.mark.parametrize(
    ("service", "url"),
    [
        ({"spec": {"ports": [{"name": "http", "port": 80}]}}, "http://gw.gateways.svc/v1"),
        (
            {"spec": {"ports": [{"name": "admin", "port": 1}, {"name": "http", "port": 8080}]}},
            "http://gw.gateways.svc:8080/v1",
        ),
        (
            {
                "spec": {"ports": [{"port": 443}]},
                "status": {"loadBalancer": {"ingress": [{"hostname": "ai.example.org"}]}},
            },
            "https://ai.example.org/v1",
        ),
    ],
)
def test_where_it_is_served(service: Plain, url: str) -> None:
    gateway = {"metadata": {"name": "gw", "namespace": "gateways"}, **service}
    plan = reconcile(seen(model(), [], gateways=[gateway]), NOW_S)
    assert plan.status is not None
    assert plan.status["url"] == url


@pytest.mark.parametrize(
    ("spec", "kind", "reason"),
    [
        ({}, None, "CannotWarm"),
        ({"cache": {"hostPath": "/var/lib/attache/w"}}, "DaemonSet", "Downloading"),
        ({"cache": {"claim": "weights"}}, "Job", "Downloading"),
        ({"uri": "pvc://claim/x"}, None, "CannotWarm"),
    ],
)
def test_weights_are_fetched_ahead_where_they_are_kept(spec: Plain, kind: str | None, reason: str) -> None:
    warm = model(warm=True, **spec)
    first = reconcile(seen(warm, []), NOW_S)
    kinds = {one.partition(" ")[0] for one in applied(first)} & {"DaemonSet", "Job"}
    assert kinds == ({kind} if kind else set())
    children = on_server(first)
    assert condition(reconcile(seen(warm, children), NOW_S), "WeightsWarm")["reason"] == reason
    for one in children:
        one["status"] = {"desiredNumberScheduled": 2, "numberReady": 2, "succeeded": 1}
    if kind:
        assert condition(reconcile(seen(warm, children), NOW_S), "WeightsWarm")["status"] == "True"


SCALED: Plain = {
    "autoscaling": {"scaleToZero": "5m"},
    "backends": [{"name": "default", "minReplicas": 0, "maxReplicas": 4}],
}


def activation(plan: Plan) -> Plain | None:
    found: Plain | None = applied(plan)["ModelServer llama-default"]["spec"].get("activation")
    return found


def test_requests_wait_for_engines_of_a_model_that_may_have_none() -> None:
    always: Plain = {"autoscaling": {}, "backends": [{"name": "default", "minReplicas": 1, "maxReplicas": 4}]}
    by_bounds: Plain = {"autoscaling": {"policyRef": "p"}, "backends": SCALED["backends"]}
    fixed: Plain = {"backends": [{"name": "default", "replicas": 2}]}
    specs = [SCALED, by_bounds, always, fixed, {**SCALED, "stop": True}]
    found = [activation(reconcile(seen(model(**spec), []), NOW_S)) for spec in specs]
    assert found == [{}, {}, None, None, None]


def policy(**spec: object) -> Plain:
    return {"kind": "AutoscalingPolicy", "metadata": {"name": "p", "namespace": "default"}, "spec": spec}


def test_a_policy_says_how_long_requests_wait_and_that_there_may_be_no_engine() -> None:
    scaled: Plain = {"autoscaling": {"policyRef": "p"}, "backends": [{"name": "default", "maxReplicas": 4}]}
    always: Plain = {**scaled, "backends": [{"name": "default", "minReplicas": 1, "maxReplicas": 4}]}

    def made(spec: Plain, *policies: Plain) -> tuple[Plain | None, int]:
        plan = reconcile(seen(model(**spec), [], policies=policies), NOW_S)
        return activation(plan), applied(plan)["AutoscalingPolicyBinding llama"]["spec"]["targets"][0]["minReplicas"]

    to_zero = policy(scaleToZero={"idle": "5m", "holdTimeout": "3m"})
    assert made(scaled, to_zero) == ({"holdTimeout": "3m"}, 0)
    assert made(scaled, policy(scaleToZero={})) == ({"holdTimeout": "10m"}, 0)
    assert made(always, to_zero) == (None, 1)
    assert made(scaled, policy(mode="Auto")) == (None, 1)
    assert made(scaled, policy(scaleToZero={"idle": "soon"})) == (None, 1)
    assert made(scaled) == (None, 1)


@pytest.mark.parametrize(
    ("measured_s", "told_before", "tells"),
    [
        (None, None, None),
        (None, "90s", "90s"),
        (44.0, None, "45s"),
        (130.0, None, "150s"),
        (601.0, None, "660s"),
        # a quarter more or less is no news
        (56.0, "45s", "45s"),
        (57.0, "45s", "60s"),
        (34.0, "45s", "45s"),
        (33.0, "45s", "45s"),
        (14.0, "45s", "15s"),
    ],
)
def test_what_a_start_takes_is_told_coarsely(
    measured_s: float | None, told_before: str | None, tells: str | None
) -> None:
    assert smoothed_start_time(measured_s, told_before) == tells


def test_the_measured_start_reaches_the_model_server_and_stays_while_it_varies_little() -> None:
    def status(load_s: float) -> Plain:
        return {"backends": [{"name": "default", "start": {"schedulingSeconds": 4.0, "loadSeconds": load_s}}]}

    first = reconcile(seen(model(status(40.0), **SCALED), []), NOW_S)
    assert activation(first) == {"startTime": "45s"}
    children = on_server(first)
    again = reconcile(seen(model(status(48.0), **SCALED), children), NOW_S)
    assert "ModelServer llama-default" not in applied(again)
    slower = reconcile(seen(model(status(80.0), **SCALED), children), NOW_S)
    assert activation(slower) == {"startTime": "90s"}


def test_a_protocol_that_the_runtime_does_not_serve_is_told_and_the_model_is_not_ready() -> None:
    asked: Plain = {"format": {"name": "sklearn"}, "backends": [{"name": "default", "runtime": "mlserver"}]}
    fresh = reconcile(seen(model(**asked, protocol="V1"), []), NOW_S)
    told_so = condition(fresh, "Resolved")
    assert (told_so["status"], told_so["reason"]) == ("False", "ProtocolNotServed")
    assert "built-in runtime mlserver serves V2, V2-gRPC; the Model asks for protocol V1" in told_so["message"]
    assert (condition(fresh, "Ready")["status"], condition(fresh, "Ready")["reason"]) == ("False", "ProtocolNotServed")
    assert fresh.actions == ()


def test_what_served_another_protocol_before_goes_on_and_the_model_is_not_ready() -> None:
    asked: Plain = {"format": {"name": "sklearn"}, "backends": [{"name": "default", "runtime": "mlserver"}]}
    children = told(on_server(reconcile(seen(model(**asked), []), NOW_S)))
    assert condition(reconcile(seen(model(**asked), children), NOW_S), "Ready")["status"] == "True"
    plan = reconcile(seen(model(**asked, protocol="V1"), children), NOW_S)
    assert plan.actions == ()
    ready = condition(plan, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ProtocolNotServed")
    assert ready["message"].startswith("what ran before goes on: ")


@pytest.mark.parametrize(
    ("more", "field"),
    [({"disaggregation": {}}, "disaggregation"), ({"config": {"kvEvents": True}}, "config.kvEvents")],
)
def test_what_is_about_prompts_is_refused_where_a_protocol_has_none(more: Plain, field: str) -> None:
    backend = {"name": "default", "runtime": "own", **more}
    runtime = {
        "metadata": {"name": "own"},
        "spec": {"engine": "vLLM", "protocolVersions": ["OpenAI", "V2"], "connectors": ["NIXL"]},
    }
    thing = model(backends=[{**backend, "config": {**more.get("config", {}), "image": "i"}}], protocol="V2")
    found = condition(reconcile(seen(thing, [], runtimes=[runtime]), NOW_S), "Resolved")
    assert found["reason"] == "InvalidSpec"
    assert f"{field} is about prompts, which protocol V2 does not have" in found["message"]
