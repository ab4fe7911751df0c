# SPDX-License-Identifier: Apache-2.0
"""Bodies of APIs in tokens: vLLM's token-in token-out API, ``/inference/v1/generate``, and its tokenizer's calls."""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.refusals import BadRequest
from extproc.request.inference_request import (
    ABSENT,
    Answers,
    CommonFields,
    InferenceRequest,
    OutputTokens,
    TokenId,
    count_prompts,
    is_given,
    json_without_closing_mark,
    make_request,
    span_of_large_contents,
    steering_fields_in,
)
from extproc.wire_names import Api


class _Sampling(msgspec.Struct, gc=False):
    """``extra_args``: where vLLM's connectors read ``kv_transfer_params``, too."""

    max_tokens: OutputTokens = None
    n: Answers = None
    extra_args: msgspec.Raw = ABSENT


class _Generate(CommonFields, kw_only=True, gc=False):
    token_ids: msgspec.Raw
    sampling_params: _Sampling
    # engines serve one model, so they do not insist on its name; behind a single pool we do not either
    model: str = ""
    # of media, whose places in ``token_ids`` are all equal
    features: msgspec.Raw = ABSENT


class _UncheckedFields(CommonFields, kw_only=True, gc=False):
    """Values are left to the engine to validate."""

    model: str = ""


class _Tokens(msgspec.Struct, gc=False):
    token_ids: list[TokenId]
    features: msgspec.Raw = ABSENT


def parse_generate(body: bytes) -> InferenceRequest:
    """Its prompt is the list of tokens as the client writes it."""
    fields = _decoder.decode(body)
    view = memoryview(fields.token_ids)
    if bytes(view[:1]) != b"[" or not bytes(view[1:-1]).strip():
        raise BadRequest("'token_ids' must be a list of at least one token; send the prompt's.", param="token_ids")
    sampling = fields.sampling_params
    request = make_request(
        Api.GENERATE,
        fields,
        b"".join((_media(fields.features), json_without_closing_mark(fields.token_ids))),
        sampling.max_tokens,
        span_of_large_contents(fields.token_ids, body),
        answers=sampling.n or 1,
        prompts=count_prompts(fields.token_ids, "token_ids"),
    )
    hidden = steering_fields_in(sampling.extra_args)
    return msgspec.structs.replace(request, internal_fields=request.internal_fields + hidden) if hidden else request


def parse_tokenize(body: bytes) -> InferenceRequest:
    """POST /tokenize: the engine computes nothing, so there is no prompt to cache and no answer to count."""
    return make_request(Api.TOKENIZE, _common.decode(body), b"", None, None, answers=0)


def parse_detokenize(body: bytes) -> InferenceRequest:
    """POST /detokenize: likewise."""
    return make_request(Api.DETOKENIZE, _common.decode(body), b"", None, None, answers=0)


def prompt_tokens_in(body: bytes) -> list[int] | None:
    """The prompt's tokens; None if some stand for media, whose content is not in them, or if there are none."""
    try:
        found = _tokens.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if _media(found.features) else found.token_ids


def _media(features: msgspec.Raw) -> memoryview:
    return memoryview(features if is_given(features) else ABSENT)


_decoder: Final = msgspec.json.Decoder(_Generate)
_common: Final = msgspec.json.Decoder(_UncheckedFields)
_tokens: Final = msgspec.json.Decoder(_Tokens)
