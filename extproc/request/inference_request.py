# SPDX-License-Identifier: Apache-2.0
"""A parsed request, the same for every API, and what their bodies have in common: numbers, prompts, media, fields.

A client's numbers are bounded where they are read, so that no account ever has one that is negative, fractional or
huge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, get_args
from urllib.parse import quote

import msgspec
import numpy as np

from extproc.api.model_server import InternalField, SteeringField
from extproc.refusals import BadRequest
from extproc.request.json_rewrite import span_of
from extproc.wire_names import PLAIN_IN_PATHS, Api

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.request.json_rewrite import Span

# More than any engine's context; larger numbers are mistakes or attacks.
MOST_TOKENS: Final = 10_000_000
# As OpenAI: the most answers to one prompt.
MOST_ANSWERS: Final = 128
# Engines refuse 0, except for completions, where ``echo`` with ``max_tokens: 0`` asks for the prompt's own tokens.
OutputTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None
OutputTokensOrNone = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None
Answers = Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWERS)] | None
# What engines and the precise index hold of a token.
MOST_TOKEN_ID: Final = 2**32 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKEN_ID)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None
# What to send, by the name of a field that must be a number.
NUMBERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "max_tokens": f"a whole number from 1 to {MOST_TOKENS} (from 0 for completions)",
        "max_completion_tokens": f"a whole number from 1 to {MOST_TOKENS}",
        "max_output_tokens": f"a whole number from 1 to {MOST_TOKENS}",
        "n": f"a whole number from 1 to {MOST_ANSWERS}",
        "best_of": f"a whole number from 1 to {MOST_ANSWERS}",
        "priority": "a whole number from -2147483648 to 2147483647",
    }
)
# Tokens reserved for a part until the engine reports the prompt's. An image: OpenAI counts 765 for one of 1024 x 1024
# pixels, Qwen2.5-VL 1,369, LLaVA-1.5 576. Audio: 25 tokens a second (Qwen2-Audio) for 40 s. Video: vLLM samples 32
# frames; 300 each.
MEDIA_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"image": 1_000, "audio": 1_000, "video": 10_000})
# The fields of a part that hold media, with their kind.
_KINDS: Final = (
    ("image_url", "image"),
    ("image_embeds", "image"),
    ("image_pil", "image"),
    ("file_id", "image"),
    ("input_audio", "audio"),
    ("audio_url", "audio"),
    ("audio_embeds", "audio"),
    ("video_url", "video"),
)
# In base64, of a token of the smallest models.
_EMBEDDING_BYTES: Final = 2_048
_LIST: Final = ord("[")
# All that is no whole number from 0 on has one of them: fractions, texts, objects, true, false and null.
_MARKS_OF_OTHERS: Final = (b"-", b".", b"e", b"E", b"l", b'"', b"{")
_ZERO: Final = ord("0")
# Runs of 2, 4, 8 and 10 digits; the largest token has 10.
_DOUBLED: Final = (1, 2, 4, 2)
_tokens_decoder: Final = msgspec.json.Decoder(list[TokenId | list[TokenId]])
_NO_SPACE: Final = re.compile(rb"[^ \t\r\n]")
_list_decoder: Final = msgspec.json.Decoder(list[msgspec.Raw])
# What engines read as true: they are lenient.
_TRUE = frozenset({b"true", b'"true"', b"1"})
# Refused unless the ModelServer allows them; the others are removed.
STEERING_FIELDS: tuple[str, ...] = get_args(SteeringField)
INTERNAL_FIELDS: tuple[str, ...] = get_args(InternalField)
# In a chat, the prompt in tokens: engines read it in place of the messages.
CHAT_TOKENS: Final = ("input_ids", "prompt_token_ids", "prompt_token_ids_b64")
ABSENT: Final = msgspec.Raw(b"")
_NULL: Final = msgspec.Raw(b"null")
# Shorter bodies are rewritten as a whole: finding the span of the content would cost more than it saves.
LARGE_BYTES: Final = 32 * 1024
_members_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_SWITCH: Final = frozenset(b'"[{')
_steering: Final = msgspec.json.Decoder(
    msgspec.defstruct("_Steering", [(name, msgspec.Raw, ABSENT) for name in STEERING_FIELDS], gc=False)
)
_steering_values: Final = attrgetter(*STEERING_FIELDS)
_internal_values: Final = attrgetter(*INTERNAL_FIELDS, "vllm_xargs")


class Media(msgspec.Struct, frozen=True):
    """The parts of a prompt that are not text. ``tokens``: estimated; ``size_bytes``: how long they are in the body.
    ``replaces_text``: some are tokens or embeddings, which say what text would.
    """

    tokens: int = 0
    size_bytes: int = 0
    replaces_text: bool = False

    def plus(self, other: Media) -> Media:
        """Both together."""
        return Media(
            self.tokens + other.tokens,
            self.size_bytes + other.size_bytes,
            self.replaces_text or other.replaces_text,
        )


NO_MEDIA: Final = Media()


class _Part(msgspec.Struct, gc=False):
    """One of a message's parts: by its fields, as engines do not insist on ``type``."""

    image_url: msgspec.Raw = msgspec.Raw(b"")
    image_embeds: msgspec.Raw = msgspec.Raw(b"")
    image_pil: msgspec.Raw = msgspec.Raw(b"")
    file_id: msgspec.Raw = msgspec.Raw(b"")
    input_audio: msgspec.Raw = msgspec.Raw(b"")
    audio_url: msgspec.Raw = msgspec.Raw(b"")
    audio_embeds: msgspec.Raw = msgspec.Raw(b"")
    video_url: msgspec.Raw = msgspec.Raw(b"")
    type: msgspec.Raw = msgspec.Raw(b"")
    # of vLLM's ``prompt_embeds``
    data: msgspec.Raw = msgspec.Raw(b"")
    # of the responses API: a message within ``input``
    content: msgspec.Raw = msgspec.Raw(b"")


