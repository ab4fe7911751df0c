# SPDX-License-Identifier: Apache-2.0
"""Session affinity with real clients, through Envoys of other gateways and through our own bundle's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from controller.bundle.atomic_files import replace_file
from extproc.scheduling.sessions import session_token
from tests.waiting import eventually
from tests.with_envoy.gateways import engines, gateway, pool_config

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stack.loopback_stack import Stack

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "base", "messages": [{"role": "user", "content": "Who are you?"}]})
BY_HEADER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: session-affinity-filter
- type: random-picker
"""
BY_ID = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: session-affinity-filter, parameters: {strategy: session_id}}
- type: random-picker
"""
FORGED = [session_token("127.0.0.1:1"), session_token("169.254.169.254:80"), "not base64!", "////", "=" * 5000]


async def told(http: httpx.AsyncClient, url: str, **headers: str) -> tuple[str, str]:
    """Which engine served, and the token that the answer carries."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await http.post(url + CHAT, content=BODY, headers=named)
    assert answer.status_code == 200
    # an engine of a session gets no token: it is ours
    assert "x-session-token" not in {name.lower() for name in answer.json()["headers"]}
    return answer.json()["served"], answer.headers.get("x-session-token", "")


@pytest.mark.parametrize("kind", ["original_dst", "override_host"])
async def test_a_gateways_answers_carry_a_token_that_brings_requests_back(tmp_path: Path, kind: str) -> None:
    flags = ["--duplex-choices", "3"] if kind == "override_host" else []
    async with (
        engines(3) as addresses,
        gateway(tmp_path, addresses, kind=kind, flags=flags, picker=BY_HEADER) as made,
        httpx.AsyncClient(timeout=30) as http,
    ):
        tokens = {}
        while len(tokens) < 3:
            served, token = await told(http, made.url)
            tokens[served] = token
        for served, token in tokens.items():
            assert {await told(http, made.url, x_session_token=token) for _ in range(6)} == {(served, token)}
        # streamed answers carry it as well
        headers = {"x-pieces": "3", "x-session-token": tokens[addresses[1]]}
        streamed = await http.post(made.url + CHAT, content=BODY, headers=headers)
        assert streamed.headers["x-session-token"] == tokens[addresses[1]]
        for forged in FORGED:
            served, token = await told(http, made.url, x_session_token=forged)
            assert tokens[served] == token
        # an endpoint that is gone: another serves, and says so
        replace_file(made.config / "pool.yaml", pool_config(addresses[1:], picker=True).encode(), 0o644)

        async def has_moved() -> bool:
            served, token = await told(http, made.url, x_session_token=tokens[addresses[0]])
            return served != addresses[0] and token == tokens[served]

        await eventually(has_moved)


async def test_ids_bind_sessions_and_tenants_have_their_own(tmp_path: Path) -> None:
    async with (
        engines(3) as addresses,
        gateway(tmp_path, addresses, flags=["--trust-headers"], picker=BY_ID) as made,
        httpx.AsyncClient(timeout=30) as http,
    ):
        places = {}
        for name in [f"tenant-{number}" for number in range(12)]:
            places[name], token = await told(http, made.url, x_attache_tenant=name, x_session_id="1")
            assert not token
        assert len(set(places.values())) > 1
        for name, place in places.items():
            assert {(await told(http, made.url, x_attache_tenant=name, x_session_id="1"))[0] for _ in range(4)} == {
                place
            }


FLAGS = EngineFlags(count=3, speed=20.0)
SERVED = "x-served"


async def asked(client: openai.AsyncOpenAI, **headers: str) -> tuple[str, str]:
    """OpenAI's own client: which engine served, and the token that the answer carries."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.chat.completions.with_raw_response.create(
        model=ALIAS, messages=[{"role": "user", "content": "Who?"}], max_tokens=2, extra_headers=named
    )
    return answer.headers[SERVED], answer.headers.get("x-session-token", "")


def client_of(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=30)


async def test_envoy_writes_the_token_in_our_bundle(tmp_path: Path) -> None:
    picker = tmp_path / "picker.yaml"
    picker.write_text(BY_HEADER)
    async with (
        running_stack(tmp_path / "stack", FLAGS, picker=picker, gateway={"servedHeader": SERVED}) as stack,
        client_of(stack) as client,
    ):
        tokens = {}
        while len(tokens) < 3:
            served, token = await asked(client)
            tokens[served] = token
        assert tokens == {served: session_token(served) for served in tokens}
        for served, token in tokens.items():
            assert {await asked(client, x_session_token=token) for _ in range(6)} == {(served, token)}
        for forged in FORGED:
            served, token = await asked(client, x_session_token=forged)
            assert tokens[served] == token


async def test_ids_bind_sessions_over_all_workers_of_our_bundle(tmp_path: Path) -> None:
    picker = tmp_path / "picker.yaml"
    picker.write_text(BY_ID)
    async with (
        running_stack(tmp_path / "stack", FLAGS, picker=picker, gateway={"servedHeader": SERVED}, workers=2) as stack,
        client_of(stack) as client,
    ):
        places = {}
        for number in range(10):
            places[f"s{number}"], token = await asked(client, x_session_id=f"s{number}")
            assert not token

        async def all_workers_know() -> bool:
            return all([(await asked(client, x_session_id=name))[0] == place for name, place in places.items()])

        # a worker tells the others within milliseconds; from then on, all know
        await eventually(all_workers_know)
        for _ in range(3):
            assert await all_workers_know()
