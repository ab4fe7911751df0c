# SPDX-License-Identifier: Apache-2.0
"""SGLang's engines get a request at once, behind a real Envoy: what its client gets, and what is left of it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anthropic
import httpx
import openai
import pytest

from tests.bench.engine.test_kv_exchange import running
from tests.waiting import eventually
from tests.with_envoy.stand_in import Engine as StandIn
from tests.with_envoy.stand_in import served
from tests.with_envoy.test_prefill_leg import CHAT, MODEL, PROMPT, Scene, ask_openai, duplex_on, scene_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.engine.test_kv_exchange import Engine

WRITTEN: Final = "vllm:generation_tokens_total"
sglang = partial(scene_of, connector="bootstrap_room")


async def has_ended(scene: Scene, outcome: str, count: int = 1) -> None:
    """So many legs so, and no other; nothing is left on either engine, nor in extproc."""

    async def ended() -> bool:
        return await scene.legs(outcome) == count

    await eventually(ended)
    await scene.pair.are_free()
    assert await scene.legs_in_flight() == 0


async def fail(engine: Engine, **fault: object) -> None:
    assert (await engine.http.post("/faults", json=fault)).status_code == 200


async def computes(engine: Engine) -> bool:
    return not await engine.is_free()


async def test_answers_are_those_of_a_whole_engine_and_the_decode_engine_computes_no_prompt(tmp_path: Path) -> None:
    async with running("NixlConnector") as whole, sglang(tmp_path) as scene:
        async with openai.AsyncOpenAI(base_url=f"{whole.decode.url}/v1", api_key="none", timeout=60) as one:
            assert await ask_openai(scene.openai) == await ask_openai(one)
        await has_ended(scene, "prefilled", 4)
        assert await scene.pair.decode.computed() == 0
        assert await scene.pair.decode.metric("vllm:nixl_bytes_transferred_count") == 4
        decision = scene.decisions()[0]
        assert (decision["prefill_leg"]["outcome"], decision["stage"]) == ("beside", "prefill sent on")
        assert decision["prefill_leg"]["address"] == scene.pair.prefill.url.removeprefix("http://")
        # it is held for nothing
        assert "prefill_wait_s" not in decision
        outcome = await scene.outcome()
        assert outcome["prefill_leg"]["outcome"] == "prefilled"
        assert outcome["prefill_leg"]["took_s"] > 0


async def test_responses_and_lists_of_prompts_have_rooms_too(tmp_path: Path) -> None:
    async with sglang(tmp_path) as scene:
        answer = await scene.openai.responses.create(model=MODEL, input=PROMPT, max_output_tokens=6)
        assert answer.usage is not None
        assert answer.usage.output_tokens == 6
        batch = await scene.openai.completions.create(model=MODEL, prompt=[PROMPT, f"2 {PROMPT}"], max_tokens=6)
        assert [one.index for one in batch.choices] == [0, 1]
        await has_ended(scene, "prefilled", 2)
        assert await scene.pair.decode.computed() == 0


async def test_what_two_engines_cannot_do_together_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with sglang(tmp_path) as scene:
        with pytest.raises(openai.BadRequestError, match="several answers"):
            await scene.openai.completions.create(model=MODEL, prompt=PROMPT, n=2)
        with pytest.raises(anthropic.BadRequestError, match="does not take it"):
            await scene.anthropic.messages.create(model=MODEL, max_tokens=6, messages=CHAT)  # type: ignore[arg-type]
        # what computes no prompt needs no prefill
        answer = await scene.gateway.http.post(
            f"{scene.gateway.url}/tokenize", json={"model": MODEL, "prompt": "once upon"}
        )
        assert answer.status_code == 200
        assert await scene.legs("prefilled") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_without_its_prefill_engine_a_request_ends_at_once_with_an_error(tmp_path: Path, *, stream: bool) -> None:
    async with sglang(tmp_path) as scene:
        await scene.pair.prefill.stop()
        with pytest.raises(openai.InternalServerError, match="Aborted") as raised:
            await scene.openai.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)  # type: ignore[arg-type,call-overload]
        assert raised.value.status_code == 500

        async def ended() -> bool:
            return await scene.legs("unreachable") == 1

        await eventually(ended)
        await eventually(scene.pair.decode.is_free)
        assert await scene.pair.decode.metric(WRITTEN) == 0
        outcome = await scene.outcome()
        assert (outcome["status"], outcome["prefill_leg"]["outcome"]) == (500, "unreachable")


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"fault": "unavailable", "times": 1, "status": 503}, "error"),
        ({"fault": "unavailable", "times": 1, "status": 429}, "error"),
        ({"fault": "unavailable", "times": 1, "status": 400}, "refused"),
        ({"fault": "ill", "kind": "garbage", "times": 1}, "unreadable"),
        ({"fault": "ill", "kind": "silence", "times": 1}, "timeout"),
        ({"fault": "ill", "kind": "drip", "times": 1}, "timeout"),
    ],
)
async def test_whatever_the_prefill_engine_does_the_decode_engine_does_not_wait_for_it(
    tmp_path: Path, fault: dict[str, Any], outcome: str
) -> None:
    timeout = "1s" if outcome == "timeout" else "60s"
    async with sglang(tmp_path, prefillTimeout=timeout, onPrefillFailure="Fail") as scene:
        await fail(scene.pair.prefill, **fault)
        with pytest.raises(openai.InternalServerError, match="Aborted") as raised:
            await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert raised.value.status_code == 500
        await has_ended(scene, outcome)
        assert await scene.pair.decode.metric(WRITTEN) == 0
        # the engines are as before
        again = await scene.openai.completions.create(model=MODEL, prompt=f"2 {PROMPT}", max_tokens=6)
        assert again.usage is not None
        await has_ended(scene, "prefilled")


async def test_what_both_engines_refuse_the_client_gets_as_the_decode_engine_says_it(tmp_path: Path) -> None:
    async with sglang(tmp_path) as scene:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await scene.openai.completions.create(model=MODEL, prompt="word " * 20_000, max_tokens=6)
        await has_ended(scene, "refused")


async def test_a_decode_engine_that_fails_frees_the_prefill_engine_and_no_other_one_is_asked(tmp_path: Path) -> None:
    failing = StandIn()
    failing.is_plain, failing.status = True, 503
    async with served(failing) as address, sglang(tmp_path, decode=address) as scene:
        with pytest.raises(openai.InternalServerError) as raised:
            await scene.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        assert raised.value.status_code == 503
        assert failing.requests == 1
        assert {"bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"} <= failing.asked.keys()
        # it waits in its room until extproc closes its request
        await has_ended(scene, "left")
        assert await scene.pair.prefill.metric(WRITTEN) == 0


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with sglang(tmp_path, speed=0.02) as scene:
        asking = asyncio.create_task(
            scene.gateway.http.post(
                f"{scene.gateway.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 6}
            )
        )
        await eventually(partial(computes, scene.pair.prefill))
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.TransportError)):
            await asking
        await has_ended(scene, "left")


@pytest.mark.parametrize("kind", ["original_dst", "override_host"])
async def test_gateways_that_send_bodies_in_pieces_have_legs_beside_too(tmp_path: Path, kind: str) -> None:
    async with running("NixlConnector") as whole, running("SGLang") as pair:
        addresses = [one.url.removeprefix("http://") for one in (pair.prefill, pair.decode)]
        group = {"connector": "bootstrap_room", "transferPort": pair.prefill.side_port}
        async with (
            duplex_on(tmp_path, kind, *addresses, engine="SGLang", group=group) as made,
            openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0, timeout=60) as open_ai,
            openai.AsyncOpenAI(base_url=f"{whole.decode.url}/v1", api_key="none", timeout=60) as one,
        ):
            assert await ask_openai(open_ai) == await ask_openai(one)
            assert await pair.decode.computed() == 0
            await fail(pair.prefill, fault="unavailable", times=1)
            with pytest.raises(openai.InternalServerError):
                await open_ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6)
        await pair.are_free()