def media_in(contents: Sequence[msgspec.Raw], *, deepest: int = 1) -> Media:
    """The media among the parts of these contents.

    ``deepest``: how many levels of ``content`` within parts count. The responses API has one; searching each costs as
    much as reading all that is below it, so a client must not choose how many there are.
    """
    found = NO_MEDIA
    for content in contents:
        # read without a copy: most contents are plain strings, and long
        view = memoryview(content)
        if not view or view[0] != _LIST:
            continue
        try:
            parts = _parts_decoder.decode(view)
        except msgspec.DecodeError:
            # not parts: the engine reports the mistake
            continue
        for part in parts:
            if part.content and deepest:
                found = found.plus(media_in([part.content], deepest=deepest - 1))
            if part.data and part.type and msgspec.json.decode(part.type) == "prompt_embeds":
                found = found.plus(media_of_embeddings(part.data))
            for name, kind in _KINDS:
                value: msgspec.Raw = getattr(part, name)
                if value and bytes(memoryview(value)[:4]) != b"null":
                    found = found.plus(Media(MEDIA_TOKENS[kind], memoryview(value).nbytes))
    return found


class PromptListSize(msgspec.Struct, frozen=True):
    """How many prompts a field holds. ``token_ids``: how many there are if they are tokens already; 0 for text.
    ``repeated_bytes``: engines read so many bytes more of text than the body has, as a part is in several prompts.
    """

    count: int = 1
    token_ids: int = 0
    repeated_bytes: int = 0


ONE_PROMPT: Final = PromptListSize()


def count_prompts(value: msgspec.Raw, field: str) -> PromptListSize:
    """The prompts in ``prompt`` or ``input``: one text, a list of texts, a list of tokens, or a list of such lists.

    ``field``: its name. Raises BadRequest for a token that no engine's vocabulary can have.
    """
    view = memoryview(value)
    if bytes(view[:1]) != b"[":
        return ONE_PROMPT
    data = bytes(view)
    # however much white space a client writes before it
    found = _NO_SPACE.search(data, 1)
    first = b"" if found is None else found[0]
    if first == b'"':
        return PromptListSize(max(1, len(_list_decoder.decode(view))))
    # objects are other engines' forms of a prompt
    if first != b"{" and not _are_short_numbers(data):
        _check_tokens(data, field)
    if first == b"[":
        return PromptListSize(max(1, data.count(b"[") - 1), data.count(b",") + 1)
    # a list of tokens
    return PromptListSize(1, data.count(b",") + 1)


def _are_short_numbers(data: bytes) -> bool:
    """Whether JSON holds whole numbers of few digits, in lists, and nothing else: almost every list of tokens.

    It takes a fraction of the time of making the numbers.
    """
    if any(mark in data for mark in _MARKS_OF_OTHERS):
        return False
    # brackets count as digits: a number that seems too long is then decoded
    runs = np.frombuffer(data, np.uint8) >= _ZERO
    for more in _DOUBLED:
        runs = runs[:-more] & runs[more:]
    return not runs.any()


def _check_tokens(data: bytes, field: str) -> None:
    try:
        _tokens_decoder.decode(data)
    except msgspec.ValidationError:
        raise BadRequest(
            f"'{field}' must be text, or hold tokens from 0 to {MOST_TOKEN_ID}; send the ids of the model's tokenizer.",
            param=field,
        ) from None


_parts_decoder: Final = msgspec.json.Decoder(list[_Part])


