# SPDX-License-Identifier: Apache-2.0
"""Who gives way: those that wait are looked at only if one of them may have to go."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from extproc.core.request_record import RequestHead, RequestRecord
from extproc.core.request_states import RequestState
from extproc.core.scale_from_zero import HeldRequestTotals, WaitBounds
from tests.extproc.core.zero import SMALL, Zero, engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.core.request_record import Arrival

FOUR = WaitBounds(requests=4, bytes=1_000_000)


def arrival(tenant: str) -> Arrival:
    core = Zero(small=[engine(1)], more={SMALL: "flowControl: {}"}).core
    head = RequestHead("POST", "/v1/chat/completions", {"x-attache-tenant": tenant}, has_body=True, is_trusted=True)
    return core.builder.build_by_model(head, json.dumps({"model": "chat", "messages": []}).encode())


def held(**counts: int) -> tuple[HeldRequestTotals, list[RequestRecord]]:
    """So many requests of each tenant wait."""
    records = [
        RequestRecord(f"{tenant}-{number}", RequestState.AWAITING_ENGINE, arrival=arrival(tenant))
        for tenant, count in counts.items()
        for number in range(count)
    ]
    holdings = HeldRequestTotals()
    for one in records:
        holdings.add_request(one)
    return holdings, records


@pytest.mark.parametrize("tenant", ["greedy", "modest"])
def test_with_equal_shares_nobody_is_looked_at(tenant: str) -> None:
    holdings, records = held(greedy=2, modest=2)
    looked_at = list[str]()

    def waiting() -> Iterator[RequestRecord]:
        for one in reversed(records):
            looked_at.append(one.ticket)
            yield one

    assert holdings.requests_to_evict(arrival(tenant), FOUR, waiting()) is None
    assert looked_at == []


def test_the_newest_of_the_tenant_with_most_gives_way() -> None:
    holdings, records = held(greedy=3, modest=1)
    going = holdings.requests_to_evict(arrival("modest"), FOUR, reversed(records))
    assert [one.ticket for one in going or ()] == ["greedy-2"]
