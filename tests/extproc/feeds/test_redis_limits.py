# SPDX-License-Identifier: Apache-2.0
"""A Redis that answers what its scripts do not: local limits decide, as when it is away."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from extproc.admission.rate_limits import Charge, Grant, RequestUsage, StoreUnavailable
from extproc.admission.token_buckets import Limit, Reservation
from extproc.feeds.redis_limits import RedisLimits
from extproc.metrics.request_metrics import Metrics
from tests.lying_redis import LIES, RESP3_LIES, lying_redis
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT = Limit(1.0, 100.0)
CHARGE = Charge("default/chat/0/requests/acme", LIMIT, "requests", 1.0)
GRANT = Grant([CHARGE], [Reservation(1.0, 1.0, 1)], [99.0], is_global=True)
ODD = {
    "nothing": b"$-1\r\n",
    "a number": b":1\r\n",
    "text": b"$2\r\nhi\r\n",
    "no numbers": b"*6\r\n:1\r\n:1\r\n$1\r\n1\r\n$1\r\nx\r\n$1\r\n1\r\n$1\r\n1\r\n",
    "too few": b"*1\r\n:1\r\n",
    "too many": b"*7\r\n" + 7 * b":1\r\n",
    "lists": b"*6\r\n" + 6 * b"*0\r\n",
    "not a number": b"*6\r\n:1\r\n:1\r\n$1\r\n1\r\n$3\r\nnan\r\n$1\r\n1\r\n$1\r\n1\r\n",
    "infinite": b"*6\r\n:1\r\n:1\r\n$1\r\n1\r\n$1\r\n1\r\n$1\r\n1\r\n$3\r\ninf\r\n",
    "an error": b"-ERR no\r\n",
    "no length": b"$x\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@asynccontextmanager
async def answered(answer: bytes) -> AsyncIterator[tuple[RedisLimits, Metrics]]:
    """Limits in a Redis that answers scripts so, and everything else well."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.read(1 << 16):
                writer.write(answer if b"EVALSHA" in request else b"+OK\r\n" * request.count(b"*"))
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clock = asyncio.get_running_loop().time
    metrics = Metrics(list, clock, clock)
    limits = RedisLimits(f"redis://127.0.0.1:{port}?protocol=2", "test", metrics, clock, process="one")
    running = asyncio.create_task(limits.run())
    try:
        yield limits, metrics
        assert not running.done(), running
    finally:
        running.cancel()
        await asyncio.wait([running])
        server.close()


def failed(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("attache_limits_redis_total", {"result": "failed"}) or 0.0


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD.keys())
async def test_an_odd_answer_to_a_reservation_leaves_it_to_local_limits(answer: bytes) -> None:
    async with answered(answer) as (limits, metrics):
        assert isinstance(
            await limits.reserve(
                [CHARGE],
            ),
            StoreUnavailable,
        )
        assert failed(metrics) == 1


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD.keys())
async def test_an_odd_answer_to_a_settlement_ends_nothing(answer: bytes) -> None:
    async with answered(answer) as (limits, metrics):
        limits.settle(GRANT, RequestUsage(1.0, 1.0))
        await eventually(lambda: failed(metrics) == 1)


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD.keys())
async def test_an_odd_answer_to_a_debt_leaves_it_owed(answer: bytes) -> None:
    async with answered(answer) as (limits, metrics):
        limits.record_overdraft(CHARGE, 5.0)
        await eventually(lambda: failed(metrics) == 1)
        assert limits._memory.has_debts


@pytest.mark.parametrize(
    ("protocol", "lie"),
    [*((2, one) for one in LIES.values()), *((3, one) for one in (LIES | RESP3_LIES).values())],
    ids=[*(f"2 {one}" for one in LIES), *(f"3 {one}" for one in LIES | RESP3_LIES)],
)
async def test_an_answer_without_end_is_not_read_and_its_connection_ends(
    protocol: int, lie: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with lying_redis(b"EVALSHA", lie) as redis:
        clock = asyncio.get_running_loop().time
        limits = RedisLimits(
            f"redis://127.0.0.1:{redis.port}?protocol={protocol}",
            "t",
            Metrics(list, clock, clock),
            clock,
            process="one",
        )
        assert isinstance(await limits.reserve([CHARGE]), StoreUnavailable)
        reasons = ("an answer has more than 262144 bytes; see what runs there", "maximum recursion depth")
        assert any(one in caplog.text for one in reasons)
        limits._retry_at_s = 0.0
        limits.settle(GRANT, RequestUsage(1.0, 1.0))
        running = asyncio.create_task(limits.run())
        await eventually(lambda: redis.connections >= 2)
        # with what buffers of the system hold
        assert redis.sent < 24 << 20
        running.cancel()
        await asyncio.wait([running])
