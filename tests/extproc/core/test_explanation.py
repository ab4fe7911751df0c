# SPDX-License-Identifier: Apache-2.0
"""Explanations: the reasons of a pick in words, as a page, as a command, as a log."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bench.stack.loopback_stack import documents
from extproc.__main__ import main
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Decision
from extproc.core.explanation import (
    EndpointScores,
    Explanation,
    FilterStep,
    ProfileExplanation,
    to_text,
    why_chosen,
)
from extproc.core.request_record import Outcome, RequestHead
from extproc.endpoints.engine_reports import apply_report
from extproc.endpoints.health import EngineFailure
from extproc.engines.metrics import EngineReport
from extproc.llmd.picker_builder import PickerFactory
from extproc.metrics.decision_log import DecisionLog
from extproc.metrics.request_metrics import Metrics
from extproc.runtime.admin_pages import ExplainPage
from extproc.scheduling.cache_estimator import Prompt
from extproc.streams.stream_dependencies import GatewayOptions
from tests.extproc.breakers import trip
from tests.extproc.conftest import CONFIG, settle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from extproc.core.request_record import Arrival

BODY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello " * 500}]}).encode()
HEAD = RequestHead("POST", "/v1/chat/completions", {}, has_body=True)
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: least-request-filter
    parameters: {maxWaitingRequests: 5}
  - type: queue-scorer
  - type: prefix-cache-scorer
schedulingProfiles:
  - name: default
    plugins:
      - {pluginRef: least-request-filter}
      - {pluginRef: queue-scorer, weight: 2}
      - {pluginRef: prefix-cache-scorer, weight: 3}
"""


def core_of(*, configured: bool) -> Core:
    config = (
        CONFIG.replace(b"model: llama-3.1-8b", b"model: llama-3.1-8b\n  pickerConfig: epp.yaml")
        if configured
        else CONFIG
    )
    return Core(
        load_snapshot({"all.yaml": config, "epp.yaml": PICKER.encode()}),
        rng=random.Random(0),
        ticket_prefix="t",
        make_picker=PickerFactory(),
    )


def explained(core: Core, head: RequestHead = HEAD) -> Decision:
    own, _ = core.arrive(core.builder.build_by_model(head, BODY), 0.0, wants_reasons=True)
    assert isinstance(own, Decision)
    return own


def arrival_of(core: Core) -> Arrival:
    return core.builder.build_by_model(HEAD, BODY)


def test_filters_and_scores_are_shown_with_their_weights() -> None:
    core = core_of(configured=True)
    table = core.pools["default/llama"].table
    table.waiting[:3], table.reported_at_s[:3] = (4, 9, 0), 0.0
    shown = core.explain(arrival_of(core), 0.0)
    (profile,) = shown.profiles
    assert [(step.removed, step.left) for step in profile.filters] == [(("10.0.0.2:8000",), 2)]
    assert profile.weights == {"queue-scorer": 2.0, "prefix-cache-scorer": 3.0}
    assert [(one.address, one.scores["queue-scorer"], one.total) for one in profile.endpoints] == [
        ("10.0.0.3:8000", 1.0, 2.0),
        ("10.0.0.1:8000", 0.0, 0.0),
    ]
    assert shown.addresses == ("10.0.0.3:8000", "10.0.0.1:8000")
    text = to_text(shown)
    assert "least-request-filter left 2; out: 10.0.0.2:8000" in text
    assert "queue-scorer x 2" in text


def test_the_default_picker_shows_what_its_cost_is_made_of() -> None:
    core = core_of(configured=False)
    core.pools["default/llama"].table.in_flight[0] = 50
    shown = core.explain(arrival_of(core), 0.0)
    best, *_, worst = shown.profiles[0].endpoints
    assert worst.address == "10.0.0.1:8000"
    assert worst.scores["requests in flight"] == 50
    assert best.scores["cost in seconds"] < worst.scores["cost in seconds"]


