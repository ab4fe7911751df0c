# SPDX-License-Identifier: Apache-2.0
"""What a schema cannot say is refused, what another object may mend is warned of, and nothing else is held up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.kube.api_resources import key_of
from controller.webhooks.admission.checks import (
    AdmissionVerdict,
    admission_response,
    kind_metric_label,
    read_review,
    review_object,
)
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.kube_objects import Object, picker_config, resource, route, server

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECK = InstalledPluginChecker()
PICKER = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"

SCALED = [{"name": "a", "maxReplicas": 2}]


def metrics(*listed: Object, strategy: str = "Target") -> Object:
    return resource("AutoscalingPolicy", "p", {"strategies": [{"name": strategy}], "metrics": list(listed)})


def scheduled(start: str, zone: str) -> Object:
    window = {"start": start, "duration": "10h", "timeZone": zone, "minReplicas": 2}
    return resource("AutoscalingPolicy", "p", {"schedules": [window]})


def by_query(address: str, name: str = "queue", **more: str) -> Object:
    source = {"address": address, "query": "sum(queue)", **more}
    return {"name": name, "value": 5, "source": "Prometheus", "prometheus": source}


def binding(name: str, *targets: dict[str, Any], policy: str = "default") -> Object:
    listed = [{"name": f"t{at}", "maxReplicas": 3, **one} for at, one in enumerate(targets)]
    return resource("AutoscalingPolicyBinding", name, {"policyRef": policy, "targets": listed})


def target(name: str, **more: object) -> dict[str, Any]:
    return {"ref": {"kind": "ModelInfer", "name": name}, **more}


def budgeted(limited: str, *accelerators: str) -> Object:
    made = binding("b", *(target(f"e{at}", accelerator=one) for at, one in enumerate(accelerators)))
    return {**made, "spec": {**made["spec"], "budget": {"accelerators": {limited: 8}}}}


def judged(thing: Object, *others: Object, old: Object | None = None, deleted: bool = False) -> AdmissionVerdict:
    known: dict[str, dict[str, Object]] = {}
    for one in others:
        known.setdefault(one["kind"], {})[key_of(one)] = one
    operation = "DELETE" if deleted else "UPDATE" if old is not None else "CREATE"
    request = {
        "uid": "u",
        "kind": {"group": "attache.dev", "version": "v1alpha1", "kind": thing["kind"]},
        "operation": operation,
        "name": thing["metadata"]["name"],
        "namespace": thing["metadata"]["namespace"],
        "object": None if deleted else thing,
        "oldObject": thing if deleted else old,
    }
    body = msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
    return review_object(read_review(body), known, CHECK)


def rules(thing: Object, *listed: dict[str, Any]) -> Object:
    return {**thing, "spec": {**thing["spec"], "rules": list(listed)}}


TO_LLAMA = {"targetModels": [{"modelServerName": "llama"}]}


def matching(regex: str) -> dict[str, Any]:
    return {"modelMatch": {"uri": {"regex": regex}}, **TO_LLAMA}


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (rules(route(), TO_LLAMA, matching("/a")), "are never reached"),
        (rules(route(), matching("(unclosed")), "spec.rules[0].modelMatch.uri.regex"),
        (server(flowControl={"saturation": {"maxWait": "0s"}}), "maxWait"),
        (server("inferencepool.llama"), "stand for InferencePools"),
        (picker_config("epp", PICKER.replace("queue-scorer", "queue-scorr")), "no plugin type 'queue-scorr'"),
        (picker_config("epp", PICKER + "plugin: 1\n"), "line 4"),
        (resource("GatewayConfig", "g", {"authentication": {"apiKeys": [], "jwt": []}}), "authentication"),
        (binding("b", target("a"), target("a")), "another target of this object"),
        (resource("AutoscalingPolicy", "p", {"behavior": {"scaleUp": {"stabilization": "soon"}}}), "mistake"),
        (scheduled("0 8 * * 1-5", "Europe/Berln"), "'Europe/Berln' is no time zone that this machine knows"),
        (scheduled("0 8 * * mon-fry", "UTC"), "schedule '0 8 * * mon-fry' in UTC: "),
        ({**route(), "spec": {**route()["spec"], "loraAdapters": ["llama"]}}, "'llama' is there twice"),
    ],
)
def test_mistakes_are_refused(thing: Object, said: str) -> None:
    assert said in judged(thing, server()).refused


@pytest.mark.parametrize(
    ("thing", "others", "said"),
    [
        (route("chat", "gone"), [], "no ModelServer 'gone'"),
        (server(pickerConfig="epp"), [], "no ConfigMap 'epp'"),
        (server(pickerConfig="epp"), [picker_config("epp", "kind: Nonsense")], "the default picker is"),
        (
            rules(route(), matching("/a"), matching("/a")),
            [server()],
            "spec.rules[1] is never reached: spec.rules[0] has the same match",
        ),
        (
            route("new", "llama", model="m"),
            [server(), route("old", model="m", namespace="blue", creationTimestamp="2026-01-01T00:00:00Z")],
            "'m' belongs to ModelRoute blue/old, which is older",
        ),
        (binding("b", target("a"), policy="none"), [], "no AutoscalingPolicy 'none'"),
        (
            budgeted("A100", "H100"),
            [],
            "the budget for 'A100' limits nothing: no target is of that kind (they name 'H100')",
        ),
        (
            budgeted("nvidia-h100-80gb", "H100", "NVIDIA-H100-80GB-HBM3"),
            [],
            "the budget for 'nvidia-h100-80gb' does not count target 't0', whose accelerator is 'H100'",
        ),
        (
            resource("ModelAccessPolicy", "p", {"targetRefs": [{"kind": "ModelRoute", "name": "gone"}], "rules": []}),
            [],
            "no ModelRoute 'gone'",
        ),
        (metrics({"name": "memory", "value": 0.7, "source": "Resource"}), [], "the metric memory scales nothing well"),
        (metrics({"name": "request_in_flight", "value": 5}), [], "no metric request_in_flight; it has requests_in_fl"),
        (metrics({"name": "gpu", "value": 0.7, "source": "Resource"}), [], "there are cpu and memory"),
        (metrics(by_query("http://prometheus:9090", secretRef="keys")), [], "with https alone"),
        (metrics({"name": "requests_queued", "value": 5}, strategy="Work"), [], "metrics are for the strategy Target"),
        (
            resource("Model", "m", {"uri": "hf://a/b", "autoscaling": {"policyRef": "none"}, "backends": SCALED}),
            [],
            "AutoscalingPolicy",
        ),
    ],
)
def test_what_another_object_may_mend_is_a_warning(thing: Object, others: Sequence[Object], said: str) -> None:
    found = judged(thing, *others)
    assert found.refused == ""
    assert [one for one in found.warnings if said in one]


@pytest.mark.parametrize(
    ("thing", "others"),
    [
        (server(), []),
        (route(), [server(), route()]),
        (server(pickerConfig="epp"), [picker_config("epp", PICKER)]),
        (picker_config("epp", PICKER), []),
        (rules(route(), matching("/a"), matching("/b"), TO_LLAMA), [server()]),
        (resource("GatewayConfig", "g", {}), []),
        (binding("b", target("a"), target("a", role="prefill")), [resource("AutoscalingPolicy", "default", {})]),
        (budgeted("H100", "nvidia-h100", "NVIDIA-H100-80GB-HBM3"), [resource("AutoscalingPolicy", "default", {})]),
        (resource("Model", "m", {"uri": "hf://a/b"}), []),
        (metrics(by_query("https://prometheus:9090", secretRef="keys"), by_query("http://prometheus", "other")), []),
        (resource("AutoscalingPolicy", "p", {}), []),
    ],
)
def test_what_is_right_is_taken_without_a_word(thing: Object, others: Sequence[Object]) -> None:
    assert judged(thing, *others) == AdmissionVerdict()


def test_one_thing_is_scaled_by_one_binding() -> None:
    policy = resource("AutoscalingPolicy", "default", {})
    first = binding("first", target("a", role="decode"))
    refused = judged(binding("second", target("a", role="decode")), first, policy).refused
    assert refused == "ModelInfer a decode is scaled by AutoscalingPolicyBinding default/first already; " + (
        "one thing has one owner"
    )
    assert judged(binding("first", target("a", role="decode")), first, policy, old=first) == AdmissionVerdict()
    elsewhere = {**first, "metadata": {**first["metadata"], "namespace": "blue"}}
    assert judged(binding("second", target("a", role="decode")), elsewhere, policy) == AdmissionVerdict()


def test_who_only_labels_what_is_wrong_already_is_warned() -> None:
    wrong = server(flowControl={"saturation": {"maxWait": "0s"}})
    labelled = {**wrong, "metadata": {**wrong["metadata"], "labels": {"a": "b"}}}
    found = judged(labelled, old=wrong)
    assert found.refused == ""
    assert "maxWait" in found.warnings[0]
    worse = {**wrong, "spec": {**wrong["spec"], "model": "other"}}
    assert judged(worse, old=wrong).refused
    leaving = {**worse, "metadata": {**worse["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert judged(leaving, old=wrong).refused == ""


def test_who_deletes_what_is_used_is_warned() -> None:
    assert "ModelRoute default/llama still names it" in judged(server(), route(), deleted=True).warnings[0]
    assert (
        judged(server(), route("chat", "other"), route("llama", namespace="blue"), deleted=True) == AdmissionVerdict()
    )
    policy = resource("AutoscalingPolicy", "default", {})
    assert "still names it" in judged(policy, binding("b", target("a")), deleted=True).warnings[0]


def test_answers_are_as_the_api_server_wants_them() -> None:
    request = {"uid": "u", "kind": {"kind": "ModelServer"}, "operation": "CREATE"}
    review = read_review(msgspec.json.encode({"request": request}))
    found = msgspec.json.decode(
        admission_response(review, AdmissionVerdict(refused="wrong", warnings=("x" * 300, "y")))
    )
    response = found["response"]
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert (response["uid"], response["allowed"], response["status"]["code"]) == ("u", False, 422)
    assert response["status"]["message"] == "wrong"
    assert [len(one) for one in response["warnings"]] == [256, 1]
    assert msgspec.json.decode(admission_response(review, AdmissionVerdict()))["response"] == {
        "uid": "u",
        "allowed": True,
    }


@pytest.mark.parametrize("body", [b"", b"{}", b'{"request": {"uid": "u"}}', b"[1]"])
def test_what_is_no_review_is_told(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_review(body)


def test_kinds_that_nobody_registered_share_one_name_in_metrics() -> None:
    assert [kind_metric_label(kind) for kind in ("ModelRoute", "Model", "ConfigMap")] == [
        "ModelRoute",
        "Model",
        "ConfigMap",
    ]
    assert {kind_metric_label(kind) for kind in ("", "Pod", "x" * 10_000, "a\nb")} == {"other"}


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (
            resource("Model", "m", {"uri": "file:///models/x"}),
            resource("Model", "m", {"uri": "file:///etc/x"}),
            "the path must be below one of",
        ),
        (
            resource("Model", "m", {"uri": "hf://a/b", "aliases": ["n"]}),
            resource("Model", "m", {"uri": "hf://a/b", "aliases": ["m"]}),
            "'m' is there 2 times",
        ),
        (
            resource("ServingRuntime", "r", {"engine": "vLLM", "arguments": [{"args": ["{model}"]}]}),
            resource("ServingRuntime", "r", {"engine": "vLLM", "arguments": [{"args": ["{modl}"]}]}),
            "'modl' in arguments is no setting",
        ),
        (
            resource(
                "ClusterServingRuntime", "r", {"engine": "vLLM", "arguments": [{"when": {"role": "*"}, "args": ["x"]}]}
            ),
            resource(
                "ClusterServingRuntime", "r", {"engine": "vLLM", "arguments": [{"when": {"rol": "*"}, "args": ["x"]}]}
            ),
            "'rol' in arguments is no setting",
        ),
    ],
)
def test_models_and_runtimes_are_held_to_what_they_mean(right: Object, wrong: Object, words: str) -> None:
    assert judged(right) == AdmissionVerdict()
    assert words in judged(wrong).refused


def test_a_model_with_base_references_is_judged_with_them_later() -> None:
    assert (
        judged(resource("Model", "m", {"uri": "hf://a/b", "aliases": ["m"], "baseRefs": ["shared"]}))
        == AdmissionVerdict()
    )


def infer(*roles: dict[str, Any], name: str = "llama") -> Object:
    return resource("ModelInfer", name, {"template": {"roles": list(roles)}})


ENGINE = {"spec": {"containers": [{"name": "engine", "image": "vllm"}]}}


@pytest.mark.parametrize(
    ("accepted", "refused", "said"),
    [
        (
            infer({"name": "all", "entryTemplate": ENGINE}, name="a" * 50),
            infer({"name": "all", "entryTemplate": ENGINE}, name="a" * 51),
            "would have names of 64 characters",
        ),
        (
            infer({"name": "all", "entryTemplate": ENGINE}, name="llama-3.1"),
            infer(
                {"name": "all", "entryTemplate": ENGINE, "workerReplicas": 1, "workerTemplate": ENGINE},
                name="llama-3.1",
            ),
            "begins with a letter",
        ),
        (
            infer({"name": "a", "entryTemplate": ENGINE}, {"name": "b", "entryTemplate": ENGINE, "startsAfter": ["a"]}),
            infer(
                {"name": "a", "entryTemplate": ENGINE, "startsAfter": ["b"]},
                {"name": "b", "entryTemplate": ENGINE, "startsAfter": ["a"]},
            ),
            "wait for each other",
        ),
        (
            infer({"name": "all", "entryTemplate": ENGINE}),
            infer({"name": "all", "entryTemplate": {"spec": {}}}),
            "has no containers",
        ),
    ],
)
def test_a_model_infer_that_could_never_run_is_refused(accepted: Object, refused: Object, said: str) -> None:
    assert judged(accepted).refused == ""
    assert said in judged(refused).refused


def test_a_model_infer_of_another_shape_is_told_once() -> None:
    found = judged(resource("ModelInfer", "llama", {"template": {"roles": []}})).refused
    assert found.startswith("the object has a mistake: ")
    assert ";" not in found
