# SPDX-License-Identifier: Apache-2.0
"""The engine as an HTTP server: a driver runs the scheduler in real time, with durations divided by the speed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bench.engine.api_formats import (
    ApiResponseFormat,
    ChatFormat,
    ChatRequest,
    CompletionFormat,
    CompletionRequest,
    GenerateFormat,
    GenerateRequest,
    GenerationJob,
    MessagesFormat,
    MessagesRequest,
    ResponsesFormat,
    ResponsesRequest,
    chat_job,
    completion_job,
    count_tokens_handler,
    error_body,
    generate_job,
    messages_job,
    responses_job,
    sglang_chat_job,
    with_anthropic_errors,
)
from bench.engine.embedding_and_audio_apis import POOLING, PoolingApi, audio_handlers, tokenize_handlers
from bench.engine.fake_tokenizer import count_tokens
from bench.engine.faults import DropEvents, Fault, FaultPlan, Refuse, Stall, serve_bad_answer
from bench.engine.hardware import API_S, Hardware
from bench.engine.kv_cache import CacheJournal
from bench.engine.kv_connectors import ExportPlan, FieldsInvalid, Plan, TransferFields
from bench.engine.kv_event_publisher import KvEventPublisher, KvEventsConfig
from bench.engine.kv_exchange import ExchangeSettings, KvExchange, TransferFailed
from bench.engine.lora_adapters import AdapterLimits, AdapterRoutes, Adapters
from bench.engine.metrics import RequestTimer, ServerMetrics, TransferMetrics
from bench.engine.request import Request
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import RooflineStepTime
from bench.engine.structured_outputs import write_answer
from bench.engine.tensor_api import TensorRoutes
from extproc.api.addresses import join_host_port
from extproc.listen_sockets import ListenFailed
from extproc.wire_names import APIS_BY_PATH, Api

# uvicorn's, and so vLLM's: of connections that are not accepted yet
_BACKLOG: Final = 2048

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence

    from bench.engine.request import Token

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MAX_BODY: Final = 256 * 1024 * 1024
_SHUTDOWN_S: Final = 0.1


class EngineDriver:
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
        """``exchange``: with other engines; set before it runs, if the engine is one of a pair."""
        self.exchange: KvExchange | None = None
        self._publisher = publisher
        self._journal = CacheJournal() if publisher is not None else None
        self.scheduler = Scheduler(RooflineStepTime(hardware), limits, self._journal)
        self.block_size = limits.block_size
        self.speed = speed
        self._rng = random.Random(seed)
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Queue[Token | TransferFailed]] = {}
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

    def new_request(self, prompt: bytes, output_tokens: int, job: GenerationJob, *, adapter: str = "") -> Request:
        """A request of ``job`` for ``prompt``, whose answer has ``output_tokens`` tokens, or fewer if its structure
        has. ``adapter``: that it needs, empty for none. Raises StructureInvalid.
        """
        written = write_answer(job.structure, output_tokens, self._rng)
        request = Request(
            next(self._keys),
            prompt,
            written.text,
            model=job.model,
            block_size=self.block_size,
            keeps_text=self._journal is not None,
            adapter=adapter,
            salt=job.salt,
        )
        request.finish_reason = written.reason
        return request

    def wake_up(self) -> None:
        """There may be something to compute."""
        self._work_came.set()

    def fail(self, request: Request, why: TransferFailed) -> None:
        """End a request with an error."""
        queue = self._answers.get(request.key)
        if queue is not None:
            queue.put_nowait(why)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Token]:
        """Add ``requests`` and follow their answers, as they come. A caller that stops early aborts what runs.

        Raises TransferFailed.
        """
        queue: asyncio.Queue[Token | TransferFailed] = asyncio.Queue()
        # the time that vLLM's API server takes before its engine sees a request
        await asyncio.sleep(API_S / self.speed)
        for request in requests:
            self._answers[request.key] = queue
            self.scheduler.add(request)
        self._work_came.set()
        running = len(requests)
        try:
            while running:
                token = await queue.get()
                if isinstance(token, TransferFailed):
                    raise token
                yield token
                running -= token.is_last
        finally:
            for request in requests:
                del self._answers[request.key]
                if not request.is_done:
                    self.scheduler.abort(request)
                    self.wake_up()

    async def run(self) -> None:
        """Step after step, until cancelled.

        A late wake-up shortens the next sleep, so that engine time keeps its pace.
        """
        loop = asyncio.get_running_loop()
        due_at_s = loop.time()
        while True:
            if loop.time() < self._stalled_until_s:
                await asyncio.sleep(self._stalled_until_s - loop.time())
            self._work_came.clear()
            step = self.scheduler.begin_step(leaps=False)
            if self.exchange is not None:
                self.exchange.on_step()
            if step is None:
                await self._work_came.wait()
                due_at_s = loop.time()
                continue
            due_at_s += step.duration_s / self.speed
            await asyncio.sleep(due_at_s - loop.time())
            # a machine too slow for this speed must not try to catch up for ever
            due_at_s = max(due_at_s, loop.time() - 0.1)

            tokens = self.scheduler.end_step(step)
            if self.exchange is not None:
                self.exchange.on_step()
            if self._publisher is not None and self._journal is not None:
                await self._publisher.publish(self._journal.pop_changes())
            for token in tokens:
                queue = self._answers.get(token.request.key)
                if queue is not None:
                    queue.put_nowait(token)


class EngineSettings(msgspec.Struct, frozen=True):
    """The options of the engine's command line. ``speed``: engine seconds per second of the wall clock."""

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
    # with other engines; None: it does both prefill and decode
    exchange: ExchangeSettings | None = None


