# SPDX-License-Identifier: Apache-2.0
"""The engine as an HTTP server: a driver runs the scheduler in real time, with durations divided by the speed."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bench.engine.adapters import AdapterLimits, AdapterRoutes, Adapters
from bench.engine.audio import handlers as audio_handlers
from bench.engine.blocks import Journal
from bench.engine.faults import DropEvents, Fault, FaultPlan, Refuse, Stall, answer_wrongly
from bench.engine.formats import (
    ChatFormat,
    ChatRequest,
    CompletionFormat,
    CompletionRequest,
    Format,
    GenerateFormat,
    GenerateRequest,
    Job,
    MessagesFormat,
    MessagesRequest,
    ResponsesFormat,
    ResponsesRequest,
    chat_job,
    completion_job,
    count,
    error_body,
    generate_job,
    in_its_form,
    messages_job,
    responses_job,
    sglang_chat_job,
)
from bench.engine.hardware import API_S, Hardware
from bench.engine.metrics import Observation, ServerMetrics
from bench.engine.pooling import POOLING, Pooling
from bench.engine.publisher import KvEventPublisher, KvEventsConfig
from bench.engine.request import Request
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import Roofline
from bench.engine.text import answer_text, count_tokens
from bench.engine.tokenize import handlers as tokenizer_handlers
from extproc.protocol import APIS_BY_PATH, Api

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bench.engine.request import Token

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Driver:
    """One engine core in real time. ``speed``: engine seconds per second of the wall clock."""

    def __init__(
        self,
        hardware: Hardware,
        limits: EngineLimits,
        *,
        speed: float,
        seed: int,
        publisher: KvEventPublisher | None = None,
    ) -> None:
        self._publisher = publisher
        self._journal = Journal() if publisher is not None else None
        self.scheduler = Scheduler(Roofline(hardware), limits, self._journal)
        self.block_size = limits.block_size
        self.speed = speed
        self._rng = random.Random(seed)
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Queue[Token]] = {}
        self._work_came = asyncio.Event()
        self._stalled_until_s = 0.0

    def stall(self, duration_s: float) -> None:
        """Compute nothing for this long on the wall clock, like a GPU that hangs."""
        self._stalled_until_s = max(self._stalled_until_s, asyncio.get_running_loop().time() + duration_s)

    async def read_weights(self, duration_s: float) -> None:
        """Read an adapter's weights for this long, in engine seconds: between two steps, of which none runs
        meanwhile.
        """
        if duration_s:
            self.stall(duration_s / self.speed)
            await asyncio.sleep(duration_s / self.speed)

    def new_request(self, prompt: bytes, output_tokens: int, *, model: str, adapter: str = "") -> Request:
        """A request whose answer will have ``output_tokens`` tokens. ``adapter``: that it needs, empty for none."""
        return Request(
            next(self._keys),
            prompt,
            answer_text(self._rng, output_tokens),
            model=model,
            block_size=self.block_size,
            keeps_text=self._journal is not None,
            adapter=adapter,
        )

    async def tokens(self, request: Request) -> AsyncIterator[Token]:
        """Add ``request`` and follow its answer. A caller that stops early aborts it."""
        queue: asyncio.Queue[Token] = asyncio.Queue()
        # the time that vLLM's API server takes before its engine sees a request
        await asyncio.sleep(API_S / self.speed)
        self._answers[request.key] = queue
        self.scheduler.add(request)
        self._work_came.set()
        try:
            while True:
                token = await queue.get()
                yield token
                if token.is_last:
                    return
        finally:
            del self._answers[request.key]
            if not request.is_done:
                self.scheduler.abort(request)

    async def run(self) -> None:
        """Step after step, until cancelled.

        A late wake-up shortens the next sleep, so that engine time keeps its pace.
        """
        loop = asyncio.get_running_loop()
        due_at_s = loop.time()
        while True:
            if loop.time() < self._stalled_until_s:
                await asyncio.sleep(self._stalled_until_s - loop.time())
            step = self.scheduler.begin_step(leaps=False)
            if step is None:
                self._work_came.clear()
                await self._work_came.wait()
                due_at_s = loop.time()
                continue
            due_at_s += step.duration_s / self.speed
            await asyncio.sleep(due_at_s - loop.time())
            # a machine too slow for this speed must not try to catch up for ever
            due_at_s = max(due_at_s, loop.time() - 0.1)

            tokens = self.scheduler.end_step(step)
            if self._publisher is not None and self._journal is not None:
                await self._publisher.publish(self._journal.take())
            for token in tokens:
                queue = self._answers.get(token.request.key)
                if queue is not None:
                    queue.put_nowait(token)


_MAX_BODY: Final = 256 * 1024 * 1024
_SHUTDOWN_S: Final = 0.1


class EngineSettings(msgspec.Struct, frozen=True):
    """What the engine's command line says. ``speed``: engine seconds per second of the wall clock."""

    host: str
    port: int
    model: str
    adapters: tuple[str, ...]
    hardware: Hardware
    limits: EngineLimits
    max_model_len: int
    default_max_tokens: int
    speed: float
    seed: int
    # vLLM sends a stream's headers at once, SGLang and others with the first token: until then Envoy may retry.
    headers_first: bool
    # of two limits of a chat's output, SGLang takes the other one
    is_sglang: bool = False
    events: KvEventsConfig | None = None
    # of adapters that are loaded at run time; None: there are none but ``adapters``
    lora: AdapterLimits | None = None


