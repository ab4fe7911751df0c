# SPDX-License-Identifier: Apache-2.0
"""Every order in which Envoy's ext_proc filter can send messages, and all short ones in which it cannot.

``orders`` plays the filter: what it sends of a request and of an answer by its processing mode, with the answer
beginning anywhere. ``LEGAL`` says the same again as regular expressions, for sequences that nobody sends.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from extproc.metrics.request_metrics import Metrics
from extproc.streams.duplex import DuplexExchange
from extproc.streams.exchange import Exchange
from extproc.streams.message_order import ANSWER, REQUEST, BodyMode, IllegalMessage, MessageStage
from extproc.streams.messages import ProcessingRequest, ProcessingResponse
from extproc.streams.processing_responses import MOST_BODY_BYTES
from tests.extproc.conftest import in_some_state, shell

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.core.core import Core

CHAT: Final = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "hello"}]}).encode()
NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = BodyMode
IN_PIECES: Final = (STREAMED, DUPLEX)


class Message(msgspec.Struct, frozen=True):
    """A request or an answer as the filter gets it. ``chunks``: of its body; none: it has no body."""

    chunks: tuple[bytes, ...]
    has_trailers: bool

    def sent(
        self, side: str, mode: BodyMode, *, headers: bool = True, trailers: bool = True
    ) -> list[ProcessingRequest]:
        """What the filter sends of it. ``headers`` and ``trailers``: whether their mode is SEND."""
        messages = []
        if headers:
            messages.append(part(side, "headers", ends=not self.chunks and not self.has_trailers))
        if mode in IN_PIECES:
            last = len(self.chunks) - 1
            ends = [at == last and not self.has_trailers for at in range(len(self.chunks))]
            messages += [part(side, "body", chunk, ends=end) for chunk, end in zip(self.chunks, ends, strict=True)]
        elif mode is not NONE and self.chunks:
            messages.append(part(side, "body", b"".join(self.chunks), ends=not self.has_trailers))
        if self.has_trailers and trailers:
            messages.append(part(side, "trailers"))
        return messages


def part(side: str, name: str, body: bytes = b"", *, ends: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    inner = getattr(message, f"{side}_{name}")
    inner.SetInParent()
    if name == "headers":
        of = {":method": "POST", ":path": "/v1/chat/completions"} if side == "request" else {":status": "401"}
        for key, value in of.items():
            inner.headers.headers.add(key=key, raw_value=value.encode())
    if name == "body":
        inner.body = body
    if name != "trailers":
        inner.end_of_stream = ends
    return message


REQUESTS: Final = [
    Message(chunks, has_trailers)
    for chunks in ((), (CHAT,), (CHAT[:9], CHAT[9:]), (CHAT[:9], CHAT[9:], b""))
    for has_trailers in (False, True)
]
ANSWERS: Final = [
    Message(chunks, has_trailers)
    for chunks in ((), (b"",), (b"denied",), (b"a" * MOST_BODY_BYTES + b"b", b"c"), (b"a", b"b", b""))
    for has_trailers in (False, True)
]


def orders(request: BodyMode, answer: BodyMode) -> Iterator[tuple[list[ProcessingRequest], Message, bool]]:
    """Every stream's messages; what is asked; and whether the answer began before the whole request had come.

    What is left of a request whose answer has begun does not come, or comes among the answer's messages. Different
    requests and answers can make the same messages, for example where bodies are buffered: each stream comes once.
    """
    seen = set()
    for asked, told in itertools.product(REQUESTS, ANSWERS):
        there = asked.sent("request", request)
        for headers, trailers in itertools.product((True, False), repeat=2):
            back = told.sent("response", answer, headers=headers, trailers=trailers)
            for begun in range(len(there) + 1):
                is_early = begun < len(there)
                streams = [there[:begun] + back]
                if is_early and begun and back:
                    streams.append(there[:begun] + back[:1] + there[begun:] + back[1:])
                for messages in streams:
                    key = tuple(one.SerializeToString() for one in messages), is_early
                    if key not in seen:
                        seen.add(key)
                        yield messages, asked, is_early


class Gateway:
    """Checks each answer to the messages that it sends on one stream."""

    def __init__(self, core: Core, metrics: Metrics, request: BodyMode, answer: BodyMode, *, pool: str | None) -> None:
        self.exchange = Exchange(shell(core, metrics, pool=pool), DuplexExchange, is_trusted=lambda: False)
        self._modes = request, answer
        self._is_first = True

    def send(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self._is_first:
            config = message.protocol_config
            config.request_body_mode, config.response_body_mode = self._modes
            self._is_first = False
        return [ProcessingResponse.FromString(answer) for answer in self.exchange.receive(message)]

    def pass_on(self, message: ProcessingRequest) -> None:
        """A part of the answer: it comes back in its place, in the form that its mode asks for, and unchanged."""
        kind = message.WhichOneof("request")
        answers = self.send(message)
        assert [one.WhichOneof("response") for one in answers] == [kind] * len(answers)
        if kind != "response_body" or self._modes[1] is not DUPLEX:
            assert answers == [ProcessingResponse.FromString(answers[0].SerializeToString())]
            assert not answers[0].response_body.response.HasField("body_mutation")
            return
        pieces = [one.response_body.response.body_mutation.streamed_response for one in answers]
        assert b"".join(piece.body for piece in pieces) == message.response_body.body
        assert [piece.end_of_stream for piece in pieces] == [
            *[False] * (len(pieces) - 1),
            message.response_body.end_of_stream,
        ]


def is_answer(message: ProcessingRequest) -> bool:
    return (message.WhichOneof("request") or "").startswith("response")


POOLS: Final = (None, "default/llama")


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("answer", BodyMode)
@pytest.mark.parametrize("request_mode", [BUFFERED, PARTIAL, DUPLEX])
def test_every_legal_order_is_answered(core: Core, request_mode: BodyMode, answer: BodyMode, pool: str | None) -> None:
    table, metrics = core.pools["default/llama"].table, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)
    for messages, asked, is_early in orders(request_mode, answer):
        gateway = Gateway(core, metrics, request_mode, answer, pool=pool)
        asking: list[ProcessingResponse] = []
        has_begun = is_decided = False
        for message in messages:
            if is_answer(message):
                is_decided = is_decided or (not has_begun and table.in_flight.sum() == 1)
                has_begun = True
                gateway.pass_on(message)
            elif has_begun and not is_decided:
                assert gateway.send(message) == [], "what is left of a request that somebody has answered"
            else:
                asking += gateway.send(message)
        if not is_early:
            is_refused = not decides(asked, request_mode, pool)
            check_asked(asking, asked, in_pieces=request_mode is DUPLEX, is_refused=is_refused)
        gateway.exchange.on_stream_closed()
        assert table.in_flight.sum() == 0
    assert metrics.registry.get_sample_value("attache_requests_total", {"outcome": "internal_error"}) is None


def decides(asked: Message, mode: BodyMode, pool: str | None) -> bool:
    """Whether an engine is chosen: a request needs a body, but where any request is the pool's and can be answered."""
    return bool(asked.chunks) or (pool is not None and (mode is DUPLEX or not asked.has_trailers))


