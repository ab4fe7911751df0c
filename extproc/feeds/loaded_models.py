# SPDX-License-Identifier: Apache-2.0
"""Reads which models V2 servers have loaded, from the runtime agents beside them, once a second each.

The lists of engines of protocol OpenAI come with their metrics (``engines``), which V2 servers have none of. An agent
that answers 503 has a server that does not answer: it holds nothing. Of an agent that is away the last list stays: its
server may serve all the same, and its failures tell more.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from extproc.core.peer_events import EngineReported
from extproc.engines.engine_responses import parse_loaded_models
from extproc.engines.metrics import EngineReport
from extproc.feeds.engine_http import EngineHttp
from extproc.task_supervisor import FailureLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.core import Core
    from extproc.feeds.engine_http import EngineCredentials

log = logging.getLogger(__name__)
_PATH: Final = "/v1/adapters"
_INTERVAL_S: Final = 1.0
_TIMEOUT_S: Final = 2.0
# A thousand models with their sources.
_MOST_BYTES: Final = 4 << 20
_MOST_AT_ONCE: Final = 32
_UNAVAILABLE: Final = 503


class ModelRepositoryReader:
    """Follows the endpoints of all ModelServers of V2 that load models. Made inside the event loop."""

    def __init__(self, core: Core, access: EngineCredentials, *, deliver: Callable[[EngineReported], object]) -> None:
        """``deliver``: gets every list."""
        self._core = core
        self._access = access
        self._deliver = deliver
        self._at_once = asyncio.Semaphore(_MOST_AT_ONCE)
        self._failures = FailureLog(log)
        # by server and address; one that hangs delays no other
        self._reading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._said: dict[tuple[str, str], str] = {}

    async def run(self) -> None:
        """Read until cancelled."""
        http: EngineHttp | None = None
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    wanted = self._endpoints()
                    if wanted and http is None:
                        http = EngineHttp(self._access)
                    for key, port in wanted.items():
                        if http is not None and key not in self._reading:
                            self._reading[key] = group.create_task(self._read(http, *key, port))
                    self._said = {key: text for key, text in self._said.items() if key in wanted}
                    await asyncio.sleep(_INTERVAL_S)
        finally:
            self._reading.clear()
            if http is not None:
                await http.close()

    def _endpoints(self) -> dict[tuple[str, str], int]:
        """The agents' port, by server and address."""
        return {
            (name, address): loading.port
            for name, pool in self._core.pools.items()
            if (loading := pool.spec.adapter_loading) is not None
            and loading.port is not None
            and pool.spec.protocol == "V2"
            for address in pool.table.active_addresses
        }

    async def _read(self, http: EngineHttp, server: str, address: str, port: int) -> None:
        problem = ""
        try:
            async with self._at_once:
                pool = self._core.pools.get(server)
                if pool is not None:
                    problem = await self._list(http, server, address, port)
        except (OSError, ValueError) as error:  # includes TimeoutError
            problem = str(error) or "no answer"
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are read
            self._failures.record("a list of models could not be read", error)
        finally:
            self._reading.pop((server, address), None)
        if problem and problem != self._said.get((server, address)):
            log.warning("the agent of %s, of %s, lists no models: %s", address, server, problem)
        self._said[server, address] = problem

    async def _list(self, http: EngineHttp, server: str, address: str, port: int) -> str:
        """Deliver the list; returns what is wrong. Raises OSError and ValueError."""
        spec = self._core.pools[server].spec
        answer = await http.get(spec, address, port, _PATH, timeout_s=_TIMEOUT_S, most_bytes=_MOST_BYTES)
        if answer.status not in {200, _UNAVAILABLE}:
            return f"status {answer.status}"
        held = parse_loaded_models(answer.body) if answer.status == 200 else frozenset[str]()
        self._deliver(EngineReported(server, address, EngineReport(), models=held, base_models=held))
        return "" if answer.status == 200 else "its server does not answer, so it holds none"
