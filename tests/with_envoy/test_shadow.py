# SPDX-License-Identifier: Apache-2.0
"""Beside another picker, through a real Envoy: its choices stand, and ours are compared with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from tests.docs_examples import EXAMPLES
from tests.waiting import eventually
from tests.with_envoy.gateways import COPIES, engines, gateway
from tests.with_envoy.test_standard_protocol import CHAT, chat

if TYPE_CHECKING:
    from pathlib import Path


def other_picker(address: str) -> dict[str, Any]:
    """A filter that sends every request to ``address``, as far as ours can see."""
    header = {"key": "x-gateway-destination-endpoint", "value": address}
    return {
        "name": "envoy.filters.http.header_mutation",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
            "mutations": {
                "request_mutations": [{"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}]
            },
        },
    }


async def test_ours_is_compared_and_changes_nothing(tmp_path: Path) -> None:
    async with engines(2) as addresses:
        first, second = addresses
        log = tmp_path / "decisions"
        flags = ["--shadow", "--decision-log", str(log), "--decision-sample", "1"]
        made = gateway(tmp_path, addresses, flags=flags, mode=COPIES, filters=[other_picker(second)])
        async with made as running, httpx.AsyncClient() as http:

            async def value(name: str) -> float:
                page = (await http.get(f"{running.metrics}/metrics")).text
                return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

            for number in range(6):
                headers = {"x-pieces": "3"} if number % 2 else {}
                answer = await http.post(
                    running.url + CHAT, content=chat(20_000, stream=bool(number % 2)), headers=headers
                )
                assert answer.status_code == 200
                if not number % 2:
                    told = answer.json()
                    assert told["served"] == second
                    assert not [name for name in told["headers"] if name.startswith("x-attache")]

            async def are_over() -> bool:
                return await value("attache_in_flight") == 0 and await value("attache_shadow_picks_total") == 6

            await eventually(are_over)
            # whose cache is warm is known from where the other picker sent the first one
            assert await value('attache_shadow_picks_total{server="default/pool",verdict="agreed"}') >= 5
            assert await value("attache_prompt_tokens_total") == 60 / 2
            assert await value('attache_picks_total{server="default/pool"}') == 6
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        shadows = [line for line in lines if line["kind"] == "shadow"]
        assert [line["theirs"] for line in shadows] == [second] * 6
        assert all(line["ours"]["addresses"][0] in {first, second} for line in shadows)


async def test_the_filter_of_the_page_about_moving_sends_copies(tmp_path: Path) -> None:
    (text,) = [one.text for one in EXAMPLES if one.page == "migrating.md" and "observability_mode" in one.text]
    of_page = yaml.safe_load(text.replace("attache-shadow", "extproc"))
    async with engines(2) as addresses:
        filters = [other_picker(addresses[1]), of_page]
        made = gateway(tmp_path, addresses, flags=["--shadow"], mode=COPIES, filters=filters)
        async with made as running, httpx.AsyncClient() as http:
            answer = await http.post(running.url + CHAT, content=chat(20_000))
            assert (answer.status_code, answer.json()["served"]) == (200, addresses[1])

            async def came_by_both() -> bool:
                lines = (await http.get(f"{running.metrics}/metrics")).text.splitlines()
                found = [line for line in lines if line.startswith("attache_shadow_picks_total{")]
                return sum(float(line.rsplit(" ", 1)[1]) for line in found) == 2

            # of the gateway of these tests, and of the page
            await eventually(came_by_both)


async def test_without_the_option_copies_are_not_read(tmp_path: Path) -> None:
    async with engines(1) as addresses:
        made = gateway(tmp_path, addresses, mode=COPIES, filters=[other_picker(addresses[0])])
        async with made as running, httpx.AsyncClient() as http:
            assert (await http.post(running.url + CHAT, content=chat(100))).status_code == 200

            async def page() -> str:
                return (await http.get(f"{running.metrics}/metrics")).text

            async def has_ended() -> bool:
                return float((await page()).partition("\nattache_stream_seconds_count ")[2].split()[0]) > 0

            await eventually(has_ended)
            assert "attache_shadow_picks_total{" not in await page()
            assert "attache_picks_total{" not in await page()
