# SPDX-License-Identifier: Apache-2.0
"""What the bodies of all APIs have in common: fields that are checked, and the request that comes of them."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.errors import BadRequest
from extproc.request.amounts import NO_MEDIA, ONE_PROMPT, Media, Priority, Prompts
from extproc.request.model import INTERNAL_FIELDS, STEERING_FIELDS, Api, InferenceRequest
from extproc.request.rewrite import span_of

if TYPE_CHECKING:
    from extproc.request.rewrite import Span

ABSENT: Final = msgspec.Raw(b"")
# Shorter bodies are rewritten as a whole: finding the span of the content would cost more than it saves.
LARGE_BYTES: Final = 32 * 1024


class Common(msgspec.Struct, gc=False):
    """Fields of every API. Those between ``cache_salt`` and ``vllm_xargs`` are what INTERNAL_FIELDS of the model lists.

    ``vllm_xargs``: vLLM passes it on as ``extra_args``, where its connectors look for ``kv_transfer_params``, too.
    """

    model: str
    stream: bool | None = None
    stream_options: dict[str, msgspec.Raw] | None = None
    # read to be checked; who goes first is not the client's to say
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


def request_of(
    api: Api,
    fields: Common,
    prompt: bytes,
    max_tokens: int | None,
    contents: Span | None,
    *,
    answers: int = 1,
    prompts: Prompts = ONE_PROMPT,
    media: Media = NO_MEDIA,
) -> InferenceRequest:
    """The request; raises BadRequest if it names no model."""
    if not fields.model and api is not Api.GENERATE:
        raise no_model()
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


def no_model() -> BadRequest:
    """The refusal of a request that names no model."""
    return BadRequest("The field 'model' is empty; name a model (GET /v1/models lists them).", param="model")


def is_given(value: msgspec.Raw) -> bool:
    """Whether a field is there and is not null."""
    view = memoryview(value)
    # its beginning alone is copied: it may be most of the body
    return len(view) > 0 and bytes(view[:5]) != b"null"


def opened(value: msgspec.Raw) -> memoryview:
    """A JSON string or list without its closing mark, so that a longer one extends it."""
    return memoryview(value)[:-1]


def large_contents(value: msgspec.Raw, body: bytes) -> Span | None:
    """Where ``value``, decoded from ``body``, stands in it; None if the body is short."""
    return span_of(body, value, value) if len(body) >= LARGE_BYTES else None


def steering_in(arguments: msgspec.Raw) -> tuple[str, ...]:
    """The steering fields among the members of an object; none if it is no object, which engines refuse.

    Raises DecodeError for what is no JSON. Other members are skipped, so nobody's millions of them take memory.
    """
    if not arguments:
        return ()
    try:
        values = _steering_values(_steering.decode(arguments))
    except msgspec.ValidationError:
        return ()
    return tuple([name for name, value in zip(STEERING_FIELDS, values, strict=True) if value])


def _internal_fields(fields: Common) -> tuple[str, ...]:
    """Nearly always none: that is found out at once."""
    values = _internal_values(fields)
    if values == _NO_INTERNAL:
        return ()
    *named, arguments = values
    found = tuple([name for name, value in zip(INTERNAL_FIELDS, named, strict=True) if value])
    return found + steering_in(arguments)


_steering: Final = msgspec.json.Decoder(
    msgspec.defstruct("_Steering", [(name, msgspec.Raw, ABSENT) for name in STEERING_FIELDS], gc=False)
)
_steering_values: Final = attrgetter(*STEERING_FIELDS)
_internal_values: Final = attrgetter(*INTERNAL_FIELDS, "vllm_xargs")
_NO_INTERNAL: Final = _internal_values(Common(model=""))