def check_asked(answers: Sequence[ProcessingResponse], asked: Message, *, in_pieces: bool, is_refused: bool) -> None:
    """Each part of a request has its answer, one of them with the engine."""
    kinds = [one.WhichOneof("response") for one in answers]
    if is_refused:
        assert kinds[-1] == "immediate_response"
        assert kinds[:-1] in ([], ["request_headers"])
        return
    trailers = ["request_trailers"] if asked.has_trailers else []
    assert kinds == ["request_headers", *(["request_body"] if asked.chunks else []), *trailers]
    assert any(one.HasField("dynamic_metadata") for one in answers)
    if in_pieces and asked.chunks:
        piece = answers[1].request_body.response.body_mutation.streamed_response
        assert json.loads(piece.body)["messages"] == json.loads(CHAT)["messages"]
        assert piece.end_of_stream is not asked.has_trailers


# By letters: headers, a body and trailers, in capitals if more may follow, as each side may go on at any time.
LETTERS: Final = {"H": ("headers", False), "h": ("headers", True), "B": ("body", False), "b": ("body", True)}
PARTS: Final = LETTERS | {"t": ("trailers", True)}
LEGAL: Final = {
    NONE: (r"(h|Ht?)?", r"H*(h|t)?"),
    STREAMED: (r"(h|HB*(b|t)?)?", r"H*(h|B*(b|t)?)?"),
    BUFFERED: (r"(h|H(b|t|Bt?)?)?", r"H*(h|b|t|Bt?)?"),
    PARTIAL: (r"(h|H(b|t|Bt?)?)?", r"H*(h|b|t|Bt?)?"),
    DUPLEX: (r"(h|HB*(b|t)?)?", r"H*(h|B*(b|t)?)?"),
}
LONGEST: Final = 3


