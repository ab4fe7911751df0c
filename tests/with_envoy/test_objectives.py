# SPDX-License-Identifier: Apache-2.0
"""What is counted of objectives is what clients saw: streamed, plain, slow, cut and refused answers, and early leavers.

Targets of the class easy are far longer than any answer, those of the class strict far shorter than the engine's
pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

import httpx
import msgspec
import pytest
import pytest_asyncio

from extproc.api.status_page_contents import SloObjectiveCounts
from tests.fork_server import output_of
from tests.waiting import eventually
from tests.with_envoy.stand_in import gateway_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.with_envoy.stand_in import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
FIRST: Final = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
TOKEN: Final = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": null}]}\n\n'
USAGE: Final = b'data: {"choices": [], "usage": {"prompt_tokens": 31, "completion_tokens": 3}}\n\n'
DONE: Final = b"data: [DONE]\n\n"
WHOLE: Final = (FIRST, TOKEN, TOKEN, TOKEN, USAGE, DONE)
PLAIN: Final = json.dumps({"choices": [], "usage": {"prompt_tokens": 31, "completion_tokens": 3}}).encode()
TARGETS: Final = [{"modelServerName": "llama"}]
ROUTE: Final = {
    "rules": [
        {"priority": 5, "modelMatch": {"headers": {"x-class": {"exact": "strict"}}}, "targetModels": TARGETS},
        {"priority": 9, "modelMatch": {"headers": {"x-class": {"exact": "now"}}}, "targetModels": TARGETS},
        {"targetModels": TARGETS},
    ],
    "rateLimits": [{"tenants": ["small"], "unit": "month", "requests": 1}],
    "slo": [
        {"name": "easy", "ttft": "10m", "tpot": "10m", "e2e": "10m"},
        {"name": "strict", "priority": 5, "ttft": "250ms", "tpot": "100ms", "e2e": "400ms", "share": 0.9},
        {"name": "now", "priority": 9, "ttft": "1ms", "unmeetable": "Refuse"},
    ],
}
# one request at a time at the engine, and one that waits
SERVER: Final = {
    "flowControl": {
        "saturation": {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1},
        "maxRequests": 1,
        "timeout": "60s",
    }
}
GATEWAY: Final = {
    "authentication": {
        "apiKeys": [
            {"name": "web", "key": "sk-of-the-web", "tenant": "acme"},
            {"name": "small", "key": "sk-of-the-small", "tenant": "small"},
        ]
    }
}
PAUSE_S: Final = 0.5
Result = tuple[str, str, str]


def results(of: str, *, ttft: str = "", tpot: str = "", e2e: str = "") -> Counter[Result]:
    """By class, objective and result."""
    return Counter((of, name, one) for name, one in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)) if one)


def all_of(of: str, result: str) -> Counter[Result]:
    return results(of, ttft=result, tpot=result, e2e=result)


class Scene:
    """A gateway, and what must have been counted by now."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.expected: Counter[Result] = Counter()

    def answers(self, *pieces: bytes, then: str = "end", plain: bool = False, status: int = 200) -> None:
        """What the engine does from now on."""
        engine = self.gateway.engine
        engine.pieces, engine.is_plain, engine.status = pieces, plain, status
        engine.then = then  # type: ignore[assignment]  # one of them

    @contextlib.asynccontextmanager
    async def asked(
        self, *, stream: bool = True, of: str = "easy", key: str = "sk-of-the-web", content: str = "hello"
    ) -> AsyncIterator[httpx.Response]:
        headers = {"authorization": f"Bearer {key}", "x-class": of}
        body = {"model": "llama", "messages": [{"role": "user", "content": content}], "stream": stream}
        url = f"{self.gateway.url}{CHAT}"
        async with self.gateway.http.stream("POST", url, json=body, headers=headers) as answer:
            yield answer

    async def status_of(
        self, *, stream: bool = True, of: str = "easy", key: str = "sk-of-the-web", content: str = "hello"
    ) -> int:
        """Of a request whose answer is read to its end, or until it is cut."""
        async with self.asked(stream=stream, of=of, key=key, content=content) as answer:
            with contextlib.suppress(httpx.RemoteProtocolError):
                await answer.aread()
        return answer.status_code

    async def counted(self, more: Counter[Result]) -> None:
        """These are counted now, in addition, and nothing else."""
        self.expected += more

        async def is_there() -> bool:
            return await self.counts() == self.expected

        try:
            await eventually(is_there)
        except TimeoutError:
            assert await self.counts() == self.expected

    async def counts(self) -> Counter[Result]:
        found: Counter[Result] = Counter()
        for line in (await self.page("/metrics")).splitlines():
            name, _, rest = line.partition("{")
            if name in {"attache_slo_requests_total", "attache_slo_excluded_requests_total"}:
                labels, _, value = rest.rpartition("} ")
                named = dict(one.split("=") for one in labels.replace('"', "").split(","))
                assert named["route"] == "default/llama"
                found[named["class"], named["objective"], named.get("result", "excluded")] += int(float(value))
        return +found

    async def page(self, path: str) -> str:
        return (await self.gateway.http.get(f"{self.gateway.metrics}{path}")).text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    directory = tmp_path_factory.mktemp("objectives")
    headers = {"authorization": "Bearer sk-of-the-web"}
    async with gateway_on(directory, gateway=GATEWAY, more=SERVER, route=ROUTE, headers=headers) as running:
        yield Scene(running)


async def test_whole_answers_meet_targets_that_are_long(scene: Scene) -> None:
    scene.answers(*WHOLE)
    assert await scene.status_of() == 200
    await scene.counted(all_of("easy", "good"))
    scene.answers(PLAIN, plain=True)
    assert await scene.status_of(stream=False) == 200
    await scene.counted(results("easy", e2e="good"))