class EngineServer:
    """One engine: its HTTP routes, the core that computes, and the faults that tests ask for."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._publisher = None
        if settings.events is not None:
            block_size = settings.limits.block_size
            self._publisher = KvEventPublisher(
                settings.events, host=settings.host, block_size=block_size, base_model=settings.model
            )
        self._driver = Driver(
            settings.hardware, settings.limits, speed=settings.speed, seed=settings.seed, publisher=self._publisher
        )
        self._adapters = Adapters(settings.adapters, settings.lora)
        self._metrics = ServerMetrics(
            self._driver.scheduler, settings.limits, model=settings.model, adapters=self._adapters
        )
        self._faults = FaultPlan()
        self._adapter_routes = AdapterRoutes(self._adapters, self._faults, self._driver.read_weights)
        self._site: web.TCPSite | None = None
        self._runner: web.AppRunner | None = None
        self._mends: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application(client_max_size=_MAX_BODY)
        handlers = self._handlers()
        app.add_routes(
            [
                *(web.post(path, handlers[api]) for path, api in APIS_BY_PATH.items()),
                web.get("/v1/models", self._list_models),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.post("/faults", self._fault),
                *self._adapter_routes.routes,
            ]
        )
        # a client that disconnects cancels its handler, and with it the request in the engine
        # running requests end with the engine, as vLLM's do: nobody computes their tokens any more
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await self._listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._publisher is not None:
                    tasks.create_task(self._publisher.answer_replays())
                await self._driver.run()
        finally:
            await self._runner.cleanup()
            if self._publisher is not None:
                self._publisher.close()

    def _handlers(self) -> dict[Api, Handler]:
        """How each API is answered."""
        to_chat = sglang_chat_job if self._settings.is_sglang else chat_job
        return {
            Api.CHAT: self._generating(ChatRequest, to_chat, ChatFormat),
            Api.COMPLETIONS: self._generating(CompletionRequest, completion_job, CompletionFormat),
            Api.RESPONSES: self._generating(ResponsesRequest, responses_job, ResponsesFormat),
            Api.MESSAGES: in_its_form(self._generating(MessagesRequest, messages_job, MessagesFormat)),
            Api.COUNT_TOKENS: count,
            Api.GENERATE: self._generating(GenerateRequest, generate_job, GenerateFormat),
            **{api: self._pooling(one) for api, one in POOLING.items()},
            **tokenizer_handlers(self._serves),
            **audio_handlers(self._compute),
        }

    async def _listen(self) -> None:
        assert self._runner is not None
        self._site = web.TCPSite(self._runner, self._settings.host, self._settings.port, reuse_address=True)
        await self._site.start()

    def _generating(self, kind: type[Any], to_job: Callable[[Any], Job], new_format: Callable[..., Format]) -> Handler:
        decoder = msgspec.json.Decoder(kind)

        async def handle(http: web.Request) -> web.StreamResponse:
            status = self._faults.next_status()
            if status is not None:
                return _error(status, "The engine is asked to fail.", "service_unavailable_error")
            illness = self._faults.next_illness()
            if illness is not None:
                return await answer_wrongly(http, illness)
            try:
                job = to_job(decoder.decode(await http.read()))
                if not job.model:
                    job = msgspec.structs.replace(job, model=self._settings.model)
            except msgspec.DecodeError as error:
                return _error(400, str(error), "BadRequestError")
            if (refused := self._refuse(job)) is not None:
                return refused
            adapter = job.model if job.model in self._adapters else ""
            await self._driver.read_weights(self._adapters.use(adapter))
            request = self._driver.new_request(job.prompt, self._answer_length(job), model=job.model, adapter=adapter)
            # identifiers rise in the order in which requests came
            key = f"{secrets.token_hex(4)}{request.key:08x}"
            form = new_format(key, int(_wall_clock()), job.model, **job.options)
            if job.is_streamed:
                return await self._stream(http, request, form, wants_usage=job.wants_usage)
            return await self._answer_whole(http, request, form)

        return handle

    def _serves(self, model: str) -> bool:
        return model == self._settings.model or model in self._adapters

    def _refuse(self, job: Job) -> web.Response | None:
        if not self._serves(job.model):
            return _error(404, f"The model `{job.model}` does not exist.", "NotFoundError", param="model")
        tokens = count_tokens(job.prompt) + 1
        longest = self._settings.max_model_len
        if tokens > longest:
            message = f"This model's maximum context length is {longest} tokens, the prompt has {tokens - 1}."
            return _error(400, message, "BadRequestError", param="input_tokens")
        return None

    def _answer_length(self, job: Job) -> int:
        room = self._settings.max_model_len - count_tokens(job.prompt)
        return min(job.max_tokens or self._settings.default_max_tokens, room)

    async def _stream(
        self, http: web.Request, request: Request, form: Format, *, wants_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if self._settings.headers_first:
            await response.prepare(http)
        cut_after = self._faults.next_cut()
        with self._observed(request) as observe:
            async for token in self._driver.tokens(request):
                if request.produced == 1 or not response.prepared:
                    if not response.prepared:
                        await response.prepare(http)
                    await response.write(form.opening() + form.chunk(token))
                else:
                    await response.write(form.chunk(token))
                observe()
                if cut_after is not None and request.produced >= cut_after:
                    _cut(http)
                    break
            else:
                await response.write(form.closing(request, wants_usage=wants_usage))
        return response

    async def _answer_whole(self, http: web.Request, request: Request, form: Format) -> web.Response:
        cut_after = self._faults.next_cut()
        with self._observed(request) as observe:
            async for _ in self._driver.tokens(request):
                observe()
                if cut_after is not None and request.produced >= cut_after:
                    _cut(http)
                    break
        return web.Response(body=form.whole(request), content_type="application/json")

    def _observed(self, request: Request) -> Observation:
        return Observation(self._metrics, request, self._settings.speed)

    def _pooling(self, pooling: Pooling) -> Handler:
        decoder = msgspec.json.Decoder(pooling.body)

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                body = decoder.decode(await http.read())
            except msgspec.DecodeError as error:
                return _error(400, str(error), "BadRequestError")
            done = await self._compute(pooling.to_job(body))
            return done if isinstance(done, web.Response) else web.json_response(pooling.answer(body, done))

        return handle

    async def _compute(self, job: Job) -> Request | web.Response:
        """The whole job at once, or a refusal."""
        status = self._faults.next_status()
        if status is not None:
            return _error(status, "The engine is asked to fail.", "service_unavailable_error")
        if (refused := self._refuse(job)) is not None:
            return refused
        request = self._driver.new_request(job.prompt, self._answer_length(job), model=job.model)
        async for _ in self._driver.tokens(request):
            pass
        return request

    async def _list_models(self, _: web.Request) -> web.Response:
        base = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self._settings.max_model_len}
        models = [{**base, "id": self._settings.model, "parent": None}]
        models.extend({**base, "id": name, "parent": self._settings.model} for name in self._adapters.paths)
        return web.json_response({"object": "list", "data": models})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _show_metrics(self, http: web.Request) -> web.StreamResponse:
        illness = self._faults.next_page()
        if illness == "empty":
            return web.Response(body=b"", headers={"Content-Type": CONTENT_TYPE_LATEST})
        if illness is not None:
            return await answer_wrongly(http, illness)
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _fault(self, http: web.Request) -> web.Response:
        try:
            fault = msgspec.json.decode(await http.read(), type=Fault)
        except msgspec.DecodeError as error:
            message = f"{error}; faults are refuse, stall, cut, unavailable, ill, ill-page, drop-events and fail-loads"
            return _error(400, message, "BadRequestError")
        if isinstance(fault, Stall):
            self._driver.stall(fault.for_s)
        elif isinstance(fault, DropEvents):
            if self._publisher is not None:
                self._publisher.drop(fault.times)
        elif isinstance(fault, Refuse):
            assert self._site is not None
            await self._site.stop()
            task = asyncio.create_task(self._listen_again(fault.for_s))
            self._mends.add(task)
            task.add_done_callback(self._mends.discard)
        else:
            self._faults.set(fault)
        return web.json_response({"set": msgspec.to_builtins(fault)})

    async def _listen_again(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._listen()


def _error(status: int, message: str, kind: str, *, param: str | None = None) -> web.Response:
    body = error_body(message, status=status, kind=kind, param=param)
    return web.Response(body=body, status=status, content_type="application/json")


def _cut(http: web.Request) -> None:
    """Reset the connection, as when a process is killed."""
    if http.transport is not None:
        http.transport.abort()


def _wall_clock() -> float:
    return time.time()  # noqa: TID251 - the edge: answers carry their time of creation