def test_an_engine_that_is_avoided_is_named_with_why() -> None:
    core = core_of(configured=False)
    assert "avoided" not in to_text(core.explain(arrival_of(core), 0.0))
    table = core.pools["default/llama"].table
    trip(table, 0, 100.0)
    table.healths[1].reasons.add(EngineFailure.CUT)
    trip(table, 1, 90.0)
    shown = core.explain(arrival_of(core), 100.2)
    assert shown.avoided == {
        "10.0.0.1:8000": (
            "it cannot be reached, or answers nothing; its breaker is open, and it is not tried for 1 s more"
        ),
        "10.0.0.2:8000": (
            "its answers end early; its breaker is half-open, and it is tried by the next request that suits it"
        ),
    }
    text = to_text(shown)
    assert "  10.0.0.1:8000 is avoided: it cannot be reached, or answers nothing; its breaker is open, and" in text


def test_an_engine_that_reports_nothing_is_named_where_others_report() -> None:
    core = core_of(configured=False)
    table = core.pools["default/llama"].table
    assert core.explain(arrival_of(core), 100.0).silent == ()
    apply_report(table, 0, EngineReport(waiting=1.0), 100.0)
    apply_report(table, 1, EngineReport(waiting=1.0), 90.0)
    shown = core.explain(arrival_of(core), 100.1)
    assert shown.silent == ("10.0.0.2:8000", "10.0.0.3:8000")
    assert "  10.0.0.3:8000 does not say how it is: only our own counts are known of it" in to_text(shown)


def test_a_picture_fits_a_terminal_and_says_what_its_columns_are() -> None:
    core = core_of(configured=False)
    text = to_text(core.explain(arrival_of(core), 0.0))
    assert max(map(len, text.splitlines())) <= 80
    assert "[1] seconds until the first token: shown, does not count" in text
    assert "[6] cost in seconds: counts -1 times" in text


def test_the_caller_is_named_and_without_one_how_to_ask_as_one() -> None:
    core = core_of(configured=False)
    assert "for the tenant anonymous; as another one: --header 'x-attache-tenant: NAME'" in to_text(
        core.explain(arrival_of(core), 0.0)
    )
    headers = {"x-attache-tenant": "acme", "x-attache-user": "ann"}
    asked = core.builder.build_by_model(msgspec.structs.replace(HEAD, headers=headers, is_trusted=True), BODY)
    assert "  for the tenant acme, user ann" in to_text(core.explain(asked, 0.0)).splitlines()


def test_explaining_changes_nothing() -> None:
    core = core_of(configured=False)
    core.explain(arrival_of(core), 0.0)
    pool = core.pools["default/llama"]
    assert pool.table.in_flight.sum() == 0
    assert pool.caches.index.match(pool.caches.estimate_prompt(_prompt(BODY), pool.table, 0.0).chain) == []


def _prompt(text: bytes) -> Prompt:
    return Prompt(text, "llama-3.1-8b")


async def test_the_page_explains_or_refuses_as_the_client_would_be() -> None:
    async def no_tokens(_: Arrival) -> None:
        return None

    app = web.Application()
    page = ExplainPage(core_of(configured=True), no_tokens, lambda: 0.0, GatewayOptions())
    app.add_routes([web.post("/debug/explain/{path:.*}", page.handle)])
    async with TestClient(TestServer(app)) as client:
        shown = await client.post("/debug/explain/v1/chat/completions", data=BODY)
        assert shown.status == 200
        assert len((await shown.json())["addresses"]) == 3
        refused = await client.post("/debug/explain/v1/chat/completions", data=BODY.replace(b'"chat"', b'"other"'))
        assert (refused.status, (await refused.json())["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/debug/explain/v1/nothing", data=BODY)).status == 404
        # as if an HTTPRoute had chosen the server, or on a listener that there is not
        chosen = await client.post("/debug/explain/v1/nothing?server=default/llama", data=BODY)
        assert (await chosen.json())["server"] == "default/llama"
        nowhere = await client.post("/debug/explain/v1/chat/completions?listener=gone", data=BODY)
        assert nowhere.status == 404


