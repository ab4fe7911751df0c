# SPDX-License-Identifier: Apache-2.0
"""Pictures in bodies of the Messages API, as the simulated engine counts them."""

from __future__ import annotations

import tracemalloc

from bench.engine.api_formats import ContentBlock, MessageParam, MessagesRequest, messages_job


def test_a_picture_of_megabytes_takes_no_more_memory_than_a_small_one() -> None:
    large = MessageParam(role="user", content=[ContentBlock(type="image", source={"data": "A" * 2**20})])
    body = MessagesRequest(model="m", max_tokens=1, messages=[large])
    tracemalloc.start()
    try:
        assert messages_job(body)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 * 2**20
