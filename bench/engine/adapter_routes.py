# SPDX-License-Identifier: Apache-2.0
"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's texts and codes"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from bench.engine.adapters import AdapterError
from bench.engine.formats import error_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bench.engine.adapters import Adapters
    from bench.engine.faults import FaultPlan


class _Load(msgspec.Struct):
    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False


class _Unload(msgspec.Struct):
    lora_name: str = ""


class AdapterRoutes:
    """``read``: takes the engine's time in which weights are read, in engine seconds, and returns when it is over."""

    def __init__(self, adapters: Adapters, faults: FaultPlan, read: Callable[[float], Awaitable[None]]) -> None:
        self._adapters = adapters
        self._faults = faults
        self._read = read
        # as in vLLM, calls for one name follow each other
        self._names: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def routes(self) -> list[web.RouteDef]:
        """None without --enable-lora; aiohttp then answers 404, and no OpenAI error, as FastAPI does."""
        if self._adapters.limits is None:
            return []
        return [
            web.post("/v1/load_lora_adapter", self._load),
            web.post("/v1/unload_lora_adapter", self._unload),
        ]

    async def _load(self, http: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await http.read(), type=_Load)
        except msgspec.DecodeError as error:
            return _error(400, "BadRequestError", str(error))
        return await self._loaded(body)

    async def _loaded(self, body: _Load) -> web.Response:
        name = body.lora_name
        fault = self._faults.next_load()
        if fault is not None and fault.after_s:
            await asyncio.sleep(fault.after_s)
        if fault is not None and fault.status:
            return _error(fault.status, "InternalServerError", "The engine is asked to fail.")
        async with self._names[name]:
            try:
                if body.load_inplace and name in self._adapters:
                    self._adapters.unload(name)
                await self._read(self._adapters.check_load(name, body.lora_path))
                # another name may have taken the place meanwhile
                self._adapters.check_load(name, body.lora_path)
            except AdapterError as error:
                return _error(error.status, error.kind, str(error))
            self._adapters.load(name, body.lora_path)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, http: web.Request) -> web.Response:
        try:
            name = msgspec.json.decode(await http.read(), type=_Unload).lora_name
            async with self._names[name]:
                self._adapters.unload(name)
        except msgspec.DecodeError as error:
            return _error(400, "BadRequestError", str(error))
        except AdapterError as error:
            return _error(error.status, error.kind, str(error))
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _error(status: int, kind: str, message: str) -> web.Response:
    body = error_body(message, status=status, kind=kind)
    return web.Response(body=body, status=status, content_type="application/json")
