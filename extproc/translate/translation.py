# SPDX-License-Identifier: Apache-2.0
"""What a process between a client and an engine of another API does with what passes it.

Chat is the hub: a request for messages becomes one for chat, and that one for responses; so do answers and events.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.refusals import BadRequest, UnknownPath
from extproc.translate import anthropic_messages, chat, json_fields, openai_responses
from extproc.translate.directive import NAMES
from extproc.translate.json_fields import DroppedFields, Malformed, Object
from extproc.translate.server_sent_events import DONE, EventReader
from extproc.wire_names import ANTHROPIC_VERSION, DEFAULT_ANTHROPIC_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.refusals import Refusal

_DIALECTS: Final[Mapping[str, _Dialect]] = MappingProxyType(
    {"chat": chat, "messages": anthropic_messages, "responses": openai_responses}
)
_PATHS: Final = {name: api.spec.paths[0] for api, name in NAMES.items()}
# What every answer has.
_CONTENT: Final = {"chat": "choices", "messages": "content", "responses": "output"}
_ANTHROPIC_BETA: Final = "anthropic-beta"
_UNFINISHED: Final = "The engine's stream ended before its answer did."


class ToChunks(Protocol):
    """An engine's events as chunks of the hub.

    ``ended``: the answer is whole. ``more_follows``: usage may come after that, until ``[DONE]``.
    """

    ended: bool
    more_follows: bool

    def chunks(self, event: Object) -> list[Object]:
        """Those that ``event`` becomes; one with ``error`` ends the answer."""
        ...


class FromChunks(Protocol):
    """Chunks of the hub as a client's events."""

    def events(self, found: Object) -> list[bytes]:
        """Those that a chunk becomes."""
        ...

    def finish(self) -> list[bytes]:
        """The end of a whole answer."""
        ...

    def fail(self, error: Object) -> list[bytes]:
        """An error; nothing follows it."""
        ...


class _Dialect(Protocol):
    """A module that has an API's translations to chat and from it."""

    def to_chat(self, request: Object, dropped: DroppedFields) -> Object: ...
    def from_chat(self, request: Object, dropped: DroppedFields) -> Object: ...
    def answer_to_chat(self, answer: Object) -> Object: ...
    def answer_from_chat(self, answer: Object) -> Object: ...
    def ToChunks(self) -> ToChunks: ...  # noqa: N802 - a class of the module
    def FromChunks(self, *, include_usage: bool) -> FromChunks: ...  # noqa: N802 - the same


class TranslatedRequest(msgspec.Struct, frozen=True):
    """A request for the engine.

    ``dropped``: dotted paths of the client's fields that the engine's API has no place for; letters, digits, ``_``,
    ``.`` and ``-`` alone. ``stream``: the answer will be events. ``include_usage``: for ``stream``.
    """

    body: bytes
    dropped: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = True


