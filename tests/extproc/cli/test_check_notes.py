# SPDX-License-Identifier: Apache-2.0
"""Notes on what is valid and does not do what its author may think; and none where all is as it looks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from extproc.cli.check import main

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[..., list[str]]

ROOT = Path(__file__).parents[3]
SERVER = {"model": "m", "endpoints": [{"address": "127.0.0.1:1"}]}
RULES = [{"targetModels": [{"modelServerName": "llama"}]}]
KEYS = {"apiKeys": [{"name": "a", "key": "sk-0123456789", "tenant": "acme"}]}
TOKENS = {"jwt": [{"issuer": "https://issuer.test", "jwksFile": "keys.json", "tenantClaim": "org"}]}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """The notes on a directory with these specs, each ``Kind`` or ``Kind_name``."""

    def of(**specs: dict[str, Any]) -> list[str]:
        whole: dict[str, Any] = {"ModelServer": SERVER, "ModelRoute": {"modelName": "llama", "rules": RULES}, **specs}
        documents = []
        for title, spec in whole.items():
            kind, _, name = title.partition("_")
            api = "gateway.networking.k8s.io/v1" if kind in ("HTTPRoute", "GRPCRoute") else "attache.dev/v1alpha1"
            documents.append({"apiVersion": api, "kind": kind, "metadata": {"name": name or "llama"}, "spec": spec})
        (tmp_path / "a.yaml").write_text(yaml.safe_dump_all(documents))
        assert main([str(tmp_path)]) == 0, capsys.readouterr().err
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]

    return of


def limited(*per: str) -> dict[str, Any]:
    return {"modelName": "llama", "rules": RULES, "rateLimits": [{"per": one, "requests": 5} for one in per]}


@pytest.mark.parametrize("per", ["Tenant", "User", "ApiKey"])
def test_a_limit_for_each_of_what_nobody_is(check: Check, per: str) -> None:
    (note,) = check(ModelRoute=limited(per))
    assert note.startswith(f"ModelRoute default/llama: the limit per: {per} is one limit for all clients together")
    assert "write authentication in the GatewayConfig, or write per: Route" in note


def test_keys_that_gateways_and_tokens_do_not_have(check: Check) -> None:
    route = limited("Tenant", "User", "ApiKey")
    (told,) = check(ModelRoute=route, GatewayConfig={"clients": "Trusted"})
    assert "per: ApiKey is one limit for all clients together, as gateways in front tell tenants and users" in told


def test_limits_of_somebody_are_not_noted(check: Check) -> None:
    assert check(ModelRoute=limited("Tenant", "User", "ApiKey"), GatewayConfig={"authentication": KEYS}) == []
    assert check(ModelRoute=limited("Tenant", "User"), GatewayConfig={"clients": "Trusted"}) == []
    assert check(ModelRoute=limited("Route")) == []


def naming(**named: object) -> dict[str, Any]:
    return {**limited(), "rateLimits": [{"requests": 5, "per": "Route", **named}]}


@pytest.mark.parametrize("named", [{"tenants": ["acme"]}, {"users": ["ann"]}, {"apiKeys": ["a"]}])
def test_a_limit_for_callers_whom_nobody_is(check: Check, named: dict[str, Any]) -> None:
    (note,) = check(ModelRoute=naming(**named))
    assert note.startswith("ModelRoute default/llama: rateLimits[0] holds for nobody, as no client has a")


def test_a_limit_for_callers_who_have_no_key(check: Check) -> None:
    keyed = {"authentication": KEYS}
    assert check(ModelRoute=naming(tenants=["acme"], apiKeys=["a"]), GatewayConfig=keyed) == []
    (note,) = check(ModelRoute=naming(tenants=["acmee"]), GatewayConfig=keyed)
    assert note == "ModelRoute default/llama: rateLimits[0]: no key is, or is of, 'acmee'; did you mean 'acme'?"
    assert check(ModelRoute=naming(tenants=["acmee"]), GatewayConfig={"clients": "Trusted"}) == []


def test_a_server_that_no_route_names(check: Check) -> None:
    (note,) = check(ModelServer_spare=SERVER)
    assert note.startswith("ModelServer default/spare: no ModelRoute, HTTPRoute or GRPCRoute names it")
    assert "targetModels: [{modelServerName: spare}]" in note
    assert "--pool spare" in note


def test_servers_that_an_http_route_or_its_mirror_names_are_not_noted(check: Check) -> None:
    ref = {"group": "attache.dev", "kind": "ModelServer", "name": "spare"}
    assert check(ModelServer_spare=SERVER, HTTPRoute={"rules": [{"backendRefs": [ref]}]}) == []
    mirror = {"type": "RequestMirror", "requestMirror": {"backendRef": ref}}
    rules = [{"filters": [mirror], "backendRefs": [{**ref, "name": "llama"}]}]
    assert check(ModelServer_spare=SERVER, HTTPRoute={"rules": rules}) == []


@pytest.mark.parametrize(
    ("http", "calls", "is_noted"),
    [
        (["a.org"], ["a.org"], True),
        ([], ["a.org"], True),
        (["*.org"], ["a.org", "b.com"], True),
        (["a.org"], ["b.org"], False),
    ],
)
def test_routes_of_both_kinds_with_a_host_in_common(
    check: Check, http: list[str], calls: list[str], is_noted: bool
) -> None:
    found = check(HTTPRoute={"hostnames": http}, GRPCRoute={"hostnames": calls})
    assert len(found) == is_noted
    for note in found:
        assert note.startswith("GRPCRoute default/llama: the HTTPRoute default/llama has a host in common with it")


def test_routes_of_both_kinds_on_listeners_of_their_own(check: Check) -> None:
    listeners = [{"name": name, "address": f"127.0.0.1:{port}"} for name, port in (("a", 1), ("b", 2))]
    of_a, of_b = ({"parentRefs": [{"name": "gateway", "sectionName": name}]} for name in "ab")
    assert check(HTTPRoute=of_a, GRPCRoute=of_b, GatewayConfig={"listeners": listeners}) == []
    assert len(check(HTTPRoute=of_a, GRPCRoute=of_a, GatewayConfig={"listeners": listeners})) == 1


@pytest.mark.parametrize("name", ["*", "llama-*", "*-instruct"])
def test_a_model_name_with_a_star_is_a_name(check: Check, name: str) -> None:
    (note,) = check(ModelRoute={"modelName": name, "rules": RULES})
    assert note.startswith(f"ModelRoute default/llama: modelName '{name}' is no pattern: only requests that ask for")
    assert "write the name that clients ask for" in note
    (note,) = check(ModelRoute={"modelName": "llama", "loraAdapters": [name], "rules": RULES})
    assert f"loraAdapters '{name}' is no pattern" in note


def test_isolation_that_older_engines_do_not_have_on_messages(check: Check) -> None:
    for where in ({"ModelServer": {**SERVER, "cacheIsolation": "User"}}, {"GatewayConfig": {"cacheIsolation": "User"}}):
        (note,) = check(**where)
        assert note.startswith("ModelServer default/llama: cacheIsolation User does not hold on /v1/messages with")
        assert "see that the engines are newer" in note
    (note,) = check(ModelServer={**SERVER, "cacheScopeHeader": "x-team"})
    assert "cacheIsolation Header:x-team" in note


def test_isolation_that_holds_or_that_nobody_asked_for_is_not_noted(check: Check) -> None:
    assert check(ModelServer={**SERVER, "cacheIsolation": "Shared"}, GatewayConfig={"cacheIsolation": "User"}) == []
    assert check(ModelServer={**SERVER, "cacheIsolation": "User", "engine": "SGLang"}) == []
    assert check(GatewayConfig={"authentication": KEYS}) == []


def test_more_watched_files_than_a_machine_has_inotify_instances(check: Check) -> None:
    def said(listeners: int) -> list[str]:
        many = [
            {
                "name": f"l{one}",
                "address": f"127.0.0.1:{9000 + one}",
                "tls": {"certificates": [{"certFile": f"c{one}", "keyFile": "k"}]},
            }
            for one in range(listeners)
        ]
        return [one for one in check(GatewayConfig={"listeners": many}) if "inotify" in one]

    (note,) = said(41)
    assert "Envoy watches 82 files" in note
    assert "fs.inotify.max_user_instances = 256" in note
    assert said(40) == []


def test_the_readme_has_nothing_to_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(
        r"config/attache.yaml <<'END'\n(.*?)^END$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    (tmp_path / "attache.yaml").write_text(found[1])
    assert main([str(tmp_path)]) == 0
    assert "note:" not in capsys.readouterr().out


def test_more_levels_of_limits_than_are_remembered_are_noted(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [{"per": "Tenant", "unit": "minute", "requests": 5, "totalTokens": 5}]
    route = {"modelName": "llama", "rules": RULES, "rateLimits": limits}
    gateway = {"authentication": KEYS, "tenants": [{"name": f"t{number}"} for number in range(9)]}
    monkeypatch.setattr("extproc.cli.check.MAX_BUCKETS", 20)
    # ten tenants, two amounts
    assert check(ModelRoute=route, GatewayConfig=gateway) == []
    monkeypatch.setattr("extproc.cli.check.MAX_BUCKETS", 19)
    (note,) = check(ModelRoute=route, GatewayConfig=gateway)
    assert "rateLimits have 20 levels" in note


def test_more_endpoints_than_prompts_are_remembered_of_are_noted(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = [{"address": f"127.0.1.{number}:80"} for number in range(1, 101)]
    monkeypatch.setattr("extproc.prefix.approximate_index.MOST_BLOCKS_IN_ALL", 100 * 16_384)
    assert check(ModelServer={**SERVER, "endpoints": endpoints}) == []
    monkeypatch.setattr("extproc.prefix.approximate_index.MOST_BLOCKS_IN_ALL", 100 * 1_000)
    (note,) = check(ModelServer={**SERVER, "endpoints": endpoints})
    assert "1000 of each instead of 16384" in note


def test_more_ranks_than_blocks_are_tracked_of_are_noted(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = [{"address": f"127.0.1.{number}:80"} for number in range(1, 11)]
    server = {**SERVER, "endpoints": endpoints, "kvEvents": {"dataParallelSize": 8}}
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS_IN_ALL", 80 * 1_000_000)
    assert check(ModelServer=server) == []
    monkeypatch.undo()
    (note,) = check(ModelServer=server)
    assert "80 ranks of engines publish KV events" in note
    assert "4194304 blocks, so 52428 of each" in note


def test_engines_that_are_read_less_often_than_written_are_noted(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = [{"address": f"127.0.1.{number}:80"} for number in range(1, 101)]
    assert check(ModelServer={**SERVER, "endpoints": endpoints}) == []
    monkeypatch.setattr("extproc.api.config_snapshot.MOST_SCRAPES_PER_S", 250.0)
    monkeypatch.setattr("extproc.cli.check.descriptor_hard_limit", lambda: 1_024)
    reads, descriptors = check(ModelServer={**SERVER, "endpoints": endpoints})
    assert "all intervals are 2 times as long as written (0.2 s is 0.4 s)" in reads
    assert "the engines want 100 file descriptors, and a process may have 1024" in descriptors


def budgeted(*budgets: dict[str, Any]) -> dict[str, Any]:
    usual = {"window": "Month", "per": "Route", "max": {"requests": 5}}
    given = [{"name": f"b{number}", **usual, **one} for number, one in enumerate(budgets)]
    return {**limited(), "rateLimits": [], "budgets": given}


PRICED = {**SERVER, "pricing": [{"perMillion": {"input": "2.5"}}]}


def test_a_budget_for_each_of_what_nobody_is(check: Check) -> None:
    (note,) = check(ModelRoute=budgeted({"per": "Tenant"}))
    assert note.startswith("ModelRoute default/llama: the budget 'b0' is one budget for all clients together")
    (note,) = check(ModelRoute=budgeted({"tenants": ["acme"]}))
    assert "the budget 'b0' holds for nobody" in note
    (note,) = check(ModelRoute=budgeted({"tenants": ["acmee"]}), GatewayConfig={"authentication": KEYS})
    assert note.endswith("no key is, or is of, 'acmee'; did you mean 'acme'?")


def tiered(**tiers: object) -> dict[str, Any]:
    targets = [{"modelServerName": "llama"}, {"modelServerName": "spare"}]
    return {**limited(), "rateLimits": [], "rules": [{"targetModels": targets, "tiers": tiers}]}


def test_tiers_that_cannot_do_what_they_say(check: Check) -> None:
    priced = {"ModelServer": PRICED, "ModelServer_spare": PRICED}
    assert check(ModelRoute=tiered(ttft="1s"), **priced) == []
    (note,) = check(ModelRoute=tiered(), **priced)
    assert note.startswith("ModelRoute default/llama: rules[0].tiers: there is no objective, so the cheapest")
    notes = check(ModelRoute=tiered(ttft="1s", wait="2s"), **priced)
    assert [note.partition("tiers: ")[2] for note in notes] == [
        f"no request waits for ModelServer default/{name}; write flowControl there, or no wait"
        for name in ("llama", "spare")
    ]
    euros = {**SERVER, "pricing": [{"currency": "EUR", "perMillion": {"input": "2.5"}}]}
    (note,) = check(ModelRoute=tiered(tpot="1s"), **{**priced, "ModelServer_spare": euros})
    assert note.endswith("tiers: costs in EUR and USD cannot be compared; write prices in one currency")
    notes = check(ModelRoute=tiered(tpot="1s"), ModelServer=PRICED, ModelServer_spare=SERVER)
    assert notes[1].endswith("tiers: ModelServer default/spare has no price, and counts as the dearest; write pricing")


def test_servers_without_a_price_are_noted_where_others_have_one(check: Check) -> None:
    rules = [{"targetModels": [{"modelServerName": "llama"}, {"modelServerName": "spare"}]}]
    route = {**limited(), "rateLimits": [], "rules": rules}
    assert check(ModelRoute=route, ModelServer_spare=SERVER) == []
    (note,) = check(ModelRoute=route, ModelServer_spare=PRICED)
    assert note.startswith("ModelServer default/llama: has no price while others have")


def test_a_budget_of_money_over_servers_without_a_price_or_of_another_currency(check: Check) -> None:
    route = budgeted({"max": {"money": 5}})
    (note,) = check(ModelRoute=route)
    assert "the budget 'b0' is of money, and requests of default/llama are unpriced and spend no money budget" in note
    euros = {**SERVER, "pricing": [{"currency": "EUR", "perRequest": "0.01"}]}
    (note,) = check(ModelRoute=route, ModelServer=euros)
    assert "is in USD, and prices of its ModelServers are in EUR" in note
    assert check(ModelRoute=route, ModelServer=PRICED) == []
    assert check(ModelRoute=budgeted({"max": {"money": 5}, "currency": "EUR"}), ModelServer=euros) == []


def test_a_cache_that_all_clients_share_or_that_never_answers(check: Check) -> None:
    route = {"modelName": "llama", "rules": RULES, "cache": {}}
    (note,) = check(ModelRoute=route)
    assert note.startswith("ModelRoute default/llama: the cache of scope Tenant is one for all clients together, as ")
    assert check(ModelRoute=route, GatewayConfig={"authentication": KEYS}) == []
    shared = {**route, "cache": {"scope": "Route"}}
    assert check(ModelRoute=shared) == []
    (never,) = check(ModelRoute=shared, ModelServer={**SERVER, "protocol": "V2"})
    assert never == (
        "ModelRoute default/llama: the cache never answers, as bodies of requests with protocol V2 are not read"
    )


def test_a_payload_log_of_which_one_half_is_missing(check: Check) -> None:
    route = {"modelName": "llama", "rules": RULES, "payloadLog": {}}
    (note,) = check(ModelRoute=route)
    assert note.startswith("ModelRoute default/llama: has payloadLog, but nothing is kept")
    sink = {"payloadLog": {"path": "/var/lib/attache/payload.log"}}
    (note,) = check(GatewayConfig=sink)
    assert note.startswith("GatewayConfig: has payloadLog, but no ModelRoute has")
    assert check(ModelRoute=route, GatewayConfig=sink) == []


def test_a_guard_of_which_one_half_is_missing(check: Check) -> None:
    def route(mode: str) -> dict[str, Any]:
        return {"modelName": "llama", "rules": RULES, "guard": {"name": "pi", "failureMode": mode}}

    (note,) = check(ModelRoute=route("Close"))
    assert note == (
        "ModelRoute default/llama: the GatewayConfig has no guard 'pi', so its requests are refused; there is none"
    )
    guards: dict[str, Any] = {"guards": [{"name": "pii", "url": "http://127.0.0.1:1/"}]}
    (note, unused) = check(ModelRoute=route("Open"), GatewayConfig=guards)
    assert note.endswith("so its requests go on without it; did you mean 'pii'?")
    assert unused.startswith("GatewayConfig: no ModelRoute names the guard 'pii'")
    guards["guards"][0]["name"] = "pi"
    assert check(ModelRoute=route("Close"), GatewayConfig=guards) == []
    (note,) = check(ModelRoute=route("Close"), GatewayConfig={**guards, "failureMode": "Open"})
    assert note.startswith("ModelRoute default/llama: guard has no effect while extproc is down")
    guards["guards"][0]["apiKeyFile"] = "none.key"
    (note,) = check(ModelRoute=route("Close"), GatewayConfig=guards)
    assert note.startswith("guard pi: ")


def test_objectives_that_cannot_be_what_they_seem(check: Check) -> None:
    def notes(*classes: dict[str, Any], server: dict[str, Any] | None = None, **rule: object) -> list[str]:
        route = {"modelName": "llama", "rules": [{**RULES[0], **rule}], "slo": list(classes)}
        return check(ModelRoute=route, ModelServer=SERVER | (server or {}))

    usual = {"name": "chat", "ttft": "1s", "tpot": "50ms", "e2e": "1m"}
    assert notes(usual) == []
    (loose,) = notes({**usual, "share": 0.9})
    assert "promises 0.9: the alert at 14.4 times the error budget can never fire" in loose
    (unseen,) = notes(usual, server={"streamUsage": "AsRequested"})
    assert "has tpot, and ModelServer default/llama has streamUsage: AsRequested" in unseen
    (order,) = notes(usual, ttftTarget="2s")
    assert "promises ttft 1s, and a rule has ttftTarget 2s" in order
    urgent = {"name": "urgent", "priority": 0, "e2e": "1s"}
    (empty,) = notes(usual, urgent)
    assert "the class 'chat' of slo has no requests" in empty
    assert notes(usual, urgent, priority=-1) == []


def pairs(*groups: str, **more: object) -> dict[str, Any]:
    """A prefill and a decode engine, each in its group."""
    endpoints = [
        {"address": f"127.0.0.1:{number}", "labels": {"role": role, "group": group}}
        for number, (role, group) in enumerate(zip(("prefill", "decode"), groups, strict=True), 1)
    ]
    labels = {"prefillLabels": {"role": "prefill"}, "decodeLabels": {"role": "decode"}, "groupKey": "group"}
    return {**SERVER, "endpoints": endpoints, "pdGroup": {**labels, **more}}


def test_a_connector_of_a_leg_that_extproc_does_not_make(check: Check) -> None:
    (note,) = check(ModelServer=pairs("a", "a", connector="NixlConnector"))
    assert "pdGroup.connector has no effect with leg: Sidecar; write leg: Gateway" in note
    assert check(ModelServer=pairs("a", "a", connector="NixlConnector", leg="Gateway")) == []
    assert check(ModelServer=pairs("a", "a")) == []
    # of which no other leg is possible
    assert check(ModelServer=pairs("a", "a", connector="MoRIIOConnector")) == []


def test_a_port_that_extproc_writes_to_no_engine(check: Check) -> None:
    own = {"leg": "Gateway", "transferPort": 7777}
    assert check(ModelServer=pairs("a", "a", connector="OffloadingConnector", **own)) == []
    for more in ({**own, "connector": "NixlConnector"}, {"transferPort": 7777}):
        (note,) = check(ModelServer=pairs("a", "a", **more))
        assert "pdGroup.transferPort has no effect with this leg and connector" in note


def test_groups_in_which_no_pair_can_be_formed(check: Check) -> None:
    (note,) = check(ModelServer=pairs("a", "b"))
    assert "pdGroup forms no pair" in note


def test_an_engine_that_has_both_roles_of_a_pair(check: Check) -> None:
    server = pairs("a", "a")
    server["pdGroup"]["decodeLabels"] = {"group": "a"}
    (note,) = check(ModelServer=server)
    assert "127.0.0.1:1 match both prefillLabels and decodeLabels" in note


def test_encoders_that_nobody_asks_to_encode(check: Check) -> None:
    server = {**SERVER, "endpoints": [{"address": "127.0.0.1:1", "labels": {"llm-d.ai/role": "encode"}}]}
    (note,) = check(ModelServer=server)
    assert "127.0.0.1:1 have the role encode; there is no encode stage" in note
    assert "--encoder-urls" in note
    server["endpoints"] = [{"address": "127.0.0.1:1", "labels": {"llm-d.ai/role": "encode-prefill-decode"}}]
    assert check(ModelServer=server) == []


def test_engines_that_have_neither_role_of_a_pair(check: Check) -> None:
    server = pairs("a", "a")
    server["endpoints"] += [{"address": f"127.0.0.1:{port}", "labels": {"role": "decod"}} for port in range(3, 8)]
    (note,) = check(ModelServer=server)
    assert "127.0.0.1:3, 127.0.0.1:4, 127.0.0.1:5 and 2 more match neither prefillLabels nor decodeLabels" in note


def fallback_to(*names: str, target: str = "llama", **fields: object) -> dict[str, Any]:
    named = [{"modelServerName": name} for name in names]
    return {
        "modelName": target,
        "rules": [{"targetModels": [{"modelServerName": target}], "fallback": named}],
        **fields,
    }


def test_a_fallback_that_helps_is_not_noted(check: Check) -> None:
    assert check(ModelServer_spare=SERVER, ModelRoute=fallback_to("spare")) == []


@pytest.mark.parametrize(
    ("spare", "note"),
    [
        ({"endpoints": []}, "has no endpoints, so no request goes there"),
        ({"streamUsage": "AsRequested"}, "has another streamUsage, so no stream without usage can go on to it"),
        ({"cacheIsolation": "User"}, "has another cacheIsolation, so requests would need another body there"),
        (
            {"pdGroup": {"prefillLabels": {"role": "p"}, "decodeLabels": {"role": "d"}}},
            "gets no request after an attempt elsewhere if another of its engines would compute the prompt",
        ),
    ],
)
def test_a_fallback_that_cannot_help(check: Check, spare: dict[str, Any], note: str) -> None:
    found = check(ModelServer_spare={**SERVER, **spare}, ModelRoute=fallback_to("spare"))
    assert any(f"ModelRoute default/llama: rules[0].fallback: ModelServer default/spare {note}" in one for one in found)


@pytest.mark.parametrize("leg", ["Sidecar", "Gateway"])
def test_a_fallback_behind_a_prefill_decode_pair(check: Check, leg: str) -> None:
    own = pairs("a", "a")
    own["pdGroup"]["leg"] = leg
    if leg == "Gateway":
        own["pdGroup"]["connector"] = "NixlConnector"
    found = check(ModelServer=own, ModelServer_spare=SERVER, ModelRoute=fallback_to("spare"))
    notes = [one for one in found if "gets no request" in one]
    assert len(notes) == (leg == "Sidecar"), notes
    assert all("default/spare gets no request that has gone to a sidecar of a target" in one for one in notes)


TRANSLATING: Final = {"apis": ["ChatCompletions"], "translation": "Lenient"}


def test_a_fallback_that_would_have_to_translate(check: Check) -> None:
    (note,) = check(ModelServer_spare={**SERVER, **TRANSLATING}, ModelRoute=fallback_to("spare"))
    assert "default/spare gets requests of Responses and Messages only if they go there at once" in note
    # where all have the same APIs, what is translated is so for the target
    both = {"ModelServer": {**SERVER, **TRANSLATING}, "ModelServer_spare": {**SERVER, **TRANSLATING}}
    (note,) = check(**both, ModelRoute=fallback_to("spare"))
    assert "default/spare gets no request that was translated for a target of the rule" in note
    # without a translation it is what apis say
    other = {**SERVER, "apis": ["ChatCompletions"]}
    assert check(ModelServer_spare=other, ModelRoute=fallback_to("spare")) == []


def test_a_provider_gets_no_cache_salt_so_its_isolation_is_not_noted(check: Check) -> None:
    spare = {"model": "m", "provider": {"host": "api.example.com"}, "apis": ["ChatCompletions"]}
    own = {**SERVER, "cacheIsolation": "Shared"}
    assert check(ModelServer=own, ModelServer_spare=spare, ModelRoute=fallback_to("spare")) == []


def test_fallbacks_of_adapters_alone(check: Check) -> None:
    route = {**fallback_to("spare"), "loraAdapters": ["sql"]}
    del route["modelName"]
    (note,) = check(ModelServer_spare=SERVER, ModelRoute=route)
    assert "requests for LoRA adapters go to no fallback" in note


def test_circles_of_fallbacks_are_noted_once(check: Check) -> None:
    servers = {f"ModelServer_{name}": SERVER for name in ("b", "c", "d")}
    routes = {
        "ModelRoute": fallback_to("b"),
        "ModelRoute_b": fallback_to("c", target="b"),
        "ModelRoute_c": fallback_to("llama", target="c"),
        # leads into the circle, and is no part of it
        "ModelRoute_d": fallback_to("b", target="d"),
    }
    found = check(**servers, **routes)
    (note,) = [one for one in found if "fall back" in one]
    assert note.startswith(
        "ModelServer default/b: its requests fall back to default/c, default/llama, and theirs to it"
    )


def test_what_needs_a_body_that_is_not_read(check: Check) -> None:
    server = {**SERVER, "protocol": "V2"}
    limits = [{"per": "Route", "requests": 5, "inputTokens": 9}]
    guards: dict[str, Any] = {"guards": [{"name": "pii", "url": "http://127.0.0.1:1/"}], "failureMode": "Close"}
    route = {"modelName": "org/iris", "rules": RULES, "rateLimits": limits, "guard": {"name": "pii"}}
    name, tokens, guard = check(ModelServer=server, ModelRoute=route, GatewayConfig=guards)
    assert "'org/iris' is no segment of a path" in name
    assert "limit requests" in tokens
    assert "the guard 'pii' gets no body" in guard
    assert check(ModelServer=server) == []


def test_parameters_of_bodies_that_are_not_read(check: Check) -> None:
    rules = [{**RULES[0], "set": {"seed": 1}, "modelMatch": {"body": {"tools": {"exists": True}}}}]
    closed = {"failureMode": "Close"}
    never, nothing = check(
        ModelServer={**SERVER, "protocol": "V2"}, ModelRoute={"modelName": "m", "rules": rules}, GatewayConfig=closed
    )
    assert never.endswith("rules[0].modelMatch never holds, as bodies are not read of protocol V2")
    assert nothing.endswith("rules[0]: set changes nothing, as bodies are not read of protocol V2")
    assert check(ModelRoute={"modelName": "m", "rules": rules}) == []


def test_a_mirror_that_has_another_protocol(check: Check) -> None:
    rules = [{**RULES[0], "mirror": {"modelServerName": "iris"}}]
    route = {"modelName": "llama", "rules": rules}
    (note,) = check(ModelServer_iris={**SERVER, "protocol": "V2"}, ModelRoute=route)
    assert note.startswith("ModelRoute default/llama: rules[0].mirror: copies have JSON of protocol OpenAI")
    # a mirror is named by its route
    assert check(ModelServer_iris=SERVER, ModelRoute=route) == []
