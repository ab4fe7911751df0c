# SPDX-License-Identifier: Apache-2.0
"""What a simulator cannot show: real engines' metrics, usage, KV events and adapters, through the whole gateway."""

from __future__ import annotations

import asyncio
import json
import random
import string
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.request_record import RequestHead
from extproc.feeds.tokenizers import LocalTokenizer
from tests.waiting import eventually
from tests.with_vllm.conftest import BLOCK, Engines, gateway
from tests.with_vllm.model import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from extproc.core.request_record import Arrival
    from tests.decision_log import LoggedOutcome

pytestmark = pytest.mark.asyncio(loop_scope="session")


def words(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(string.ascii_lowercase + "     ", k=length))


async def converse(url: str, *, sessions: int, turns: int, seed: int) -> None:
    """Conversations over eight system prompts of 2,000 tokens, two at a time."""
    rng = random.Random(seed)
    systems = [words(rng, 2000) for _ in range(8)]
    gate = asyncio.Semaphore(2)
    async with httpx.AsyncClient(timeout=60) as http:

        async def one(number: int) -> None:
            own = random.Random(f"{seed} {number}")
            messages = [{"role": "system", "content": own.choice(systems)}]
            for turn in range(turns):
                messages.append({"role": "user", "content": words(own, 70)})
                body = {
                    "model": "chat",
                    "messages": messages,
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "stream": (number + turn) % 2 == 0,
                }
                async with gate:
                    answer = await http.post(f"{url}/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                messages.append({"role": "assistant", "content": text_of(answer)})

        await asyncio.gather(*(one(number) for number in range(sessions)))


def text_of(answer: httpx.Response) -> str:
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def share_within_a_block(outcomes: Sequence[LoggedOutcome]) -> float:
    near = [abs(one.predicted_cached_tokens - (one.cached_tokens or 0)) <= BLOCK for one in outcomes]
    return sum(near) / len(near)


@pytest.mark.parametrize("precise", [False, True])
async def test_predicted_and_reported_cached_tokens_agree(
    engines: Engines, tmp_path: Path, record_property: Callable[[str, object], None], *, precise: bool
) -> None:
    async with gateway(tmp_path, engines, precise=precise) as one:
        await converse(one.url, sessions=4, turns=2, seed=100 + precise)  # the tokenizer's ratio is learned from these
        await converse(one.url, sessions=50, turns=4, seed=200 + precise)
        outcomes = (await one.outcomes(208))[8:]
        assert len(outcomes) == 200
        share = share_within_a_block(outcomes)
        record_property("within_a_block", share)
        assert share >= 0.95
        assert sum(one.is_precise for one in outcomes) / 200 == pytest.approx(1.0 if precise else 0.0, abs=0.05)


@pytest.mark.parametrize("precise", [False, True])
async def test_a_repeated_prefix_goes_to_the_engine_that_holds_it(
    engines: Engines, tmp_path: Path, *, precise: bool
) -> None:
    rng = random.Random(300 + precise)
    prefix = words(rng, 2000)
    async with gateway(tmp_path, engines, precise=precise) as one, httpx.AsyncClient(timeout=60) as http:
        reported = []
        for _ in range(8):
            messages = [{"role": "system", "content": prefix}, {"role": "user", "content": words(rng, 40)}]
            body = {"model": "chat", "messages": messages, "max_tokens": 4, "ignore_eos": True}
            usage = (await http.post(f"{one.url}/v1/chat/completions", json=body)).json()["usage"]
            reported.append((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        assert reported[0] < BLOCK
        assert all(cached >= 2000 - BLOCK for cached in reported[1:]), reported


async def test_engines_say_how_they_are(engines: Engines, tmp_path: Path) -> None:
    async with gateway(tmp_path, engines, precise=True) as one:

        async def are_known() -> bool:
            names = ("attache_engine_waiting{", "attache_engine_running{", "attache_engine_kv_usage{")
            async with httpx.AsyncClient(timeout=60) as http:
                page = (await http.get(f"{one.metrics}/metrics")).text
            return all(page.count(f"\n{name}") == 2 for name in names)

        await eventually(are_known)
        assert await one.metric('attache_engine_reports_total{result="failed"') == 0
        assert await one.metric('attache_kv_events_total{result="unreadable"') == 0
        assert await one.metric('attache_kv_events_total{result="replayed"') >= 2


async def test_an_adapter_that_one_engine_has_loaded_gets_that_engine(engines: Engines, tmp_path: Path) -> None:
    async with gateway(tmp_path, engines, precise=False) as one, httpx.AsyncClient(timeout=60) as http:
        loaded = engines.addresses[1]
        asked = {"lora_name": "sql", "lora_path": str(engines.adapter)}
        (await http.post(f"http://{loaded}/v1/load_lora_adapter", json=asked)).raise_for_status()
        await asyncio.sleep(2.0)  # engines are asked for their models once a second
        for number in range(10):
            body = {"model": "sql", "prompt": f"number {number} " * 20, "max_tokens": 4}
            answer = await http.post(f"{one.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert {outcome.served for outcome in await one.outcomes(10)} == {loaded}
        (await http.post(f"http://{loaded}/v1/unload_lora_adapter", json={"lora_name": "sql"})).raise_for_status()


async def test_usage_of_streams_reaches_client_and_gateway(engines: Engines, tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, engines, precise=False) as one,
        openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = [chunk.usage async for chunk in stream if chunk.usage is not None]
        assert usage[-1].completion_tokens == 5
        (outcome,) = await one.outcomes(1)
        assert outcome.prompt_tokens == usage[-1].prompt_tokens


async def test_our_tokens_are_the_engines_tokens(engines: Engines) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "héllo"}]},
    ]
    body = json.dumps({"model": NAME, "messages": messages}).encode()
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"http://{engines.addresses[0]}/tokenize", content=body, headers={"content-type": "application/json"}
        )
    ours = await LocalTokenizer(engines.model).tokens(arrival_of(body))
    assert list(ours or []) == answer.json()["tokens"]


def arrival_of(body: bytes) -> Arrival:
    config = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: tiny}}
spec: {{model: {NAME}, endpoints: []}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: tiny}}
spec: {{modelName: {NAME}, rules: [{{targetModels: [{{modelServerName: tiny}}]}}]}}
"""
    core = Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")
    return core.builder.build_by_model(RequestHead("POST", "/v1/chat/completions", {}, has_body=True), body)