class ModelPath(msgspec.Struct, frozen=True):
    """A path that names the model: ``/v2/models/NAME/versions/3/infer``. ``apis``: those that have it. ``model``: as
    ModelRoutes write it. ``version``: with what stands before it, empty if the path has none.
    """

    apis: tuple[Api, ...]
    root: str
    model: str
    version: str
    verb: str

    def for_model(self, model: str) -> str:
        """The same of another model."""
        return f"{self.root}{quote(model, safe=PLAIN_IN_PATHS)}{self.version}{self.verb}"


class FieldSpan(NamedTuple):
    """Where a field of a message stands: its length, the beginning of its value, and the end of that."""

    length_at: int
    start: int
    end: int


class GrpcModelLocation(msgspec.Struct, frozen=True):
    """Where a message of gRPC names the model. ``spans``: the fields around the name, the outermost first, and the
    name. ``has_version``: the message names a version of the model.
    """

    spans: tuple[FieldSpan, ...]
    has_version: bool


class InferenceRequest(msgspec.Struct, frozen=True):
    """A parsed request body, or a request whose path names the model.

    ``api``: None if it is of no known one, and was only searched for steering fields. ``prompt``: the text whose
    prefixes an engine caches, in the order in which a chat template writes it, so that the prompt of a longer
    conversation begins with the prompt of the shorter one. ``stream_options``: the client's, values undecoded.
    ``cache_salt``: vLLM's field; only prompts with the same salt share cached blocks. ``contents``: the byte span of a
    large body that holds its messages, prompt or input, for ``rewrite.with_changes``. ``max_output_tokens``: of each
    answer. ``answers``: how many are written, over all prompts; 0 for embeddings. ``internal_fields``: the
    INTERNAL_FIELDS that the body has. ``has_stored_prompt``: its prompt begins with one that the engine has stored, of
    unknown length. ``runs_in_background``: the engine goes on with it whether or not its client stays. ``path``: that
    names the model; the body is then not read. ``call``: the name's place in a message of gRPC, whose tensors are not
    read.
    """

    api: Api | None
    model: str
    prompt: bytes
    is_streamed: bool
    stream_options: Mapping[str, msgspec.Raw]
    max_output_tokens: int | None
    cache_salt: str | None = None
    contents: tuple[int, int] | None = None
    answers: int = 1
    prompts: PromptListSize = ONE_PROMPT
    media: Media = NO_MEDIA
    internal_fields: tuple[str, ...] = ()
    has_stored_prompt: bool = False
    runs_in_background: bool = False
    path: ModelPath | None = None
    call: GrpcModelLocation | None = None

    @property
    def is_unread(self) -> bool:
        """Whether all that is read of it is the model's name."""
        return self.path is not None or self.call is not None

    @property
    def tokens_scale_with_bytes(self) -> bool:
        """Whether the number of its prompt's tokens follows from its bytes."""
        prompts = self.prompts
        return not (prompts.token_ids or prompts.repeated_bytes or self.media.tokens or self.has_stored_prompt)

    @property
    def has_text_prompt(self) -> bool:
        """Whether its prompt is text, but for pictures and the like."""
        return not (self.prompts.token_ids or self.media.replaces_text)

    @property
    def text_bytes(self) -> int:
        """The bytes of its prompt that become tokens in proportion."""
        if self.prompts.token_ids:
            return 0
        return max(0, len(self.prompt) - self.media.size_bytes) + self.prompts.repeated_bytes

    @property
    def lacks_stream_usage(self) -> bool:
        """Whether a streamed answer will lack token usage because the client did not ask for it."""
        if not self.is_streamed or self.api is None or not self.api.spec.usage_if_asked:
            return False
        wanted = self.stream_options.get("include_usage")
        return wanted is None or bytes(wanted) not in _TRUE

    @property
    def declines_usage(self) -> bool:
        """Whether the client declines usage, or has a value there that engines may read so."""
        return "include_usage" in self.stream_options and self.lacks_stream_usage

    @property
    def reports_usage_unchanged(self) -> bool:
        """Whether its answer reports token usage without a change of the request."""
        reports = self.api is not None and self.api.spec.reports_usage and not self.runs_in_background
        return reports and not self.lacks_stream_usage

    @property
    def uses_flow_control(self) -> bool:
        """Whether it passes through flow control; not if an engine computes nothing for it that others wait for."""
        return self.api is None or self.api.spec.waits_in_queue