async def test_a_full_queue_is_missed_and_who_leaves_it_early_does_not_count(scene: Scene) -> None:
    scene.answers(FIRST, TOKEN, then="hang")
    async with scene.asked() as running:
        assert running.status_code == 200
        pieces = running.aiter_raw()
        await _until(pieces, FIRST + TOKEN)
        waiting = asyncio.create_task(scene.status_of())

        async def waits() -> bool:
            return 'attache_queue_waiting{band="standard",server="default/llama"} 1' in await scene.page("/metrics")

        await eventually(waits)
        assert await scene.status_of() == 429
        await scene.counted(all_of("easy", "bad"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await scene.counted(all_of("easy", "excluded"))
    # its first content had come in time
    await scene.counted(results("easy", ttft="good", tpot="excluded", e2e="excluded"))


async def test_slow_answers_miss_targets_that_are_short(scene: Scene) -> None:
    scene.gateway.engine.pause_s = PAUSE_S
    try:
        # the first byte comes at once, and is no content
        scene.answers(*WHOLE)
        assert await scene.status_of(of="strict") == 200
        await scene.counted(all_of("strict", "bad"))
        scene.answers(PLAIN, plain=True)
        assert await scene.status_of(stream=False, of="strict") == 200
        await scene.counted(results("strict", e2e="bad"))
    finally:
        scene.gateway.engine.pause_s = 0.002


@pytest.mark.parametrize(
    ("pieces", "then", "status", "result"),
    [
        ((FIRST, TOKEN), "cut", 200, "bad"),
        ((FIRST,), "cut", 200, "bad"),
        ((b"{}",), "end", 500, "bad"),
        ((b"{}",), "end", 429, "bad"),
        ((b"{}",), "end", 400, "excluded"),
    ],
)
async def test_failed_answers_miss_and_clients_own_errors_do_not_count(
    scene: Scene, pieces: Sequence[bytes], then: str, status: int, result: str
) -> None:
    scene.answers(*pieces, then=then, status=status)
    assert await scene.status_of() == status
    await scene.counted(all_of("easy", result))


async def test_a_caller_beyond_its_limit_does_not_count(scene: Scene) -> None:
    scene.answers(*WHOLE)
    assert await scene.status_of(key="sk-of-the-small") == 200
    assert await scene.status_of(key="sk-of-the-small") == 429
    await scene.counted(all_of("easy", "good") + all_of("easy", "excluded"))


async def test_who_leaves_after_the_target_has_seen_it_missed(scene: Scene) -> None:
    scene.answers(FIRST, then="hang")
    async with scene.asked(of="strict") as answer:
        pieces = answer.aiter_raw()
        await _until(pieces, FIRST)
        await asyncio.sleep(PAUSE_S)
    await scene.counted(results("strict", ttft="bad", tpot="excluded", e2e="bad"))


async def test_what_cannot_be_in_time_is_refused_at_once(scene: Scene) -> None:
    prompts = [random.Random(seed).randbytes(8000).hex() for seed in range(2)]
    # an answer that shows how fast the engine prefills: not 4,000 tokens in 1 ms
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 4000, "completion_tokens": 3}}\n\n'
    scene.answers(FIRST, TOKEN, TOKEN, TOKEN, usage, DONE)
    assert await scene.status_of(content=prompts[0]) == 200
    await scene.counted(all_of("easy", "good"))
    async with scene.asked(of="now", content=prompts[1]) as answer:
        refusal = json.loads(await answer.aread())["error"]
    assert (answer.status_code, refusal["code"]) == (503, "objective_unmeetable")
    assert "is due after 0.001 s" in refusal["message"]
    # idle engines would be too slow, too
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    await scene.counted(results("now", ttft="bad"))
    series = 'attache_slo_unmeetable_requests_total{class="now",result="refused",route="default/llama"} 1'
    assert series in await scene.page("/metrics")
    # a plain answer has no first token that somebody sees
    scene.answers(PLAIN, plain=True)
    assert await scene.status_of(stream=False, of="now", content=prompts[1]) == 200


async def test_the_page_and_the_command_have_what_is_counted(scene: Scene) -> None:
    page = [msgspec.json.decode(line, type=SloObjectiveCounts) for line in (await scene.page("/slo")).splitlines()]
    found: Counter[Result] = Counter()
    for one in page:
        found[one.name, one.objective, "good"] += sum(good for _, good, _ in one.hours)
        found[one.name, one.objective, "bad"] += sum(bad for _, _, bad in one.hours)
        found[one.name, one.objective, "excluded"] += one.excluded
    assert +found == scene.expected == await scene.counts()
    command = [sys.executable, "-m", "extproc", "slo", scene.gateway.metrics.removeprefix("http://")]
    status, out = await output_of(command, scene.gateway.decisions.parent)
    # more than 1% have missed
    assert status == 1
    rows = [line.split() for line in out.splitlines() if line.startswith("default/llama ")]
    # of the table, not of the worst hours
    requests = {(row[1], row[2]): int(row[8]) for row in rows if row[5] == "in"}
    for name, objectives in (
        ("easy", ("ttft", "tpot", "e2e")),
        ("strict", ("ttft", "tpot", "e2e")),
        ("now", ("ttft",)),
    ):
        for objective in objectives:
            counted = sum(scene.expected[name, objective, result] for result in ("good", "bad"))
            assert requests[name, objective] == counted, out.decode()


async def _until(pieces: AsyncIterator[bytes], expected: bytes) -> None:
    """``pieces``: whose owner keeps it, as the connection is closed when it goes."""
    got = b""
    while got != expected:
        got += await anext(pieces)