async def test_the_page_of_a_picker_explains_as_its_gateway_asks() -> None:
    async def no_tokens(_: Arrival) -> None:
        return None

    app = web.Application()
    options = GatewayOptions(pool="default/llama", duplex_choices=2)
    page = ExplainPage(core_of(configured=True), no_tokens, lambda: 0.0, options)
    app.add_routes([web.post("/debug/explain/{path:.*}", page.handle)])
    async with TestClient(TestServer(app)) as client:
        for path, body in (("v1/chat/completions", BODY.replace(b'"chat"', b'"of-no-route"')), ("any/path", b"any")):
            shown = await (await client.post(f"/debug/explain/{path}", data=body)).json()
            assert (shown["server"], len(shown["addresses"])) == ("default/llama", 2)
        other = await client.post("/debug/explain/any?pool=default/gone", data=BODY)
        assert other.status == 503


@pytest.mark.parametrize("has_page", [False, True])
async def test_a_process_without_the_page_refuses_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, has_page: bool
) -> None:
    async def no_tokens(_: Arrival) -> None:
        return None

    app = web.Application()
    if has_page:
        page = ExplainPage(core_of(configured=True), no_tokens, lambda: 0.0, GatewayOptions())
        app.add_routes([web.post("/debug/explain/{path:.*}", page.handle)])
    body = tmp_path / "body.json"
    body.write_bytes(BODY.replace(b'"chat"', b'"other"'))
    async with TestServer(app) as server:
        status = await asyncio.to_thread(main, ["explain", "--url", str(server.make_url("/")), str(body)])
    said = capsys.readouterr().err
    if has_page:
        assert (status, said.startswith("refused with 404: The model 'other' does not exist")) == (1, True)
    else:
        assert (status, "attache serve --config DIR -- --debug" in said) == (2, True)


def test_the_command_asks_as_a_gateway_with_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    body = tmp_path / "body.txt"
    for content, path in ((BODY.replace(b'"chat"', b'"of-no-route"'), "/v1/chat/completions"), (b"any", "/any")):
        body.write_bytes(content)
        words = ["explain", "--config", str(tmp_path), "--path", path, str(body)]
        assert main(words) == 1, "no route"
        assert main([*words, "--pool", "llama", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["server"], len(shown["addresses"])) == ("default/llama", 1)
    assert main([*words, "--pool", "gone"]) == 1
    assert "'default/gone' is not configured" in capsys.readouterr().err


def test_the_command_decides_by_a_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "all.yaml").write_bytes(CONFIG)
    body = tmp_path / "body.json"
    body.write_bytes(BODY)
    assert main(["explain", "--config", str(tmp_path), str(body)]) == 0
    assert "profile PrefixAware: 3 candidates" in capsys.readouterr().out
    assert main(["explain", "--config", str(tmp_path), "--json", str(body)]) == 0
    assert json.loads(capsys.readouterr().out)["server"] == "default/llama"
    assert main(["explain", "--config", str(tmp_path), "--server", "llama", "--path", "/any", str(body)]) == 0
    assert "profile PrefixAware: 3 candidates" in capsys.readouterr().out
    assert main(["explain", "--config", str(tmp_path), "--listener", "gone", str(body)]) == 1
    said = capsys.readouterr().err
    assert "does not exist" in said
    assert said.endswith("to ask a ModelServer without a route, write --server NAME; there are: default/llama\n")
    body.write_bytes(b"{}")
    assert main(["explain", "--config", str(tmp_path), str(body)]) == 1
    assert "refused with 400" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_the_command_says_who_does_not_answer_and_how_to_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    body = tmp_path / "body.json"
    body.write_bytes(BODY)
    assert main(["explain", "--url", url, str(body)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("nobody answers at http://127.0.0.1:1: [Errno 111] Connection refused; start extproc with")
    assert "attache serve --config DIR -- --debug" in said


def chosen_by(*totals: float, weights: Mapping[str, float], scores: Sequence[Mapping[str, float]]) -> Explanation:
    """A profile with the endpoints 1, 2, ..., the best first, whose first one was chosen."""
    endpoints = tuple(
        EndpointScores(str(number), dict(own), total)
        for number, (total, own) in enumerate(zip(totals, scores, strict=True), start=1)
    )
    profile = ProfileExplanation("one", 3, (FilterStep("near", ("9",), 2),), dict(weights), endpoints)
    return Explanation("s", "m", 1.0, 0.0, ("1",), 0.1, None, "", (profile,))


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (
            chosen_by(-1, -2, weights={"cost": -1, "seen": 0}, scores=[{"cost": 1, "seen": 7}, {"cost": 2, "seen": 0}]),
            "1 wins over 2 by cost: 1 against 2 (seen: 7 against 0)",
        ),
        (
            chosen_by(
                5, 4, weights={"queue": 1, "cache": 3}, scores=[{"queue": 2, "cache": 1}, {"queue": 4, "cache": 0}]
            ),
            "1 wins over 2 by cache: 1 against 0",
        ),
        (chosen_by(1, 1, 1, weights={"a": 1}, scores=[{"a": 1}] * 3), "1 was drawn: 2 and 3 have the same total"),
        (
            chosen_by(1, 3, weights={"a": 1}, scores=[{"a": 1}, {"a": 3}]),
            "1 was drawn although 2 has a higher total (3, not 1)",
        ),
        (chosen_by(1, weights={"a": 1}, scores=[{"a": 1}]), "1 is the only endpoint that near left"),
        (Explanation("s", "m", 1.0, 0.0, ("1",), 0.1, None, "", ()), ""),
    ],
    ids=["cost", "weights", "equals", "at random", "alone", "unscored"],
)
def test_a_sentence_tells_why_an_endpoint_was_chosen(one: Explanation, sentence: str) -> None:
    assert why_chosen(one) == sentence
    assert not sentence or f"  {sentence}\n" in to_text(one)


