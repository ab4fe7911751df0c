# SPDX-License-Identifier: Apache-2.0
"""``attache top`` and the console beside a real extproc: what they show of engines and requests."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, Stack, running_stack
from tests.docs_examples import ROOT, examples_of
from tests.fork_server import output_of
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = EngineFlags(count=2, speed=20.0, stream_headers="first-token", apart=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two engines in processes of their own, and a bundle that follows the directory."""
    async with running_stack(tmp_path_factory.mktemp("top") / "stack", FLAGS, watch=True) as running:
        yield running


async def screen(stack: Stack) -> list[str]:
    """What the command prints."""
    page = stack.metrics.removeprefix("http://")
    command = [sys.executable, "-m", "extproc", "top", "--once", "--interval", "200ms", page]
    status, out = await output_of(command, stack.directory)
    assert status == 0
    return out.splitlines()


async def test_a_killed_engine_is_dead_on_the_screen_until_it_is_back(two: Stack) -> None:
    dead, alive = (one.removeprefix("http://") for one in two.engines)
    # the page is asked again and again, as it costs less than the command
    async with httpx.AsyncClient(timeout=60) as http:

        async def is_avoided() -> bool:
            return "attache_endpoint_avoided{" in (await http.get(f"{two.metrics}/metrics")).text

        async def is_well() -> bool:
            name = f'attache_engine_report_age_seconds{{endpoint="{dead}",server="default/llama"}} '
            page = (await http.get(f"{two.metrics}/metrics")).text
            return "attache_endpoint_avoided{" not in page and float(page.partition(name)[2].split()[0]) < 1

        async with Load(two.url, clients=4, pause_s=0.02) as load:
            await load.more(50)
            lines = await screen(two)
            assert lines[1] == "engines: 2 serving"
            assert all(row[8] == "ms" and float(row[7]) > 0 for row in engine_rows(lines).values())
            await two.processes.end("engine-0", signal.SIGKILL)
            await eventually(is_avoided)
        lines = await screen(two)
        assert lines[1] == "engines: 1 serving, 1 avoided"
        why = next(line for line in lines if line.startswith(f"{dead} of "))
        assert "is avoided since" in why
        assert "see that it runs" in why
        rows = engine_rows(lines)
        assert rows[alive][2] == "serving"
        # its TTFT is of another time; some of its last answers failed
        assert (rows[dead][2], rows[dead][7]) == ("AVOIDED", "-")
        assert rows[dead][8] != "0%"

        await two.processes.start_again("engine-0")
        # as many clients as one engine does not serve as fast, so that the other one is tried
        async with Load(two.url):
            await eventually(is_well)
        assert (await screen(two))[1] == "engines: 2 serving"


async def test_a_wrong_model_is_told_in_the_404_the_log_and_on_the_screen_with_what_the_engine_lists(
    two: Stack,
) -> None:
    file = two.config / "attache.yaml"
    before = file.read_text()
    assert before.count(f"model: {MODEL}\n") == 1
    file.write_text(before.replace(f"model: {MODEL}\n", "model: llama-alias\n"))
    body = {"model": ALIAS, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 2}
    async with httpx.AsyncClient() as http:

        async def is_explained() -> bool:
            answer = await http.post(f"{two.url}/v1/chat/completions", json=body)
            return answer.status_code == 404 and f"list '{MODEL}' and not 'llama-alias'" in answer.text

        await eventually(is_explained)
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert await is_explained()
        report = (await http.get(f"{two.metrics}/config")).json()
        assert f"list '{MODEL}'" in report["wrongModels"]["default/llama"]
        lines = await screen(two)
        assert lines[1] == "engines: 2 no model"
        assert any(
            line.startswith(f"default/llama: its engines list '{MODEL}' and not 'llama-alias'") for line in lines
        )
        log = two.directory / "extproc.log"
        assert log.read_text().count(f"lists '{MODEL}' and not 'llama-alias', the model of its ModelServer") == 1
        file.write_text(before)

        async def is_well() -> bool:
            answer = await http.post(f"{two.url}/v1/chat/completions", json=body)
            return answer.status_code == 200 and "list its model" in log.read_text()

        await eventually(is_well)


async def test_the_console_shows_where_the_time_of_real_requests_went(two: Stack) -> None:
    async with httpx.AsyncClient(timeout=60) as http:

        async def requests() -> list[dict[str, Any]]:
            return list((await http.get(f"{two.metrics}/console/requests?limit=200")).json()["requests"])

        async def are_there() -> bool:
            return sum(one["phase"] == "answered" and one["status"] == 200 for one in await requests()) >= 10

        await requests()
        async with Load(two.url, clients=4, pause_s=0.02) as load:
            await load.more(10)
        refused = await http.post(f"{two.url}/v1/chat/completions", json={"model": "nothing", "messages": []})
        assert refused.status_code == 404
        await eventually(are_there)
        found = await requests()
        state = (await http.get(f"{two.metrics}/console/state")).json()
        page, index = await http.get(f"{two.metrics}/console"), await http.get(two.metrics)
    engines = {one.removeprefix("http://") for one in two.engines}
    assert {one["address"] for one in state["engines"]} == engines
    for one in [one for one in found if one["status"] == 200 and one["phase"] == "answered"]:
        assert one["served"] in engines
        assert one["model"] == ALIAS
        assert (one["server"], one["api"], one["outputTokens"]) == ("default/llama", "chat", 20)
        waits_s = sum(one["waitsS"].values())
        assert waits_s <= one["heldS"]
        if one["ttftS"] is not None:
            assert one["ttftS"] + one["writingS"] <= one["durationS"] + 1e-6
    assert any(one["why"] is not None and one["chosen"] in one["why"]["sentence"] for one in found)
    unknown = next(one for one in found if one["phase"] == "refused")
    assert (unknown["status"], unknown["api"]) == (404, "/v1/chat/completions")
    assert "does not exist" in unknown["refusal"]
    assert "\n/console " in index.text
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_the_console_behind_an_envoy_as_the_documentation_says(two: Stack) -> None:
    (example,) = [one.text for one in examples_of(ROOT / "docs/operations.md") if "value: /console" in one.text]
    assert example.count("10.0.0.5:9003") == 1
    file = two.config / "console.yaml"
    file.write_text(example.replace("10.0.0.5:9003", two.metrics.removeprefix("http://")))
    async with httpx.AsyncClient(timeout=60, headers={"host": "console.example.com"}) as http:

        async def is_there() -> bool:
            return (await http.get(f"{two.url}/console")).status_code == 200

        await eventually(is_there)
        state = await http.get(f"{two.url}/console/state?find=llama")
        assert state.json()["total"]["engines"] == 2
        others = [await http.get(f"{two.url}{path}") for path in ("/metrics", "/loads", "/consoles")]
        others.append(await http.post(f"{two.url}/console/state"))
        assert [one.status_code for one in others] == [404] * 4
    file.unlink()


def engine_rows(lines: list[str]) -> dict[str, list[str]]:
    """Cells by engine."""
    return {row[1]: row for row in map(str.split, lines) if len(row) > 10 and row[0] == "default/llama"}
