# SPDX-License-Identifier: Apache-2.0
"""Cache salts: the same on every replica, different for everybody who must not share."""

from __future__ import annotations

import json

from extproc.admission.identity import CacheIsolation, Caller
from extproc.api.config_loader import load_snapshot
from extproc.request.body_parser import parse_body
from extproc.wire_names import Api

KEYS = """
  authentication:
    apiKeys: [{name: a, key: acme-secret, tenant: acme}, {name: b, key: other-secret, tenant: other}]
"""


def salt(
    gateway: str = KEYS,
    *,
    server: str = "",
    caller: Caller | None = None,
    api: Api = Api.CHAT,
    header: str = "red",
    **fields: object,
) -> str | None:
    text = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec: {{model: m, endpoints: [], {server}}}
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: g}}
spec:
  listen: 127.0.0.1:1
{gateway}
"""
    snapshot = load_snapshot({"a.yaml": text.encode()})
    body = json.dumps({"model": "m", "messages": [], "input": "i", **fields}).encode()
    caller = caller or Caller(tenant="acme", user="ann")
    return CacheIsolation(snapshot).salt(parse_body(api, body), snapshot.servers[0].spec, caller, {"x-team": header})


def test_authenticated_tenants_are_apart_by_default_and_others_share() -> None:
    assert salt() == salt(caller=Caller(tenant="acme", user="bob"))
    assert salt() != salt(caller=Caller(tenant="other"))
    assert salt("") is None


def test_a_tenants_key_is_its_own_or_all_replicas_secret() -> None:
    rotated = KEYS.replace("other-secret", "another-secret")
    other = Caller(tenant="other")
    assert salt(rotated) == salt()
    assert salt(rotated, caller=other) != salt(caller=other)
    shared = "  cacheSecret: a secret of all replicas\n"
    assert salt(rotated + shared, caller=other) == salt(KEYS + shared, caller=other)
    assert salt(KEYS + shared) != salt()


def test_a_server_may_divide_otherwise_than_its_gateway() -> None:
    ann, bob = Caller(tenant="acme", user="ann"), Caller(tenant="acme", user="bob")
    assert salt(server="cacheIsolation: User", caller=ann) != salt(server="cacheIsolation: User", caller=bob)
    assert salt(server="cacheIsolation: Shared") is None
    for field in ("cacheIsolation: 'Header:X-Team'", "cacheScopeHeader: X-Team"):
        assert salt("", server=field) != salt("", server=field, header="blue")
        assert salt("", server=field) is not None


def test_a_clients_own_salt_divides_its_part_where_it_may_and_counts_nowhere_else() -> None:
    allowed = "allowedFields: [cache_salt]"
    assert salt(cache_salt="mine") == salt()
    assert salt(server=allowed, cache_salt="mine") not in {salt(server=allowed), "mine"}
    assert salt("", cache_salt="mine") is None
    assert salt("", server=allowed, cache_salt="mine") == "mine"


def test_embeddings_carry_no_salt() -> None:
    assert salt(api=Api.EMBEDDINGS) is None
