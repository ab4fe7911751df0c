# SPDX-License-Identifier: Apache-2.0
"""A process that reports demand as a gateway does, for many ModelServers, all or some of them busy."""

from __future__ import annotations

import asyncio
import itertools
import sys
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from extproc.api.status_page_contents import (
    DEMAND_PATH,
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    EngineDemand,
    ProcessDemand,
    RequestCounters,
    ServerDemand,
    bucket_index,
    demand_delta,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROMPT_TOKENS: Final = 1000.0
_OUTPUT_TOKENS: Final = 200.0
# A server without requests has new engine reports alone, and only as often as this.
_IDLE_PERIOD_S: Final = 5
_TTFT_S: Final = (0.1, 0.15, 0.3, 0.6)
_TPOT_S: Final = (0.01, 0.012, 0.015, 0.02)


def address_of(number: int) -> str:
    """The IP address of the engine with this number."""
    return f"10.{64 + number // 60_000}.{number // 250 % 240}.{number % 250 + 1}"


class ServerCounters:
    """Counters of one ModelServer with engines at ``addresses``."""

    def __init__(self, addresses: list[str], rng: Random) -> None:
        self._addresses = addresses
        self._rng = rng
        self._requests = 0
        self._ttft = [0] * (len(TTFT_BOUNDS_S) + 1)
        self._tpot = [0] * (len(TPOT_BOUNDS_S) + 1)

    def advance_one_second(self, requests_per_s: float) -> ServerDemand:
        """One second later."""
        rng = self._rng
        # binomial, about as noisy as Poisson's
        came = sum(rng.random() < requests_per_s / 100 for _ in range(100))
        self._requests += came
        for _ in range(came):
            self._ttft[bucket_index(rng.choice(_TTFT_S), TTFT_BOUNDS_S)] += 1
            self._tpot[bucket_index(rng.choice(_TPOT_S), TPOT_BOUNDS_S)] += 1
        counted = RequestCounters(
            arrivals=self._requests,
            finished=self._requests,
            prompt_tokens=self._requests * _PROMPT_TOKENS,
            output_tokens=self._requests * _OUTPUT_TOKENS,
            prefill_work=self._requests * _PROMPT_TOKENS,
        )
        return ServerDemand(
            model="m",
            counted={"m": counted},
            ttft=tuple(self._ttft),
            tpot=tuple(self._tpot),
            engines={f"{one}:8000": self._engine(came > 0) for one in self._addresses},
        )

    def _engine(self, is_busy: bool) -> EngineDemand:
        # load is steady: the total in flight hardly ever doubles, which would cause a reconcile at once
        in_flight = self._rng.randrange(1, 3) if is_busy else 0
        return EngineDemand(
            in_flight=in_flight,
            in_flight_tokens=in_flight * (_PROMPT_TOKENS + _OUTPUT_TOKENS),
            waiting=0.0,
            running=float(in_flight),
            kv_usage=in_flight * 0.01,
            report_age_s=round(self._rng.random(), 3),
            kv_capacity_tokens=400_000.0,
            prefill_tokens_per_s=round(15_000.0 + self._rng.random(), 3),
            step_s=0.0075,
            step_s_per_token=8e-8,
        )


class FakeDemandFeed:
    """``busy``: how many of the ``servers``, the first ones, get requests."""

    def __init__(self, servers: Mapping[str, ServerCounters], requests_per_s: float, busy: int) -> None:
        self._servers = servers
        self._requests_per_s = requests_per_s
        self._busy = busy

    def app(self) -> web.Application:
        """The demand page as an application; streams to one client at a time."""
        app = web.Application()
        app.add_routes([web.get(DEMAND_PATH, self._page)])
        return app

    async def _page(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        sent: ProcessDemand | None = None
        for second in itertools.count(1):
            before = {} if sent is None else sent.servers
            page = ProcessDemand("gateway", second, float(second), dict(self._servers_at(second, before)))
            line = page if sent is None or request.query.get("watch") != "changes" else demand_delta(page, sent)
            sent = page
            try:
                await answer.write(msgspec.json.encode(line) + b"\n")
            except ConnectionError:
                break
            await asyncio.sleep(1.0)
        return answer

    def _servers_at(self, second: int, before: Mapping[str, ServerDemand]) -> Iterator[tuple[str, ServerDemand]]:
        for number, (name, one) in enumerate(self._servers.items()):
            if number < self._busy:
                yield name, one.advance_one_second(self._requests_per_s)
            elif name in before and (second + number) % _IDLE_PERIOD_S:
                yield name, before[name]
            else:
                yield name, one.advance_one_second(0.0)


def main() -> None:
    """``COUNT TARGETS REQUESTS_PER_S BUSY PORT``: ModelServers ``default/b0`` and so on, with an engine for each
    target.
    """
    count, targets, requests_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    busy, port = int(sys.argv[4]), int(sys.argv[5])
    rng = Random(1)
    servers = {
        f"default/b{one}": ServerCounters([address_of(one * targets + each) for each in range(targets)], rng)
        for one in range(count)
    }
    gateway = FakeDemandFeed(servers, requests_per_s, busy)
    web.run_app(gateway.app(), host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
