# SPDX-License-Identifier: Apache-2.0
"""Which of a stream's messages may come after which, as tables.

Taken from Envoy's ext_proc filter (``ext_proc.cc``, ``processor_state.cc``). A stream has two sides, the request and
its answer, each with headers, a body and trailers. The gateway chooses how a body comes, for each side by itself.

The answer may begin at any time. Before the request: a filter before the gateway's ext_proc has answered (401, 429), so
the stream has no request at all. Before the request is whole: the gateway has answered by itself (408, 413, 504). The
rest of such a request may still come, and is dropped.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from extproc.core.request_states import IllegalEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.streams.messages import ProcessingRequest

# (part, whether it is marked as the end)
Part = tuple[str, bool]
_HEADERS: Final[Part] = ("headers", False)
_ONLY_HEADERS: Final[Part] = ("headers", True)
_BODY: Final[Part] = ("body", False)
_LAST_BODY: Final[Part] = ("body", True)
_TRAILERS: Final[Part] = ("trailers", True)
ANSWER_KINDS: Final = frozenset({"response_headers", "response_body", "response_trailers"})
_SIDES: Final = ("request", "response")
_REQUEST_SIDE, _ANSWER_SIDE = range(len(_SIDES))
_PARTS: Final = {
    f"{name}_{part}": (side, part) for side, name in enumerate(_SIDES) for part in ("headers", "body", "trailers")
}


class BodyMode(enum.IntEnum):
    """How a body comes: ``ProcessingMode.BodySendMode``."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4

    @classmethod
    def _missing_(cls, value: object) -> BodyMode:  # noqa: ARG003 - as Enum wants it
        """Of a later Envoy: its answers pass, and its requests are refused."""
        return cls.STREAMED


class MessageStage(enum.IntEnum):
    """The messages of one side of a stream so far."""

    NOTHING = 0
    HEADERS = 1
    PIECES = 2
    # a body in one message that is not marked as the end
    BODY = 3
    END = 4


Table = dict[MessageStage, dict[Part, MessageStage]]


_IN_PIECES: Final[Table] = {
    MessageStage.NOTHING: {_HEADERS: MessageStage.HEADERS, _ONLY_HEADERS: MessageStage.END},
    MessageStage.HEADERS: {_BODY: MessageStage.PIECES, _LAST_BODY: MessageStage.END, _TRAILERS: MessageStage.END},
    MessageStage.PIECES: {_BODY: MessageStage.PIECES, _LAST_BODY: MessageStage.END, _TRAILERS: MessageStage.END},
    MessageStage.BODY: {},
    MessageStage.END: {},
}
_WHOLE: Final[Table] = {
    MessageStage.NOTHING: {_HEADERS: MessageStage.HEADERS, _ONLY_HEADERS: MessageStage.END},
    MessageStage.HEADERS: {_BODY: MessageStage.BODY, _LAST_BODY: MessageStage.END, _TRAILERS: MessageStage.END},
    MessageStage.PIECES: {},
    MessageStage.BODY: {_TRAILERS: MessageStage.END},
    MessageStage.END: {},
}
_NO_BODY: Final[Table] = {
    MessageStage.NOTHING: {_HEADERS: MessageStage.HEADERS, _ONLY_HEADERS: MessageStage.END},
    MessageStage.HEADERS: {_TRAILERS: MessageStage.END},
    MessageStage.PIECES: {},
    MessageStage.BODY: {},
    MessageStage.END: {},
}


def _answered(table: Table) -> Table:
    """The same of an answer. Its headers need not be sent here. Those of an interim answer (103) come before others."""
    headers, behind = table[MessageStage.NOTHING], table[MessageStage.HEADERS]
    return {**table, MessageStage.NOTHING: {**headers, **behind}, MessageStage.HEADERS: {**headers, **behind}}


REQUEST: Final[Mapping[BodyMode, Table]] = MappingProxyType(
    {
        BodyMode.NONE: _NO_BODY,
        BodyMode.STREAMED: _IN_PIECES,
        BodyMode.BUFFERED: _WHOLE,
        # of a body beyond the buffer's limit, the beginning alone
        BodyMode.BUFFERED_PARTIAL: _WHOLE,
        BodyMode.FULL_DUPLEX_STREAMED: _IN_PIECES,
    }
)
ANSWER: Final[Mapping[BodyMode, Table]] = MappingProxyType({mode: _answered(table) for mode, table in REQUEST.items()})

# The same by position, of both sides: the request path reads it at every message.
_ROWS: Final = tuple(
    tuple(tuple(tables[mode][stage] for stage in MessageStage) for mode in BodyMode) for tables in (REQUEST, ANSWER)
)


class IllegalMessage(IllegalEvent):
    """A message that no gateway may send now, or a way of sending bodies with which requests cannot be decided."""


class MessageOrder:
    """Where one stream is. ``request`` and ``answer``: how the bodies of each side come."""

    def __init__(self, request: BodyMode, answer: BodyMode, advice: str) -> None:
        """``advice``: how to set up the gateway, for the reader of an illegal message's report."""
        self._rows = _ROWS[_REQUEST_SIDE][request], _ROWS[_ANSWER_SIDE][answer]
        self._stages = [MessageStage.NOTHING, MessageStage.NOTHING]
        self._advice = advice

    @property
    def has_answer(self) -> bool:
        """Whether an answer has begun."""
        return self._stages[_ANSWER_SIDE] is not MessageStage.NOTHING

    def advance(self, kind: str, message: ProcessingRequest) -> None:
        """Go on by one message; raises IllegalMessage, with nothing changed."""
        side, part = _PARTS.get(kind, (0, kind))
        is_end = part == "trailers" or (kind in _PARTS and getattr(message, kind).end_of_stream)
        stage = self._stages[side]
        after = self._rows[side][stage].get((part, is_end))
        # an answer that began without a request never gets one
        if after is None or (side == _REQUEST_SIDE and stage is MessageStage.NOTHING and self.has_answer):
            state = " and ".join(f"{name} {at.name}" for name, at in zip(_SIDES, self._stages, strict=True))
            raise IllegalMessage(kind, state, "the stream", self._advice)
        self._stages[side] = after
