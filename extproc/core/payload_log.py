# SPDX-License-Identifier: Apache-2.0
"""The payload log's events: a request or an answer with its attributes, its secrets taken out, in bounded space.

What is kept is parsed, then redacted, then written: text is never cut before it is searched. The events of a streamed
answer are merged first, since a secret may be spread over many.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash

from extproc.api.payload_log import PayloadLog, Step, compile_pattern, parse_json_path
from extproc.request.inference_request import CHAT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.core.request_record import Arrival

REQUEST: Final = "org.kubeflow.serving.inference.request"
RESPONSE: Final = "org.kubeflow.serving.inference.response"
_REDACTED: Final = "[redacted]"
_NOT_SEARCHABLE: Final = "[not searchable]"
_SAMPLES: Final = 1 << 64
# Of all requests that are open or wait to be written.
MOST_BYTES: Final = 64 << 20
# A picture or a sound is of no use in a log.
_BLOB: Final = re.compile(r"[A-Za-z0-9+/_=-]{1024,}")
_LONGEST_ATTRIBUTE: Final = 256
# Texts of which each event of a stream has the next piece.
_PIECES: Final = frozenset(
    {"content", "text", "reasoning", "reasoning_content", "thinking", "arguments", "partial_json", "delta", "refusal"}
)
# What has a text again, in tokens or, of a transcription, in words: no pattern finds a secret in it.
_TOKENS: Final = frozenset(
    {"logprobs", "prompt_logprobs", "top_logprobs", "token_ids", "bytes", "tokens", "words", *CHAT_TOKENS}
)
# A text, or its tokens.
_PROMPTS: Final = frozenset({"prompt", "input"})
# Events of a stream beyond which the rest is not merged.
_MOST_ELEMENTS: Final = 1024


class ByteCapacity:
    """Bytes of bodies that are kept at a time."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._left = most

    def try_reserve(self, size: int) -> bool:
        """Whether there was capacity for them."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def release(self, size: int) -> None:
        """They are not kept any more."""
        self._left += size


class CapturedBody:
    """One body as it comes. ``omitted``: why its content is not kept; empty if it is."""

    def __init__(self, capacity: ByteCapacity, most: int) -> None:
        self.size = 0
        self.omitted = ""
        self._capacity = capacity
        self._most = most
        self._pieces: list[bytes] = []
        self._kept = 0

    def add(self, piece: bytes) -> None:
        """The next bytes."""
        self.size += len(piece)
        if self.omitted:
            return
        if self.size > self._most:
            self.discard("too-long")
        elif not self._capacity.try_reserve(len(piece)):
            self.discard("no-capacity")
        else:
            self._pieces.append(piece)
            self._kept += len(piece)

    def discard(self, why: str = "dropped") -> None:
        """Keep nothing of it."""
        self._capacity.release(self._kept)
        self._pieces.clear()
        self._kept, self.omitted = 0, why

    @property
    def content(self) -> bytes:
        """What is kept."""
        return b"".join(self._pieces)


class PayloadCapture:
    """What is kept of one request. ``about``: attributes that both of its events have."""

    def __init__(self, log: PayloadLog, about: dict[str, str], capacity: ByteCapacity, began_s: float) -> None:
        self.log = log
        self.about = about
        self.began_s = began_s
        self.request = CapturedBody(capacity, int(log.max_bytes))
        self.answer = CapturedBody(capacity, int(log.max_bytes))
        # 0: there is no answer
        self.status = 0
        self.is_stream = False
        self.answered_s = 0.0

    @property
    def wants_answer(self) -> bool:
        """Whether its answer is to be kept."""
        return self.log.mode != "Request"

    def on_answer_headers(self, status: int, content_type: str, now: float, *, is_encoded: bool = False) -> None:
        """Headers of the answer have come. ``is_encoded``: its body is compressed, or the like."""
        self.status, self.is_stream = status, content_type.startswith("text/event-stream")
        self.answered_s = now
        if is_encoded:
            self.answer.discard("encoded")

    def discard(self) -> None:
        """Free what it holds."""
        self.request.discard()
        self.answer.discard()


def is_sampled(ticket: str, share: float) -> bool:
    """Of a request: the same in all processes."""
    return share >= 1 or xxhash.xxh3_64_intdigest(ticket.encode()) < share * _SAMPLES


def start_capture(log: PayloadLog, arrival: Arrival, ticket: str, capacity: ByteCapacity, now: float) -> PayloadCapture:
    """That of a request which has arrived."""
    capture = PayloadCapture(log, event_attributes(arrival, ticket), capacity, now)
    if log.mode != "Response":
        capture.request.add(arrival.body)
    return capture


def event_attributes(arrival: Arrival, ticket: str) -> dict[str, str]:
    """Those of all events about a request."""
    server_namespace, _, server = arrival.destination.server.partition("/")
    about = {
        "inferenceservicename": server,
        "namespace": server_namespace,
        "component": "predictor",
        "endpoint": arrival.head.path,
        "route": arrival.destination.route,
        "model": arrival.request.model,
        "tenant": arrival.caller.tenant,
        "user": arrival.caller.user,
        "requestid": arrival.head.headers.get("x-request-id", ""),
        "ticket": ticket,
    }
    return {name: value[:_LONGEST_ATTRIBUTE] for name, value in about.items() if value}


class CloudEvent(msgspec.Struct, frozen=True):
    """A CloudEvent: its attributes, and its data as JSON text; None if there is no content."""

    attributes: dict[str, str | int]
    data: bytes | None


def capture_events(capture: PayloadCapture, source: str, request_time: str, answer_time: str) -> list[CloudEvent]:
    """Those of one request: it, its answer, or both. Times are RFC 3339."""
    found = list[CloudEvent]()
    base: dict[str, str | int] = {
        "specversion": "1.0",
        "id": capture.about["ticket"],
        "source": source,
        **capture.about,
    }
    if capture.log.mode != "Response":
        attributes = {**base, "type": REQUEST, "time": request_time}
        found.append(_event(attributes, capture.request, capture.log, is_stream=False))
    if capture.wants_answer and capture.status:
        attributes = {**base, "type": RESPONSE, "time": answer_time, "status": capture.status}
        found.append(_event(attributes, capture.answer, capture.log, is_stream=capture.is_stream))
    return found


def _event(attributes: dict[str, str | int], body: CapturedBody, log: PayloadLog, *, is_stream: bool) -> CloudEvent:
    attributes["bytes"] = body.size
    omitted, data = body.omitted, None
    if not omitted and body.size:
        try:
            content = merge_stream_events(body.content) if is_stream else msgspec.json.decode(body.content)
            data = msgspec.json.encode(compile_redactor(log.redact.paths, log.redact.patterns).redact(content))
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            omitted = "not-json"
    if omitted:
        attributes["omitted"] = omitted
    if data is not None:
        attributes["datacontenttype"] = "application/json"
    return CloudEvent(attributes, data)


class Redactor:
    """Takes members at ``paths`` and whatever ``patterns`` match out of JSON values; with patterns, also tokens, in
    which they find nothing.
    """

    def __init__(self, paths: Sequence[tuple[Step, ...]], patterns: Sequence[Any]) -> None:
        self._paths = tuple(paths)
        self._patterns = tuple(patterns)

    def redact(self, value: object) -> object:
        """A copy without them. Raises RecursionError for what is nested beyond reason."""
        return self._value(value, self._paths)

    def _value(self, value: object, paths: tuple[tuple[Step, ...], ...]) -> object:
        match value:
            case dict():
                return {self._text(str(name)): self._member(str(name), one, paths) for name, one in value.items()}
            case list():
                return [self._member(str(number), one, paths) for number, one in enumerate(value)]
            case str():
                return self._text(value)
            # the number of a card may be one; true and false are none
            case int() | float() if not isinstance(value, bool):
                text = self._text(str(value))
                return value if text == str(value) else text
            case _:
                return value

    def _member(self, name: str, value: object, paths: tuple[tuple[Step, ...], ...]) -> object:
        further = list[tuple[Step, ...]]()
        for path in paths:
            is_deep, wanted = path[0]
            if is_deep:
                further.append(path)
            if wanted is None or wanted == name:
                if len(path) == 1:
                    return _REDACTED
                further.append(path[1:])
        if self._patterns and _has_tokens(name, value):
            return _NOT_SEARCHABLE
        return self._value(value, tuple(dict.fromkeys(further)))

    def _text(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(_REDACTED, text)
        return text if len(text) < 1024 else _BLOB.sub(_digest, text)


def _has_tokens(name: str, value: object) -> bool:
    """Whether the member is a text in pieces: a request's ``"logprobs": true`` is not."""
    if not value or not isinstance(value, dict | list):
        return bool(value) and isinstance(value, str) and name in CHAT_TOKENS
    return name in _TOKENS or (name in _PROMPTS and isinstance(value, list) and _are_numbers(value))


