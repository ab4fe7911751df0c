# SPDX-License-Identifier: Apache-2.0
"""Virtual keys in a directory: API keys of the GatewayConfig, with what is theirs alone."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from extproc.admission.budget_recovery import UsageRollupRow
from extproc.admission.identity import CacheIsolation, Caller, IdentityResolver
from extproc.admission.rate_limits import RequestUsage
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import Snapshot, missing_redis_warnings
from extproc.cli.check import budgets_without_identity, mixed_currencies
from extproc.core.flow_control import AdmissionController
from tests.controller.gateway.compile.test_gateway_config_credentials import digest

WHEN = "2026-11-23T12:00:00Z"
NOON_S = 1_795_435_200.0
OPS = {"name": "ops", "tenant": "ops", "key": "sk-ops-0123"}


def key(name: str = "web", number: int = 1, **fields: object) -> dict[str, Any]:
    own = {"id": f"{number:012x}", "name": name, "tenant": "acme", "keySHA256": digest(f"sk-{number}")}
    return {**own, "createdAt": WHEN, **fields}


def document(kind: str, spec: object) -> bytes:
    plain = {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": "a"}, "spec": spec}
    return json.dumps(plain).encode()


def snapshot(*keys: dict[str, Any], gateway: dict[str, Any] | None = None, **store: object) -> Snapshot:
    spec = {"authentication": {"apiKeys": [OPS], "virtualKeys": {}}, **(gateway or {})}
    files = {"g.json": document("GatewayConfig", spec), "keys.json": document("KeyStore", {"keys": keys, **store})}
    return load_snapshot(files)


def api_keys(given: Snapshot) -> list[tuple[str, str | None]]:
    assert given.gateway.authentication is not None
    return [(one.name, one.digest) for one in given.gateway.authentication.api_keys]


def test_keys_of_the_store_stand_behind_those_of_the_gateway() -> None:
    found = snapshot(key(), key("gone", 2, revokedAt=WHEN))
    assert api_keys(found) == [("ops", digest("sk-ops-0123")), ("web", digest("sk-1"))]


def test_while_a_key_is_rotated_two_digests_are_one_caller() -> None:
    found = snapshot(key(previous={"keySHA256": digest("sk-0"), "until": WHEN}))
    assert api_keys(found)[1:] == [("web", digest("sk-1")), ("web", digest("sk-0"))]
    caller = IdentityResolver(found).resolve_caller({"x-attache-client": "web"}, server="default/chat")
    assert (caller.tenant, caller.api_key, caller.key_id) == ("acme", "web", f"{1:012x}")
    other = IdentityResolver(found).resolve_caller({"x-attache-client": "ops"}, server="default/chat")
    assert other.key_id == digest("sk-ops-0123")[:12]


@pytest.mark.parametrize(
    ("gateway", "keys", "message"),
    [
        ({"failureMode": "Open"}, [], "virtualKeys"),
        ({"authentication": {"apiKeys": [OPS]}}, [key()], "are used by nobody; write authentication: {virtualKeys"),
        ({}, [key("ops")], "apiKeys of the GatewayConfig have a 'ops', too"),
        ({}, [key(keySHA256=digest("sk-ops-0123"))], "apiKeys of the GatewayConfig have this key, too"),
        ({}, [key(), key("other")], "spec.keys[1].id: another key has or had it"),
        ({}, [key(keySHA256="sk-0123456789")], "is no SHA-256; write 64 hexadecimal digits"),
        ({}, [key(rateLimits=[{}])], "spec.keys[0].rateLimits[0]: limits nothing"),
        ({}, [key(budgets=[{"window": "Day", "max": {"tokens": 1}}] * 2)], "spec.keys[0].budgets[1].window"),
        ({"authentication": {"virtualKeys": {"secret": "keys"}}}, [], "is in a Secret, which a directory has none of"),
        ({"authentication": {"virtualKeys": {}, "jwt": []}, "listen": "nowhere"}, [], "spec.listen"),
    ],
)
def test_mistakes_say_what_to_do_and_show_no_secret(
    gateway: dict[str, Any], keys: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        snapshot(*keys, gateway=gateway)
    assert message in str(caught.value)
    assert "sk-" not in str(caught.value)


def test_keys_are_not_called_unused_where_the_gateway_cannot_be_read() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        snapshot(key(), gateway={"budgets": [{"name": "a", "window": "Day", "max": {"monye": "1"}}]})
    (mistake,) = caught.value.mistakes
    assert "did you mean 'money'?" in str(mistake)


def test_a_directory_has_one_store() -> None:
    gateway = document("GatewayConfig", {"authentication": {"virtualKeys": {}}})
    store = document("KeyStore", {})
    with pytest.raises(ConfigInvalid, match="a second KeyStore"):
        load_snapshot({"g.json": gateway, "a.json": store, "b.json": store})
    # nobody is let in where there is none
    assert api_keys(load_snapshot({"g.json": gateway})) == []


def test_a_new_key_leaves_the_caches_of_its_tenant_warm() -> None:
    before, after = (CacheIsolation(snapshot(*keys, cacheSecret="s" * 32)) for keys in ([key()], [key(), key("b", 2)]))
    assert before._secret == after._secret == b"s" * 32
    assert before._keys == after._keys
    own = snapshot(key(), gateway={"cacheSecret": "o" * 32}, cacheSecret="s" * 32)
    assert CacheIsolation(own)._secret == b"o" * 32


def test_a_key_is_charged_by_its_own_limits_and_budgets_alone() -> None:
    limits = {"rateLimits": [{"requests": 60}], "budgets": [{"window": "Day", "max": {"money": 2, "tokens": 9}}]}
    found = snapshot(key(**limits), key("twin", 2, **limits), key("free", 3))
    admission = AdmissionController(rng=random.Random(0))
    admission.apply(found, {})
    assert admission.has_limits
    budgets = admission.budgets_of_route("default/any")
    # equal budgets are one, with an account for each key
    ((budget,),) = budgets.budget_groups()
    usage = RequestUsage(1.0, 1.0)
    charged = {
        name: [one.key for one in budgets.charges(Caller("acme", api_key=name), usage, NOON_S)]
        for name in ("web", "twin", "free", "ops", "")
    }
    assert {name: len(keys) for name, keys in charged.items()} == {"web": 2, "twin": 2, "free": 0, "ops": 0, "": 0}
    assert not set(charged["web"]) & set(charged["twin"])
    assert list(admission.key_limits) == ["web", "twin"]
    # rows tell what each of them has used before a start
    (query,) = admission.usage_queries(NOON_S)
    assert (query.window, query.dimensions) == (budget.current_window(NOON_S), {"tenant", "key"})
    spent = admission.make_remaining_budgets(query, NOON_S)
    spent.add_row(UsageRollupRow(tenant="acme", key="web", input_tokens=4))
    spent.add_row(UsageRollupRow(tenant="acme", key="free", input_tokens=5))
    local, shared = spent.levels()
    levels = {one.key: one.limit.capacity - one.level for one in local if one.limit.capacity == 9}
    assert (list(levels.values()), set(levels) < set(charged["web"]), shared) == ([4.0], True, [])


def test_checks_know_the_budgets_of_keys() -> None:
    limits = {"budgets": [{"window": "Day", "max": {"money": 2}, "currency": "EUR", "scope": "Global"}]}
    found = snapshot(key(**limits), key("two", 2, **limits))
    assert missing_redis_warnings(found) == [
        "2 API keys: own limits are Global, and there is no --redis: every machine grants them by itself"
    ]
    assert list(budgets_without_identity(found)) == []
    server = {"model": "m", "endpoints": [{"address": "10.0.0.1:8000"}], "pricing": [{"perMillion": {"input": 1}}]}
    priced = load_snapshot(
        {
            "g.json": document("GatewayConfig", {"authentication": {"virtualKeys": {}}}),
            "k.json": document("KeyStore", {"keys": [key(**limits)]}),
            "s.json": document("ModelServer", server),
        }
    )
    (note,) = mixed_currencies(priced)
    begin = "API keys: the daily budget of a key itself is in EUR, and prices of its ModelServers are in USD"
    assert note.startswith(begin)
