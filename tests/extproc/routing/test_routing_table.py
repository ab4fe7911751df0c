# SPDX-License-Identifier: Apache-2.0
"""ModelRoutes: names, conditions in order, weights."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.refusals import UnknownModel
from extproc.routing.routing_table import Destination, ListedModel, RoutingTable, RuleSettings

CONFIG = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: stable}
spec: {model: llama-3.1-8b, endpoints: []}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: canary}
spec: {model: llama-3.2-8b, endpoints: []}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules:
    - name: testers
      modelMatch: {headers: {X-Team: {exact: testers}}}
      targetModels: [{modelServerName: canary}]
    - name: batch
      modelMatch: {uri: {prefix: /v1/completions}, headers: {x-job: {regex: "nightly-[0-9]+"}}}
      targetModels: [{modelServerName: canary}]
    - name: others
      targetModels:
        - {modelServerName: stable, weight: 75}
        - {modelServerName: canary, weight: 25}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: strict}
spec:
  modelName: strict
  rules:
    - modelMatch: {headers: {x-team: {prefix: te}}}
      targetModels: [{modelServerName: stable}, {modelServerName: canary, weight: 0}]
"""
TABLE = RoutingTable(load_snapshot({"all.yaml": CONFIG}))


def resolve(model: str, path: str = "/v1/chat/completions", **headers: str) -> Destination:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return TABLE.targets(model, named, path).draw(random.Random(1))


def test_the_first_rule_that_holds_decides() -> None:
    assert resolve("chat", x_team="testers").server == "default/canary"
    assert resolve("chat", "/v1/completions", x_job="nightly-7").server == "default/canary"


def test_a_rule_holds_only_if_all_its_conditions_do() -> None:
    rng = random.Random(7)
    servers = {TABLE.targets("chat", {"x-job": "nightly-x"}, "/v1/completions").draw(rng).server for _ in range(50)}

    assert servers == {"default/stable", "default/canary"}  # fell through to the weights


def test_weights_are_kept_in_the_long_run() -> None:
    rng = random.Random(0)
    drawn = Counter(TABLE.targets("chat", {}, "/").draw(rng).server for _ in range(4000))

    assert 0.22 < drawn["default/canary"] / 4000 < 0.28


def test_a_weight_of_zero_is_never_drawn() -> None:
    assert {resolve("strict", x_team="tempo").server for _ in range(20)} == {"default/stable"}


def test_the_model_is_sent_under_its_servers_name_and_an_adapter_under_its_own() -> None:
    rule = RuleSettings("rules[0] (testers)", renames_answers=True)
    for model, its_name in (("chat", "llama-3.2-8b"), ("sql", "sql")):
        expected = Destination("default/canary", its_name, "default/chat", "chat", rule=rule)
        assert resolve(model, x_team="testers") == expected


def test_an_unknown_model_is_named_but_not_at_any_length() -> None:
    with pytest.raises(UnknownModel, match="The model 'gpt-9' does not exist; GET /v1/models"):
        resolve("gpt-9")
    with pytest.raises(UnknownModel) as caught:
        resolve("x" * 100_000)
    assert len(caught.value.message) < 300


def test_a_request_that_no_rule_takes_is_refused() -> None:
    with pytest.raises(UnknownModel, match="No rule of the route 'default/strict'"):
        resolve("strict")


def test_the_models_that_can_be_asked_for_are_listed() -> None:
    assert TABLE.models == [ListedModel("chat", None), ListedModel("sql", "chat"), ListedModel("strict", None)]


def test_weights_go_to_what_is_open_to_the_caller() -> None:
    rng = random.Random(0)

    def drawn(*servers: str) -> set[str | None]:
        found = TABLE.targets("chat", {}, "/").filtered(lambda one: one.server in servers)
        return {None} if found is None else {found.draw(rng).server for _ in range(40)}

    assert drawn("default/stable", "default/canary") == {"default/stable", "default/canary"}
    assert drawn("default/canary") == {"default/canary"}
    assert drawn() == {None}


def test_all_that_a_model_can_come_to_is_known() -> None:
    assert {one.server for one in TABLE.destinations("sql")} == {"default/stable", "default/canary"}
    assert not list(TABLE.destinations("gpt-9"))
