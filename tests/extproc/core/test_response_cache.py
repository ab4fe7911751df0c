# SPDX-License-Identifier: Apache-2.0
"""The response cache: whose requests share answers, what is kept, and in how much memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.core import Core
from extproc.core.effects import Broadcast, CacheLookupResult, CacheStoreAttempted, Decision, Fault, RequestRefused
from extproc.core.peer_events import EventBatch, decode_events, encode_events
from extproc.core.request_states import RequestState
from extproc.core.response_cache import (
    OVERHEAD_BYTES,
    AnswerStore,
    CacheControl,
    CacheKey,
    is_complete_answer,
    parse_cache_control,
)
from extproc.refusals import BadRequest, NotCached, RateLimited, StoredAnswer
from extproc.wire_names import REVISION_LABEL as REVISION
from extproc.wire_names import Api
from tests.extproc.scenes import CHAT, configuration, endpoints, request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.request_record import Arrival

SERVER: Final = f"scrapeInterval: 0s\n{endpoints('10.0.0.1:8000')}"
WHOLE: Final = b'{"choices": [{"finish_reason": "stop"}]}'
EMBEDDINGS: Final = "/v1/embeddings"


def cached(cache: str = "", *, route: str = "", servers: Mapping[str, str] | None = None) -> Core:
    routes = {"chat": f"cache: {{{cache}}}\n{route}"}
    config = configuration(servers=servers or {"llama": SERVER}, routes=routes)
    return Core(config, rng=random.Random(0), ticket_prefix="t")


def asks(
    core: Core,
    content: str = "hi",
    tenant: str = "acme",
    *,
    path: str = CHAT,
    headers: Mapping[str, str] | None = None,
    **fields: object,
) -> Arrival:
    own = {"x-attache-tenant": tenant, **(headers or {})}
    return request(core, content, path=path, headers=own, **{"temperature": 0, **fields})


def decided(core: Core, arrival: Arrival, now: float = 0.0) -> Decision:
    own, _ = core.arrive(arrival, now)
    assert isinstance(own, Decision), own
    return own


def hit(core: Core, arrival: Arrival, now: float = 0.0) -> StoredAnswer | None:
    own, _ = core.arrive(arrival, now)
    if isinstance(own, RequestRefused):
        assert isinstance(own.refusal, StoredAnswer)
        return own.refusal
    return None


def fill(core: Core, arrival: Arrival, body: bytes = WHOLE, now: float = 0.0) -> None:
    (read,) = core.on_cacheable_answer(decided(core, arrival, now).ticket, "json", body, now)
    assert read == CacheStoreAttempted("default/chat", "stored")


def test_an_equal_request_is_answered_and_uses_one_request_of_its_limits_and_no_tokens() -> None:
    core = cached(route="rateLimits: [{unit: hour, requests: 3, outputTokens: 130}]")
    fill(core, asks(core, max_tokens=60))
    own, effects = core.arrive(asks(core, max_tokens=60), 2.5)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, StoredAnswer)
    assert (own.refusal.body, own.refusal.headers["age"]) == (WHOLE, "2")
    assert [one for one in effects if isinstance(one, CacheLookupResult)] == [CacheLookupResult("default/chat", "hit")]
    assert core.state_of(own.ticket) is RequestState.ABSENT
    levels = {key.split("/")[3]: round(one.level) for key, one in core.admission.limits._buckets.items()}
    # the first request runs; the hit has used a request, and no tokens
    assert levels == {"requests": 1, "output_tokens": 70}
    assert hit(core, asks(core, max_tokens=60), 3.0) is not None
    refused = core.arrive(asks(core, max_tokens=60), 3.0)[0]
    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.refusal, RateLimited)


def test_a_fault_of_the_cache_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    core = cached()

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(core.stored_answers, "get", fails)
    own, effects = core.arrive(asks(core), 0.0)
    assert isinstance(own, Decision)
    assert own.cache_bytes == 0
    assert [type(one.error) for one in effects if isinstance(one, Fault)] == [ZeroDivisionError]


def test_a_route_without_a_cache_marks_no_answer() -> None:
    core = Core(configuration(servers={"llama": SERVER}), rng=random.Random(0), ticket_prefix="t")
    assert decided(core, asks(core)).cache_bytes == 0
    assert core.on_cacheable_answer("t-1", "json", WHOLE, 0.0) == [CacheStoreAttempted("", "unknown")]
    assert hit(core, asks(core)) is None


SCOPES: Final = {
    "Tenant": lambda one: one[0],
    "ApiKey": lambda one: one,
    "Route": lambda _: None,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_callers_share_answers_within_the_scope_and_never_beyond(scope: str) -> None:
    digests = {name: f"{number:064x}" for number, name in enumerate(("k1", "k2", "k3"))}
    whose = {"k1": "a", "k2": "a", "k3": "a:b"}
    keys = [{"name": name, "keySHA256": digest, "tenant": whose[name]} for name, digest in digests.items()]
    gateway = {"apiVersion": "attache.dev/v1alpha1", "kind": "GatewayConfig", "metadata": {"name": "g"}}
    others = json.dumps({**gateway, "spec": {"authentication": {"apiKeys": keys}}})
    config = configuration(servers={"llama": SERVER}, routes={"chat": f"cache: {{scope: {scope}}}"}, others=others)
    for one, other in combinations(digests, 2):
        core = Core(config, rng=random.Random(0), ticket_prefix="t")
        fill(core, request(core, headers={"x-attache-client": one}, temperature=0))
        found = hit(core, request(core, headers={"x-attache-client": other}, temperature=0))
        part = SCOPES[scope]
        assert (found is not None) == (part((whose[one], one)) == part((whose[other], other))), (one, other)


FIELDS: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 5, "stop": ["a"], "seed": 1}
JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
IGNORED: Final = {"user", "metadata", "service_tier", "request_id", "safety_identifier", "prompt_cache_key"}


def key_in(core: Core, arrival: Arrival) -> str | None:
    """Of a request that is looked up."""
    ticket = core.arrive(arrival, 0.0)[0].ticket
    awaited = core._caches.pop_awaited_answer(ticket)
    return None if awaited is None else awaited.key.text


@given(
    name=st.sampled_from(("top_p", "stop", "seed", "x", "tools_", "response_format", "logprobs", "user ", "é")),
    value=JSON,
)
def test_any_other_field_or_value_has_another_key(name: str, value: object) -> None:
    core = cached("anyTemperature: true")
    before = key_in(core, asks(core, **FIELDS))
    assert before is not None
    try:
        after = key_in(core, asks(core, **{**FIELDS, name: value}))
    except BadRequest:
        # the gateway refuses what its engines would
        return
    is_same = name in FIELDS and msgspec.json.encode(FIELDS[name]) == msgspec.json.encode(value)
    assert (after == before) == is_same


def test_what_is_ignored_and_what_is_not() -> None:
    core = cached()
    arrival = asks(core)
    before = key_in(core, arrival)
    for name in IGNORED:
        assert key_in(core, asks(core, **{name: "another"})) == before, name
    others: list[dict[str, Any]] = [
        {"content": "ho"},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": False}},
        {"cache_salt": "mine"},
        {"headers": {"anthropic-beta": "x"}},
        {"headers": {"anthropic-version": "x"}},
        {"headers": {":path": f"{CHAT}?x=1"}},
        {"headers": {":path": f"{CHAT}?x=2"}},
    ]
    keys = [key_in(core, asks(core, **one)) for one in others]
    assert len({before, *keys}) == 1 + len(others)
    # two texts that a reader of JSON may take for one are two requests
    twice = arrival.body[:-1] + b', "temperature": 0}'
    nested = arrival.body.replace(b'"content": "hi"', b'"content": "evil", "content": "hi"')
    head = arrival.head
    assert key_in(core, core.builder.build_by_model(head, twice)) == before
    assert key_in(core, core.builder.build_by_model(head, nested)) != before


BYPASSED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sampled": ("temperature", {"temperature": 0.1}),
    "no temperature": ("temperature", {"temperature": None}),
    "a text": ("temperature", {"temperature": "0"}),
    "several": ("several_answers", {"n": 2}),
    "stored": ("stateful", {"store": True}),
    "web search": ("stateful", {"web_search_options": {"a": 1}}),
    "a server's tool": ("tools", {"tools": [{"type": "web_search_20250305", "name": "x"}]}),
    "tools of another form": ("tools", {"tools": {"type": "function"}}),
    "long": ("size", {"stop": "x" * 5000}),
    "not to be stored": ("no_store", {"headers": {"cache-control": "no-store"}}),
}


@pytest.mark.parametrize("case", BYPASSED)
def test_what_passes_by_and_why(case: str) -> None:
    why, fields = BYPASSED[case]
    core = cached("maxRequestBytes: 4Ki")
    own, effects = core.arrive(asks(core, **fields), 0.0)
    assert isinstance(own, Decision)
    assert own.cache_bytes == 0
    assert CacheLookupResult("default/chat", "bypass", why) in effects


def test_seeds_any_temperature_own_tools_and_embeddings_are_looked_up() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}, {"name": "of Anthropic's"}]
    for core, fields in (
        (cached(), {"temperature": 1, "seed": 0}),
        (cached("anyTemperature: true"), {"temperature": 1}),
        (cached(), {"tools": tools, "n": 1, "store": False}),
        (cached(), {"path": EMBEDDINGS, "input": "x", "temperature": None}),
    ):
        assert decided(core, asks(core, **fields)).cache_bytes == 256 << 10


def test_clients_decide_by_cache_control() -> None:
    assert parse_cache_control("") == CacheControl()
    assert parse_cache_control("No-Cache, max-age=0") == CacheControl(reads=False, max_age_s=0)
    assert parse_cache_control('max-age="60"') == CacheControl(max_age_s=60)
    for odd in ("max-age=", "max-age=-1", "max-age=1e9", f"max-age={'9' * 5000}"):
        assert parse_cache_control(odd).max_age_s == 0
    assert parse_cache_control("private, =, ,;no-cache") == CacheControl()

    core = cached()
    own = core.arrive(asks(core, headers={"cache-control": "only-if-cached"}), 0.0)[0]
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, NotCached)
    fill(core, asks(core))
    assert hit(core, asks(core, headers={"cache-control": "max-age=5"}), 5.9) is not None
    assert hit(core, asks(core, headers={"cache-control": "max-age=5"}), 6.0) is None
    assert hit(core, asks(core, headers={"cache-control": "no-cache"}), 6.0) is None


def test_a_ttl_ends_and_another_generation_or_the_end_of_the_cache_empties_it() -> None:
    core = cached("ttl: 100s")
    fill(core, asks(core))
    assert hit(core, asks(core), 89.0) is not None
    assert hit(core, asks(core), 111.0) is None
    assert core.stored_answers.bytes == 0

    for after in ("cache: {ttl: 100s, generation: 1}", ""):
        core = cached("ttl: 100s")
        fill(core, asks(core))
        core.apply(configuration(servers={"llama": SERVER}, routes={"chat": after}), 1.0)
        assert (core.stored_answers.bytes, len(core.stored_answers)) == (0, 0)
        assert hit(core, asks(core), 1.0) is None


def of_revisions(*revisions: str, label: str = REVISION, draining: str = "") -> Snapshot:
    """A directory whose engines are of these; those of ``draining`` get no more requests."""
    engines = [
        {"address": f"10.0.0.{number}:8000", "labels": {label: one}, "draining": one == draining}
        for number, one in enumerate(revisions)
    ]
    server = f"scrapeInterval: 0s\nendpoints: {json.dumps(engines)}"
    return configuration(servers={"llama": server}, routes={"chat": "cache: {}"})


@pytest.mark.parametrize("label", [REVISION, "pod-template-hash", "controller-revision-hash"])
def test_a_rollout_makes_the_old_revisions_answers_unreachable(label: str) -> None:
    core = Core(of_revisions("old", "old", label=label), rng=random.Random(0), ticket_prefix="t")
    fill(core, asks(core))
    core.apply(of_revisions("old", label=label), 1.0)
    assert hit(core, asks(core)) is not None
    # a new engine serves beside the old one: either may answer
    core.apply(of_revisions("old", "new", label=label), 2.0)
    assert hit(core, asks(core), 2.0) is None
    fill(core, asks(core), now=2.0)
    assert hit(core, asks(core), 2.0) is not None
    core.apply(of_revisions("old", "new", label=label, draining="old"), 3.0)
    assert hit(core, asks(core), 3.0) is None
    fill(core, asks(core), now=3.0)
    core.apply(of_revisions("new", "new", label=label), 4.0)
    assert hit(core, asks(core), 4.0) is not None
    # what an engine of another revision may have written was never kept under this one
    core.apply(of_revisions("old", label=label), 5.0)
    assert hit(core, asks(core), 5.0) is not None


def test_answers_stay_reachable_while_there_is_no_engine_and_until_another_revision_comes() -> None:
    core = Core(of_revisions("old"), rng=random.Random(0), ticket_prefix="t")
    fill(core, asks(core))
    core.apply(of_revisions(), 1.0)
    assert hit(core, asks(core), 1.0) is not None
    core.apply(of_revisions("new"), 2.0)
    assert hit(core, asks(core), 2.0) is None


def test_an_answer_is_not_stored_if_engines_of_another_revision_have_come_meanwhile() -> None:
    core = Core(of_revisions("old"), rng=random.Random(0), ticket_prefix="t")
    ticket = decided(core, asks(core)).ticket
    core.apply(of_revisions("new"), 1.0)
    assert core.on_cacheable_answer(ticket, "json", WHOLE, 1.0) == [CacheStoreAttempted("default/chat", "outdated")]
    core.apply(of_revisions("old"), 2.0)
    assert hit(core, asks(core), 2.0) is None
    ticket = decided(core, asks(core), 2.0).ticket
    core.apply(configuration(servers={"other": SERVER}, routes={"chat": "cache: {}"}), 3.0)
    assert core.on_cacheable_answer(ticket, "json", WHOLE, 3.0) == [CacheStoreAttempted("default/chat", "outdated")]


def test_an_answer_comes_once_and_only_for_a_ticket_that_waits() -> None:
    core = cached()
    ticket = decided(core, asks(core)).ticket
    assert core.on_cacheable_answer("t-77", "json", WHOLE, 0.0) == [CacheStoreAttempted("", "unknown")]
    assert core.on_cacheable_answer(ticket, "json", b"{}", 0.0) == [CacheStoreAttempted("default/chat", "not_whole")]
    assert core.on_cacheable_answer(ticket, "json", WHOLE, 0.0) == [CacheStoreAttempted("", "unknown")]
    assert hit(core, asks(core)) is None
    for number in range(5000):
        decided(core, asks(core, f"prompt {number}"))
    assert core.on_cacheable_answer(ticket, "json", WHOLE, 0.0) == [CacheStoreAttempted("", "unknown")]
    assert len(core._caches._awaited) == 4096


def batch_of(core: Core, effects: list[Any]) -> EventBatch:
    events = [one.event for one in effects if isinstance(one, Broadcast)]
    return decode_events(encode_events(EventBatch(core.process_name, events)))


def test_workers_hand_answers_to_the_one_that_waits_and_share_them() -> None:
    config = configuration(servers={"llama": SERVER}, routes={"chat": "cache: {}"})
    one, two = (Core(config, rng=random.Random(0), ticket_prefix=name, machine="m") for name in ("one", "two"))
    ticket = decided(one, asks(one)).ticket
    # Envoy sends it to the other one
    stored = one.apply_peer_batch(batch_of(two, two.on_cacheable_answer(ticket, "json", WHOLE, 0.0)), 0.0)
    assert CacheStoreAttempted("default/chat", "stored") in stored
    two.apply_peer_batch(batch_of(one, stored), 0.0)
    assert hit(one, asks(one)) is not None
    assert hit(two, asks(two)) is not None
    assert hit(two, asks(two, tenant="other")) is None
    # one whose configuration has no cache yet, or no more
    plain = Core(configuration(servers={"llama": SERVER}), rng=random.Random(0), ticket_prefix="three", machine="m")
    plain.apply_peer_batch(batch_of(one, stored), 0.0)
    assert plain.stored_answers.bytes == 0
    # a long answer stays where it is
    assert two.on_cacheable_answer("one-9", "json", b"x" * (257 << 10), 0.0) == []


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(("a", "b", "c")), st.integers(0, 9), st.integers(0, 4000), st.booleans()),
        max_size=80,
    )
)
def test_the_store_counts_every_byte_and_stays_within_its_bound(steps: list[tuple[str, int, int, bool]]) -> None:
    store = AnswerStore(12_000)
    for now, (scope, number, size, is_read) in enumerate(steps):
        key = CacheKey(scope, f"{scope}:{number}")
        if is_read:
            store.get(key, float(now))
        else:
            store.put(key, "json", b"x" * size, now=float(now), ttl_s=7.0)
        entries = [(one, text, scope) for scope, answers in store._scopes.items() for text, one in answers.items()]
        expected = sum(len(one.body) + len(text) + len(scope) + OVERHEAD_BYTES for one, text, scope in entries)
        assert store.bytes == expected <= store.most_bytes
        assert store._sizes.keys() == store._scopes.keys()
        assert len(store._largest) <= 2 * len(store._sizes) + 65


def test_who_fills_the_store_loses_his_own_and_what_is_used_stays() -> None:
    store = AnswerStore(100_000)
    store.put(CacheKey("quiet", "quiet:1"), "json", b"x" * 1000, now=0.0, ttl_s=1e6)
    store.put(CacheKey("loud", "loud:used"), "json", b"x" * 1000, now=0.0, ttl_s=1e6)
    for number in range(1000):
        store.put(CacheKey("loud", f"loud:{number}"), "json", b"x" * 1000, now=1.0, ttl_s=1e6)
        assert store.get(CacheKey("loud", "loud:used"), 1.0) is not None
    assert store.get(CacheKey("quiet", "quiet:1"), 1.0) is not None
    assert store.evicted > 900
    assert not store.put(CacheKey("a", "a:1"), "json", b"x" * 100_000, now=1.0, ttl_s=1.0)


def test_small_answers_take_no_more_memory_than_is_counted() -> None:
    store = AnswerStore()
    tracemalloc.start()
    try:
        for number in range(5000):
            name = f"c1:route:0:tenant:{number}"
            store.put(CacheKey(name, f"{name}:{'k' * 100}{number}"), "json", b"x%d" % number, now=0.0, ttl_s=1e6)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= store.bytes


def chunk(**fields: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(fields).encode()


STREAM: Final = [
    chunk(choices=[{"delta": {"content": "a"}, "finish_reason": None}]),
    chunk(choices=[{"delta": {}, "finish_reason": "stop"}]),
    chunk(choices=[], usage={}),
    b"data: [DONE]\n\n",
]


def test_a_stream_is_whole_only_at_its_last_byte() -> None:
    whole = b"".join(STREAM)
    for text in (whole, whole.replace(b"\n", b"\r\n"), b": ping\n\n" + whole):
        assert is_complete_answer(Api.CHAT, "stream", text)
        for end in range(len(text)):
            assert not is_complete_answer(Api.CHAT, "stream", text[:end]), end
    assert not is_complete_answer(Api.CHAT, "json", whole)
    assert not is_complete_answer(Api.EMBEDDINGS, "stream", whole)
    for without in (0, 2):
        assert is_complete_answer(Api.CHAT, "stream", b"".join(STREAM[:without] + STREAM[without + 1 :]))
    for without in (1, 3):
        assert not is_complete_answer(Api.CHAT, "stream", b"".join(STREAM[:without] + STREAM[without + 1 :]))
    for reason in ("content_filter", "abort", "error", ""):
        assert not is_complete_answer(Api.CHAT, "stream", whole.replace(b'"stop"', b'"%s"' % reason.encode()))


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_an_engine_writes_is_judged_without_an_error(body: bytes) -> None:
    for api in Api:
        assert is_complete_answer(api, "json", body) in {True, False}
        assert is_complete_answer(api, "stream", b"data: " + body + b"\n\n") in {True, False}


def test_the_key_is_of_what_a_rule_makes_of_the_request() -> None:
    core = cached(route="rules: [{targetModels: [{modelServerName: llama}], set: {temperature: 0, top_p: 0.5}}]")
    fill(core, asks(core, temperature=0.9, top_p=0.1))
    # what the rule sets is no difference, and what it leaves is one
    assert hit(core, asks(core, temperature=0.7)) is not None
    assert hit(core, asks(core, temperature=0.9, top_p=0.1, max_tokens=5)) is None
