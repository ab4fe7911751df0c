# SPDX-License-Identifier: Apache-2.0
"""Blocks without a dynamic table are read as hpack reads them, whatever is in them."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from extproc.rpc.header_blocks import BadHeaderBlock, HeaderBlockDecoder, Headers

NO_TABLE = b"\x20"
MOST = 4096
_texts = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=300)
_names = st.sampled_from([":path", ":method", "te", "traceparent", "content-type", "x"]) | _texts.map(
    lambda text: f"x{text.lower()}"
)


def without_table() -> HeaderBlockDecoder:
    blocks = HeaderBlockDecoder(MOST)
    assert blocks.decode(NO_TABLE) == []
    return blocks


def read_whole(block: bytes) -> Headers | None:
    """By hpack alone; None if it refuses."""
    decoder = Decoder(max_header_list_size=MOST)
    try:
        decoder.decode(NO_TABLE, raw=True)
        return [(bytes(n).decode("latin-1"), bytes(v).decode("latin-1")) for n, v in decoder.decode(block, raw=True)]
    except (HPACKError, IndexError, ValueError):
        return None


@given(st.lists(st.lists(st.tuples(_names, _texts, st.booleans()), max_size=9), max_size=5), st.booleans())
def test_each_block_has_the_headers_that_were_encoded(given: list[list[tuple[str, str, bool]]], huffman: bool) -> None:
    encoder, blocks = Encoder(), without_table()
    encoder.header_table_size = 0
    for headers in given:
        block = encoder.encode(headers, huffman=huffman)
        expected = [(name, value) for name, value, _ in headers]
        if sum(32 + len(name) + len(value) for name, value in expected) <= MOST:
            assert blocks.decode(block) == expected
            # from memory
            assert blocks.decode(block) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_read_as_hpack_reads_them(block: bytes) -> None:
    blocks = without_table()
    try:
        headers: Headers | None = blocks.decode(block)
    except BadHeaderBlock:
        headers = None
    expected = read_whole(block)
    assert expected is None or headers == expected


@given(st.lists(st.tuples(_texts, st.booleans()), max_size=4), st.binary(max_size=40))
def test_a_value_that_differs_from_block_to_block_is_read_as_hpack_reads_it(
    values: list[tuple[str, bool]], odd: bytes
) -> None:
    before = b"\x00\x02te\x08trailers\x00\x0btraceparent"
    after = b"\x00\x01x\x01y"
    blocks = without_table()
    encoded = [_text(f"00-{number}", is_huffman=False) for number in range(2)]
    encoded += [_text(value, is_huffman=is_huffman) for value, is_huffman in values]
    for text in [*encoded, odd, *encoded]:
        block = before + text + after
        expected = read_whole(block)
        try:
            headers: Headers | None = blocks.decode(block)
        except BadHeaderBlock:
            headers = None
        assert headers == expected
        if headers is None:
            # nothing of a connection is read after that
            blocks = without_table()


def _text(text: str, *, is_huffman: bool) -> bytes:
    """As a value stands in a block."""
    encoder = Encoder()
    field = encoder.encode([("q", text, True)], huffman=is_huffman)
    return field[1 + len(_end_of_name(field)) :]


def _end_of_name(field: bytes) -> bytes:
    return field[1 : 2 + (field[1] & 0x7F)]


def test_fields_that_are_kept_are_bounded() -> None:
    blocks, encoder = without_table(), Encoder()
    encoder.header_table_size = 0
    encoder.encode([])
    for number in range(600):
        headers = [(":path", "/envoy"), ("x-number", str(number)), ("te", "trailers")]
        assert blocks.decode(encoder.encode(headers)) == headers
    assert len(blocks._fields) <= 256


@pytest.mark.parametrize(
    "block",
    [
        b"\xff" * 60_000,
        b"\x7f" + b"\xff" * 60_000,
        b"\x00\x7f" + b"\xff" * 60_000,
        b"\x00\x01a\x7f\xff\xff\xff\xff\x01",
    ],
)
def test_numbers_without_end_are_refused(block: bytes) -> None:
    with pytest.raises(BadHeaderBlock):
        without_table().decode(block)


def test_a_few_bytes_do_not_grow_into_many() -> None:
    large = b"\x00\x01a\x7f\x81\x06" + b"b" * 896
    with pytest.raises(BadHeaderBlock):
        without_table().decode(large * 5)
    blocks = without_table()
    assert len(blocks.decode(large)) == 1
    with pytest.raises(BadHeaderBlock):
        blocks.decode(large * 5)