class CommonFields(msgspec.Struct, gc=False):
    """Fields of every API. Those between ``cache_salt`` and ``vllm_xargs`` are what INTERNAL_FIELDS of the model lists.

    ``vllm_xargs``: vLLM passes it on as ``extra_args``, where its connectors read ``kv_transfer_params``, too.
    """

    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    # decoded to be checked; clients do not choose their priority
    priority: Priority = None
    cache_salt: str | None = None
    kv_transfer_params: msgspec.Raw = ABSENT
    ec_transfer_params: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT
    data_parallel_rank: msgspec.Raw = ABSENT
    routed_dp_rank: msgspec.Raw = ABSENT
    disagg_prefill_dp_rank: msgspec.Raw = ABSENT
    disaggregated_params: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT
    lora_request: msgspec.Raw = ABSENT
    session_params: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    rid: msgspec.Raw = ABSENT
    extra_key: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT


class ChatTemplateFields(CommonFields, kw_only=True, gc=False):
    """Fields that engines hand to the chat template beside the messages."""

    documents: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT


def chat_template_texts(fields: ChatTemplateFields) -> list[msgspec.Raw]:
    """What these fields may add to the prompt, at its beginning: a template may write them anywhere.

    Arguments that are no text, list or object are switches such as ``enable_thinking``. They are left out: most change
    the prompt's end.
    """
    texts = given_values(fields.chat_template, fields.documents)
    if is_given(fields.chat_template_kwargs):
        try:
            arguments = _members_decoder.decode(fields.chat_template_kwargs)
        except msgspec.ValidationError:
            # the engine says what is wrong
            return [*texts, fields.chat_template_kwargs]
        texts += [value for value in arguments.values() if memoryview(value)[0] in _NO_SWITCH]
    return texts


def prompt_tokens_as_media(value: msgspec.Raw) -> Media:
    """Tokens that engines read in place of the prompt's text: a list, or base64 of 4 bytes each."""
    content = bytes(value)
    tokens = content.count(b",") + 1 if content[0] == _LIST else ceil(len(content) * 3 / 16)
    return Media(tokens, len(content), replaces_text=True)


def media_of_embeddings(value: msgspec.Raw) -> Media:
    """Embeddings in base64."""
    size_bytes = memoryview(value).nbytes
    return Media(ceil(size_bytes / _EMBEDDING_BYTES), size_bytes, replaces_text=True) if is_given(value) else NO_MEDIA


def make_request(
    api: Api,
    fields: CommonFields,
    prompt: bytes,
    max_tokens: int | None,
    contents: Span | None,
    *,
    answers: int = 1,
    prompts: PromptListSize = ONE_PROMPT,
    media: Media = NO_MEDIA,
) -> InferenceRequest:
    """The request; raises BadRequest if it names no model."""
    if not fields.model and api.spec.needs_model:
        raise missing_model_refusal()
    return InferenceRequest(
        api,
        fields.model,
        prompt,
        bool(fields.stream),
        fields.stream_options or {},
        max_tokens,
        fields.cache_salt,
        contents,
        answers,
        prompts,
        media,
        _internal_fields(fields),
    )


def missing_model_refusal() -> BadRequest:
    """The refusal of a request that names no model."""
    return BadRequest("The field 'model' is empty; name a model (GET /v1/models lists them).", param="model")


def is_given(value: msgspec.Raw) -> bool:
    """Whether a field is there and is not null."""
    return bool(value) and value != _NULL


def given_values(*values: msgspec.Raw) -> list[msgspec.Raw]:
    """Those of them that are there and are not null."""
    return [value for value in values if value and value != _NULL]


def json_without_closing_mark(value: msgspec.Raw) -> memoryview:
    """A JSON string or list without its closing mark, so that a longer one extends it."""
    return memoryview(value)[:-1]


def span_of_large_contents(value: msgspec.Raw, body: bytes) -> Span | None:
    """Where ``value``, decoded from ``body``, stands in it; None if the body is short."""
    return span_of(body, value, value) if len(body) >= LARGE_BYTES else None


def steering_fields_in(arguments: msgspec.Raw) -> tuple[str, ...]:
    """The steering fields among the members of an object; none if it is no object, which engines refuse.

    Raises DecodeError for what is no JSON. Other members are skipped, so millions of them take no memory.
    """
    if not arguments:
        return ()
    try:
        values = _steering_values(_steering.decode(arguments))
    except msgspec.ValidationError:
        return ()
    return tuple([name for name, value in zip(STEERING_FIELDS, values, strict=True) if value])


def _internal_fields(fields: CommonFields) -> tuple[str, ...]:
    """Nearly always none: that is found out at once."""
    values = _internal_values(fields)
    if values == _NO_INTERNAL:
        return ()
    *named, arguments = values
    found = tuple([name for name, value in zip(INTERNAL_FIELDS, named, strict=True) if value])
    return found + steering_fields_in(arguments)


_NO_INTERNAL: Final = _internal_values(CommonFields(model=""))
