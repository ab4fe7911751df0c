# SPDX-License-Identifier: Apache-2.0
"""The caller: only trusted headers and the configuration count."""

from __future__ import annotations

import pytest

from extproc.admission.identity import ANONYMOUS_CALLER, IdentityResolver
from extproc.api.config_loader import load_snapshot

CONFIG = b"""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  authentication:
    apiKeys: [{name: acme-1, key: sk-acme-secret, tenant: acme, user: alice}]
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {name: urgent}
spec: {priority: 100, poolRef: {name: llama}}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: sheddable, namespace: models}
spec: {priority: -5}
"""


@pytest.fixture
def identities() -> IdentityResolver:
    return IdentityResolver(load_snapshot({"all.yaml": CONFIG}))


def test_requests_without_identity_are_one_tenant(identities: IdentityResolver) -> None:
    assert identities.resolve_caller({}, server="default/chat") == ANONYMOUS_CALLER
    assert ANONYMOUS_CALLER.tenant == "anonymous"


def test_an_api_key_overrides_identity_headers(identities: IdentityResolver) -> None:
    caller = identities.resolve_caller(
        {"x-attache-client": "acme-1", "x-attache-tenant": "bell"}, server="default/chat"
    )
    assert (caller.tenant, caller.user, caller.api_key) == ("acme", "alice", "acme-1")


@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
@pytest.mark.parametrize(("objective", "priority"), [("urgent", 100), ("unheard-of", 0)])
def test_objectives_are_priorities_by_name(
    identities: IdentityResolver, header: str, objective: str, priority: int
) -> None:
    assert identities.resolve_caller({header: objective}, server="default/chat").priority == priority


def test_an_objective_counts_for_servers_of_its_own_namespace(identities: IdentityResolver) -> None:
    headers = {"x-llm-d-inference-objective": "sheddable"}
    assert identities.resolve_caller(headers, server="models/chat").priority == -5
    assert identities.resolve_caller(headers, server="default/chat").priority == 0


def test_without_an_objective_the_route_decides(identities: IdentityResolver) -> None:
    assert identities.resolve_caller({"x-attache-tenant": "acme"}, server="default/chat").priority is None


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("x-llm-d-slo-ttft-ms", "ttft_target_s"),
        ("x-slo-ttft-ms", "ttft_target_s"),
        ("x-llm-d-slo-tpot-ms", "tpot_target_s"),
        ("x-attache-deadline-ms", "deadline_in_s"),
    ],
)
@pytest.mark.parametrize(
    ("text", "seconds"), [("250", 0.25), ("1.5", 0.0015), ("", None), ("soon", None), ("-1", None), ("1e300", None)]
)
def test_targets(identities: IdentityResolver, name: str, field: str, text: str, seconds: float | None) -> None:
    assert getattr(identities.resolve_caller({name: text}, server="default/chat"), field) == seconds


def test_long_names_are_shortened(identities: IdentityResolver) -> None:
    caller = identities.resolve_caller(
        {"x-attache-tenant": "x" * 10_000, "x-attache-user": "y" * 10_000}, server="default/chat"
    )
    assert len(caller.tenant) == len(caller.user) == 128


def test_long_names_that_begin_alike_stay_two(identities: IdentityResolver) -> None:
    def tenant(name: str) -> str:
        return identities.resolve_caller({"x-attache-tenant": name}, server="default/chat").tenant

    long = "x" * 128
    assert tenant(long) == long
    assert len({long, tenant(long + "a"), tenant(long + "b")}) == 3


def test_fairness_ids_by_both_names(identities: IdentityResolver) -> None:
    for name in ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"):
        assert identities.resolve_caller({name: "batch"}, server="default/chat").flow == "batch"


@pytest.mark.parametrize("name", ["zo\u00eb", "\u65e5\u672c", "plain"])
def test_names_are_read_as_the_configuration_spells_them(identities: IdentityResolver, name: str) -> None:
    # headers are read as Latin-1, and tokens are UTF-8
    headers = {"x-attache-tenant": name.encode().decode("latin-1")}
    assert identities.resolve_caller(headers, server="default/chat").tenant == name
    assert identities.resolve_subject(headers).tenant == name


def test_a_name_that_is_no_utf_8_stays_as_it_is(identities: IdentityResolver) -> None:
    assert identities.resolve_subject({"x-attache-tenant": "zo\xeb"}).tenant == "zo\xeb"
