# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that are loaded and unloaded at run time, by vLLM's routes, texts and codes.

Sources: ``vllm/entrypoints/openai/models/serving.py`` for the names and the answers, ``vllm/lora/worker_manager.py``
for the weights. The server's list of names has no bound. The engine keeps the weights of ``max_cpu_loras`` adapters,
and evicts the least recently used one for another; its name stays, and the next request for it reads the weights again.
At most ``max_loras`` adapters share a step (``scheduler.py``). A read stops the engine's steps, as they share a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from aiohttp import web

from bench.engine.api_formats import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from bench.engine.faults import FaultPlan

# What happens to a load beyond ``max_cpu_loras``. Evict: vLLM's way. Refuse: an engine that holds no more than it can.
Overflow = Literal["evict", "refuse"]
_RANK: Final = re.compile(r"rank-(\d+)$")


class AdapterLimits(msgspec.Struct, frozen=True):
    """vLLM's flags of the same names; ``load_s``: time in which weights are read, in engine seconds."""

    max_loras: int = 1
    max_cpu_loras: int = 1
    max_lora_rank: int = 16
    load_s: float = 0.5
    overflow: Overflow = "evict"


class AdapterError(Exception):
    """``status`` and ``kind`` of vLLM's answer."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Adapters:
    """The adapters of one engine. ``loads`` and ``unloads``: how many there were. ``limits``: None without
    --enable-lora.
    """

    def __init__(self, fixed: Iterable[str], limits: AdapterLimits | None) -> None:
        """``fixed``: loaded when the engine starts."""
        self.paths: dict[str, str] = dict.fromkeys(fixed, "")
        self.limits = limits
        self.loads = self.unloads = 0
        # in order of their last use
        self._weights: OrderedDict[str, None] = OrderedDict.fromkeys(self.paths)

    def __contains__(self, name: str) -> bool:
        return name in self.paths

    def check_load(self, name: str, path: str) -> float:
        """How long the load takes, in engine seconds; raises AdapterError. To be followed by ``load``."""
        limits = self.limits or AdapterLimits()
        if not name or not path:
            raise AdapterError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.paths:
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            )
            raise AdapterError(400, "InvalidUserInput", f"{message}'load_inplace' to True.")
        if path.rpartition("/")[2] == "missing":
            raise AdapterError(404, "NotFoundError", f"Loading lora {name} failed: No adapter found for {path}")
        rank = _RANK.search(path)
        if rank is not None and int(rank[1]) > limits.max_lora_rank:
            message = f"LoRA rank {rank[1]} is greater than max_lora_rank {limits.max_lora_rank}."
            raise AdapterError(500, "InternalServerError", message)
        if limits.overflow == "refuse" and len(self.paths) >= limits.max_cpu_loras:
            message = f"The maximum number of adapters is loaded ({limits.max_cpu_loras}); unload one first."
            raise AdapterError(400, "BadRequestError", message)
        return limits.load_s

    def load(self, name: str, path: str) -> None:
        """It is there."""
        self.paths[name] = path
        self.loads += 1
        self._keep(name)

    def unload(self, name: str) -> None:
        """It is gone; raises AdapterError."""
        if not name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise AdapterError(400, "InvalidUserInput", message)
        if name not in self.paths:
            raise AdapterError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self.paths[name]
        self.unloads += 1
        self._weights.pop(name, None)

    def reload_s(self, name: str) -> float:
        """A request needs it: how long reading its weights again takes, in engine seconds; 0 if they are there."""
        if name not in self.paths or self.limits is None:
            return 0.0
        is_there = name in self._weights
        self._keep(name)
        return 0.0 if is_there else self.limits.load_s

    def _keep(self, name: str) -> None:
        self._weights[name] = None
        self._weights.move_to_end(name)
        most = len(self._weights) if self.limits is None else self.limits.max_cpu_loras
        while len(self._weights) > most:
            self._weights.popitem(last=False)


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
        fault = self._faults.next_load_fault()
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
    return error_response(message, status=status, kind=kind)
