# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.soak.engines``: one honest engine process, which serves any model on many loopback addresses.

It repeats the model that it was asked for, and says at which of its addresses. It writes answers in the bytes of the
simulated engine, but computes nothing: a token every 20 ms. With KV events it is one engine with two data-parallel
ranks, which store and evict blocks all the time; rank 1 ends now and then, and comes back empty.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
from aiohttp import web

from bench.engine.api_formats import (
    ApiResponseFormat,
    ChatFormat,
    ChatRequest,
    CompletionFormat,
    CompletionRequest,
    GenerationJob,
    MessagesFormat,
    MessagesRequest,
    ResponsesFormat,
    ResponsesRequest,
    chat_job,
    completion_job,
    messages_job,
)
from bench.engine.api_formats import responses_job as _responses_job
from bench.engine.embedding_and_audio_apis import tokenize_handlers
from bench.engine.fake_tokenizer import BYTES_PER_TOKEN, answer_text
from bench.engine.kv_cache import BlocksRemoved, BlocksStored, CacheChange
from bench.engine.kv_event_publisher import Form, KvEventPublisher, KvEventsConfig
from bench.engine.request import Request, Token
from bench.soak.model_changes import engine_hosts
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ENGINE_HEADER: Final = "x-soak-engine"
KV_HOST: Final = "127.3.0.1"
RANKS: Final = 2
_MAX_BODY: Final = 16 * 1024 * 1024
_TOKEN_S: Final = 0.02
_BLOCK_TOKENS: Final = 16
# 64 KB of text.
_CACHE_BLOCKS: Final = 256
_CHAIN_BLOCKS: Final = 50
_CACHE_CHAINS: Final = 400
_STEP_S: Final = 0.2
_EVICT_S: Final = 60.0
_RESTART_S: Final = 120.0
_AWAY_S: Final = 5.0


class SoakEngine:
    """The HTTP side."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._keys = itertools.count()
        self._running = 0

    def app(self) -> web.Application:
        """Its routes."""
        made = web.Application(client_max_size=_MAX_BODY)
        made.add_routes(
            [
                web.post("/v1/chat/completions", self._generating(ChatRequest, chat_job, ChatFormat)),
                web.post("/v1/completions", self._generating(CompletionRequest, completion_job, CompletionFormat)),
                web.post("/v1/responses", self._generating(ResponsesRequest, _responses_job, ResponsesFormat)),
                web.post("/v1/messages", self._generating(MessagesRequest, messages_job, MessagesFormat)),
                web.post("/tokenize", tokenize_handlers(lambda _: True)[Api.TOKENIZE]),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/health", self._health),
            ]
        )
        return made

    def _generating(
        self, kind: type[Any], to_job: Callable[[Any], GenerationJob], new_format: Callable[..., ApiResponseFormat]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        decoder = msgspec.json.Decoder(kind)

        async def handle(http: web.Request) -> web.StreamResponse:
            job = to_job(decoder.decode(await http.read()))
            answer = answer_text(self._rng, job.max_tokens or 16)
            request = Request(next(self._keys), job.prompts[0], answer, model=job.model, block_size=_BLOCK_TOKENS)
            request.cached_tokens = 0
            form = new_format(f"{request.key:08x}", 0, job.model, **job.options)
            assert http.transport is not None
            headers = {ENGINE_HEADER: http.transport.get_extra_info("sockname")[0]}
            self._running += 1
            try:
                if job.is_streamed:
                    return await _stream(http, request, form, headers, wants_usage=job.wants_usage)
                await asyncio.sleep(_TOKEN_S * request.output_tokens)
                request.produced, request.tokens = request.output_tokens, request.tokens + request.output_tokens
                return web.Response(
                    body=form.full_response([request]), content_type="application/json", headers=headers
                )
            finally:
                self._running -= 1

        return handle

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=metrics_page(self._running))


def metrics_page(running: int) -> str:
    """vLLM's metrics page with its load."""
    labels = '{model_name="soak",engine="0"}'
    return (
        f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} {running}.0\n"
        f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{labels} 0.0\n"
        f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{labels} 0.1\n"
        "# TYPE vllm:cache_config_info gauge\n"
        f'vllm:cache_config_info{{block_size="{_BLOCK_TOKENS}",num_gpu_blocks="{_CACHE_BLOCKS}"}} 1.0\n'
    )


