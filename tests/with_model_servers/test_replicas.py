# SPDX-License-Identifier: Apache-2.0
"""Replicas of a real MLServer come, go and are killed under load, and no request fails."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any, Final, Self

import httpx
import pytest

from tests.waiting import eventually
from tests.with_model_servers.conftest import configure, gateway_to, route, server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.stack.loopback_stack import Stack
    from tests.with_model_servers.conftest import ModelServers

pytestmark = pytest.mark.asyncio(loop_scope="module")

_ASKS: Final = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP64", "data": [5.1, 3.5, 1.4, 0.2]}]}


def _is_setosa(answer: Any) -> bool:  # noqa: ANN401 - JSON
    return bool(answer["outputs"][0]["data"] == [0])


class Load:
    """Four clients that ask again and again. ``failed``: what was not a good answer. ``path``, ``asks``: the request.
    ``is_good``: of an answer.
    """

    def __init__(
        self,
        url: str,
        path: str = "/v2/models/iris/infer",
        asks: object = _ASKS,
        is_good: Callable[[Any], bool] = _is_setosa,
    ) -> None:
        self._url = url
        self._path = path
        self._asks = asks
        self._is_good = is_good
        self._is_over = False
        self.good = 0
        self.failed = list[str]()

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self._url, timeout=60)
        self._tasks = [asyncio.create_task(self._ask_again()) for _ in range(4)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        await self._http.aclose()

    async def more(self, count: int) -> None:
        """Until so many more have been answered."""
        target = self.good + len(self.failed) + count
        await eventually(lambda: self.good + len(self.failed) >= target)

    async def _ask_again(self) -> None:
        while not self._is_over:
            try:
                answer = await self._http.post(self._path, json=self._asks)
            except httpx.TransportError as error:
                self.failed.append(repr(error))
                continue
            if answer.status_code == 200 and self._is_good(answer.json()):
                self.good += 1
            else:
                self.failed.append(f"{answer.status_code} {answer.text}")


def serve(stack: Stack, *endpoints: str, draining: str = "") -> None:
    configure(stack, server("iris", "V2", "tree", *endpoints, draining=draining), route("iris", iris=1))


async def envoy_counts(stack: Stack, name: str) -> dict[str, int]:
    """Envoy's statistic of each endpoint, by address."""
    async with httpx.AsyncClient(timeout=60) as http:
        lines = (await http.get(f"{stack.admin}/clusters")).text.splitlines()
    parts = [line.split("::") for line in lines if f"::{name}::" in line]
    return {part[1]: int(part[3]) for part in parts}


async def until_served(stack: Stack, *endpoints: str) -> None:
    """Until requests have reached each of them."""

    async def have_served() -> bool:
        counts = await envoy_counts(stack, "rq_total")
        return all(counts.get(one, 0) > 0 for one in endpoints)

    await eventually(have_served)


async def until_idle(stack: Stack, load: Load, endpoint: str) -> None:
    """Until an endpoint gets no more of the load, and nothing runs there."""

    async def is_idle() -> bool:
        before = (await envoy_counts(stack, "rq_total"))[endpoint]
        await load.more(40)
        after, active = await envoy_counts(stack, "rq_total"), await envoy_counts(stack, "rq_active")
        return after[endpoint] == before and active[endpoint] == 0

    await eventually(is_idle)


async def test_two_replicas_become_four_then_one_and_no_request_fails(servers: ModelServers, tmp_path: Path) -> None:
    replicas = [await servers.start_mlserver(f"replica-{number}", "tree") for number in range(2)]
    async with gateway_to(tmp_path / "stack") as stack:
        serve(stack, *replicas)
        await until_answered(stack)
        async with Load(stack.url) as load:
            await until_served(stack, *replicas)
            for number in (2, 3):
                # MLServer answers 400 while it loads its model: it is listed once it is ready
                replicas.append(await servers.start_mlserver(f"replica-{number}", "tree"))
                serve(stack, *replicas)
            await until_served(stack, *replicas)
            for number in (3, 2, 1):
                serve(stack, *replicas, draining=replicas[-1])
                await until_idle(stack, load, replicas[-1])
                await servers.processes.end(f"replica-{number}")
                replicas.pop()
                serve(stack, *replicas)
                await load.more(40)
        assert load.failed == []
        assert load.good > 200


async def test_requests_of_a_replica_that_is_killed_are_served_by_another(
    servers: ModelServers, tmp_path: Path
) -> None:
    replicas = [await servers.start_mlserver(f"mortal-{number}", "tree") for number in range(2)]
    async with gateway_to(tmp_path / "stack") as stack:
        serve(stack, *replicas)
        await until_answered(stack)
        async with Load(stack.url) as load:
            await until_served(stack, *replicas)
            await load.more(40)
            await servers.processes.end("mortal-0", signal.SIGKILL)
            await load.more(200)
        assert load.failed == []
        # it was met
        assert sum((await envoy_counts(stack, "rq_error")).values()) > 0


async def until_answered(stack: Stack) -> None:
    """Until the gateway serves the model."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as http:

        async def is_served() -> bool:
            return (await http.get("/v2/models/iris/ready")).status_code == 200

        await eventually(is_served)
