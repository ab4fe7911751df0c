# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for the store of global limits or for their tokens: what each answer leads to."""

from __future__ import annotations

import json
import random
import sys
from typing import TYPE_CHECKING

import pytest

from extproc.core.core import Core
from extproc.core.effects import AskLimits, AskPromptTokens, Decision, RequestHeld, RequestRefused, SettleGrant
from extproc.core.request_states import IllegalEvent, RequestState
from extproc.refusals import LimitsUnavailable, RateLimited
from tests.extproc.core.setting import GATES, ONE, snapshot
from tests.extproc.scenes import configuration, core_of, endpoints, request

if TYPE_CHECKING:
    from types import FrameType

    from extproc.api.config_snapshot import Snapshot

SERVER = "scrapeInterval: 0s\nkvEvents: {port: 5557}\nendpoints: [{address: '10.0.0.1:8000'}]"
LIMITS = "rateLimits: [{unit: hour, requests: 5}, {unit: hour, requests: 9, scope: Global, withoutRedis: %s}]"


def asking(without_redis: str = "Local") -> tuple[Core, AskLimits]:
    core = core_of(servers={"llama": SERVER}, routes={"chat": LIMITS % without_redis})
    return core, ask(core)


def ask(core: Core) -> AskLimits:
    own, _ = core.arrive(request(core), 0.0)
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
    core.on_disconnect(one.ticket, 1.0)
    # both came back, and nothing goes to a store that was not asked
    assert local_level(core) == 5
    assert not [effect for effect in effects if isinstance(effect, SettleGrant)]


def test_without_the_store_a_limit_that_needs_it_refuses_and_gives_back_the_local_grant() -> None:
    core, one = asking("Refuse")
    own, _ = core.resume(one.ticket, None, 0.0)
    assert isinstance(own, RequestRefused)
    assert isinstance(own.refusal, LimitsUnavailable)
    assert local_level(core) == 5
    assert core.state_of(one.ticket) is RequestState.ABSENT


def test_the_stores_refusal_is_told_and_gives_back_the_local_grant() -> None:
    core, one = asking()
    refusal = RateLimited("too much", kind="requests", headers={}, retry_after_s=3)
    own, _ = core.resume(one.ticket, refusal, 0.0)
    assert isinstance(own, RequestRefused)
    assert own.refusal is refusal
    assert local_level(core) == 5


def test_an_answer_of_the_wrong_kind_is_a_mistake_and_changes_nothing() -> None:
    core, one = asking()
    with pytest.raises(IllegalEvent, match="list is not legal while request t-1 is in state ASKING_LIMITS"):
        core.resume(one.ticket, [1, 2], 0.0)
    assert core.state_of(one.ticket) is RequestState.ASKING_LIMITS

    core.pools["default/llama"].caches.set_feed_state(0, is_whole=True)
    own, _ = core.resume(ask(core).ticket, None, 0.0)
    assert isinstance(own, AskPromptTokens)
    refusal = RateLimited("", kind="", headers={}, retry_after_s=1)
    with pytest.raises(IllegalEvent, match="RateLimited is not legal while request t-2 is in state ASKING_TOKENS"):
        core.resume(own.ticket, refusal, 0.0)
    assert core.state_of(own.ticket) is RequestState.ASKING_TOKENS
    # and the right one goes on
    assert isinstance(core.resume(own.ticket, None, 0.0)[0], Decision)


def count(core: Core) -> object:
    own, _ = core.arrive(request(core, path="/v1/messages/count_tokens"), 0.0)
    return own


def test_counting_tokens_passes_by_the_queue_but_not_past_limits() -> None:
    core = Core(snapshot(ONE, GATES[1], "{unit: hour, requests: 4}"), rng=random.Random(0), ticket_prefix="t")

    def generate() -> object:
        return core.arrive(request(core, stream=False, max_tokens=50), 0.0)[0]

    assert isinstance(generate(), Decision)
    assert isinstance(generate(), RequestHeld)
    assert isinstance(count(core), Decision)
    assert isinstance(count(core), Decision)
    assert isinstance(count(core), RequestRefused)


def test_counting_tokens_waits_for_an_engine_as_all_do() -> None:
    core = Core(snapshot("", GATES[1]), rng=random.Random(0), ticket_prefix="t")
    assert isinstance(count(core), RequestHeld)


SMALL, BIG = "{modelServerName: small}", "{modelServerName: big}"


