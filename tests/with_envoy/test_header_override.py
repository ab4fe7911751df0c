# SPDX-License-Identifier: Apache-2.0
"""Envoy Gateway's way: the load balancer takes a list of endpoints from the picker's header, and goes down it when it
retries.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx

from bench.stack.processes import free_ports
from tests.with_envoy.gateways import engines, gateway

if TYPE_CHECKING:
    from pathlib import Path

BODY = json.dumps({"model": "base", "messages": [{"role": "user", "content": "Who are you?"}]})


async def test_a_list_in_the_header_is_tried_in_order(tmp_path: Path) -> None:
    dead = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with engines(1) as alive:
        made = gateway(tmp_path, [*dead, *alive], kind="override_header", flags=["--duplex-choices", "3"])
        async with made as at, httpx.AsyncClient(timeout=30) as http:
            answers = [await http.post(f"{at.url}/v1/chat/completions", content=BODY) for _ in range(6)]
    assert {one.status_code for one in answers} == {200}
    lists = [one.json()["headers"]["x-gateway-destination-endpoint"].split(",") for one in answers]
    # the first request met at least one that is dead: nothing was known of them then
    assert sorted(lists[0]) == sorted([*dead, *alive])


async def test_without_a_picker_nothing_is_served(tmp_path: Path) -> None:
    """A client's own header does not choose the endpoint while the picker is away."""
    async with engines(1) as alive:
        made = gateway(tmp_path, alive, kind="override_header", flags=["--tls-self-signed"])
        # Envoy talks plain text, which this picker does not understand
        async with made as at, httpx.AsyncClient(timeout=30) as http:
            forged = {"x-gateway-destination-endpoint": alive[0]}
            answer = await http.post(f"{at.url}/v1/chat/completions", content=BODY, headers=forged)
    assert answer.status_code >= 500
