# SPDX-License-Identifier: Apache-2.0
"""Bodies of OpenAI's audio APIs. Engines do not report their tokens, so limits count seconds: 25 tokens each."""

from __future__ import annotations

import struct
from math import ceil
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.refusals import BadRequest
from extproc.request.inference_request import (
    ABSENT,
    INTERNAL_FIELDS,
    MOST_TOKENS,
    NUMBERS,
    CommonFields,
    InferenceRequest,
    Media,
    given_values,
    json_without_closing_mark,
    make_request,
    span_of_large_contents,
    steering_fields_in,
)
from extproc.wire_names import Api

if TYPE_CHECKING:
    from extproc.request.multipart_form import Form

# Of Qwen2-Audio; the codecs of speech models have 12 to 83.
TOKENS_PER_S: Final = 25
# Of speech: 150 words a minute, of six characters each.
_CHARACTERS_PER_S: Final = 15
_TRUE: Final = frozenset({"true", "True", "1", "on", "yes"})
_BYTES_PER_TOKEN: Final = 4
_BYTES_PER_S: Final = 8_000
# 192,000 samples of two channels of 32 bits.
_MOST_BYTES_PER_S: Final = 1_536_000
# RIFF, length, WAVEfmt, its length, kind; channels, samples a second; bytes a second, bytes of a sample; bits of one
_WAV: Final = struct.Struct("<22sHI6xH")


class _Speech(CommonFields, kw_only=True, gc=False):
    """``instructions``: how to speak. ``ref_text``: what the voice to be copied says."""

    input: msgspec.Raw
    instructions: msgspec.Raw = ABSENT
    ref_text: msgspec.Raw = ABSENT


def parse_speech(body: bytes) -> InferenceRequest:
    """POST /v1/audio/speech: its answer is as long as its text takes to be spoken."""
    request = _speech.decode(body)
    seconds = memoryview(request.input).nbytes / _CHARACTERS_PER_S
    most = min(MOST_TOKENS, ceil(seconds * TOKENS_PER_S))
    prompt = b"".join((*given_values(request.instructions, request.ref_text), json_without_closing_mark(request.input)))
    return make_request(Api.SPEECH, request, prompt, most, span_of_large_contents(request.input, body))


def parse_transcription(form: Form) -> InferenceRequest:
    """POST /v1/audio/transcriptions: its prompt is the client's text, and so much of the audio as it has tokens."""
    model, audio = form.text("model"), form.file("file")
    for name, value in (("model", model), ("file", audio)):
        if value is None:
            raise BadRequest(f"The field '{name}' is missing; it is required.", param=name)
    assert model is not None  # noqa: S101 - see above
    assert audio is not None  # noqa: S101
    tokens = ceil(TOKENS_PER_S * _seconds(audio))
    sample = bytes(audio[: _BYTES_PER_TOKEN * tokens])
    request = make_request(
        Api.TRANSCRIPTIONS,
        CommonFields(model=model, stream=form.text("stream") in _TRUE),
        (form.text("prompt") or "").encode() + sample,
        _limit(form.text("max_completion_tokens")),
        None,
        media=Media(tokens, len(sample)),
    )
    return msgspec.structs.replace(request, internal_fields=_internal_fields(form))


def _seconds(audio: memoryview) -> float:
    """By the header of a WAV file; of other formats at 64 kbit/s."""
    header = bytes(audio[:36])
    rate = _BYTES_PER_S
    if header[:4] == b"RIFF" and header[8:16] == b"WAVEfmt " and len(header) == _WAV.size:
        _, channels, samples_per_s, bits = _WAV.unpack(header)
        # a file's header cannot make seconds free of charge
        rate = min(_MOST_BYTES_PER_S, samples_per_s * channels * bits / 8) or rate
    return len(audio) / rate


def _limit(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > len(str(MOST_TOKENS)) or not 1 <= int(text) <= MOST_TOKENS:
        name = "max_completion_tokens"
        raise BadRequest(f"'{name}' must be {NUMBERS[name]}; send one, or leave the field out.", param=name)
    return int(text)


def _internal_fields(form: Form) -> tuple[str, ...]:
    """In addition to those of its name, fields that vLLM reads as JSON in one form field."""
    found = tuple([name for name in INTERNAL_FIELDS if name in form.names])
    arguments = form.text("vllm_xargs")
    if arguments is None:
        return found
    try:
        return found + steering_fields_in(msgspec.Raw(arguments.encode()))
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("'vllm_xargs' is not JSON.", param="vllm_xargs") from None


_speech: Final = msgspec.json.Decoder(_Speech)
