# SPDX-License-Identifier: Apache-2.0
"""Access log entries to outcomes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from extproc.core.types import Head
from extproc.metrics.registry import Metrics
from extproc.protocol import NAMESPACE, PROMPT_TOKENS, TICKET, USAGE_NAMESPACE
from extproc.streams.access_log import read_outcome, receive_entries
from extproc.streams.messages import StreamAccessLogsMessage
from tests.extproc.conftest import decide, in_some_state, shell

if TYPE_CHECKING:
    from extproc.core.core import Core

HEAD = Head("POST", "/v1/chat/completions", {}, has_body=True)


def entries(**tokens: float) -> StreamAccessLogsMessage:
    """One entry for each ticket."""
    message = StreamAccessLogsMessage()
    for ticket, count in tokens.items():
        entry = message.http_logs.log_entry.add()
        entry.response.response_code.value = 200
        metadata = entry.common_properties.metadata.filter_metadata
        metadata[NAMESPACE].fields[TICKET].string_value = ticket
        metadata[USAGE_NAMESPACE].fields[PROMPT_TOKENS].number_value = count
    return message


@pytest.mark.parametrize(
    ("count", "read"), [(7, 7), (0, 0), (-1, None), (math.inf, None), (math.nan, None), (1e300, None)]
)
def test_a_number_of_tokens_that_cannot_be_is_not_read(count: float, read: int | None) -> None:
    (entry,) = entries(t=count).http_logs.log_entry
    assert read_outcome(entry).prompt_tokens == read


def test_an_odd_entry_does_not_cost_its_batch_the_others(core: Core) -> None:
    body = b'{"model": "chat", "messages": [{"role": "user", "content": "hi"}]}'
    odd, fine = decide(core, HEAD, body), decide(core, HEAD, body)
    for one in (odd, fine):
        core.finish(one.ticket, 0.0)
    context = shell(core, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0))
    receive_entries(entries(**{odd.ticket: math.inf, fine.ticket: 5.0}), context, 1.0)

    assert in_some_state(core) == 0
