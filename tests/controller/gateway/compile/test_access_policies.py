# SPDX-License-Identifier: Apache-2.0
"""ModelAccessPolicies of a cluster: what the directory gets, what the conditions say, and that nothing is ever
opened.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from controller.gateway.compile.access_policies import PolicyResult, PolicyTargets, compile_policies, failure_mode
from controller.gateway.compile.source_objects import decode_source
from extproc.api.access_policy import TARGET_GROUPS
from extproc.api.gateway_config import GatewayConfigSpec

SERVED = PolicyTargets(
    model_routes={"team/llama"},
    model_servers={"team/llama", "team/large", "team/inferencepool.pooled"},
    gateway_api_routes={("HTTPRoute", "team/chat"), ("HTTPRoute", "team/shop"), ("GRPCRoute", "team/calls")},
    listeners={
        "team/web": {"http": "team/web/http", "https": "team/web/https"},
        "other/web": {"http": "other/web/http"},
    },
    config="team/config",
    config_listeners={"extra"},
    without_models={("HTTPRoute", "team/shop"), ("GRPCRoute", "team/shop")},
)
RULES = [{"from": [{"tenants": ["acme"]}], "models": ["llama"]}]


def compiled(spec: dict[str, Any], served: PolicyTargets = SERVED) -> PolicyResult:
    thing = {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "ModelAccessPolicy",
        "metadata": {"name": "p", "namespace": "team", "generation": 3},
        "spec": spec,
    }
    (result,) = compile_policies([decode_source(thing)], served).values()
    return result


def spec_of(result: PolicyResult) -> dict[str, Any]:
    assert result.document is not None
    found: dict[str, Any] = json.loads(result.document)["spec"]
    return found


def conditions(result: PolicyResult) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.reason) for one in result.status.conditions}


def target(kind: str, name: str, **more: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "group": TARGET_GROUPS[kind], **more}


@pytest.mark.parametrize(
    ("ref", "expected"),
    [
        (target("ModelRoute", "llama"), [target("ModelRoute", "llama")]),
        (target("ModelServer", "large"), [target("ModelServer", "large")]),
        (target("InferencePool", "pooled"), [target("ModelServer", "inferencepool.pooled")]),
        (target("HTTPRoute", "chat"), [target("HTTPRoute", "chat")]),
        (target("GRPCRoute", "calls"), [target("GRPCRoute", "calls")]),
        (target("GatewayConfig", "config"), [target("GatewayConfig", "config")]),
        (
            target("GatewayConfig", "config", sectionName="extra"),
            [target("GatewayConfig", "config", sectionName="extra")],
        ),
        (
            target("Gateway", "web"),
            [
                target("GatewayConfig", "web", sectionName="team/web/http"),
                target("GatewayConfig", "web", sectionName="team/web/https"),
            ],
        ),
        (target("Gateway", "web", sectionName="http"), [target("GatewayConfig", "web", sectionName="team/web/http")]),
    ],
)
def test_a_policy_is_attached_to_what_the_directory_has(ref: dict[str, str], expected: list[dict[str, str]]) -> None:
    result = compiled({"targetRefs": [ref], "rules": RULES})
    assert spec_of(result) == {"targetRefs": expected, "rules": RULES}
    assert set(conditions(result).values()) == {("True", "Accepted"), ("True", "ResolvedRefs"), ("True", "Programmed")}


@pytest.mark.parametrize(
    "ref",
    [
        target("ModelRoute", "gone"),
        target("Gateway", "gone"),
        target("Gateway", "web", sectionName="gone"),
        target("GatewayConfig", "another"),
        target("GatewayConfig", "config", sectionName="gone"),
    ],
)
def test_a_target_that_is_not_there_is_said_and_the_others_are_protected(ref: dict[str, str]) -> None:
    alone = compiled({"targetRefs": [ref], "rules": RULES})
    assert alone.document is None
    assert conditions(alone)["ResolvedRefs"] == conditions(alone)["Programmed"] == ("False", "TargetNotFound")
    both = compiled({"targetRefs": [ref, target("ModelRoute", "llama")], "rules": RULES})
    assert spec_of(both)["targetRefs"] == [target("ModelRoute", "llama")]
    assert conditions(both)["ResolvedRefs"] == ("False", "TargetNotFound")
    assert conditions(both)["Programmed"] == ("True", "Programmed")


@pytest.mark.parametrize(
    "broken",
    [
        {"rules": [{"from": [{}]}]},
        {"rules": [{"models": ["a*b"]}]},
        {"rules": "all"},
        {"rules": RULES, "unknown": 1},
    ],
)
def test_an_invalid_policy_denies_what_it_is_attached_to(broken: dict[str, Any]) -> None:
    result = compiled({"targetRefs": [target("ModelRoute", "llama")], **broken})
    assert spec_of(result) == {"targetRefs": [target("ModelRoute", "llama")], "rules": []}
    assert conditions(result)["Accepted"] == ("False", "Invalid")
    (accepted, *_) = result.status.conditions
    assert "until it is mended, nobody may use its targets" in accepted.message


@pytest.mark.parametrize("refs", [{"targetRefs": "everything"}, {"targetRefs": [{"kind": "Pod", "name": "x"}]}, {}])
def test_an_invalid_policy_without_readable_targets_denies_its_namespace(refs: dict[str, Any]) -> None:
    result = compiled({**refs, "rules": "all"})
    assert spec_of(result) == {"rules": []}
    (accepted, *_) = result.status.conditions
    assert "nobody may use any model of the namespace team" in accepted.message


def test_a_wrong_group_does_not_make_a_target_unprotected() -> None:
    result = compiled({"targetRefs": [{**target("ModelRoute", "llama"), "group": "example.com"}], "rules": RULES})
    assert spec_of(result) == {"targetRefs": [target("ModelRoute", "llama")], "rules": []}


def test_a_policy_without_targets_is_about_its_namespace() -> None:
    assert spec_of(compiled({"rules": RULES})) == {"rules": RULES}


@pytest.mark.parametrize(
    ("asked", "tenants", "has_policies", "served"),
    [
        ("Open", [], False, "Open"),
        ("Open", [], True, "Close"),
        ("Open", [{"name": "a", "models": ["x"]}], False, "Close"),
        ("Close", [], True, "Close"),
        (None, [], True, None),
    ],
)
def test_failure_mode_open_is_not_served_where_somebody_may_not_use_everything(
    asked: str | None, tenants: list[dict[str, Any]], *, has_policies: bool, served: str | None
) -> None:
    spec = {"tenants": tenants} | ({} if asked is None else {"failureMode": asked})
    mode, why = failure_mode(spec, msgspec.convert(spec, GatewayConfigSpec), has_policies=has_policies)
    assert mode == served
    assert bool(why) == (mode != asked)


def test_a_policy_of_a_route_whose_requests_nobody_decides_says_so() -> None:
    shop, chat = target("HTTPRoute", "shop"), target("HTTPRoute", "chat")
    alone = compiled({"targetRefs": [shop], "rules": RULES})
    assert conditions(alone)["ResolvedRefs"] == conditions(alone)["Programmed"] == ("False", "NoModelBackend")
    assert "no policy is asked there" in alone.status.conditions[1].message
    assert spec_of(alone)["targetRefs"] == [shop], "it holds once the route goes to a model"
    both = conditions(compiled({"targetRefs": [shop, chat], "rules": RULES}))
    assert (both["ResolvedRefs"][1], both["Programmed"][0]) == ("NoModelBackend", "True")