def test_a_sample_of_decisions_and_their_outcomes_is_written_down() -> None:
    core, lines = core_of(configured=True), list[bytes]()
    log = DecisionLog(lines.append, share=1.0, rng=random.Random(0), wall_clock=lambda: 17.0)
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0, decision_log=log)
    assert log.draw_sample()
    headers = {"x-attache-tenant": "acme", "x-attache-user": "ann", "x-request-id": "5e1f"}
    decision = explained(core, msgspec.structs.replace(HEAD, headers=headers, is_trusted=True))
    metrics.count_effect(decision)
    served = decision.assignment.endpoint.address
    settled = settle(core, Outcome(decision.ticket, 200, served, 1.0, 0.5, 700, 5, 64), 1.0)
    assert settled is not None
    metrics.count_effect(settled)
    made, came = map(json.loads, lines)
    assert (made["kind"], came["kind"], made["ticket"]) == ("decision", "outcome", came["ticket"])
    assert made["profiles"][0]["weights"] == {"queue-scorer": 2.0, "prefix-cache-scorer": 3.0}
    assert (came["cached_tokens"], came["predicted_cached_tokens"], came["at"]) == (64, 0.0, 17.0)
    for line in (made, came):
        assert (line["tenant"], line["user"], line["api_key"], line["request_id"]) == ("acme", "ann", "", "5e1f")
        assert line["server"] == "default/llama"
    used = {
        kind: metrics.registry.get_sample_value(
            f"attache_tenant_{kind}_tokens_total", {"server": "default/llama", "tenant": "acme"}
        )
        for kind in ("prompt", "cached", "output")
    }
    assert used == {"prompt": 700, "cached": 64, "output": 5}


def test_a_request_is_explained_by_its_best_thousand_endpoints_so_that_others_need_not_wait() -> None:
    addresses = [f"10.0.{number // 256}.{number % 256}:8000" for number in range(3_000)]
    core = Core(
        load_snapshot({"a.yaml": documents(addresses, gateway={}, alias="chat").encode()}),
        rng=random.Random(0),
        ticket_prefix="t",
    )
    table = core.pools["default/llama"].table
    # the last endpoint costs the least
    table.in_flight[:-1] = 5
    made = explained(core).history.explanation
    assert made is not None
    (profile,) = made.profiles
    assert (profile.candidates, len(profile.endpoints)) == (3_000, 1_000)
    assert made.addresses[0] == profile.endpoints[0].address == addresses[-1]
    # who asks for an explanation gets all
    assert len(core.explain(arrival_of(core), 0.0).profiles[0].endpoints) == 3_000


def test_only_the_share_is_written() -> None:
    log = DecisionLog(list[bytes]().append, share=0.1, rng=random.Random(1), wall_clock=lambda: 0.0)
    assert 60 < sum(log.draw_sample() for _ in range(1000)) < 140