def is_legal(sent: Sequence[tuple[str, str]], request: BodyMode, answer: BodyMode) -> bool:
    asked, told = ("".join(letter for of, letter in sent if of == side) for side in ("request", "response"))
    if asked and sent[0][0] == "response":
        return False
    return bool(re.fullmatch(LEGAL[request][0], asked)) and bool(re.fullmatch(LEGAL[answer][1], told))


@pytest.mark.parametrize("answer", BodyMode)
@pytest.mark.parametrize("request_mode", [BUFFERED, DUPLEX])
def test_every_illegal_message_is_refused_and_no_legal_one(
    core: Core, request_mode: BodyMode, answer: BodyMode
) -> None:
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)
    alphabet = [(side, letter) for side in ("request", "response") for letter in PARTS]
    refused = 0
    for sent in itertools.product(alphabet, repeat=LONGEST):
        gateway = Gateway(core, metrics, request_mode, answer, pool=None)
        for at, (side, letter) in enumerate(sent):
            name, ends = PARTS[letter]
            message = part(side, name, CHAT if side == "request" else b"x", ends=ends)
            if not is_legal(sent[: at + 1], request_mode, answer):
                with pytest.raises(IllegalMessage):
                    gateway.send(message)
                refused += 1
                break
            gateway.send(message)
        gateway.exchange.on_stream_closed()
    assert 0 < refused < len(alphabet) ** LONGEST


@pytest.mark.parametrize("mode", [NONE, STREAMED, 5])
def test_a_gateway_that_does_not_send_bodies_in_time_is_told_so(core: Core, mode: int) -> None:
    metrics = Metrics(core.pools.values, lambda: 0.0, lambda: 0.0)

    def gateway() -> Gateway:
        return Gateway(core, metrics, mode, NONE, pool=None)  # type: ignore[arg-type]  # 5: of a later Envoy

    with pytest.raises(IllegalMessage, match=r"request_body_mode \w+; set request_header_mode SEND, request_body"):
        gateway().send(part("request", "headers"))
    # what has no body can be decided all the same
    assert gateway().send(part("request", "headers", ends=True))


def test_a_message_of_no_kind_is_refused(core: Core) -> None:
    gateway = Gateway(core, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0), BUFFERED, NONE, pool=None)
    with pytest.raises(IllegalMessage, match="nothing is not legal"):
        gateway.send(ProcessingRequest())


def test_a_gateway_that_only_shows_its_traffic_gets_no_answer_and_starts_nothing(core: Core) -> None:
    gateway = Gateway(core, Metrics(core.pools.values, lambda: 0.0, lambda: 0.0), BUFFERED, NONE, pool=None)
    for message in Message((CHAT,), has_trailers=True).sent("request", STREAMED):
        message.observability_mode = True
        assert gateway.exchange.receive(message) == []
    assert in_some_state(core) == 0


def test_each_table_says_what_follows_every_stage() -> None:
    for tables in (REQUEST, ANSWER):
        assert set(tables) == set(BodyMode)
        assert all(set(table) == set(MessageStage) for table in tables.values())
        assert all(not table[MessageStage.END] for table in tables.values())