def variants(engines: str, targets: str, *, big: str = "") -> Snapshot:
    """``engines``: of the small one. ``big``: more of the other one's spec."""
    held = "scrapeInterval: 0s\nactivation: {holdTimeout: 60s}\n"
    return configuration(
        servers={
            "small": f"{held}kvEvents: {{port: 5557}}\nendpoints: [{engines}]",
            "big": held + "model: b\nendpoints: [{address: '10.0.0.2:8000'}]\n" + big,
        },
        routes={
            "chat": f"rules: [{{targetModels: [{targets}]}}]\nrateLimits: [{{unit: hour, requests: 9, scope: Global}}]"
        },
    )


@pytest.mark.parametrize("asks_tokens", [False, True])
def test_a_request_whose_server_loses_its_engines_while_it_asks_goes_to_another_of_its_rule(
    asks_tokens: bool,
) -> None:
    engines = "{address: '10.0.0.1:8000'}"
    core = Core(variants(engines, SMALL), rng=random.Random(0), ticket_prefix="t")
    if asks_tokens:
        core.pools["default/small"].caches.set_feed_state(0, is_whole=True)
    own: object = ask(core)
    ticket = "t-1"
    if asks_tokens:
        own, _ = core.resume(ticket, None, 0.0)
        assert isinstance(own, AskPromptTokens)
    core.apply(variants("", f"{SMALL}, {BIG}"), 1.0)
    own, _ = core.resume(ticket, [1, 2] if asks_tokens else None, 1.0)
    assert isinstance(own, Decision)
    assert own.assignment.endpoint.address == "10.0.0.2:8000"
    assert json.loads(own.body or b"{}")["model"] == "b"
    # the tokens are those of the other server's model
    assert own.assignment.input_tokens != 2


def test_a_request_that_moves_while_it_asks_for_limits_asks_for_the_tokens_of_its_new_model() -> None:
    events = "kvEvents: {port: 5557}"
    core = Core(variants("{address: '10.0.0.1:8000'}", SMALL, big=events), rng=random.Random(0), ticket_prefix="t")
    core.pools["default/big"].caches.set_feed_state(0, is_whole=True)
    asks = ask(core)
    core.apply(variants("", f"{SMALL}, {BIG}", big=events), 1.0)
    asks_tokens, _ = core.resume(asks.ticket, None, 1.0)
    assert isinstance(asks_tokens, AskPromptTokens)
    assert asks_tokens.arrival.pool.name == "default/big"
    own, _ = core.resume(asks.ticket, [1, 2, 3, 4, 5], 1.0)
    assert isinstance(own, Decision)
    assert own.assignment.input_tokens == 5


# What a request goes through for the sake of something that has to be configured.
FEATURES = {
    *(
        "core/limit_accounting",
        "core/activation",
        "core/adapter_load",
        "core/breakers",
        "core/explanation",
        "core/fallback",
    ),
    *(
        "core/fallback_budget",
        "core/outcome_feedback",
        "core/slo_admission",
        "core/guards",
        "core/mirror",
        "core/slo_verdicts",
    ),
    *("core/remote_prefill", "core/flow_control", "core/response_cache", "core/tier_selector", "core/trace"),
    *("admission/budgets", "admission/limits", "admission/slo_classes", "api/pricing", "endpoints/prices"),
    *("scheduling/endpoint_masks", "scheduling/model_check"),
}


def entered(core: Core) -> set[str]:
    """The modules of extproc through which a request goes, from its arrival to its decision."""
    arrival, found = request(core), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename.rpartition("/extproc/")[2].removesuffix(".py"))

    sys.setprofile(note)
    try:
        own, _ = core.arrive(arrival, 0.0)
    finally:
        sys.setprofile(None)
    assert isinstance(own, Decision)
    return found


def test_a_request_goes_through_no_feature_that_is_not_configured_for_it() -> None:
    servers = {"llama": f"scrapeInterval: 0s\n{endpoints('10.0.0.1:8000')}"}
    budgets = "budgets: [{name: all, window: Day, max: {tokens: 1000000}}]"
    assert not FEATURES & entered(core_of(servers=servers))
    of_another = core_of(servers=servers, routes={"chat": "", "other": f"modelName: n\n{budgets}"})
    assert not FEATURES & entered(of_another)
    charged = core_of(servers=servers, routes={"chat": budgets})
    assert FEATURES & entered(charged) >= {"admission/budgets", "core/limit_accounting"}
