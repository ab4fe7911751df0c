# SPDX-License-Identifier: Apache-2.0
"""Which requests are translated, to which API, and what becomes of fallbacks, salts and breakers."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from extproc.core.core import Core
from extproc.core.effects import Decision, RequestRefused
from extproc.core.explanation import to_text
from extproc.core.request_record import GatewayProperties, Outcome
from extproc.refusals import UnknownPath
from extproc.translate.directive import TranslationDirective, decode_directive, encode_directive, translation_target_api
from extproc.wire_names import Api
from tests.extproc.scenes import configuration, endpoints, request

A, B, C = "10.0.0.1:8000", "10.0.1.1:8000", "10.0.2.1:8000"
MESSAGES = "/v1/messages"
SALTED = """apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec: {cacheIsolation: Tenant}
"""


def server(address: str, apis: str = "", translation: str = "Lenient", more: str = "") -> str:
    named = f"apis: [{apis}]\ntranslation: {translation}\n" if apis else ""
    return endpoints(address) + "scrapeInterval: 0s\n" + named + more


def core_with(rule: dict[str, object], others: str = "", **servers: str) -> Core:
    snapshot = configuration(servers=servers, routes={"chat": f"rules: {json.dumps([rule])}"}, others=others)
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def to(*names: str, fallback: tuple[str, ...] = ()) -> dict[str, object]:
    rule: dict[str, object] = {"targetModels": [{"modelServerName": name} for name in names]}
    return {**rule, "fallback": [{"modelServerName": name, "degraded": True} for name in fallback]}


def sent(core: Core, path: str = MESSAGES, **fields: object) -> Decision:
    own, _ = core.arrive(request(core, "hi", path=path, max_tokens=9, **fields), 0.0, wants_reasons=True)
    assert isinstance(own, Decision)
    return own


@pytest.mark.parametrize(
    ("client", "served", "engine"),
    [
        (Api.MESSAGES, ["ChatCompletions", "Responses"], Api.CHAT),
        (Api.MESSAGES, ["Responses"], Api.RESPONSES),
        (Api.RESPONSES, ["Messages", "ChatCompletions"], Api.CHAT),
        (Api.CHAT, ["Messages"], Api.MESSAGES),
        (Api.CHAT, ["Embeddings"], None),
        (Api.COMPLETIONS, ["ChatCompletions"], None),
        (Api.COUNT_TOKENS, ["ChatCompletions"], None),
        (None, ["ChatCompletions"], None),
    ],
)
def test_the_engines_api_is_the_nearest(client: Api | None, served: list[str], engine: Api | None) -> None:
    assert translation_target_api(client, served) is engine


def test_a_directive_is_read_as_it_is_written() -> None:
    directive = TranslationDirective(
        "chat", "messages", is_strict=True, headers={"x-a": "ä"}, answer_headers={"x-b": "1"}
    )
    assert decode_directive(encode_directive(directive)) == directive


def test_a_request_of_another_api_is_translated() -> None:
    for translation in ("Lenient", "Strict"):
        core = core_with(to("a"), a=server(A, "ChatCompletions", translation))
        directive = TranslationDirective("messages", "chat", is_strict=translation == "Strict", limit_s=1800.0)
        assert sent(core).translation == directive
        assert sent(core, "/v1/chat/completions").translation is None


@pytest.mark.parametrize("spec", [server(A, "ChatCompletions", "Never"), server(A, "Embeddings, Completions", "Never")])
def test_others_are_refused_with_the_paths_that_are_served(spec: str) -> None:
    core = core_with(to("a"), a=spec)
    with pytest.raises(UnknownPath, match="write to /v1/"):
        request(core, "hi", path=MESSAGES)


def test_another_target_that_takes_the_api_comes_before_a_translation() -> None:
    core = core_with(
        to("a", "b", "c"), a=server(A, "Responses"), b=server(B, "Messages"), c=server(C, "Embeddings", "Never")
    )
    assert {request(core, "hi", path=MESSAGES).destination.server for _ in range(30)} == {"default/b"}
    assert {request(core, "hi").destination.server for _ in range(30)} == {"default/a", "default/b"}


def test_no_other_gateway_has_a_translator() -> None:
    core = core_with(to("a"), a=server(A, "ChatCompletions"))
    own, _ = core.arrive(request(core, "hi", path=MESSAGES), 0.0, GatewayProperties(is_bundle=False))
    assert isinstance(own, RequestRefused)
    assert own.refusal.code == "unknown_url"


def test_where_an_http_route_has_chosen_nothing_is_translated() -> None:
    core = core_with(to("a"), a=server(A, "ChatCompletions"))
    head = request(core, "hi").head
    body = b'{"model": "m", "messages": [], "max_tokens": 9}'
    with pytest.raises(UnknownPath):
        core.builder.build_for_server("default/a", msgspec.structs.replace(head, path=MESSAGES), body)


def test_all_attempts_have_one_body_so_a_fallback_of_another_api_is_skipped() -> None:
    core = core_with(to("a", fallback=("b", "c")), a=server(A), b=server(B, "ChatCompletions"), c=server(C))
    decision = sent(core)
    assert decision.attempts is not None
    assert set(decision.attempts.servers) == {"default/a", "default/c"}
    assert decision.history.explanation is not None
    assert "it has other APIs, and an attempt after another is not translated" in to_text(decision.history.explanation)


def test_a_translated_request_has_no_further_attempt_elsewhere() -> None:
    core = core_with(to("a", fallback=("b",)), a=server(A, "ChatCompletions"), b=server(B))
    decision = sent(core)
    assert decision.attempts is None
    assert decision.translation is not None
    assert decision.translation.answer_headers == {"x-attache-served-by": "default/a"}
    assert decision.history.explanation is not None
    assert "the request is translated for its own ModelServer" in to_text(decision.history.explanation)


def test_at_once_a_fallback_gets_a_request_that_is_translated_for_it() -> None:
    core = core_with(to("a", fallback=("b",)), a="endpoints: []\n", b=server(B, "ChatCompletions"))
    decision = sent(core)
    assert (decision.server, decision.history.fell_back_for) == ("default/b", "no_endpoint")
    assert decision.translation is not None
    assert decision.translation.answer_headers == {
        "x-attache-served-by": "default/b",
        "x-attache-degraded": "model",
    }


def test_engines_get_the_cache_salt_and_a_provider_none() -> None:
    provider = "provider: {host: 192.0.2.1, port: 80, scheme: http}\napis: [ChatCompletions]\ntranslation: Lenient\n"
    for spec, has_salt in ((server(A, "ChatCompletions"), True), (provider, False)):
        core = core_with(to("a", fallback=("b",)), SALTED, a=spec, b=server(B))
        decision = sent(core, seed=3)
        assert (b"cache_salt" in (decision.body or b"")) is has_salt


def test_what_never_came_back_says_nothing_of_the_engine() -> None:
    core = core_with(to("a"), a=server(A, "ChatCompletions"))
    pool = core.pools["default/a"]
    for at in range(20):
        decision = sent(core)
        core.on_stream_closed(decision.ticket, float(at))
        outcome = Outcome(decision.ticket, 503, "", 0.1, None, None, None, None, is_of_gateway=True)
        core.on_outcome(outcome, float(at))
    assert not pool.table.trips.any()
    assert not pool.breaker.trips
    # the same of an engine is a failure
    decision = sent(core, "/v1/chat/completions")
    core.on_stream_closed(decision.ticket, 30.0)
    core.on_outcome(Outcome(decision.ticket, 503, A, 0.1, None, None, None, None, attempts=1), 30.0)
    assert pool.table.trips.any()
