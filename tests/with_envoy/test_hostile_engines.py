# SPDX-License-Identifier: Apache-2.0
"""One engine says what no engine says, on each page that extproc reads of it: no request fails, and none waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, Stack, running_stack
from tests.examples import slow
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTERS: Final = [f"adapter-{number}" for number in range(12)]
LORA: Final = ("--enable-lora", "--max-loras=4", "--max-cpu-loras=4", "--lora-overflow=refuse", "--lora-load-time=0.05")
FLAGS: Final = EngineFlags(count=2, speed=20.0, publishes_events=True, more=LORA)
LOADING: Final = {"adapters": [{"name": name, "source": f"/adapters/{name}"} for name in ADAPTERS], "timeout": "20s"}
# Far above what a request takes on a machine with other work, and below what the pages took.
LONGEST_S: Final = 15.0

METRICS, MODELS, TOKENIZE, LOAD = "/metrics", "/v1/models", "/tokenize", "/v1/load_lora_adapter"
ANSWER: Final = msgspec.json.encode(
    {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)


def whole(body: bytes, status: str = "200 OK", *more: str) -> Iterator[bytes]:
    lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *more]
    yield "\r\n".join([*lines, "", ""]).encode() + body


def chunked(*chunks: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    yield from chunks


def page(lines: bytes) -> Iterator[bytes]:
    return whole(b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n" + lines)


GOOD: Final = {
    METRICS: lambda: page(b""),
    MODELS: lambda: whole(msgspec.json.encode({"data": [{"id": MODEL}]})),
    TOKENIZE: lambda: whole(b'{"tokens":[1,2,3]}'),
    LOAD: lambda: whole(b"Success"),
}
ENDLESS: Final = itertools.repeat(b"10000\r\n" + b"1" * 65536 + b"\r\n")


LIES: Final = {
    "endless": lambda: chunked(*itertools.islice(ENDLESS, 2000)),
    "negative chunk": lambda: chunked(b"-6\r\nabc\r\n0\r\n\r\n"),
    "labels": lambda: page(b"vllm:lora_requests_info{" + b'a="b",' * 150_000 + b"} 1\n"),
    "labels that are allowed": lambda: page(b"vllm:lora_requests_info{" + b'a="b",' * 40_000 + b"} 1\n"),
    "lines": lambda: page(b"vllm:num_requests_waiting 1\n" * 500_000),
    "long list": lambda: whole(b'{"data":[' + b'{"id":"a"},' * 550_000 + b'{"id":"a"}]}'),
    "nested": lambda: whole(b'{"data":' + b"[" * 100_000),
    "many tokens": lambda: whole(b'{"tokens":[' + b"1," * 4_000_000 + b"1]}"),
}


class Hostile:
    """Answers chats as an engine does. ``says``: what it answers at one path, in place of what is good there."""

    def __init__(self) -> None:
        self.path = self.kind = ""
        self.asked: Counter[str] = Counter()
        # connections to where it redirects
        self.trapped = 0
        self.address = self.trap = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def spring(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.trapped += 1
            writer.close()

        engine = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        trap = await asyncio.start_server(spring, "127.0.0.1", 0)
        self.address, self.trap = (f"127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in (engine, trap))
        async with engine, trap:
            yield

    def be(self, path: str, kind: str) -> None:
        self.path, self.kind = path, kind
        self.asked.clear()
        self.trapped = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                _, _, after = head.partition("content-length: ")
                await reader.readexactly(int(after.partition("\r\n")[0] or 0))
                path = head.split(" ")[1]
                self.asked[path] += 1
                for piece in self._answer(path):
                    writer.write(piece)
                    await writer.drain()
        writer.close()

    def _answer(self, path: str) -> Iterator[bytes]:
        if path != self.path:
            return GOOD.get(path, lambda: whole(ANSWER))()
        if self.kind == "redirect":
            return whole(b"", "307 Temporary Redirect", f"location: http://{self.trap}{path}")
        return LIES.get(self.kind, lambda: whole(b'{"tokens":[%b]}' % self.kind.encode()))()


class Hosted(msgspec.Struct, frozen=True):
    stack: Stack
    hostile: Hostile


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hosted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosted]:
    """Two engines with KV events and adapters, and one that is hostile."""
    hostile, directory = Hostile(), tmp_path_factory.mktemp("hostile") / "stack"
    more = {"adapterLoading": LOADING, "tokenizer": {"timeout": "2s"}, "scrapeInterval": "100ms"}
    async with (
        hostile.running(),
        running_stack(directory, FLAGS, watch=True, more=more, route={"loraAdapters": ADAPTERS}) as stack,
    ):
        documents = list(yaml.safe_load_all((stack.config / "attache.yaml").read_text()))
        documents[0]["spec"]["endpoints"].append({"address": hostile.address})
        fresh = stack.config / "attache.new"
        fresh.write_text(yaml.safe_dump_all(documents, sort_keys=False))
        fresh.replace(stack.config / "attache.yaml")
        await eventually(lambda: hostile.asked[METRICS] > 0 and hostile.asked[MODELS] > 0)
        yield Hosted(stack, hostile)


async def ask(http: aiohttp.ClientSession, stack: Stack, model: str) -> tuple[int, float]:
    """Its status, and the seconds that it took."""
    body = {"model": model, "messages": [{"role": "user", "content": f"hello {model}"}], "max_tokens": 4}
    began = asyncio.get_running_loop().time()
    async with http.post(f"{stack.url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status, asyncio.get_running_loop().time() - began


async def check_load(hosted: Hosted, path: str, models: list[str], *, rounds: int = 3) -> None:
    """Until the hostile engine has answered at ``path`` some times, all requests are served, and soon."""
    stack, hostile = hosted.stack, hosted.hostile
    async with aiohttp.ClientSession() as http:
        for number in range(80):
            found = await asyncio.gather(*(ask(http, stack, model) for model in models))
            assert {status for status, _ in found} == {200}
            assert max(took_s for _, took_s in found) < LONGEST_S
            if number >= rounds and hostile.asked[path] > 0:
                break
            await asyncio.sleep(0.2)
        assert hostile.asked[path] > 0, "the engine was not asked"
        async with http.get(f"{stack.metrics}/readyz", timeout=aiohttp.ClientTimeout(total=LONGEST_S)) as answer:
            assert answer.status == 200
    assert "Traceback" not in (stack.directory / "extproc.log").read_text()
    assert hostile.trapped == 0


@pytest.mark.parametrize(
    "kind", ["negative chunk", "labels", "labels that are allowed", slow("lines"), "endless", "redirect"]
)
async def test_a_hostile_metrics_page(hosted: Hosted, kind: str) -> None:
    hosted.hostile.be(METRICS, kind)
    await check_load(hosted, METRICS, [ALIAS] * 12)


@pytest.mark.parametrize("kind", ["long list", "nested", slow("endless"), slow("redirect")])
async def test_a_hostile_list_of_models(hosted: Hosted, kind: str) -> None:
    hosted.hostile.be(MODELS, kind)
    await check_load(hosted, MODELS, [ALIAS] * 12)


@pytest.mark.parametrize(
    "kind",
    [*map(slow, ["redirect", "nested", "endless", "4294967296"]), "many tokens", "-1", "1e30", '"a"'],
)
async def test_a_hostile_tokenizer(hosted: Hosted, kind: str) -> None:
    hosted.hostile.be(TOKENIZE, kind)
    await check_load(hosted, TOKENIZE, [ALIAS] * 24)


# the last kind counts as a load: its adapters stay there
@pytest.mark.parametrize("kind", [slow("redirect"), "endless", slow("nested")])
async def test_a_hostile_load_of_an_adapter(hosted: Hosted, kind: str) -> None:
    hosted.hostile.be(LOAD, kind)
    await check_load(hosted, LOAD, ADAPTERS, rounds=0)


@pytest.mark.parametrize("token", [-1, 2**32, 10**30, 1.5])
async def test_a_clients_own_tokens_that_no_engine_knows_are_its_mistake(hosted: Hosted, token: float) -> None:
    hosted.hostile.be("", "")
    async with aiohttp.ClientSession() as http:
        for path, fields in (
            ("/inference/v1/generate", {"token_ids": [1, token], "sampling_params": {"max_tokens": 1}}),
            ("/v1/completions", {"prompt": [1, token], "max_tokens": 1}),
            ("/v1/completions", {"prompt": [[1], [token]], "max_tokens": 1}),
            ("/v1/embeddings", {"input": [1, token]}),
        ):
            async with http.post(f"{hosted.stack.url}{path}", json={"model": ALIAS, **fields}) as answer:
                said = await answer.json()
                assert answer.status == 400
                assert said["error"]["type"] == "invalid_request_error"
                assert "tokens from 0 to 4294967295" in said["error"]["message"]
