# SPDX-License-Identifier: Apache-2.0
"""A process that tells demand as a gateway does: of many ModelServers, whose engines keep up with it."""

from __future__ import annotations

import asyncio
import sys
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from extproc.config.demand import (
    DEMAND_PATH,
    TPOT_BOUNDS_S,
    TTFT_BOUNDS_S,
    Counted,
    Demand,
    EngineDemand,
    ServerDemand,
    bucket_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROMPT_TOKENS: Final = 1000.0
_OUTPUT_TOKENS: Final = 200.0
_TTFT_S: Final = (0.1, 0.15, 0.3, 0.6)
_TPOT_S: Final = (0.01, 0.012, 0.015, 0.02)


def address_of(number: int) -> str:
    """The IP address of the engine with this number."""
    return f"10.{64 + number // 60_000}.{number // 250 % 240}.{number % 250 + 1}"


class Server:
    """What was counted of one ModelServer, whose engines are those of the ``addresses``."""

    def __init__(self, addresses: list[str], rng: Random) -> None:
        self._addresses = addresses
        self._rng = rng
        self._requests = 0
        self._ttft = [0] * (len(TTFT_BOUNDS_S) + 1)
        self._tpot = [0] * (len(TPOT_BOUNDS_S) + 1)

    def after(self, requests_per_s: float) -> ServerDemand:
        """One second later."""
        rng = self._rng
        # binomial, about as noisy as Poisson's
        came = sum(rng.random() < requests_per_s / 100 for _ in range(100))
        self._requests += came
        for _ in range(came):
            self._ttft[bucket_of(rng.choice(_TTFT_S), TTFT_BOUNDS_S)] += 1
            self._tpot[bucket_of(rng.choice(_TPOT_S), TPOT_BOUNDS_S)] += 1
        counted = Counted(
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
        in_flight = self._rng.randrange(4) if is_busy else 0
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


def _pages(servers: Mapping[str, Server], requests_per_s: float) -> web.Application:
    async def page(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        sequence = 0
        while True:
            sequence += 1
            said = {name: one.after(requests_per_s) for name, one in servers.items()}
            await answer.write(msgspec.json.encode(Demand("teller", sequence, float(sequence), said)) + b"\n")
            await asyncio.sleep(1.0)

    app = web.Application()
    app.add_routes([web.get(DEMAND_PATH, page)])
    return app


def main() -> None:
    """``COUNT TARGETS REQUESTS_PER_S PORT``: ModelServers ``default/b0`` and so on, with an engine for each target."""
    count, targets, requests_per_s, port = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    rng = Random(1)
    servers = {
        f"default/b{one}": Server([address_of(one * targets + each) for each in range(targets)], rng)
        for one in range(count)
    }
    web.run_app(_pages(servers, requests_per_s), host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
