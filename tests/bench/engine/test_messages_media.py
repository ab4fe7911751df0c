# SPDX-License-Identifier: Apache-2.0
"""Pictures in bodies of the Messages API, as the simulated engine counts them."""

from __future__ import annotations

import tracemalloc

from bench.engine.messages import Block, _text_of


def test_a_picture_of_megabytes_takes_no_more_memory_than_a_small_one() -> None:
    large = Block(type="image", source={"data": "A" * 2**20})
    tracemalloc.start()
    try:
        text = _text_of(large)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(text) == 1024
    assert peak_bytes < 32 * 2**20