def _are_numbers(values: list[object]) -> bool:
    """Whether all are numbers, or lists of numbers."""
    return all(_are_numbers(one) if isinstance(one, list) else isinstance(one, int) for one in values)


def _digest(found: re.Match[str]) -> str:
    text = found[0].encode()
    return f"[sha256={hashlib.sha256(text).hexdigest()}, {len(text)} bytes]"


@lru_cache(maxsize=64)
def compile_redactor(paths: tuple[str, ...], patterns: tuple[str, ...]) -> Redactor:
    """The one for a route's texts, which were checked."""
    return Redactor([parse_json_path(one) for one in paths], [compile_pattern(one) for one in patterns])


def merge_stream_events(text: bytes) -> object:
    """The events of a stream as one object: pieces of text are put together, of other members the last one counts.
    Raises DecodeError, also if there is none.
    """
    merged: Any = msgspec.UNSET
    for line in text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = msgspec.json.decode(data)
        merged = event if merged is msgspec.UNSET else _merge(merged, event, "")
    if merged is msgspec.UNSET:
        raise msgspec.DecodeError("there is no event")
    return merged


def _merge(old: object, new: object, name: str) -> object:
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in new.items():
            old[key] = _merge(old[key], value, key) if key in old else value
        return old
    if isinstance(old, list) and isinstance(new, list):
        return _merge_lists(old, new)
    if isinstance(old, str) and isinstance(new, str) and name in _PIECES:
        return old + new
    return old if new is None else new


def _merge_lists(old: list[Any], new: list[Any]) -> list[Any]:
    """Elements with the same ``index`` are one; others are at the same place."""
    places = {one.get("index"): place for place, one in enumerate(old) if isinstance(one, dict)}
    for place, one in enumerate(new):
        index = one.get("index") if isinstance(one, dict) else None
        at = places.get(index, len(old)) if isinstance(index, int) else place
        if at < len(old):
            old[at] = _merge(old[at], one, "")
        elif len(old) < _MOST_ELEMENTS:
            old.append(one)
    return old