class Translation(msgspec.Struct, frozen=True):
    """From the API ``client`` to the API ``engine``, and back."""

    client: str
    engine: str

    def engine_path(self, client_path: str) -> str:
        """The engine's path; what stands before the API's own path stays, a query goes."""
        plain = client_path.partition("?")[0]
        own = _PATHS[self.client]
        if not plain.endswith(own):
            raise UnknownPath(f"{plain} is no path of the API {self.client}; use {own}.")
        return plain.removesuffix(own) + _PATHS[self.engine]

    def headers(self) -> tuple[tuple[str, str | None], ...]:
        """Request headers to set; None: to remove. Credentials and lengths are the caller's."""
        version = DEFAULT_ANTHROPIC_VERSION if self.engine == "messages" else None
        return ((ANTHROPIC_VERSION, version), (_ANTHROPIC_BETA, None))

    def translate_request(self, body: bytes, *, strict: bool) -> TranslatedRequest:
        """The engine's body. Raises BadRequest if the client's is invalid or has what would be missed; if ``strict``,
        also if anything is dropped.
        """
        client, engine, dropped = _DIALECTS[self.client], _DIALECTS[self.engine], DroppedFields()
        try:
            given = json_fields.decode_object(body)
            options = json_fields.member_object(given, "stream_options")
            found = engine.from_chat(client.to_chat(given, dropped), dropped)
            out = json_fields.encode_json(found)
        except Malformed as error:
            raise json_fields.malformed_request_refusal(error) from None
        if strict and dropped.paths:
            names = ", ".join(dropped.paths)
            raise BadRequest(f"The engines of this model have no counterpart for: {names}.", param=dropped.paths[0])
        is_stream = found.get("stream") is True
        include_usage = self.client != "chat" or options.get("include_usage") is True
        return TranslatedRequest(out, dropped.paths, is_stream, include_usage)

    def translate_answer(self, status: int, body: bytes) -> bytes:
        """The engine's whole answer or error, in the client's form. Raises UntranslatableAnswer."""
        if status >= 400:
            return self.translate_error(json_fields.engine_error(status, body))
        client, engine = _DIALECTS[self.client], _DIALECTS[self.engine]
        try:
            found = json_fields.decode_object(body)
            if isinstance(found.get("error"), dict):
                raise Malformed(json_fields.error_object(500, found)["message"])
            if status >= 300 or not isinstance(found.get(_CONTENT[self.engine]), list):
                raise Malformed(f"it has status {status}, or no {_CONTENT[self.engine]}")
            return json_fields.encode_json(client.answer_from_chat(engine.answer_to_chat(found)))
        except (Malformed, BadRequest) as error:
            raise json_fields.malformed_answer(error) from None

    def translate_error(self, error: Object) -> bytes:
        """An error in the client's form."""
        form = json_fields.anthropic_error if self.client == "messages" else json_fields.openai_error
        return json_fields.encode_json(form(error))

    def open_stream(self, *, include_usage: bool = True) -> StreamTranslator:
        """For the events of one answer. ``include_usage``: clients of chat get the chunk that has usage alone."""
        client, engine = _DIALECTS[self.client], _DIALECTS[self.engine]
        return StreamTranslator(engine.ToChunks(), client.FromChunks(include_usage=include_usage))


class StreamTranslator:
    """One streamed answer: an engine's bytes, cut anywhere, as the client's events.

    ``error``: None, or why the answer has failed; what follows then is left out.
    """

    def __init__(self, engine: ToChunks, client: FromChunks) -> None:
        self._engine = engine
        self._client = client
        self._reader = EventReader()
        self._is_over = False
        self.error: str | None = None

    @property
    def is_over(self) -> bool:
        """The client has had the end of the answer, or an error."""
        return self._is_over

    @property
    def held_bytes(self) -> int:
        """Of an engine's event that has not ended."""
        return self._reader.held_bytes

    def feed(self, piece: bytes) -> bytes:
        """The client's events that ``piece`` completes."""
        out: list[bytes] = []
        try:
            for data in () if self.is_over else self._reader.feed(piece):
                if not self.is_over:
                    self._on_data(data, out)
        except (Malformed, BadRequest) as error:
            out += self._fail(json_fields.stream_error(f"The engine's answer cannot be translated: {error}."))
        return b"".join(out)

    def finish(self, why: Refusal | None = None) -> bytes:
        """The client's last events: an error unless the answer is whole. ``why``: it is not; None: that is unknown."""
        if self._is_over:
            return b""
        if self._engine.ended:
            return b"".join(self._finish())
        error = (
            json_fields.stream_error(_UNFINISHED)
            if why is None
            else json_fields.stream_error(why.message, why.error_type, why.code)
        )
        return b"".join(self._fail(error))

    def _on_data(self, data: bytes, out: list[bytes]) -> None:
        if data == DONE:
            out.append(self.finish())
            return
        for one in self._engine.chunks(json_fields.decode_object(data)):
            if one.get("error"):
                out += self._fail(one)
                return
            out += self._client.events(one)
        if self._engine.ended and not self._engine.more_follows:
            out += self._finish()

    def _finish(self) -> list[bytes]:
        self._is_over = True
        return self._client.finish()

    def _fail(self, found: Object) -> list[bytes]:
        self._is_over = True
        error = json_fields.error_object(500, found)
        self.error = error["message"]
        return self._client.fail(error)


_TRANSLATIONS: Final[Mapping[tuple[str, str], Translation]] = MappingProxyType(
    {(client, engine): Translation(client, engine) for client in _DIALECTS for engine in _DIALECTS if client != engine}
)


def find_translation(client: str, engine: str) -> Translation | None:
    """Between two of chat, messages and responses; None if they are the same, or one of them is another API."""
    return _TRANSLATIONS.get((client, engine))
