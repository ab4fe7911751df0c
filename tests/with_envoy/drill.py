# SPDX-License-Identifier: Apache-2.0
"""A drill: one of three engines is ill, behind a real Envoy.

Three engines serve for a while, then one of them falls ill, and stays ill until the end. Requests arrive evenly, each
with another prompt, every second one streamed. A request has failed if its client saw anything but a whole answer
within the client's patience. A request counts where it was sent: in the first seconds of the illness, or after them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from bench.stack.loopback_stack import ALIAS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.stack.loopback_stack import Stack

# What ``POST /faults`` gets.
FAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "500": {"fault": "unavailable", "status": 500, "times": 1_000_000},
    "429": {"fault": "unavailable", "status": 429, "times": 1_000_000},
    "400": {"fault": "unavailable", "status": 400, "times": 1_000_000},
    "garbage": {"fault": "ill", "kind": "garbage", "times": 1_000_000},
    "cut": {"fault": "cut", "after_tokens": 3, "times": 1_000_000},
}
_PROMPT_WORDS: Final = 40


class DrillSettings(msgspec.Struct, frozen=True):
    """``warm_s``: before the illness. ``onset_s``: its first seconds. ``ill_s``: all of it. ``patience_s``: of a
    client.
    """

    rate: float = 30.0
    warm_s: float = 5.0
    onset_s: float = 5.0
    ill_s: float = 25.0
    patience_s: float = 8.0
    output_tokens: int = 20


class DrillResult(msgspec.Struct):
    """Requests of the illness, by when they were sent.

    ``ill_share``: of the requests that Envoy sent to engines after the onset, retries included, the ill engine's.
    ``errors``: what clients saw after the onset, with counts.
    """

    kind: str
    at_onset: int = 0
    failed_at_onset: int = 0
    after: int = 0
    failed_after: int = 0
    ill_share: float = 0.0
    errors: dict[str, int] = msgspec.field(default_factory=dict)


async def drill(stack: Stack, kind: str, settings: DrillSettings) -> DrillResult:
    """Run one drill on a fresh stack, whose engines are processes of their own. The first of them falls ill."""
    clock = asyncio.get_running_loop().time
    result = DrillResult(kind)
    timeout = aiohttp.ClientTimeout(total=settings.patience_s)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        async with asyncio.TaskGroup() as tasks:
            asker = _Asker(http, stack.url, result, settings, tasks)
            await asker.ask_for(settings.warm_s, "warm")
            await _fall_ill(stack, kind, http)
            await asker.ask_for(settings.onset_s, "onset")
            before = await _requests_by_engine(stack, http)
            ends_at_s = clock() + settings.ill_s - settings.onset_s
            await asker.ask_for(ends_at_s - clock(), "after")
            after = await _requests_by_engine(stack, http)
        gained = {engine: count - before[engine] for engine, count in after.items()}
        result.ill_share = gained[stack.engines[0].removeprefix("http://")] / max(1, sum(gained.values()))
    return result


async def _fall_ill(stack: Stack, kind: str, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{stack.engines[0]}/faults", json=FAULTS[kind]) as answer:
        answer.raise_for_status()


async def _requests_by_engine(stack: Stack, http: aiohttp.ClientSession) -> dict[str, int]:
    """Requests that Envoy has sent to each engine, retries included, by ``ip:port``."""
    async with http.get(f"{stack.admin}/clusters", params={"format": "json"}) as answer:
        clusters = (await answer.json(content_type=None))["cluster_statuses"]
    found = {}
    for host in next(one for one in clusters if one["name"].startswith("server/"))["host_statuses"]:
        address = host["address"]["socket_address"]
        totals = [int(stat.get("value", 0)) for stat in host["stats"] if stat["name"] == "rq_total"]
        found[f"{address['address']}:{address['port_value']}"] = sum(totals)
    return found


class _Asker:
    """Sends requests evenly and counts what became of them."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        result: DrillResult,
        settings: DrillSettings,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._http = http
        self._url = f"{url}/v1/chat/completions"
        self._result = result
        self._settings = settings
        self._tasks = tasks
        self._number = 0

    async def ask_for(self, seconds: float, phase: str) -> None:
        """Send requests for a while; their answers may come later."""
        clock = asyncio.get_running_loop().time
        began_at_s = clock()
        for sent in range(round(seconds * self._settings.rate)):
            await asyncio.sleep(max(0.0, began_at_s + sent / self._settings.rate - clock()))
            self._number += 1
            self._tasks.create_task(self._ask(self._number, phase))

    async def _ask(self, number: int, phase: str) -> None:
        error = await self._error(number)
        result, failed = self._result, int(bool(error))
        if phase == "onset":
            result.at_onset += 1
            result.failed_at_onset += failed
        elif phase == "after":
            result.after += 1
            result.failed_after += failed
            if error:
                result.errors[error] = result.errors.get(error, 0) + 1

    async def _error(self, number: int) -> str:
        """What the client saw go wrong; empty if it got a whole answer."""
        is_streamed = number % 2 == 0
        text = " ".join(f"{number}-{word}" for word in range(_PROMPT_WORDS))
        body = {
            "model": ALIAS,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._settings.output_tokens,
            "stream": is_streamed,
        }
        try:
            async with self._http.post(self._url, json=body) as answer:
                whole = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return type(error).__name__
        if answer.status != 200:
            return str(answer.status)
        is_whole = whole.endswith(b"data: [DONE]\n\n") if is_streamed else b'"usage"' in whole
        return "" if is_whole else "not an answer"
