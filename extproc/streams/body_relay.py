# SPDX-License-Identifier: Apache-2.0
"""The pieces in the middle of a streamed answer, from bytes to bytes: most messages of the endpoint picker protocol.

Such a message says nothing but the piece, or repeats the metadata of the one before it. It differs from others of its
size in the piece alone, and so does the answer to it. So what stands around the piece is compared, not parsed, and the
piece is copied. Any other message is left to those who parse it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError

from extproc.streams.messages import HttpBody, ProcessingRequest
from extproc.streams.processing_responses import MARK, MOST_BODY_BYTES, RESPONSE_PIECE, MessageTemplate

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE: Final = MessageTemplate(ProcessingRequest(response_body=HttpBody(body=MARK.encode())))
# A tag and a length of up to three bytes, twice: of the message's part, and of the piece in it.
_LONGEST_HEAD: Final = 8


class ResponseBodyRelay:
    """Answers the messages of one stream from its answer's first piece on. ``take``: gets each piece."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        # what the last message that was parsed had behind its piece
        self._tail = b""

    def __call__(self, message: bytes) -> bytes | None:
        """The serialized answer; None: the message must be parsed, before the next one comes here."""
        tail = self._tail
        end = len(message) - len(tail)
        heads = _heads(end)
        if heads is None or not message.startswith(heads[0]) or not message.endswith(tail):
            self._tail = _tail_of(message)
            return None
        piece = message[len(heads[0]) : end]
        self._take(piece)
        return heads[1] + piece


@lru_cache(maxsize=4096)
def _heads(size: int) -> tuple[bytes, bytes] | None:
    """What stands before the piece in a message of ``size`` bytes, and in the answer to it. None: no piece that passes
    whole has such a message.
    """
    for piece_size in range(max(size - _LONGEST_HEAD, 0), min(size, MOST_BODY_BYTES + 1)):
        head = _PIECE.bytes_before_value(piece_size)
        if len(head) + piece_size == size:
            return head, RESPONSE_PIECE[False].bytes_before_value(piece_size)
    return None


def _tail_of(message: bytes) -> bytes:
    """What stands behind the piece: metadata. Nothing if the message is not a piece in the middle."""
    try:
        size = len(ProcessingRequest.FromString(message).response_body.body)
        head = _PIECE.bytes_before_value(size)
        tail = message[len(head) + size :]
        is_piece = message.startswith(head) and ProcessingRequest.FromString(tail).WhichOneof("request") is None
    except DecodeError:
        return b""
    return tail if is_piece else b""
