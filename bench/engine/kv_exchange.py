# SPDX-License-Identifier: Apache-2.0
"""KV caches between simulated engines: a side channel over HTTP beside each engine, and the links' time.

No keys or values are sent: a transfer takes the time that its bytes take over both engines' links. The side channel
stands for NIXL's handshake and notifications, Mooncake's and SGLang's bootstrap server, and the reads themselves:

| path | what it does |
|---|---|
| `GET /query` | Mooncake: engines by data-parallel rank |
| `POST /handshake` | this engine's id and what a pair must have in common |
| `POST /await` | waits until a key is kept here |
| `POST /read` | reads it, with the link's time, and releases it |
| `POST /heartbeat`, `POST /release` | prolongs or gives up a lease |
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import xxhash
from aiohttp import web

from bench.engine.kv_connectors import (
    SHARED_STORES,
    WAIT_S,
    ExportPlan,
    ImportPlan,
    Plan,
    TransferConfig,
    TransferFields,
    prompt_transfer_plans,
    transfer_response_fields,
    trtllm_context_response_fields,
)
from bench.engine.kv_transfer import HEARTBEAT_S, LEASE_S, PinnedExports, SharedLink, TransferNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from bench.engine.metrics import TransferMetrics
    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler

# LMCache's chunks, of which it keeps whole ones.
_CHUNK_TOKENS: Final = 256
_PATIENCE_S: Final = 600.0
_ABORTED: Final = "Aborted"


class TransferFailed(Exception):
    """The prompt did not come, and must not be computed here: the client gets an error. The message says why."""


class ExchangeSettings(msgspec.Struct, frozen=True):
    """``host`` and ``port``: of the side channel. ``version``: of the engine; only equal ones may be paired.
    ``kv_bytes``: of a token. ``speed``: engine seconds per second of the wall clock.
    """

    config: TransferConfig
    host: str
    port: int
    model: str
    network: TransferNetwork
    kv_bytes: float
    speed: float
    version: str = "0.32.0"


class _Asked(msgspec.Struct):
    """A body of the side channel. ``engine_id``: that the other side means, if it knows."""

    key: str = ""
    engine_id: str = ""
    size: float = 0.0
    wait_s: float = 0.0


class _Answered(msgspec.Struct):
    found: bool = False
    engine_id: str = ""
    pairs_with: str = ""
    cached_tokens: int = 0


class _Carrier:
    """One direction of the link, on the clock of the event loop. ``speed``: see ExchangeSettings."""

    def __init__(self, bandwidth: float, speed: float) -> None:
        self._link: SharedLink[int] = SharedLink(bandwidth * speed)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_key = 0

    async def carry(self, size: float) -> None:
        loop = asyncio.get_running_loop()
        key, self._next_key = self._next_key, self._next_key + 1
        self._waiting[key] = done = loop.create_future()
        self._link.begin(key, size, loop.time())
        self._plan()
        try:
            await done
        finally:
            if self._waiting.pop(key, None) is not None:
                self._link.cancel(key, loop.time())
                self._plan()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        end_s = self._link.next_end_s()
        self._timer = None if end_s is None else asyncio.get_running_loop().call_at(end_s, self._end)

    def _end(self) -> None:
        for key in self._link.pop_ended(asyncio.get_running_loop().time()):
            done = self._waiting.pop(key, None)
            if done is not None and not done.done():
                done.set_result(None)
        self._plan()


class _HeldPrefill(msgspec.Struct):
    """What this engine prefills for others, from the request's arrival until it is pulled, expired or given up.

    ``asked``: somebody waits for it. ``ready``: it is computed. ``gone``: it is no longer kept. ``is_expected``: the
    request has come. ``is_aborted``: a router has ended it.
    """

    asked: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    ready: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    gone: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    cached_tokens: int = 0
    is_expected: bool = False
    is_aborted: bool = False


class KvExchange:
    """One engine's part in pairs. ``run`` serves the side channel."""

    def __init__(
        self,
        settings: ExchangeSettings,
        scheduler: Scheduler,
        metrics: TransferMetrics,
        *,
        wake: Callable[[], None],
        fail: Callable[[Request, TransferFailed], None],
    ) -> None:
        """``wake``: called when there may be more to compute. ``fail``: ends a request with an error."""
        self.settings = settings
        self._config = settings.config
        self._scheduler = scheduler
        self._metrics = metrics
        self._wake, self._fail = wake, fail
        self.engine_id = settings.config.engine_id or secrets.token_hex(8)
        self._exports: PinnedExports[str] = PinnedExports(scheduler.pool, settings.config.lease_s or LEASE_S)
        self._kept: dict[str, _HeldPrefill] = {}
        self._plans: dict[int, Plan] = {}
        self._blocks: dict[int, list[int]] = {}
        self._stored: dict[int, int] = {}
        self._out = _Carrier(settings.network.bandwidth, settings.speed)
        self._in = _Carrier(settings.network.bandwidth, settings.speed)
        self._met: set[tuple[str, int]] = set()
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None
        self._group: asyncio.TaskGroup | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def _now_s(self) -> float:
        """Engine seconds."""
        return asyncio.get_running_loop().time() * self.settings.speed

    @property
    def limits_prefill_to_one_token(self) -> bool:
        """Its prefill engines write one token of an answer, whatever the request says."""
        return self._config.kv_connector in {"SGLang", "TensorRT-LLM"}

    def transfer_plans(self, body: bytes, request_id: str) -> list[Plan]:
        """What a request is, or each of its prompts. Raises msgspec.DecodeError. ``request_id``: of its header; empty:
        that of its body.
        """
        fields = msgspec.json.decode(body, type=TransferFields)
        request_id = request_id or fields.request_id
        # as vLLM makes its own id: that of the header, and eight random digits
        own = f"{request_id or 'cmpl'}-{secrets.token_hex(4)}" if self._is_pull else request_id
        return prompt_transfer_plans(self._config, fields, own)

    @property
    def _is_pull(self) -> bool:
        return self._config.kv_connector == "NixlConnector"

    def register(self, request: Request, plan: Plan) -> None:
        """``request`` is about to reach the scheduler."""
        if self._config.kv_connector in SHARED_STORES:
            self._stored[request.key] = stored = self._find_stored(request)
            request.is_remote = stored > 0
        elif isinstance(plan, ExportPlan):
            request.is_exported = True
            self._plans[request.key] = plan
            self._kept.setdefault(plan.key, _HeldPrefill()).is_expected = True
        elif isinstance(plan, ImportPlan):
            request.is_remote = True
            self._plans[request.key] = plan
            if self._is_pull:
                self._start(request, self._beat(plan))

    async def wait_until_may_compute(self, request: Request) -> None:
        """SGLang computes a prompt when the decode engine has asked for it. Raises TransferFailed after 300 s."""
        plan = self._plans.get(request.key)
        if self._config.kv_connector == "SGLang" and isinstance(plan, ExportPlan):
            try:
                async with asyncio.timeout(WAIT_S["SGLang"] / self.settings.speed):
                    await self._kept[plan.key].asked.wait()
                self._check_aborted(self._kept[plan.key])
            except TimeoutError:
                self._give_up(plan.key)
                msg = f"the decode engine did not ask for room {plan.key}"
                raise TransferFailed(msg) from None

    async def finish_export(self, request: Request) -> None:
        """The answer's tokens are there. SGLang answers when the KV cache was sent; stores have the prompt by now."""
        plan = self._plans.get(request.key)
        if self._config.kv_connector in SHARED_STORES:
            self._store(request)
        elif self._config.kv_connector == "SGLang" and isinstance(plan, ExportPlan) and plan.key in self._kept:
            kept = self._kept[plan.key]
            await kept.gone.wait()
            self._check_aborted(kept)

    def abort(self, request: Request) -> None:
        """A router ends a request (SGLang's ``/abort_request``), whatever it waits for."""
        plan = self._plans.get(request.key)
        kept = self._kept.get(plan.key) if isinstance(plan, ExportPlan) else None
        if kept is not None:
            kept.is_aborted = True
            kept.asked.set()
            kept.gone.set()
        self._fail(request, TransferFailed(_ABORTED))

    def _check_aborted(self, kept: _HeldPrefill) -> None:
        if kept.is_aborted:
            raise TransferFailed(_ABORTED)

    def response_fields(self, request: Request, prompt: bytes, body: bytes) -> bytes:
        """The answer ``body`` with what a prefill engine adds."""
        plan = self._plans.get(request.key)
        if not isinstance(plan, ExportPlan):
            return body
        address = (self.settings.host, self.settings.port)
        whole: dict[str, Any] = msgspec.json.decode(body)
        if self._config.kv_connector == "TensorRT-LLM":
            more, choice = trtllm_context_response_fields(plan, request, prompt, address=address)
            whole["choices"][0].update(choice)
        else:
            blocks = self._blocks.get(request.key, [])
            more = transfer_response_fields(
                self._config, plan, request, blocks, engine_id=self.engine_id, address=address
            )
        return msgspec.json.encode({**whole, **more})

    def on_request_ended(self, request: Request) -> None:
        """A request has ended, or its client has left."""
        plan = self._plans.pop(request.key, None)
        self._blocks.pop(request.key, None)
        self._stored.pop(request.key, None)
        for task in self._tasks.pop(request.key, []):
            task.cancel()
        if isinstance(plan, ImportPlan) and not request.produced:
            # nobody will read it: the other engine may free it at once
            self.release_remote(plan)
        elif isinstance(plan, ExportPlan) and (plan.key not in self._exports or self._config.kv_connector == "SGLang"):
            # SGLang's answer comes when nothing need be kept any more
            self._give_up(plan.key)

    def release_remote(self, plan: Plan) -> None:
        """A decode request was refused or aborted: the prefill engine is told."""
        if isinstance(plan, ImportPlan) and self._group is not None:
            task = self._group.create_task(self._quietly(plan, "release"))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def on_step(self) -> None:
        """See what the scheduler has exported and reserved blocks for."""
        scheduler = self._scheduler
        scheduler.pop_sendable_tokens()
        for request, blocks in scheduler.pop_finished_exports():
            self._pin(request, blocks)
        for request, missing in scheduler.pop_transfers_to_start():
            plan = self._plans.get(request.key)
            if isinstance(plan, ImportPlan):
                self._start(request, self._load(request, plan, missing))
            else:
                self._start(request, self._load_stored(request, missing))

    def _pin(self, request: Request, blocks: list[int]) -> None:
        plan = self._plans.get(request.key)
        kept = self._kept.get(plan.key) if isinstance(plan, ExportPlan) else None
        # Mooncake sends only what finished by length
        is_dropped = self._config.kv_connector == "MooncakeConnector" and request.finish_reason != "length"
        if kept is None or is_dropped or not isinstance(plan, ExportPlan):
            self._scheduler.pool.release(blocks)
            return
        self._blocks[request.key] = blocks
        kept.cached_tokens = request.cached_tokens or 0
        self._exports.pin(plan.key, blocks, self._now_s)
        kept.ready.set()
        self._plan_expiry()

    def _give_up(self, key: str) -> None:
        self._exports.release(key)
        kept = self._kept.pop(key, None)
        if kept is not None:
            kept.gone.set()
        self._wake()

    def _plan_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        end_s = self._exports.next_end_s()
        at_s = None if end_s is None else end_s / self.settings.speed
        self._expiry = None if at_s is None else asyncio.get_running_loop().call_at(at_s, self._expire)

    def _expire(self) -> None:
        for key in self._exports.expire(self._now_s):
            self._metrics.expired.inc()
            self._give_up(key)
        self._plan_expiry()

    def _start(self, request: Request, work: Coroutine[None, None, None]) -> None:
        assert self._group is not None
        self._tasks.setdefault(request.key, []).append(self._group.create_task(work))

    async def _beat(self, plan: ImportPlan) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / self.settings.speed)
            await self._quietly(plan, "heartbeat")

    async def _quietly(self, plan: ImportPlan, path: str) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            await self._ask(plan, path, _Asked(plan.key))

    async def _load(self, request: Request, plan: ImportPlan, missing: int) -> None:
        """Ends the wait of ``request`` in one of the ways that the connector has."""
        began_at_s = self._now_s
        size = missing * self.settings.kv_bytes
        try:
            answered = await self._transfer(plan, size)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, TransferFailed) as error:
            self._metrics.failed_transfers.inc()
            if self._config.kv_load_failure_policy == "recompute" and self._config.kv_connector != "SGLang":
                self._loaded(request, 0)
            else:
                self._fail(request, TransferFailed(f"the KV cache of {plan.key} did not come: {error}"))
            return
        if answered.found:
            self._metrics.count_transfer(size, self._now_s - began_at_s)
            request.cached_tokens = answered.cached_tokens
            self._loaded(request, missing)
        elif self._is_pull:
            # what is read are the blocks of others, and nobody notices
            request.corrupt_answer()
            self._metrics.count_transfer(size, self._now_s - began_at_s)
            self._loaded(request, missing)
        elif self._config.kv_connector in WAIT_S:
            self._metrics.failed_transfers.inc()
            self._fail(request, TransferFailed(f"the prefill of {plan.key} did not come in time"))
        else:
            self._loaded(request, 0)

    async def _transfer(self, plan: ImportPlan, size: float) -> _Answered:
        """Raises TransferFailed if the engines must not be paired, and what aiohttp raises."""
        place, network, speed = (plan.host, plan.port), self.settings.network, self.settings.speed
        if place not in self._met:
            await asyncio.sleep(network.handshake_s / speed)
            other = await self._ask(plan, "handshake", _Asked())
            if other.pairs_with != self._pairs_with():
                msg = "the other engine has another version or model"
                raise TransferFailed(msg)
            self._met.add(place)
        wait_s = WAIT_S.get(self._config.kv_connector, 0.0)
        ready = await self._ask(plan, "await", _Asked(plan.key, plan.engine_id, wait_s=wait_s))
        if plan.engine_id and ready.engine_id != plan.engine_id:
            self._met.discard(place)
            msg = f"there is another engine than {plan.engine_id}"
            raise TransferFailed(msg)
        await asyncio.sleep(network.latency_s / speed)
        if not ready.found:
            await self._in.carry(size)
            return ready
        answered, _ = await asyncio.gather(
            self._ask(plan, "read", _Asked(plan.key, plan.engine_id, size)), self._in.carry(size)
        )
        return answered

    def _loaded(self, request: Request, tokens: int) -> None:
        self._scheduler.on_transfer_ended(request, tokens)
        self._wake()

    def _pairs_with(self) -> str:
        """Equal for engines that may be paired."""
        one = f"{self.settings.version}|{self.settings.model}|{self.settings.kv_bytes}|{self._config.kv_connector}"
        return xxhash.xxh3_64_hexdigest(one.encode())

    async def _ask(self, plan: ImportPlan, path: str, asked: _Asked) -> _Answered:
        assert self._http is not None
        url = f"http://{plan.host}:{plan.port}/{path}"
        async with self._http.post(url, data=msgspec.json.encode(asked)) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=_Answered)

    def _find_stored(self, request: Request) -> int:
        """Tokens of its prompt that the shared store has."""
        return max((tokens for tokens, file in self._files(request) if file.exists()), default=0)

    def _store(self, request: Request) -> None:
        for _, file in self._files(request):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def _files(self, request: Request) -> list[tuple[int, Path]]:
        """The store's files of a prompt, with the tokens up to their ends: one for all, or one a chunk or block."""
        size = self._scheduler.limits.block_size
        full = (request.prompt_tokens - 1) // size
        steps = {"ExampleConnector": full, "LMCacheConnectorV1": max(1, _CHUNK_TOKENS // size)}
        step = steps.get(self._config.kv_connector, 1)
        folder = Path(self._config.kv_connector_extra_config.shared_storage_path)
        ends = range(step, full + 1, step) if step else ()
        return [(end * size, folder / f"{request.text.hashes[end - 1]:016x}.kv") for end in ends]

    async def _load_stored(self, request: Request, missing: int) -> None:
        tokens = max(0, self._stored[request.key] - (request.tokens - missing))
        await asyncio.sleep(self.settings.network.latency_s / self.settings.speed)
        await self._in.carry(tokens * self.settings.kv_bytes)
        self._loaded(request, tokens)

    async def run(self) -> None:
        """Serve the side channel until cancelled."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/query", self._query),
                web.post("/handshake", self._handshake),
                web.post("/await", self._await),
                web.post("/read", self._read),
                web.post("/heartbeat", self._heartbeat),
                web.post("/release", self._release),
            ]
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, self.settings.host, self.settings.port, reuse_address=True).start()
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as self._http, asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()
        finally:
            self._group = None
            if self._expiry is not None:
                self._expiry.cancel()
            self._out.close()
            self._in.close()
            await runner.cleanup()

    async def _query(self, _: web.Request) -> web.Response:
        worker = {"0": {"0": f"tcp://{self.settings.host}:{self.settings.port}"}}
        return web.json_response({"0": {"engine_id": self.engine_id, "worker_addr": worker}})

    async def _handshake(self, _: web.Request) -> web.Response:
        return _answer(_Answered(engine_id=self.engine_id, pairs_with=self._pairs_with()))

    async def _await(self, http: web.Request) -> web.Response:
        asked = msgspec.json.decode(await http.read(), type=_Asked)
        kept = self._kept.get(asked.key)
        if kept is None and asked.wait_s:
            kept = self._kept[asked.key] = _HeldPrefill()
        if kept is not None:
            kept.asked.set()
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(asked.wait_s / self.settings.speed):
                        await kept.ready.wait()
            finally:
                if not kept.is_expected:
                    self._kept.pop(asked.key, None)
        return _answer(_Answered(found=asked.key in self._exports, engine_id=self.engine_id))

    async def _read(self, http: web.Request) -> web.Response:
        asked = msgspec.json.decode(await http.read(), type=_Asked)
        kept = self._kept.get(asked.key)
        await self._out.carry(asked.size)
        found = asked.key in self._exports
        if found:
            self._give_up(asked.key)
            self._plan_expiry()
        else:
            self._metrics.late_notifications.inc()
        cached = 0 if kept is None else kept.cached_tokens
        return _answer(_Answered(found=found, engine_id=self.engine_id, cached_tokens=cached))

    async def _heartbeat(self, http: web.Request) -> web.Response:
        asked = msgspec.json.decode(await http.read(), type=_Asked)
        found = self._exports.prolong(asked.key, self._now_s)
        self._plan_expiry()
        return _answer(_Answered(found=found))

    async def _release(self, http: web.Request) -> web.Response:
        asked = msgspec.json.decode(await http.read(), type=_Asked)
        found = asked.key in self._exports
        if found:
            self._give_up(asked.key)
            self._plan_expiry()
        return _answer(_Answered(found=found))


def _answer(answered: _Answered) -> web.Response:
    return web.Response(body=msgspec.json.encode(answered), content_type="application/json")
