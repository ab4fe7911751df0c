# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for the store of global limits or for their tokens: what each answer leads to."""

from __future__ import annotations

import json
import random

import pytest

from extproc.api.load import load
from extproc.core.core import Core
from extproc.core.effects import AskLimits, AskTokens, Decision, Hold, Refused, SettleGrant
from extproc.core.record import Head
from extproc.core.states import IllegalEvent, State
from extproc.errors import LimitsUnavailable, RateLimited
from extproc.protocol import Api
from tests.extproc.core.setting import GATES, ONE, body, snapshot

CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, scrapeInterval: 0s, kvEvents: {port: 5557}, endpoints: [{address: '10.0.0.1:8000'}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: m
  rules: [{targetModels: [{modelServerName: llama}]}]
  rateLimits:
    - {unit: hour, requests: 5}
    - {unit: hour, requests: 9, scope: Global, withoutRedis: %s}
"""


def asking(without_redis: str = "Local") -> tuple[Core, AskLimits]:
    core = Core(load({"a.yaml": (CONFIG % without_redis).encode()}), rng=random.Random(0), ticket_prefix="t")
    return core, ask(core)


def ask(core: Core) -> AskLimits:
    head = Head("POST", "/v1/chat/completions", {}, has_body=True)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    own, _ = core.arrive(core.intake.receive(Api.CHAT, head, body), 0.0)
    assert isinstance(own, AskLimits)
    return own


def local_level(core: Core) -> float:
    (bucket,) = [one for key, one in core.admission.limits._buckets.items() if key.startswith("default/chat/0/")]
    return round(bucket.level)


def test_the_store_is_asked_only_for_what_machines_share() -> None:
    core, one = asking()
    assert [charge.limit.capacity for charge in one.charges] == [9]
    assert local_level(core) == 4


def test_without_the_store_this_process_grants_by_itself() -> None:
    core, one = asking()
    own, effects = core.resume(one.ticket, None, 0.0)
    assert isinstance(own, Decision)
    assert not any(grant.is_global for grant in own.grants)
    core.leave(one.ticket, 1.0)
    # both came back, and nothing goes to a store that was not asked
    assert local_level(core) == 5
    assert not [effect for effect in effects if isinstance(effect, SettleGrant)]


def test_without_the_store_a_limit_that_needs_it_refuses_and_gives_back_the_local_grant() -> None:
    core, one = asking("Refuse")
    own, _ = core.resume(one.ticket, None, 0.0)
    assert isinstance(own, Refused)
    assert isinstance(own.refusal, LimitsUnavailable)
    assert local_level(core) == 5
    assert core.state_of(one.ticket) is State.ABSENT


def test_the_stores_refusal_is_told_and_gives_back_the_local_grant() -> None:
    core, one = asking()
    refusal = RateLimited("too much", kind="requests", headers={}, retry_after_s=3)
    own, _ = core.resume(one.ticket, refusal, 0.0)
    assert isinstance(own, Refused)
    assert own.refusal is refusal
    assert local_level(core) == 5


def test_an_answer_of_the_wrong_kind_is_a_mistake_and_changes_nothing() -> None:
    core, one = asking()
    with pytest.raises(IllegalEvent, match="list is not legal while request t-1 is in state ASKING_LIMITS"):
        core.resume(one.ticket, [1, 2], 0.0)
    assert core.state_of(one.ticket) is State.ASKING_LIMITS

    core.pools["default/llama"].caches.set_feed_state(0, is_whole=True)
    own, _ = core.resume(ask(core).ticket, None, 0.0)
    assert isinstance(own, AskTokens)
    refusal = RateLimited("", kind="", headers={}, retry_after_s=1)
    with pytest.raises(IllegalEvent, match="RateLimited is not legal while request t-2 is in state ASKING_TOKENS"):
        core.resume(own.ticket, refusal, 0.0)
    assert core.state_of(own.ticket) is State.ASKING_TOKENS
    # and the right one goes on
    assert isinstance(core.resume(own.ticket, None, 0.0)[0], Decision)


def count(core: Core) -> object:
    head = Head("POST", "/v1/messages/count_tokens", {}, has_body=True)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    own, _ = core.arrive(core.intake.receive(Api.COUNT_TOKENS, head, body), 0.0)
    return own


def test_counting_tokens_passes_by_the_queue_but_not_past_limits() -> None:
    core = Core(snapshot(ONE, GATES[1], "{unit: hour, requests: 4}"), rng=random.Random(0), ticket_prefix="t")
    head = Head("POST", "/v1/chat/completions", {}, has_body=True)

    def generate() -> object:
        return core.arrive(core.intake.receive(Api.CHAT, head, body(1, stream=False)), 0.0)[0]

    assert isinstance(generate(), Decision)
    assert isinstance(generate(), Hold)
    assert isinstance(count(core), Decision)
    assert isinstance(count(core), Decision)
    assert isinstance(count(core), Refused)


def test_counting_tokens_waits_for_an_engine_as_all_do() -> None:
    core = Core(snapshot("", GATES[1]), rng=random.Random(0), ticket_prefix="t")
    assert isinstance(count(core), Hold)
