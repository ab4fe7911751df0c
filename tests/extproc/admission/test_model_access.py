# SPDX-License-Identifier: Apache-2.0
"""Who may use which models: the decision, by hand and against a plain reading of the documents."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.identity import CallerIdentity, IdentityResolver
from extproc.admission.model_access import AccessRequest, Authorizer
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TENANTS, USERS, KEYS = ("acme", "bell", "anonymous"), ("alice", "bob", ""), ("web", "batch", "gone", "")
MODELS, BASES = ("llama", "llama-70b", "sql", "law-sql"), ("llama", "qwen")
SERVERS, ROUTES = ("default/a", "default/b", "other/a"), ("default/r", "other/r", "")
HTTP_ROUTES, LISTENERS = ("default/h", "grpc:default/h", ""), ("one", "two")
PATTERNS = ("llama", "llama*", "*sql", "*", "nothing", "sql*")


def access_to(*policies: tuple[str, Mapping[str, Any]], **gateway: object) -> Authorizer:
    """By policies, each with its namespace and its spec, in a directory that has what they are attached to."""
    documents = [
        _document("GatewayConfig", "default", "g", {"listeners": [_listener(one) for one in LISTENERS], **gateway})
    ]
    for key in SERVERS:
        namespace, name = key.split("/")
        documents.append(
            _document("ModelServer", namespace, name, {"model": "m", "endpoints": [{"address": "10.0.0.1:1"}]})
        )
    for namespace in ("default", "other"):
        rules = [{"targetModels": [{"modelServerName": "a"}]}]
        documents.append(_document("ModelRoute", namespace, "r", {"modelName": f"{namespace}-r", "rules": rules}))
    documents.extend(
        {**_document(kind, "default", "h", {}), "apiVersion": "gateway.networking.k8s.io/v1"}
        for kind in ("HTTPRoute", "GRPCRoute")
    )
    for number, (namespace, spec) in enumerate(policies):
        documents.append(_document("ModelAccessPolicy", namespace, f"p{number}", spec))
    return Authorizer(load_snapshot({"all.json": json.dumps(documents).encode()}))


def _document(kind: str, namespace: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _listener(name: str) -> dict[str, object]:
    return {"name": name, "address": "127.0.0.1:8080", "hostname": f"{name}.example"}


def target(kind: str, name: str, **more: str) -> dict[str, str]:
    group = "gateway.networking.k8s.io" if kind in ("HTTPRoute", "GRPCRoute") else "attache.dev"
    return {"kind": kind, "name": name, "group": group, **more}


def wish(model: str | None, **fields: str) -> AccessRequest:
    return AccessRequest(
        **{"model": model, "base_model": "llama", "server": "default/a", "route": "default/r", **fields}
    )


ACME, BELL = CallerIdentity("acme", "alice"), CallerIdentity("bell")


def test_without_policies_and_lists_everybody_may_do_everything() -> None:
    access = access_to()
    assert not access.restricts
    assert access.may_use(BELL, wish("llama"))
    assert access.may_use_everything(BELL)


def test_what_no_rule_allows_is_denied() -> None:
    access = access_to(("default", {"rules": [{"from": [{"tenants": ["acme"]}], "models": ["llama"]}]}))
    assert access.may_use(ACME, wish("llama"))
    assert not access.may_use(ACME, wish("sql"))
    assert not access.may_use(BELL, wish("llama"))


def test_a_rule_that_denies_wins() -> None:
    rules = [{"models": ["*"]}, {"action": "Deny", "from": [{"tenants": ["acme"]}], "models": ["llama-*"]}]
    access = access_to(("default", {"rules": rules}))
    assert access.may_use(ACME, wish("llama"))
    assert not access.may_use(ACME, wish("llama-70b"))
    assert access.may_use(BELL, wish("llama-70b"))


def test_a_policy_without_rules_lets_nobody_in() -> None:
    access = access_to(("default", {}))
    assert not access.may_use(ACME, wish("llama"))
    assert access.may_use(ACME, wish("llama", server="other/a", route="other/r"))


def test_policies_of_one_target_add_up_and_those_of_two_must_agree() -> None:
    of_the_route = [
        ("default", {"targetRefs": [target("ModelRoute", "r")], "rules": [{"models": [one]}]}) for one in MODELS
    ]
    of_the_gateway = ("default", {"targetRefs": [target("GatewayConfig", "g")], "rules": [{"models": ["llama"]}]})
    assert access_to(*of_the_route).may_use(ACME, wish("sql"))
    both = access_to(*of_the_route, of_the_gateway)
    assert both.may_use(ACME, wish("llama"))
    assert not both.may_use(ACME, wish("sql"))


@pytest.mark.parametrize(
    ("refs", "fields", "expected"),
    [
        (target("ModelRoute", "r"), {}, False),
        (target("ModelRoute", "r"), {"route": "other/r"}, True),
        (target("ModelServer", "a"), {"route": ""}, False),
        (target("ModelServer", "a"), {"server": "default/b"}, True),
        (target("HTTPRoute", "h"), {"http_route": "default/h"}, False),
        (target("HTTPRoute", "h"), {}, True),
        (target("HTTPRoute", "h"), {"http_route": "grpc:default/h"}, True),
        (target("GRPCRoute", "h"), {"http_route": "grpc:default/h"}, False),
        (target("GRPCRoute", "h"), {"http_route": "default/h"}, True),
        (target("GatewayConfig", "g"), {}, False),
        (target("GatewayConfig", "g", sectionName="one"), {"listener": "one"}, False),
        (target("GatewayConfig", "g", sectionName="one"), {"listener": "two"}, True),
    ],
)
def test_a_policy_is_about_what_it_is_attached_to(
    refs: Mapping[str, str], fields: dict[str, str], expected: bool
) -> None:
    access = access_to(("default", {"targetRefs": [refs]}))
    assert access.may_use(ACME, wish("llama", **fields)) == expected


def test_servers_are_asked_for_as_well_as_names() -> None:
    rules = [{"models": ["llama"]}, {"action": "Deny", "servers": ["default/b"]}]
    access = access_to(("default", {"rules": rules}))
    assert access.may_use(ACME, wish("llama"))
    assert not access.may_use(ACME, wish("llama", server="default/b"))


def test_a_base_model_has_all_its_adapters() -> None:
    access = access_to(("default", {"rules": [{"baseModels": ["llama"], "models": ["sql"]}]}))
    assert access.may_use(ACME, wish("law-sql"))
    assert access.may_use(ACME, wish("sql", base_model="qwen"))
    assert not access.may_use(ACME, wish("law-sql", base_model="qwen"))


def test_claims_are_one_value_or_a_list() -> None:
    callers = {"claims": [{"name": "groups", "values": ["ml", "ops"]}, {"name": "org.unit", "values": ["lab"]}]}
    access = access_to(("default", {"rules": [{"from": [callers]}]}))
    assert access.claims == {"groups", "org.unit"}
    both = {"groups": frozenset({"sales", "ops"}), "org.unit": frozenset({"lab"})}
    assert access.may_use(CallerIdentity("acme", claims=both), wish("llama"))
    assert not access.may_use(CallerIdentity("acme", claims={"groups": frozenset({"ops"})}), wish("llama"))
    assert not access.may_use(ACME, wish("llama"))


def test_a_name_that_could_not_be_read_gets_round_nothing() -> None:
    allowed_all = access_to(("default", {"rules": [{}, {"action": "Deny", "models": ["llama-70b"]}]}))
    assert allowed_all.may_use(ACME, wish("llama"))
    assert not allowed_all.may_use(ACME, wish(None))
    allowed_one = access_to(("default", {"rules": [{"models": ["llama"]}]}))
    assert not allowed_one.may_use(ACME, wish(None))
    of_a_route = access_to(("default", {"targetRefs": [target("ModelRoute", "r")], "rules": [{"models": ["llama"]}]}))
    assert of_a_route.may_use(ACME, wish("sql", route=""))
    assert not of_a_route.may_use(ACME, wish(None, route=""))
    assert of_a_route.may_use(ACME, wish(None, route="", server="default/b"))
    denied_elsewhere = access_to(("default", {"rules": [{}, {"action": "Deny", "servers": ["default/b"]}]}))
    assert denied_elsewhere.may_use(ACME, wish(None))


def test_long_names_are_compared_as_callers_have_them() -> None:
    long = "x" * 300
    access = access_to(("default", {"rules": [{"from": [{"users": [long]}]}]}))
    identities = IdentityResolver(load_snapshot({}))
    assert access.may_use(identities.resolve_subject({"x-attache-user": long}), wish("llama"))
    assert not access.may_use(identities.resolve_subject({"x-attache-user": long + "y"}), wish("llama"))


RESTRICTED = {
    "authentication": {
        "apiKeys": [
            {"name": "acme-1", "key": "sk-acme-secret", "tenant": "acme", "user": "alice"},
            {"name": "acme-2", "key": "sk-acme-second", "tenant": "acme", "models": ["sql", "law"]},
        ]
    },
    "tenants": [
        {"name": "acme", "models": ["chat", "sql"]},
        {"name": "anonymous", "models": ["chat"]},
        {"name": "bell"},
    ],
}


@pytest.mark.parametrize(
    ("headers", "models"),
    [
        ({"x-attache-client": "acme-1"}, {"chat", "sql"}),
        ({"x-attache-client": "acme-2"}, {"sql"}),
        ({"x-attache-client": "of a configuration that is not here"}, set()),
        ({"x-attache-tenant": "acme"}, {"chat", "sql"}),
        ({"x-attache-tenant": "bell"}, {"chat", "sql", "law"}),
        ({"x-attache-tenant": "cord"}, {"chat", "sql", "law"}),
        ({}, {"chat"}),
    ],
)
def test_a_caller_has_the_models_of_both_its_key_and_its_tenant(headers: dict[str, str], models: set[str]) -> None:
    snapshot = load_snapshot({"a.json": json.dumps(_document("GatewayConfig", "default", "g", RESTRICTED)).encode()})
    access, subject = Authorizer(snapshot), IdentityResolver(snapshot).resolve_subject(headers)
    assert access.restricts
    assert {model for model in ("chat", "sql", "law") if access.may_use(subject, wish(model))} == models
    assert access.may_use_everything(subject) == (len(models) == 3)


def test_without_restrictions_even_an_unknown_key_may_use_every_model() -> None:
    gateway = {"authentication": {"apiKeys": [RESTRICTED["authentication"]["apiKeys"][0]]}}  # type: ignore[index]
    access = access_to(**gateway)
    assert access.may_use(CallerIdentity("anonymous", api_key="unknown"), wish("any"))


# A plain reading of the documents, rule by rule and without any index.


def _fits(pattern: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _describes(callers: Mapping[str, Any], subject: CallerIdentity) -> bool:
    if "tenants" in callers and subject.tenant not in callers["tenants"]:
        return False
    if "users" in callers and subject.user not in callers["users"]:
        return False
    if "apiKeys" in callers and subject.api_key not in callers["apiKeys"]:
        return False
    claims = callers.get("claims", [])
    return all(set(one["values"]) & set(subject.claims.get(one["name"], ())) for one in claims)


def _covers(rule: Mapping[str, Any], subject: CallerIdentity, asked: AccessRequest) -> bool:
    callers = rule.get("from", [])
    if callers and not any(_describes(one, subject) for one in callers):
        return False
    if "servers" in rule and not any(_fits(one, asked.server) for one in rule["servers"]):
        return False
    if "models" not in rule and "baseModels" not in rule:
        return True
    if any(_fits(one, asked.base_model) for one in rule.get("baseModels", ())):
        return True
    if asked.model is None:
        return bool(rule.get("models")) and (rule.get("action") == "Deny" or "*" in rule["models"])
    return any(_fits(one, asked.model) for one in rule.get("models", ()))


def _is_about(namespace: str, ref: Mapping[str, str], asked: AccessRequest) -> bool:
    key = f"{namespace}/{ref['name']}"
    match ref["kind"]:
        case "GatewayConfig":
            return ref.get("sectionName") in (None, asked.listener)
        case "ModelRoute":
            # a request that cannot be read may ask for the model of any route that leads to its server, here always `a`
            return asked.route == key or (asked.model is None and asked.server == f"{namespace}/a")
        case "ModelServer":
            return asked.server == key
        case "GRPCRoute":
            return asked.http_route == f"grpc:{key}"
        case _:
            return asked.http_route == key


def reads_as_allowed(
    policies: Sequence[tuple[str, Mapping[str, Any]]], subject: CallerIdentity, asked: AccessRequest
) -> bool:
    by_target: dict[str, list[Mapping[str, Any]]] = {}
    for namespace, spec in policies:
        for ref in spec.get("targetRefs", []):
            if _is_about(namespace, ref, asked):
                name = "" if ref["kind"] == "GatewayConfig" else f"{namespace}/{ref['name']}"
                by_target.setdefault(f"{ref['kind']} {name} {ref.get('sectionName')}", []).append(spec)
        of_namespace = any(one.startswith(f"{namespace}/") for one in (asked.server, asked.route))
        if "targetRefs" not in spec and of_namespace:
            by_target.setdefault(f"namespace {namespace}", []).append(spec)
    for specs in by_target.values():
        rules = [rule for spec in specs for rule in spec.get("rules", []) if _covers(rule, subject, asked)]
        if not rules or any(rule.get("action") == "Deny" for rule in rules):
            return False
    return True


def _some(values: Sequence[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from([one for one in values if one]), min_size=1, max_size=2, unique=True)


CLAIMS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["groups", "role"]), "values": _some(["ml", "ops"])}),
    min_size=1,
    max_size=2,
)
CALLERS = st.fixed_dictionaries(
    {}, optional={"tenants": _some(TENANTS), "users": _some(USERS), "apiKeys": _some(KEYS), "claims": CLAIMS}
).filter(bool)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "action": st.sampled_from(["Allow", "Deny"]),
        "from": st.lists(CALLERS, min_size=1, max_size=2),
        "models": _some(PATTERNS),
        "baseModels": _some(PATTERNS),
        "servers": _some(["default/a", "default/*", "*/a", "*"]),
    },
)
REFS = st.sampled_from(
    [
        target("ModelRoute", "r"),
        target("ModelServer", "a"),
        target("HTTPRoute", "h"),
        target("GRPCRoute", "h"),
        target("GatewayConfig", "g"),
        target("GatewayConfig", "g", sectionName="one"),
    ]
)
POLICIES = st.lists(
    st.tuples(
        st.just("default"),
        st.fixed_dictionaries(
            {"rules": st.lists(RULES, max_size=3)},
            optional={"targetRefs": st.lists(REFS, min_size=1, max_size=2, unique_by=str)},
        ),
    ),
    max_size=3,
)
SUBJECTS = st.builds(
    CallerIdentity,
    tenant=st.sampled_from(TENANTS),
    user=st.sampled_from(USERS),
    # keys that the configuration does not know are denied beforehand; see above
    api_key=st.just(""),
    claims=st.dictionaries(st.sampled_from(["groups", "role"]), st.frozensets(st.sampled_from(["ml", "ops", "hr"]))),
)
WISHES = st.builds(
    AccessRequest,
    model=st.sampled_from((*MODELS, None)),
    base_model=st.sampled_from(BASES),
    server=st.sampled_from(SERVERS),
    route=st.sampled_from(ROUTES),
    http_route=st.sampled_from(HTTP_ROUTES),
    listener=st.sampled_from(LISTENERS),
)


@settings(max_examples=150, deadline=None)
@given(policies=POLICIES, subject=SUBJECTS, asked=st.lists(WISHES, min_size=1, max_size=20))
def test_the_decision_is_that_of_a_plain_reading(
    policies: list[tuple[str, dict[str, Any]]], subject: CallerIdentity, asked: list[AccessRequest]
) -> None:
    access = access_to(*policies)
    decided = [access.may_use(subject, one) for one in asked]
    assert decided == [reads_as_allowed(policies, subject, one) for one in asked]
    if access.may_use_everything(subject):
        assert all(decided)
