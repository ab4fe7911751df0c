# SPDX-License-Identifier: Apache-2.0
"""KV events as vLLM and SGLang have written them over the years."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.prefix.kv_event_decoder import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    IgnoredEvent,
    UnreadableEvents,
    decode_batch,
)
from extproc.prefix.kv_index import EventSource, KvIndex, KvStream
from tests.examples import examples

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
    BlocksStored((11, 12), None, (1, 2, 3, 4), 2, "GPU", "sql", (["sql"], None)),
    BlocksRemoved((11,), "CPU"),
    AllBlocksCleared(),
)


@pytest.mark.parametrize("batch", [MAPS, ARRAYS, {**MAPS, "events": ARRAYS[1]}, [1.5, MAPS["events"], 1]])
def test_maps_and_arrays_are_read_alike(batch: object) -> None:
    read = tuple(decode_batch(msgspec.msgpack.encode(batch)))
    assert read == EVENTS


def test_trailing_fields_may_be_missing() -> None:
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", [b"\x01" * 32], b"\x02" * 32, [1, 2], 2]]])
    assert list(decode_batch(payload)) == [BlocksStored((b"\x01" * 32,), b"\x02" * 32, (1, 2), 2)]


def test_blocks_of_sliding_windows_hold_no_prefix() -> None:
    event = {**MAPS["events"][0], "kv_cache_spec_kind": "sliding_window"}  # type: ignore[index]
    assert list(decode_batch(msgspec.msgpack.encode([0.0, [event]]))) == [IgnoredEvent()]


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [], None, [], 1],
        ["BlockStored", [1], None, [1], 16],
        ["BlockStored", [1], None, [1], 1, None, None, None, None, None, "mamba"],
        ["BlockRemoved", []],
        ["Unknown"],
    ],
)
def test_events_that_change_nothing_are_read_in_slices_too(event: list[object]) -> None:
    payload = msgspec.msgpack.encode([0.0, [event] * 20_000])
    assert finish(KvStream(KvIndex(), EventSource(0)).apply(0, payload)) >= 20


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
    stream = KvStream(KvIndex(), EventSource(0))
    assert [receive(stream, number) for number in (0, 1, 2)] == [None, None, None]
    assert receive(stream, 5) == 3, "ask for what is missing"
    finish(stream.apply_replay(3, [(number, message(number)) for number in (3, 4, 5)]))
    assert (receive(stream, 6), stream.is_whole) == (None, True)
    assert stream.was_applied(6)
    # backwards: a restart
    assert (receive(stream, 0), stream.is_whole) == (None, True)
    assert receive(stream, 1) is None


def test_a_stream_joined_late_is_replayed_from_its_start() -> None:
    stream = KvStream(KvIndex(), EventSource(0))
    assert receive(stream, 17) == 0
    finish(stream.restart_from(17, message(17)))
    assert stream.is_whole is False
    finish(stream.apply_replay(0, [(16, message(16)), (17, message(17))]))
    assert stream.is_whole is False, "the replay's memory is too short"
    finish(stream.apply_replay(0, []))
    assert stream.is_whole is True, "an engine that has said nothing"


def test_media_are_the_same_in_any_case() -> None:
    stored = {**MAPS["events"][0], "medium": "cpu"}  # type: ignore[index]
    removed = {"type": "BlockRemoved", "block_hashes": [11], "medium": "Gpu"}
    batch = decode_batch(msgspec.msgpack.encode({"ts": 1.0, "events": [stored, removed]}))
    assert [one.medium for one in batch if isinstance(one, (BlocksStored, BlocksRemoved))] == ["CPU", "GPU"]
    index = KvIndex()
    index.apply(EventSource(0), [BlocksStored((1,), None, (1, 2), 2, "CPU")])
    index.apply(EventSource(0), decode_batch(msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "cpu"]], 0])))
    assert index.blocks_held(0) == 0


# what msgpack can hold, with the words that events have
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=80)
    | st.text(max_size=8)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "full_attention"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = sorted(MAPS["events"][0])  # type: ignore[index]
MAPPED = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12)
LISTED = st.tuples(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]), st.lists(VALUES, max_size=12))
EVENT = VALUES | MAPPED | LISTED.map(lambda one: [one[0], *one[1]])


def changed(event: list[object], at: int, value: object) -> list[object]:
    """A good event with one odd field."""
    return [*event[:at], value, *event[at + 1 :]]


ODD = st.builds(changed, st.sampled_from(ARRAYS[1]), st.integers(0, 11), VALUES)  # type: ignore[arg-type]


def applied(payload: bytes) -> None:
    """Decode ``payload``, and apply what could be read: nothing but UnreadableEvents may come of it."""
    index = KvIndex()
    try:
        for event in decode_batch(payload):
            index.apply(EventSource(0), [event])
    except UnreadableEvents:
        event = None
    index.match(index.block_keys(list(range(100)), adapter=None, salt=None), 0.0)


@settings(max_examples=examples(500))
@given(st.lists(EVENT | ODD, max_size=4), VALUES, VALUES)
def test_whatever_msgpack_holds_is_read_or_unreadable(events: list[object], ts: object, rank: object) -> None:
    applied(msgspec.msgpack.encode([ts, events, rank]))
    applied(msgspec.msgpack.encode({"ts": ts, "events": events, "data_parallel_rank": rank}))


@settings(max_examples=examples(500))
@given(st.binary(max_size=200))
def test_whatever_bytes_come_are_read_or_unreadable(payload: bytes) -> None:
    applied(payload)


@pytest.mark.parametrize(
    "before", [b"", b"\x93\x00", b"\x93\x00\x91", b"\x93\x00\x91\x99\xabBlockStored\x90\xc0\x90\x10\xc0\xc0\xc0"]
)
@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0"])
def test_two_hundred_thousand_levels_are_unreadable(before: bytes, level: bytes) -> None:
    with pytest.raises(UnreadableEvents):
        list(decode_batch(before + level * 200_000 + b"\xc0" * 3))


def test_an_event_with_many_blocks_comes_in_pieces_that_say_the_same() -> None:
    hashes, tokens = list(range(2_000)), list(range(8_000))
    salts = [["salt"] if one % 7 == 0 else None for one in hashes]
    whole = BlocksStored(tuple(hashes), None, tuple(tokens), 4, extra_keys=tuple(salts))
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", hashes, None, tokens, 4, None, "GPU", None, salts]]])
    pieces = list(decode_batch(payload))
    assert max(len(one.hashes) for one in pieces if isinstance(one, BlocksStored)) <= 512
    one, other = KvIndex(), KvIndex()
    one.apply(EventSource(0), [whole])
    other.apply(EventSource(0), pieces)
    assert one._on_gpu.masks == other._on_gpu.masks
    assert other.blocks_held(0) == 2_000
    removed = decode_batch(msgspec.msgpack.encode([0.0, [["BlockRemoved", hashes, None]]]))
    other.apply(EventSource(0), removed)
    assert other.blocks_held(0) == 0


def test_blocks_without_all_their_tokens_are_left_out() -> None:
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", list(range(1_000)), None, [7] * 6, 4]]])
    assert list(decode_batch(payload)) == [BlocksStored((0,), None, (7, 7, 7, 7), 4)]


def test_a_large_message_is_applied_in_slices() -> None:
    hashes = list(range(100_000))
    payload = msgspec.msgpack.encode([0.0, [["BlockStored", hashes, None, hashes, 1]]])
    stream = KvStream(index := KvIndex(), EventSource(0))
    assert finish(stream.apply(0, payload)) >= 90
    assert index.blocks_held(0) == 100_000
    cleared = msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]] * 50_000])
    assert finish(stream.apply(1, cleared)) >= 45


def test_more_events_than_a_step_has_are_unreadable() -> None:
    with pytest.raises(UnreadableEvents):
        list(decode_batch(msgspec.msgpack.encode([0.0, [["AllBlocksCleared"]] * 70_000])))


def test_a_stream_that_is_not_followed_further_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.prefix.kv_event_decoder.MOST_BLOCKS", 2)
    stream = KvStream(KvIndex(), EventSource(0))
    for number in range(3):
        assert receive(stream, number) is None
    assert stream.is_whole is False