async def _stream(
    http: web.Request, request: Request, form: ApiResponseFormat, headers: dict[str, str], *, wants_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
    await response.prepare(http)
    await response.write(form.opening())
    while not request.is_done:
        await asyncio.sleep(_TOKEN_S)
        start = request.produced * BYTES_PER_TOKEN
        text = request.answer[start : start + BYTES_PER_TOKEN].decode()
        request.produced, request.tokens = request.produced + 1, request.tokens + 1
        await response.write(form.chunk(Token(request, text, request.is_done), 0))
    await response.write(form.closing([request], wants_usage=wants_usage))
    return response


class PrefixCache:
    """What one rank has cached: chains of blocks, the oldest of which leave."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._chains: deque[list[int]] = deque()

    def store_prompt(self) -> list[CacheChange]:
        """A prompt is stored; the oldest one leaves where there is no room."""
        hashes = [self._rng.getrandbits(63) for _ in range(_CHAIN_BLOCKS)]
        text = self._rng.randbytes(_CHAIN_BLOCKS * _BLOCK_TOKENS * BYTES_PER_TOKEN)
        self._chains.append(hashes)
        changes: list[CacheChange] = [BlocksStored(hashes, None, text, "kv")]
        return [*changes, *self.evict(max(0, len(self._chains) - _CACHE_CHAINS))]

    def evict(self, chains: int) -> list[CacheChange]:
        """So many prompts leave at once."""
        count = min(chains, len(self._chains))
        return [BlocksRemoved([one for _ in range(count) for one in self._chains.popleft()])] if count else []


async def publish_kv_events(rank: int, events: int, replay: int) -> None:
    """Publish one rank's KV events until cancelled. The last rank ends now and then."""
    form: Form = "maps" if rank == 0 else "arrays"
    clock = asyncio.get_running_loop().time
    while True:
        publisher = KvEventPublisher(
            KvEventsConfig(events, replay, "kv", form), host="127.0.0.1", block_size=_BLOCK_TOKENS, base_model="kv"
        )
        replays = asyncio.create_task(publisher.answer_replays())
        ends_at_s = clock() + _RESTART_S if rank == RANKS - 1 else float("inf")
        cache, evict_at_s = PrefixCache(random.Random(rank)), clock() + _EVICT_S
        try:
            while clock() < ends_at_s:
                await publisher.publish(cache.store_prompt())
                if clock() >= evict_at_s:
                    evict_at_s += _EVICT_S
                    await publisher.publish(cache.evict(_CACHE_CHAINS // 2))
                await asyncio.sleep(_STEP_S)
        finally:
            replays.cancel()
            publisher.close()
        await asyncio.sleep(_AWAY_S)


async def serve(port: int, models: int, kv_port: int) -> None:
    """Serve until cancelled."""
    runner = web.AppRunner(SoakEngine().app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    for one in (*engine_hosts(models), KV_HOST, "127.0.0.1"):
        await web.TCPSite(runner, one, port, backlog=16).start()
    async with asyncio.TaskGroup() as tasks:
        for rank in range(RANKS if kv_port else 0):
            tasks.create_task(publish_kv_events(rank, kv_port + rank, kv_port + RANKS + rank))
        await asyncio.Event().wait()


def main() -> int:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak.engines", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="on every address")
    parser.add_argument("--models", type=int, required=True, help="how many models have addresses here")
    parser.add_argument(
        "--kv-port", type=int, default=0, help="first of four in a row: events and replays of two ranks"
    )
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.models, options.kv_port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
