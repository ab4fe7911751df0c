# SPDX-License-Identifier: Apache-2.0
"""Has engines, or the runtime agents beside them, load and unload adapters

Off the request path: at most ``_MOST_AT_ONCE`` loads run at a time, one at each engine; others wait for their turn
within their own time limit.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import msgspec

from extproc.core.request_record import AdapterLoadResult
from extproc.engines.dialects import DIALECTS
from extproc.engines.engine_responses import (
    AdapterLoadProblem,
    AdapterLoadResponse,
    error_message,
    is_unloaded,
    parse_load_response,
)
from extproc.feeds.engine_http import EngineHttp
from extproc.task_supervisor import FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.api.model_server import ModelServerSpec
    from extproc.core.core import Core
    from extproc.core.effects import LoadAdapter
    from extproc.feeds.engine_http import EngineCredentials, EngineResponse

log = logging.getLogger(__name__)
# Agents answer vLLM's calls, whatever their engine.
_LOAD: Final = DIALECTS["vLLM"].load_path
_UNLOAD: Final = DIALECTS["vLLM"].unload_path
_MOST_AT_ONCE: Final = 16
# A sentence, or an object with the names of some adapters.
_MOST_BYTES: Final = 64 * 1024


class AdapterLoader:
    """Performs LoadAdapter effects. Made inside the event loop."""

    def __init__(
        self,
        core: Core,
        access: EngineCredentials,
        *,
        clock: Callable[[], float],
        deliver: Callable[[AdapterLoadResult], object],
    ) -> None:
        """``access``: keys and TLS of engines. ``deliver``: gets every result."""
        self._core = core
        self._http = EngineHttp(access)
        self._clock = clock
        self._deliver = deliver
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)
        # each as long as a load has it or waits for it
        self._engines: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = FailureLog(log)

    def start_load(self, ask: LoadAdapter) -> None:
        """Begin a load; its result is delivered later."""
        task = asyncio.get_running_loop().create_task(self._run(ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is being loaded, and close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    async def _run(self, ask: LoadAdapter) -> None:
        began_s = self._clock()
        unloaded: list[str] = []
        try:
            async with asyncio.timeout(ask.timeout_s):
                # at once: another process may soon load there an adapter that is being unloaded
                answer = await self._unload_evicted(ask, unloaded)
                if answer is None:
                    async with self._engines.setdefault((ask.server, ask.address), asyncio.Lock()), self._at_once:
                        answer = await self._change(ask)
        except TimeoutError:
            answer = AdapterLoadResponse(AdapterLoadProblem.UNREACHABLE, f"no answer within {ask.timeout_s:g} s")
        except (OSError, ValueError) as error:
            answer = AdapterLoadResponse(AdapterLoadProblem.UNREACHABLE, str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests wait for the result
            self._failures.record("an adapter could not be loaded", error)
            answer = AdapterLoadResponse(AdapterLoadProblem.UNREACHABLE, f"our own code fails: {error!r}")
        self._deliver(
            AdapterLoadResult(
                server=ask.server,
                address=ask.address,
                adapter=ask.adapter,
                problem=answer.problem,
                message=answer.message,
                was_there=answer.was_there,
                unloaded=tuple(dict.fromkeys((*unloaded, *answer.unloaded))),
                duration_s=self._clock() - began_s,
            )
        )

    async def _unload_evicted(self, ask: LoadAdapter, unloaded: list[str]) -> AdapterLoadResponse | None:
        """None if there is room; ``unloaded`` gets what is gone even if the load then fails."""
        pool = self._core.pools.get(ask.server)
        if pool is None:
            return AdapterLoadResponse(AdapterLoadProblem.UNREACHABLE, "its ModelServer has left the configuration")
        for one in ask.unload:
            answer = await self._post(pool.spec, ask, _UNLOAD, {"lora_name": one})
            if not is_unloaded(answer.status, answer.body):
                message = f"{one} could not be unloaded: {answer.status} {error_message(answer.body)}"
                return AdapterLoadResponse(AdapterLoadProblem.BUSY, message)
            unloaded.append(one)
        return None

    async def _change(self, ask: LoadAdapter) -> AdapterLoadResponse:
        pool = self._core.pools.get(ask.server)
        if pool is None:
            return AdapterLoadResponse(AdapterLoadProblem.UNREACHABLE, "its ModelServer has left the configuration")
        answer = await self._post(pool.spec, ask, _LOAD, {"lora_name": ask.adapter, "lora_path": ask.source})
        meant = parse_load_response(answer.status, answer.body, is_model=pool.spec.protocol == "V2")
        if meant.problem is None:
            return meant
        return msgspec.structs.replace(meant, message=f"{answer.status} {meant.message}")

    async def _post(self, spec: ModelServerSpec, ask: LoadAdapter, path: str, body: dict[str, str]) -> EngineResponse:
        """Call the agent beside the engine if it has a port, else the engine itself."""
        return await self._http.post(
            spec,
            ask.address,
            path,
            msgspec.json.encode(body),
            timeout_s=ask.timeout_s,
            most_bytes=_MOST_BYTES,
            agent_port=None if spec.adapter_loading is None else spec.adapter_loading.port,
        )
