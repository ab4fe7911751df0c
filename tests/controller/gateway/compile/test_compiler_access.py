# SPDX-License-Identifier: Apache-2.0
"""Keys of Secrets and ModelAccessPolicies of a cluster, all the way to what extproc decides by the directory."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from controller.gateway.compile.compiler import GATEWAY_FILE, Compiler, CompileResult
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
from controller.kube.api_resources import key_of
from extproc.admission.identity import CallerIdentity
from extproc.admission.model_access import AccessRequest, Authorizer
from extproc.api.config_loader import load_snapshot
from tests.gateway_objects import gateway, gateway_class
from tests.kube_objects import Object, pod, resource, route, secret, server

CONFIG = "default/config"
KEYS = {"authentication": {"apiKeySecrets": [{"name": "keys", "tenant": "acme"}]}}
ACME, BELL = CallerIdentity("acme"), CallerIdentity("bell")
TO_ACME: list[dict[str, Any]] = [{"from": [{"tenants": ["acme"]}]}]
SERVED = (server(), pod("p"), route())


def compiled(*things: Object, config: str | None = None, **settings: Any) -> CompileResult:  # noqa: ANN401 - of GatewayApiSettings
    compiler = Compiler(config, GatewayApiSettings(**settings))
    for thing in things:
        compiler.update_object(thing["kind"], key_of(thing), thing)
    return compiler.compile()


def config(**spec: object) -> Object:
    return resource("GatewayConfig", "config", dict(spec))


def policy(*refs: dict[str, str], rules: object = TO_ACME, namespace: str = "default") -> Object:
    spec = {"rules": rules} | ({"targetRefs": list(refs)} if refs else {})
    return resource("ModelAccessPolicy", "p", spec, namespace=namespace)


def may(outcome: CompileResult, subject: CallerIdentity, **wish: str) -> bool:
    """What extproc decides by the directory on a request for the model ``llama``."""
    asked = {"base_model": "llama", "server": "default/llama", "route": "default/llama", **wish}
    return Authorizer(load_snapshot(outcome.files)).may_use(subject, AccessRequest("llama", **asked))


def said(outcome: CompileResult, kind: str, key: str, type_: str) -> tuple[str, str]:
    (found,) = (one for one in outcome.statuses[kind, key].conditions if one.type == type_)
    return found.reason, found.message


def test_keys_of_a_secret_are_pointed_to_and_come_as_digests() -> None:
    outcome = compiled(config(**KEYS), secret("keys", {"web": "sk-0123456789"}), config=CONFIG)
    assert outcome.pointers == {ReferencedObjectKey("Secret", "default/keys")}
    text = b"".join(outcome.files.values())
    assert b"sk-0123456789" not in text
    authentication = load_snapshot(outcome.files).gateway.authentication
    assert authentication is not None
    (key,) = authentication.api_keys
    assert (key.name, key.tenant, key.digest) == ("web", "acme", sha256(b"sk-0123456789").hexdigest())


def test_a_secret_that_goes_takes_its_keys_along_and_lets_nobody_in() -> None:
    compiler = Compiler(CONFIG)
    for thing in (config(**KEYS), secret("keys", {"web": "sk-0123456789"})):
        compiler.update_object(thing["kind"], key_of(thing), thing)
    before = compiler.compile()
    compiler.update_object("Secret", "default/keys", None)
    outcome = compiler.compile()
    authentication = load_snapshot(outcome.files).gateway.authentication
    assert authentication is not None
    assert [key.name for key in authentication.api_keys] == ["none"]
    assert outcome.files[GATEWAY_FILE] != before.files[GATEWAY_FILE]
    reason, message = said(outcome, "GatewayConfig", CONFIG, "ResolvedRefs")
    assert (reason, message) == ("SecretNotUsable", "there is no Secret keys; its keys are refused")


def test_a_secret_of_that_name_elsewhere_is_another() -> None:
    outcome = compiled(config(**KEYS), secret("keys", {"web": "sk-0123456789"}, namespace="other"), config=CONFIG)
    assert said(outcome, "GatewayConfig", CONFIG, "ResolvedRefs")[0] == "SecretNotUsable"


@pytest.mark.parametrize(
    "refs",
    [(), ({"kind": "ModelRoute", "name": "llama"},), ({"kind": "ModelServer", "name": "llama"},)],
    ids=["namespace", "route", "server"],
)
def test_a_policy_holds_where_it_is_attached(refs: tuple[dict[str, str], ...]) -> None:
    outcome = compiled(*SERVED, policy(*refs))
    assert may(outcome, ACME)
    assert not may(outcome, BELL)
    assert said(outcome, "ModelAccessPolicy", "default/p", "Programmed")[0] == "Programmed"


def test_a_policy_of_another_namespace_concerns_nobody_here() -> None:
    outcome = compiled(*SERVED, policy(namespace="other", rules=[]))
    assert may(outcome, BELL)


def test_a_policy_of_a_gateway_is_about_its_listeners() -> None:
    ref = {"kind": "Gateway", "name": "web", "group": "gateway.networking.k8s.io"}
    outcome = compiled(
        *SERVED, gateway_class(), gateway(), gateway("other"), policy(ref), bind=("127.0.0.1", "127.0.0.2")
    )
    names = [one.name for one in load_snapshot(outcome.files).gateway.listeners]
    ours = [name for name in names if "web" in name]
    assert (len(names), len(ours)) == (2, 1)
    for name in names:
        assert may(outcome, ACME, listener=name)
        assert may(outcome, BELL, listener=name) == (name not in ours)


def test_an_invalid_policy_lets_nobody_in_and_concerns_nothing_else() -> None:
    ref = {"kind": "ModelRoute", "name": "llama"}
    outcome = compiled(*SERVED, route("free", "llama"), policy(ref, rules=[{"models": ["a*b"]}]))
    assert not may(outcome, ACME)
    assert may(outcome, ACME, route="default/free")
    reason, message = said(outcome, "ModelAccessPolicy", "default/p", "Accepted")
    assert reason == "Invalid"
    assert "rules[0].models[0]" in message
    assert "nobody may use its targets" in message


def test_a_policy_whose_target_comes_later_holds_from_its_first_moment() -> None:
    compiler = Compiler()
    ref = {"kind": "ModelRoute", "name": "llama"}
    for thing in (server(), pod("p"), policy(ref)):
        compiler.update_object(thing["kind"], key_of(thing), thing)
    before = compiler.compile()
    assert said(before, "ModelAccessPolicy", "default/p", "ResolvedRefs")[0] == "TargetNotFound"
    assert not load_snapshot(before.files).access_policies
    compiler.update_object("ModelRoute", "default/llama", route())
    after = compiler.compile()
    assert not may(after, BELL)
    # while the directory is being written, the policy is there first
    names = list(after.files)
    assert names.index("modelaccesspolicy.default.p.json") < names.index("modelroute.default.llama.json")


def test_failure_mode_open_is_not_served_beside_a_policy() -> None:
    alone = compiled(*SERVED, config(failureMode="Open"), config=CONFIG)
    assert load_snapshot(alone.files).gateway.failure_mode == "Open"
    assert alone.statuses["GatewayConfig", CONFIG].fields == {"failureMode": "Open"}
    beside = compiled(*SERVED, config(failureMode="Open"), policy(), config=CONFIG)
    assert load_snapshot(beside.files).gateway.failure_mode == "Close"
    assert beside.statuses["GatewayConfig", CONFIG].fields == {"failureMode": "Close"}
    assert "so Close is served" in said(beside, "GatewayConfig", CONFIG, "Accepted")[1]
