# SPDX-License-Identifier: Apache-2.0
"""KV events as vLLM and SGLang have written them over the years."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.prefix.kv_events import (
    Cleared,
    Removed,
    Stored,
    UnreadableEvents,
    decode_batch,
)
from extproc.prefix.kv_index import KvIndex, Source
from extproc.prefix.kv_stream import KvStream

if TYPE_CHECKING:
    from collections.abc import Iterator

MAPS = {
    "ts": 1.5,
    "events": [
        {
            "type": "BlockStored",
            "block_hashes": [11, 12],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": "sql",
            "extra_keys": [["sql"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "something_new": 7,
        },
        {"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ],
    "data_parallel_rank": 1,
}
ARRAYS = [
    1.5,
    [
        [
            "BlockStored",
            [11, 12],
            None,
            [1, 2, 3, 4],
            2,
            None,
            "GPU",
            "sql",
            [["sql"], None],
            0,
            "full_attention",
            None,
            7,
        ],
        ["BlockRemoved", [11], "CPU"],
        ["AllBlocksCleared"],
    ],
    1,
]
EVENTS = (
    Stored((11, 12), None, (1, 2, 3, 4), 2, "GPU", "sql", (["sql"], None)),
    Removed((11,), "CPU"),
    Cleared(),
)


@pytest.mark.parametrize("batch", [MAPS, ARRAYS, {**MAPS, "events": ARRAYS[1]}, [1.5, MAPS["events"], 1]])
def test_maps_and_arrays_are_read_alike(batch: object) -> None:
    read = tuple(decode_batch(msgspec.msgpack.encode(batch)))
    assert read == EVENTS


def test_trailing_fields_may_be_missing() -> None:
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", [b"\x01" * 32], b"\x02" * 32, [1, 2], 2]]])
    assert list(decode_batch(payload)) == [Stored((b"\x01" * 32,), b"\x02" * 32, (1, 2), 2)]


def test_blocks_of_sliding_windows_hold_no_prefix() -> None:
    event = {**MAPS["events"][0], "kv_cache_spec_kind": "sliding_window"}  # type: ignore[index]
    assert list(decode_batch(msgspec.msgpack.encode([0.0, [event]]))) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("events"),
        msgspec.msgpack.encode([0.0, [["BlockStored", [1]]]]),
        msgspec.msgpack.encode([0.0, [["BlockStored", 7, None, [1], 1]]]),
        msgspec.msgpack.encode([0.0, 7]),
        msgspec.msgpack.encode([0.0, [7]]),
        msgspec.msgpack.encode([0.0, [[]]]),
    ],
)
def test_an_invalid_batch_is_refused_with_one_error(payload: bytes) -> None:
    with pytest.raises(UnreadableEvents):
        list(decode_batch(payload))


def message(value: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [["BlockStored", [value], None, [value], 1]], 0])


def receive(stream: KvStream, number: int) -> int | None:
    """Apply a message that can be applied, or say from where to ask for a replay."""
    start = stream.gap_before(number)
    if start is None:
        finish(stream.apply(number, message(number)))
    return start


def finish(slices: Iterator[None]) -> int:
    """Apply all slices; how many they were."""
    return sum(1 for _ in slices)


def test_sequence_numbers_tell_gaps_and_restarts() -> None:
    stream = KvStream(KvIndex(), Source(0))
    assert [receive(stream, number) for number in (0, 1, 2)] == [None, None, None]
    assert receive(stream, 5) == 3, "ask for what is missing"
    finish(stream.replayed(3, [(number, message(number)) for number in (3, 4, 5)]))
    assert (receive(stream, 6), stream.is_whole) == (None, True)
    assert stream.is_old(6)
    # backwards: a restart
    assert (receive(stream, 0), stream.is_whole) == (None, True)
    assert receive(stream, 1) is None


def test_a_stream_joined_late_is_replayed_from_its_start() -> None:
    stream = KvStream(KvIndex(), Source(0))
    assert receive(stream, 17) == 0
    finish(stream.missed(17, message(17)))
    assert stream.is_whole is False
    finish(stream.replayed(0, [(16, message(16)), (17, message(17))]))
    assert stream.is_whole is False, "the replay's memory is too short"
    finish(stream.replayed(0, []))
    assert stream.is_whole is True, "an engine that has said nothing"


def test_media_are_the_same_in_any_case() -> None:
    stored = {**MAPS["events"][0], "medium": "cpu"}  # type: ignore[index]
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "Gpu"}
    batch = decode_batch(msgspec.msgpack.encode({"ts": 1.0, "events": [stored, removed]}))
    assert [one.medium for one in batch if isinstance(one, (Stored, Removed))] == ["CPU", "GPU"]
    index = KvIndex()
    index.apply(Source(0), [Stored((1,), None, (1, 2), 2, "CPU")])
    index.apply(Source(0), decode_batch(msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "cpu"]], 0])))
    assert index.blocks_held(0) == 0
