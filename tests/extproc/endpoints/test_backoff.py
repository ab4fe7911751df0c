# SPDX-License-Identifier: Apache-2.0
"""Back-off after failures."""

from __future__ import annotations

from extproc.endpoints.backoff import record_failure, record_success
from extproc.endpoints.table import EndpointTable


def test_an_endpoint_that_keeps_failing_is_avoided_longer_each_time_up_to_a_bound() -> None:
    table, now = EndpointTable(), 100.0
    table.replace(["a"])
    pauses = []
    for _ in range(8):
        record_failure(table, 0, now=now)
        pauses.append(table.retry_at_s[0] - now)
        # a failure of a request that was already on its way does not count
        record_failure(table, 0, now=now + 0.5)
        now = table.retry_at_s[0]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    record_success(table, 0)
    assert table.retry_at_s[0] == 0