class EngineServer:
    """One engine: its HTTP routes, the core that computes, and the faults that tests inject."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._publisher = None
        if settings.events is not None:
            block_size = settings.limits.block_size
            self._publisher = KvEventPublisher(
                settings.events, host=settings.host, block_size=block_size, base_model=settings.model
            )
        self._driver = EngineDriver(
            settings.hardware, settings.limits, speed=settings.speed, seed=settings.seed, publisher=self._publisher
        )
        self._adapters = Adapters(settings.adapters, settings.lora)
        self._metrics = ServerMetrics(
            self._driver.scheduler, settings.limits, model=settings.model, adapters=self._adapters
        )
        self._exchange = None
        if settings.exchange is not None:
            self._exchange = self._driver.exchange = KvExchange(
                settings.exchange,
                self._driver.scheduler,
                TransferMetrics(self._metrics.registry, settings.model),
                wake=self._driver.wake_up,
                fail=self._driver.fail,
            )
        # SGLang's requests by the id of their bodies
        self._rids: dict[int, tuple[str, Request]] = {}
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
                web.post("/abort_request", self._abort),
                *self._adapter_routes.routes,
                *TensorRoutes(self._serves, self._faults.next_error_status).routes,
            ]
        )
        # a client that disconnects cancels its handler, and with it the request in the engine running requests end with
        # the engine, as vLLM's do: their tokens are no longer computed
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await self._listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._publisher is not None:
                    tasks.create_task(self._publisher.answer_replays())
                if self._exchange is not None:
                    tasks.create_task(self._exchange.run())
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
            Api.MESSAGES: with_anthropic_errors(self._generating(MessagesRequest, messages_job, MessagesFormat)),
            Api.COUNT_TOKENS: count_tokens_handler,
            Api.GENERATE: self._generating(GenerateRequest, generate_job, GenerateFormat),
            **{api: self._pooling(one) for api, one in POOLING.items()},
            **tokenize_handlers(self._serves),
            **audio_handlers(self._compute),
        }

    async def _listen(self) -> None:
        assert self._runner is not None
        where = self._settings.host, self._settings.port
        self._site = web.TCPSite(self._runner, *where, reuse_address=True, backlog=_BACKLOG)
        try:
            await self._site.start()
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ListenFailed(join_host_port(*where), why, "--port") from None

    def _generating(
        self, kind: type[Any], to_job: Callable[[Any], GenerationJob], new_format: Callable[..., ApiResponseFormat]
    ) -> Handler:
        decoder = msgspec.json.Decoder(kind)

        async def handle(http: web.Request) -> web.StreamResponse:
            status = self._faults.next_error_status()
            if status is not None:
                return _error(status, "The engine is asked to fail.", "service_unavailable_error")
            illness = self._faults.next_bad_answer()
            if illness is not None:
                return await serve_bad_answer(http, illness)
            plans: list[Plan] = []
            try:
                body = await http.read()
                job = to_job(decoder.decode(body))
                if not job.model:
                    job = msgspec.structs.replace(job, model=self._settings.model)
                plans, job = self._planned(http, body, job)
                refused = self._refuse(job)
                requests = self._requests(job) if refused is None else []
            except msgspec.DecodeError as error:
                return _error(400, str(error), "BadRequestError")
            if refused is not None:
                if self._exchange is not None:
                    for plan in plans:
                        self._exchange.release_remote(plan)
                return refused
            with self._paired(body, requests, plans):
                return await self._respond(http, requests, job, new_format)

        return handle

    def _planned(self, http: web.Request, body: bytes, job: GenerationJob) -> tuple[list[Plan], GenerationJob]:
        """What the request is in a pair, or each of its prompts, and its job as that. Raises msgspec.DecodeError."""
        if self._exchange is None:
            return [], job
        # vLLM's responses have an id of their own, whatever the header says
        is_response = http.path in Api.RESPONSES.spec.paths
        plans = self._exchange.transfer_plans(body, "" if is_response else http.headers.get("x-request-id", ""))
        if len(plans) > 1 and (len(plans) != len(job.prompts) or job.choices > 1):
            msg = "there are as many rooms as prompts, with one answer to each."
            raise FieldsInvalid(msg)
        if isinstance(plans[0], ExportPlan) and self._exchange.limits_prefill_to_one_token:
            job = msgspec.structs.replace(job, max_tokens=1)
        return plans, job

    @contextlib.contextmanager
    def _paired(self, body: bytes, requests: Sequence[Request], plans: Sequence[Plan]) -> Iterator[None]:
        """While the requests are in the engine, other engines may ask for them, and SGLang's routers end them."""
        if self._exchange is None:
            yield
            return
        paired = requests[: len(plans)]
        for request, plan in zip(paired, plans, strict=True):
            self._exchange.register(request, plan)
        for request, rid in zip(
            paired, msgspec.json.decode(body, type=TransferFields).sglang_request_ids, strict=False
        ):
            self._rids[request.key] = (rid, request)
        try:
            yield
        finally:
            for request in paired:
                self._rids.pop(request.key, None)
                self._exchange.on_request_ended(request)

    async def _respond(
        self,
        http: web.Request,
        requests: Sequence[Request],
        job: GenerationJob,
        new_format: Callable[..., ApiResponseFormat],
    ) -> web.StreamResponse:
        try:
            if self._exchange is not None:
                for request in requests:
                    await self._exchange.wait_until_may_compute(request)
            await self._driver.read_weights(self._adapters.reload_s(requests[0].adapter))
            # identifiers rise in the order in which requests came
            key = f"{secrets.token_hex(4)}{requests[0].key:08x}"
            form = new_format(key, int(_wall_clock()), job.model, **job.options)
            if job.is_streamed:
                return await self._stream(http, requests, form, wants_usage=job.wants_usage)
            whole = await self._answer_whole(http, requests, form)
        except TransferFailed as error:
            return _error(500, str(error), "InternalServerError")
        if self._exchange is not None and isinstance(whole.body, bytes):
            whole.body = self._exchange.response_fields(requests[0], job.prompts[0], whole.body)
        return whole

    def _requests(self, job: GenerationJob) -> list[Request]:
        """One for each choice of each prompt; raises StructureInvalid."""
        adapter = job.model if job.model in self._adapters else ""
        return [
            self._driver.new_request(prompt, self._answer_length(job, prompt), job, adapter=adapter)
            for prompt in job.prompts
            for _ in range(job.choices)
        ]

    def _serves(self, model: str) -> bool:
        return model == self._settings.model or model in self._adapters

    def _refuse(self, job: GenerationJob) -> web.Response | None:
        if not self._serves(job.model):
            return _error(404, f"The model `{job.model}` does not exist.", "NotFoundError", param="model")
        tokens = max(map(count_tokens, job.prompts)) + 1
        longest = self._settings.max_model_len
        if tokens > longest:
            message = f"This model's maximum context length is {longest} tokens, the prompt has {tokens - 1}."
            return _error(400, message, "BadRequestError", param="input_tokens")
        return None

    def _answer_length(self, job: GenerationJob, prompt: bytes) -> int:
        room = self._settings.max_model_len - count_tokens(prompt)
        # JSON of a schema ends by itself
        is_open = job.structure is None or job.structure.schema is None
        return min(job.max_tokens or (self._settings.default_max_tokens if is_open else room), room)

    async def _stream(
        self, http: web.Request, requests: Sequence[Request], form: ApiResponseFormat, *, wants_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        if self._settings.headers_first:
            await response.prepare(http)
        index_of = {request.key: index for index, request in enumerate(requests)}
        opening = form.opening()
        try:
            async for token in self._observed(http, requests):
                if not response.prepared:
                    await response.prepare(http)
                await response.write(opening + form.chunk(token, index_of[token.request.key]))
                opening = b""
        except TransferFailed as error:
            if not response.prepared:
                raise
            # as vLLM reports an error in a stream
            await response.write(b"data: " + error_body(str(error), status=500, kind="InternalServerError") + b"\n\n")
            return response
        if all(request.is_done for request in requests):
            await response.write(form.closing(requests, wants_usage=wants_usage))
        return response

    async def _answer_whole(
        self, http: web.Request, requests: Sequence[Request], form: ApiResponseFormat
    ) -> web.Response:
        async for _ in self._observed(http, requests):
            pass
        return web.Response(body=form.full_response(requests), content_type="application/json")

    async def _observed(self, http: web.Request, requests: Sequence[Request]) -> AsyncGenerator[Token]:
        """The tokens, which are counted. A cut that a test asks for resets the connection after one of them."""
        cut_after = self._faults.next_cut()
        with contextlib.ExitStack() as observations:
            observe = {
                request.key: observations.enter_context(RequestTimer(self._metrics, request, self._settings.speed))
                for request in requests
            }
            async with contextlib.aclosing(self._driver.generate(requests)) as tokens:
                async for token in tokens:
                    yield token
                    observe[token.request.key]()
                    if cut_after is not None and token.request.produced >= cut_after:
                        _cut(http)
                        return
            if self._exchange is not None:
                for request in requests:
                    await self._exchange.finish_export(request)

    def _pooling(self, pooling: PoolingApi) -> Handler:
        decoder = msgspec.json.Decoder(pooling.body)

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                body = decoder.decode(await http.read())
            except msgspec.DecodeError as error:
                return _error(400, str(error), "BadRequestError")
            done = await self._compute(pooling.to_job(body))
            return done if isinstance(done, web.Response) else web.json_response(pooling.answer(body, done))

        return handle

    async def _compute(self, job: GenerationJob) -> Request | web.Response:
        """The whole job at once, or a refusal."""
        status = self._faults.next_error_status()
        if status is not None:
            return _error(status, "The engine is asked to fail.", "service_unavailable_error")
        if (refused := self._refuse(job)) is not None:
            return refused
        requests = self._requests(job)
        async for _ in self._driver.generate(requests):
            pass
        return requests[0]

    async def _abort(self, http: web.Request) -> web.Response:
        """SGLang's: the requests whose id begins with that of the body end with an error."""
        try:
            ids = msgspec.json.decode(await http.read(), type=TransferFields).sglang_request_ids
        except msgspec.DecodeError as error:
            return _error(400, str(error), "BadRequestError")
        for known, request in list(self._rids.values()):
            if any(rid and known.startswith(rid) for rid in ids) and self._exchange is not None:
                self._exchange.abort(request)
        return web.Response()

    async def _list_models(self, _: web.Request) -> web.Response:
        base = {"object": "model", "created": 0, "owned_by": "vllm", "max_model_len": self._settings.max_model_len}
        models = [{**base, "id": self._settings.model, "parent": None}]
        models.extend({**base, "id": name, "parent": self._settings.model} for name in self._adapters.paths)
        return web.json_response({"object": "list", "data": models})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _show_metrics(self, http: web.Request) -> web.StreamResponse:
        illness = self._faults.next_metrics_fault()
        if illness == "empty":
            return web.Response(body=b"", headers={"Content-Type": CONTENT_TYPE_LATEST})
        if illness is not None:
            return await serve_bad_answer(http, illness)
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
                self._publisher.drop_next(fault.times)
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
