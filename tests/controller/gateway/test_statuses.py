# SPDX-License-Identifier: Apache-2.0
"""Who follows the directory is asked, and asking ends when it is told to."""

from __future__ import annotations

import asyncio

from bench.stack.processes import free_ports
from controller.gateway.statuses import ConsumerReportPoller


async def test_who_does_not_answer_has_no_report() -> None:
    told: list[int] = []
    address = f"127.0.0.1:{free_ports(1)[0]}"
    asking = ConsumerReportPoller({"extproc": address}, lambda: told.append(1))
    task = asyncio.create_task(asking.run())
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.wait([task], timeout=120)
    assert task.cancelled()
    assert [(one.name, one.report) for one in asking.consumers] == [("extproc", None)]
    assert told == [], "nothing has changed"


async def test_a_cancellation_that_comes_with_a_change_is_not_lost() -> None:
    asking = ConsumerReportPoller({"extproc": f"127.0.0.1:{free_ports(1)[0]}"}, lambda: None)
    asking.is_settled = True
    task = asyncio.create_task(asking.run())
    await asyncio.sleep(0.5)  # it waits for a change by now
    asking.poll_soon()
    task.cancel()
    await asyncio.wait([task], timeout=120)
    assert task.cancelled()
